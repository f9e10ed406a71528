import json
from collections.abc import Callable
from pathlib import Path

import pytest

CONFIG = """\
seed: 3
data: {name: digits}
partition: {name: label_skew, clients: 4}
model: {name: mlp}
algorithm: {name: pacfl}
clustering: {threshold: 3.5}
"""
ROUNDS = """\
round,seconds,clients,clusters,train_loss,accuracy_mean,accuracy_weighted,accuracy_median,accuracy_worst10,\
accuracy_best10,accuracy_var,loss_mean,ari,bytes_up,bytes_down
0,2.0,2,2,2.0,60.0,61.0,62.0,40.0,80.0,200.0,1.5,1.0,100,200
1,1.0,2,2,1.5,,,,,,,,1.0,100,200
2,1.0,2,2,1.2,90.0,88.0,91.0,70.0,100.0,150.0,0.8,1.0,100,200
3,1.5,2,2,1.1,85.0,86.0,87.0,65.0,99.0,120.0,0.7,0.5,100,200
4,1.0,2,2,1.0,,,,,,,,0.5,100,200
"""
CLIENTS = """\
client,n,group,cluster,accuracy_last,accuracy_best,best_round,test_samples
0,10,0,0,65.0,70.0,2,20
1,10,0,0,99.0,99.0,3,20
2,10,1,5,88.0,100.0,2,20
3,10,0,5,88.0,91.0,2,20
"""
CLUSTERS = {
    "timeline": [
        {
            "round": -1,
            "labels": [0, 0, 5, 5],
            "n_clusters": 2,
            "ari": 1.0,
            "curve": {"threshold": [0.0, 1.0, 3.0, 9.0], "n_clusters": [4, 3, 2, 1]},
        }
    ],
    "groups": [0, 0, 1, 0],
}
COMMUNICATION = """\
round,tier,direction,kind,bytes
-1,client_lps,up,signature,5000
0,client_lps,up,model,1000
0,client_lps,down,model,2000
1,lps_gps,up,model,300
"""
FILES = ("config.yaml", "environment.json", "rounds.csv", "clients.csv", "clusters.json", "communication.csv")


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a small complete run directory of the given name."""

    def make(name: str = "run-1") -> Path:
        path = tmp_path / name
        path.mkdir(parents=True)
        contents = (
            CONFIG, json.dumps({"python": "3.11", "packages": {"torch": "2.13.0"}}), ROUNDS, CLIENTS,
            json.dumps(CLUSTERS), COMMUNICATION,
        )  # fmt: skip
        for file, content in zip(FILES, contents, strict=True):
            (path / file).write_text(content)
        return path

    return make


@pytest.fixture
def run_dir(make_run: Callable[[str], Path]) -> Path:
    return make_run("run-1")

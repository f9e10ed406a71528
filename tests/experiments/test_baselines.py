"""experiments/baselines/table.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

from rayfl.errors import ConfigError

BASELINES = Path(__file__).resolve().parents[2] / "experiments" / "baselines"
TINY = ["execution.backend=inline", "output.report=false", "output.tensorboard=false"]
PLAN = """
config: digits-demo
settings: [rounds=1, training.epochs=1]
seeds: 0-1
methods:
  FedAvg: {algorithm: fedavg, settings: [evaluation.finetune_epochs=1], paper: 77.3}
  Per-FedAvg: {algorithm: per_fedavg, settings: [algorithm.beta=0.02, evaluation.finetune_epochs=0]}
  IFCA (2): {algorithm: ifca, settings: [algorithm.clusters=2], paper: 97.2}
  IFCA (3): {algorithm: ifca, settings: [algorithm.clusters=3]}
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("baselines_table", BASELINES / "table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["baselines_table"] = module  # pydantic looks annotations up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    return path


def test_methods_with_settings_of_their_own_stand_in_a_table_beside_the_papers_figures(
    script: ModuleType, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = [str(plan), "--out", str(out), *TINY]
    assert script.main([*command, "--only", "FedAvg; IFCA (3)", "--seeds", "1"]) == 0
    part = pd.read_csv(out / "runs.csv")
    assert part[["algorithm", "seed"]].values.tolist() == [["FedAvg", 1], ["IFCA (3)", 1]]

    assert script.main(command) == 0
    runs = pd.read_csv(out / "runs.csv")
    assert runs.algorithm.tolist() == ["FedAvg", "Per-FedAvg", "IFCA (2)", "IFCA (3)"] * 2
    assert runs.seed.tolist() == [0] * 4 + [1] * 4
    models = (runs.bytes_down / runs.bytes_up)[runs.algorithm.str.startswith("IFCA")]
    assert models.tolist() == [2, 3, 2, 3]  # clients download them all and send one
    # Those of before were not run again, and are the same runs.
    again = runs[(runs.seed == 1) & runs.algorithm.isin(["FedAvg", "IFCA (3)"])]
    assert again.path.tolist() == part.path.tolist()
    assert len([path for path in out.iterdir() if path.is_dir()]) == 8

    table = pd.read_csv(out / "table.csv", index_col=0)
    first, second = runs.finetuned_accuracy_mean[runs.algorithm == "FedAvg"]
    np.testing.assert_allclose(table.finetuned_accuracy_mean["FedAvg"], (first + second) / 2)
    assert np.isnan(table.finetuned_accuracy_mean["Per-FedAvg"])
    assert table.paper.fillna(-1).tolist() == [77.3, -1, 97.2, -1]
    text = (out / "table.md").read_text()
    assert "| 77.30 |" in next(line for line in text.splitlines() if line.startswith("| FedAvg"))
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("written", "arguments", "words"),
    [
        (PLAN, ["--only", "FedAvgg"], "--only: no method 'FedAvgg'; did you mean 'FedAvg'"),
        (PLAN.replace("algorithm.clusters=3", "algorithm.clusters=x"), [], "IFCA (3): algorithm.clusters"),
        (PLAN.replace("paper", "papier"), [], "methods.FedAvg.papier"),
        ("methods: [", [], "not YAML"),
    ],
)
def test_mistakes_are_one_line(
    script: ModuleType,
    written: str,
    arguments: list[str],
    words: str,
    plan: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan.write_text(written)
    assert script.main([str(plan), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


def test_the_table_of_the_thesis_can_be_run_as_it_stands(script: ModuleType) -> None:
    read = script.read(BASELINES / "label_skew_20.yaml")
    made = script.rows(read, [0], [], [])
    by_label = {row.label: row.config for row in made}
    partitions = {row.config.partition.model_dump_json() for row in made}
    assert len(partitions) == 1
    assert by_label["PACFL (2)"].clustering.threshold is None
    assert by_label["Per-FedAvg"].training.momentum == 0
    assert {row.config.training.participation for row in made} == {0.1}
    # 30 rounds of 10 clients, or 3 of all 100: the same local work, of 2 epochs each.
    assert by_label["SOLO, same work"].rounds * 100 == by_label["FedAvg"].rounds * 10
    with pytest.raises(ConfigError, match="rounds"):
        script.rows(read, [0], ["CFL"], ["rounds=0"])


def test_the_thesis_hyper_parameters_can_be_run_as_they_stand(script: ModuleType) -> None:
    """Tables 3.19 and 3.20: momentum 0.9 for the global methods, 0.5 and the rate 0.01 for the others."""
    made = script.rows(script.read(BASELINES / "thesis_fmnist.yaml"), [0], [], [])
    training = {row.config.algorithm.name: row.config.training for row in made}
    assert {each.epochs for each in training.values()} == {10}
    assert {each.batch_size for each in training.values()} == {10}
    assert {each.weight_decay for each in training.values()} == {0}
    assert {row.config.rounds for row in made} == {200}
    momenta = {name: each.momentum for name, each in training.items()}
    of_all = dict.fromkeys(("fedavg", "fedprox", "fednova", "scaffold"), 0.9)
    of_each = dict.fromkeys(("solo", "lg_fedavg", "ifca", "cfl", "pacfl"), 0.5)
    assert momenta == {**of_all, **of_each, "per_fedavg": 0}
    tuned = {*of_all, "cfl"}
    rates = {row.config.training.lr for row in made if row.config.algorithm.name not in tuned}
    assert rates == {0.01}
    for name in tuned:
        assert {row.config.training.lr for row in made if row.config.algorithm.name == name} == {0.01, 0.001}

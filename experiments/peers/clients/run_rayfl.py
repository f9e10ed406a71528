"""FedAvg in rayfl on Ray, with the user's own networks and data."""

import os
import sys
from typing import ClassVar, Literal

import numpy as np

import rayfl
from rayfl.models import Model
from rayfl.models.lstm import Lstm
from rayfl.models.module import OwnModule

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
import networks
from shared import DEVIATION, MEAN, finished, load_task, round_done


def arrays():
    """Training images and labels; a few of them also as test images."""
    task = load_task()
    x, y = task.arrays()
    if not task.sizes:
        return x, y, x[:100], y[:100]
    client = np.repeat(np.arange(task.clients), [task.count(c) for c in range(task.clients)])
    return {
        "x_train": x,
        "y_train": y,
        "client_train": client,
        "x_test": x[:100],
        "y_test": y[:100],
        "client_test": client[:100],
    }


class Words(Model):
    """The transformer, which rayfl does not have; ``tokens`` tells rayfl that it takes words."""

    name: Literal["words"] = "words"
    tokens: ClassVar[bool] = True
    layers: ClassVar = {
        "embedding": ("embedding", "position"),
        "layers": ("layers",),
        "last": ("last",),
    }

    def build(self, shape, classes):
        return networks.Transformer(shape, classes)

    def example(self, shape, classes, count, rng):
        return Lstm().example(shape, classes, count, rng)


def main(algorithm="fedavg", network="build", models=1, **sections):
    task = load_task()
    partition = {"name": "iid", "clients": task.clients, "validation": 0.0, "test_samples": 1}
    if len(task.shape) == 1:
        data = {"name": "ag_news", "length": task.shape[0], "vocabulary": task.classes - 2}
        model = Lstm() if task.network == "lstm" else Words()
    else:
        scale = {"mean": [MEAN] * task.shape[0], "std": [DEVIATION] * task.shape[0]}
        data = {"name": "python", "target": f"{__file__}:arrays", "classes": task.classes, "normalise": scale}
        if task.sizes:
            partition = {"name": "column", "column": "client", "validation": 0.0}
        model = OwnModule(target=f"{HERE}/networks.py:{network}", kwargs={"name": task.network})
    result = rayfl.run(
        {
            "rounds": task.rounds,
            "algorithm": algorithm,
            **sections,
            "data": data,
            "partition": partition,
            "training": {
                "participation": task.cohort / task.clients,
                "epochs": task.epochs,
                "batch_size": task.batch_size,
                "lr": task.lr,
                "momentum": task.momentum,
            },
            "evaluation": {"every": task.rounds},
            "output": {"root": os.path.join(task.folder, "runs"), "report": False},
        },
        model=model,
        on_event=lambda event: isinstance(event, rayfl.RoundDone) and round_done(),
    )
    finished(tensor for c in range(models) for tensor in result.model(cluster=c).state_dict().values())


if __name__ == "__main__":
    main()

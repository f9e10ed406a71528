"""FedAvg in fluke, from Python as its tutorials do; it trains one client after another in one process.

After ``tutorials/fluke_quick_api.ipynb`` and ``fluke_custom_dataset.ipynb`` of
https://github.com/makgyver/fluke: data loaders by client, ``DataSplitter``, ``FedAVG`` and ``run``.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import torchvision_shim  # noqa: F401, I001

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.utils import FederationObserver

from networks import build
from shared import finished, load_task, round_done


class RoundDone(FederationObserver):
    def end_round(self, round):
        round_done()


def main(method=FedAVG, client=(), server=()):
    task = load_task()
    torch.set_num_threads(int(os.environ["PEERS_THREADS"]))
    env = FlukeENV()
    env.set_seed(42)
    env.set_device("cpu")
    env.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)

    loaders = [
        FastDataLoader(
            *map(torch.from_numpy, task.client(number)),
            num_labels=task.classes,
            batch_size=task.batch_size,
            shuffle=True,
        )
        for number in range(task.clients)
    ]
    splitter = DataSplitter(
        DummyDataContainer(loaders, [None] * task.clients, None, task.classes), distribution="iid"
    )
    hyper_params = DDict(
        model=build(task.network, task.shape, task.classes),
        client=DDict(
            batch_size=task.batch_size,
            local_epochs=task.epochs,
            persistency=False,  # momentum starts from zero in each round, as in the other systems
            loss=torch.nn.CrossEntropyLoss,
            optimizer=DDict(name="SGD", lr=task.lr, momentum=task.momentum),
            scheduler=DDict(name="StepLR", gamma=1, step_size=1),
            **dict(client),
        ),
        server=DDict(weighted=True, **dict(server)),
    )
    algorithm = method(task.clients, splitter, hyper_params)
    algorithm.set_callbacks(RoundDone())
    algorithm.run(task.rounds, task.cohort / task.clients)
    finished(algorithm.server.model.state_dict().values())


if __name__ == "__main__":
    main()

"""CFLA's own IFCA and FeSEM on Fashion-MNIST: its script for MNIST, with other images.

    $PEERS_HOME/cfla/bin/python experiments/peers/clients/cfla_table.py fashion_mnist.npz --rounds 10

runs ``run_ifca_experiment`` and ``run_fesem_experiment`` of ``cfla/experiments/scripts`` as they are, and
prints the mean and the standard deviation of the clients' accuracy after the last round, as in CFLA's table.
The file contains ``x_train`` (n, 28, 28), ``y_train``, ``x_test`` and ``y_test``, as rayfl keeps it in
``$RAYFL_DATA``.

``--starts different`` starts each cluster from a different random model; CFLA starts all from the same one.
"""

import argparse
import contextlib
import io
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import torchvision_shim  # noqa: F401, I001

import numpy as np
import torch
from cfla.experiments.scripts import run_all_mnist
from cfla.experiments.scripts.fesem import run_fesem_experiment
from cfla.experiments.scripts.ifca import run_ifca_experiment
from cfla.framework.server.server_fesem import ServerFeSEM
from cfla.framework.server.server_ifca import ServerIFCA


def images(path):
    arrays = np.load(path)

    class Images(torch.utils.data.Dataset):
        def __init__(self, root, download, train, transform):
            part = "train" if train else "test"
            self.x = arrays[f"x_{part}"].reshape(-1, 28, 28)
            self.targets = torch.from_numpy(arrays[f"y_{part}"].astype(np.int64).ravel())
            self.transform = transform

        def __len__(self):
            return len(self.x)

        def __getitem__(self, index):
            return self.transform(self.x[index]), int(self.targets[index])

    return Images


def start_apart(server):
    original = server.set_clients

    def set_clients(self, clients):
        original(self, clients)
        self.cluster_centers = [type(self.global_model)().state_dict() for _ in range(self.num_clusters)]

    server.set_clients = set_clients


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", type=Path)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3, help="number of runs, from CFLA's seed 2026 on")
    parser.add_argument("--starts", choices=["equal", "different"], default="equal")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run_all_mnist._DATASET_CONFIGS["mnist"]["cls"] = images(options.images)
    if options.starts == "different":
        start_apart(ServerIFCA)
        start_apart(ServerFeSEM)
    for name, run in (("IFCA", run_ifca_experiment), ("FeSEM", run_fesem_experiment)):
        for seed in range(2026, 2026 + options.seeds):
            with tempfile.TemporaryDirectory() as folder:
                with contextlib.redirect_stdout(io.StringIO()):
                    run(base_seed=seed, nb_rounds=options.rounds, output_dir=folder)
                file = next(Path(folder).glob("*/server_metrics.csv"))
                _, mean, deviation, _ = map(float, file.read_text().split()[-1].split(","))
            print(f"{name}, seed {seed}: {100 * mean:.1f} ± {100 * deviation:.1f} %", flush=True)


if __name__ == "__main__":
    main()

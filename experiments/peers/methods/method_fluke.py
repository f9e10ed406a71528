"""The methods in fluke."""

import os
import sys

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [HERE, os.path.join(HERE, "clients")]
import run_fluke
from fluke.algorithms.fedavgm import FedAVGM
from fluke.algorithms.fednova import FedNova
from fluke.algorithms.fedopt import FedOpt
from fluke.algorithms.fedprox import FedProx
from fluke.algorithms.scaffold import SCAFFOLD
from shared import load_task


def main():
    task = load_task()
    s = task.settings
    if task.method == "fedprox":
        run_fluke.main(FedProx, client={"mu": s["mu"]})
    elif task.method == "scaffold":
        run_fluke.main(SCAFFOLD)
    elif task.method == "fednova":
        run_fluke.main(FedNova)
    elif task.method == "fedavgm":
        run_fluke.main(FedAVGM, server={"momentum": s["beta"]})
    elif task.method == "fedadam":
        server = {"mode": "adam", "lr": s["lr"], "beta1": s["beta1"], "beta2": s["beta2"], "tau": s["tau"]}
        run_fluke.main(FedOpt, server=server)


if __name__ == "__main__":
    main()

"""The methods in rayfl."""

import os
import sys

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [HERE, os.path.join(HERE, "clients")]
import run_rayfl
from shared import load_task

NAMES = {"lr": "server_lr"}


def main():
    task = load_task()
    settings = {NAMES.get(name, name): value for name, value in task.settings.items()}
    if task.method == "fedprox":
        run_rayfl.main("fedavg", local={"name": "fedprox", **settings})
    elif "clusters" in settings:
        name = task.method.partition("_")[0]
        run_rayfl.main({"name": name, **settings}, network="fresh", models=settings["clusters"])
    else:
        run_rayfl.main({"name": task.method, **settings})


if __name__ == "__main__":
    main()

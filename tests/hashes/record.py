"""Record the hash of the final models of many short runs: every preset, and every method on digits.

::

    python tests/hashes/record.py                    # record all runs in table.json
    python tests/hashes/record.py pacfl-fmnist ...   # record these only
    python tests/hashes/record.py --print            # print the hashes, and what differs from table.json

``test_hashes.py`` compares the same runs with the table, so that a change of results does not pass unseen.
Whoever changes results on purpose records the table again and says why in the commit message.

The last bits of float32 training depend on the kernels that the libraries choose for the CPU. So the runs are
made in a process of their own whose environment (:data:`PORTABLE`) makes PyTorch, MKL, oneDNN, OpenBLAS,
NumPy, the C library and Numba take kernels that every x86-64 CPU has. The table holds for the versions of the
libraries that it names (those of ``constraints.txt``) and for x86-64. It was recorded on an Intel CPU with
AVX-512; three of the runs had the same hashes on an AMD EPYC that qemu emulated.

The datasets are made here from scikit-learn's digits, so that nothing need be downloaded: small, with the
shapes and the numbers of classes of the real ones, and not meant to be learnt.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TABLE = HERE / "table.json"
VERSIONS = ("torch", "numpy", "scipy", "scikit-learn", "numba", "llvmlite", "umap-learn")

PORTABLE = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OPENBLAS_CORETYPE": "Prescott",
    "NPY_DISABLE_CPU_FEATURES": "SSE42 AVX F16C FMA3 AVX2 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL "
    "AVX512_ICL AVX512_SPR",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2_Usable,-AVX2,-FMA_Usable,-FMA,-FMA4_Usable,-FMA4",
    "NUMBA_CPU_NAME": "x86-64",
    "NUMBA_CPU_FEATURES": "",
    "OMP_NUM_THREADS": "1",
}

CLASSES = {
    "fashion_mnist": (10, (28, 28)),
    "cifar10": (10, (3, 32, 32)),
    "usps": (10, (16, 16)),
    "emnist_letters": (26, (28, 28)),
    "emnist_balanced": (47, (28, 28)),
}
"""The made datasets: number of classes, shape of an image."""


def cases() -> dict[str, dict[str, Any]]:
    """The settings of all runs by name: presets by their own, methods on digits as ``digits/<method>``."""
    from rayfl.config import load, presets
    from tests.runs import METHODS, TASKS

    digits = {
        "rounds": 3,
        "seed": 3,
        "partition": {"name": "tasks", "tasks": TASKS, "foreign": 0.05},
        "model": {"name": "mlp", "hidden": [16]},
        "training": {"epochs": 2, "batch_size": 10, "lr": 0.05},
        "execution": {"block_size": 2},
    }
    found = {name: shortened(load(name).to_dict()) for name in presets()}
    for method, settings in METHODS.items():
        found[f"digits/{method}"] = {**digits, "algorithm": method, **settings}
    return found


def shortened(settings: dict[str, Any]) -> dict[str, Any]:
    """A preset of a few clients and rounds; what is not about size stays as it is."""
    partition, training = settings["partition"], settings["training"]
    settings["rounds"] = 2
    settings["evaluation"]["every"] = 1
    training["epochs"] = min(2, training["epochs"])  # Sub-FedAvg compares two
    if training["participation"] < 1:
        training["participation"] = 0.4
    tasks = partition.get("tasks", ())
    for part in (partition, *tasks):
        for key, most in (("clients", 2 if tasks else 12), ("samples", 30), ("min_samples", 10)):
            if part.get(key) is not None:
                part[key] = min(most, part[key])
    if tasks:
        partition["clients"] = 2 * len(tasks)
    if partition.get("clients_per_domain"):
        partition["clients_per_domain"] = [3 for _ in partition["clients_per_domain"]]
    if settings["data"]["name"] == "leaf":
        settings["data"]["folder"] = "leaf"  # within the folder of the made datasets, where the run is made
    if settings["data"]["name"] == "ag_news":
        settings["data"]["test_size"] = None
    return settings


def make_datasets(folder: Path) -> None:
    """Small datasets under the names of the real ones: npz files, AG News and LEAF's FEMNIST."""
    for name, (classes, shape) in CLASSES.items():
        parts = {}
        for part, count in (("train", 600), ("test", 200)):
            parts[f"x_{part}"], parts[f"y_{part}"] = _images(count, classes, shape)
        np.savez(folder / f"{name}.npz", **parts)
    (folder / "ag_news").mkdir()
    for part, count in (("train", 400), ("test", 100)):
        with (folder / "ag_news" / f"{part}.csv").open("w", newline="") as file:
            for i in range(count):
                words = [f"w{(i * 7 + j * j * (i % 4 + 1)) % 97}" for j in range(25)]
                csv.writer(file).writerow([i % 4 + 1, "Title", " ".join(words)])
    for part, count in (("train", 20), ("test", 5)):
        users = [f"f{k:04d}" for k in range(20)]
        x, y = _images(count * len(users), 62, (784,))
        mine = {user: np.arange(k, len(y), len(users)) for k, user in enumerate(users)}
        data = {user: {"x": (x[own] / 255).tolist(), "y": y[own].tolist()} for user, own in mine.items()}
        content = {"users": users, "num_samples": [count] * len(users), "user_data": data}
        (folder / "leaf" / part).mkdir(parents=True)
        (folder / "leaf" / part / "all.json").write_text(json.dumps(content))


def _images(count: int, classes: int, shape: tuple[int, ...]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """``(count, *shape)`` images and labels: ``k`` shows the digit ``k % 10`` rolled by ``k // 10``."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    of = [np.flatnonzero(digits.target == digit) for digit in range(10)]
    side = 28 if len(shape) == 1 else shape[-1]
    labels = np.arange(count) % classes
    images = np.zeros((count, side, side), np.uint8)
    for i, label in enumerate(labels.tolist()):
        own = of[label % 10]
        small = (digits.images[own[(i // classes) % len(own)]] * 15).astype(np.uint8)
        large = np.kron(small, np.ones((side // 8, side // 8), np.uint8))
        images[i, : len(large), : len(large)] = large
        images[i] = np.roll(images[i], label // 10, 1)
    if len(shape) == 3:
        images = np.stack([np.roll(images, channel, 1) for channel in range(shape[0])], 1)
    return images.reshape(count, *shape), labels


def hashes(names: Iterable[str]) -> dict[str, str]:
    """``models_sha256`` of the named runs, made in this process."""
    from rayfl.api import run

    known = cases()
    found = {}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        make_datasets(Path(folder))
        os.environ["RAYFL_DATA"] = folder
        os.chdir(folder)
        try:
            for name in names:
                settings = known[name]
                settings["execution"] = {**settings.get("execution", {}), "backend": "inline"}
                settings["output"] = {
                    "root": str(Path(folder) / "runs"),
                    "report": False,
                    "tensorboard": False,
                    "checkpoint_every": 0,
                }
                found[name] = str(run(settings).summary["models_sha256"])
                print(name, file=sys.stderr)
        finally:
            os.chdir(before)
    return found


def portable(names: Iterable[str]) -> dict[str, str]:
    """As :func:`hashes`, in a process that takes the kernels which every x86-64 CPU has."""
    command = [sys.executable, str(Path(__file__).resolve()), "--here", *names]
    environment = {**os.environ, **PORTABLE, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def surroundings() -> dict[str, str]:
    """What the hashes depend on: the machine's instruction set and the versions of the libraries."""
    return {"machine": platform.machine().lower(), **{name: version(name) for name in VERSIONS}}


def read_table() -> dict[str, Any]:
    """The recorded table: ``surroundings`` and ``hashes``."""
    return dict(json.loads(TABLE.read_text())) if TABLE.is_file() else {"surroundings": {}, "hashes": {}}


def differences(found: Mapping[str, str], recorded: Mapping[str, str]) -> list[str]:
    """Names of the runs whose hash is another one, or was not recorded."""
    return [name for name, value in found.items() if recorded.get(name) != value]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="runs; all if left out")
    parser.add_argument("--print", action="store_true", help="print, and leave the table as it is")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.here:
        print(json.dumps(hashes(options.names)))
        return
    known = list(cases())
    unknown = set(options.names) - set(known)
    if unknown:
        parser.error(f"no run named {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    found = portable(options.names or known)
    table = read_table()
    changed = differences(found, table["hashes"])
    for name in found if options.print else changed:
        print(found[name][:12], name, "(differs)" if options.print and name in changed else "")
    if options.print:
        return
    merged = {**table["hashes"], **found}
    table = {
        "surroundings": surroundings(),
        "hashes": {name: merged[name] for name in known if name in merged},
    }
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    print(f"{len(changed)} of {len(found)} hashes are new in {TABLE}")


if __name__ == "__main__":
    main()

"""Correctness: the same tiny federation in all systems, and the largest deviation of their final weights.

    python experiments/peers/agree.py                      # systems that are installed
    python experiments/peers/agree.py --systems flwr pfl --write
    python experiments/peers/agree.py --only methods --methods ifca fedsem

FedAvg: four clients take part in each of three rounds of three epochs, with momentum 0.5. A client's images
are one batch, so that the order in which they are shuffled does not matter. The client scripts are the timed
ones.

Other methods: four clients, three rounds of two epochs, batches of 8. A client's images are copies of one
image, so that the order does not matter although clients take several steps. The scripts are those of
``methods/``; ``method_plain.py`` implements the methods as in their papers. IFCA is compared from two given
models, with clients of 16 and of 8 to 32 images, and from the models with which a system starts by itself.

``--write`` writes the whole page ``results/agreement.md``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import frame
import numpy as np
import systems
import tasks
from measure import environment
from shared import Task

from rayfl.models.flat import ModelSpec
from rayfl.models.module import OwnModule

HERE = Path(__file__).parent / "methods"

CASES: Mapping[str, tuple[int, ...]] = {"24 images each": (24, 24, 24, 24), "8 to 24 images": (8, 12, 20, 24)}
"""Numbers of images of the four clients."""


@dataclass(frozen=True)
class Method:
    """A method other than FedAvg.

    Attributes:
        title: for the table.
        settings: of the method, in the paper's symbols.
        sizes: images of the clients.
        systems: those that implement it.
    """

    title: str
    settings: Mapping[str, float]
    sizes: tuple[int, ...]
    systems: tuple[str, ...]


_EQUAL, _UNEQUAL = (16, 16, 16, 16), (8, 16, 24, 32)

METHODS: Mapping[str, Method] = {
    "fedprox": Method("FedProx", {"mu": 1.0}, _UNEQUAL, ("rayfl", "flwr", "pfl", "fedjax", "fluke")),
    "scaffold": Method("SCAFFOLD", {}, _EQUAL, ("rayfl", "pfl", "fluke")),
    "fednova": Method("FedNova", {}, _UNEQUAL, ("rayfl", "fluke")),
    "fedavgm": Method("FedAvgM", {"beta": 0.9}, _UNEQUAL, ("rayfl", "flwr", "pfl", "fedjax", "fluke")),
    "fedadam": Method(
        "FedAdam",
        {"beta1": 0.9, "beta2": 0.99, "tau": 1e-3, "lr": 0.01},
        _UNEQUAL,
        ("rayfl", "flwr", "pfl", "fedjax", "fluke"),
    ),
    "ifca": Method("IFCA", {"clusters": 2}, _EQUAL, ("rayfl", "fedjax", "cfla")),
    "ifca_unequal": Method("IFCA, unequal clients", {"clusters": 2}, _UNEQUAL, ("rayfl", "fedjax", "cfla")),
    "ifca_own": Method("IFCA, own start", {"clusters": 2}, _EQUAL, ("rayfl", "cfla")),
    "fedsem": Method("FeSEM", {"clusters": 2}, _EQUAL, ("rayfl", "cfla")),
}

WHY: Mapping[tuple[str, str], tuple[str, str]] = {
    ("scaffold", "pfl"): (
        "sign",
        "`algorithm/scaffold.py` adds `model_diff / (K lr)` to a client's control variate, and `model_diff` "
        "is `y - x`, where option II has `x - y`: the variate points the other way",
    ),
    ("fednova", "fluke"): (
        "models",
        "`algorithms/fednova.py` averages models, not updates, with weights that sum to more than 1 where "
        "clients take different numbers of steps: all weights of the network grow",
    ),
    ("fedavgm", "fluke"): (
        "late",
        "`algorithms/fedavgm.py` fills the momentum with zeros in the first round and does not add that "
        "round's update: the first round is lost",
    ),
    ("fedadam", "fluke"): (
        "lr twice",
        "`algorithms/fedopt.py` keeps the server's learning rate where `server.py` looks for the weight of "
        "the clients' mean, so that the update is multiplied by it before Adam sees it; and `v` starts at 0",
    ),
    ("fedadam", "pfl"): ("bias", "the server's step is PyTorch's Adam, with bias correction, and `v` from 0"),
    ("fedadam", "fedjax"): ("bias", "the server's step is Optax' Adam, with bias correction, and `v` from 0"),
    ("fedadam", "flwr"): (
        "next bias",
        "`strategy/fedadam.py` corrects the bias, which the paper does not do, with the exponent of "
        "the next round, and `v` from 0",
    ),
    ("ifca_unequal", "cfla"): (
        "unweighted",
        "`common/utils.py`, `average_state_dict`, averages the models of a cluster without weights. So does "
        "the paper, whose clients have equally many samples; FedAvg, FedJAX and rayfl weight by samples",
    ),
    ("ifca_own", "cfla"): (
        "equal starts",
        "`server_ifca.py`, `set_clients`, starts all models from copies of one. All clients find the same "
        "losses, take the first model, and keep it: this is FedAvg. The paper starts from different points",
    ),
    ("fedsem", "cfla"): (
        "equal starts",
        "`server_fesem.py`, `set_clients`, starts all centers from copies of one. All trained models are "
        "equally far from them and join the first: this is FedAvg",
    ),
}
"""Why a system differs by more than rounding from the paper, by method and system.

The values are a variant of ``methods/method_plain.py`` with that difference, and the reason in the source.
"""

ROUNDING = 1e-5
"""Deviations below come from the order of sums in float32."""

Weights = list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]


def tiny(folder: Path, sizes: tuple[int, ...]) -> Path:
    """Write the federation to a folder: random images of 8 x 8, an MLP 64-32-10, three rounds."""
    task = Task("agree", "mlp32", (1, 8, 8), 10, 4, sum(sizes) // 4, 4, 3, max(sizes), 0.1, 0.5, "", 3, sizes)
    tasks.write(tasks.Workload(task, "", ""), folder)
    return folder


def several_steps(folder: Path, name: str) -> Path:
    """Write the federation of a method: a client has copies of one image; an MLP 64-32-10, three rounds."""
    method = METHODS[name]
    task = Task(
        *("agree", "mlp32", (1, 8, 8), 10, 4, sum(method.sizes) // 4, 4, 2, 8, 0.1, 0.0, "", 3, method.sizes),
        method=name,
        settings=method.settings,
    )
    tasks.write(tasks.Workload(task, "", ""), folder)
    first = np.repeat(np.cumsum([0, *method.sizes[:-1]]), method.sizes)
    for array in ("x.npy", "y.npy"):
        np.save(folder / array, np.load(folder / array)[first])
    if "clusters" in method.settings:
        np.save(folder / "starts.npy", starts(int(method.settings["clusters"])))
    return folder


def starts(count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """The weights of the first models ``(count, P)``: those that rayfl draws."""
    model = OwnModule(target=f"{HERE.parent / 'networks.py'}:fresh", kwargs={"name": "mlp32"})
    spec = ModelSpec.of(model, (1, 8, 8), 10, seed=0)
    return np.stack([spec.initial(index=index) for index in range(count)])


def final(
    system: systems.System,
    folder: Path,
    script: Path | None = None,
    more: Mapping[str, str] | None = None,
) -> Weights | str:
    """The weights after three rounds, in the order of the layers; or the reason why there are none."""
    path = folder / f"{system.name}.npz"
    path.unlink(missing_ok=True)
    command = [*system.command()[:-1], str(script or system.script)]
    variables = {**environment(system, folder, folder / "marks", 1), "PEERS_FINAL": str(path), **(more or {})}
    with tempfile.TemporaryDirectory(prefix="peers-") as scratch, open(folder / "log", "w") as log:
        try:
            subprocess.run(
                command, cwd=scratch, env=variables, stdout=log, stderr=log, timeout=600, check=False
            )
        except subprocess.TimeoutExpired:
            return "took more than ten minutes"
    if not path.exists():
        lines = (folder / "log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "wrote nothing"
    with np.load(path) as arrays:
        return [arrays[name] for name in arrays.files]


def deviation(found: Weights, expected: Weights) -> float:
    """The largest difference of a weight."""
    return max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True))


def table(names: Sequence[str]) -> str:
    """The deviations from the plain loop, in Markdown."""
    rows: dict[str, list[str]] = {name: [] for name in names if name != "plain"}
    changes = []
    with tempfile.TemporaryDirectory(prefix="peers-agree-") as scratch:
        for number, (case, sizes) in enumerate(CASES.items()):
            folder = tiny(Path(scratch) / str(number), sizes)
            expected = final(systems.SYSTEMS["plain"], folder)
            if isinstance(expected, str):
                raise SystemExit(f"plain: {expected}")
            changes.append(deviation(expected, _start()))
            for name, cells in rows.items():
                weights = final(systems.SYSTEMS[name], folder)
                cells.append(weights if isinstance(weights, str) else f"{deviation(weights, expected):.1e}")
                print(f"{case}, {name}: {cells[-1]}", flush=True)
    lines = [
        "Largest deviation of a final weight from that of a plain PyTorch loop. For comparison, the last",
        "line has the largest change of a weight in the three rounds.",
        "",
        f"| system | {' | '.join(CASES)} |",
        "| --- " * (1 + len(CASES)) + "|",
        *(f"| {systems.SYSTEMS[name].title} | {' | '.join(cells)} |" for name, cells in rows.items()),
        f"| *largest change* | {' | '.join(f'{value:.1e}' for value in changes)} |",
    ]
    return "\n".join(lines) + "\n"


def methods_table(names: Sequence[str], methods: Sequence[str] = tuple(METHODS)) -> str:
    """The deviations of the other methods, in Markdown, and the reasons for large ones."""
    chosen = {name: METHODS[name] for name in methods}
    columns = [name for name in names if any(name in method.systems for method in chosen.values())]
    lines = [
        "The same for other methods. The plain loop does what the method's paper says.",
        "",
        f"| method | {' | '.join(systems.SYSTEMS[name].title for name in columns)} | *largest change* |",
        "| --- " * (2 + len(columns)) + "|",
    ]
    reasons = []
    with tempfile.TemporaryDirectory(prefix="peers-agree-") as scratch:
        for name, method in chosen.items():
            folder = several_steps(Path(scratch) / name, name)
            expected = final(systems.SYSTEMS["plain"], folder, HERE / "method_plain.py")
            if isinstance(expected, str):
                raise SystemExit(f"plain, {name}: {expected}")
            cells = []
            for system in columns:
                if system not in method.systems:
                    cells.append("")
                    continue
                weights = final(systems.SYSTEMS[system], folder, HERE / f"method_{system}.py")
                cells.append(weights if isinstance(weights, str) else f"{deviation(weights, expected):.1e}")
                if not isinstance(weights, str) and deviation(weights, expected) > ROUNDING:
                    reasons.append(_reason(name, system, weights, folder))
                print(f"{method.title}, {system}: {cells[-1]}", flush=True)
            cells.append(f"{deviation(expected, _start(folder)):.1e}")
            lines.append(f"| {method.title} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *reasons]) + "\n"


def _reason(name: str, system: str, found: Weights, folder: Path) -> str:
    """Why a system differs, and its deviation from a plain loop that does the same."""
    title = f"- {systems.SYSTEMS[system].title}, {METHODS[name].title}:"
    if (name, system) not in WHY:
        return f"{title} not explained."
    variant, why = WHY[name, system]
    same = final(systems.SYSTEMS["plain"], folder, HERE / "method_plain.py", {"PEERS_VARIANT": variant})
    remaining = same if isinstance(same, str) else f"{deviation(found, same):.1e}"
    return f"{title} {why}. A plain loop that does so deviates by {remaining}."


def _start(folder: Path | None = None) -> Weights:
    """The initial weights, of all models if a method's federation in ``folder`` has several."""
    from networks import build

    layers = [tensor.numpy() for tensor in build("mlp32", (1, 8, 8), 10).state_dict().values()]
    if folder is None or not (folder / "starts.npy").exists():
        return layers
    stops = np.cumsum([layer.size for layer in layers])[:-1]
    return [
        part.reshape(layer.shape)
        for model in np.load(folder / "starts.npy")
        for part, layer in zip(np.split(model, stops), layers, strict=True)
    ]


def work(options: argparse.Namespace) -> None:
    """Compare, print the tables, and keep them if asked."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    parts: Mapping[str, Callable[[], str]] = {
        "fedavg": lambda: table(options.systems),
        "methods": lambda: methods_table(options.systems, options.methods),
    }
    text = "\n".join(part() for name, part in parts.items() if options.only in (None, name))
    print(text)
    if options.write:
        folder = HERE.parent / "results"
        folder.mkdir(exist_ok=True)
        (folder / "agreement.md").write_text(text)


if __name__ == "__main__":
    INSTALLED = [name for name, system in systems.SYSTEMS.items() if system.installed]
    OPTIONS = (
        frame.option("--systems", nargs="*", default=INSTALLED, choices=list(systems.SYSTEMS)),
        frame.option("--only", choices=["fedavg", "methods"], help="one of the two tables"),
        frame.option("--methods", nargs="+", default=list(METHODS), choices=list(METHODS)),
        frame.option("--write", action="store_true", help="keep the table"),
    )
    sys.exit(frame.main(__doc__, work, *OPTIONS))

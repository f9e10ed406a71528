"""Curricula in FL: the thesis' Tables 2.2, 2.3 and 2.5 (samples), Figures 2.9 (clients) and 2.11 (both).

::

    python experiments/curricula/curricula.py orders --seeds 0-2 --out runs/orders
    python experiments/curricula/curricula.py orders --rows curriculum,vanilla --out runs/prox local=fedprox
    python experiments/curricula/curricula.py both --seeds 0-2 --out runs/both --samples 20000 rounds=50
    python experiments/curricula/curricula.py clients --out runs/clients --samples 10000 rounds=60

All settings are those of ``cifar10.yaml`` unless others are given. A row is a variant of them; the same seed
gives all rows the same partition, initial model and (but for client curricula) cohorts. The accuracy is that
of the last global model on the whole test set, as in the thesis; beside it stands the mean over the last
ten tests of the clients, as the last model alone swings from round to round where clients have one or two
classes. ``--samples`` takes the first so many training images. ``--out`` gets ``runs.csv`` (a row a run) and
``table.md``; runs that are in ``runs.csv`` are not run again. In ``clients`` (and the row ``expert``) it is
an expert that says what is easy: the same network, trained on all images (in ``--out``/expert).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file

from rayfl import api
from rayfl.commands.expert import train_expert
from rayfl.config import Config, load
from rayfl.data import write_npz
from rayfl.errors import RayflError
from rayfl.servers import building
from rayfl.training.batches import Batches

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from compare_seeds import seeds_of

HERE = Path(__file__).parent
EASY_OR_HARD = "partition={{name: difficulty, clients: 100, {division}, ordered: 1.0}}"
DIVISIONS = {
    "IID": "labels: iid",
    "Dir(0.2)": "alpha: 0.2, attempts: 10000",
    "Dir(0.05)": "alpha: 0.05, attempts: 10000",
}
DIFFICULTY = EASY_OR_HARD.format(division=DIVISIONS["Dir(0.05)"])
PLAIN = "order={name: shuffled}"
EXPERT = "EXPERT"
FIGURES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "orders": {
        "curriculum": ("order.order=curriculum",),
        "random": ("order.order=random",),
        "vanilla": (PLAIN,),
        "expert": ("order.score=expert", f"order.expert={EXPERT}/expert.safetensors"),
        "anti": ("order.order=anti",),
    },
    "both": {
        "neither": (DIFFICULTY, PLAIN),
        "data": (DIFFICULTY,),
        "clients": (DIFFICULTY, PLAIN, "sampling={name: curriculum}"),
        "both": (DIFFICULTY, "sampling={name: curriculum}"),
    },
    "clients": {
        f"{name}, {row}": (
            EASY_OR_HARD.format(division=f"{division}, losses: {EXPERT}/losses.npy"),
            PLAIN,
            f"sampling={sampling}",
        )
        for name, division in DIVISIONS.items()
        for row, sampling in {
            "uniform": "{name: uniform}",
            "sweep": "{name: curriculum}",
            "draw": "{name: curriculum, cohorts: draw}",
        }.items()
    },
}
"""The rows of each table, by what they change; :data:`EXPERT` stands for the expert's folder."""
LAST = 10


def accuracy(config: Config, result: api.Result) -> float:
    """Of a finished run's model on all test samples, in per cent."""
    (stage, *_), host = building.build(config)
    samples = stage.federation.samples
    batches, module = Batches(samples, torch.device("cpu")), host.spec.build().eval()
    module.load_state_dict(load_file(result.path / "models" / "model_0.safetensors"), strict=False)
    right = 0
    with torch.inference_mode():
        for ids in np.array_split(np.arange(len(samples.y_test)), 20):
            x, y = batches.test(ids)
            right += int((module(x).argmax(1) == y).sum())
    return 100 * right / len(samples.y_test)


def subset(config: Config, samples: int, folder: Path) -> str:
    """The setting of a dataset with the first so many training samples of the config's."""
    whole = config.data.load(building.data_root(config))
    file = folder / f"{whole.name}-{samples}.npz"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = replace(whole, x_train=whole.x_train[:samples], y_train=whole.y_train[:samples])
        write_npz(file, part)
    return f"data={{name: npz, path: {file.resolve()}}}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("overrides", nargs="*", help="settings such as rounds=20")
    parser.add_argument("--rows", default="", help="only these rows, separated by commas")
    parser.add_argument("--seeds", default="0-2", help="such as 0-5 or 0,3,7 (default: 0-2)")
    parser.add_argument("--expert-epochs", type=int, default=10, help="for rows that need one (default: 10)")
    parser.add_argument("--samples", type=int, help="training images; by default all")
    parser.add_argument("--out", type=Path, default=Path("runs/curricula"))
    options = parser.parse_intermixed_args(arguments)
    rows = options.rows.split(",") if options.rows else list(FIGURES[options.figure])
    common = ["execution.backend=inline", "output.report=false", f"output.root={options.out}"]
    try:
        if options.samples:
            common.append(subset(load(HERE / "cifar10.yaml"), options.samples, options.out))
        expert = options.out.resolve() / "expert"
        if not (expert / "losses.npy").exists() and any(
            EXPERT in str(FIGURES[options.figure][r]) for r in rows
        ):
            train_expert(load(HERE / "cifar10.yaml", common), options.expert_epochs, expert)
        for seed in seeds_of(options.seeds):
            for row in rows:
                changes = [change.replace(EXPERT, str(expert)) for change in FIGURES[options.figure][row]]
                settings = [*common, *changes, f"seed={seed}", *options.overrides]
                run_one(row, load(HERE / "cifar10.yaml", settings), options.out / "runs.csv")
    except RayflError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = table(pd.read_csv(options.out / "runs.csv"))
    (options.out / "table.md").write_text(text)
    print(f"\n{text}")
    return 0


def run_one(row: str, config: Config, file: Path) -> None:
    """Run a row with a seed and write it down, unless that has been done."""
    known = pd.read_csv(file) if file.exists() else pd.DataFrame({"row": [], "seed": []})
    if ((known["row"] == row) & (known["seed"] == config.seed)).any():
        return
    result = api.run(config)
    tested = result.rounds["accuracy_mean"].dropna()
    found = {
        "row": row,
        "seed": config.seed,
        "accuracy": accuracy(config, result),
        "last_tests": tested.iloc[-LAST:].mean(),
        "seconds": result.summary["seconds"],
    }
    print(f"{row}, seed {config.seed}: {found['accuracy']:.1f} %", flush=True)
    pd.DataFrame([found]).to_csv(file, mode="a", header=not file.exists(), index=False)


def table(runs: pd.DataFrame) -> str:
    """Mean and standard deviation over the seeds, and every seed's accuracy."""
    lines = ["| | accuracy (%) | by seed | mean of the last tests (%) |", "| --- | ---: | --- | ---: |"]
    for row, own in runs.groupby("row", sort=False):
        own = own.sort_values("seed")
        each = ", ".join(f"{value:.1f}" for value in own["accuracy"])
        spread = [f"{own[c].mean():.1f} ± {own[c].std(ddof=1):.1f}" for c in ("accuracy", "last_tests")]
        lines.append(f"| {row} | {spread[0]} | {each} | {spread[1]} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())

"""One setting of CFL on congruent and incongruent clients of three datasets.

::

    python experiments/cfl/three.py --out runs/three --seeds 0 1

The preset ``cfl-label-swap`` (MLP, 20 clients, 300 samples each; of digits all, 64 to 72 each) with ``norms:
relative`` and nothing else set, on Fashion-MNIST, letters (EMNIST) and digits. Congruent are IID clients
(``iid``) and two halves of the clients with half of the labels each (``blocks``); incongruent are four groups
with two labels swapped in each (``swap``) or all labels permuted (``permute``). ``--criteria`` takes others,
such as the preset's ``"{eps1: 0.2, eps2: 0.7}"``. ``--out`` gets ``three.csv``, a row a run, which is not run
again, and ``table.md``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

import rayfl
from rayfl.config import load

DATA = {
    "Fashion-MNIST": ("data=fashion_mnist", 300),
    "letters": ("data={name: emnist, split: letters}", 300),
    "digits": ("data=digits", None),
}
PARTITIONS = {
    "iid": "name: iid",
    "blocks": "name: label_blocks",
    "swap": "name: relabelled, clusters: 4, relabel: swap",
    "permute": "name: relabelled, clusters: 4, relabel: permute",
}
CONGRUENT = ("iid", "blocks")


def run_one(data: str, clients: str, seed: int, rounds: int, criteria: str, out: Path) -> dict[str, object]:
    """A row of the table."""
    dataset, samples = DATA[data]
    size = "" if samples is None else f", samples: {samples}"
    config = load(
        "cfl-label-swap",
        [
            dataset,
            f"partition={{{PARTITIONS[clients]}, clients: 20{size}}}",
            f"algorithm={{name: cfl, criteria: {criteria}}}",
            f"seed={seed}",
            f"rounds={rounds}",
            "evaluation.every=10",
            "execution.backend=inline",
            f"output.root={out}",
            "output.report=false",
            "output.tensorboard=false",
        ],
    )
    ran = rayfl.run(config)
    after = [entry["round"] + 1 for entry in ran.clusters["timeline"] for _ in entry["splits"]]
    norms = pd.read_csv(ran.path / "diagnostics.csv")
    last = norms[norms["round"] == rounds - 1]
    return {
        "data": data,
        "clients": clients,
        "criteria": criteria,
        "seed": seed,
        "splits": " ".join(map(str, after)),
        "clusters": ran.summary["clusters"],
        "ari": ran.summary["ari"],
        "accuracy": ran.summary["accuracy_mean"],
        "mean_relative": last["mean_relative"].max(),
        "max_relative": last["max_relative"].max(),
    }


def table(rows: pd.DataFrame) -> str:
    """In Markdown; right is no split of congruent clients, and the four groups of the others."""
    lines = ["| data | clients | seed | splits after rounds | clusters | ARI | accuracy | right |"]
    lines.append("| --- | --- | ---: | --- | ---: | ---: | ---: | --- |")
    for row in rows.sort_values(["data", "clients", "seed"]).itertuples(index=False):
        congruent = row.clients in CONGRUENT
        right = row.clusters == 1 if congruent else row.ari == 1
        ari = "" if congruent else f"{row.ari:.2f}"
        lines.append(
            f"| {row.data} | {row.clients} | {row.seed} | {row.splits} | {row.clusters} | {ari} | "
            f"{row.accuracy:.1f} | {'yes' if right else '**no**'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--criteria", default="{norms: relative}")
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--clients", nargs="+", choices=PARTITIONS, default=list(PARTITIONS))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "three.csv"
    for seed in options.seeds:
        for data in options.data:
            for clients in options.clients:
                key = {"data": data, "clients": clients, "criteria": options.criteria, "seed": seed}
                if file.exists() and (pd.read_csv(file)[list(key)] == pd.Series(key)).all(axis=1).any():
                    continue
                row = run_one(data, clients, seed, options.rounds, options.criteria, options.out)
                pd.DataFrame([row]).to_csv(file, mode="a", header=not file.exists(), index=False)
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    rows = pd.read_csv(file, keep_default_na=False, na_values={"ari": [""]})
    text = table(rows[rows["criteria"] == options.criteria])
    (options.out / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

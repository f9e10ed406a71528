"""CFL's bookkeeping: the clients of its clusters after two splits, by a repository's ``cluster_clients``.

    git clone https://github.com/KarhouTam/FL-bench
    python experiments/peers/positions.py FL-bench/src/server/cfl.py

Twelve clients in three planted groups of four. ``cluster_clients`` is taken from the file as it is, and
called as the repositories call it: on the rows and columns of one cluster, ``similarities[idc][:, idc]``. It
returns positions within that cluster. These repositories use them as client ids, which is right for the first
split, of the cluster of all clients, and wrong from the second split on. The ids are ``idc[places]``.
"""

from __future__ import annotations

import argparse
import ast
import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import frame
import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import AgglomerativeClustering

Ids = NDArray[np.intp]
Split = Callable[[NDArray[np.float64]], tuple[Ids, Ids]]

GROUPS = np.repeat([0, 1, 2], 4)


def similarities() -> NDArray[np.float64]:
    """Cosines ``(12, 12)``: 0.9 within a group, 0.2 between the second and the third, -0.2 to the first."""
    between = np.array([[0.9, -0.2, -0.2], [-0.2, 0.9, 0.2], [-0.2, 0.2, 0.9]])
    cosines: NDArray[np.float64] = between[np.ix_(GROUPS, GROUPS)]
    np.fill_diagonal(cosines, 1.0)
    return cosines


def from_file(path: Path) -> Split:
    """The function or method ``cluster_clients`` of a file.

    Raises:
        SystemExit: if there is none.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == "cluster_clients":
            method = node.args.args[0].arg == "self"
            scope: dict[str, Any] = {"np": np, "AgglomerativeClustering": _clustering}
            exec(compile(ast.Module([node], []), str(path), "exec"), scope)
            function: Any = scope["cluster_clients"]
            return functools.partial(function, None) if method else function
    raise SystemExit(f"{path}: no function cluster_clients")


def _clustering(affinity: str = "", **settings: Any) -> AgglomerativeClustering:
    """scikit-learn's class with the former name of an argument."""
    return AgglomerativeClustering(**({"metric": affinity} if affinity else {}), **settings)


def two_splits(split: Split, kept_as_ids: bool) -> list[list[int]]:
    """The clusters after the first cluster with several groups has been split twice."""
    s = similarities()
    clusters: list[Ids] = [np.arange(len(GROUPS), dtype=np.intp)]
    for _ in range(2):
        next_clusters: list[Ids] = []
        for ids in clusters:
            if len(ids) > 4:  # the criteria of a split hold where there are several groups
                places = split(s[ids][:, ids])
                next_clusters += list(places) if kept_as_ids else [ids[place] for place in places]
            else:
                next_clusters.append(ids)
        clusters = next_clusters
    return [sorted(map(int, ids)) for ids in clusters]


def told(clusters: Sequence[Sequence[int]]) -> str:
    """The clusters, and how many clients they contain."""
    counts = Counter(client for ids in clusters for client in ids)
    twice = sum(count > 1 for count in counts.values())
    return f"{clusters}: {len(counts)} of {len(GROUPS)} clients, {twice} of them more than once"


def work(options: argparse.Namespace) -> None:
    """What each file makes of two splits, with the mistake and without it."""
    for path in options.files:
        split = from_file(path)
        print(path)
        print(f"  places kept as ids: {told(two_splits(split, kept_as_ids=True))}")
        print(f"  ids[places]:        {told(two_splits(split, kept_as_ids=False))}")


if __name__ == "__main__":
    FILES = frame.option("files", nargs="+", type=Path, help="files that define cluster_clients")
    sys.exit(frame.main(__doc__, work, FILES))

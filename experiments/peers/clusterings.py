"""PACFL's and FLIS' clusters: those of the authors' own functions, and those of rayfl.

    git clone https://github.com/MMorafah/PACFL
    git clone https://github.com/MMorafah/FLIS
    python experiments/peers/clusterings.py PACFL FLIS

The functions are taken from the repositories as they are: ``calculating_adjacency`` and
``hierarchical_clustering`` of PACFL (``src/clustering/hierarchical_clustering.py``), ``cluster_logits`` of
FLIS (``src/clustering/utils_clustering.py``), only with names that NumPy has renamed and without CUDA.

PACFL: CIFAR-10 where it is in ``$RAYFL_DATA``, else random images with a class mean; 100 clients with two
labels each, three singular vectors of each label, as in PACFL's ``scripts/pacfl.sh``. FLIS: made-up models.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import frame
import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import squareform

from rayfl.clustering.linkage import build_linkage, cut_at_threshold
from rayfl.clustering.predictions import inference_similarities, joint_clusters
from rayfl.clustering.proximity import condensed_distances
from rayfl.data.datasets.cifar10 import Cifar10
from rayfl.data.partitions.label_skew import LabelSkew
from rayfl.errors import DataError
from rayfl.given import data_root
from rayfl.signatures.subspace import Subspace

Array = NDArray[np.float64]
Images = tuple[NDArray[np.uint8], NDArray[np.int64]]

PACFL = "src/clustering/hierarchical_clustering.py"
FLIS = "src/clustering/utils_clustering.py"
BETA = 4.9
"""PACFL's threshold in ``scripts/pacfl.sh``."""


def functions(path: Path) -> Mapping[str, Callable[..., Any]]:
    """Load the functions of one of the authors' files.

    Raises:
        SystemExit: if there is no such file.
    """
    if not path.is_file():
        raise SystemExit(f"{path}: no such file")
    text = path.read_text(encoding="utf-8")
    for old, new in (("np.NINF", "-np.inf"), ("torch.cuda.FloatTensor", "torch.FloatTensor")):
        text = text.replace(old, new)
    scope: dict[str, Any] = {}
    exec(compile(text, str(path), "exec"), scope)
    return scope


def images() -> tuple[Images, str]:
    """Training images ``(n, D)`` with their labels, and what they are."""
    try:
        samples = Cifar10().load(data_root())
    except DataError:
        rng = np.random.default_rng(0)
        y = np.arange(2_000) % 10
        means = rng.uniform(20, 230, (10, 64))
        x = np.clip(means[y] + rng.normal(0, 40, (len(y), 64)), 0, 255).astype(np.uint8)
        return (x, y), "random images"
    x = np.asarray(samples.x_train, np.uint8)
    return (x.reshape(len(x), -1), np.asarray(samples.y_train, np.int64)), "CIFAR-10"


def signatures(dataset: Images, seed: int, clients: int = 100) -> list[Array]:
    """The first three left singular vectors of each of a client's two labels, by NumPy, as the authors do."""
    x, y = dataset
    vectors = []
    for indices in deal(dataset, seed, clients):
        parts = [x[indices][y[indices] == label].T.astype(np.float64) for label in np.unique(y[indices])]
        vectors.append(np.hstack([np.linalg.svd(part, full_matrices=False)[0][:, :3] for part in parts]))
    return vectors


def deal(dataset: Images, seed: int, clients: int) -> list[NDArray[np.integer]]:
    """The samples of each client: two labels, whose samples are divided evenly."""
    from rayfl.data.base import Samples

    x, y = dataset
    samples = Samples("given", x, y, x[:10], y[:10], classes=10)
    return list(LabelSkew(clients=clients, rho=0.2).assign(samples, seed).clients)


def angles(theirs: Mapping[str, Callable[..., Any]], vectors: Sequence[Array]) -> Array:
    """The authors' matrix of angles ``(N, N)`` in degrees, with zeros on its diagonal."""
    matrix = np.array(theirs["calculating_adjacency"](np.arange(len(vectors)), list(vectors)))
    np.fill_diagonal(matrix, 0.0)
    return matrix


def clusters(theirs: Mapping[str, Callable[..., Any]], matrix: Array, beta: float) -> NDArray[np.int64]:
    """The cluster of each client ``(N,)`` by the authors' ``hierarchical_clustering``, average linkage."""
    with contextlib.redirect_stdout(io.StringIO()):
        groups = theirs["hierarchical_clustering"](matrix.copy(), thresh=beta, linkage="average")
    labels = np.full(len(matrix), -1, np.int64)
    for number, members in enumerate(groups):
        labels[members] = number
    return labels


def same(a: NDArray[np.integer], b: NDArray[np.integer]) -> bool:
    """Whether two labellings ``(N,)`` describe the same clusters."""
    return bool(((a[:, None] == a) == (b[:, None] == b)).all())


def sizes(labels: NDArray[np.integer]) -> list[int]:
    """Clients of each cluster, the largest first."""
    return sorted((int(n) for n in np.unique(labels, return_counts=True)[1]), reverse=True)


def pacfl(folder: Path) -> None:
    """Print the comparison of PACFL."""
    authors = functions(folder / PACFL)
    dataset, name = images()
    for seed in range(3):
        vectors = signatures(dataset, seed)
        matrix = angles(authors, vectors)
        scaled = (dataset[0] / 255).astype(np.float32)
        our_signatures = [
            Subspace(p=3, per_class=True).compute(scaled[part], dataset[1][part])
            for part in deal(dataset, seed, len(vectors))
        ]
        distances = np.asarray(condensed_distances("vector_angle_min", our_signatures), np.float64)
        upper = squareform(matrix, checks=False)
        flipped = angles(authors, [-vectors[0], *vectors[1:]])
        their_clusters = clusters(authors, matrix, BETA)
        our_clusters = cut_at_threshold(build_linkage(distances.copy()), BETA)
        weighted = cut_at_threshold(build_linkage(distances.copy(), "weighted"), BETA)
        turned = np.abs(flipped - matrix).max()
        equal = same(their_clusters, weighted)
        print(f"PACFL, {name}, seed {seed}:")
        print(f"  largest difference of an angle: {np.abs(upper - distances).max():.1e} degrees")
        print(f"  with the signs of client 0's vectors changed, the authors' change by up to {turned:.1f}")
        print(f"  clusters at {BETA} degrees, the authors': {sizes(their_clusters)}", end=", ")
        print(f"rayfl's: {sizes(our_clusters)}")
        print(f"  the authors' are rayfl's with clustering.linkage=weighted: {equal}")


def flis(folder: Path) -> None:
    """Print the comparison of FLIS (DC)."""
    for beta in (0.3, 0.5, 0.9, 0.99):
        theirs, ours = joint(functions(folder / FLIS), beta)
        print(f"FLIS (DC), beta {beta}: {int((theirs != ours).sum())} of {ours.size} memberships differ")


def joint(
    theirs: Mapping[str, Callable[..., Any]], beta: float
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether client j is in client i's cluster ``(N, N)``, by the authors' ``cluster_logits`` and by rayfl.

    Twelve models predict the labels of 200 samples; the more often two agree, the more similar they are.
    """
    import torch

    rng = np.random.default_rng(0)
    first = rng.integers(0, 10, 200)
    agreement = np.repeat(
        [0.3, 0.6, 0.9, 0.985], 3
    )  # the share of samples on which a model predicts like the first
    labels = np.where(rng.random((12, 200)) < agreement[:, None], first, rng.integers(0, 10, (12, 200)))
    predictions = np.eye(10)[labels]

    def client(number: int) -> Any:
        batches = iter([torch.from_numpy(part) for part in np.split(predictions[number], 4)])
        return types.SimpleNamespace(get_net=lambda: _Net(batches), get_state_dict=dict)

    loader = [(torch.zeros(50, 1), torch.zeros(50, dtype=torch.int64))] * 4
    arguments = types.SimpleNamespace(device="cpu")
    result = theirs["cluster_logits"](
        np.arange(12),
        [client(n) for n in range(12)],
        loader,
        arguments,
        alpha=beta,
        nclasses=10,
        nsamples=200,
    )
    members = np.zeros((12, 12), bool)
    for number, cluster in enumerate(result[0]):
        members[number, cluster] = True
    return members, joint_clusters(inference_similarities(predictions.reshape(12, -1)), beta)


class _Net:
    """A network that returns given predictions, batch by batch, and is never copied."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __deepcopy__(self, memo: Any) -> _Net:
        return self

    def to(self, device: str) -> None:
        pass

    def eval(self) -> None:
        pass

    def __call__(self, data: Any) -> Any:
        return next(self.batches)


def work(options: argparse.Namespace) -> None:
    """Both comparisons."""
    pacfl(options.pacfl)
    flis(options.flis)


if __name__ == "__main__":
    CLONES = (
        frame.option("pacfl", type=Path, help="a clone of PACFL's repository"),
        frame.option("flis", type=Path, help="a clone of FLIS' repository"),
    )
    sys.exit(frame.main(__doc__, work, *CLONES))

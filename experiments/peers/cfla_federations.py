"""CFLA's federations: how its scripts divide samples, its networks, and the accuracy of a constant answer.

    python experiments/peers/cfla_federations.py

prints, for each federation of CFLA's table, the accuracy of always answering a client's most frequent label:
mean and standard deviation over the clients, as in the table (with equally many samples of every label, which
AG News has and FEMNIST has not). ``cfla_*.yaml`` train in these federations.

After ``run_all_mnist.py``, ``run_all_femnist.py`` and ``run_all_agnews.py`` (``cfla/experiments/scripts``),
``cfla/datasets`` and ``cfla/framework/models`` of CFLA 1.0.4 (https://pypi.org/project/cfla/).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Places = list[NDArray[np.int64]]

GROUPS = ((0, 4, 18), (4, 7, 17), (7, 9, 15))
"""Lowest and highest label and the number of clients of each group."""


def groups(
    labels: NDArray[np.int64],
    rng: np.random.Generator,
    share: float = 0.2,
    ranges: Sequence[tuple[int, int, int]] = GROUPS,
) -> Places:
    """Clients in groups with overlapping ranges of labels; each trains on a part of its share of the group.

    CFLA gives the images of a label in two groups to both. Here they are different images: two fifths of a
    label are used at most, so there are enough.

    Args:
        labels: of the training samples ``(n,)``.
        rng: draws the samples.
        share: of a client's samples on which it trains; CFLA tests it on the others, rayfl on test samples.
        ranges: as ``GROUPS``.
    """
    free = np.ones(len(labels), bool)
    dealt: Places = []
    for low, high, clients in ranges:
        within = (labels >= low) & (labels <= high)
        per_client = int(within.sum() // clients * share)
        members = rng.choice(np.flatnonzero(within & free), clients * per_client, replace=False)
        free[members] = False
        dealt += [np.sort(part) for part in np.split(members, clients)]
    return dealt


def dirichlet(
    labels: NDArray[np.int64],
    rng: np.random.Generator,
    clients: int = 50,
    alpha: float = 0.1,
    most: int | None = None,
    share: float = 0.2,
) -> Places:
    """Clients with label proportions from Dir(alpha), each label divided in the ratios of its column.

    Args:
        labels: of the training samples ``(n,)``.
        rng: draws proportions and samples.
        clients: N.
        alpha: concentration.
        most: samples of a client at most.
        share: of a client's samples on which it trains; CFLA tests it on the others, rayfl on test samples.
    """
    classes = np.unique(labels)
    proportions = rng.dirichlet(np.full(len(classes), alpha), size=clients)
    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(clients)]
    for column, label in enumerate(classes):
        members = rng.permutation(np.flatnonzero(labels == label))
        ratios = np.cumsum(proportions[:, column]) / proportions[:, column].sum()
        for part, piece in zip(
            parts, np.split(members, (ratios[:-1] * len(members)).astype(int)), strict=True
        ):
            part.append(piece)
    dealt = []
    for part in parts:
        indices = rng.permutation(np.concatenate(part))[:most]
        dealt.append(np.sort(indices[: max(1, int(len(indices) * share))]))
    return dealt


def constant_answer(labels: NDArray[np.int64], dealt: Places) -> tuple[float, float]:
    """Mean and standard deviation over the clients of the share of their most frequent label, in percent."""
    shares = [100 * np.bincount(labels[own]).max() / len(own) for own in dealt]
    return float(np.mean(shares)), float(np.std(shares))


def lenet(shape: tuple[int, ...], classes: int) -> Any:
    """``LeNet5V1`` and ``LeNet5FEMNIST``: LeNet-5 with tanh and average pooling, for images of 28 x 28."""
    from torch import nn

    return nn.Sequential(
        *(nn.Conv2d(shape[0], 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, classes)),
    )


def text_cnn(classes: int, vocabulary: int = 25_000) -> Any:
    """``TextCNNAGNews``: embedding, 100 filters each of 3, 4 and 5 words, maxima, dropout, the topics."""
    import torch
    from torch import nn

    class TextCNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, 128, padding_idx=0)
            self.filters = nn.ModuleList([nn.Conv1d(128, 100, width) for width in (3, 4, 5)])
            self.dropout = nn.Dropout(0.5)
            self.last = nn.Linear(300, classes)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            embedded = self.embedding(words).transpose(1, 2)
            strongest = torch.cat([conv(embedded).relu().amax(dim=-1) for conv in self.filters], dim=1)
            out: torch.Tensor = self.last(self.dropout(strongest))
            return out

    return TextCNN()


def main() -> int:
    """The command line."""
    cases: tuple[tuple[str, int, int, dict[str, Any] | None], ...] = (
        ("MNIST, 50 clients in three groups", 10, 6_000, None),
        ("FEMNIST, Dir(0.1), 50 clients of at most 300 images", 62, 10_000, {"most": 300, "share": 1.0}),
        ("AG News, Dir(0.1), 40 clients", 4, 30_000, {"clients": 40, "share": 1.0}),
    )
    for title, classes, per_label, settings in cases:
        labels = np.repeat(np.arange(classes), per_label)
        answers = []
        for seed in range(2026, 2046):
            rng = np.random.default_rng(seed)  # as CFLA, so that the first has the proportions of its run
            dealt = groups(labels, rng) if settings is None else dirichlet(labels, rng, **settings)
            answers.append(constant_answer(labels, dealt))
        mean, deviation = np.mean(answers, axis=0)
        print(f"{title}: {answers[0][0]:.1f} ± {answers[0][1]:.1f} % with CFLA's seed,", end=" ")
        print(f"{mean:.1f} ± {deviation:.1f} % on average over {len(answers)} seeds")
    return 0


if __name__ == "__main__":
    sys.exit(main())

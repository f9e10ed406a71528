"""All clients have the same distribution of inputs, but every cluster of clients labels them differently."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations
from math import comb, factorial
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from typing_extensions import override

from rayfl.data.base import Assignment, Samples
from rayfl.data.partitions._dealing import SizedPartition, by_owner, check_labels, evenly
from rayfl.errors import DataError
from rayfl.random import generator

_Label = Annotated[int, Field(ge=0)]


class Relabelled(SizedPartition):
    """Relabelled: IID samples, and every cluster of clients swaps two labels or permutes all of them.

    The incongruent scenarios of CFL (Sattler, Mueller, Samek 2020, section VI): all clients have the same
    distribution of inputs and of labels; what differs is which label an input has. "Label swap": m=20, k=4,
    two labels exchanged in each cluster. "Permuted labels": a random permutation in each cluster. Training,
    validation and test samples of a client are relabelled in the same way.

    The planted group of a client is its cluster. Clients are numbered cluster by cluster.
    """

    classes_only: ClassVar[bool] = True

    name: Literal["relabelled"] = "relabelled"
    clusters: int = Field(4, ge=1, description="number of clusters k; the clients are spread evenly")
    relabel: Literal["swap", "permute"] = Field(
        "swap", description="swap: two labels exchanged in each cluster; permute: all labels permuted"
    )
    swaps: tuple[tuple[_Label, _Label], ...] | None = Field(
        None, description="swap: the two labels of every cluster; default: drawn, without common labels"
    )

    @model_validator(mode="after")
    def _check_swaps(self) -> Relabelled:
        if self.swaps is None:
            return self
        if self.relabel != "swap":
            raise ValueError("swaps would change nothing; it is used with relabel=swap")
        if len(self.swaps) != self.clusters:
            raise ValueError(f"{len(self.swaps)} swaps are given for {self.clusters} clusters")
        if any(a == b for a, b in self.swaps) or len({frozenset(pair) for pair in self.swaps}) < len(
            self.swaps
        ):
            raise ValueError("swaps: expected two different labels for each cluster, and no pair twice")
        return self

    @override
    def assign(self, samples: Samples, seed: int) -> Assignment:
        labels = samples.y_train
        check_labels(labels, samples.classes, self.clients)
        if self.clients < self.clusters:
            raise DataError(
                f"partition.clusters: {self.clients} clients for {self.clusters} clusters; "
                f"use at most {self.clients} clusters"
            )
        rng = generator(seed, "partition")
        sizes = self.client_sizes(len(labels), self.clients, self.samples, rng, "partition")
        owners = np.full(len(labels), -1)
        owners[rng.permutation(len(labels))[: sizes.sum()]] = np.repeat(rng.permutation(self.clients), sizes)
        groups = np.repeat(np.arange(self.clusters), evenly(self.clients, self.clusters))
        maps = np.tile(np.arange(samples.classes), (self.clusters + 1, 1))
        if self.swaps is None:  # drawn among the labels that occur
            present = np.unique(labels)
            maps[1:, present] = present[self._draw_label_maps(len(present), seed)]
        else:
            self._swap(maps[1:], self.swaps)
        return Assignment(
            by_owner(owners, self.clients), groups.astype(np.int64), groups.astype(np.int64) + 1, maps
        )

    def _draw_label_maps(self, classes: int, seed: int) -> NDArray[np.int64]:
        """The new label of each label in each cluster, ``(k, classes)``: distinct rows, none the identity."""
        rng = generator(seed, "partition labels")
        if self.relabel == "permute":
            return _draw_permutations(self.clusters, classes, rng)
        maps = np.tile(np.arange(classes), (self.clusters, 1))
        self._swap(maps, _draw_pairs(self.clusters, classes, rng))
        return maps

    def _swap(self, maps: NDArray[np.int64], pairs: Sequence[tuple[int, int]]) -> None:
        """Exchange two labels in each row of ``maps`` ``(k, classes)``."""
        largest, classes = max(max(pair) for pair in pairs), maps.shape[1]
        if largest >= classes:
            raise DataError(
                f"partition.swaps: {largest} is not a label of this data; labels lie in range({classes})"
            )
        for row, (a, b) in zip(maps, pairs, strict=True):
            row[[a, b]] = b, a


def _draw_pairs(count: int, classes: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Draw different pairs of labels; they have no label in common if there are enough labels."""
    if count > comb(classes, 2):
        raise DataError(
            f"partition.clusters: {classes} labels can be swapped in {comb(classes, 2)} ways, not {count}; "
            "use fewer clusters"
        )
    if 2 * count <= classes:
        drawn = rng.permutation(classes)[: 2 * count].reshape(count, 2)
        return [(int(a), int(b)) for a, b in drawn]
    all_pairs = list(combinations(range(classes), 2))
    return [all_pairs[place] for place in rng.choice(len(all_pairs), count, replace=False).tolist()]


_MOST_LISTED = 7
"""For up to this many labels all permutations (5,040) are listed; for more, equal draws are rare."""


def _draw_permutations(count: int, classes: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw different permutations, none the identity, ``(count, classes)``."""
    ways = factorial(classes) - 1
    if count > ways:
        raise DataError(
            f"partition.clusters: {classes} labels can be permuted in {ways} ways, not {count}; "
            "use fewer clusters"
        )
    if classes <= _MOST_LISTED:
        all_permutations = np.array(list(permutations(range(classes)))[1:], np.int64)
        return all_permutations[rng.choice(ways, count, replace=False)]
    distinct: dict[tuple[int, ...], None] = {}
    for _ in range(10 * count):
        drawn = tuple(rng.permutation(classes).tolist())
        if drawn != tuple(range(classes)):
            distinct[drawn] = None
        if len(distinct) == count:
            return np.array(list(distinct), np.int64)
    raise DataError(
        f"partition.clusters: no {count} different permutations of {classes} labels were found in "
        f"{10 * count} draws; use fewer clusters"
    )

"""Every client is one source of the data: a writer, a user."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from rayfl.data.base import Assignment, Partition, Samples
from rayfl.data.partitions._dealing import check_labels
from rayfl.errors import DataError
from rayfl.random import generator


class Natural(Partition):
    """Natural: every client is one source (domain) of the data, with that source's own test samples.

    FEMNIST by writer: LEAF (Caldas et al. 2018); FLT's scenario 3 (Jamali-Rad et al. 2022), 200 writers.
    No groups are planted. If there are more sources than clients, the clients are drawn at random among
    those with enough samples; they keep the order of the sources.
    """

    name: Literal["natural"] = "natural"
    clients: int = Field(100, ge=1, description="number of clients N; this many sources are drawn")
    min_samples: int = Field(
        1, ge=1, description="sources with fewer training samples, or without a test sample, are left out"
    )

    @override
    def assign(self, samples: Samples, seed: int) -> Assignment:
        check_labels(samples.y_train, samples.classes, self.clients)
        if samples.domain_train is None or samples.domain_test is None:
            raise DataError(
                "partition: natural needs data with sources (data.name=leaf, or an npz with domain_train and "
                "domain_test)"
            )
        count = int(max(samples.domain_train.max(), samples.domain_test.max())) + 1
        sizes = np.bincount(samples.domain_train, minlength=count)
        tests = np.bincount(samples.domain_test, minlength=count)
        usable = np.flatnonzero((sizes >= self.min_samples) & (tests > 0))
        if len(usable) < self.clients:
            sources = int((sizes > 0).sum())
            raise DataError(
                f"partition.clients: {self.clients} clients for {len(usable)} sources with a test sample and "
                f"{self.min_samples} or more training samples (there are {sources}); use fewer"
            )
        rng = generator(seed, "partition")
        chosen = np.sort(rng.choice(usable, self.clients, replace=False))
        return Assignment(_members(samples.domain_train, chosen), test=_members(samples.domain_test, chosen))


def _members(domains: NDArray[np.int64], chosen: NDArray[np.int64]) -> list[NDArray[np.integer]]:
    """The samples of each chosen source, ascending."""
    order = np.argsort(domains, kind="stable")
    starts, ends = (np.searchsorted(domains[order], chosen, side) for side in ("left", "right"))
    return [order[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]

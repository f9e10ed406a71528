"""The clients that come with the data, in the order in which their samples are stored."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field
from typing_extensions import override

from rayfl.data.base import Assignment, Partition, Ranges, Samples
from rayfl.errors import DataError


class Stored(Partition):
    """Stored: the clients of a sharded dataset, which stores the samples of each client contiguously.

    A client is then a range of samples, so even ten million clients take little memory. If the dataset has
    more than ``clients``, the first ones are used.
    """

    name: Literal["stored"] = "stored"
    clients: int = Field(100, ge=1, description="number of clients N: the first of those that are stored")
    validation: float = Field(
        0.0, ge=0, lt=1, description="fraction of each client's samples kept for validation"
    )

    @override
    def assign(self, samples: Samples, seed: int) -> Assignment:
        if samples.stored is None:
            raise DataError(
                "partition: stored needs data that name the client of each sample (data.name=sharded, with "
                "'client' in every file)"
            )
        train, test, names = samples.stored.train, samples.stored.test, samples.stored.names
        if len(train) < self.clients:
            raise DataError(
                f"partition.clients: {self.clients} clients, {samples.name} has {len(train)}; use fewer"
            )
        n = self.clients
        test_ranges = None if test is None else Ranges(np.asarray(test.offsets[: n + 1]))
        return Assignment(
            Ranges(np.asarray(train.offsets[: n + 1])),
            test=test_ranges,
            names=None if names is None else names[:n],
        )

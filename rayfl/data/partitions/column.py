"""Clients by a column of the dataset."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from rayfl.data.base import Assignment, Column, Names, Samples
from rayfl.data.partitions._own import OwnPartition, fault, own_column
from rayfl.errors import DataError
from rayfl.units import counted

_MOST_NAMES = 5
"""The largest number of clients that a message names."""


class ByColumn(OwnPartition):
    """Column: clients are the values of a column of the dataset (a hospital, a writer), under these names.

    Datasets with columns: ``table`` (those in ``exclude``), ``npz`` and ``python`` (arrays ``<column>_train``
    and ``<column>_test``), ``huggingface``, and ``image_folder`` (``client``, ``folder``). Clients are
    numbered in the order of their names: integers by size, others as text. A client is tested on its own test
    samples if the dataset has the column for test samples, too.
    """

    name: Literal["column"] = "column"
    column: str = Field(min_length=1, description="the name of the column")
    min_samples: int = Field(1, ge=1, description="clients with fewer training samples are left out")
    min_test_samples: int = Field(
        0, ge=0, description="clients with fewer test samples of their own are left out; see data.test_by"
    )

    _without_tests: ClassVar[str] = (
        "draw test samples of every client (data.test_fraction with data.test_by), leave such clients out "
        "(partition.min_test_samples=1)"
    )

    @override
    def assign(self, samples: Samples, seed: int) -> Assignment:
        column = own_column(samples, self.column, "partition.column")
        sizes = np.bincount(column.train, minlength=len(column.values))
        tested = self._test_sizes(column)
        usable = np.flatnonzero((sizes >= self.min_samples) & (tested >= self.min_test_samples))
        if not len(usable):
            fewest = f" and {self.min_test_samples} test samples" if self.min_test_samples else ""
            raise DataError(
                f"partition.min_samples: no value of {self.column} has {self.min_samples} training samples"
                f"{fewest}; the most is {sizes.max()}{f' and {tested.max()}' if fewest else ''}"
            )
        names = column.values[usable]
        for value, name in zip(usable.tolist(), names.tolist(), strict=True):
            if fault(name):
                first = int(np.argmax(column.train == value))
                if samples.numbering is not None:
                    first = int(np.argmax(samples.numbering.train == first))
                where = f"sample {first} (counted from 0) of {samples.name}"
                raise DataError(f"partition.column: {self.column}: {where}: {fault(name)}")
        client_numbers = np.full(len(column.values), -1, np.int64)
        client_numbers[usable] = np.arange(len(usable))
        test = None if column.test is None else client_numbers[column.test]
        trained, few, untested = sizes > 0, sizes < self.min_samples, tested < self.min_test_samples
        held = "samples may be in the test part, or held by the server: data.server_share"
        notes = [
            f"partition: {int(left_out.sum()):,} of {len(sizes):,} values of {self.column} have {why} and "
            f"are left out: {_some(column.values[left_out])} ({hint})"
            for left_out, why, hint in (
                (
                    trained & few,
                    f"fewer than {counted(self.min_samples, 'training sample')}",
                    "partition.min_samples",
                ),
                (
                    trained & ~few & untested,
                    f"fewer than {counted(self.min_test_samples, 'test sample')}",
                    "partition.min_test_samples",
                ),
                (~trained, "no training sample", held),
            )
            if left_out.any()
        ]
        return self.assignment(client_numbers[column.train], test, names, notes)

    def _test_sizes(self, column: Column) -> NDArray[np.int64]:
        """Own test samples of each value ``(m,)``.

        Raises:
            DataError: if clients are not tested on their own, but ``min_test_samples`` asks for some.
        """
        if column.test is None or self.tests != "own":
            if self.min_test_samples:
                raise DataError(
                    "partition.min_test_samples: clients are not tested on samples of their own; leave it out"
                )
            return np.zeros(len(column.values), np.int64)
        return np.bincount(column.test, minlength=len(column.values))


def _some(names: Names) -> str:
    """The first names: ``'anna', 'ben', 'carl' and 4 more``."""
    shown = ", ".join(map(repr, names[:_MOST_NAMES].tolist()))
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES:,} more"

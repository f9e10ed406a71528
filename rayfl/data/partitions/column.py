"""Clients by a column of the dataset."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field
from typing_extensions import override

from rayfl.data.base import Assignment, Samples
from rayfl.data.partitions._own import OwnPartition, fault, own_column
from rayfl.errors import DataError


class ByColumn(OwnPartition):
    """Column: clients are the values of a column of the dataset (a hospital, a writer), under these names.

    Datasets with columns: ``table`` (those in ``exclude``), ``npz`` and ``python`` (arrays ``<column>_train``
    and ``<column>_test``), ``huggingface``, and ``image_folder`` (``folder``). Clients are numbered in the
    order of their names: integers by size, others as text. A client is tested on its own test samples if the
    dataset has the column for test samples, too.
    """

    name: Literal["column"] = "column"
    column: str = Field(min_length=1, description="the name of the column")
    min_samples: int = Field(1, ge=1, description="clients with fewer training samples are left out")

    @override
    def assign(self, samples: Samples, seed: int) -> Assignment:
        column = own_column(samples, self.column, "partition.column")
        sizes = np.bincount(column.train, minlength=len(column.values))
        usable = np.flatnonzero(sizes >= self.min_samples)
        if not len(usable):
            raise DataError(
                f"partition.min_samples: no value of {self.column} has {self.min_samples} training samples; "
                f"the most is {sizes.max()}"
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
        left_out = int((sizes > 0).sum()) - len(usable)
        note = (
            f"partition: {left_out:,} of {left_out + len(usable):,} values of {self.column} have fewer than "
            f"{self.min_samples} training samples and are left out (partition.min_samples)"
        )
        notes = [note] if left_out else []
        unused = int((sizes == 0).sum())
        if unused:
            notes.append(
                f"partition: {unused:,} of {len(sizes):,} values of {self.column} have no training sample "
                "and are left out (samples may be in the test part, or held by the server: data.server_share)"
            )
        return self.assignment(client_numbers[column.train], test, names, notes)

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
        kept = np.flatnonzero(sizes >= self.min_samples)
        if not len(kept):
            raise DataError(
                f"partition.min_samples: no value of {self.column} has {self.min_samples} training samples; "
                f"the most is {sizes.max()}"
            )
        names = column.values[kept]
        for value, name in zip(kept.tolist(), names.tolist(), strict=True):
            if fault(name):
                first = int(np.argmax(column.train == value))
                if samples.numbering is not None:
                    first = int(np.argmax(samples.numbering.train == first))
                where = f"sample {first} (counted from 0) of {samples.name}"
                raise DataError(f"partition.column: {self.column}: {where}: {fault(name)}")
        number = np.full(len(column.values), -1, np.int64)
        number[kept] = np.arange(len(kept))
        test = None if column.test is None else number[column.test]
        left_out = int((sizes > 0).sum()) - len(kept)
        note = (
            f"partition: {left_out:,} of {left_out + len(kept):,} values of {self.column} have fewer than "
            f"{self.min_samples} training samples and are left out (partition.min_samples)"
        )
        notes = [note] if left_out else []
        without = int((sizes == 0).sum())
        if without:
            notes.append(
                f"partition: {without:,} of {len(sizes):,} values of {self.column} have no training sample "
                "and are left out (samples may be in the test part, or held by the server: data.server_share)"
            )
        return self.assignment(number[column.train], test, names, notes)

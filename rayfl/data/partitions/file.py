"""Clients by a table that names the owner of each sample."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from rayfl.data.base import Assignment, Names, Numbering, Samples, called, in_order
from rayfl.data.partitions._dealing import Owners
from rayfl.data.partitions._own import OwnPartition, fault, own_column
from rayfl.data.tables import check_file, line_of, read_table, require
from rayfl.errors import DataError

if TYPE_CHECKING:
    import pandas as pd


class FromFile(OwnPartition):
    """File: a table says which client owns which sample; clients keep the ids in it.

    The table has the columns ``sample`` and ``client``: the position of a training sample in the dataset,
    from 0, and the client's id, any text or number. A column ``part`` with ``train`` and ``test``, or a
    second table ``test_path``, assigns test samples in the same way; without either, test samples follow the
    client's labels. If the dataset is one source that was split into training and test samples
    (``data.test_fraction``), ``sample`` is the position in the source and covers both.

    With ``by`` the table identifies samples by a column of the dataset instead of positions: images by
    ``file``, rows of a table by a column in ``exclude``. All training and test samples with this value belong
    to the client.

    Clients are numbered in the order of their ids: integers by size, others as text. Samples that are not in
    the table belong to no client.
    """

    name: Literal["file"] = "file"
    path: Path = Field(description="a .csv or .parquet file with columns sample, client and optionally part")
    test_path: Path | None = Field(
        None, description="the same for test samples, with columns sample and client"
    )

    by: str = Field(
        "sample",
        min_length=1,
        description="sample: by position; or the column of the dataset that names the samples",
    )

    @override
    def check(self) -> None:
        for path in filter(None, (self.path, self.test_path)):
            check_file(path)

    @override
    def assign(self, samples: Samples, seed: int) -> Assignment:
        if self.by != "sample":
            return self._by_column(samples)
        numbering = samples.numbering or Numbering(np.arange(len(samples.y_train)))
        train, test = self._read_rows(numbering.split)
        names = train.names
        if test is not None:
            test = test.with_names(names)
        if numbering.split:
            assert numbering.test is not None
            owners = _owners(train, len(numbering.train), "sample")
            return self.assignment(
                _part_owners(owners, numbering.train, len(samples.y_train)),
                _part_owners(owners, numbering.test, len(samples.y_test)),
                names,
            )
        owners = _owners(train, len(numbering.train), "training sample")
        train_owners = _part_owners(owners, numbering.train, len(samples.y_train))
        test_owners = None if test is None else _owners(test, len(samples.y_test), "test sample")
        return self.assignment(train_owners, test_owners, names)

    def _by_column(self, samples: Samples) -> Assignment:
        """The assignment if the table identifies samples by a column of the dataset."""
        import pandas as pd

        if self.test_path is not None:
            raise DataError(
                f"{self.test_path}: with partition.by the table in partition.path covers test samples, too; "
                "leave partition.test_path out"
            )
        column = own_column(samples, self.by, "partition.by")
        frame = read_table(self.path, text=True)
        require(frame, (self.by, "client"), str(self.path))
        values = frame[self.by].astype(str).str.strip()
        places = pd.Index(column.values).get_indexer(pd.Index(values))
        unknown = np.flatnonzero(places < 0)
        if len(unknown):
            where = line_of(self.path, int(frame.index[unknown[0]]))
            raise DataError(f"{where}: the dataset has no {self.by} {values.iloc[unknown[0]][:100]!r}")
        rows = _Rows.of(frame.assign(sample=places), self.path)
        owners = _owners(rows, len(column.values), self.by, column.values)
        test = None if column.test is None else owners[column.test]
        return self.assignment(owners[column.train], test, rows.names)

    def _read_rows(self, one_source: bool) -> tuple[_Rows, _Rows | None]:
        """The rows of the files for training samples, and for test samples if there are any."""
        frame = read_table(self.path, text=True)
        require(frame, ("sample", "client"), str(self.path))
        if "part" not in frame and self.test_path is None:
            return _Rows.of(frame, self.path), None
        if one_source:
            where = self.test_path or f"{self.path}: part"
            raise DataError(
                f"{where}: the dataset was split into training and test samples itself; give the owner of "
                "each sample once, without part or test_path"
            )
        if self.test_path is not None:
            if "part" in frame:
                raise DataError(f"{self.path}: has a column part, and there is partition.test_path; give one")
            test_frame = read_table(self.test_path, text=True)
            require(test_frame, ("sample", "client"), str(self.test_path))
            return _Rows.of(frame, self.path), _Rows.of(test_frame, self.test_path)
        part = frame["part"].astype(str).str.strip()
        wrong = np.flatnonzero(~part.isin(["train", "test"]))
        if len(wrong):
            where = line_of(self.path, frame.index[wrong[0]])
            raise DataError(f"{where}: part is {part.iloc[wrong[0]]!r}; expected train or test")
        training = frame[part == "train"]
        if training.empty:
            raise DataError(f"{self.path}: part is test in all rows; no client has a training sample")
        tests = frame[part == "test"]
        return _Rows.of(training, self.path), None if tests.empty else _Rows.of(tests, self.path)


@dataclass(frozen=True)
class _Rows:
    """Rows of a table of owners.

    Attributes:
        path: the file.
        rows: their indices in the table that was read ``(m,)``.
        samples: the numbers of the samples ``(m,)``.
        clients: the index in ``names`` of each row's client ``(m,)``.
        names: the ids of the clients that occur, in order.
    """

    path: Path
    rows: NDArray[np.int64]
    samples: NDArray[np.int64]
    clients: NDArray[np.int64]
    names: Names

    @classmethod
    def of(cls, frame: pd.DataFrame, path: Path) -> _Rows:
        """From a table with columns ``sample`` and ``client``.

        Raises:
            DataError: if a sample is not a number, or a client is not an id.
        """
        import pandas as pd

        numbers = pd.to_numeric(frame["sample"], errors="coerce").to_numpy(np.float64)
        with np.errstate(invalid="ignore"):
            valid = (numbers >= 0) & (numbers < _NUMBER_LIMIT) & (numbers == np.floor(numbers))
        if not valid.all():
            wrong = int(np.flatnonzero(~valid)[0])
            value = str(frame["sample"].iloc[wrong])
            raise DataError(
                f"{line_of(path, frame.index[wrong])}: sample {value[:40]!r} is not a position in the "
                "dataset; expected an integer from 0"
            )
        codes, raw_ids = pd.factorize(frame["client"], use_na_sentinel=False)
        ids = ["" if pd.isna(value) else str(value).strip() for value in raw_ids]
        for code, name in enumerate(ids):
            if fault(name):
                where = line_of(path, int(frame.index[int((codes == code).argmax())]))
                raise DataError(f"{where}: {fault(name)}")
        names = np.array(in_order(sorted(set(ids))))
        clients = pd.Index(names).get_indexer(pd.Index(ids))[codes]
        return cls(path, frame.index.to_numpy(np.int64), numbers.astype(np.int64), clients, names)

    def place(self, row: int) -> str:
        """The place of a row, for errors."""
        return line_of(self.path, int(self.rows[row]))

    def with_names(self, names: Names) -> _Rows:
        """The same rows with other ``names``, to which ``clients`` then refers.

        Raises:
            DataError: if a client is not among these names.
        """
        import pandas as pd

        clients = pd.Index(names).get_indexer(pd.Index(self.names))[self.clients]
        unknown = np.flatnonzero(clients < 0)
        if len(unknown):
            name = str(self.names[self.clients[unknown[0]]])
            raise DataError(f"{self.place(unknown[0])}: client {name!r} has no training sample")
        return replace(self, clients=clients, names=names)


_NUMBER_LIMIT = 2**31


def _owners(rows: _Rows, total: int, what: str, values: Names | None = None) -> Owners:
    """The client of each sample of a source ``(total,)``, -1 for none.

    Args:
        rows: the table.
        total: number of samples in the source.
        what: what a sample is called, for errors.
        values: names of the samples in place of their numbers, for errors.

    Raises:
        DataError: if there is no such sample, or it has two owners.
    """
    import pandas as pd

    beyond = np.flatnonzero(rows.samples >= total)
    if len(beyond):
        row = beyond[0]
        raise DataError(
            f"{rows.place(row)}: there is no {what} {rows.samples[row]}; they are numbered 0 to {total - 1}"
        )
    duplicates = np.flatnonzero(pd.Series(rows.samples).duplicated())
    if len(duplicates):
        row = duplicates[0]
        first = int((rows.samples == rows.samples[row]).argmax())
        sample, owner = called(values, rows.samples[row]), called(rows.names, rows.clients[first])
        raise DataError(
            f"{rows.place(row)}: {what} {sample} belongs to {owner} already ({rows.place(first)})"
        )
    owners = np.full(total, -1, np.int64)
    owners[rows.samples] = rows.clients
    return owners


def _part_owners(owners: Owners, places: NDArray[np.int64], count: int) -> Owners:
    """The client of each sample of a part ``(count,)``.

    Args:
        owners: the client of each sample of the source ``(total,)``.
        places: the position of each of them in the part, -1 if it is not in it ``(total,)``.
        count: number of samples in the part.
    """
    placed = np.full(count, -1, np.int64)
    in_part = places >= 0
    placed[places[in_part]] = owners[in_part]
    return placed

"""Base of partitions whose clients are given by the user, with ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rayfl.data.base import Assignment, Column, Names, Partition, Samples
from rayfl.data.partitions._dealing import Owners, by_owner
from rayfl.errors import DataError, nearest

_LONGEST_ID = 200
"""Maximum number of characters in a client's id."""


class OwnPartition(Partition):
    """A partition whose clients and ids are given, not drawn."""

    clients: int = Field(0, ge=0, description="expected number of clients; default: as many as are named")
    tests: Literal["own", "labels"] = Field(
        "own",
        description="own: a client is tested on its own test samples, if their owners are known; "
        "labels: on test samples that follow its label distribution, as in other "
        "partitions",
    )

    _without_tests: ClassVar[str] = "give it one"
    """What to do about clients without test samples."""

    def assignment(
        self, train: Owners, test: Owners | None, names: Names, notes: Sequence[str] = ()
    ) -> Assignment:
        """The assignment of samples to their owners.

        Args:
            train: the client of each training sample ``(n,)``, -1 for none.
            test: the client of each test sample ``(n,)``, -1 for none; None if unknown.
            names: the ids of the clients ``(N,)``.
            notes: lines for the user.

        Raises:
            DataError: if a client has no training sample, or no test sample where ``test`` is used; or if
                the number of clients is not ``clients``.
        """
        where, count = f"partition: {self.name}", len(names)
        if self.clients not in (0, count):
            raise DataError(f"partition.clients: {self.clients}, but {count} clients are named; leave it out")
        sizes = np.bincount(train[train >= 0], minlength=count)
        if not sizes.all():
            raise DataError(
                f"{where}: client {str(names[sizes.argmin()])!r} has no training sample "
                f"({_such(sizes)}; samples may be in the test part, or held by the server: data.server_share)"
            )
        tests = None
        if test is not None and self.tests == "own":
            test_sizes = np.bincount(test[test >= 0], minlength=count)
            if not test_sizes.all():
                raise DataError(
                    f"{where}: client {str(names[test_sizes.argmin()])!r} has no test sample of its own "
                    f"({_such(test_sizes)}); {self._without_tests}, or set partition.tests=labels"
                )
            tests = by_owner(test, count)
        unowned = np.flatnonzero(train < 0)
        if len(unowned):
            notes = (
                *notes,
                f"partition: {len(unowned):,} of {len(train):,} training samples belong to no client and are "
                "not used",
            )
        return Assignment(by_owner(train, count), test=tests, names=names, notes=tuple(notes))


def _such(sizes: NDArray[np.integer]) -> str:
    count = int((sizes == 0).sum())
    return "the only one" if count == 1 else f"{count:,} such clients"


def own_column(samples: Samples, name: str, setting: str) -> Column:
    """The column ``name`` of the dataset.

    Raises:
        DataError: if the dataset has no such column.
    """
    if name not in samples.columns:
        suggestion = nearest(name, samples.columns) if samples.columns else "it has no columns for clients"
        if not samples.columns:
            suggestion += " (whole numbers or text for each sample, without gaps)"
        if "did you mean" not in suggestion:
            suggestion += "; to divide a table by one of its columns, add it to data.exclude"
        raise DataError(f"{setting}: {samples.name} has no column {name!r}; {suggestion}")
    return samples.columns[name]


def fault(name: str) -> str:
    """The reason why ``name`` cannot be the id of a client in tables and files; empty if it can."""
    if not name:
        return "the client is empty"
    if len(name) > _LONGEST_ID or not name.isprintable():
        return f"client {name[:20]!r}...: an id has at most {_LONGEST_ID} printable characters"
    return ""

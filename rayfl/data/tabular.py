"""Convert tables to features and classes: numbers as they are, categories one-hot, labels numbered."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rayfl.data.arrays import column_of
from rayfl.data.base import Column, in_order
from rayfl.data.tables import require
from rayfl.errors import DataError
from rayfl.memory import free_memory
from rayfl.units import size

if TYPE_CHECKING:
    import pandas as pd

Place = Callable[[int], str]
"""Returns the place of a row, for errors."""

MOST_VALUES = 1000
"""A column with more distinct texts is not a category."""
_NAMELESS = re.compile(r"Unnamed: \d+")
"""The name that pandas gives a column without a name."""
_LONGEST_ID = 200
"""Maximum characters of a value that may be the id of a client."""


@dataclass(frozen=True)
class Roles:
    """The roles of a table's columns.

    Attributes:
        label: the column with the class; None if ``targets`` are predicted.
        exclude: columns that are not features, but may define clients.
        categorical: columns of numbers to encode one-hot, as those with text are.
        targets: columns with numbers to predict.
    """

    label: str | None
    exclude: Sequence[str] = ()
    categorical: Sequence[str] = ()
    targets: Sequence[str] = ()

    @property
    def predicted(self) -> tuple[str, ...]:
        """The columns to predict."""
        return tuple(self.targets) if self.label is None else (self.label,)


@dataclass(frozen=True)
class Encoded:
    """A table as the arrays of a dataset.

    Attributes:
        x: features ``(n, D)``, in the order of the columns; a category has a feature for each of its values.
        y: labels ``(n,)``; all 0 if numbers are predicted.
        class_names: the name of each label.
        columns: the excluded columns, as text ``(n,)`` each.
        targets: numbers to predict ``(n, K)``, if any.
    """

    x: NDArray[np.float32]
    y: NDArray[np.int64]
    class_names: tuple[str, ...]
    columns: dict[str, NDArray[np.str_]]
    targets: NDArray[np.float32] | None = None

    def part(self, train: NDArray[np.bool_], test: NDArray[np.bool_]) -> dict[str, Column]:
        """The columns by name, for training samples ``train`` and test samples ``test``, masks ``(n,)``."""
        return {name: column_of(values[train], values[test]) for name, values in self.columns.items()}


def encode(frame: pd.DataFrame, roles: Roles, where: str, place: Place) -> Encoded:
    """Convert a table to features and classes.

    Args:
        frame: training and test samples together, a row each.
        roles: of its columns.
        where: the table, for errors.
        place: returns the place of a row, for errors.

    Raises:
        DataError: if a column is missing or contains something invalid: one line with the row.
    """
    predicted = roles.predicted
    require(frame, (*predicted, *roles.exclude, *roles.categorical), where)
    for name in predicted:
        if name in roles.exclude:
            raise DataError(f"{where}: column {name!r} is the label; it cannot be excluded")
    names = [name for name in frame.columns if name not in (*predicted, *roles.exclude)]
    nameless = next((name for name in names if _NAMELESS.fullmatch(str(name))), None)
    if nameless is not None:
        raise DataError(
            f"{where}: column {int(nameless.partition(':')[2]) + 1} has no name, like the row numbers that "
            f"pandas writes (index=False leaves them out); name it, or add {nameless!r} to exclude"
        )
    if not names:
        raise DataError(f"{where}: has no column for a feature besides {', '.join(map(repr, predicted))}")
    misplaced = set(roles.categorical) - set(names)
    if misplaced:
        raise DataError(
            f"{where}: column {min(misplaced)!r} is the label or excluded; it cannot be categorical"
        )
    targets = None if roles.label is not None else _targets(frame, roles.targets, place)
    y: NDArray[np.int64] = np.zeros(len(frame), np.int64)
    class_names: tuple[str, ...] = ()
    if roles.label is not None:
        y, class_names = labels_of(frame[roles.label], f"column {roles.label!r}", place)
    x = features_of(frame[names], roles, where, place)
    texts = {name: as_text(frame[name]) for name in roles.exclude}
    id_columns = {name: text for name, text in texts.items() if text is not None}
    return Encoded(x, y, class_names, id_columns, targets)


def features_of(frame: pd.DataFrame, roles: Roles, where: str, place: Place) -> NDArray[np.float32]:
    """Convert columns that are features to numbers ``(n, D)``.

    Args:
        frame: with these columns only.
        roles, where, place: see :func:`encode`.

    Raises:
        DataError: if a cell is invalid, or the features do not fit in memory.
    """
    features = [_feature(frame[name], name, roles, place) for name in frame.columns]
    width = sum(1 if values is None else len(values) for _, values in features)
    needed, free = 4 * width * len(frame), free_memory()
    if 2 * needed > free:
        raise DataError(
            f"{where}: {len(frame):,} rows of {width:,} features need {size(2 * needed)}, "
            f"{size(free)} are free; exclude columns"
        )
    x = np.zeros((len(frame), width), np.float32)
    first = 0
    for codes, values in features:
        if values is None:
            x[:, first] = codes
        else:
            x[np.arange(len(x)), first + codes.astype(np.int64)] = 1
        first += 1 if values is None else len(values)
    return x


def _is_numeric(column: pd.Series) -> bool:
    import pandas as pd

    return bool(pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column))


def known_values(frame: pd.DataFrame, run_rows: pd.DataFrame, roles: Roles, place: Place) -> pd.DataFrame:
    """Convert rows of another table to the types of a known one, which must have all their categories.

    Args:
        frame: with the columns of ``run_rows``.
        run_rows: the rows by which values are numbered.
        roles: of the columns.
        place: returns the place of a row of ``frame``, for errors.

    Raises:
        DataError: if a cell is empty, or has a class or category that is not in ``run_rows``: one line with
            the row.
    """
    import pandas as pd

    columns = {}
    for name in frame.columns:
        new, old = frame[name], run_rows[name]
        missing = np.flatnonzero(new.isna())
        if len(missing):
            raise DataError(f"{place(missing[0])}: column {name!r} is empty")
        if _is_numeric(old) and not _is_numeric(new):
            wrong = np.flatnonzero(pd.to_numeric(new, errors="coerce").isna())
            if len(wrong):
                value = str(new.iloc[wrong[0]])[:40]
                raise DataError(f"{place(wrong[0])}: column {name!r} is {value!r}; expected a number")
            new = pd.to_numeric(new)
        if _is_numeric(old) and name != roles.label and name not in roles.categorical:
            columns[name] = new
            continue
        if not _is_numeric(old):
            new, old = new.astype(str), old.astype(str)
        unknown = np.flatnonzero(~new.isin(old.unique()))
        if len(unknown):
            value = str(new.iloc[unknown[0]])[:40]
            raise DataError(
                f"{place(unknown[0])}: column {name!r} is {value!r}, which is not in the run's table"
            )
        columns[name] = new.astype(old.dtype)
    return pd.DataFrame(columns)


def _targets(frame: pd.DataFrame, names: Sequence[str], place: Place) -> NDArray[np.float32]:
    """Columns of numbers to predict ``(n, K)``.

    Raises:
        DataError: if one contains anything else.
    """

    for name in names:
        column = frame[name]
        if not _is_numeric(column):
            raise DataError(
                f"{place(0)}: column {name!r} holds {str(column.iloc[0])[:40]!r}; expected a number"
            )
        wild = np.flatnonzero(~np.isfinite(column.to_numpy(np.float32, na_value=np.nan)))
        if len(wild):
            raise DataError(f"{place(wild[0])}: column {name!r} is {column.iloc[wild[0]]}; expected a number")
    return np.ascontiguousarray(frame[list(names)].to_numpy(np.float32))


_MISSING = "empty, or a word such as NA or None"
"""What counts as no value, as pandas reads tables."""


def labels_of(column: pd.Series, what: str, place: Place) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Number the labels ``(n,)``, and return the classes' names: whole numbers by value, others as text.

    Raises:
        DataError: if a label is missing or cannot be a class, or there is only one class.
    """
    import pandas as pd

    missing = np.flatnonzero(column.isna())
    if len(missing):
        raise DataError(f"{place(missing[0])}: {what} has no label ({_MISSING})")
    values = column.to_numpy()
    if values.dtype.kind == "f":
        fractions = np.flatnonzero(~(np.isfinite(values) & (values == np.floor(values))))
        if len(fractions):
            row = fractions[0]
            raise DataError(
                f"{place(row)}: {what} is {values[row]:g}; a label is a class: a whole number or text "
                "(numbers to predict: data.targets)"
            )
        values = values.astype(np.int64)
    if values.dtype.kind in "iu":
        distinct, y = np.unique(values, return_inverse=True)
        names = [str(value) for value in distinct]
    else:
        codes, ids = pd.factorize(pd.Series(values).astype(str))
        names = in_order([str(each) for each in ids])
        y = pd.Index(names).get_indexer(pd.Index(ids))[codes]
    if len(names) < 2:
        raise DataError(f"{place(0)}: {what} is {names[0]!r} in all rows; expected two classes or more")
    if 2 * len(names) > max(len(values), 4):
        raise DataError(
            f"{place(0)}: {what} has {len(names):,} different values in {len(values):,} rows; "
            "a label is a class (numbers to predict: data.targets)"
        )
    return y.astype(np.int64), tuple(names)


def as_text(column: pd.Series) -> NDArray[np.str_] | None:
    """A column as text ``(n,)``, empty for missing values; None if values are too long for ids of clients."""
    values = column.to_numpy()
    if values.dtype.kind == "f" and bool((np.isnan(values) | (values == np.floor(values))).all()):
        column = column.astype("Int64")  # whole numbers and missing values
    text = column.astype(object).where(column.notna(), "").astype(str).str.strip()
    return None if len(text) and text.str.len().max() > _LONGEST_ID else text.to_numpy().astype(str)


def _feature(
    column: pd.Series, name: str, roles: Roles, place: Place
) -> tuple[NDArray[np.generic], list[str] | None]:
    """The numbers of a feature ``(n,)`` and None; or the index of each row's category, and the categories."""
    import pandas as pd

    missing = np.flatnonzero(column.isna())
    if len(missing):
        raise DataError(
            f"{place(missing[0])}: column {name!r} has no value ({_MISSING}); fill it in, or exclude it"
        )
    categorical = name in roles.categorical
    if _is_numeric(column) and not categorical:
        with np.errstate(over="ignore"):
            values = column.to_numpy().astype(np.float32)
        wild = np.flatnonzero(~np.isfinite(values))
        if len(wild):
            raise DataError(
                f"{place(wild[0])}: column {name!r} is {column.iloc[wild[0]]}; expected a finite float32"
            )
        return values, None
    if pd.api.types.is_datetime64_any_dtype(column):
        raise DataError(f"{place(0)}: column {name!r} holds times; exclude it, or convert it to numbers")
    if not categorical:
        numbers = pd.to_numeric(column, errors="coerce").isna().to_numpy()
        if 2 * numbers.sum() < len(numbers):
            row = int(np.flatnonzero(numbers)[0]) if numbers.any() else 0
            raise DataError(
                f"{place(row)}: column {name!r} is {str(column.iloc[row])[:40]!r}, where most rows have "
                "numbers; correct it, or add the column to data.categorical"
            )
    codes, ids = pd.factorize(column.astype(str))
    if len(ids) > MOST_VALUES:
        raise DataError(
            f"{place(0)}: column {name!r} has {len(ids):,} different values, at most {MOST_VALUES:,} can be "
            "one-hot; exclude it"
        )
    values_in_order = in_order([str(each) for each in ids])
    return pd.Index(values_in_order).get_indexer(pd.Index(ids))[codes], values_in_order

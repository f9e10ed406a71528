"""Read tables from CSV or Parquet files, with errors of one line."""

from __future__ import annotations

import csv
import itertools
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from rayfl.errors import DataError, nearest, one_line
from rayfl.given import shown_path

if TYPE_CHECKING:
    import pandas as pd


def read_table(path: Path, text: bool = False, ids: Collection[str] = ()) -> pd.DataFrame:
    """Read a table with a header.

    Args:
        path: a CSV file (commas, UTF-8), or Parquet if its name ends in ``.parquet``.
        text: read all values of a CSV file as text. By default columns that contain only numbers are read as
            numbers, and empty cells, ``NA`` and ``nan`` as NaN.
        ids: columns that are always read as text: ``007`` and ``7`` are two clients.

    Returns:
        The rows that are not empty. Row ``i`` of the index is line ``i + 2`` of a CSV file.

    Raises:
        DataError: if the file is missing, has no rows, or cannot be read.
    """
    import pandas as pd  # deferred: workers do without it

    check_file(path)
    try:
        if path.suffix == ".parquet":
            frame = _read_parquet(path)
        else:
            _check_separator(path)
            with warnings.catch_warnings():
                warnings.simplefilter("error", pd.errors.ParserWarning)  # cells beyond the header
                frame = pd.read_csv(
                    path,
                    dtype=str if text else None,
                    na_filter=not text,
                    index_col=False,
                    skip_blank_lines=False,
                    encoding="utf-8-sig",
                    low_memory=False,
                )
            _check_header(path)
            blank = (frame == "").all(axis=1) if text else frame.isna().all(axis=1)
            frame = frame[~blank]
    except DataError:
        raise
    except pd.errors.EmptyDataError:
        raise DataError(f"{path}: the file is empty; expected a header and rows") from None
    except pd.errors.ParserWarning:
        raise DataError(f"{path}: a row has more cells than the header has columns") from None
    except Exception as error:  # broken bytes make pandas and pyarrow raise nearly anything
        raise DataError(f"{path}: cannot be read as a table ({one_line(error)})") from error
    if not len(frame):
        raise DataError(f"{path}: has no rows")
    frame.columns = [str(name).strip() for name in frame.columns]
    return frame if text or path.suffix == ".parquet" else _ids_as_text(frame, path, ids)


def _ids_as_text(frame: pd.DataFrame, path: Path, ids: Collection[str]) -> pd.DataFrame:
    """The table with the columns ``ids`` as text, except columns of whole numbers written as floats: pandas
    writes ``7.0`` if a column also has empty cells.
    """
    import pandas as pd

    if not any(name in ids for name in frame):
        return frame
    id_columns = pd.read_csv(
        path,
        usecols=lambda name: str(name).strip() in ids,
        dtype=str,
        na_filter=False,
        index_col=False,
        skip_blank_lines=False,
        encoding="utf-8-sig",
    ).loc[frame.index]
    id_columns.columns = [str(name).strip() for name in id_columns.columns]
    as_floats = [
        name for name in id_columns if id_columns[name].str.strip().str.fullmatch(r"(-?\d+\.0)?").all()
    ]
    return frame.assign(**{str(name): id_columns[name] for name in id_columns if name not in as_floats})


def check_file(path: Path) -> None:
    """Refuse a path that is not a file.

    Raises:
        DataError
    """
    if not path.is_file():
        raise DataError(f"{path}: {'it is a folder' if path.is_dir() else 'there is no such file'}")


def check_columns(path: Path, columns: tuple[str, ...]) -> None:
    """Refuse a table whose header lacks one of these columns; without a readable header nothing is refused,
    since reading the table says more.

    Raises:
        DataError
    """
    import pandas as pd

    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            header = pd.DataFrame(columns=parquet.read_schema(path).names)
        else:
            _check_separator(path)
            header = pd.read_csv(path, nrows=0, encoding="utf-8-sig")
    except DataError:
        raise
    except Exception:  # broken bytes make pandas and pyarrow raise nearly anything
        return
    header.columns = [str(name).strip() for name in header.columns]
    require(header, columns, str(path))


_SEPARATORS = {";": "';'", "\t": "tabs", "|": "'|'"}
"""Other separators of columns that programs write, with their names in messages."""


def _check_separator(path: Path) -> None:
    """Refuse files whose columns are not separated by commas, such as those with semicolons of spreadsheets.

    That is assumed if another separator divides header and first row into equally many cells, and into more
    than commas do. Such files are not read, since commas are often decimal points in them.

    Raises:
        DataError
    """

    def cells(separator: str) -> list[int]:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = (row for row in csv.reader(file, delimiter=separator) if row)
            return [len(row) for row in itertools.islice(rows, 2)]

    try:
        cell_counts = {separator: cells(separator) for separator in (",", *_SEPARATORS)}
    except (OSError, ValueError, csv.Error):  # compressed or broken: reading it raises the error
        return
    for separator, spoken in _SEPARATORS.items():
        counts = cell_counts[separator]
        if len(counts) == 2 and counts[0] == counts[1] > cell_counts[","][0]:
            what = f"its columns seem to be separated by {spoken}"
            raise DataError(f"{path}: {what}; expected commas, and points in numbers")


def _check_header(path: Path) -> None:
    """Refuse two columns of the same name, which pandas would rename.

    Raises:
        DataError
    """
    import pandas as pd

    header = pd.read_csv(path, header=None, nrows=1, dtype=str, na_filter=False, encoding="utf-8-sig")
    names = header.iloc[0].str.strip()
    twice = names[names.duplicated()]
    if len(twice):
        raise DataError(f"{path}: has two columns {twice.iloc[0]!r}")


def _read_parquet(path: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise DataError(f"{path}: Parquet needs pyarrow: pip install 'rayfl[parquet]'") from None
    return pd.read_parquet(path).reset_index(drop=True)


def line_of(path: Path, row: int) -> str:
    """The place of row ``row`` of :func:`read_table`'s index, for messages: ``owners.csv:17``."""
    if shown_path(path) == "data":  # lists that were given in Python
        return f"given partition, entry {row + 1}"
    return f"{path}, row {row}" if path.suffix == ".parquet" else f"{path}:{row + 2}"


def require(frame: pd.DataFrame, columns: tuple[str, ...], where: str) -> None:
    """Refuse a table that lacks one of these columns.

    Raises:
        DataError
    """
    for name in columns:
        if name not in frame:
            has = ", ".join(map(str, frame.columns[:_MOST_SHOWN]))
            has += ", ..." if len(frame.columns) > _MOST_SHOWN else ""
            close = nearest(name, map(str, frame.columns))
            near = f"; {close}" if close.startswith("did") else ""
            raise DataError(f"{where}: has no column {name!r}, only {has}{near}")


_MOST_SHOWN = 8
"""Maximum number of columns named in a message."""

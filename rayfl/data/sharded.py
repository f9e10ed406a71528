"""Inputs in many files, which are read only when their rows are needed.

Importing this module is cheap; pyarrow is needed for Parquet only.
"""

from __future__ import annotations

import hashlib
import math
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from rayfl.errors import DataError, one_line

_format: Any = np.lib.format  # without types

SUFFIXES = (".npz", ".parquet")

_MOST_OPEN = 4096
"""Maximum number of open shards. Mapped files take no memory that the system cannot reclaim."""


class ShardedArray:
    """An array ``(n, ...)`` whose rows are stored in shards, which are files or row groups of Parquet files.

    Only its description is sent to other processes. Each of them reads the shards that it needs: uncompressed
    ones (``numpy.savez``) are mapped, others are cached up to ``cache`` bytes. While rows of one shard are
    copied, the next shard is read.

    Args:
        paths: for each of the S shards its file.
        starts: the index of the first row of each shard, and the total ``(S + 1,)``.
        shape: of a row.
        dtype: of the numbers.
        cache: bytes of shards that are kept in memory.
        groups: for each shard the number of its row group ``(S,)``; None if all are whole files.
        chosen: the stored rows that it has ``(n,)``; None for all.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        starts: NDArray[np.int64],
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        cache: int,
        groups: NDArray[np.integer] | None = None,
        chosen: NDArray[np.int64] | None = None,
    ) -> None:
        self.paths, self.starts, self.cache, self.groups = tuple(paths), starts, cache, groups
        self.chosen = chosen
        self.shape, self.dtype = (int(starts[-1]) if chosen is None else len(chosen), *shape), dtype
        self._open()

    def _open(self) -> None:
        self._kept: OrderedDict[int, tuple[NDArray[Any], int]] = OrderedDict()  # rows; bytes if not mapped
        self._held = 0
        self._ahead: dict[int, Future[NDArray[Any]]] = {}
        self._reader: ThreadPoolExecutor | None = None
        self.reads = 0
        """Number of shards opened so far."""

    def __getstate__(self) -> dict[str, Any]:
        """The description without cached rows."""
        transient = ("_kept", "_held", "_ahead", "_reader", "reads")
        return {name: value for name, value in vars(self).items() if name not in transient}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the description with an empty cache."""
        vars(self).update(state)
        self._open()

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in memory: 0, since the rows stay in their files (the cache is not counted)."""
        return 0

    def __len__(self) -> int:
        return self.shape[0]

    def take(self, ids: NDArray[np.integer], axis: int = 0) -> NDArray[Any]:
        """The rows with these indices ``(len(ids), ...)``."""
        assert axis == 0
        ids = np.asarray(ids, np.int64)
        if self.chosen is not None:
            ids = self.chosen[ids]
        rows = np.empty((len(ids), *self.shape[1:]), self.dtype)
        shard_of = np.searchsorted(self.starts, ids, side="right") - 1
        order = np.argsort(shard_of, kind="stable")
        shards, first = np.unique(shard_of[order], return_index=True)
        edges = [*first.tolist(), len(ids)]
        for place, (shard, (begin, end)) in enumerate(zip(shards.tolist(), pairwise(edges), strict=True)):
            shard_rows = self._rows(shard)
            if place + 1 < len(shards):
                self._read_ahead(int(shards[place + 1]))
            places = order[begin:end]
            rows[places] = shard_rows[ids[places] - self.starts[shard]]
        self._check_finite(rows, shard_of)
        return rows

    def take_once(self, ids: NDArray[np.integer]) -> NDArray[Any]:
        """As :meth:`take`, for rows that are needed only once: no shard is kept in the cache."""
        cache, self.cache = self.cache, 0
        try:
            return self.take(ids)
        finally:
            self.cache = cache
            self._kept.clear()
            self._held = 0

    def of_rows(self, ids: NDArray[np.integer]) -> ShardedArray:
        """The array of these rows; they stay in their files."""
        chosen = np.asarray(ids, np.int64) if self.chosen is None else self.chosen[ids]
        return ShardedArray(
            self.paths, self.starts, self.shape[1:], self.dtype, self.cache, self.groups, chosen
        )

    def _check_finite(self, rows: NDArray[Any], shard_of: NDArray[np.integer]) -> None:
        """Refuse NaN and infinity; arrays in memory are checked when they are loaded.

        Args:
            rows: ``(n, ...)``.
            shard_of: the shard of each ``(n,)``.

        Raises:
            DataError
        """
        if rows.dtype.kind != "f":
            return
        with np.errstate(all="ignore"):  # a sum is cheap, but may overflow for finite rows
            if np.isfinite(rows.sum()):
                return
        bad = np.flatnonzero(~np.isfinite(rows).reshape(len(rows), -1).all(axis=1))
        if len(bad):
            raise DataError(
                f"{self.paths[shard_of[bad[0]]]}: x holds NaN or infinity; every value must be finite"
            )

    def __getitem__(self, key: Any) -> NDArray[Any]:
        return self.take(np.arange(len(self))[key])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self.take(np.arange(len(self))), dtype)

    def fingerprint(self) -> bytes:
        """A digest of the contents, from the checksums in .npz files and parts of Parquet files."""
        digest = hashlib.sha256(repr((self.shape, self.dtype.str)).encode())
        for path in dict.fromkeys(self.paths):
            try:
                digest.update(f"{path.name} {path.stat().st_size} {_checksum(path)}".encode())
            except (OSError, zipfile.BadZipFile) as error:
                raise _unreadable(path, error) from None
        if self.chosen is not None:
            digest.update(self.chosen.tobytes())
        return digest.digest()

    def _rows(self, shard: int) -> NDArray[Any]:
        if shard in self._kept:
            self._kept.move_to_end(shard)
            return self._kept[shard][0]
        future = self._ahead.pop(shard, None)
        rows = future.result() if future is not None else self._read(shard)
        expected = int(self.starts[shard + 1] - self.starts[shard]), *self.shape[1:]
        if math.prod(rows.shape) != math.prod(expected) or rows.dtype != self.dtype:
            raise DataError(f"{self.paths[shard]}: x is no longer {self.dtype} of shape {expected}")
        held_bytes = 0 if isinstance(rows, np.memmap) else rows.nbytes
        rows = np.asarray(rows).reshape(expected)
        self._kept[shard] = rows, held_bytes
        self._held += held_bytes
        while len(self._kept) > 1 and (self._held > self.cache or len(self._kept) > _MOST_OPEN):
            self._held -= self._kept.popitem(last=False)[1][1]
        return rows

    def _read(self, shard: int) -> NDArray[Any]:
        self.reads += 1
        return read(self.paths[shard], "x", None if self.groups is None else int(self.groups[shard]))

    def _read_ahead(self, shard: int) -> None:
        """Start to read a shard that will be needed next, unless its file is mapped."""
        if shard in self._kept or shard in self._ahead or _is_mapped(self.paths[shard]):
            return
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, "rayfl-shards")
        self._ahead[shard] = self._reader.submit(self._read, shard)


def in_files(x: object) -> bool:
    """Whether these inputs are in files instead of in memory."""
    return isinstance(x, ShardedArray)


def read(path: Path, name: str, group: int | None = None) -> NDArray[Any]:
    """Read an array of a shard; it is mapped if the file stores it uncompressed.

    Args:
        path: of the file.
        name: of the array.
        group: read only this row group of a Parquet file; None: the whole file.

    Raises:
        DataError: if it cannot be read.
    """
    try:
        if path.suffix == ".parquet":
            return _parquet_column(path, name, group)
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            member = archive.getinfo(f"{name}.npy")
            if member.compress_type != zipfile.ZIP_STORED:
                with archive.open(member) as packed:
                    loaded: NDArray[Any] = _format.read_array(packed, allow_pickle=False)
                    return loaded
            file.seek(member.header_offset + 26)
            lengths = np.frombuffer(file.read(4), "<u2")  # of the name and the extra field before the data
            file.seek(int(lengths.sum()), 1)
            shape, fortran, dtype = header(file)
            if not math.prod(shape):
                return np.empty(shape, dtype)
            mapped: NDArray[Any] = np.memmap(
                path, dtype, "r", offset=file.tell(), shape=shape, order="F" if fortran else "C"
            )
            return mapped
    except DataError:
        raise
    except KeyError:
        what = f"{path}: has no {name!r}; a shard needs x and y, and client if clients are stored"
        raise DataError(what) from None
    except Exception as error:  # broken bytes make zip, zlib and NumPy raise nearly anything
        if "Expected all lists to be of size" in str(error):  # pyarrow before 26, for lists of fixed size
            raise DataError(f"{path}: {name} is missing in some rows ({one_line(error)})") from None
        raise _unreadable(path, error) from None


def names(path: Path) -> set[str]:
    """The names of the arrays in a shard.

    Raises:
        DataError: if it cannot be read.
    """
    try:
        if path.suffix == ".parquet":
            return set(_footer(path).schema.to_arrow_schema().names)
        with zipfile.ZipFile(path) as archive:
            return {name.removesuffix(".npy") for name in archive.namelist()}
    except Exception as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}: cannot be read ({one_line(error)})")


def by_number(paths: Iterable[Path]) -> list[Path]:
    """Sort files by the numbers in their names: train-2 before train-10."""
    return sorted(paths, key=lambda path: (re.sub(r"\d+", lambda n: n[0].zfill(20), path.name), path.name))


def header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, Fortran order and type of the ``.npy`` array that starts at the file's position."""
    version = _format.read_magic(file)
    reader = _format.read_array_header_1_0 if version == (1, 0) else _format.read_array_header_2_0
    shape, fortran, dtype = reader(file)
    return tuple(shape), bool(fortran), dtype


def rows_of(path: Path) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
    """The number of rows of ``x``, the shape of a row and the type, without reading the rows.

    Raises:
        DataError: if it cannot be read.
    """
    if "x" not in names(path):
        read(path, "x")  # raises the error
    try:
        if path.suffix == ".parquet":
            return _rows_of_parquet(path)
        if _is_mapped(path):  # checks that it can be mapped
            x = read(path, "x")
            shape, dtype = x.shape, x.dtype
        else:
            with zipfile.ZipFile(path) as archive, archive.open("x.npy") as file:
                shape, _, dtype = header(file)
    except DataError:
        raise
    except Exception as error:
        raise _unreadable(path, error) from None
    if not shape:
        raise DataError(f"{path}: x is a single number; expected one row a sample")
    return shape[0], tuple(shape[1:]), dtype


def groups_of(path: Path, rows: int) -> tuple[NDArray[np.integer], list[int]]:
    """The row groups of a file that are not empty: their numbers ``(g,)``, and the rows of each.

    Args:
        path: of the file; one that is not Parquet is a single group.
        rows: number of rows in the file.
    """
    if path.suffix != ".parquet":
        return np.zeros(1, np.int32), [rows]
    footer = _footer(path)
    counts = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
    filled = np.flatnonzero(counts).astype(np.int32)
    return filled, [counts[number] for number in filled]


def _footer(path: Path) -> Any:
    """The metadata of a Parquet file."""
    return _cached_footer(path, path.stat().st_mtime_ns)


@lru_cache(64)
def _cached_footer(path: Path, changed: int) -> Any:
    import pyarrow.parquet as pq

    return pq.read_metadata(path)


_FIRST_ROWS = 256
"""Number of rows of a Parquet file that are read to find the length of a row."""


def _rows_of_parquet(path: Path) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
    """As :func:`rows_of`, from the first rows and the footer, which has counts but not the length of a row.

    If the counts do not fit rows of equal length without missing values, the whole column is read, which
    raises the error. Other faults are found when the rows are read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    footer = _footer(path)
    if not footer.num_rows:
        return 0, (0,), np.dtype(np.uint8)
    # buffer_size: read page by page; without it the whole column of a row group would be read.
    with pq.ParquetFile(path, metadata=footer, buffer_size=1 << 16) as file:
        batch = next(file.iter_batches(_FIRST_ROWS, columns=["x"], use_threads=False))
    first = _from_arrow(path, "x", pa.chunked_array([batch.column(0)]))
    row_length = math.prod(first.shape[1:])
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        for column in map(group.column, range(group.num_columns)):
            if column.path_in_schema.partition(".")[0] == "x":
                gaps = column.statistics is not None and column.statistics.null_count
                if gaps or column.num_values != row_length * group.num_rows:
                    read(path, "x")
    return footer.num_rows, first.shape[1:], first.dtype


def _is_mapped(path: Path) -> bool:
    if path.suffix != ".npz":
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.getinfo("x.npy").compress_type == zipfile.ZIP_STORED
    except (OSError, KeyError, zipfile.BadZipFile):
        return False


def _parquet_column(path: Path, name: str, group: int | None) -> NDArray[Any]:
    import pyarrow.parquet as pq

    if group is None:
        return _from_arrow(path, name, pq.read_table(path, columns=[name])[name])
    with pq.ParquetFile(path, metadata=_footer(path)) as file:
        return _from_arrow(path, name, file.read_row_group(group, columns=[name])[name])


def _from_arrow(path: Path, name: str, chunks: Any) -> NDArray[Any]:
    """Convert an Arrow column to an array ``(n,)``, or ``(n, D)`` if it consists of lists of numbers.

    Raises:
        DataError: if values are missing, or the lists have different lengths.
    """
    column = chunks.combine_chunks()
    if column.null_count:
        raise DataError(f"{path}: {name} is missing in {column.null_count:,} of {len(column):,} rows")
    if not hasattr(column, "flatten"):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    values = column.flatten()
    if values.null_count:
        raise DataError(f"{path}: {values.null_count:,} numbers of {name} are missing")
    flat = values.to_numpy(zero_copy_only=False)
    if not len(column):
        return np.empty((0, 0), flat.dtype)
    lengths = np.unique(column.value_lengths())
    if len(lengths) > 1:
        raise DataError(
            f"{path}: rows of {name} have {lengths[0]} to {lengths[-1]} numbers; all must have equally many"
        )
    return np.ascontiguousarray(flat).reshape(len(column), -1)


def _checksum(path: Path) -> str:
    if path.suffix == ".npz":
        with zipfile.ZipFile(path) as archive:
            return " ".join(f"{member.filename} {member.CRC:08x}" for member in archive.infolist())
    size, digest = path.stat().st_size, hashlib.sha256()
    places = range(0, size, max(_PART_BYTES, size // _MOST_PARTS))
    with path.open("rb") as file:
        for place in (*places, max(0, size - _PART_BYTES)):  # the last part holds the footer
            file.seek(place)
            digest.update(file.read(_PART_BYTES))
    return digest.hexdigest()


_PART_BYTES, _MOST_PARTS = 1 << 16, 1 << 12
"""The checksum of a Parquet file of up to 256 MB covers all of it; of larger ones, 4,096 parts of 64 kB."""

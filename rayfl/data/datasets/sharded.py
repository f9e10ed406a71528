"""Data of millions of clients: a folder of files, of which each block reads only those that it needs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from rayfl.data import sharded
from rayfl.data.arrays import Layout, as_inputs, as_labels, check_classes, check_counted
from rayfl.data.base import Dataset, Names, Ragged, Ranges, Samples, Stored
from rayfl.data.scaling import Scaling
from rayfl.errors import DataError

_SAMPLES_FOR_SCALING = 10_000
"""Number of samples, evenly spaced, from which mean and deviation are computed."""

Rows = tuple[int, tuple[int, ...], np.dtype[Any]]
"""The number of samples in a file, the shape of one and its type."""

_MANY_SAMPLES = 50_000_000
"""With more training samples than this, labels are stored in the smallest integer type that fits."""


class Sharded(Dataset):
    """A folder of ``train-*`` and ``test-*`` files, .npz or .parquet, each with ``x``, ``y`` and ``client``.

    ``x`` contains features ``(n, D)``, grey images ``(n, H, W)`` or images ``(n, C, H, W)``, uint8 pixels or
    float32; ``y`` classes; ``client`` the number of the client that has the sample, in ascending order over
    all files (used by ``partition=stored``; other partitions do not need it). The inputs of training samples
    stay in their files, which every node must see under the same path. Files of ``numpy.savez`` are mapped,
    so that only the needed rows are read. Of Parquet files whole row groups are read, compressed .npz files
    are read as a whole, and both are cached up to ``cache_gb``. Mean and deviation are those of 10,000
    samples, evenly spaced.
    """

    elsewhere: ClassVar[str] = "data.path"

    name: Literal["sharded"] = "sharded"
    path: Path = Field(description="the folder of the shards")
    shape: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None,
        min_length=1,
        description="shape of a sample, such as [1, 28, 28], for Parquet, which has rows of numbers only",
    )
    cache_gb: float = Field(1.0, ge=0, description="memory for decoded shards in each process")

    def _files(self, part: str) -> list[Path]:
        folder = self.path.expanduser()
        return sharded.by_number(p for p in folder.glob(f"{part}*") if p.suffix in sharded.SUFFIXES)

    @override
    def available(self, root: Path) -> bool:
        return bool(self._files("train") and self._files("test"))

    @override
    def load(self, root: Path) -> Samples:
        trains, tests = self._nonempty_files("train"), self._nonempty_files("test")
        x_train = self._inputs(trains)
        _check_alike(tests)
        shaped = self._reshaped(_read_all(list(tests), "x"))
        layout: Layout = "chw" if shaped.ndim == 4 else "auto"
        x_test = as_inputs(shaped, f"{self.path}: x of the test files", layout)
        if x_test.shape[1:] != x_train.shape[1:] or x_test.dtype != x_train.dtype:
            raise DataError(
                f"{self.path}: x is {x_train.dtype} {x_train.shape[1:]} a sample in the training files, "
                f"{x_test.dtype} {x_test.shape[1:]} in the test files; they must be equal"
            )
        y_test = as_labels(_read_all(list(tests), "y"), len(x_test), f"{self.path}: y of the test files")
        y_train = self._labels(trains)
        classes = int(max(y_train.max(), y_test.max())) + 1
        check_counted(classes - 1, len(y_train) + len(y_test), f"{self.path}: labels")
        y_train = y_train.astype(
            np.int64 if len(y_train) <= _MANY_SAMPLES else np.min_scalar_type(classes), copy=False
        )
        samples = Samples(
            self.path.name, x_train, y_train, x_test, y_test, classes,  # type: ignore[arg-type]
            stored=self._stored_clients(trains, tests),
        )  # fmt: skip
        check_classes(samples, str(self.path))
        return samples

    @override
    def normalised(self, samples: Samples) -> Samples:
        if self.normalise != "pooled":
            return super().normalised(samples)
        from dataclasses import replace

        sampled = np.unique(np.linspace(0, len(samples.x_train) - 1, _SAMPLES_FOR_SCALING).astype(np.int64))
        x: Any = samples.x_train  # a ShardedArray, see load
        return replace(samples, scaling=Scaling.of(samples, x.take_once(sampled)))

    def _nonempty_files(self, part: str) -> dict[Path, Rows]:
        """The files of a part with their rows, without empty files, which big-data tools may write.

        Raises:
            DataError: if no file is left, or one cannot be read.
        """
        files = {path: sharded.rows_of(path) for path in self._files(part)}
        filled = {path: rows for path, rows in files.items() if rows[0]}
        if not filled:
            lacking = (
                f"no {part}-*.npz (or .parquet), each with x and y" if not files else f"no {part} samples"
            )
            raise DataError(f"{self.path}: has {lacking}")
        return filled

    def _reshaped(self, x: NDArray[np.generic]) -> NDArray[np.generic]:
        if self.shape is None:
            return x
        if math.prod(self.shape) != math.prod(x.shape[1:]):
            raise DataError(
                f"{self.path}: x of the test files has rows of {x.shape[1:]}; data.shape is {self.shape}"
            )
        return x.reshape(len(x), *self.shape)

    def _inputs(self, trains: dict[Path, Rows]) -> sharded.ShardedArray:
        _check_alike(trains)
        files = list(trains)
        _, row_shape, dtype = trains[files[0]]
        if dtype not in (np.uint8, np.float32):
            raise DataError(f"{files[0]}: x has type {dtype}; shards hold uint8 pixels or float32")
        shape = self.shape or ((1, *row_shape) if len(row_shape) == 2 else row_shape)
        if len(shape) == 3 and shape[2] in (1, 3) and shape[0] not in (1, 3):
            raise DataError(
                f"{files[0]}: x has rows of shape {shape}, which looks like (H, W, C); shards hold (C, H, W)"
            )
        if np.prod(shape) != np.prod(row_shape) or len(shape) not in (1, 3):
            raise DataError(
                f"{files[0]}: x has rows of shape {row_shape}; expected (D,), (H, W) or (C, H, W)"
            )
        paths: list[Path] = []
        groups: list[NDArray[np.integer]] = []
        sizes: list[int] = []
        for path, (count, _, _) in trains.items():
            numbers, counts = sharded.groups_of(path, count)
            paths += [path] * len(counts)
            groups.append(numbers)
            sizes += counts
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        if starts[-1] > np.iinfo(np.int32).max:
            raise DataError(f"{self.path}: {starts[-1]:,} training samples are more than 2^31 - 1")
        cache, parquet = round(1e9 * self.cache_gb), any(path.suffix == ".parquet" for path in files)
        return sharded.ShardedArray(
            paths, starts, shape, dtype, cache, np.concatenate(groups) if parquet else None
        )

    def _labels(self, files: dict[Path, Rows]) -> NDArray[np.integer]:
        parts = []
        for path, (count, _, _) in files.items():
            y = as_labels(np.asarray(sharded.read(path, "y")), count, f"{path}: y")
            parts.append(y.astype(np.min_scalar_type(int(y.max()))))
        return np.concatenate(parts)

    def _stored_clients(self, trains: dict[Path, Rows], tests: dict[Path, Rows]) -> Stored | None:
        """The clients that the files define; None if they define none."""
        if not _have_clients(trains):
            return None
        ids, sizes = _client_sizes(trains)
        test_ranges = None
        if _have_clients(tests):
            test_ids, counts = _client_sizes(tests)
            strangers = np.setdiff1d(test_ids, ids)
            if len(strangers):
                what = f"client {strangers[0]} has test samples and none to train on"
                raise DataError(f"{self.path}: {what}; is a train file missing?")
            all_counts = np.zeros(len(ids), np.int64)
            all_counts[np.searchsorted(ids, test_ids)] = counts
            test_ranges = Ranges.of_sizes(all_counts)
        names: Names | None = None if np.array_equal(ids, np.arange(len(ids))) else ids.astype(str)
        train: Ragged = Ranges.of_sizes(sizes)
        return Stored(train, test_ranges, names)


def _check_alike(files: dict[Path, Rows]) -> None:
    """Refuse files of one part whose rows differ in shape or type."""
    first, (_, shape, dtype) = next(iter(files.items()))
    for path, (_, other_shape, other_dtype) in files.items():
        if other_shape != shape or other_dtype != dtype:
            raise DataError(
                f"{path}: x is {other_dtype} {other_shape} a sample, in {first.name} {dtype} {shape}; "
                "all shards must be alike"
            )


def _have_clients(files: dict[Path, Rows]) -> bool:
    """Whether the files of a part contain ``client``; either all of them must, or none.

    Raises:
        DataError
    """
    has_client = {path: "client" in sharded.names(path) for path in files}
    if len(set(has_client.values())) == 2:
        lacking = next(path for path, named in has_client.items() if not named)
        raise DataError(f"{lacking}: has no 'client', which other shards have; give it to all or to none")
    return any(has_client.values())


def _read_all(files: list[Path], name: str) -> NDArray[np.generic]:
    return np.concatenate([np.asarray(sharded.read(path, name)) for path in files])


def _client_sizes(files: dict[Path, Rows]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The ids of the clients in files, ascending, and the number of samples of each client.

    Raises:
        DataError: if samples are not in the order of clients, or some lack a client.
    """
    ids: list[NDArray[np.int64]] = []
    counts: list[NDArray[np.int64]] = []
    last_client = -1
    for path, (count, _, _) in files.items():
        client = np.asarray(sharded.read(path, "client"))
        if client.ndim != 1 or client.dtype.kind not in "iu":
            raise DataError(
                f"{path}: client has shape {client.shape} and type {client.dtype}; expected (n,) integers"
            )
        if len(client) != count:
            raise DataError(
                f"{path}: client has {len(client)} entries for {count} samples; the lengths must be equal"
            )
        steps = np.flatnonzero(client[1:] != client[:-1]) + 1
        begins = np.concatenate([np.zeros(1, np.int64), steps])
        client_ids = client[begins].astype(np.int64)
        if client_ids[0] < last_client or (np.diff(client_ids) < 0).any() or client_ids[0] < 0:
            raise DataError(
                f"{path}: the clients are not in ascending order, over all files; sort the samples"
            )
        sizes = np.diff(np.append(begins, len(client)))
        if client_ids[0] == last_client:  # this client began in the previous file
            counts[-1][-1] += sizes[0]
            client_ids, sizes = client_ids[1:], sizes[1:]
        ids.append(client_ids)
        counts.append(sizes)
        last_client = int(client[-1])
        if not len(client_ids):  # one client over several files: keep its count at the end
            ids.pop(), counts.pop()
    return np.concatenate(ids), np.concatenate(counts)

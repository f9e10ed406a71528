"""Millions of clients: a folder of files, of which each block reads only those that it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from rayfl.data import sharded
from rayfl.data.arrays import as_inputs, as_labels, check_counted
from rayfl.data.base import Dataset, Names, Ragged, Ranges, Samples, Stored
from rayfl.data.scaling import Scaling
from rayfl.errors import DataError

_LOOKED_AT = 10_000
"""Samples, evenly spaced, that mean and deviation are taken from."""

_MANY = 50_000_000
"""With more training samples than that, labels are kept in the smallest integers that hold them."""


class Sharded(Dataset):
    """A folder of ``train-*`` and ``test-*`` files, .npz or .parquet, each with ``x``, ``y`` and ``client``.

    ``x`` is features ``(n, D)``, grey images ``(n, H, W)`` or images ``(n, C, H, W)``, uint8 pixels or
    float32; ``y`` classes; ``client`` the number of the client that has the sample, in ascending order over
    all files (``partition=stored`` takes the clients from it, and other partitions do without). The inputs of
    training samples stay in their files, which every node must see under the same path. Files of
    ``numpy.savez`` are mapped, so that only what is needed is read; compressed ones and Parquet are read
    whole and kept up to ``cache_gb``. Mean and deviation are those of 10,000 samples, evenly spaced.
    """

    name: Literal["sharded"] = "sharded"
    path: Path = Field(description="the folder of the shards")
    shape: tuple[int, ...] | None = Field(
        None, description="of a sample, such as [1, 28, 28], for Parquet, which has rows of numbers only"
    )
    cache_gb: float = Field(1.0, ge=0, description="memory for decoded shards in each process")

    def _files(self, part: str) -> list[Path]:
        folder = self.path.expanduser()
        return sorted(p for p in folder.glob(f"{part}*") if p.suffix in sharded.SUFFIXES)

    @override
    def available(self, root: Path) -> bool:
        return bool(self._files("train") and self._files("test"))

    @override
    def load(self, root: Path) -> Samples:
        trains, tests = self._files("train"), self._files("test")
        if not trains or not tests:
            lacking = "train-*.npz" if not trains else "test-*.npz"
            raise DataError(f"{self.path}: has no {lacking} (or .parquet), each with x and y")
        x_train = self._inputs(trains)
        x_test = as_inputs(self._shaped(_all(tests, "x")), f"{self.path}: x of the test files", "chw")
        if x_test.shape[1:] != x_train.shape[1:] or x_test.dtype != x_train.dtype:
            raise DataError(
                f"{self.path}: x is {x_train.dtype} {x_train.shape[1:]} a sample in the training files, "
                f"{x_test.dtype} {x_test.shape[1:]} in the test files; they must be equal"
            )
        y_test = as_labels(_all(tests, "y"), len(x_test), f"{self.path}: y of the test files")
        y_train = self._labels(trains, x_train.starts)
        classes = int(max(y_train.max(), y_test.max())) + 1
        check_counted(classes - 1, len(y_train) + len(y_test), f"{self.path}: labels")
        y_train = y_train.astype(
            np.int64 if len(y_train) <= _MANY else np.min_scalar_type(classes), copy=False
        )
        return Samples(
            self.path.name, x_train, y_train, x_test, y_test, classes,  # type: ignore[arg-type]
            stored=self._stored(trains, tests),
        )  # fmt: skip

    @override
    def normalised(self, samples: Samples) -> Samples:
        if self.normalise != "pooled":
            return super().normalised(samples)
        from dataclasses import replace

        some = np.unique(np.linspace(0, len(samples.x_train) - 1, _LOOKED_AT).astype(np.int64))
        return replace(samples, scaling=Scaling.of(samples, samples.x_train.take(some, axis=0)))

    def _shaped(self, x: NDArray[np.generic]) -> NDArray[np.generic]:
        return x if self.shape is None else x.reshape(len(x), *self.shape)

    def _inputs(self, files: list[Path]) -> sharded.ShardedArray:
        found = [sharded.rows_of(path) for path in files]
        _, first, dtype = found[0]
        for path, (_, shape, kind) in zip(files, found, strict=True):
            if shape != first or kind != dtype:
                raise DataError(
                    f"{path}: x is {kind} {shape} a sample, in {files[0].name} {dtype} {first}; "
                    "all shards must be alike"
                )
        if dtype not in (np.uint8, np.float32):
            raise DataError(f"{files[0]}: x has type {dtype}; shards hold uint8 pixels or float32")
        shape = self.shape or ((1, *first) if len(first) == 2 else first)
        if np.prod(shape) != np.prod(first) or len(shape) not in (1, 3):
            raise DataError(f"{files[0]}: x has rows of shape {first}; expected (D,), (H, W) or (C, H, W)")
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum([count for count, _, _ in found])])
        if starts[-1] > np.iinfo(np.int32).max:
            raise DataError(f"{self.path}: {starts[-1]:,} training samples are more than 2^31 - 1")
        return sharded.ShardedArray(files, starts, shape, dtype, round(1e9 * self.cache_gb))

    def _labels(self, files: list[Path], starts: NDArray[np.int64]) -> NDArray[np.integer]:
        parts = []
        for path, count in zip(files, np.diff(starts).tolist(), strict=True):
            y = as_labels(np.asarray(sharded.read(path, "y")), count, f"{path}: y")
            parts.append(y.astype(np.min_scalar_type(int(y.max()))))
        return np.concatenate(parts)

    def _stored(self, trains: list[Path], tests: list[Path]) -> Stored | None:
        """The clients that the files name; None if they name none."""
        if "client" not in sharded.names(trains[0]):
            return None
        ids, sizes = _clients(trains)
        own = None
        if "client" in sharded.names(tests[0]):
            who, counts = _clients(tests)
            strangers = np.setdiff1d(who, ids)
            if len(strangers):
                raise DataError(f"{self.path}: client {strangers[0]} has test samples and none to train on")
            all_counts = np.zeros(len(ids), np.int64)
            all_counts[np.searchsorted(ids, who)] = counts
            own = Ranges.of_sizes(all_counts)
        names: Names | None = None if np.array_equal(ids, np.arange(len(ids))) else ids.astype(str)
        train: Ragged = Ranges.of_sizes(sizes)
        return Stored(train, own, names)


def _all(files: list[Path], name: str) -> NDArray[np.generic]:
    return np.concatenate([np.asarray(sharded.read(path, name)) for path in files])


def _clients(files: list[Path]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The clients of files, ascending, and how many samples each has.

    Raises:
        DataError: if they are not in order.
    """
    ids: list[NDArray[np.int64]] = []
    counts: list[NDArray[np.int64]] = []
    last = -1
    for path in files:
        client = np.asarray(sharded.read(path, "client"))
        if client.ndim != 1 or client.dtype.kind not in "iu" or not len(client):
            raise DataError(
                f"{path}: client has shape {client.shape} and type {client.dtype}; expected (n,) integers"
            )
        steps = np.flatnonzero(client[1:] != client[:-1]) + 1
        begins = np.concatenate([np.zeros(1, np.int64), steps])
        who = client[begins].astype(np.int64)
        if who[0] < last or (np.diff(who) < 0).any() or who[0] < 0:
            raise DataError(
                f"{path}: the clients are not in ascending order, over all files; sort the samples"
            )
        sizes = np.diff(np.append(begins, len(client)))
        if who[0] == last:  # began in the file before
            counts[-1][-1] += sizes[0]
            who, sizes = who[1:], sizes[1:]
        ids.append(who)
        counts.append(sizes)
        last = int(client[-1])
        if not len(who):  # one client over several files: keep its count at the end
            ids.pop(), counts.pop()
    return np.concatenate(ids), np.concatenate(counts)

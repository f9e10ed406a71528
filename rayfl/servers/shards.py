"""Client rows in files that are written once and never changed; a run keeps them on disk between rounds.

A file is named after the SHA-256 of its content. Checkpoints name the files that belong to them; a file that
no checkpoint needs any more is removed.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayfl import files
from rayfl.errors import Damaged, DiskError
from rayfl.files import OnDisk

WHOLE = 1 << 26
"""With at most this many bytes of rows, every checkpoint contains its own copy, so that damage to one
checkpoint does not affect the others."""

SIZE = 1 << 24
"""Maximum bytes of a file of rows, unless a single row has more."""


@dataclass(frozen=True)
class Shard:
    """A file of rows.

    Attributes:
        rows: number of rows, including rows that are out of date.
        bytes: length of the file.
        sha256: of the content.
    """

    rows: int
    bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """The name of the file."""
        return f"{self.sha256[:40]}.npy"


class Shards:
    """The folder of the files of client rows.

    Args:
        folder: its path; the folder is created when the first file is written.
        budget: bytes of rows that may be in memory before they are written to files.
    """

    def __init__(self, folder: Path, budget: float = math.inf) -> None:
        self.folder, self.budget = folder, budget
        self.grown = True  # whether files may have been added since the last call of collect

    def path(self, shard: Shard) -> Path:
        """The path of a file."""
        return self.folder / shard.name

    def write(self, rows: NDArray[np.float32]) -> Shard:
        """Write rows ``(n, S)`` to a file, durably and atomically.

        Raises:
            DiskError
        """
        content = (memoryview(header(rows)), np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
        sha256 = hashlib.sha256()
        for piece in content:
            sha256.update(piece)
        shard = Shard(len(rows), sum(piece.nbytes for piece in content), sha256.hexdigest())
        path = self.path(shard)
        part = path.with_name(f".part{os.getpid()}")
        if not self.folder.is_dir():
            files.make(self.folder, parents=True)
        self.grown = True
        with files.writing(part), part.open("wb") as file:
            for piece in content:
                file.write(piece)
        files.rename(part, path)
        return shard

    def read(self, shard: Shard) -> NDArray[np.float32]:
        """The rows ``(n, S)`` of a file, memory-mapped: only rows that are accessed are read.

        Raises:
            Damaged: if the file cannot be read.
        """
        rows: NDArray[np.float32] = OnDisk(self.path(shard)).read()
        return rows

    def verify(self, shard: Shard) -> None:
        """Check the content of a file.

        Raises:
            Damaged: if it is not what was written.
        """
        path = self.path(shard)
        try:
            actual = digest(path)
        except OSError as error:
            raise Damaged(f"{path}: cannot be read ({error.strerror})") from None
        if actual != {"bytes": shard.bytes, "sha256": shard.sha256}:
            raise Damaged(f"{path}: damaged (states of clients are not what was written)")

    def collect(self, used: Collection[str]) -> None:
        """Remove all files except those named in ``used``; the next call tries again if that fails.

        On NFS a file that a process still reads is only renamed when it is removed, and the new name stays.
        """
        self.grown = False
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name not in used:
                    try:
                        files.remove(path)
                    except DiskError:
                        self.grown = True


@dataclass(frozen=True)
class Stored:
    """Rows of clients that are in files.

    Attributes:
        shards: the folder.
        files: the files.
        at: for each client the number of its file, and the row there ``(2, n)``.
    """

    shards: Shards
    files: tuple[Shard, ...]
    at: NDArray[np.int32]

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        """The rows of a range of clients ``(n, S)``."""
        numbers, rows = self.at[:, start:stop]
        gathered: NDArray[np.float32] = np.empty((0, 0), np.float32)
        for place, number in enumerate(np.unique(numbers).tolist()):
            in_file = numbers == number
            file_rows = self.shards.read(self.files[number])[rows[in_file]]
            if not place:
                gathered = np.empty((len(numbers), file_rows.shape[1]), np.float32)
            gathered[in_file] = file_rows
        return gathered


def header(array: NDArray[Any]) -> bytes:
    """The header of an ``.npy`` file that stores this array, of any shape."""
    file = io.BytesIO()
    npy: Any = np.lib.format  # without types in older NumPy
    npy.write_array_header_1_0(file, npy.header_data_from_array_1_0(array))
    return file.getvalue()


def digest(path: Path) -> dict[str, Any]:
    """Length and SHA-256 of a file."""
    with files.regular(path).open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") else _sha256_of(file)
    return {"bytes": path.stat().st_size, "sha256": sha256.hexdigest()}


def _sha256_of(file: Any) -> Any:
    sha256 = hashlib.sha256()
    while piece := file.read(1 << 20):
        sha256.update(piece)
    return sha256

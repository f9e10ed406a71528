"""The boundary to the disk: all that a run writes passes here.

Every change of the disk is announced to :data:`watch` first, which tests replace to inject faults. Every
error of the disk becomes a :class:`~rayfl.errors.DiskError`, one line that names the path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayfl.errors import Damaged, DiskError


def _unwatched(action: str, path: Path) -> None:
    pass


watch: Callable[[str, Path], None] = _unwatched
"""Called before each change of the disk with ``make``, ``write``, ``append``, ``sync``, ``link``, ``rename``
or ``remove``, and the path that will have been changed."""


@contextlib.contextmanager
def boundary(path: Path) -> Iterator[None]:
    """Context manager for code that writes to ``path``.

    Raises:
        DiskError: if the disk is full, the folder gone, or the like.
    """
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        raise DiskError(path, error.strerror or str(error)) from error
    except SafetensorError as error:
        raise DiskError(path, str(error)) from error


def regular(path: Path) -> Path:
    """A path to read from, unless it is that of a pipe or a device, which might be read for ever.

    Raises:
        OSError
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file")
    return path


def make(folder: Path, parents: bool = False) -> None:
    """Make a folder, if it is not there; with ``parents`` those above it too."""
    with boundary(folder):
        watch("make", folder)
        folder.mkdir(parents=parents, exist_ok=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around what writes a whole file; at the end it is on the disk."""
    with boundary(path):
        watch("write", path)
        yield
        sync(path)


def write(path: Path, data: str | bytes | Iterable[str]) -> None:
    """Write a file, if need be piece by piece, so that a reader or a crash never sees half of it."""
    part = path.with_name(f".{path.name}.part{os.getpid()}")
    with boundary(path):
        try:
            with writing(part):
                if isinstance(data, str | bytes):
                    part.write_bytes(data.encode() if isinstance(data, str) else data)
                else:
                    with part.open("w", newline="") as file:
                        file.writelines(data)
            rename(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise


def append(path: Path, text: str, durably: bool = False) -> None:
    """Add text to a file."""
    with boundary(path):
        watch("append", path)
        with path.open("a", encoding="utf-8", newline="") as file:
            file.write(text)
        if durably:
            sync(path)


def publish(path: Path, text: str, room: int = 0) -> None:
    """Write a small file for observers, on which nothing depends; a reader never sees half of it.

    Nothing waits for the disk, no fault of it is an error, and :data:`watch` is not told. On a full disk the
    file of before is overwritten, if the text fits into it.

    Args:
        path: of the file.
        text: what it says.
        room: bytes to which spaces make it longer, so that a later text fits.
    """
    part, data = path.with_name(f".{path.name}.part{os.getpid()}"), text.encode().ljust(room)
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            _overwrite(path, data)


def _overwrite(path: Path, data: bytes) -> None:
    """Replace the contents of a file in its own blocks, for which no space is needed, if it has enough."""
    if len(data) <= path.stat().st_size:
        with path.open("r+b", buffering=0) as file:
            file.write(data.ljust(path.stat().st_size))


def log(path: Path, text: str, most: int) -> None:
    """Add lines to a log, as :func:`publish` does: no fault of the disk is an error.

    Args:
        path: of the log; one that would grow beyond ``most`` bytes is renamed first, and takes the place of
            the one that was renamed before: ``log.jsonl`` to ``log.1.jsonl``.
        text: the lines.
        most: bytes of one file.
    """
    with contextlib.suppress(OSError):
        if path.is_file() and path.stat().st_size + len(text) > most:
            os.replace(path, path.with_suffix(f".1{path.suffix}"))
        with path.open("a", encoding="utf-8") as file:
            file.write(text)


def cut(path: Path, size: int) -> None:
    """Take off what a file, which may not exist, holds beyond so many bytes."""
    with boundary(path):
        if path.is_file() and path.stat().st_size > size:
            watch("write", path)
            os.truncate(path, size)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    with boundary(path):
        watch("sync", path)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Give a file or folder another name; at the end that is on the disk. A file of this name is replaced."""
    with boundary(new):
        watch("rename", new)
        old.replace(new)
        sync(new.parent)


def link(old: Path, new: Path) -> bool:
    """Give a file a second name; false where that is not possible, as on some file systems."""
    with boundary(new):
        watch("link", new)
    try:
        os.link(old, new)
    except OSError:
        return False
    return True


def remove(path: Path) -> None:
    """Remove a file or folder, if there is one."""
    with boundary(path):
        watch("remove", path)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class OnDisk:
    """An array in an ``.npy`` file, which is mapped where it is needed and takes no memory otherwise."""

    path: Path

    def read(self) -> Any:
        """The array; pages are read when they are looked at, and what is written to them stays in memory.

        Raises:
            Damaged: if there is no such file.
        """
        import numpy as np

        try:
            return np.asarray(np.load(self.path, mmap_mode="c", allow_pickle=False))
        except (OSError, ValueError) as error:
            raise Damaged(f"{self.path}: cannot be read ({getattr(error, 'strerror', error)})") from None

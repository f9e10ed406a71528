"""The boundary to the disk: everything that a run writes passes through here.

Before each change of the disk :data:`watch` is called, which tests replace to inject faults. Every error of
the disk becomes a :class:`~rayfl.errors.DiskError`, one line that names the path.
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
or ``remove``, and the path that is about to change."""


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
    """Return a path to read from, unless it is a pipe or a device: reading one might never end.

    Raises:
        OSError: if the path exists and is no regular file.
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
def writing(path: Path, named: Path | None = None) -> Iterator[None]:
    """Context manager for code that writes a whole file; on exit the file is synced to the disk.

    Args:
        path: the file.
        named: the file that users know, for errors; by default the same.
    """
    with boundary(path if named is None else named):
        watch("write", path)
        yield
        sync(path)


def write(path: Path, data: str | bytes | Iterable[str]) -> None:
    """Write a file, from an iterable piece by piece; neither a reader nor a crash ever sees half of it."""
    part = path.with_name(f".{path.name}.part{os.getpid()}")
    with boundary(path):
        try:
            with writing(part, path):
                if isinstance(data, str | bytes):
                    part.write_bytes(data.encode() if isinstance(data, str) else data)
                else:
                    with part.open("w", encoding="utf-8", newline="") as file:
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

    The call does not wait for the disk, ignores its errors, and does not call :data:`watch`. On a full disk
    the previous file is overwritten in place, if the text fits into it.

    Args:
        path: of the file.
        text: its contents.
        room: bytes to which the text is padded with spaces, so that a later text fits.
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
    """Overwrite a file in place, which needs no free space, if the data are not longer than the file."""
    if len(data) <= path.stat().st_size:
        with path.open("r+b", buffering=0) as file:
            file.write(data.ljust(path.stat().st_size))


def log(path: Path, text: str, most: int) -> None:
    """Add lines to a log; like :func:`publish`, it ignores errors of the disk.

    Args:
        path: of the log. If it would grow beyond ``most`` bytes, it is renamed first, ``log.jsonl`` to
            ``log.1.jsonl``, which replaces the file renamed before.
        text: the lines.
        most: maximum bytes of one file.
    """
    with contextlib.suppress(OSError):
        if path.is_file() and path.stat().st_size + len(text) > most:
            os.replace(path, path.with_suffix(f".1{path.suffix}"))
        with path.open("a", encoding="utf-8") as file:
            file.write(text)


def truncate(path: Path, size: int) -> None:
    """Truncate a file to ``size`` bytes, if it exists and is longer."""
    with boundary(path):
        if path.is_file() and path.stat().st_size > size:
            watch("write", path)
            os.truncate(path, size)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    with boundary(path):
        watch("sync", path)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder and sync the new name to the disk; an existing file ``new`` is replaced."""
    with boundary(new):
        watch("rename", new)
        old.replace(new)
        sync(new.parent)


def link(old: Path, new: Path) -> bool:
    """Give a file a second name; return whether the file system supports that."""
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
    """An array in an ``.npy`` file, which is mapped into memory where it is needed."""

    path: Path

    def read(self) -> Any:
        """The array; pages are read when accessed, and changes of them stay in memory.

        Raises:
            Damaged: if there is no such file.
        """
        import numpy as np

        try:
            return np.asarray(np.load(self.path, mmap_mode="c", allow_pickle=False))
        except (OSError, ValueError) as error:
            raise Damaged(f"{self.path}: cannot be read ({getattr(error, 'strerror', error)})") from None

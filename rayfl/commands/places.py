"""Where commands write what they are asked for: checked before the work, so that nothing is done in vain."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from rayfl.errors import ConfigError
from rayfl.remote import is_url, plain


def local(path: Path, option: str = "--out") -> Path:
    """A path that is not on object storage.

    Raises:
        ConfigError: for a URL, which would become a folder named ``s3:``.
    """
    if is_url(path):
        what = f"{plain(path)} is on object storage, to which only runs are written (output.root)"
        raise ConfigError(option, what, "give a local path, and copy from there")
    return path


@contextlib.contextmanager
def folder(path: Path, option: str = "--out") -> Iterator[Path]:
    """Context manager: a folder for results, created if need be, and removed again if nothing was written.

    Raises:
        ConfigError: if it cannot be created, or written to.
    """
    new = not local(path, option).exists()
    _make(path, option)
    _check_writable(path, path, option)
    try:
        yield path
    finally:
        if new and path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def file(path: Path, option: str = "--out") -> Path:
    """A file to which results are going to be written; its folder is created if need be.

    Raises:
        ConfigError: if it cannot be written.
    """
    if local(path, option).is_dir():
        raise ConfigError(option, f"{path} is a folder", "give the name of a file")
    _make(path.parent, option)
    _check_writable(path, path.parent, option)
    return path


def _make(folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(option, f"cannot create {folder}: {error.strerror}") from None


def _check_writable(path: Path, where: Path, option: str) -> None:
    if not os.access(where, os.W_OK | os.X_OK):
        raise ConfigError(option, f"{path} cannot be written: no permission to write to {where}")

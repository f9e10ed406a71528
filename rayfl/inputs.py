"""The user's files and folders that a config names, and hashes of their contents."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import stat
import time
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rayfl.config import Config
from rayfl.data.base import Dataset
from rayfl.data.datasets.image_folder import SUFFIXES
from rayfl.errors import ConfigError

_MOST_READ = 64_000_000
"""Up to this many bytes, all pictures in a folder together are hashed by content; more would take minutes."""

File = tuple[str, int, int]
"""The name of a file below a folder, its size, and when it changed, in ns."""


_NOT_READ = ("plugins", "execution", "output")
"""Sections that name no file that a run reads; plug-ins are hashed elsewhere."""


def parts_in(section: BaseModel) -> Iterator[BaseModel]:
    """A section of a config and all sections in it."""
    yield section
    for _, value in section:
        yield from _sections(value)


def _sections(value: Any) -> Iterator[BaseModel]:
    for each in value if isinstance(value, tuple | list) else (value,):
        if isinstance(each, BaseModel):
            yield from parts_in(each)


def files_of(config: Config, leave_out: Container[str] = ()) -> Iterator[Path]:
    """The files that are settings of a config, such as an expert or weights.

    Args:
        config: of a run.
        leave_out: sections whose files are not wanted.
    """
    sections = [value for name, value in config if name not in _NOT_READ and name not in leave_out]
    for part in (part for each in sections for part in _sections(each)):
        yield from (value for _, value in part if isinstance(value, Path) and value.is_file())


def inputs_of(config: Config) -> Iterator[Path]:
    """The user's files and folders that a config names: data, owners of samples, weights.

    An optional folder ``root`` does not count: rayfl keeps downloads or runs there. A string counts as a file
    if it is an absolute path (validators make paths in settings absolute), or one of the ``kwargs`` of a
    user's function.
    """
    sections = [value for name, value in config if name not in _NOT_READ]
    for part in (part for each in sections for part in _sections(each)):
        for name, value in part:
            if isinstance(value, Path):
                users_own = name != "root" or type(part).model_fields[name].is_required()
                if value.is_file() or (users_own and value.is_dir()):
                    yield value
            else:
                yield from _named_files(value, name == "kwargs")
        if isinstance(part, Dataset) and part.root is not None:
            yield from part.own_files(part.root)


def _named_files(value: Any, relative: bool) -> Iterator[Path]:
    """The files and folders whose paths are in a value; relative paths count only if ``relative``."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _named_files(each, relative)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _named_files(each, relative)
    elif isinstance(value, str | Path) and (relative or os.path.isabs(value)) and "\0" not in str(value):
        # Not the working directory or a folder above it: they contain results, which change.
        if os.path.isfile(value) or (os.path.isdir(value) and not _holds_working_directory(Path(value))):
            yield Path(value)
        elif os.path.isabs(value) and glob.has_magic(str(value)):
            yield from map(Path, sorted(glob.glob(str(value), recursive=True)))


def portable_settings(config: Config) -> dict[str, Any]:
    """The settings of a config, with only the last part of the paths of the user's files and folders, and
    without the folder of downloaded datasets.
    """
    names = {str(path): path.name for path in inputs_of(config) if path.is_absolute()}

    def without_folders(value: Any, setting: str = "") -> Any:
        if isinstance(value, Mapping):
            return {name: without_folders(each, name) for name, each in value.items()}
        if isinstance(value, tuple | list):
            return [without_folders(each) for each in value]
        if not isinstance(value, str) or not os.path.isabs(value):
            return value
        if value in names:
            return names[value]
        function = setting == "target" and ":" in value
        pattern = glob.has_magic(value) and any(path in names for path in glob.glob(value, recursive=True))
        return os.path.basename(value) if function or pattern else value

    settings = config.to_dict()
    root = settings["data"].get("root")
    if root is not None and root not in names:  # where rayfl keeps what it downloads
        settings["data"]["root"] = None
    return {name: without_folders(value) for name, value in settings.items()}


def _holds_working_directory(folder: Path) -> bool:
    return Path.cwd().is_relative_to(os.path.realpath(folder))


@dataclass(frozen=True)
class Seen:
    """A file or folder as it was.

    Attributes:
        stamp: the hash of the names, sizes and times of its files, which is quick to compare.
        content: see :func:`content_of`; without times.
    """

    stamp: str
    content: str


def seen(path: Path) -> Seen:
    """Record a file or folder as it is now."""
    return Seen(_json_hash(listed(path)), content_of(path, times=False))


def check_unchanged(inputs: Mapping[Path, Seen]) -> None:
    """Refuse files and folders whose contents have changed; missing ones are left to the run to report.

    Raises:
        ConfigError: for the first that has changed.
    """
    for path, before in inputs.items():
        if not path.exists() or _json_hash(listed(path)) == before.stamp:
            continue
        if content_of(path, times=False) != before.content:  # another machine may have other times
            raise ConfigError(str(path), "has changed since the study began", "run the study again")


def content_of(path: Path, times: bool = True) -> str:
    """The hash of a file, or of the names and contents of all files below a folder.

    If there are many pictures, their names, sizes and times stand for their contents.

    Args:
        path: the file or folder.
        times: whether these times count; on another machine they may differ.
    """
    files = listed(path)
    if not path.is_dir():
        ((_, size, changed),) = files
        return _file_hash(path, size, changed)
    pictures = {file for file in files if file[0].lower().endswith(SUFFIXES)}
    if sum(size for _, size, _ in pictures) <= _MOST_READ:
        pictures = set()
    entries: list[tuple[str, int | str, int]] = []
    for name, size, changed in files:
        if (name, size, changed) in pictures:
            entries.append((name, size, changed if times else 0))
        else:
            entries.append((name, _file_hash(path / name, size, changed), 0))
    return _json_hash(entries)


def listed(path: Path) -> list[File]:
    """A file, or all files below a folder, sorted by name; links are followed."""
    if not path.is_dir():
        status = path.stat()
        return [("", status.st_size, status.st_mtime_ns)]
    files, until = _listings.get(path, ([], 0.0))
    began = time.monotonic()
    if began < until:
        return files
    files = sorted(_files_below(path, "", frozenset()))
    if len(files) > _MANY_FILES:
        _listings[path] = files, time.monotonic() + 10 * (time.monotonic() - began)
    return files


_MANY_FILES = 10_000
"""A folder with more files is not listed again for ten times as long as the listing took."""

_listings: dict[Path, tuple[list[File], float]] = {}
"""The listings of large folders, and until when they are reused."""


def _files_below(folder: Path, prefix: str, parents: frozenset[str]) -> Iterator[File]:
    """The files below a folder; ``parents``: the folders that it lies in, to which links may lead back."""
    real = os.path.realpath(folder)
    if real in parents:
        return
    try:
        entries = list(os.scandir(folder))
    except OSError:  # of another user: no run can read it, either
        return
    for entry in entries:
        try:
            status = entry.stat()
        except OSError:  # a link that leads nowhere
            continue
        if stat.S_ISDIR(status.st_mode):
            if entry.name != "__pycache__":
                yield from _files_below(folder / entry.name, f"{prefix}{entry.name}/", parents | {real})
        elif stat.S_ISREG(status.st_mode):
            yield f"{prefix}{entry.name}", status.st_size, status.st_mtime_ns


@cache
def _file_hash(path: Path, size: int, changed: int) -> str:
    """The hash of a file, which is read again only if its size or time has changed."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
    except OSError:  # no run can read it, either
        return f"{size} {changed}"
    return digest.hexdigest()


def _json_hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()

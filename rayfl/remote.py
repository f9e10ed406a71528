"""Run directories on object storage: ``output.root: s3://bucket/runs``, ``gs://...``, ``abfs://...``, ``file:///...``.

A run works in a folder of this machine, its *staging folder*, and is published from there: after every
checkpoint and at the end. Object stores rename nothing, so the order does what a rename does: a checkpoint's
``manifest.json`` is written after all that it lists and removed before it; ``summary.json``, which says that
a run is finished, comes last. A reader in between finds the earlier checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from rayfl.errors import ConfigError, DiskError

URL = r"^(s3|gs|gcs|abfs|abfss|hdfs|file):/"
"""How the root of runs elsewhere begins. A path has collapsed the slashes."""

_NOTE, _PUBLISHED = ".remote", ".published.json"
"""Files in a staging folder: the URL of its root, and the record of what has been published."""

_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_")


def is_url(text: object) -> bool:
    """Whether a path is one of object storage."""
    return re.match(URL, str(text)) is not None


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that hold credentials for object storage."""
    return {name: value for name, value in environment.items() if name.startswith(_VARIABLES)}


def staging(root: str) -> Path:
    """The folder of this machine in which the runs of a root are done: below ``$RAYFL_STAGING``, else
    ``~/.cache/rayfl/staging``."""
    own = os.environ.get("RAYFL_STAGING")
    folder = Path(own) if own else Path.home() / ".cache" / "rayfl" / "staging"
    scheme, rest = _parts(root)
    return folder.absolute() / scheme / quote(rest.partition("?")[0].strip("/"), safe="")


def split(url: str) -> tuple[str, str]:
    """The root and the name of a run."""
    scheme, rest = _parts(url)
    path, mark, query = rest.partition("?")
    root, _, name = path.rstrip("/").rpartition("/")
    return f"{scheme}://{root}{mark}{query}", name


def _parts(url: str) -> tuple[str, str]:
    scheme, _, rest = url.partition(":")
    return scheme, ("/" if scheme == "file" else "") + rest.lstrip("/")


def newest(root: str) -> str | None:
    """The URL of the run below a root that began last; None if there is none.

    Raises:
        DiskError: if nothing answers there.
    """
    from pyarrow import fs

    whole = Remote(root, "")
    with whole._reaching():
        system, path = whole._place
        found = system.get_file_info(fs.FileSelector(path.rstrip("/"), recursive=True, allow_not_found=True))
    parts = [(info.mtime, info.path[len(path) :].split("/")) for info in found]
    runs = [(time, names[0]) for time, names in parts if names[1:] == ["config.yaml"]]
    return str(Remote(root, max(runs)[1])) if runs else None


class Remote:
    """Where a run is published.

    Args:
        root: the URL of the folder of all runs.
        name: of the run.
    """

    def __init__(self, root: str, name: str) -> None:
        self.root, self.name = root, name

    def __str__(self) -> str:
        scheme, rest = _parts(self.root)
        return f"{scheme}://{rest.partition('?')[0].rstrip('/')}/{self.name}"

    @classmethod
    def of(cls, folder: Path) -> Remote | None:
        """Where the run in this staging folder belongs; None if the folder is no such."""
        note = folder / _NOTE
        return cls(note.read_text(encoding="utf-8"), folder.name) if note.is_file() else None

    def claim(self, folder: Path) -> None:
        """Make a folder the staging folder of this run."""
        (folder / _NOTE).write_text(self.root, encoding="utf-8")

    @cached_property
    def _place(self) -> tuple[Any, str]:
        from pyarrow import fs

        scheme, rest = _parts(self.root)
        if scheme == "s3":  # one request for a small file, not three
            rest += f"{'&' if '?' in rest else '?'}allow_delayed_open=true"
        system, path = fs.FileSystem.from_uri(f"{scheme}://{rest}")
        return system, f"{path.rstrip('/')}/{self.name}"

    def files(self) -> dict[str, int]:
        """The sizes of what is there, by name.

        Raises:
            DiskError: if nothing answers there.
        """
        from pyarrow import fs

        with self._reaching():
            system, path = self._place
            found = system.get_file_info(fs.FileSelector(path, recursive=True, allow_not_found=True))
            return {i.path[len(path) + 1 :]: i.size for i in found if i.type == fs.FileType.File}

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, ImportError) as error:
            raise DiskError(self, " ".join(str(error).split())[:300]) from None

    def publish(self, folder: Path) -> None:
        """Make the remote directory equal to this folder.

        Raises:
            DiskError: if that fails; the remote directory stays readable.
        """
        there, before = self.files(), _known(folder)
        here = _visible(folder)
        now = _stamps(here)
        new = [name for name in here if there.get(name) != now[name][0] or before.get(name) != now[name]]
        # A checkpoint of which anything changes is none until its manifest is written again.
        torn = {str(PurePosixPath(name).parent) for name in new if not name.endswith(_LAST)}
        manifests = [f"{parent}/{_LAST[0]}" for parent in torn]
        new += [name for name in manifests if name in here and name not in new]
        gone = [name for name in there if name not in here or (name in new and name.endswith(_LAST))]
        with self._reaching():
            for name in sorted(gone, key=_rank, reverse=True):
                self._remove(name)
            for name in sorted(new, key=_rank):
                if here[name].is_file():  # a log may have been renamed
                    self._copy(here[name], name)
        (folder / _PUBLISHED).write_text(json.dumps(now), encoding="utf-8")

    def _copy(self, source: Path, name: str) -> None:
        system, path = self._place
        target = f"{path}/{name}"
        local = system.type_name in ("local", "hdfs")
        if local:  # there are folders, and half-written files are seen
            system.create_dir(target.rpartition("/")[0], recursive=True)
        part = f"{target.rpartition('/')[0]}/.{PurePosixPath(name).name}.part" if local else target
        with source.open("rb") as file, system.open_output_stream(part) as out:
            shutil.copyfileobj(file, out, 1 << 24)
        if local:
            system.move(part, target)

    def _remove(self, name: str) -> None:
        system, path = self._place
        system.delete_file(f"{path}/{name}")

    def fetch(self, folder: Path) -> None:
        """Make this folder equal to the remote directory, unless this folder has more rounds.

        Raises:
            ConfigError: if there is no run.
            DiskError: if nothing answers there.
        """
        there = self.files()
        if "config.yaml" not in there:
            if (folder / "config.yaml").is_file():  # it was never published
                return
            raise ConfigError(str(self), "not a run directory", "it holds no config.yaml")
        if (folder / _NOTE).is_file() and _progress(set(_visible(folder))) >= _progress(set(there)):
            return
        shutil.rmtree(folder, ignore_errors=True)
        whole = [name for name in there if _complete(name, there)]
        with self._reaching():
            system, path = self._place
            for name in whole:
                target = folder / name
                if ".." in PurePosixPath(name).parts:  # an object's name may be anything
                    raise DiskError(self, f"{name!r} would be written outside of the run directory")
                target.parent.mkdir(parents=True, exist_ok=True)
                with system.open_input_stream(f"{path}/{name}") as file, target.open("wb") as out:
                    shutil.copyfileobj(file, out, 1 << 24)
        (folder / _PUBLISHED).write_text(json.dumps(_stamps(_visible(folder))), encoding="utf-8")
        self.claim(folder)

    def remove(self) -> None:
        """Remove what is there."""
        for name in sorted(self.files(), key=_rank, reverse=True):
            with self._reaching():
                self._remove(name)


_LAST = ("manifest.json", "summary.json")


def _rank(name: str) -> tuple[int, str]:
    """The order in which files are written; they are removed in the opposite one."""
    last = PurePosixPath(name).name
    return (_LAST.index(last) + 1 if last in _LAST else 0), name


def _visible(folder: Path) -> dict[str, Path]:
    """The files that belong to the run by name, not those that are being written."""
    found = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return {p.as_posix(): folder / p for p in found if not any(part.startswith(".") for part in p.parts)}


def _stamps(files: Mapping[str, Path]) -> dict[str, list[int]]:
    """Size and modification time of each file, to notice changes."""
    return {name: [path.stat().st_size, path.stat().st_mtime_ns] for name, path in files.items()}


def _known(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / _PUBLISHED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _checkpoint(name: str) -> str | None:
    """The folder of the checkpoint to which a file belongs."""
    parts = PurePosixPath(name).parts
    return parts[1] if len(parts) > 2 and parts[0] == "checkpoints" and "round-" in parts[1] else None


def _complete(name: str, there: Mapping[str, int]) -> bool:
    """Whether a file is not one of a checkpoint that was never completed."""
    checkpoint = _checkpoint(name)
    return checkpoint is None or f"checkpoints/{checkpoint}/{_LAST[0]}" in there


def _progress(names: set[str]) -> tuple[int, bool]:
    """How far a run has got, by its checkpoints, and whether it is finished."""
    rounds = [
        int(PurePosixPath(name).parts[1].removeprefix("round-").rstrip("~"))
        for name in names
        if name.endswith(_LAST[0]) and (_checkpoint(name) or "").startswith("round-")
    ]
    return max(rounds, default=-1), _LAST[1] in names

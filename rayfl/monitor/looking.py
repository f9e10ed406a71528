"""Running and finished runs, as their directories describe them, here or on object storage."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayfl import remote
from rayfl.errors import ConfigError, not_a_run
from rayfl.machine import process_start
from rayfl.monitor.status import Status
from rayfl.rundir import RunDirectory

_SILENCE = 30.0
"""Seconds without a sign of life after which a run on another machine counts as dead."""

_DEPTH = 3
"""How many levels below a folder are searched for runs; on object storage only the first."""

_PARALLEL_VIEWS = 16
"""Runs on object storage that are asked for at a time."""


@dataclass(frozen=True)
class RunView:
    """A run, as described by its directory.

    Attributes:
        path: its directory, or its URL.
        status: as written by the run; ``failed`` if its process died without writing that.
    """

    path: Path | str
    status: Status

    def to_dict(self) -> dict[str, Any]:
        """The line of ``rayfl runs --json``."""
        s = self.status
        return {
            "path": str(self.path),
            "state": s.state,
            "why": s.why,
            "method": s.method,
            "dataset": s.dataset,
            "rounds": s.rounds,
            "rounds_done": s.done,
            "accuracy_mean": s.accuracy_mean,
            "begun": s.begun,
            "updated": s.updated,
            "remaining_seconds": s.eta,
        }


def view(path: Path | str) -> RunView:
    """A run, by its directory or URL.

    Raises:
        ConfigError: if it is not a run.
        DiskError: if the object storage does not answer.
    """
    if remote.is_url(path):
        remote_run = remote.Remote(*remote.split(str(path)))
        with tempfile.TemporaryDirectory() as folder:
            (copy := Path(folder) / remote_run.name).mkdir()
            remote_run.glance(copy)
            if not (copy / "config.yaml").is_file():
                raise not_a_run(remote_run)
            return replace(view(copy), path=remote_run.url)
    path = Path(path)
    if not (path / "config.yaml").is_file():
        raise not_a_run(path, os.path.exists(path))
    status = Status.read(path) or _status_without_file(path)
    if status.active and not _alive(status):
        last_sign = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.updated))
        why = f"its process was killed or its machine is gone; last sign of life {last_sign}"
        status = replace(status, state="failed", why=why)
    return RunView(path, status)


def is_root(path: Path | str) -> bool:
    """Whether this is a folder or URL of runs, and not a run.

    Raises:
        DiskError: if the object storage does not answer.
    """
    if remote.is_url(path):
        return not remote.Remote(*remote.split(str(path))).is_run()
    return Path(path).is_dir() and not (Path(path) / "config.yaml").is_file()


def runs_below(folder: Path | str) -> list[RunView]:
    """All runs in a folder or up to three levels below it, the latest first.

    Raises:
        ConfigError: if there is no such folder.
        DiskError: if the object storage does not answer.
    """
    if remote.is_url(folder):
        urls = [remote.Remote(str(folder), name).url for name in remote.runs(str(folder))]
        with ThreadPoolExecutor(_PARALLEL_VIEWS) as pool:
            views = list(pool.map(_view_or_none, urls))
    else:
        if not Path(folder).is_dir():
            raise ConfigError(str(folder), "not a folder", "name the folder of the runs, output.root")
        views = [_view_or_none(path) for path in _distinct(Path(folder), _directories(Path(folder), _DEPTH))]
    runs = [run for run in views if run is not None]
    return sorted(runs, key=lambda run: (-run.status.begun, str(run.path)))


def _view_or_none(path: Path | str) -> RunView | None:
    """A run; None if it has been removed since it was listed."""
    with suppress(ConfigError, OSError):
        return view(path)
    return None


def newest_running(folder: Path | str) -> RunView:
    """The running run below a folder that started last.

    Raises:
        ConfigError: if none is running.
    """
    for run in runs_below(folder):
        if run.status.active:
            return run
    raise ConfigError(remote.plain(folder), "no run is running there", "'rayfl runs' lists all; name one")


def _directories(folder: Path, depth: int) -> Iterator[Path]:
    inside: list[Path] = []
    with suppress(OSError):  # a folder that this user may not read, or links in a circle
        if (folder / "config.yaml").is_file():
            yield folder
            return
        inside = sorted(path for path in folder.iterdir() if depth and not path.name.startswith("."))
    for path in inside:
        if os.path.isdir(path):
            yield from _directories(path, depth - 1)


def _distinct(root: Path, paths: Iterable[Path]) -> list[Path]:
    """Each directory once, even if links lead to it, too; by its real path if that is below the root."""
    by_real_path: dict[str, Path] = {}
    real_root = os.path.realpath(root)
    for path in paths:
        real = os.path.realpath(path)
        if real not in by_real_path or real == os.path.join(real_root, path.relative_to(root)):
            by_real_path[real] = path
    return list(by_real_path.values())


def _alive(status: Status) -> bool:
    """Whether the process of a run that claims to be active exists."""
    if status.host == socket.gethostname():
        started = process_start(status.pid)
        if started is None or started == status.born:
            return started is not None
    return time.time() - status.updated < _SILENCE


def _status_without_file(path: Path) -> Status:
    """The status of a run from its other files, if an earlier version of rayfl wrote it without a status."""
    import yaml

    config: Mapping[str, Any] = {}
    with suppress(OSError, ValueError, yaml.YAMLError):
        config = _mapping(yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8")))
    summary: Mapping[str, Any] = {}
    with suppress(OSError, ValueError):
        summary = _mapping(json.loads((path / "summary.json").read_text(encoding="utf-8")))
    rounds, accuracy = path / "rounds.csv", summary.get("accuracy_mean")
    done = max(0, len(rounds.read_bytes().splitlines()) - 1) if rounds.is_file() else 0
    begun, updated = (path / "config.yaml").stat().st_mtime, max(p.stat().st_mtime for p in path.iterdir())
    planned = _integer(config.get("rounds"), 0)
    why = "" if summary else RunDirectory(path).divergence(planned)
    return Status(
        run=path.name,
        state="finished" if summary else "failed" if why else "stopped",
        why=why,
        method=_part_name(config, "algorithm"),
        dataset=_part_name(config, "data"),
        rounds=planned,
        done=_integer(summary.get("rounds"), done),
        accuracy_mean=accuracy if isinstance(accuracy, float) else None,
        begun=begun,
        updated=updated,
        host="",
        pid=0,
        born=None,
    )


def _mapping(contents: object) -> Mapping[str, Any]:
    """The contents of a file; empty if the file is damaged, or is another program's."""
    return contents if isinstance(contents, Mapping) else {}


def _integer(value: object, default: int) -> int:
    return value if isinstance(value, int) else default


def _part_name(config: Mapping[str, Any], section: str) -> str:
    part = config.get(section)
    return str(part.get("name", "")) if isinstance(part, Mapping) else str(part or "")

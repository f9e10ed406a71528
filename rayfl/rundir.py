"""Run directories: plain files that pandas opens in one line, written atomically, resumable.

```
runs/<name>-<algorithm>-<changed settings>-seed<seed>-<time>/
  status.json        current state of the run     log.jsonl          events, one JSON object a line
  config.yaml        the resolved config          environment.json   versions, cores, data fingerprint
  normalisation.json scaling of the inputs, (x * factor - mean) / std; never changes
  rounds.csv         one row a round              clients.csv        one row a client, best and last
                     (the names of accuracies: rayfl/evaluation/protocols.py)
  groups.csv         one row a tested round and planted group or cluster
  clusters.json      assignments over time        communication.csv  bytes by round, tier, direction, kind
  labels.csv         training samples of each client and class
  checkpoints/       state and models             models/            final models, one safetensors file each
  events.out.*       TensorBoard                  report.html        plots and tables
  loggers.json       the ids of the run in MLflow and similar services
  plugins.json       code from outside of rayfl, with the hash of its source; plugins/: the source itself
  summary.json       the numbers of the closing table, and the hash of the final models
```
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import os
import shutil
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock, Timeout

from rayfl import files, plugins
from rayfl.config import Config, reload
from rayfl.config.kinds import KINDS
from rayfl.data.arrays import fingerprint
from rayfl.data.events import Stage
from rayfl.data.federation import division
from rayfl.data.scaling import Scaling
from rayfl.errors import (
    ClientError,
    ConfigError,
    Damaged,
    DataError,
    DiskError,
    Held,
    RayflError,
    not_a_run,
    one_line,
)
from rayfl.inputs import content_of, files_of
from rayfl.remote import Remote, is_url, newest, plain, split, staging

if TYPE_CHECKING:
    import pandas as pd

METRIC_COLUMNS = (
    "accuracy_mean",
    "accuracy_weighted",
    "accuracy_median",
    "accuracy_worst10",
    "accuracy_best10",
    "accuracy_var",
    "accuracy_se",
    "accuracy_se_samples",
    "group_var_within",
    "group_var_between",
    "cluster_var_within",
    "cluster_var_between",
    "loss_mean",
    "perplexity_mean",
    "distinct_test_samples",
    "estimated_from",
)
"""Columns of a round's evaluation."""

ROUND_COLUMNS = (
    "round",
    "stage",
    "seconds",
    "clients",
    "clusters",
    "lr",
    "train_loss",
    *METRIC_COLUMNS,
    "ari",
    "bytes_up",
    "bytes_down",
    "failures",
)
"""Columns of ``rounds.csv``. ``round`` is an index from 0, as in all files; output for people counts from 1.
``seconds`` is the duration of the round; ``summary.json`` has that of the run. ``stage`` counts the rounds
with events so far. ``estimated_from`` is the number of clients tested if the metrics are estimates from a
sample, and empty if all clients were tested."""

GROUP_COLUMNS = (
    "round",
    "kind",
    "id",
    "clients",
    "test_samples",
    "distinct_test_samples",
    "accuracy_mean",
    "accuracy_var",
    "accuracy_se",
    "accuracy_se_samples",
    "loss_mean",
    "estimated_from",
)
"""Columns of ``groups.csv``: a round's metrics for each planted group (``kind`` is ``group``) or cluster."""

_FIXED_COLUMNS = {"rounds.csv": ROUND_COLUMNS, "groups.csv": GROUP_COLUMNS}


AT_ONCE = 100_000
"""Rows of a table that are converted to text together."""

_MANY_ROWS = 1_000
"""Tables with at least this many rows are converted to text by Arrow."""

_LONGEST_NAME = 97


DIVERGED = "diverged.json"
"""The record of a run whose training diverged."""


class RunDirectory:
    """The directory of one run. Only the driver writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._new_folders: Sequence[Path] = ()  # folders above it that were made for it, the lowest first

    @classmethod
    def create(cls, config: Config, changed: Sequence[str] = ()) -> RunDirectory:
        """A new directory below ``output.root``, see :func:`name_of` for its name.

        Args:
            config: of the run.
            changed: settings to include in the name, such as ``lr=0.1``, as far as there is room.

        Raises:
            ConfigError: if it cannot be created.
        """
        stamp = time.strftime("%Y%m%d-%H%M%S")
        base = config.output.folder / name_of(config, changed, stamp)
        new_folders = [folder for folder in base.absolute().parents if not folder.exists()]
        for attempt in range(1000):
            path = base if attempt == 0 else base.with_name(f"{base.name}-{attempt}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise ConfigError("output.root", f"cannot create {path}: {error.strerror}") from None
            if not (run := cls(path.resolve()))._is_published(config):
                run._new_folders = new_folders
                return run._initialise(config)
            shutil.rmtree(path, ignore_errors=True)
        raise ConfigError("output.root", f"{base} and 999 more exist already")

    @classmethod
    def create_as(cls, config: Config, name: str) -> RunDirectory:
        """The directory of this name below ``output.root``; if it already exists, it must contain no run.

        Raises:
            ConfigError: if it cannot be created.
        """
        path = config.output.folder / name
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("output.root", f"cannot create {path}: {error.strerror}") from None
        return cls(path.resolve())._initialise(config)

    def _is_published(self, config: Config) -> bool:
        """Whether another machine has published a run of this name."""
        remote = config.output.remote(self.path.name)
        try:
            return remote is not None and bool(remote.files())
        except DiskError as error:
            shutil.rmtree(self.path, ignore_errors=True)
            raise ConfigError("output.root", f"{config.output.root}: {error.why}") from None

    def _initialise(self, config: Config) -> RunDirectory:
        remote = config.output.remote(self.path.name)
        try:
            if remote is not None:
                remote.claim(self.path)
            self.write_plugins()
            self.write_config(config)
            self.publish()
        except DiskError as error:
            shutil.rmtree(self.path, ignore_errors=True)
            if remote is not None:
                raise ConfigError("output.root", f"{config.output.root}: {error.why}") from None
            raise
        return self

    @property
    def remote(self) -> Remote | None:
        """Where the run is published, if ``output.root`` is object storage."""
        return Remote.of(self.path)

    @property
    def place(self) -> str:
        """The place of the run as shown to users: its URL, or its folder."""
        return str(self.remote or self.path)

    @property
    def resume(self) -> str:
        """The command that resumes the run; on any machine, if it is on object storage."""
        return f"rayfl resume {quote(str(self.path) if self.remote is None else self.remote.url)}"

    def renew(self) -> None:
        """Fetch what another machine has added since, if the run is on object storage.

        Raises:
            DiskError: if the storage does not answer.
        """
        if self.remote is not None:
            self.remote.fetch(self.path)

    def publish(self) -> None:
        """Update the copy on object storage, if ``output.root`` is there.

        Raises:
            DiskError
        """
        remote = self.remote
        if remote is not None:
            remote.publish(self.path)

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """Context manager that publishes the run on exit.

        Raises:
            RayflError: if publishing fails.
        """
        try:
            yield
        except BaseException:
            with contextlib.suppress(RayflError):
                self.publish()
            raise
        try:
            self.publish()
        except DiskError as error:
            raise RayflError(
                f"{error}; the run lies in {self.path}; publish it with: {self.resume}"
            ) from None

    def discard(self) -> None:
        """Remove the run, also on object storage, and the folders above it that were made for it."""
        remote = self.remote
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):  # another run may have begun in one
            for folder in self._new_folders:
                folder.rmdir()
        if remote is not None:
            with contextlib.suppress(DiskError):
                remote.remove()

    def clear(self) -> None:
        """Remove the files of a run, so that another run can take its place; the caller must hold the lock.

        Raises:
            DiskError
        """
        for path in sorted(self.path.iterdir()):
            if not path.name.startswith("."):  # the lock, and the records about object storage
                files.remove(path)

    @classmethod
    def open(cls, path: Path | str) -> RunDirectory:
        """Open an existing run; a run on object storage is fetched.

        Raises:
            ConfigError: if there is no run at this path.
        """
        if is_url(path):
            root, name = split(str(path))
            remote, path = Remote(root, name), staging(root) / name
            if not remote.is_run() and not (path / "config.yaml").is_file():
                raise not_a_run(plain(remote.url))
            remote.fetch(path)
        # Path.resolve raises where links go round in circles
        run = cls(Path(os.path.realpath(os.path.expanduser(path))))
        if not os.path.isfile(run.path / "config.yaml"):  # Path.is_file raises where the path is too long
            raise not_a_run(path, os.path.exists(run.path))
        return run

    @classmethod
    def latest(cls, root: Path | str) -> RunDirectory:
        """Open the run below a root that was begun or resumed last.

        Raises:
            ConfigError: if there is none.
        """
        if is_url(root):
            url = newest(str(root))
            if url is not None:
                return cls.open(url)
        # Not st_ctime, which chown changes and which a copy does not keep.
        runs = sorted(Path(root).glob("*/config.yaml"), key=lambda path: path.stat().st_mtime)
        if not runs:
            raise ConfigError(plain(root), "contains no run", "give the folder of the runs (output.root)")
        return cls.open(runs[-1].parent)

    def without_checkpoint(self) -> RayflError:
        """The error if a model is wanted and there is no checkpoint."""
        if self.rounds_finished():
            why = "has no checkpoint, and so no models, like runs from an archive; repeat it in a new folder"
        else:
            why = "has no checkpoint yet; let the run finish first"
        return RayflError(f"{self.path}: {why}")

    def is_empty(self) -> bool:
        """Whether no round is complete."""
        return self.rounds_complete() == 0

    def rounds_complete(self) -> int:
        """The number of rounds in ``rounds.csv``."""
        path = self.path / "rounds.csv"
        return max(0, len(path.read_bytes().splitlines()) - 1) if path.is_file() else 0

    def rounds_finished(self) -> int:
        """The number of rounds of a finished run whose summary and tables of rounds and clients are whole;
        else 0.
        """
        try:
            summary = self.read_json("summary.json") or {}
            rounds, clients = (_rows(self.path / f"{what}s.csv", what) for what in ("round", "client"))
        except (Damaged, OSError):
            return 0
        whole = rounds == summary.get("rounds") and clients == summary.get("clients", clients)
        return rounds if whole else 0

    def write_divergence(self, rounds: int, error: ClientError) -> None:
        """Record that training diverged: repeated with as many rounds, it would do so again."""
        self.write_json(DIVERGED, {"rounds": rounds, "error": " ".join(str(error).split())})

    def forget_divergence(self) -> None:
        """Remove the record: the run is tried again."""
        files.remove(self.path / DIVERGED)

    def divergence(self, rounds: int) -> str:
        """Why training diverged in a run of as many rounds; empty if it did not, or is unknown."""
        with contextlib.suppress(Damaged):
            recorded = self.read_json(DIVERGED) or {}
            if recorded.get("rounds") == rounds:
                return str(recorded.get("error", ""))
        return ""

    def check_files(self) -> None:
        """Refuse folders, pipes and the like where the run writes files, and files that it may not read.

        Raises:
            Damaged
        """
        for path in sorted(self.path.iterdir()):
            if path.suffix in (".csv", ".json", ".jsonl", ".html", ".yaml"):
                if not path.is_file():
                    raise Damaged(f"{path}: is not a regular file; remove it")
                if not os.access(path, os.R_OK):
                    raise Damaged(f"{path}: cannot be read; change its permissions")

    def check_writable(self) -> None:
        """Refuse a folder in which the run could not go on.

        Raises:
            ConfigError
        """
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise ConfigError(str(self.path), "cannot be written to", "change its permissions")

    def write_config(self, config: Config) -> None:
        """``config.yaml``: what :func:`~rayfl.api.resume` reads."""
        files.write(self.path / "config.yaml", config.to_yaml())

    @property
    def config(self) -> Config:
        """The resolved config of the run; imports its plug-ins in the version that the run used.

        Raises:
            ConfigError: if a plug-in cannot be imported, or this process has imported another version of it.
        """
        return self.config_with()

    def config_with(self, changed: Sequence[plugins.Plugin] = ()) -> Config:
        """As :attr:`config`, but with some plug-ins as they are in this process.

        Raises:
            ConfigError
        """
        for plugin in self.recorded_plugins():
            folder = plugin.folder if plugin.now() == plugin else self._plugin_folder
            folder = None if plugin.installed else folder
            plugins.restore(plugin, folder, self.path, KINDS.values(), plugin in changed)
        return reload(self.path / "config.yaml")

    @property
    def _plugin_folder(self) -> Path:
        return self.path / "plugins"

    def recorded_plugins(self) -> list[plugins.Plugin]:
        """The code from outside of rayfl with which the run began.

        Raises:
            Damaged
        """
        record = self.read_json("plugins.json") or {"plugins": []}
        try:
            return [plugins.Plugin.from_dict(entry) for entry in record["plugins"]]
        except (KeyError, TypeError) as error:
            raise Damaged(f"{self.path / 'plugins.json'}: is damaged ({one_line(error)})") from None

    def write_plugins(self) -> None:
        """``plugins.json`` and ``plugins/``: code from outside of rayfl that this process has imported."""
        loaded = plugins.loaded()
        if not loaded:
            return
        for plugin in loaded:
            for name, content in plugin.source().items():
                files.make((self._plugin_folder / name).parent, parents=True)
                files.write(self._plugin_folder / name, content)
        self.write_json("plugins.json", {"plugins": [plugin.to_dict() for plugin in loaded]})

    def changed_plugins(self) -> list[plugins.Plugin]:
        """The plug-ins that have changed since the run began; not those whose files are gone."""
        loaded = {plugin.module: plugin for plugin in plugins.loaded()}
        changed = []
        for plugin in self.recorded_plugins():
            current = loaded.get(plugin.module) or plugin.now()
            if current is not None and current.sha256 != plugin.sha256:
                changed.append(plugin)
        return changed

    def changed_files(self, plugin: plugins.Plugin) -> str:
        """The changed files of a plug-in, in parentheses; empty if only the file named by the user has."""
        folder = plugin.folder
        if folder is None or plugin.installed:
            return ""
        names = [name for name in plugin.files if _files_differ(self._plugin_folder / name, folder / name)]
        return f" ({', '.join(names)})" if names and names != [Path(plugin.given).name] else ""

    @property
    def scaling(self) -> Scaling | None:
        """The scaling of inputs for the run's models, fixed when the run begins; None before that."""
        values = self.read_json("normalisation.json")
        if values is None:
            return None
        digest = values.pop("sha256", None)  # earlier versions wrote none
        if digest not in (None, _digest(values)):
            raise _damaged(self.path / "normalisation.json", "its numbers are not those that were written")
        try:
            return Scaling.from_dict(values)
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(self.path / "normalisation.json", one_line(error)) from None

    def write_scaling(self, scaling: Scaling) -> None:
        """``normalisation.json``, with its hash: other numbers would change every result unnoticed."""
        values = scaling.to_dict()
        self.write_json("normalisation.json", {**values, "sha256": _digest(values)})

    @property
    def begun(self) -> bool:
        """Whether there is a checkpoint; without one, a resumed run accepts data that have changed."""
        return any((self.path / "checkpoints").glob("*"))

    @property
    def versions(self) -> dict[str, str]:
        """The versions of rayfl and its libraries with which the run began; empty if it has no checkpoint."""
        if self.begun:
            with contextlib.suppress(Damaged):
                return dict((self.read_json("environment.json") or {}).get("versions") or {})
        return {}

    def division(self, stages: Sequence[Stage]) -> dict[str, str]:
        """Fingerprints of the dataset and of its division among clients, for ``environment.json``: those
        recorded when the run began, or if there is no checkpoint yet, those of ``stages``."""
        if self.begun:
            with contextlib.suppress(Damaged):
                recorded = self.read_json("environment.json") or {}
                if {"data", "clients"} <= recorded.keys():
                    return {key: recorded[key] for key in ("data", "clients")}
        first, last = stages[0].federation, stages[-1].federation
        return {"data": fingerprint(first.samples), "clients": division(first, last)}

    def inputs(self, config: Config) -> dict[str, str]:
        """Hashes of the files that are settings apart from the data, such as an expert or weights, for
        ``environment.json``: those recorded when the run began, else as they are now.

        Raises:
            DataError: if a file has changed since the run began.
        """
        found = files_of(config, leave_out=("data", "partition", "events"))
        hashes = {str(path): content_of(path, times=False) for path in found}
        recorded: dict[str, str] = {}
        if self.begun:
            with contextlib.suppress(Damaged):
                recorded = (self.read_json("environment.json") or {}).get("inputs") or {}
        for name, was in recorded.items():
            if hashes.get(name, was) != was:
                raise DataError(f"{name}: has changed since the run began; restore it, or begin a new run")
        return {**hashes, **recorded}

    def verify(self, stages: Sequence[Stage], say: Callable[[str], None] = lambda line: None) -> None:
        """Refuse a division of the data among clients that differs from the one with which the run began.

        Args:
            stages: as they are built now.
            say: called with a line if the division is the same but the data have changed.

        Raises:
            DataError: if the division differs from the recorded one.
        """
        recorded = self.division(stages)
        if division(stages[0].federation, stages[-1].federation) != recorded["clients"]:
            raise DataError(
                f"{self.path}: the clients have other samples than when the run began: a file or function of "
                "the data has changed; restore it, or begin a new run"
            )
        if fingerprint(stages[0].federation.samples) != recorded["data"]:
            say("the dataset has other contents than when the run began; the run goes on with these")

    def republish(self) -> None:
        """Publish the run, if it belongs on object storage and no process is running it.

        Raises:
            DiskError
            Held: if a process is running it.
        """
        if self.remote is not None:
            with self.locked():
                self.publish()

    @contextlib.contextmanager
    def locked(self, say: Callable[[str], None] = lambda text: None) -> Iterator[None]:
        """Lock the run, so that no second process writes to it, locally or on object storage.

        Args:
            say: called with a line if it takes long to find out whether another process is running it.

        Raises:
            Held: if another process holds it.
            DiskError: if the object storage does not answer.
        """
        lock = FileLock(self.path / ".lock")
        with files.boundary(self.path / ".lock"):
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise Held(
                    f"{self.path}: another process is running this run; wait for it or stop it"
                ) from None
        remote = self.remote
        try:
            with contextlib.nullcontext() if remote is None else remote.leased(self.path, say):
                yield
        finally:
            lock.release()

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file; NaN becomes null."""
        files.write(self.path / name, json.dumps(clean(value), indent=1) + "\n")

    def write_json_with(self, name: str, head: Mapping[str, Any], last: str, items: Sequence[str]) -> None:
        """Write ``{**head, last: [...]}`` like :meth:`write_json`, from list entries that are already text.

        Args:
            name: of the file.
            head: the other entries, at least one.
            last: the key of the list.
            items: the entries of the list, as text made by :func:`item`.
        """
        rows = ",\n".join(items)
        listed = f"[\n{rows}\n ]" if items else "[]"
        begin = json.dumps(clean(head), indent=1).removesuffix("\n}")
        files.write(self.path / name, f"{begin},\n {json.dumps(last)}: {listed}\n}}\n")

    def read_json(self, name: str) -> Any:
        """Read a JSON file of the run; None if it does not exist.

        Raises:
            Damaged
        """
        path = self.path / name
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise Damaged(f"{path}: cannot be read ({one_line(error)})") from None
        except (ValueError, RecursionError) as error:
            raise _damaged(path, one_line(error)) from None
        if not isinstance(content, dict):
            raise _damaged(path, f"it holds a {type(content).__name__}")
        return content

    def table(
        self, name: str, rows: Sequence[Mapping[str, Any]] = (), columns: Sequence[str] = ()
    ) -> GrowingTable:
        """Write a table with these rows, to which more can be added.

        Args:
            name: of the CSV file.
            rows: the first rows.
            columns: further columns, after those that every run has in this file.
        """
        return GrowingTable.start(self.path / name, (*_FIXED_COLUMNS.get(name, ()), *columns), rows)

    def write_frame(self, name: str, frame: pd.DataFrame) -> None:
        """Write a CSV file."""
        rows = range(0, max(1, len(frame)), AT_ONCE)
        self.write_frames(name, (frame.iloc[first : first + AT_ONCE] for first in rows))

    def write_frames(self, name: str, frames: Iterable[pd.DataFrame]) -> None:
        """Write tables with the same columns to one CSV file, one below the other; only one of them at a time
        is in memory as text."""
        files.write(self.path / name, (_frame_text(frame, not place) for place, frame in enumerate(frames)))

    def read_frame(self, name: str) -> pd.DataFrame:
        """Read a CSV file of the run.

        Raises:
            Damaged: if it is missing, or not a table.
        """
        path = self.path / name
        try:
            return read_table(path)
        except (OSError, ValueError) as error:
            raise Damaged(f"{path}: cannot be read ({one_line(error)})") from None


def read_table(path: Path) -> pd.DataFrame:
    """Read a CSV file of a run. Ids of clients are text, even if they look like numbers or like ``NA``.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not a table.
    """
    import pandas as pd

    # Before pandas 3.1 the default precision is an ulp off. Nothing but an empty field is a missing number.
    exact: Any = {}
    if tuple(map(int, pd.__version__.split(".")[:2])) < (3, 1):
        exact["float_precision"] = "round_trip"
    frame: pd.DataFrame = pd.read_csv(
        path, dtype={"name": str}, keep_default_na=False, na_values=[""], **exact
    )
    if "name" in frame:
        frame["name"] = frame["name"].fillna("")
    return frame


@dataclass(frozen=True)
class GrowingTable:
    """A CSV file that grows by some rows per round. The object is immutable: to undo a round, go on with the
    object from before it.

    Attributes:
        path: of the file.
        columns: of the table.
        bytes: the length of the table. Bytes of the file beyond it are from an incomplete write, or from a
            round that was undone.
    """

    path: Path
    columns: tuple[str, ...]
    bytes: int

    @classmethod
    def start(cls, path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> GrowingTable:
        """Write the table as a whole.

        Raises:
            DiskError
        """
        text = _rows_text(columns, rows, header=True).encode()
        files.write(path, text)
        return cls(path, tuple(columns), len(text))

    def extended(self, rows: Sequence[Mapping[str, Any]]) -> GrowingTable:
        """The table with more rows; only these are written.

        Raises:
            DiskError
        """
        if not rows:
            return self
        text = _rows_text(self.columns, rows, header=False)
        self.cut()
        files.append(self.path, text)
        return replace(self, bytes=self.bytes + len(text.encode()))

    def cut(self) -> None:
        """Remove the bytes of the file beyond the table.

        Raises:
            DiskError
        """
        files.truncate(self.path, self.bytes)


_REMEDIES = {
    "summary.json": "delete it and resume the run, which writes it again",
    "normalisation.json": "delete it if the data are as they were",
}


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _rows(path: Path, first: str) -> int:
    """The number of rows of a table, whose first column has this name.

    Raises:
        Damaged: if another column is the first, a row is too short or too long, or the end is cut off.
        OSError: if it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        header, *rows = csv.reader(io.StringIO(text, newline=""))
    except (ValueError, csv.Error) as error:  # not UTF-8, no header, a NUL
        raise _damaged(path, one_line(error)) from None
    if header[:1] != [first] or not text.endswith("\n") or {len(row) for row in rows} - {len(header)}:
        raise _damaged(path, "a part of it is missing")
    return len(rows)


def _damaged(path: Path, why: str) -> Damaged:
    remedy = _REMEDIES.get(path.name)
    return Damaged(f"{path}: is damaged ({why}){f'; {remedy}' if remedy else ''}")


def name_of(config: Config, changed: Sequence[str], stamp: str) -> str:
    """``<name>-<algorithm>-<changed settings>-seed<seed>-<time>``, with room for a suffix up to ``-99``."""
    start, end = f"{config.name}-{config.algorithm.name}", f"seed{config.seed}-{stamp}"
    for shown in range(len(changed), -1, -1):
        left_out = [f"and{len(changed) - shown}more"] if shown < len(changed) else []
        name = "-".join([start, *changed[:shown], *left_out, end])
        if len(name) <= _LONGEST_NAME:
            break
    return name


def _files_differ(one: Path, other: Path) -> bool:
    try:
        return one.read_bytes() != other.read_bytes()
    except OSError:
        return True


def _rows_text(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], header: bool) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    if header:
        writer.writeheader()
    for row in rows:
        writer.writerow({k: "" if _is_missing(v) else v for k, v in row.items()})
    return buffer.getvalue()


def _frame_text(frame: pd.DataFrame, header: bool) -> str:
    """A table as text, like ``DataFrame.to_csv``, but much faster for many rows of numbers."""
    columns = [_arrow_array(frame[name]) for name in frame] if len(frame) >= _MANY_ROWS else [None]
    if any(column is None for column in columns):
        return str(frame.to_csv(index=False, header=header))
    import pyarrow as pa
    from pyarrow import csv as arrow

    buffer = io.BytesIO()
    table = pa.Table.from_arrays(columns, names=[str(name) for name in frame])
    arrow.write_csv(table, buffer, arrow.WriteOptions(include_header=False, quoting_style="none"))
    return (str(frame.iloc[:0].to_csv(index=False)) if header else "") + buffer.getvalue().decode()


def _arrow_array(column: pd.Series) -> Any:
    """A column of numbers as an Arrow array, with floats as text in Python's format; None if it contains
    anything else, or if Arrow is not installed."""
    try:
        import pyarrow as pa
    except ImportError:
        return None
    if not isinstance(column.dtype, np.dtype):
        return None
    if column.dtype.kind in "iu":
        return pa.array(column.to_numpy())
    if column.dtype == np.float64:
        # Compare bits: -0.0 equals 0.0, but its text differs.
        bits, place = np.unique(column.to_numpy().view(np.int64), return_inverse=True)
        texts = ["" if np.isnan(value) else repr(value) for value in bits.view(np.float64).tolist()]
        return pa.array(texts).take(pa.array(place))
    return pa.nulls(len(column)) if column.dtype == object and column.isna().all() else None


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not np.isfinite(value))


def item(value: Any) -> str:
    """The JSON text of a list entry for :meth:`RunDirectory.write_json_with`."""
    return textwrap.indent(json.dumps(clean(value), indent=1), "  ")


def clean(value: Any) -> Any:
    """Convert a value to one that JSON supports: arrays become lists; NaN and infinities become None."""
    if isinstance(value, Mapping):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v) for v in value]
    if isinstance(value, np.ndarray):
        return clean(value.tolist())
    if isinstance(value, np.generic):
        return clean(value.item())
    return None if _is_missing(value) else value

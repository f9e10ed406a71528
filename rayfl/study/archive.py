"""An archive of finished runs: a folder with one small zip file for each, without models.

It carries the runs of a study to another machine, or publishes them next to a table: a study that is repeated
with it executes only the missing runs, for instance those of further seeds.
"""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayfl import files
from rayfl.config import Config, reload
from rayfl.config.text import NOT_YAML, dump, parse
from rayfl.errors import ConfigError, Damaged, Held, RayflError
from rayfl.inputs import portable_settings
from rayfl.rundir import DIVERGED, RunDirectory
from rayfl.study.plan import PlannedRun, key_of
from rayfl.study.running import directory_of, has_ended, is_finished, name_of, rounds_done

_CONFIG, _SUMMARY, _ENVIRONMENT = "config.yaml", "summary.json", "environment.json"
_ENDS = (_SUMMARY, DIVERGED)
"""The files one of which a run that has ended has."""

_TABLES = (
    "rounds.csv",
    "clients.csv",
    "groups.csv",
    "communication.csv",
    "labels.csv",
    "diagnostics.csv",
    "clusters.json",
    "normalisation.json",
)
"""Further files of a run that studies and reports read."""

_ARCHIVED = ("python", "processor", "cores", "versions", "dataset", "data", "clients", "engine", "precision")
"""The entries of the environment that are archived: those that may affect the numbers."""

_EARLIEST = (1980, 1, 1, 0, 0, 0)
"""The time of all files in an archive, so that the same run gives the same bytes."""


def add(runs: Sequence[PlannedRun], archive: Path) -> list[Path]:
    """Add runs that are finished, or whose training diverged, to an archive that does not have them; returns
    the new files. A finished run replaces the record that it diverged, as it may have on another processor.

    Folders of this machine are left out: ``output.root``, and those of plug-ins and of the user's files.

    Raises:
        Damaged: if a file of a run cannot be read.
        DiskError
    """
    archived = _archived_files(archive)
    missing = {run.key: run for run in runs if _adds(run, archived.get(run.key))}
    if missing:
        files.make(archive, parents=True)
    return [_pack(run, archived.get(run.key, archive / f"{name_of(run)}.zip")) for run in missing.values()]


def _adds(run: PlannedRun, archived: Path | None) -> bool:
    """Whether a run is to be written to an archive, which has it in this file, or in none."""
    return has_ended(run) if archived is None else _diverged(archived) and is_finished(run)


def _pack(run: PlannedRun, path: Path) -> Path:
    directory = RunDirectory(directory_of(run))
    tables = {name: directory.path / name for name in _TABLES}
    contents = {name: path.read_bytes() for name, path in tables.items() if path.is_file()}
    environment = directory.read_json(_ENVIRONMENT) or {}
    contents[_ENVIRONMENT] = _json({name: environment[name] for name in _ARCHIVED if name in environment})
    end = _SUMMARY if is_finished(run) else DIVERGED
    contents[end] = _json(directory.read_json(end))
    contents[_CONFIG] = _portable_config(run).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        packed.comment = run.key.encode()
        for name in sorted(contents):
            packed.writestr(zipfile.ZipInfo(name, _EARLIEST), contents[name], zipfile.ZIP_DEFLATED)
    files.write(path, buffer.getvalue())
    return path


def restore(runs: Sequence[PlannedRun], archive: Path) -> list[PlannedRun]:
    """Unpack the runs that are in the archive and have not ended here; returns those that were unpacked.

    A run that was begun here is replaced, unless it was resumed with another number of rounds; if the
    archived run diverged, the run here goes on, since it need not diverge on this processor. A run that
    another process is executing is left to that process.

    Raises:
        Damaged: if a file of the archive is not what was written.
        ConfigError: if a file holds another run than its name says.
        DiskError
    """
    archived, restored = _archived_files(archive), []
    missing = [
        run
        for run in runs
        if run.key in archived
        and not is_finished(run)
        and not (_diverged(archived[run.key]) and (has_ended(run) or rounds_done(directory_of(run))))
        and not _has_other_rounds(run)
    ]
    for run in {run.key: run for run in missing}.values():
        contents = _unpack(archived[run.key], run)
        directory = RunDirectory(directory_of(run))
        files.make(directory.path, parents=True)
        with contextlib.suppress(Held), directory.locked():
            directory.clear()  # models and checkpoints of a begun run do not belong to the archived one
            directory.write_config(_as_run(run.config, contents))
            for name, data in contents.items():
                if name != _CONFIG and name not in _ENDS:
                    files.write(directory.path / name, data)
            end = _end_of(contents)
            files.write(directory.path / end, contents[end])  # last: with it the run has ended
            restored.append(run)
            if not has_ended(run):
                raise _unusable(archived[run.key], "its tables are not those of a finished run")
    return restored


def _as_run(config: Config, contents: Mapping[str, bytes]) -> Config:
    """The config with the paths of this machine, and with the engine that the archived run used."""
    engine = _environment_of(contents).get("engine", config.training.engine)
    return config.model_copy(update={"training": config.training.model_copy(update={"engine": engine})})


def _environment_of(contents: Mapping[str, bytes]) -> dict[str, Any]:
    """What the archived run recorded of its machine; empty for one of an earlier version."""
    return dict(json.loads(contents.get(_ENVIRONMENT, b"{}")))


def _has_other_rounds(run: PlannedRun) -> bool:
    """Whether the run's directory has been resumed with another number of rounds."""
    with contextlib.suppress(RayflError):
        return RunDirectory.open(directory_of(run)).config.rounds != run.config.rounds
    return False


def holds(runs: Sequence[PlannedRun], archive: Path) -> bool:
    """Whether all runs are in an archive."""
    return {run.key for run in runs} <= _archived_files(archive).keys()


def _archived_files(archive: Path) -> dict[str, Path]:
    """The files by the keys of their runs; other studies may have given them other names."""
    return {path.stem.rpartition("-")[2]: path for path in sorted(archive.glob("*-*.zip"), reverse=True)}


def _unpack(path: Path, run: PlannedRun) -> dict[str, bytes]:
    """The files of an archived run.

    Raises:
        Damaged, ConfigError
    """
    expected = {_CONFIG, *_ENDS, _ENVIRONMENT, *_TABLES}
    try:
        with zipfile.ZipFile(files.regular(path)) as packed:
            contents = {name: packed.read(name) for name in packed.namelist() if name in expected}
            key = packed.comment.decode()
        settings = dict(parse(contents[_CONFIG].decode()))
        rounds = json.loads(contents[_end_of(contents)])["rounds"]
        _environment_of(contents)  # whether it can be read
        settings["plugins"] = []  # the study has imported them
        # Earlier versions wrote no key. They archived no paths, so the key can be computed from the config.
        key = key or key_of(reload(settings))
    except (
        OSError,
        KeyError,
        TypeError,
        ValueError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
        *NOT_YAML,
    ) as error:
        raise _unusable(path, " ".join(str(error).split()) or type(error).__name__) from None
    except ConfigError as error:
        raise _unusable(path, str(error)) from None
    if key != run.key or rounds != run.config.rounds:
        raise ConfigError(str(path), "holds another run than its file name says", "remove it")
    return contents


def _diverged(path: Path) -> bool:
    """Whether a file of the archive is the record of a run that diverged; false if it cannot be read."""
    with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(files.regular(path)) as packed:
        names = packed.namelist()
        return DIVERGED in names and _SUMMARY not in names
    return False


def _end_of(contents: Mapping[str, bytes]) -> str:
    """The file that says how a run ended; its summary, if it has one."""
    return next((name for name in _ENDS if name in contents), _SUMMARY)


def _unusable(path: Path, reason: str) -> Damaged:
    return Damaged(f"{path}: cannot be read ({reason}); remove it, and the study repeats the run")


def _portable_config(run: PlannedRun) -> str:
    """The run's config without the paths of this machine."""
    settings = portable_settings(run.config)
    settings["plugins"] = [Path(name).name for name in settings["plugins"]]
    settings["output"] = {**settings["output"], "root": "runs"}
    return dump(settings)


def _json(values: Any) -> bytes:
    return (json.dumps(values, indent=1) + "\n").encode()

"""The interface of loggers; failures of a tracker do not affect the run."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rayfl.errors import ConfigError, RayflError
from rayfl.events import Listener, Note, RunEvent
from rayfl.settings import Section, dotted


@dataclass(frozen=True)
class LoggedRun:
    """What a logger may know about the run.

    Attributes:
        path: the run directory; its name is the run's.
        config: the resolved config, plain values.
    """

    path: Path
    config: Mapping[str, Any]

    def settings(self) -> dict[str, Any]:
        """The config as a flat table: values by their dotted names."""
        return dict(dotted(self.config))

    def remembered(self, logger: str) -> dict[str, Any]:
        """What a logger stored about this run before it was stopped, such as an id; empty at first."""
        return dict(self._read_memory().get(logger, {}))

    def remember(self, logger: str, values: Mapping[str, Any]) -> None:
        """Store values in the run directory, which :meth:`remembered` returns when the run is resumed.

        Raises:
            DiskError
        """
        from rayfl import files

        memory = {**self._read_memory(), logger: dict(values)}
        files.write(self.path / "loggers.json", json.dumps(memory, indent=1) + "\n")

    def _read_memory(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            contents = json.loads((self.path / "loggers.json").read_text(encoding="utf-8"))
            return contents if isinstance(contents, dict) else {}
        return {}


class Log:
    """An open log of one run."""

    def write(self, event: RunEvent) -> None:
        """Take an event; most can be ignored. An error ends this log, not the run."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the log when the run has ended; an earlier Finished or Stopped event specifies how."""


class Logger(Section):
    """Where the events of a run are written, chosen by name; a file of ``rayfl/loggers``, or a plug-in.

    Loggers run in the process of the driver, on Ray in the driver actor. If one fails, for instance because
    its server does not answer, the run reports that in one line and continues without it. Only a full disk
    ends the run.
    """

    name: str = ""
    variables: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the environment variables that it reads, such as ``WANDB_``; the driver receives these."""

    def check(self) -> None:
        """Refuse a logger that cannot work, such as without its library; called before anything starts.

        Raises:
            ConfigError
        """

    def open(self, run: LoggedRun) -> Log:
        """Start the log of a run, or continue it."""
        raise NotImplementedError


def require(library: str, extra: str) -> None:
    """Refuse a logger whose library is not installed; it is not imported yet.

    Raises:
        ConfigError: one line that says how to install it.
    """
    if importlib.util.find_spec(library) is None:
        raise ConfigError(
            "output.loggers",
            f"{extra} needs {library}, which is not installed",
            f"pip install 'rayfl[{extra}]'",
        )


def environment(loggers: Iterable[Logger]) -> dict[str, str]:
    """The variables of this process that loggers read."""
    wanted = tuple(prefix for logger in loggers for prefix in logger.variables)
    return {name: value for name, value in os.environ.items() if name.startswith(wanted)} if wanted else {}


class OpenLoggers:
    """Passes every event to the loggers of a run, and then to another listener.

    Args:
        loggers: of the run; they are opened now.
        run: what they may know.
        emit: the other listener.

    Raises:
        DiskError: here and when called, if something cannot be written.
    """

    def __init__(self, loggers: Sequence[Logger], run: LoggedRun, emit: Listener) -> None:
        self._emit = emit
        self._open_logs: dict[str, Log] = {}
        for logger in loggers:
            try:
                self._open_logs[logger.name] = logger.open(run)
            except RayflError:
                raise
            except Exception as error:
                self._drop(logger.name, error)

    def __call__(self, event: RunEvent) -> None:
        """Write an event to all logs, then pass it on."""
        for name, log in list(self._open_logs.items()):
            try:
                log.write(event)
            except RayflError:
                raise
            except Exception as error:
                self._drop(name, error)
        self._emit(event)

    def _drop(self, name: str, error: Exception) -> None:
        self._open_logs.pop(name, None)
        text = " ".join(str(error).split())
        text = f"{type(error).__name__}: {text if len(text) <= 200 else text[:197] + '...'}"
        self._emit(Note(f"logger {name}: {text}; the run goes on without it"))

    def close(self) -> None:
        """Close all that are still open."""
        for name, log in self._open_logs.items():
            try:
                log.close()
            except Exception as error:
                self._emit(Note(f"logger {name}: could not be closed ({type(error).__name__}: {error})"))
        self._open_logs.clear()

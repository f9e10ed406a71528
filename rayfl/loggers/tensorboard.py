"""TensorBoard events, written immediately.

tensorboardX's own writer passes them to a thread; if that thread dies because the disk is full, the caller
waits forever.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

from rayfl.events import RoundDone, RunEvent
from rayfl.loggers.base import Log, LoggedRun, Logger


class TensorBoard(Logger):
    """An events file for TensorBoard in the run directory."""

    name: Literal["tensorboard"] = "tensorboard"

    def open(self, run: LoggedRun) -> Log:
        """Open a new file; TensorBoard shows all files of a folder as one run."""
        return _Board(run.path)


class _Board(Log):
    """An events file in a run directory.

    Raises:
        DiskError: here and later, if it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        from rayfl import files

        self._path = folder / "events"
        with files.boundary(self._path):
            files.watch("write", self._path)
            self._writer = EventsWriter(str(self._path))

    def write(self, event: RunEvent) -> None:
        """Write the curves of a round to the file."""
        if not isinstance(event, RoundDone):
            return
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        from rayfl import files

        with files.boundary(self._path):
            for name, value in event.curves.items():
                now, summary = time.time(), scalar(name, value)
                self._writer.write_event(Event(wall_time=now, step=event.round, summary=summary))
            files.watch("append", self._path)
            self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        from rayfl import files

        with files.boundary(self._path):
            self._writer.close()

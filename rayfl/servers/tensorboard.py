"""TensorBoard events, written as they come.

tensorboardX's own writer hands them to a thread; if that dies of a full disk, whoever writes waits for ever.
"""

from __future__ import annotations

import time
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.summary import scalar

from rayfl import files


class Board:
    """An events file in a run directory.

    Args:
        folder: the run directory.

    Raises:
        DiskError: here and later, if it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "events"
        with files.boundary(self._path):
            files.watch("write", self._path)
            self._writer = EventsWriter(str(self._path))

    def add(self, name: str, value: float, step: int) -> None:
        """One point of a curve."""
        with files.boundary(self._path):
            self._writer.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))

    def flush(self) -> None:
        """What has been added is in the file."""
        with files.boundary(self._path):
            files.watch("append", self._path)
            self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        with files.boundary(self._path):
            self._writer.close()

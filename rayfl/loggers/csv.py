"""The tables of the run directory, under the name by which other tools know them."""

from __future__ import annotations

from typing import Literal

from rayfl.events import RunEvent
from rayfl.loggers.base import Log, LoggedRun, Logger


class Csv(Logger):
    """rounds.csv and the other tables of the run directory, which every run has even without this logger."""

    name: Literal["csv"] = "csv"

    def open(self, run: LoggedRun) -> Log:
        """The driver writes the tables itself: rounds can be resumed from them."""
        return _NullLog()


class _NullLog(Log):
    def write(self, event: RunEvent) -> None:
        """Do nothing: the driver has written it to the tables."""

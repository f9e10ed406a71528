"""The figures of long benchmarks, written while they run, so that a stopped benchmark can be continued."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayfl import files

Row = dict[str, Any]
"""A line of a table, by column."""

_MACHINE = ("processor", "cores", "gpus", "python")


@dataclass
class Rows:
    """The rows of one benchmark.

    Attributes:
        known: rows that an earlier, stopped process has measured.
        keep: called with all rows so far after each measurement.
    """

    known: Sequence[Row] = ()
    keep: Callable[[Sequence[Row]], None] = lambda rows: None


@dataclass
class SavedFigures:
    """A file of figures; as long as it has an entry ``unfinished``, its figures are not measured again.

    Attributes:
        path: the file; None: nothing is saved.
        rounds: measured rounds, which must be those of the stopped process.
        result: the figures so far, with ``machine``, ``versions`` and ``device``, which must be equal, too.
    """

    path: Path | None
    rounds: int
    result: dict[str, Any]
    _earlier: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.is_file():
            try:
                saved = json.loads(self.path.read_text())
                if saved.get("unfinished") == self.rounds and self._is_same_setup(saved):
                    self._earlier = saved
            except (ValueError, AttributeError, TypeError):  # another file, or half of one
                pass

    def rows(self, name: str) -> Rows:
        """Where the benchmark of this name finds and keeps its rows."""

        def keep(rows: Sequence[Row]) -> None:
            self.result[name] = list(rows)
            self._write({**self._earlier, **self.result, "unfinished": self.rounds})

        return Rows(self._earlier.get(name, ()), keep)

    def finish(self) -> None:
        """Write all figures."""
        self._write(self.result)

    def _is_same_setup(self, saved: Mapping[str, Any]) -> bool:
        machine, saved_machine = self.result["machine"], saved.get("machine", {})
        same = all(machine.get(part) == saved_machine.get(part) for part in _MACHINE)
        return same and all(saved.get(part) == self.result[part] for part in ("versions", "device"))

    def _write(self, figures: Mapping[str, Any]) -> None:
        if self.path is not None:
            files.write(self.path, json.dumps(figures, indent=1) + "\n")

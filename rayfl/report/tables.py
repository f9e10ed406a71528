"""Tables of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """A cell; ``share`` in [0, 1] shades it."""

    text: str
    share: float | None = None


@dataclass(frozen=True)
class Table:
    """Rows below a header; the first ``left`` columns are text, the rest numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    left: int = 1

    @classmethod
    def of(cls, header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Table:
        """A table without shading."""
        return cls(header, [[Cell(text) for text in row] for row in rows], left)

"""Tables of a report: numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayfl.report.figures import byte_unit

UNKNOWN = "–"


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


def number(value: object, digits: int = 2) -> str:
    """A number with ``digits`` decimals, an integer without; a dash for what is unknown."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        return UNKNOWN
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def percent(value: object, digits: int = 1) -> str:
    """A number in percent with its unit."""
    text = number(float(value), digits) if isinstance(value, (int, float)) else UNKNOWN
    return text if text == UNKNOWN else f"{text} %"


def uncertain(value: object, error: object, estimate: bool = False) -> str:
    """A percentage with its standard error: ``85.0 % ± 0.9``; an estimate begins with ``≈``."""
    text = percent(value)
    if text == UNKNOWN:
        return text
    around = number(error, 1)
    return f"{'≈ ' * estimate}{text}{'' if around == UNKNOWN else f' ± {around}'}"


def size(value: object) -> str:
    """Bytes in a decimal unit, three digits: ``1.24 GB``, ``110 MB``."""
    if not isinstance(value, (int, float)) or value != value:
        return UNKNOWN
    unit, scale = byte_unit(value)
    scaled = value / scale
    digits = 0 if scale == 1 or scaled >= 99.95 else 1 if scaled >= 9.995 else 2
    return f"{scaled:,.{digits}f} {unit}"


def duration(value: object) -> str:
    """Seconds: ``12.3 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if not isinstance(value, (int, float)) or value != value:
        return UNKNOWN
    if value < 59.95:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(round(value / 60), 60)
    return f"{hours} h {minutes:02d} min"

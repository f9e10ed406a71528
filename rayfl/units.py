"""How numbers are written for people, wherever they are printed: bytes, durations, percentages, counts."""

from __future__ import annotations

import math
from numbers import Integral, Real

UNKNOWN = "–"

_BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def number(value: object, digits: int = 2) -> str:
    """A number with ``digits`` decimals, an integer without; a dash for NaN and anything not a number."""
    if isinstance(value, bool) or not isinstance(value, Real) or value != value:
        return UNKNOWN
    if isinstance(value, Integral):
        return f"{value:,}"
    text = f"{value:,.{digits}f}"
    return text if text.strip("-0.") else text.lstrip("-")  # not -0.0


def three_digits(value: float) -> str:
    """A measured number with three significant digits; from 1,000 on as a whole number."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def counted(count: int, noun: str) -> str:
    """``1 group``, ``1,200 groups``."""
    return f"{count:,} {noun if count == 1 else noun + 's'}"


def percent(value: object, digits: int = 1) -> str:
    """A number in percent with its unit."""
    text = number(float(value), digits) if isinstance(value, Real) else UNKNOWN
    return text if text == UNKNOWN else f"{text} %"


def uncertain(value: object, error: object, estimate: bool = False) -> str:
    """A percentage with its standard error: ``85.0 % ± 0.9``; an estimate begins with ``≈``."""
    text = percent(value)
    if text == UNKNOWN:
        return text
    around = number(error, 1)
    return f"{'≈ ' * estimate}{text}{'' if around == UNKNOWN else f' ± {around}'}"


def byte_unit(largest: float) -> tuple[str, float]:
    """The decimal unit for numbers of bytes up to ``largest``, and its size; 999.5 kB is 1.00 MB."""
    for unit, scale in _BYTES:
        if largest >= 0.9995 * scale:
            return unit, scale
    return "B", 1.0


def size(value: object) -> str:
    """Bytes in a decimal unit, three digits: ``999 B``, ``1.24 GB``, ``110 MB``."""
    if not isinstance(value, Real) or value != value:
        return UNKNOWN
    unit, scale = byte_unit(abs(float(value)))
    scaled = float(value) / scale
    digits = 0 if scale == 1 or abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2
    return f"{scaled:,.{digits}f} {unit}"


def duration(value: object) -> str:
    """Seconds: ``0.16 s``, ``12.3 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if not isinstance(value, Real) or value != value:
        return UNKNOWN
    taken = float(value)
    if taken < 0:
        return f"-{duration(-taken)}"
    if taken < 59.95 or math.isinf(taken):
        return f"{taken:.{2 if taken < 0.995 else 1}f} s"
    minutes, seconds = divmod(round(taken), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(round(taken / 60), 60)
    return f"{hours} h {minutes:02d} min"

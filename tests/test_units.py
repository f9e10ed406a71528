"""Numbers as people read them: the borders between units and between numbers of digits."""

from __future__ import annotations

import re

import numpy as np
import pytest

from rayfl.units import byte_unit, duration, number, percent, size, three_digits, uncertain


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1234, "1.23 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_949, "99.9 kB"),
        (99_951, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (999_999, "1.00 MB"),
        (1_000_000, "1.00 MB"),
        (12_345_678, "12.3 MB"),
        (999_960_000, "1.00 GB"),
        (5e9, "5.00 GB"),
        (1.5e12, "1.50 TB"),
        (3.5e15, "3,500 TB"),
        (np.int64(2_000_000), "2.00 MB"),
        (-964_000, "-964 kB"),
        (-1.5, "-2 B"),
        (None, "–"),
        (float("nan"), "–"),
    ],
)
def test_bytes(count: object, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize("exponent", range(14))
@pytest.mark.parametrize("factor", [1.0, 9.994, 9.9951, 9.9999])
def test_bytes_have_three_digits(exponent: int, factor: float) -> None:
    shown = size(round(factor * 10**exponent))
    assert re.fullmatch(r"\d{1,3} B|(\d\.\d\d|\d\d\.\d|\d{3}) [kMGT]B", shown)


def test_the_unit_of_several() -> None:
    assert byte_unit(999) == ("B", 1)
    assert byte_unit(999_499) == ("kB", 1e3)
    assert byte_unit(999_500) == ("MB", 1e6)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 s"),
        (0.16, "0.16 s"),
        (0.994, "0.99 s"),
        (0.996, "1.0 s"),
        (12.34, "12.3 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (119.6, "2 min 00 s"),
        (200, "3 min 20 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (360_000, "100 h 00 min"),
        (-50, "-50.0 s"),
        (-5550, "-1 h 32 min"),
        (float("inf"), "inf s"),
        (None, "–"),
        (float("nan"), "–"),
    ],
)
def test_durations(seconds: object, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (number(12345), "12,345"),
        (number(0.934), "0.93"),
        (number(-0.04, 1), "0.0"),
        (number(-0.06, 1), "-0.1"),
        (number(97.46, 1), "97.5"),
        (number(1234.5, 1), "1,234.5"),
        (number(np.int64(1000)), "1,000"),
        (number(np.float32(0.5)), "0.50"),
        (number(True), "–"),
        (number(None), "–"),
        (number(float("nan")), "–"),
        (percent(87.25, 2), "87.25 %"),
        (percent(90), "90.0 %"),
        (percent(None), "–"),
        (uncertain(85.0, 0.94), "85.0 % ± 0.9"),
        (uncertain(85.0, None, estimate=True), "≈ 85.0 %"),
        (uncertain(None, 0.9), "–"),
    ],
)
def test_numbers(shown: str, text: str) -> None:
    assert shown == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.023912, "0.0239"), (12.34, "12.3"), (999.4, "999"), (1039.2, "1,039"), (-5000.0, "-5,000")],
)
def test_measured_numbers_have_three_digits(value: float, text: str) -> None:
    assert three_digits(value) == text

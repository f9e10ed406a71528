"""Claims: what a study should show, parsed from text and judged by intervals over seeds.

A claim compares numbers of methods, paired over seeds::

    PACFL.accuracy_mean - FedAvg.accuracy_mean > 10
    FedAvg.accuracy_mean ~ 77.3 +- 3
    "PACFL, 2 clusters"[alpha=0.1].accuracy_mean < 0.5 * FedAvg.accuracy_mean + 40

A method is named by its label, with or without quotes; points of the grid may follow in brackets, each name
with or without quotes. A claim without brackets has to hold at every point of the grid.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from rayfl.errors import ConfigError, nearest
from rayfl.statistics import Interval, mean_interval, without_rounding

Verdict = Literal["holds", "fails", "undecided"]
EXIT_CODES: Mapping[str, int] = {"holds": 0, "fails": 1, "undecided": 3}
"""Exit codes of ``rayfl study --check``."""

Point = Mapping[str, str]
"""The point of each axis of the grid, by name."""

Values = Callable[[str, Point, str], Mapping[int, float]]
"""Returns by seed the numbers of a method, at a point of the grid, in a column."""

Reason = Callable[[str, Point, Point, str], str]
"""Takes a method, a point of the grid, the part of that point that the text should name, and a column.
Returns which runs of the method are not finished there, or never reached the column's target; empty if none.
"""

Least = Callable[[str, Point, str], float | None]
"""Takes a method, a point of the grid and a column. Returns what the column exceeds in all runs of the method
there if it has a target that none reached, that is the rounds of a run; else None.
"""


@dataclass(frozen=True)
class Term:
    """``factor * method[at].column``."""

    factor: float
    method: str
    at: Mapping[str, str]
    column: str


@dataclass(frozen=True)
class Statement:
    """A parsed claim: a sum of terms, and the number with which it is compared.

    Attributes:
        text: as written in the file.
        terms: of the sum; terms on the right have been moved to the left.
        comparison: ``>``, ``>=``, ``<``, ``<=`` or ``~``.
        bound: the number on the right, with which the sum is compared.
        tolerance: of ``~``.
        constant: the number on the left, which is part of the sum.
    """

    text: str
    terms: tuple[Term, ...]
    comparison: str
    bound: float
    tolerance: float = 0.0
    constant: float = 0.0

    @property
    def methods(self) -> set[str]:
        """The labels of the methods in it."""
        return {term.method for term in self.terms}

    @property
    def columns(self) -> set[str]:
        """The names of the numbers in it."""
        return {term.column for term in self.terms}


UNDECIDED = "the interval contains the bound"
"""The reason why most undecided claims are."""


@dataclass(frozen=True)
class Judgement:
    """The verdict on a claim at a point of the grid.

    Attributes:
        statement: the claim.
        point: of the grid.
        interval: of the sum over seeds, paired: all on the left of the claim, minus the terms on its right.
        verdict: ``holds`` if the whole interval satisfies the claim, ``fails`` if no part of it does,
            otherwise ``undecided``.
        why: the reason why it is undecided, or decided without numbers; otherwise empty.
        source, protocol: of the publication that claims it.
    """

    statement: Statement
    point: Mapping[str, str]
    interval: Interval
    verdict: Verdict
    why: str = ""
    source: str = ""
    protocol: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For ``claims.json``."""
        bounded = self.interval.bounded
        return {
            "claim": self.statement.text,
            **({"at": dict(self.point)} if self.point else {}),
            "verdict": self.verdict,
            "value": self.interval.mean,
            "low": self.interval.low if bounded else None,
            "high": self.interval.high if bounded else None,
            "seeds": self.interval.n,
            "comparison": self.statement.comparison,
            "bound": self.statement.bound,
            **({"tolerance": self.statement.tolerance} if self.statement.comparison == "~" else {}),
            **({"why": self.why} if self.why else {}),
            **({"source": self.source} if self.source else {}),
            **({"protocol": self.protocol} if self.protocol else {}),
        }


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict over several points: fails if it fails anywhere, holds if it holds everywhere."""
    distinct = set(verdicts)
    if "fails" in distinct:
        return "fails"
    return "holds" if distinct == {"holds"} else "undecided"


_NUMBER = re.compile(r"\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?")
_COLUMN = re.compile(r"\.([A-Za-z_][A-Za-z0-9_.]*)")
_AFTER_LABEL = re.compile(r"\[|\.[A-Za-z_]")
_COMPARISON = re.compile(r">=|<=|>|<|~|≥|≤")
_IN_ASCII = {"≥": ">=", "≤": "<="}
_SIGN = re.compile("[-+\N{MINUS SIGN}]")
_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")
_TOLERANCE = re.compile(r"\+-|\+/-|±")


@dataclass
class _Reader:
    """Parses a claim from left to right."""

    text: str
    labels: Sequence[str]
    axes: Mapping[str, Iterable[str]]
    position: int = field(default=0)

    def fail(self, what: str, remedy: str = "") -> ConfigError:
        text = self.text if len(self.text) < 100 else f"{self.text[:80]}..."
        what = what if len(what) < 200 else f"{what[:180]}..."
        return ConfigError(
            f"claims: {text!r}", what, remedy or "such as A.accuracy_mean - B.accuracy_mean > 10"
        )

    def space(self) -> None:
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self.space()
        match = pattern.match(self.text, self.position)
        if match:
            self.position = match.end()
        return match

    def sum(self) -> tuple[list[Term], float]:
        """``[-] term (+|- term)*``: its terms, and the sum of its plain numbers."""
        terms: list[Term] = []
        constant, sign = 0.0, self._sign() or 1.0
        while True:
            part = self._term(sign)
            if isinstance(part, Term):
                terms.append(part)
            else:
                constant += part
            self.space()
            if _TOLERANCE.match(self.text, self.position):
                return terms, constant
            following = self._sign()
            if following is None:
                return terms, constant
            sign = following

    def number(self) -> float | None:
        """A number without a sign; None if there is none at this position."""
        match = self.take(_NUMBER)
        if match is None:
            return None
        value = float(match[0])
        if math.isinf(value):
            raise self.fail(f"{match[0]} is too large", "a number below 1e308")
        return value

    def _sign(self) -> float | None:
        match = self.take(_SIGN)
        return None if match is None else (1.0 if match[0] == "+" else -1.0)

    def _term(self, sign: float) -> Term | float:
        self.space()
        label = self._label()
        if label is None:
            number = self.number()
            if number is None:
                raise self._missing_term()
            factor = sign * number
            if not self.take(re.compile(r"\*")):
                return factor
            label, sign = self._label(), factor
            if label is None:
                raise self._missing_term()
            if factor == 0:
                raise self.fail(f"0 times {label!r} is nothing", "leave it out")
        at = self._bracketed_point()
        column = _COLUMN.match(self.text, self.position)
        if column is None:
            raise self.fail(f"a column must follow {label!r}", f"such as {label}.accuracy_mean")
        self.position = column.end()
        return Term(sign, label, at, column[1])

    def _missing_term(self) -> ConfigError:
        rest = self.text[self.position :].strip()
        if not rest:
            return self.fail("something is missing at the end")
        if rest.startswith("("):
            return self.fail("parentheses cannot be read", "write the sum without them: A.x - B.x > 3")
        for label in sorted(self.labels, key=len, reverse=True):
            behind = rest[len(label) :]
            if rest.startswith(label) and re.match(r"\s*($|[<>=~≥≤]|[-+−]\s)", behind):
                what = f"the name of a number must follow {label!r}"
                return self.fail(what, f"such as {label}.accuracy_mean")
        name = re.split(r"[.\[]", rest.lstrip("\"'"))[0].strip("\"' ")
        if name in self.labels:
            return self.fail(
                f"a column must follow {name!r} without a space", f"such as {name}.accuracy_mean"
            )
        return self.fail(f"no method {name!r}", nearest(name, self.labels))

    def _label(self) -> str | None:
        """Parse the longest label at this position; a quoted label must exist."""
        self.space()
        quote = self.text[self.position : self.position + 1]
        if quote in ('"', "'"):
            end = self.text.find(quote, self.position + 1)
            label = self.text[self.position + 1 : end] if end > 0 else ""
            if label not in self.labels:
                raise self.fail(f"no method {label!r}", nearest(label, self.labels))
            self.position = end + 1
            return label
        matching = [
            label
            for label in self.labels
            if self.text.startswith(label, self.position)
            and _AFTER_LABEL.match(self.text, self.position + len(label))
        ]
        if not matching:
            return None
        label = max(matching, key=len)
        self.position += len(label)
        return label

    def at_label(self) -> bool:
        """Whether a method's label stands at this position, which is not passed."""
        position = self.position
        found = self._label() is not None
        self.position = position
        return found

    def _bracketed_point(self) -> dict[str, str]:
        if not self.text.startswith("[", self.position):
            return {}
        if self.text.find("]", self.position) < 0:
            raise self.fail("a bracket is not closed")
        point: dict[str, str] = {}
        while not self.take(re.compile(r"\]")):
            self.position += 1  # the bracket or comma
            start = self.position
            name = self._name_until("=,]")
            if not self.take(re.compile("=")):
                part = self.text[start : self.position].strip()
                raise self.fail(f"{part!r} is not a point of the grid", "such as [partition.alpha=0.1]")
            axis = axis_of(name, self.axes, self.fail)
            if axis in point:
                raise self.fail(f"{axis} is named twice")
            point[axis] = point_of(axis, self._name_until(",]"), self.axes, self.fail)
            if not self.text.startswith((",", "]"), self.position):
                raise self.fail(f"after {axis} a comma or a bracket must follow", "such as [alpha=0.1]")
        return point

    def _name_until(self, ends: str) -> str:
        """A name in quotes, or all text before one of ``ends``."""
        quoted = self.take(_QUOTED)
        if quoted is not None:
            self.space()
            return quoted[0][1:-1]
        name = self.take(re.compile(f"[^{re.escape(ends)}]*"))
        return name[0].strip() if name else ""


def axis_of(name: str, axes: Mapping[str, Iterable[str]], fail: Callable[[str, str], ConfigError]) -> str:
    """The axis of this name; its last part suffices: ``alpha`` for ``partition.alpha``."""
    named = [axis for axis in axes if axis == name] or [axis for axis in axes if axis.split(".")[-1] == name]
    if len(named) != 1:
        raise fail(f"the grid has no axis {name!r}", nearest(name, axes) if axes else "there is no grid")
    return named[0]


def point_of(
    axis: str,
    value: str,
    axes: Mapping[str, Iterable[str]],
    fail: Callable[[str, str], ConfigError],
) -> str:
    """The point of an axis, by its name; or else by an equal number."""
    if value in (names := list(axes[axis])):
        return value
    for point in names:
        if _same_number(point, value):
            return point
    raise fail(f"{axis} has no point {value!r}", f"valid: {', '.join(axes[axis])}")


def _same_number(first: str, second: str) -> bool:
    try:
        return float(first) == float(second)
    except ValueError:
        return False


def parse(text: str, labels: Iterable[str], axes: Mapping[str, Iterable[str]]) -> Statement:
    """Parse a claim.

    Args:
        text: of the claim.
        labels: of the methods.
        axes: of the grid, with the names of their points.

    Raises:
        ConfigError: if it is not a claim.
    """
    reader = _Reader(" ".join(text.split()), list(labels), axes)
    left, constant = reader.sum()
    start = reader.position
    comparison = reader.take(_COMPARISON)
    rest = reader.text[reader.position :].lstrip()
    if rest[:1] in tuple("<>=~≥≤") and not any(rest.startswith(label) for label in reader.labels):
        comparison, reader.position = None, start  # such as >>
    if comparison is None:
        rest = reader.text[reader.position :].lstrip()
        if rest.startswith("*"):
            remedy = "columns are multiplied by numbers only, which stand first: 2 * A.accuracy_mean"
            raise reader.fail(f"{rest!r} is unexpected", remedy)
        if rest.startswith("/"):
            raise reader.fail(f"{rest!r} is unexpected", "multiply instead: 0.5 * A.accuracy_mean")
        if rest and reader.at_label():
            raise reader.fail("a number and a method need * in between", "such as 2 * A.accuracy_mean")
        raise reader.fail(
            f"{rest!r} is not a comparison" if rest else "it compares nothing", "one of > < >= <= ~"
        )
    right, bound = reader.sum()
    tolerance = 0.0
    compared = _IN_ASCII.get(comparison[0], comparison[0])
    if compared == "~":
        number = reader.number() if reader.take(_TOLERANCE) else None
        if not number:
            what = "~ takes a tolerance" if number is None else "its tolerance is 0"
            raise reader.fail(what, "such as ~ 77.3 +- 3")
        tolerance = number
    reader.space()
    if reader.position < len(reader.text):
        rest = reader.text[reader.position :]
        remedy = "a claim has one comparison: write two claims" if _COMPARISON.match(rest) else ""
        raise reader.fail(f"{rest!r} is unexpected", remedy)
    terms = (*left, *(replace(term, factor=-term.factor) for term in right))
    if not terms:
        raise reader.fail("it names no method")
    if not (terms := summed(terms)):
        raise reader.fail("its numbers cancel out: nothing is compared", "compare two methods or two numbers")
    if not all(math.isfinite(100 * term.factor) for term in terms):
        raise reader.fail("a factor is too large", "a number below 1e300")
    return Statement(reader.text, terms, compared, bound, tolerance, constant)


def summed(terms: Iterable[Term], point: Point = MappingProxyType({})) -> tuple[Term, ...]:
    """The terms, each number once, without those that cancel out.

    Args:
        terms: of a sum.
        point: of the grid, for axes that a term does not name.
    """
    factors: dict[tuple[str, tuple[tuple[str, str], ...], str], list[float]] = {}
    for term in terms:
        key = (term.method, tuple(sorted({**point, **term.at}.items())), term.column)
        factors.setdefault(key, []).append(term.factor)
    sums = {key: sum(each) for key, each in factors.items()}
    return tuple(
        Term(sums[method, at, column], method, dict(at), column)
        for (method, at, column), each in factors.items()
        if abs(sums[method, at, column]) > _ROUNDING * sum(map(abs, each))
    )


_ROUNDING = 1e-12
"""Relative size below which a sum of factors is due to rounding."""


def judge(
    statement: Statement,
    point: Point,
    values: Values,
    reason: Reason = lambda method, point, named, column: "",
    least: Least = lambda method, point, column: None,
) -> Judgement:
    """The verdict on a claim at a point of the grid.

    Args:
        statement: the claim.
        point: of the grid.
        values: the numbers of the runs.
        reason: returns which runs have none, and why.
        least: returns what the runs exceed if none has a number because they never reached a target.
    """
    numbers = [values(term.method, {**point, **term.at}, term.column) for term in statement.terms]
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in numbers))) if numbers else []
    rows = [[by_seed[seed] for seed in seeds] for by_seed in numbers]
    values_of_terms = np.array([term.factor for term in statement.terms])[:, None] * np.array(
        rows, np.float64
    )
    sums = without_rounding(np.vstack([values_of_terms, np.full(len(seeds), statement.constant)]))
    interval = mean_interval(sums)
    incomplete = len(set().union(*numbers)) - len(seeds) if numbers else 0
    if not len(seeds):
        return Judgement(statement, point, interval, "undecided", "no runs")
    if incomplete or np.isnan(sums).any():
        reasons = dict.fromkeys(
            reason(term.method, {**point, **term.at}, term.at, term.column) for term in statement.terms
        )
        why = "; ".join(filter(None, reasons)) or "some runs have no such number"
        return Judgement(statement, point, interval, _verdict_without(statement, point, least), why)
    if np.isinf(sums).any():
        return Judgement(statement, point, interval, "undecided", "some runs have an infinite number")
    if not interval.bounded:
        return Judgement(statement, point, interval, "undecided", "one seed has no interval")
    verdict = verdict_of(statement, interval.low, interval.high)
    return Judgement(
        statement,
        point,
        interval,
        verdict,
        UNDECIDED if verdict == "undecided" else "",
    )


def _verdict_without(statement: Statement, point: Point, least: Least) -> Verdict:
    """The verdict on a claim about numbers that not all runs have: it is undecided, unless its only number is
    that of runs none of which reached a target, and what they exceed decides."""
    if len(statement.terms) != 1:
        return "undecided"
    [term] = statement.terms
    exceeded = least(term.method, {**point, **term.at}, term.column)
    if exceeded is None:
        return "undecided"
    end = math.copysign(math.inf, term.factor)
    limit = math.nextafter(statement.constant + term.factor * exceeded, end)
    return verdict_of(statement, min(limit, end), max(limit, end))


def verdict_of(statement: Statement, low: float, high: float) -> Verdict:
    """The verdict on a claim whose sum lies between two numbers."""
    bound = statement.bound
    if math.isnan(low) or math.isnan(high):
        return "undecided"
    if statement.comparison == "~":
        least, most = bound - statement.tolerance, bound + statement.tolerance
        if least <= low and high <= most:
            return "holds"
        return "fails" if high < least or low > most else "undecided"
    if statement.comparison in ("<", "<="):
        low, high, bound = -high, -low, -bound
    if statement.comparison in (">", "<"):
        return "holds" if low > bound else "fails" if high <= bound else "undecided"
    return "holds" if low >= bound else "fails" if high < bound else "undecided"

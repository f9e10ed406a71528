"""The tables of a study: Markdown for reading, LaTeX for papers, CSV for programs."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rayfl.statistics import FEW
from rayfl.study.claims import UNDECIDED, Judgement, Statement
from rayfl.study.file import Expected, StudyFile, Tune, shown
from rayfl.study.plan import place_of, spoken
from rayfl.study.results import Results, better, cell, targets_accuracy, title_of, unit_of_column, written
from rayfl.units import UNKNOWN, counted, duration, number, size

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class TextTable:
    """A table of text.

    Attributes:
        header: titles of the columns.
        rows: cells.
        left: number of columns that are aligned to the left, from the first.
        remarks: number of columns of text after the numbers, which are aligned to the left, too.
        caption: text below or above the table.
        values: numbers to sort by: those of a column's cells, by the column's index; None for a cell without.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1
    caption: str = ""
    values: Mapping[int, Sequence[float | None]] = field(default_factory=dict)
    remarks: int = 0

    @property
    def rights(self) -> list[bool]:
        """For each column, whether it is aligned to the right."""
        count = len(self.header)
        return [self.left <= place < count - self.remarks for place in range(count)]

    def markdown(self) -> str:
        """The table in GitHub's Markdown."""
        rule = ["--:" if right else "---" for right in self.rights]
        lines = [self.header, tuple(rule), *self.rows]
        cells = [[_markdown(cell) for cell in line] for line in lines]
        text = "\n".join(f"| {' | '.join(line)} |" for line in cells)
        return f"{text}\n" + (f"\n{_markdown_text(self.caption)}\n" if self.caption else "")

    def latex(self) -> str:
        """A ``tabular`` in the style of ``booktabs``."""
        columns = "".join("r" if right else "l" for right in self.rights)
        body = [" & ".join(map(_latex, row)) + r" \\" for row in self.rows]
        head = " & ".join(map(_latex, self.header)) + r" \\"
        inner = "\n".join([r"\toprule", head, r"\midrule", *body, r"\bottomrule"])
        caption = f"% {_one_line(self.caption)}\n" if self.caption else ""
        return f"{caption}\\begin{{tabular}}{{{columns}}}\n{inner}\n\\end{{tabular}}\n"


_GREEK = {"α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "η": "eta", "κ": "kappa"}
_GREEK |= {"ζ": "zeta", "θ": "theta", "ι": "iota", "ν": "nu", "ξ": "xi", "π": "pi", "φ": "phi", "χ": "chi"}
_GREEK |= {"ψ": "psi", "Γ": "Gamma", "Δ": "Delta", "Θ": "Theta", "Λ": "Lambda", "Π": "Pi", "Σ": "Sigma"}
_GREEK |= {"Φ": "Phi", "Ψ": "Psi", "Ω": "Omega", "∞": "infty", "≈": "approx"}
_GREEK |= {"λ": "lambda", "μ": "mu", "ρ": "rho", "σ": "sigma", "τ": "tau", "ω": "omega"}
_TEX = {
    **{letter: f"\\{letter}" for letter in "%&_#${}"},
    **{letter: f"${letter}$" for letter in "<>|"},
    **{letter: f"{{{letter}}}" for letter in "[*"},  # else arguments of the line break before them
    "\\": r"\textbackslash{}",
    "^": r"\^{}",
    "~": r"$\sim$",
    "±": r"$\pm$",
    "²": r"$^2$",
    **{"≥": r"$\ge$", "≤": r"$\le$", "−": "$-$", "×": r"$\times$", "→": r"$\to$"},
    **{letter: f"$\\{name}$" for letter, name in _GREEK.items()},
    "–": "--",
}
_TEX_SIGNS = {" - ": " $-$ ", "+-": r"$\pm$"}
"""Signs in claims."""


def _latex(text: str) -> str:
    """A cell or heading in LaTeX; the sign of a negative number becomes a minus, not a hyphen."""
    pieces = re.split(r"( - |\+-|(?<![\w.-])-(?=\d))", _one_line(text))
    return "".join(
        _TEX_SIGNS.get(piece, "$-$") if place % 2 else "".join(_TEX.get(letter, letter) for letter in piece)
        for place, piece in enumerate(pieces)
    )


def _markdown(text: str) -> str:
    """A cell in Markdown."""
    return _markdown_text(_one_line(text)).replace("|", r"\|")


def _markdown_text(text: str) -> str:
    """Text in Markdown: ``<b>``, which as HTML would not be shown, and emphasis of names are escaped."""
    text = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)
    text = re.sub(r"(?<![^\W_])_+(?!_)|(?<!_)_+(?![^\W_])", lambda run: run.group().replace("_", r"\_"), text)
    return re.sub(r"[*`](?=\S)|(?<=\S)[*`]", r"\\\g<0>", text)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def main_table(results: Results, tall: bool = False) -> TextTable:
    """One row per method and point, with published figures next to ours.

    Args:
        results: of the study.
        tall: give the axes of ``report.by`` rows instead of columns, for terminals.
    """
    study = results.study
    across = [] if tall else list(study.report.by)
    down = [axis for axis in study.axes if axis not in across]
    columns = [dict(zip(across, p, strict=True)) for p in itertools.product(*(study.axes[a] for a in across))]
    rows = [dict(zip(down, p, strict=True)) for p in itertools.product(*(study.axes[a] for a in down))]
    header = ["method", *(axis.split(".")[-1] for axis in down)]
    body = [[label, *row.values()] for row in rows for label in study.methods]
    values: dict[int, list[float | None]] = {}
    for column in study.columns:
        for at in columns:
            where = ", ".join(spoken(axis, name) for axis, name in at.items())
            sort_keys = values[len(header)] = []
            header.append(f"{title_of(column)}{f', {where}' if where else ''}")
            for line, (row, label) in zip(body, itertools.product(rows, study.methods), strict=True):
                point = {axis: {**row, **at}[axis] for axis in study.axes}
                interval = results.interval(label, point, column)
                never = len(results.never(label, point, column))
                line.append(cell(interval, column, len(results.seeds), never))
                sort_keys.append(interval.mean if interval.n else None)
            for origin, heading in _headings(
                each for each in study.expected if each.column == column
            ).items():
                sort_keys = values[len(header)] = []
                header.append(f"{heading}{f', {where}' if where else ''}")
                for line, (row, label) in zip(body, itertools.product(rows, study.methods), strict=True):
                    point = {axis: {**row, **at}[axis] for axis in study.axes}
                    value = _published_figure(study, column, origin, label, point)
                    line.append(UNKNOWN if value is None else written(column)(value))
                    sort_keys.append(value)
    return TextTable(tuple(header), tuple(map(tuple, body)), 1 + len(down), _caption(results), values)


def _caption(results: Results) -> str:
    n = len(results.seeds)
    versions = Counter(results.versions.values())
    mixed = ""
    if len(versions) > 1:
        listing = ", ".join(f"{version} ({count})" for version, count in sorted(versions.items()))
        mixed = f" The runs are by different versions of rayfl: {listing}; runs.csv says which."
    about = f"{_about_accuracies(results.study.report.names)}{_about_published(results.study)}{mixed}"
    if n < 2:
        return f"One seed: no intervals, and no claim can be decided.{_lacking(results)}{about}"
    few = " With so few seeds the intervals are wide." if n < FEW else ""
    return f"Mean over {n} seeds ± half of its 95 % interval (Student's t).{few}{_lacking(results)}{about}"


def _lacking(results: Results) -> str:
    """Sentences about numbers that not all seeds have, and why; empty if all have them."""
    n, study = len(results.seeds), results.study
    cells = list(itertools.product(study.methods, results.points, study.columns))
    some = next((k for each in cells if 0 < (k := results.interval(*each).n) < n), 0)
    sentences = []
    if some:
        have = "has" if some == 1 else "have"
        sentences.append(
            f"({some} of {n}): only {some} of the {n} seeds {have} the number; the mean is over these."
        )
    if any(results.never(*each) for each in cells):
        sentences.append("never: no run reached this accuracy; 2 never: two runs did not, and are left out.")
    failed = Counter(run.method for run in results.runs if run.key in results.errors)
    if failed:
        runs = ", ".join(f"{counted(count, 'run')} of {method}" for method, count in failed.items())
        sentences.append(f"Failed, and without numbers: {runs}; runs.csv says why.")
    return "".join(f" {sentence}" for sentence in sentences)


def _about_accuracies(columns: Iterable[str]) -> str:
    """What accuracies without a qualifier are; empty if there are none."""
    if not any(column.startswith("accuracy_") for column in columns):
        return ""
    return (
        " Unless the heading says otherwise, accuracies are those of the served models (the server's, or "
        "that of the client's cluster) after the last round, each client on its own test samples."
    )


def _origin(expected: Expected) -> tuple[str, str]:
    """The source of published figures, and their protocol."""
    return expected.source, expected.protocol


def _headings(expected: Iterable[Expected]) -> dict[tuple[str, str], str]:
    """The heading of the figures of each source; with the protocol if the source has several."""
    origins = dict.fromkeys(map(_origin, expected))
    of_source = Counter(source for source, _ in origins)
    return {
        (source, protocol): f"{source}, {protocol or 'no protocol'}" if of_source[source] > 1 else source
        for source, protocol in origins
    }


def _about_published(study: StudyFile) -> str:
    """What published figures are, where the headings do not say it."""
    texts = dict.fromkeys(
        f"{each.source} ({title_of(each.column)}): {each.protocol}"
        for each in study.expected
        if each.protocol
        and each.source in _headings(e for e in study.expected if e.column == each.column).values()
    )
    return f" Published figures are, in {'; in '.join(texts)}." if texts else ""


def _published_figure(
    study: StudyFile, column: str, origin: tuple[str, str], method: str, point: Mapping[str, str]
) -> float | None:
    """The figure that a source gives for a method at a point; None if it gives none."""
    for expected in study.expected:
        if expected.column == column and _origin(expected) == origin:
            value = expected.figures.get(method)
            value = figure_at(value, point) if isinstance(value, Mapping) else value
            if value is not None:
                return float(value)
    return None


def figure_at(figures: Mapping[str, float], point: Mapping[str, str]) -> float | None:
    """The figure of a point: by its names on all axes, separated by commas, or by its name on one axis."""
    for name in (", ".join(point.values()), *point.values()):
        if name in figures:
            return figures[name]
    return None


def comparison_table(results: Results) -> TextTable | None:
    """Every method compared with the reference; None if there is nothing to compare."""
    columns = results.study.report.names
    if len(results.study.methods) < 2 or len(results.seeds) < 2:
        return None
    axes = list(results.study.axes)
    header = ["method", *(axis.split(".")[-1] for axis in axes)]
    rows: list[list[str]] = []
    values: dict[int, list[float | None]] = {}
    lacking = False
    for place, column in enumerate(columns):
        compared = results.comparisons(column)
        values[len(header)] = [each.difference.mean if each.difference.n else None for each in compared]
        values[len(header) + 1] = [None if math.isnan(each.p) else each.p for each in compared]
        header += [f"{title_of(column)}, difference".replace("(%)", "(points)"), "p (Holm)"]
        for line, each in enumerate(compared):
            if not place:
                rows.append([each.method, *each.point.values()])
            rows[line] += [cell(each.difference, column, len(results.seeds)), _p_text(each.p)]
            lacking = lacking or each.difference.n < len(results.seeds)
    caption = (
        f"Differences to {results.reference}, paired over seeds, ± half of the 95 % interval; p-values of "
        "paired t-tests, adjusted by Holm's method for all comparisons of a column; none where all seeds "
        "differ by the same."
    )
    if lacking:
        caption += (
            " Seeds at which one of the two methods has no number are left out, however good the other's is."
        )
    return TextTable(tuple(header), tuple(map(tuple, rows)), 1 + len(axes), caption, values)


def _p_text(value: float) -> str:
    return UNKNOWN if value != value else "< 0.001" if value < 0.001 else f"{value:.3f}"


def rank_table(results: Results) -> TextTable | None:
    """The mean rank of every method in every column; None with fewer than three methods, or fewer than two
    that have finished runs, or if there is no seed and point at which all of these have a number.
    """
    columns = [column for column in results.study.report.names if better(column)]
    if len(results.study.methods) < 3 or len(results.ranked) < 2 or not columns:
        return None
    ranks = {column: results.ranks(column) for column in columns}
    if all(math.isnan(rank) for of in ranks.values() for rank in of.values()):
        return None
    header = [
        "method",
        *(f"rank: {title_of(c)}{' (less is better)' * (better(c) == 'less')}" for c in columns),
    ]
    rows = [(label, *(number(ranks[c][label], 2) for c in columns)) for label in results.study.methods]
    caption = "Mean ranks over seeds and points of the grid at which every method has the number; 1 is best."
    if any(map(targets_accuracy, columns)):
        caption += " A method that never reaches a target comes last."
    unranked = [title_of(column) for column in columns if all(map(math.isnan, ranks[column].values()))]
    if unranked:
        caption += f" At no seed and point do all methods have {' or '.join(unranked)}."
    if failed := [label for label in results.study.methods if label not in results.ranked]:
        caption += f" Without methods that have no finished run: {', '.join(failed)}."
    return TextTable(tuple(header), tuple(rows), 1, caption)


def choice_table(tried: Sequence[Mapping[str, Any]], tune: Tune) -> TextTable | None:
    """The settings that were chosen, with their score: one row per method, and with ``per: point`` per point;
    None if nothing was tried.

    Args:
        tried: trials as in ``tuned.json``, each at a point of the grid or at all of them.
        tune: how they were chosen.
    """
    by_point = tune.per == "point"
    best: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for trial in tried:
        at = trial.get("at") or {}
        rows_of = best.setdefault((trial["method"], place_of(at) if by_point else ""), {})
        # A search may draw the same settings twice.
        if trial.get("chosen") and trial["score"] >= rows_of.get(place_of(at), {"score": -math.inf})["score"]:
            rows_of[place_of(at)] = trial
    chosen = [list(rows_of.values()) for rows_of in best.values() if rows_of]
    if not chosen:
        return None
    axes = (
        list(dict.fromkeys(axis for each in chosen for axis in each[0].get("at") or {})) if by_point else []
    )
    names = list(tune.space)
    rows = [
        (
            each[0]["method"],
            *(each[0]["at"][axis] for axis in axes),
            *(_setting(each[0]["settings"].get(name, UNKNOWN)) for name in names),
            number(sum(trial["score"] for trial in each) / len(each), 2),
        )
        for each in chosen
    ]
    header = (
        "method",
        *(axis.split(".")[-1] for axis in axes),
        *names,
        title_of(f"validation_{tune.metric}"),
    )
    seeds = f"the mean over {counted(len(tune.seeds), 'seed')}" if len(tune.seeds) > 1 else ""
    points = "" if by_point or not (tried[0].get("at")) else "the mean over all points of the grid"
    how = " and ".join(filter(None, (seeds, points)))
    caption = f"Chosen settings: the best of those that were tried{f', by {how}' if how else ''}."
    return TextTable(header, tuple(rows), 1 + len(axes), caption + _at_the_edge(chosen, tune))


def _at_the_edge(chosen: Sequence[Sequence[Mapping[str, Any]]], tune: Tune) -> str:
    """A sentence about chosen values that are the smallest or largest of at least three listed numbers."""
    methods: dict[str, dict[str, None]] = {}
    for name, values in tune.space.items():
        numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        if isinstance(values, Mapping) or len(values) < 3 or len(numbers) < len(values):
            continue
        for each in chosen:
            if each[0]["settings"].get(name) in (min(numbers), max(numbers)):
                methods.setdefault(name, {})[each[0]["method"]] = None
    edges = "; ".join(f"{name} of {', '.join(labels)}" for name, labels in methods.items())
    return f" At the edge of what was tried, so that other values may be better: {edges}." if edges else ""


def _setting(value: Any) -> str:
    """A chosen value; one that was drawn has many digits."""
    return f"{value:.4g}" if isinstance(value, float) else shown(value)


def claim_table(judgements: Sequence[Judgement]) -> TextTable:
    """One row per claim and point."""
    rows, values = [], []
    for judgement in judgements:
        value, between = _value_and_interval(judgement)
        where = ", ".join(spoken(axis, name) for axis, name in judgement.point.items())
        why = judgement.why if judgement.why != UNDECIDED else ""  # "undecided" says as much
        verdict = f"{judgement.verdict}: {why}" if why else judgement.verdict
        origin = "; ".join(filter(None, (judgement.source, judgement.protocol)))
        rows.append((judgement.statement.text, where or UNKNOWN, verdict, value, between, origin or UNKNOWN))
        values.append(judgement.interval.mean if judgement.interval.n else None)
    header = ("claim", "at", "verdict", "value", "95 % interval", "source")
    return TextTable(header, tuple(rows), 3, values={3: values}, remarks=1)


def claim_lines(judgements: Sequence[Judgement]) -> list[str]:
    """Verdicts for a terminal: ``holds      PACFL.ari > 0.5, alpha 0.1: 0.83 (0.71 to 0.95)``."""
    lines = []
    for judgement in judgements:
        at = "".join(f", {spoken(axis, name)}" for axis, name in judgement.point.items())
        value, between = _value_and_interval(judgement)
        bounds = f" ({between})" * judgement.interval.bounded
        why = f"; {judgement.why}" * bool(judgement.why)
        lines.append(f"{judgement.verdict:<10} {judgement.statement.text}{at}: {value}{bounds}{why}")
    return lines


def _value_and_interval(judgement: Judgement) -> tuple[str, str]:
    """The value of a claim and its interval with their units: ``11.02 points``, ``9.80 to 12.24 points``."""
    interval, unit = judgement.interval, unit_of(judgement.statement)
    value = amount(interval.mean, unit) if interval.n else UNKNOWN
    return value, amounts(interval.low, interval.high, unit) if interval.bounded else UNKNOWN


def unit_of(statement: Statement) -> str:
    """The unit of a claim's numbers: ``%``, ``points`` of percentages, ``B``, ``s``; empty without one."""
    units = set(map(unit_of_column, statement.columns))
    if units == {"%"}:
        return "%" if len(statement.terms) == 1 and not statement.constant else "points"
    return {"bytes": "B", "seconds": "s"}.get(units.pop(), "") if len(units) == 1 else ""


def amount(value: float, unit: str) -> str:
    """A number of a claim with its unit (:func:`unit_of`)."""
    if unit in ("B", "s"):
        return size(value) if unit == "B" else duration(value)
    return f"{number(value, 2)} {unit}".rstrip()


def amounts(low: float, high: float, unit: str) -> str:
    """Two of them: ``9.80 to 12.24 points``."""
    return f"{amount(low, unit if unit in ('B', 's') else '')} to {amount(high, unit)}"


def tidy(results: Results) -> pd.DataFrame:
    """``table.csv``: one row per method, point and column; a column for the figures of each source."""
    import pandas as pd

    rows = []
    headings = _headings(results.study.expected)
    for column in results.study.columns:
        for point, label in itertools.product(results.points, results.study.methods):
            interval = results.interval(label, point, column)
            figures = {
                f"published: {heading}": _published_figure(results.study, column, origin, label, point)
                for origin, heading in headings.items()
            }
            rows.append(
                {
                    "method": label,
                    **results.study.values_of(point),
                    "column": column,
                    "mean": interval.mean,
                    "low": interval.low if interval.bounded else None,
                    "high": interval.high if interval.bounded else None,
                    "seeds": interval.n,
                    **figures,
                }
            )
    return pd.DataFrame(rows)

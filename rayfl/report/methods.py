"""Figures of several methods, for papers: curves with bands, box plots of clients, results against bytes.

Studies and comparisons draw them alike (:class:`MethodPlots`); each says what a method is and where its
numbers are (:class:`~rayfl.report.across.Methods`). The colours are those of Okabe and Ito, repeated with
other dashes if there are more methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.font_manager import FontEntry, fontManager, get_font
from numpy.typing import NDArray

from rayfl.errors import ArgumentError, RayflError, nearest
from rayfl.report.across import Methods
from rayfl.report.charts import pareto_front
from rayfl.report.figures import LIGHT, Picture
from rayfl.report.files import RunFiles, described_in, numeric, smaller_is_better
from rayfl.statistics import mean_interval
from rayfl.units import byte_unit

STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "grid.color": LIGHT.grid,
    "axes.axisbelow": True,
    "font.size": 8,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "rayfl",
}

_DASHES = ("-", "--", ":", "-.")

_MARKERS = ("o", "s", "^", "D")
"""Markers of points, in place of the dashes of lines."""

_LABEL_WIDTH = 36
"""Characters in a line of a label."""

MOST_METHODS = len(LIGHT.series) * len(_DASHES)
"""Methods in one figure: as many as there are combinations of colour and dashes."""

_FEW_NAMES = 6
"""The largest number of entries of a legend inside the axes; longer legends are below them."""

_SHORT_NAME = 12
"""The largest number of letters of names below the axes, where they are turned."""


class MethodPlots:
    """Matplotlib figures of methods: ``comparison.plot.accuracy().savefig("accuracy.pdf")``.

    A figure is of one result of the tests: ``accuracy``, a measure of the loss such as ``rmse``, or, if there
    is nothing else, the ``loss``. By default it is the first of these that a run has.

    Each raises :class:`~rayfl.errors.RayflError` where no run has the numbers.

    Args:
        methods: what is drawn.
    """

    def __init__(self, methods: Methods) -> None:
        self._methods = methods

    def accuracy(self) -> Picture:
        """Mean accuracy over rounds, as by :meth:`curves`."""
        return self.curves("accuracy")

    def curves(self, result: str | None = None) -> Picture:
        """A result over rounds: its mean over clients, with the 95 % interval over seeds for every method."""
        return self._figure(lambda axes, drawn: _draw_curves(axes, self._methods, drawn, "round"), result)

    def bytes(self, result: str | None = None) -> Picture:
        """A result over the bytes sent so far, drawn as by :meth:`curves`."""
        return self._figure(lambda axes, drawn: _draw_curves(axes, self._methods, drawn, "bytes"), result)

    def clients(self, result: str | None = None) -> Picture:
        """Box plots of the clients' last results, of all seeds."""
        return self._figure(
            lambda axes, drawn: _draw_clients(axes, self._methods, drawn), result, room_for_all=True
        )

    def trade_off(self, result: str | None = None) -> Picture:
        """A result against bytes sent; with the Pareto front, if the methods are comparable."""
        return self._figure(lambda axes, drawn: _draw_trade_off(axes, self._methods, drawn), result)

    @property
    def results(self) -> list[str]:
        """The results of which there are figures, the main one first."""
        runs = self._runs()
        names = ("accuracy", *described_in(runs))
        return [name for name in names if any(run.has(name) for run in runs)]

    def _runs(self) -> list[RunFiles]:
        return [run for name in self._methods.names for run in self._methods.runs(name)]

    def _candidates(self) -> Iterator[Drawn]:
        """What a figure may show, the main result first; runs are read only if there are no accuracies."""
        yield Drawn("accuracy", "accuracy (%)")
        yield from (Drawn(name, about) for name, about in described_in(self._runs()).items())

    def _figure(
        self, draw: Callable[[Any, Drawn], bool], result: str | None, room_for_all: bool = False
    ) -> Picture:
        names = list(self._methods.names)
        for drawn in self._candidates():
            if result not in (None, drawn.name):
                continue
            with rc_context({**STYLE, **font_settings(names)}):
                figure = Picture(figsize=(3.5, 2.6), layout="constrained")
                FigureCanvasAgg(figure)
                axes = figure.add_subplot()
                if not draw(axes, drawn):
                    continue
                if axes.get_legend_handles_labels()[0]:
                    _legend(figure, axes)
                if len(names) > MOST_METHODS and not room_for_all:
                    left_out = ", ".join(map(escaped, names[MOST_METHODS:]))
                    axes.set_title(fill(f"without {left_out}", 70), fontsize=5, loc="left")
            return figure
        if result is not None and (known := self.results) and result not in known:
            raise ArgumentError("result", f"no run has a result {result!r}", nearest(result, known))
        raise RayflError("no finished run has the numbers for this figure")


# --- numbers --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """The result that a figure shows.

    Attributes:
        name: as in the columns of tables.
        about: what it is, for the axis.
    """

    name: str
    about: str


def averaged(runs: Iterable[RunFiles], result: str = "accuracy") -> pd.DataFrame:
    """The mean of a result over the runs that tested in a round, with its interval.

    Args:
        runs: of one method.
        result: a name; the mean over clients is averaged.

    Returns:
        ``round`` (from 1), ``bytes`` (sent so far, up and down, mean over the runs), ``mean``, ``low``,
        ``high``; the bounds are empty where there is one run. Empty if no run has the columns.
    """
    tables, column = [], f"{result}_mean"
    for run in runs:
        if {"round", column} <= set(run.rounds) and run.sent is not None:
            table = numeric(run.rounds[["round", column]]).assign(sent=run.sent)
            tables.append(table.dropna(subset=["round", column]))
    rows = []
    for number, group in pd.concat(tables).groupby("round") if tables else ():
        interval = mean_interval(group[column])
        bounds = (interval.low, interval.high) if interval.bounded else (np.nan, np.nan)
        rows.append((1 + int(float(str(number))), float(group["sent"].mean()), interval.mean, *bounds))
    return pd.DataFrame(rows, columns=["round", "bytes", "mean", "low", "high"])


def of_clients(runs: Iterable[RunFiles], result: str = "accuracy") -> NDArray[np.float64]:
    """The last results of the clients of all runs ``(n,)``; accuracies in percent."""
    column = f"{result}_last"
    given = [run.clients[column] for run in runs if column in run.clients]
    tested = [pd.to_numeric(each, errors="coerce").dropna().to_numpy(np.float64) for each in given]
    return np.concatenate([np.empty(0), *tested])


# --- drawing --------------------------------------------------------------------------------------------


def _draw_curves(axes: Any, methods: Methods, drawn: Drawn, over: str) -> bool:
    names = list(methods.names)[:MOST_METHODS]
    averages = {name: averaged(methods.runs(name), drawn.name) for name in names}
    curves = {name: frame for name, frame in averages.items() if len(frame)}
    scale, unit = 1.0, ""
    if over == "bytes" and curves:
        unit, scale = byte_unit(max(frame["bytes"].max() for frame in curves.values()))
    for name, frame in curves.items():
        (color, dashes, marker), x = _look(names.index(name)), frame[over] / scale
        if len(frame) == 1:  # no line can be drawn through one point
            error = (frame["high"] - frame["low"]) / 2 if frame["low"].notna().any() else None
            point = {"fmt": marker, "markersize": 4, "color": color, "label": escaped(name)}
            axes.errorbar(x, frame["mean"], error, **point)
            continue
        axes.plot(x, frame["mean"], label=escaped(name), linewidth=1.2, color=color, linestyle=dashes)
        if frame["low"].notna().any():
            axes.fill_between(x, frame["low"], frame["high"], color=color, alpha=0.15, linewidth=0)
    if over == "round":
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("round" if over == "round" else f"sent up and down ({unit})")
    _label_means(axes, drawn)
    return bool(curves)


def _draw_clients(axes: Any, methods: Methods, drawn: Drawn) -> bool:
    tested = {name: of_clients(methods.runs(name), drawn.name) for name in methods.names}
    by_method = {escaped(name): values for name, values in tested.items() if len(values)}
    if not by_method:
        return False
    names, label = list(by_method), fill(_with_unit(drawn, "of a client"), _LABEL_WIDTH)
    # Labels side by side would cover each other, or take the room of the boxes
    horizontal = len(names) > _FEW_NAMES or max(map(len, names)) > _SHORT_NAME
    axes.boxplot(  # as on the pages: whiskers to the minimum and maximum, the mean a diamond
        list(by_method.values()),
        widths=0.6,
        whis=(0, 100),
        showmeans=True,
        meanprops={"marker": "D", "markersize": 3},
        orientation="horizontal" if horizontal else "vertical",
    )
    if horizontal:
        axes.figure.set_size_inches(3.5, 1 + sum(0.15 + 0.12 * name.count("\n") for name in names))
        axes.set_yticks(range(1, 1 + len(names)), names, fontsize=6)
        axes.invert_yaxis()
        axes.set_xlabel(label)
    else:
        axes.set_xticks(range(1, 1 + len(names)), names, rotation=30, ha="right")
        axes.set_ylabel(label)
    return True


def _draw_trade_off(axes: Any, methods: Methods, drawn: Drawn) -> bool:
    names, places = list(methods.names)[:MOST_METHODS], {}
    for name in names:
        result = methods.interval(name, f"{drawn.name}_mean")
        up, down = (methods.interval(name, f"bytes_{way}") for way in ("up", "down"))
        if result.n and up.n and down.n:
            places[name] = (up.mean + down.mean, result)
    if not places:
        return False
    unit, scale = byte_unit(max(sent for sent, _ in places.values()))
    for name, (sent, result) in places.items():
        error = result.half if result.bounded else None
        color, _, marker = _look(names.index(name))
        label = escaped(name)
        axes.errorbar(sent / scale, result.mean, error, fmt=marker, markersize=4, color=color, label=label)
    smaller = smaller_is_better(drawn.name)
    front = pareto_front([(sent / scale, result.mean) for sent, result in places.values()], bool(smaller))
    if len(front) > 1 and methods.comparable and smaller is not None:
        style: dict[str, Any] = {"color": LIGHT.quiet, "linewidth": 0.8, "linestyle": "--", "zorder": 0}
        axes.step(*zip(*front, strict=True), where="post", label="Pareto front", **style)
    axes.set_xlabel(f"sent up and down ({unit})")
    _label_means(axes, drawn)
    return True


def _look(place: int) -> tuple[str, str, str]:
    """The colour, dashes and marker of a method: neighbours differ in all three, for prints in grey."""
    series = LIGHT.series
    style = place % len(_DASHES)
    return series[place % len(series)], _DASHES[style], _MARKERS[style]


def _label_means(axes: Any, drawn: Drawn) -> None:
    """Label the axis; limit it to possible accuracies, which wide intervals of few seeds may exceed."""
    if drawn.name == "accuracy":
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -2.0), min(high, 102.0))
    axes.set_ylabel(fill(f"mean {_with_unit(drawn, 'of clients')}", _LABEL_WIDTH))


def _with_unit(drawn: Drawn, whose: str) -> str:
    """``accuracy of a client (%)``."""
    about, bracket, unit = drawn.about.partition(" (")
    return f"{about} {whose}{bracket}{unit}"


def _legend(figure: Picture, axes: Any) -> None:
    """Draw the legend where it hides nothing: in a free corner if it is short, else below the axes."""
    names = [text for _, text in zip(*axes.get_legend_handles_labels(), strict=True)]
    if len(names) <= _FEW_NAMES and not axes.containers:  # error bars: Matplotlib's free corner ignores them
        axes.legend(fontsize=6)
        return
    columns = 2 if max(len(line) for name in names for line in name.splitlines()) <= _LABEL_WIDTH // 2 else 1
    lines = sum(1 + name.count("\n") for name in names) / columns
    figure.set_size_inches(3.5, 2.6 + 0.125 * (lines + 1))
    figure.legend(loc="outside lower center", ncols=columns, fontsize=6)


# --- names ----------------------------------------------------------------------------------------------


def escaped(name: str) -> str:
    """A name without special meaning for Matplotlib: no mathematics, no leading _ (which hides it from
    legends). Long ones are broken into lines: a figure is 3.5 inches wide.
    """
    text = fill(name, _LABEL_WIDTH).replace("$", r"\$")
    return f"\u200b{text}" if text.startswith("_") else text


def font_settings(names: Sequence[str]) -> dict[str, list[str]]:
    """Fonts of this machine that have the letters of the names: Matplotlib's own has no Chinese ones."""
    needed = {letter for name in names for letter in name if not letter.isspace()}
    families = []
    for entry in _installed_fonts():
        if not needed:
            break
        with suppress(OSError, RuntimeError):  # a file that is no font, or is gone
            covered = {letter for letter in needed if get_font(entry.fname).get_char_index(ord(letter))}
            if covered:
                families.append(entry.name)
                needed -= covered
    return {"font.family": families} if families else {}


def _installed_fonts() -> Iterator[FontEntry]:
    """Matplotlib's own font, then upright ones of this machine, without the one that only draws boxes."""
    entries = fontManager.ttflist
    usual = [entry for entry in entries if entry.name == "DejaVu Sans"]
    others = [entry for entry in entries if entry not in usual and "Last Resort" not in entry.name]
    plain = [entry for entry in others if entry.style == "normal" and str(entry.weight) in ("400", "normal")]
    return iter([*usual[:1], *plain])

"""Figures of several methods, for papers: curves with bands, box plots of clients, accuracy against bytes.

Studies and comparisons draw them alike (:class:`MethodPlots`); each says what a method is and where its
numbers are (:class:`Methods`). The colours are those of Okabe and Ito, repeated with other dashes if there
are more methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from textwrap import fill
from typing import Any, Protocol

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.font_manager import FontEntry, fontManager, get_font
from numpy.typing import NDArray

from rayfl.errors import RayflError
from rayfl.report.charts import pareto_front
from rayfl.report.figures import LIGHT, Picture
from rayfl.report.files import numeric
from rayfl.statistics import Interval, mean_interval
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


class Methods(Protocol):
    """The runs of several methods; those of one method differ only in the seed."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the methods, all different, in the order in which they are drawn."""
        ...

    @property
    def comparable(self) -> bool:
        """Whether all methods have the same clients with the same data, so that more accuracy is better."""
        ...

    def rounds(self, name: str) -> Iterator[pd.DataFrame]:
        """``rounds.csv`` of each run of a method."""
        ...

    def clients(self, name: str) -> Iterator[pd.DataFrame]:
        """``clients.csv`` of each run of a method."""
        ...

    def interval(self, name: str, column: str) -> Interval:
        """Mean and interval over the runs of a method."""
        ...


class MethodPlots:
    """Matplotlib figures of methods: ``comparison.plot.accuracy().savefig("accuracy.pdf")``.

    Each raises :class:`~rayfl.errors.RayflError` where no run has the numbers.

    Args:
        methods: what is drawn.
    """

    def __init__(self, methods: Methods) -> None:
        self._methods = methods

    def accuracy(self) -> Picture:
        """Mean accuracy over rounds, a curve with the 95 % interval over seeds for every method."""
        return self._figure(lambda axes, methods: _draw_curves(axes, methods, "round"))

    def bytes(self) -> Picture:
        """Mean accuracy over the bytes sent so far, drawn as by :meth:`accuracy`."""
        return self._figure(lambda axes, methods: _draw_curves(axes, methods, "bytes"))

    def clients(self) -> Picture:
        """Box plots of the clients' last accuracies, of all seeds."""
        return self._figure(_draw_clients, room_for_all=True)

    def trade_off(self) -> Picture:
        """Accuracy against bytes sent; with the Pareto front, if the methods are comparable."""
        return self._figure(_draw_trade_off)

    def _figure(self, draw: Callable[[Any, Methods], bool], room_for_all: bool = False) -> Picture:
        names = list(self._methods.names)
        with rc_context({**STYLE, **font_settings(names)}):
            figure = Picture(figsize=(3.5, 2.6), layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.add_subplot()
            if not draw(axes, self._methods):
                raise RayflError("no finished run has the numbers for this figure")
            if axes.get_legend_handles_labels()[0]:
                _legend(figure, axes)
            if len(names) > MOST_METHODS and not room_for_all:
                left_out = ", ".join(map(escaped, names[MOST_METHODS:]))
                axes.set_title(fill(f"without {left_out}", 70), fontsize=5, loc="left")
        return figure


# --- numbers --------------------------------------------------------------------------------------------


def averaged(frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """The mean accuracy of ``rounds.csv`` over the runs that tested in a round, with its interval.

    Returns:
        ``round`` (from 1), ``bytes`` (sent so far, up and down, mean over the runs), ``mean``, ``low``,
        ``high``; the bounds are empty where there is one run. Empty if no run has the columns.
    """
    tables, needed = [], ["round", "accuracy_mean", "bytes_up", "bytes_down"]
    for frame in frames:
        if set(needed) <= set(frame.columns):
            table = numeric(frame[needed])
            table["sent"] = (table["bytes_up"] + table["bytes_down"]).cumsum()
            tables.append(table.dropna(subset=["round", "accuracy_mean"]))
    rows = []
    for number, group in pd.concat(tables).groupby("round") if tables else ():
        interval = mean_interval(group["accuracy_mean"])
        bounds = (interval.low, interval.high) if interval.bounded else (np.nan, np.nan)
        rows.append((1 + int(float(str(number))), float(group["sent"].mean()), interval.mean, *bounds))
    return pd.DataFrame(rows, columns=["round", "bytes", "mean", "low", "high"])


def accuracies(frames: Iterable[pd.DataFrame]) -> NDArray[np.float64]:
    """The last accuracies of the clients of all runs in percent ``(n,)``."""
    given = [frame["accuracy_last"] for frame in frames if "accuracy_last" in frame]
    tested = [pd.to_numeric(each, errors="coerce").dropna().to_numpy(np.float64) for each in given]
    return np.concatenate([np.empty(0), *tested])


# --- drawing --------------------------------------------------------------------------------------------


def _draw_curves(axes: Any, methods: Methods, over: str) -> bool:
    names = list(methods.names)[:MOST_METHODS]
    averages = {name: averaged(methods.rounds(name)) for name in names}
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
    _percent_axis(axes)
    return bool(curves)


def _draw_clients(axes: Any, methods: Methods) -> bool:
    tested = {name: accuracies(methods.clients(name)) for name in methods.names}
    by_method = {escaped(name): values for name, values in tested.items() if len(values)}
    if not by_method:
        return False
    names = list(by_method)
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
        axes.set_xlabel("accuracy of a client (%)")
    else:
        axes.set_xticks(range(1, 1 + len(names)), names, rotation=30, ha="right")
        axes.set_ylabel("accuracy of a client (%)")
    return True


def _draw_trade_off(axes: Any, methods: Methods) -> bool:
    names, places = list(methods.names)[:MOST_METHODS], {}
    for name in names:
        accuracy = methods.interval(name, "accuracy_mean")
        up, down = (methods.interval(name, f"bytes_{way}") for way in ("up", "down"))
        if accuracy.n and up.n:
            places[name] = (up.mean + down.mean, accuracy)
    if not places:
        return False
    unit, scale = byte_unit(max(sent for sent, _ in places.values()))
    for name, (sent, accuracy) in places.items():
        error = accuracy.half if accuracy.bounded else None
        color, _, marker = _look(names.index(name))
        label = escaped(name)
        axes.errorbar(sent / scale, accuracy.mean, error, fmt=marker, markersize=4, color=color, label=label)
    front = pareto_front([(sent / scale, accuracy.mean) for sent, accuracy in places.values()])
    if len(front) > 1 and methods.comparable:
        style: dict[str, Any] = {"color": LIGHT.quiet, "linewidth": 0.8, "linestyle": "--", "zorder": 0}
        axes.step(*zip(*front, strict=True), where="post", label="Pareto front", **style)
    axes.set_xlabel(f"sent up and down ({unit})")
    _percent_axis(axes)
    return True


def _look(place: int) -> tuple[str, str, str]:
    """The colour, dashes and marker of a method: neighbours differ in all three, for prints in grey."""
    series = LIGHT.series
    style = place % len(_DASHES)
    return series[place % len(series)], _DASHES[style], _MARKERS[style]


def _percent_axis(axes: Any) -> None:
    """Limit the axis to possible accuracies, which wide intervals of few seeds may exceed; label it."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -2.0), min(high, 102.0))
    axes.set_ylabel("mean accuracy of clients (%)")


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

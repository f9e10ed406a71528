"""Figures for papers: curves with bands, box plots of clients, accuracy against bytes.

SVG and PDF, one figure per point of the grid; the colours are those of Okabe and Ito, repeated with other
dashes if there are more methods.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.font_manager import FontEntry, fontManager, get_font

from rayfl import files
from rayfl.errors import Damaged, RayflError
from rayfl.report import figures as report_figures
from rayfl.report import maps
from rayfl.report.charts import pareto_front
from rayfl.report.figures import LIGHT, Picture
from rayfl.report.files import RunFiles
from rayfl.rundir import RunDirectory
from rayfl.statistics import mean_interval
from rayfl.study.results import Results
from rayfl.study.running import directory_of, is_finished
from rayfl.units import byte_unit

_STYLE = {
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

_MOST_METHODS = len(LIGHT.series) * len(_DASHES)
"""Methods in one figure: as many as there are combinations of colour and dashes."""

_FEW_NAMES = 6
"""The largest number of entries of a legend inside the axes; longer legends are below them."""

_SHORT_NAME = 12
"""The largest number of letters of names below the axes, where they are turned."""

Draw = Callable[[Any, Results, Mapping[str, str]], bool]


def write_figures(results: Results, folder: Path) -> list[Path]:
    """Draw what the finished runs allow.

    Raises:
        DiskError
    """
    if not results.finished:
        return []
    files.make(folder, parents=True)
    plots, written = StudyPlots(results), []
    for point, ending in zip(results.points, _endings(results.points), strict=True):
        for draw in (plots.accuracy, plots.bytes, plots.clients, plots.trade_off):
            try:
                figure = draw(point)
            except RayflError:  # the runs have no such numbers
                continue
            for form, date in (("svg", "Date"), ("pdf", "CreationDate")):
                path = folder / f"{draw.__name__}{f'-{ending}' if ending else ''}.{form}"
                with rc_context(_STYLE), warnings.catch_warnings():
                    # Matplotlib's font lacks the letter; viewers of SVG have others
                    warnings.filterwarnings("ignore", "Glyph .* missing from font")
                    drawn = io.BytesIO()
                    figure.savefig(drawn, format=form, metadata={date: None})
                files.write(path, drawn.getvalue())
                written.append(path)
    return written


class StudyPlots:
    """Figures of a study for papers and notebooks: ``study.plot.accuracy().savefig("accuracy.pdf")``.

    Each takes ``at``, the names of a point of the grid by axis, and raises
    :class:`~rayfl.errors.RayflError` where no finished run has the numbers.

    Args:
        results: of the study.
    """

    def __init__(self, results: Results) -> None:
        self._results = results

    def accuracy(self, at: Mapping[str, str] | None = None) -> Picture:
        """Mean accuracy over rounds, a curve with the 95 % interval over seeds for every method."""
        return self._figure_of(_draw_over_rounds, at)

    def bytes(self, at: Mapping[str, str] | None = None) -> Picture:
        """Mean accuracy over the bytes sent so far, drawn as by :meth:`accuracy`."""
        return self._figure_of(_draw_over_bytes, at)

    def clients(self, at: Mapping[str, str] | None = None) -> Picture:
        """Box plots of the clients' last accuracies."""
        return self._figure_of(_draw_clients, at)

    def trade_off(self, at: Mapping[str, str] | None = None) -> Picture:
        """Accuracy against bytes sent."""
        return self._figure_of(_draw_pareto, at)

    def clusters(self, at: Mapping[str, str] | None = None) -> Picture:
        """The clients in the plane, coloured by their last clusters: a map for every method, first seed.

        Each map is that of ``Result(path).plot.clusters()``.
        """
        client_maps = list(_maps(self._results, self._point(at)))
        if not client_maps:
            raise RayflError("no finished run has clusters to draw")
        with rc_context({**_STYLE, **_font_settings([label for label, _ in client_maps])}):
            figure = Picture(figsize=(3.5 * len(client_maps), 3.5), layout="constrained")
            FigureCanvasAgg(figure)
            for axes, (label, draw) in zip(
                figure.subplots(1, len(client_maps), squeeze=False)[0], client_maps, strict=True
            ):
                draw(axes, LIGHT)
                axes.set_title(f"{_escaped(label)}\n{axes.get_title()}", fontsize=8)
        return figure

    def _point(self, at: Mapping[str, str] | None) -> dict[str, str]:
        return self._results.point(at) if at else dict(self._results.points[0])

    def _figure_of(self, draw: Draw, at: Mapping[str, str] | None) -> Picture:
        point = self._point(at)
        labels = list(self._results.study.methods)
        with rc_context({**_STYLE, **_font_settings(labels)}):
            figure = Picture(figsize=(3.5, 2.6), layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.add_subplot()
            if not draw(axes, self._results, point):
                raise RayflError("no finished run has the numbers for this figure")
            if axes.get_legend_handles_labels()[0]:
                _legend(figure, axes)
            # Box plots have room for all
            if len(labels) > _MOST_METHODS and draw is not _draw_clients:
                left_out = ", ".join(map(_escaped, labels[_MOST_METHODS:]))
                axes.set_title(fill(f"without {left_out}", 70), fontsize=5, loc="left")
        return figure


def _maps(results: Results, point: Mapping[str, str]) -> Iterator[tuple[str, report_figures.Draw]]:
    """Yield the methods whose run with the first seed is finished, and the function that draws its map."""
    for run in results.runs:
        if run.seed == results.seeds[0] and dict(run.point) == dict(point) and is_finished(run):
            run_files = RunFiles.read(directory_of(run))
            steps = maps.steps_of(run_files)
            client_map = maps.map_of(run_files, steps)
            if client_map is not None and steps:
                draw = report_figures.map_of_clients(
                    client_map.places[-1], steps[-1].labels, client_map.meaning
                )
                yield run.method, draw


def _endings(points: Sequence[Mapping[str, str]]) -> list[str]:
    """The endings of file names, for each point of the grid; numbered if they would otherwise be equal."""
    endings = ["-".join(re.sub(r"[^\w.]+", "_", name) for name in point.values()) for point in points]
    if len(set(endings)) == len(endings) and max(map(len, endings)) <= _LONGEST_ENDING:
        return endings
    return [f"{place}-{name[:_LONGEST_ENDING]}" for place, name in enumerate(endings, 1)]


_LONGEST_ENDING = 80
"""The largest number of characters of such an ending."""


def _escaped(label: str) -> str:
    """A label without special meaning for Matplotlib: no mathematics, no leading _ (which hides it from
    legends). Long ones are broken into lines: a figure is 3.5 inches wide.
    """
    escaped = fill(label, _LABEL_WIDTH).replace("$", r"\$")
    return f"\u200b{escaped}" if escaped.startswith("_") else escaped


def curves_of(
    results: Results, point: Mapping[str, str], column: str = "accuracy_mean"
) -> Iterator[tuple[str, pd.DataFrame]]:
    """For each method, the mean of a column of ``rounds.csv`` over seeds, with its interval.

    Yields:
        The label, and a frame with ``round`` (from 1), ``bytes`` (sent so far, up and down, mean over seeds),
        ``mean``, ``low``, ``high``; the bounds are empty where there is one seed.
    """
    for label in list(results.study.methods)[:_MOST_METHODS]:
        tables = []
        for run in results.runs:
            if run.method == label and run.point == point and is_finished(run):
                try:
                    frame = RunDirectory(directory_of(run)).read_frame("rounds.csv")
                except Damaged:
                    continue
                if column not in frame:
                    continue
                sent = (frame["bytes_up"] + frame["bytes_down"]).cumsum()
                frame = frame.assign(seed=run.seed, sent=sent)
                tables.append(frame.loc[frame[column].notna(), ["round", "sent", column, "seed"]])
        if not tables:
            continue
        rows = []
        for number, group in pd.concat(tables).groupby("round"):
            interval = mean_interval(group[column])
            bounds = (interval.low, interval.high) if interval.bounded else (np.nan, np.nan)
            rows.append((1 + int(str(number)), float(group["sent"].mean()), interval.mean, *bounds))
        if rows:
            yield label, pd.DataFrame(rows, columns=["round", "bytes", "mean", "low", "high"])


def _method_style(place: int) -> tuple[str, str, str]:
    """The colour, dashes and marker of a method: neighbours differ in all three, for prints in grey."""
    series = LIGHT.series
    style = place % len(_DASHES)
    return series[place % len(series)], _DASHES[style], _MARKERS[style]


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


def _font_settings(labels: Sequence[str]) -> dict[str, list[str]]:
    """Fonts of this machine that have the letters of the labels: Matplotlib's own has no Chinese ones."""
    needed = {letter for label in labels for letter in label if not letter.isspace()}
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


def _draw_curves(axes: Any, results: Results, point: Mapping[str, str], over: str) -> bool:
    labels = list(results.study.methods)
    curves = list(curves_of(results, point))
    scale, unit = 1.0, ""
    if over == "bytes" and curves:
        unit, scale = byte_unit(max(frame["bytes"].max() for _, frame in curves))
    for label, frame in curves:
        (color, dashes, _), x = _method_style(labels.index(label)), frame[over] / scale
        axes.plot(x, frame["mean"], label=_escaped(label), linewidth=1.2, color=color, linestyle=dashes)
        if frame["low"].notna().any():
            axes.fill_between(x, frame["low"], frame["high"], color=color, alpha=0.15, linewidth=0)
    if over == "round":
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("round" if over == "round" else f"sent up and down ({unit})")
    _percent_axis(axes)
    return bool(curves)


def _draw_over_rounds(axes: Any, results: Results, point: Mapping[str, str]) -> bool:
    return _draw_curves(axes, results, point, "round")


def _draw_over_bytes(axes: Any, results: Results, point: Mapping[str, str]) -> bool:
    return _draw_curves(axes, results, point, "bytes")


def clients_of(results: Results, point: Mapping[str, str]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """For each method, the last accuracies of the clients of all seeds, in percent."""
    for label in results.study.methods:
        accuracies = []
        for run in results.runs:
            if run.method == label and run.point == point and is_finished(run):
                with suppress(Damaged):
                    frame = RunDirectory(directory_of(run)).read_frame("clients.csv")
                    accuracies.append(frame["accuracy_last"].dropna().to_numpy(np.float64))
        if accuracies and len(np.concatenate(accuracies)):
            yield label, np.concatenate(accuracies)


def _draw_clients(axes: Any, results: Results, point: Mapping[str, str]) -> bool:
    by_method = list(clients_of(results, point))
    if not by_method:
        return False
    values, names = [values for _, values in by_method], [_escaped(label) for label, _ in by_method]
    # Labels side by side would cover each other, or take the room of the boxes
    horizontal = len(by_method) > _FEW_NAMES or max(map(len, names)) > _SHORT_NAME
    axes.boxplot(  # as on the pages: whiskers to the minimum and maximum, the mean a diamond
        values,
        widths=0.6,
        whis=(0, 100),
        showmeans=True,
        meanprops={"marker": "D", "markersize": 3},
        orientation="horizontal" if horizontal else "vertical",
    )
    if horizontal:
        axes.figure.set_size_inches(3.5, 1 + sum(0.15 + 0.12 * name.count("\n") for name in names))
        axes.set_yticks(range(1, 1 + len(by_method)), names, fontsize=6)
        axes.invert_yaxis()
        axes.set_xlabel("accuracy of a client (%)")
    else:
        axes.set_xticks(range(1, 1 + len(by_method)), names, rotation=30, ha="right")
        axes.set_ylabel("accuracy of a client (%)")
    return True


def _draw_pareto(axes: Any, results: Results, point: Mapping[str, str]) -> bool:
    places = {}
    for label in list(results.study.methods)[:_MOST_METHODS]:
        accuracy = results.interval(label, point, "accuracy_mean")
        up, down = (results.interval(label, point, f"bytes_{way}") for way in ("up", "down"))
        if accuracy.n and up.n:
            places[label] = (up.mean + down.mean, accuracy)
    if not places:
        return False
    unit, scale = byte_unit(max(sent for sent, _ in places.values()))
    labels = list(results.study.methods)
    for label, (sent, accuracy) in places.items():
        error = accuracy.half if accuracy.bounded else None
        color, _, marker = _method_style(labels.index(label))
        name = _escaped(label)
        axes.errorbar(sent / scale, accuracy.mean, error, fmt=marker, markersize=4, color=color, label=name)
    front = pareto_front([(sent / scale, accuracy.mean) for sent, accuracy in places.values()])
    if len(front) > 1:
        style: dict[str, Any] = {"color": LIGHT.quiet, "linewidth": 0.8, "linestyle": "--", "zorder": 0}
        axes.step(*zip(*front, strict=True), where="post", label="Pareto front", **style)
    axes.set_xlabel(f"sent up and down ({unit})")
    _percent_axis(axes)
    return True


def _percent_axis(axes: Any) -> None:
    """Limit the axis to possible accuracies, which wide intervals of few seeds may exceed; label it."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -2.0), min(high, 102.0))
    axes.set_ylabel("mean accuracy of clients (%)")

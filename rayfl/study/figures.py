"""Figures of a study for papers: those of :mod:`rayfl.report.methods`, one per point of the grid."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg

from rayfl import files
from rayfl.errors import Damaged, RayflError
from rayfl.report import figures as report_figures
from rayfl.report import maps
from rayfl.report.figures import LIGHT, Picture
from rayfl.report.files import RunFiles
from rayfl.report.methods import STYLE, MethodPlots, escaped, font_settings
from rayfl.rundir import RunDirectory
from rayfl.statistics import Interval
from rayfl.study.results import Results
from rayfl.study.running import directory_of, is_finished


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
                with rc_context(STYLE), warnings.catch_warnings():
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
        return self._plots(at).accuracy()

    def bytes(self, at: Mapping[str, str] | None = None) -> Picture:
        """Mean accuracy over the bytes sent so far, drawn as by :meth:`accuracy`."""
        return self._plots(at).bytes()

    def clients(self, at: Mapping[str, str] | None = None) -> Picture:
        """Box plots of the clients' last accuracies."""
        return self._plots(at).clients()

    def trade_off(self, at: Mapping[str, str] | None = None) -> Picture:
        """Accuracy against bytes sent."""
        return self._plots(at).trade_off()

    def clusters(self, at: Mapping[str, str] | None = None) -> Picture:
        """The clients in the plane, coloured by their last clusters: a map for every method, first seed.

        Each map is that of ``Result(path).plot.clusters()``.
        """
        client_maps = list(_maps(self._results, self._point(at)))
        if not client_maps:
            raise RayflError("no finished run has clusters to draw")
        with rc_context({**STYLE, **font_settings([label for label, _ in client_maps])}):
            figure = Picture(figsize=(3.5 * len(client_maps), 3.5), layout="constrained")
            FigureCanvasAgg(figure)
            for axes, (label, draw) in zip(
                figure.subplots(1, len(client_maps), squeeze=False)[0], client_maps, strict=True
            ):
                draw(axes, LIGHT)
                axes.set_title(f"{escaped(label)}\n{axes.get_title()}", fontsize=8)
        return figure

    def _point(self, at: Mapping[str, str] | None) -> dict[str, str]:
        return self._results.point(at) if at else dict(self._results.points[0])

    def _plots(self, at: Mapping[str, str] | None) -> MethodPlots:
        return MethodPlots(MethodsAt(self._results, self._point(at)))


@dataclass(frozen=True)
class MethodsAt:
    """The methods of a study at a point of the grid, as :class:`~rayfl.report.methods.Methods`.

    Attributes:
        results: of the study.
        point: of its grid.
    """

    results: Results
    point: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        """The labels of the methods."""
        return list(self.results.study.methods)

    @property
    def comparable(self) -> bool:
        """All methods have the same clients."""
        return True

    def rounds(self, name: str) -> Iterator[pd.DataFrame]:
        """``rounds.csv`` of each finished run of a method; damaged ones are left out."""
        return self._tables(name, "rounds.csv")

    def clients(self, name: str) -> Iterator[pd.DataFrame]:
        """``clients.csv`` of each finished run of a method; damaged ones are left out."""
        return self._tables(name, "clients.csv")

    def interval(self, name: str, column: str) -> Interval:
        """Mean and interval of a number over the seeds."""
        return self.results.interval(name, self.point, column)

    def _tables(self, method: str, file: str) -> Iterator[pd.DataFrame]:
        for run in self.results.runs:
            if run.method == method and run.point == self.point and is_finished(run):
                with suppress(Damaged):
                    yield RunDirectory(directory_of(run)).read_frame(file)


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

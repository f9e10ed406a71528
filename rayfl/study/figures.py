"""Figures of a study for papers: those of :mod:`rayfl.report.methods`, one per point of the grid."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg

from rayfl import files
from rayfl.errors import RayflError
from rayfl.report import figures as report_figures
from rayfl.report import maps
from rayfl.report.figures import LIGHT, Picture
from rayfl.report.files import RunFiles
from rayfl.report.methods import STYLE, MethodPlots, escaped, font_settings
from rayfl.study.methods import MethodsAt
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
    written = []
    for point, ending in zip(results.points, _endings(results.points), strict=True):
        plots = MethodPlots(MethodsAt(results, point))
        figures: dict[str, Callable[[], Picture]] = {
            **{result: partial(plots.curves, result) for result in plots.results},
            "bytes": plots.bytes,
            "clients": plots.clients,
            "trade_off": plots.trade_off,
        }
        for name, draw in figures.items():
            try:
                figure = draw()
            except RayflError:  # the runs have no such numbers
                continue
            for form, date in (("svg", "Date"), ("pdf", "CreationDate")):
                path = folder / f"{name}{f'-{ending}' if ending else ''}.{form}"
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

    Each takes ``at``, the names of a point of the grid by axis, and ``result``, what tests measure, as
    :class:`~rayfl.report.methods.MethodPlots`; and raises :class:`~rayfl.errors.RayflError` where no finished
    run has the numbers.

    Args:
        results: of the study.
    """

    def __init__(self, results: Results) -> None:
        self._results = results

    def accuracy(self, at: Mapping[str, str] | None = None) -> Picture:
        """Mean accuracy over rounds, as by :meth:`curves`."""
        return self._plots(at).accuracy()

    def curves(self, at: Mapping[str, str] | None = None, result: str | None = None) -> Picture:
        """A result over rounds: its mean over clients, with the 95 % interval over seeds for every method."""
        return self._plots(at).curves(result)

    def bytes(self, at: Mapping[str, str] | None = None, result: str | None = None) -> Picture:
        """A result over the bytes sent so far, drawn as by :meth:`curves`."""
        return self._plots(at).bytes(result)

    def clients(self, at: Mapping[str, str] | None = None, result: str | None = None) -> Picture:
        """Box plots of the clients' last results."""
        return self._plots(at).clients(result)

    def trade_off(self, at: Mapping[str, str] | None = None, result: str | None = None) -> Picture:
        """A result against bytes sent."""
        return self._plots(at).trade_off(result)

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

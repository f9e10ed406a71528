"""Figures of studies with many methods, close points and foreign letters: nothing is hidden in silence."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayfl.errors import DiskError
from rayfl.report import methods
from rayfl.statistics import Interval
from rayfl.study import figures
from rayfl.study.figures import StudyPlots


def plots(names: list[str]) -> StudyPlots:
    """Figures of methods that have equal numbers."""
    of = {"accuracy_mean": Interval(90.0, -40.0, 220.0, 2)}
    results: Any = SimpleNamespace(
        study=SimpleNamespace(methods=dict.fromkeys(names)),
        points=[{}],
        interval=lambda label, point, column: of.get(column, Interval(1e6, 1e6, 1e6, 2)),
    )
    return StudyPlots(results)


def legend_of(figure: Any) -> Any:
    return figure.axes[0].get_legend() or figure.legends[0]


@pytest.mark.parametrize("count", [2, 20])
def test_every_method_has_a_look_of_its_own_and_a_line_in_the_legend(count: int) -> None:
    figure = plots([f"method {number}" for number in range(count)]).trade_off()
    looks = {methods._look(place) for place in range(count)}
    assert len(looks) == count
    names = [text.get_text() for text in legend_of(figure).get_texts()]
    assert names == [f"method {number}" for number in range(count)]
    figure.draw_without_rendering()
    covered = legend_of(figure).get_window_extent().height / figure.bbox.height
    axes = figure.axes[0].get_window_extent().height
    assert axes > 100, f"a legend of {covered:.0%} leaves no room for the axes"


def test_the_pareto_front_is_drawn_and_named_if_there_is_one() -> None:
    sent, accuracy = {"A": 1e6, "B": 2e6, "C": 3e6}, {"A": 60.0, "B": 50.0, "C": 90.0}

    def interval(label: str, point: Any, column: str) -> Interval:
        value = accuracy[label] if column == "accuracy_mean" else sent[label] / 2
        return Interval(value, -math.inf, math.inf, 1)

    study = SimpleNamespace(methods=dict.fromkeys("ABC"))
    three: Any = SimpleNamespace(study=study, points=[{}], interval=interval)
    figure = StudyPlots(three).trade_off()
    (front,) = [line for line in figure.axes[0].lines if line.get_label() == "Pareto front"]
    assert front.get_xydata().tolist() == [[1.0, 60.0], [3.0, 90.0]]  # MB; B sends more than A, for less
    del study.methods["C"]
    assert not [
        line for line in StudyPlots(three).trade_off().axes[0].lines if line.get_label() == "Pareto front"
    ]


def test_methods_without_a_look_are_named() -> None:
    figure = plots([f"method {number}" for number in range(methods.MOST_METHODS + 2)]).trade_off()
    assert figure.axes[0].get_title(loc="left") == "without method 28, method 29"


def test_an_axis_of_accuracies_ends_where_they_do() -> None:
    low, high = plots(["FedAvg"]).trade_off().axes[0].get_ylim()
    assert low >= -2
    assert high <= 102


def test_a_font_is_found_that_has_the_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matplotlib draws boxes for letters that the first font lacks, unless others are named."""
    ours = next(entry for entry in methods.fontManager.ttflist if entry.name == "DejaVu Sans")
    other = SimpleNamespace(name="Micro Hei", style="normal", weight=400, fname="/fonts/hei.ttc")
    monkeypatch.setattr(methods.fontManager, "ttflist", [other, ours])

    def font(path: str) -> Any:
        known = range(0x4E00, 0x9FFF) if path == other.fname else range(0x20, 0x7F)
        return SimpleNamespace(get_char_index=lambda letter: int(letter in known))

    monkeypatch.setattr(methods, "get_font", font)
    assert methods.font_settings(["FedAvg"]) == {"font.family": ["DejaVu Sans"]}
    assert methods.font_settings(["联邦 FedAvg"]) == {"font.family": ["DejaVu Sans", "Micro Hei"]}
    assert methods.font_settings(["联邦"]) == {"font.family": ["Micro Hei"]}


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matplotlib would fail a second time where it closes a PDF, and hide what happened."""

    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    results = plots(["one", "two"])._results
    results.finished, results.runs = 2, []  # type: ignore[misc]
    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(DiskError, match="No space left on device"):
        figures.write_figures(results, tmp_path)
    assert not list(tmp_path.iterdir())

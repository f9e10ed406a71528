"""Figures of a stopped benchmark are taken up only where they were measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayfl.bench.saved import SavedFigures

HERE = {
    "machine": {"processor": "P", "cores": 2, "gpus": ["H100"], "python": "3.11"},
    "versions": {"numba": "1"},
    "device": "cuda",
}


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    path = tmp_path / "bench.json"
    SavedFigures(path, 3, dict(HERE)).rows("networks").keep([{"network": "W1"}])
    return path


def test_a_stopped_benchmark_goes_on(stopped: Path) -> None:
    assert SavedFigures(stopped, 3, dict(HERE)).rows("networks").known == [{"network": "W1"}]
    assert SavedFigures(stopped, 4, dict(HERE)).rows("networks").known == ()


def test_a_finished_benchmark_is_measured_again(stopped: Path) -> None:
    SavedFigures(stopped, 3, dict(HERE)).finish()
    assert SavedFigures(stopped, 3, dict(HERE)).rows("networks").known == ()


@pytest.mark.parametrize(
    "other",
    [
        {"machine": {**HERE["machine"], "gpus": ["H200"]}},  # type: ignore[dict-item]
        {"machine": {**HERE["machine"], "cores": 4}},  # type: ignore[dict-item]
        {"versions": {"numba": "2"}},
        {"device": "cpu"},
    ],
)
def test_figures_of_another_machine_or_version_are_measured_again(
    stopped: Path, other: dict[str, Any]
) -> None:
    assert SavedFigures(stopped, 3, {**HERE, **other}).rows("networks").known == ()


@pytest.mark.parametrize("text", ["", "[]", '{"unfinished": 3}', '{"unfinished": 3, "machine": 1}'])
def test_another_file_is_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    assert SavedFigures(path, 3, dict(HERE)).rows("networks").known == ()

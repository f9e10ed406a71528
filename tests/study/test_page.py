"""The page of a study: what it draws, and that it does not grow beyond measure."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rayfl.report import page as page_of_runs
from rayfl.report.files import RunFiles
from rayfl.study import page
from rayfl.study.methods import MethodsAt


def run_of(folder: Path, rounds: int, **clients: Any) -> RunFiles:
    """A run with a mean accuracy in every round."""
    folder.mkdir()
    accuracy = np.linspace(50, 60, rounds)
    frame = pd.DataFrame(
        {"round": np.arange(rounds), "accuracy_mean": accuracy, "accuracy_var": 2 * accuracy}
    )
    frame.to_csv(folder / "rounds.csv", index=False)
    pd.DataFrame({"client": [0, 1], "n": 5, **clients}).to_csv(folder / "clients.csv", index=False)
    (folder / "config.yaml").write_text("loss: {name: mse}\n")
    return RunFiles.read(folder)


def results_of(methods: list[str], points: list[dict[str, str]]) -> Any:
    return SimpleNamespace(study=SimpleNamespace(methods=dict.fromkeys(methods)), points=points, seeds=[0])


@pytest.mark.parametrize("points", [[{}], [{"alpha": "0.1"}, {"alpha": "1"}]])
def test_of_many_rounds_some_are_drawn(
    points: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there is room for, up to the last; runs of two lengths have rounds in common."""
    runs = [run_of(tmp_path / "a", 301), run_of(tmp_path / "b", 400)]
    monkeypatch.setattr(MethodsAt, "runs", lambda *_: runs)
    monkeypatch.setattr(page, "MOST_NUMBERS", 2500)
    section = page._over_rounds(results_of(["FedAvg", "SOLO"], points))
    assert section is not None
    columns = [source for each in section.charts[0].option["dataset"] for source in [each["source"]]]
    assert sum(len(values) for source in columns for values in source.values()) < 3500
    [rounds] = {tuple(v) for s in columns for name, v in s.items() if name.startswith("round")}
    assert rounds[-1] == 301
    assert f"{len(rounds)} of 301 rounds are drawn, evenly spaced." in section.note
    monkeypatch.undo()
    monkeypatch.setattr(MethodsAt, "runs", lambda *_: runs)
    section = page._over_rounds(results_of(["FedAvg", "SOLO"], points))
    assert section is not None
    assert section.note == ""


@pytest.mark.parametrize("points", [[{}], [{"alpha": "0.1"}, {"alpha": "1"}]])
def test_estimates_are_marked_at_every_point(
    points: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page fills in the number of the point where a series names its column of estimates."""
    run = run_of(tmp_path / "a", 3)
    run.rounds["estimated_from"] = [8, 8, np.nan]
    monkeypatch.setattr(MethodsAt, "runs", lambda *_: [run])
    section = page._over_rounds(results_of(["FedAvg"], points))
    assert section is not None
    option = section.charts[0].option
    [hollow] = {series["hollow"] for series in option["series"] if "hollow" in series}
    for number in range(len(points)):
        marked = option["dataset"][0]["source"][hollow.replace("{slider}", str(number))]
        assert marked == [True, True, False]
    assert ("{slider}" in hollow) == (len(points) > 1)
    naming = re.search(
        r"NAMING = new Set\(\[(.*?)\]\)", (Path(page_of_runs.__file__).parent / "page.js").read_text()
    )
    assert naming
    assert '"hollow"' in naming[1]


def test_the_clients_of_a_regression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [run_of(tmp_path / "a", 2, rmse_last=[1.5, 2.5])]
    monkeypatch.setattr(MethodsAt, "runs", lambda *_: runs)
    monkeypatch.setattr(page, "_blocks", lambda _: [])
    section, _ = page._clients(results_of(["FedAvg"], [{}]))
    assert section is not None
    assert section.charts[0].option["dataset"][0]["source"]["median"] == [2]
    assert section.charts[0].option["xAxis"]["name"] == "last root mean squared error of the client"


def test_clients_and_maps_are_those_of_the_first_finished_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two seeds at two points, of which PACFL has not finished the very first."""
    points = [{"partition.alpha": "0.1"}, {"partition.alpha": "1"}]
    runs = [
        SimpleNamespace(method=label, seed=seed, point=point)
        for seed in (0, 1)
        for point in points
        for label in ("FedAvg", "PACFL")
    ]
    results: Any = SimpleNamespace(
        study=SimpleNamespace(methods=dict.fromkeys(("FedAvg", "PACFL"))),
        points=points,
        seeds=[0, 1],
        runs=runs,
    )
    folders = {id(run): tmp_path / str(i) for i, run in enumerate(runs)}
    for folder in folders.values():
        run_of(folder, 2, rmse_last=[1.0, 2.0])
    monkeypatch.setattr(page, "directory_of", lambda run: folders[id(run)])
    monkeypatch.setattr(page, "is_finished", lambda run: run is not runs[1])
    blocks = list(page._blocks(results))
    assert [block.place for block in blocks] == [
        {"seed": "0", "partition.alpha": "0.1"},
        {"seed": "0", "partition.alpha": "1"},
        {"seed": "1", "partition.alpha": "0.1"},
        {"seed": "1", "partition.alpha": "1"},
    ]
    assert [list(block.runs) for block in blocks] == [["FedAvg"], *[["FedAvg", "PACFL"]] * 3]
    asked: list[dict[str, RunFiles]] = []
    monkeypatch.setattr(page, "maps_of_clients", lambda runs: asked.append(runs) or ([], {}))
    page._maps(results)
    assert {name: run.path.name for name, run in asked[0].items()} == {
        "FedAvg, alpha 0.1, seed 0": "0",
        "PACFL, alpha 1, seed 0": "3",
    }

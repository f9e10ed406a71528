"""Clients of several runs on the same data: the table with a column for each method."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rayfl.report import across
from rayfl.report.across import Block, boxes_of_clients, clients_section, maps_of_clients
from rayfl.report.files import RunFiles

MakeRun = Callable[[str], Path]


def run_of(folder: Path, clients: str | None = None, **columns: Any) -> RunFiles:
    """A run whose table of clients has other columns, and the fingerprint of its clients."""
    frame = pd.read_csv(folder / "clients.csv").assign(**columns)
    frame.to_csv(folder / "clients.csv", index=False)
    environment = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps({**environment, "clients": clients}))
    return RunFiles.read(folder)


def section_of(*blocks: Block) -> tuple[Any, dict[str, list[Any]]]:
    runs = {name: [block.runs[name] for block in blocks if name in block.runs] for name in blocks[0].runs}
    return clients_section(boxes_of_clients(runs), blocks)


def headings(section: Any) -> list[str]:
    return [column.title for column in section.tables[0].columns]


def test_a_column_for_each_method_and_a_row_for_each_client(make_run: MakeRun) -> None:
    fedavg = run_of(make_run("a"), "aa", name=["Ann", "Bob", "Cy", "Di"])
    pacfl = run_of(make_run("b"), "aa", accuracy_last=[70.0, 80, 90, None])
    section, data = section_of(Block({"seed": "0"}, {"FedAvg": fedavg, "PACFL": pacfl}))
    assert headings(section) == ["client", "training samples", "planted group", "FedAvg", "PACFL"]
    assert data["client"] == ["Ann", "Bob", "Cy", "Di"]
    assert [data[c.values.column] for c in section.tables[0].columns[3:]] == [
        [65, 99, 88, 88],
        [70, 80, 90, None],
    ]
    chart = section.charts[1]
    assert [[c.label for c in s.choices] for s in chart.selectors[:2]] == [["FedAvg", "PACFL"]] * 2
    assert chart.option["series"][0]["encode"] == {"x": "method 0", "y": "method 1"}
    assert chart.option["series"][1]["data"] == [[65, 65], [99, 99]]
    assert "above the diagonal" in section.note


def test_seeds_and_points_follow_each_other_and_gaps_stay_gaps(make_run: MakeRun) -> None:
    one, two, three = (run_of(make_run(name)) for name in "abc")
    blocks = [
        Block({"seed": "0", "alpha": "alpha 1"}, {"FedAvg": one, "PACFL": two}),
        Block({"seed": "1", "alpha": "alpha 1"}, {"PACFL": three}),
    ]
    section, data = section_of(*blocks)
    assert headings(section)[:2] == ["client", "seed"]  # not alpha, which has one value
    assert data["at seed"] == ["0"] * 4 + ["1"] * 4
    assert data["method 0"] == [65, 99, 88, 88, None, None, None, None]
    assert data["method 1"][4:] == [65, 99, 88, 88]


def test_runs_on_other_clients_are_no_columns(make_run: MakeRun) -> None:
    same, other = run_of(make_run("b"), "aa"), run_of(make_run("c"), "cc")
    runs = {"FedAvg": run_of(make_run("a"), "aa"), "PACFL": same, "Other": other}
    section, _ = section_of(Block({"seed": "0"}, runs))
    assert headings(section)[-2:] == ["FedAvg", "PACFL"]


def test_one_method_has_no_rival(make_run: MakeRun) -> None:
    section, data = section_of(Block({"seed": "0"}, {"FedAvg": run_of(make_run("a"))}))
    assert (len(section.charts), section.tables, data) == (1, (), {})
    assert clients_section(None, []) == (None, {})


@pytest.mark.parametrize("most", [6, 4])
def test_a_table_of_many_clients_ends(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Within a block as well as between two; what follows is not read."""
    runs = {"FedAvg": run_of(make_run("a")), "PACFL": run_of(make_run("b"))}
    boxes = boxes_of_clients({name: [run] for name, run in runs.items()})
    monkeypatch.setattr(across, "MOST_ROWS", most)

    def blocks(count: int) -> Iterator[Block]:
        for seed in range(count):
            yield Block({"seed": str(seed)}, runs)
        raise AssertionError

    section, data = clients_section(boxes, blocks(2))
    assert [len(values) for values in data.values()] == [most] * len(data)
    assert section is not None
    assert f"the first {most} clients only" in section.note
    monkeypatch.setattr(across, "MOST_ROWS", 8)
    full = [Block({"seed": seed}, runs) for seed in "01"]
    for last in ([], [Block({"seed": "2"}, {})]):  # a seed of which nothing is finished
        section, _ = clients_section(boxes, [*full, *last])
        assert section is not None
        assert "only" not in section.note


def test_methods_beyond_the_table_are_told(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {name: run_of(make_run(name)) for name in "abc"}
    monkeypatch.setattr(across, "MOST_METHODS", 2)
    section, _ = section_of(Block({"seed": "0"}, runs))
    assert headings(section)[-2:] == ["a", "b"]
    assert "the first 2 methods only" in section.note


@pytest.mark.parametrize("empty", [None, math.inf], ids=["not tested", "infinite"])
def test_a_method_without_results_is_no_column(make_run: MakeRun, empty: float | None) -> None:
    """One that was stopped before its first test, or whose error is infinite."""
    runs = {}
    for name, values in (("a", [0.5, 1.5, 2.5, 3.5]), ("b", empty), ("c", [1.0, 1, 1, 2])):
        folder = make_run(name)
        (folder / "config.yaml").write_text((folder / "config.yaml").read_text() + "loss: {name: mse}\n")
        runs[name] = run_of(folder, accuracy_last=None, rmse_last=values)
    section, data = section_of(Block({"seed": "0"}, runs))
    assert headings(section)[-2:] == ["a", "c"]
    assert [c.label for c in section.charts[1].selectors[0].choices] == ["a", "c"]
    assert not any(math.isinf(v) for values in data.values() for v in values if isinstance(v, float))
    del runs["c"]
    assert section_of(Block({"seed": "0"}, runs))[0].tables == ()


def test_a_regression(make_run: MakeRun) -> None:
    runs = {}
    for name in ("a", "b"):
        folder = make_run(name)
        text = (folder / "config.yaml").read_text()
        (folder / "config.yaml").write_text(text + "loss: {name: mse}\n")
        runs[name] = run_of(folder, accuracy_last=None, rmse_last=[0.5, 1.5, 2.5, 3.5])
    section, data = section_of(Block({"seed": "0"}, runs))
    assert data["method 1"] == [0.5, 1.5, 2.5, 3.5]
    assert section.tables[0].caption == "clients: last root mean squared error of the client"
    assert "diagonal" not in section.note  # less is better


def test_a_map_for_each_method_that_clusters(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = make_run("alone")
    (alone / "clusters.json").unlink()
    for name, columns in (("clients.csv", ["cluster"]), ("rounds.csv", ["clusters", "ari"])):
        pd.read_csv(alone / name).drop(columns=columns).to_csv(alone / name, index=False)
    labels = "client,label,samples\n0,0,10\n1,1,10\n2,0,5\n2,1,5\n3,1,10\n"
    runs = {"FedAvg": RunFiles.read(alone)}
    for name in ("PACFL", "IFCA"):
        folder = make_run(name)
        (folder / "labels.csv").write_text(labels)
        runs[name] = RunFiles.read(folder)
    sections, tables = maps_of_clients(runs)
    assert [section.title for section in sections] == ["Map of clients: PACFL", "Map of clients: IFCA"]
    assert list(tables) == ["map 0", "map 1"]
    assert sections[1].charts[0].option["dataset"][0]["source"] == "@map 1"
    assert {"client", "group", "cluster 0", "x", "y", "accuracy_last"} < set(tables["map 1"])
    assert "best_round" not in tables["map 1"]  # only what is shown
    for name, most in (("MOST_MAPS", 1), ("MOST_PLACES", 7)):
        monkeypatch.setattr(across, name, most)
        assert [section.title for section in maps_of_clients(runs)[0]] == ["Map of clients: PACFL"]
        monkeypatch.undo()

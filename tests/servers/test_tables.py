"""The files of a run that grow round by round: killed between rounds or in mid-write, on a full disk."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

import rayfl
from rayfl import files, rundir
from rayfl.algorithms import ServerState
from rayfl.config import load
from rayfl.errors import DiskError
from rayfl.events import Clustered, RoundDone, RunEvent
from rayfl.rundir import GrowingTable, RunDirectory
from rayfl.servers.building import build
from rayfl.servers.records import Records
from tests.runs import METHODS

GROWING = ("communication.csv", "diagnostics.csv", "groups.csv")
FILES = (*GROWING, "labels.csv", "clients.csv")
"""All but ``rounds.csv``, in which there are seconds."""


class Crash(BaseException):
    """The process is killed."""


@pytest.fixture
def cfl(settings: dict[str, Any]) -> dict[str, Any]:
    """Five rounds of a method that reports on its rounds, with checkpoints after two and four."""
    output = {**settings["output"], "checkpoint_every": 2}
    return {**settings, **METHODS["cfl"], "rounds": 5, "output": output}


def contents(path: Path, names: tuple[str, ...] = FILES) -> dict[str, str]:
    return {name: (path / name).read_text() for name in names}


def newest(root: Path, *others: Path) -> Path:
    (path,) = [path for path in root.glob("t-*") if path not in others]
    return path


def upto(text: str, rounds: int, column: int = 0) -> str:
    """The header and the rows of the first rounds."""
    header, *rows = text.splitlines(keepends=True)
    return header + "".join(row for row in rows if int(row.split(",")[column]) < rounds)


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("torn", [False, True])
def test_what_is_killed_between_rounds_has_their_rows_and_goes_on_to_the_same_files(
    rounds: int, torn: bool, cfl: dict[str, Any], tmp_path: Path
) -> None:
    whole = rayfl.run(cfl).path
    expected = contents(whole)

    def kill(event: RunEvent) -> None:
        if isinstance(event, RoundDone) and event.round + 1 == rounds:
            raise Crash

    with pytest.raises(Crash):
        rayfl.run(cfl, on_event=kill)
    path = newest(tmp_path, whole)
    found = contents(path, (*GROWING, "labels.csv"))
    assert found == {
        **{name: upto(expected[name], rounds) for name in GROWING},
        "labels.csv": expected["labels.csv"],
    }
    if torn:
        for name in (*GROWING, "rounds.csv"):
            with (path / name).open("a") as file:
                file.write(f"{rounds},client_l")
    assert contents(rayfl.resume(path).path) == expected
    assert (path / "rounds.csv").read_text().count("\n") == 6


@pytest.mark.parametrize("name", ["communication.csv", "diagnostics.csv"])
def test_what_is_killed_in_mid_write_goes_on_to_the_same_files(
    name: str, cfl: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rayfl.run(cfl).path
    expected, append, calls = contents(whole), files.append, [0]

    def half(path: Path, text: str, durably: bool = False) -> None:
        calls[0] += path.name == name
        if calls[0] == 3:
            append(path, text[: len(text) // 2].removesuffix("\n"))  # in mid-row
            raise Crash
        append(path, text, durably)

    with monkeypatch.context() as patch:
        patch.setattr(files, "append", half)
        with pytest.raises(Crash):
            rayfl.run(cfl)
    path = newest(tmp_path, whole)
    assert not (path / name).read_text().endswith("\n")
    assert contents(rayfl.resume(path).path) == expected


@pytest.mark.parametrize("name", ["communication.csv", "groups.csv", "diagnostics.csv"])
def test_on_a_full_disk_the_round_is_taken_back_with_its_rows(
    name: str, cfl: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for half of the rows, and after that for a checkpoint."""
    whole = rayfl.run(cfl).path
    expected, append, calls = contents(whole), files.append, [0]

    def half(path: Path, text: str, durably: bool = False) -> None:
        calls[0] += path.name == name
        if calls[0] == 3:
            calls[0] += 1
            append(path, text[: len(text) // 2])
            raise DiskError(path, os.strerror(errno.ENOSPC))
        append(path, text, durably)

    with monkeypatch.context() as patch:
        patch.setattr(files, "append", half)
        with pytest.raises(DiskError, match="No space left"):
            rayfl.run(cfl)
    path = newest(tmp_path, whole)
    rounds = RunDirectory(path).rounds_complete()
    assert rounds in (2, 3)  # there may be no diagnostics of the first round
    assert contents(path, GROWING) == {each: upto(expected[each], rounds) for each in GROWING}
    assert contents(rayfl.resume(path).path) == expected


def test_a_round_costs_its_own_rows(cfl: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, str]] = []
    monkeypatch.setattr(files, "watch", lambda action, path: log.append((action, path.name)))
    rayfl.run({**cfl, "output": {**cfl["output"], "checkpoint_every": 0}})
    for name in ("rounds.csv", "groups.csv", "communication.csv"):
        assert log.count(("append", name)) == 5
        assert sum(action == "write" and name in each for action, each in log) == 1
    assert sum(action == "write" and "labels.csv" in each for action, each in log) == 1


def test_an_entry_of_the_timeline_becomes_text_once(
    cfl: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was written before, the file is what one object as a whole would be."""
    found: list[Any] = []
    item = rundir.item
    monkeypatch.setattr(rundir, "item", lambda entry: found.append(entry) or item(entry))
    run = RunDirectory(tmp_path)
    records = Records(run, build(load(cfl))[0][0].federation)
    entries: list[dict[str, Any]] = [
        {"round": n, "labels": [0, n], "text": "a\nb é", "ari": float("nan"), "none": []} for n in range(4)
    ]
    for timeline in ([], entries[:1], entries[:3], entries, entries[:2], [entries[0], entries[3]]):
        records.timeline = list(timeline)
        records._write_clusters()
        written = (tmp_path / "clusters.json").read_text()
        groups = records.federation.groups
        whole = {"groups": None if groups is None else groups.tolist(), "timeline": timeline}
        run.write_json("whole.json", whole)
        assert written == (tmp_path / "whole.json").read_text()
    assert [entry["round"] for entry in found] == [0, 1, 2, 3, 3]


def test_clusters_that_stay_as_they_are_are_recorded_once(settings: dict[str, Any]) -> None:
    """FedSoft asks its clients in every round; with one center nothing can change."""
    events: list[RunEvent] = []
    one = {**settings, "algorithm": {"name": "fedsoft", "clusters": 1}, "rounds": 4}
    found = rayfl.run(one, on_event=events.append)
    assert sum(isinstance(event, Clustered) for event in events) == 4
    assert [entry["round"] for entry in found.clusters["timeline"]] == [0]
    several = rayfl.run({**one, "algorithm": {"name": "fedsoft", "clusters": 3}, "rounds": 6})
    labels = [entry["labels"] for entry in several.clusters["timeline"]]
    assert len(labels) > 1
    assert all(new != old for old, new in itertools.pairwise(labels))
    assert several.clients["cluster"].tolist() == labels[-1]


@pytest.mark.parametrize("long", [0, 1 << 20])
def test_a_long_history_of_clusters_is_written_when_it_has_grown_much(
    long: int, cfl: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 200 entries; in between the file is as it was, and at the end complete."""
    monkeypatch.setattr("rayfl.servers.records._LONG_TIMELINE", long)
    log: list[str] = []
    monkeypatch.setattr(files, "watch", lambda action, path: log.append(f"{action} {path.name}"))
    federation = build(load(cfl))[0][0].federation
    records, run = Records(RunDirectory(tmp_path), federation), RunDirectory(tmp_path)
    state = ServerState(0, 1, np.zeros(federation.clients, np.int64))
    for number in range(200):
        records.clusters(state, {"number": number})
        there = run.read_json("clusters.json")["timeline"]
        assert [entry["number"] for entry in there] == list(range(len(there)))
        assert len(there) >= (number + 1) / 1.13
    writes = sum("write" in each and "clusters.json" in each for each in log)
    assert writes == 200 if long else writes < 60  # 1.125 ** 45 > 200
    records.start()
    assert len(run.read_json("clusters.json")["timeline"]) == 200


def test_diagnostics_with_new_columns_are_written_as_a_whole(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """As pandas writes them."""
    records = Records(RunDirectory(tmp_path), build(load(settings))[0][0].federation)
    records.start()
    rows = [{"norm": 0.1, "who": "a"}, {"norm": float("nan"), "who": "b, c"}, {"norm": 1e-7, "right": True}]
    for number, row in enumerate(rows):
        records.diagnosis(number, [row])
        records.round({"round": number, "seconds": 1.0})
        seen = pd.DataFrame([{"round": place, **each} for place, each in enumerate(rows[: number + 1])])
        assert (tmp_path / "diagnostics.csv").read_text() == seen.to_csv(index=False)


def test_what_is_not_of_the_table_is_cut_before_more_is_added(tmp_path: Path) -> None:
    table = GrowingTable.start(tmp_path / "x.csv", ("a", "b"), [{"a": 1}])
    taken_back = table.extended([{"a": 2, "b": "é"}])
    assert taken_back.path.read_bytes() == "a,b\n1,\n2,é\n".encode()
    assert taken_back.bytes == taken_back.path.stat().st_size
    assert table.extended([{"a": 3}]).path.read_text() == "a,b\n1,\n3,\n"


@pytest.mark.slow
def test_a_run_that_is_killed_by_a_signal_goes_on_to_the_same_files(
    cfl: dict[str, Any], tmp_path: Path
) -> None:
    whole = rayfl.run(cfl).path
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(cfl))
    lines = (
        "import os, signal, rayfl",
        "def kill(event):",
        "    if isinstance(event, rayfl.RoundDone) and event.round == 2:",
        "        os.kill(os.getpid(), signal.SIGKILL)",
        f"rayfl.run({str(tmp_path / 'c.yaml')!r}, on_event=kill)",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    path = newest(tmp_path, whole)
    assert contents(path, GROWING) == {name: upto(text, 3) for name, text in contents(whole, GROWING).items()}
    assert contents(rayfl.resume(path).path) == contents(whole)

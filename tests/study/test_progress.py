"""The lines on the progress of a study."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from rayfl.study import progress
from rayfl.study.running import Allocation, interruptible, stop_file
from rayfl.study.watching import Stage


class Runs:
    """Runs of ten rounds that a test lets go on; ``now`` is the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: str) -> None:
        self.now, self.done, self.text = 0.0, dict.fromkeys(names, 0), io.StringIO()
        monkeypatch.setattr(progress, "_TICK", 3600.0)  # the test looks
        monkeypatch.setattr(progress, "directory_of", lambda run: Path(run.key))
        monkeypatch.setattr(progress, "rounds_done", lambda path: self.done[str(path)])
        monkeypatch.setattr(progress, "is_finished", lambda run: self.done[run.key] == 10)
        monkeypatch.setattr(progress, "_result_text", lambda path, chosen_by: "done")
        self.console = Console(file=self.text)
        self.display = progress.StudyDisplay(progress.Terminal(self.console), lambda: self.now)
        runs: list[Any] = [
            SimpleNamespace(key=name, title=name, config=SimpleNamespace(rounds=10)) for name in names
        ]
        self.runs = runs
        self.display.watch.stage(Stage("runs", runs, Allocation(1, 0)))

    def look(self, now: float, **done: int) -> None:
        self.now = now
        self.done.update(done)
        self.display._update()

    def lines(self) -> list[str]:
        self.display.close()
        return [line.strip() for line in self.text.getvalue().splitlines()[1:]]


def test_the_start_of_the_first_run_is_not_the_cost_of_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute for the start, then two seconds a round: 20 rounds are left after the first run."""
    runs = Runs(monkeypatch, "abc")
    runs.look(60, a=0)
    for number in range(1, 11):
        runs.look(60 + 2 * number, a=number)
    runs.look(105, b=10)
    assert runs.lines() == ["1/3  a: done; about 40.0 s left", "2/3  b: done; about 22.6 s left"]


def test_rounds_of_runs_side_by_side_count_wherever_they_are_in_the_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = Runs(monkeypatch, "abc")
    runs.look(60, a=1, b=1, c=1)
    runs.look(78, a=10, b=7, c=7)  # 18 s for 21 rounds, 6 are left
    assert runs.lines() == ["1/3  a: done; about 5.1 s left"]


def test_of_a_run_that_was_finished_at_first_sight_nothing_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, "ab")
    runs.look(60, a=10)
    assert runs.lines() == ["1/2  a: done"]


@pytest.mark.parametrize("runs", ["ab", ""], ids=["runs", "search"])
def test_a_closed_output_stops_the_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, runs: str
) -> None:
    """As in ``rayfl study ... | head``; of a search only the first line is printed."""

    def closed(*args: object, **kwargs: object) -> None:
        raise BrokenPipeError

    shown = Runs(monkeypatch, "ab")
    watch = shown.display.watch
    monkeypatch.setattr(shown.console, "print", closed)
    with stop_file(tmp_path) as stop:
        watch.stoppable(stop.ask)
        if runs:  # while they run
            shown.look(60, a=10)
        else:
            watch.stage(Stage("settings of A, 20 drawn", [], Allocation(1, 0), trials=20))
        assert stop.path.exists()
    assert capsys.readouterr().err == "the output was closed: stopping\n"
    if runs:
        shown.look(70, b=10)
    stop.ask()
    assert not list(tmp_path.iterdir())  # nothing is left to stop
    with stop_file(tmp_path) as later:
        watch.stoppable(later.ask)
        assert later.path.exists()  # no further stage runs


@pytest.mark.usefixtures("default_hangup")
def test_a_signal_stops_a_study_whose_terminal_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGHUP nothing can be written to it."""

    def gone(descriptor: int, text: bytes) -> int:
        raise OSError(errno.EIO, "Input/output error")

    asked: list[bool] = []
    monkeypatch.setattr(os, "write", gone)
    with interruptible(lambda: asked.append(True)):
        signal.raise_signal(signal.SIGHUP)
    assert asked == [True]


def test_where_runs_take_long_lines_tell_how_far_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bar, five minutes after the last line."""
    runs = Runs(monkeypatch, "ab")
    for now, rounds in ((100, 1), (299, 3), (301, 3), (500, 5), (602, 6)):
        runs.look(now, a=rounds)
    runs.look(700, a=10)
    runs.look(800)
    assert runs.lines() == [
        "3 of 20 rounds; about 28 min 28 s left",
        "6 of 20 rounds; about 23 min 26 s left",
        "1/2  a: done; about 11 min 07 s left",
    ]


def trial(lr: float, score: float, state: str = "finished", **more: str) -> dict[str, Any]:
    return {"settings": {"training.lr": lr, "training.epochs": 2}, "score": score, "state": state, **more}


def test_every_trial_of_a_search_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Runs(monkeypatch, "a")
    shown.display.watch.stage(Stage("settings of A, 4 drawn", [], Allocation(2, 0), True, 4))
    for now, tried in (
        (10.0, trial(0.0123456, 81.2)),
        (12.0, trial(1.0, -math.inf, "ended early")),
        (15.0, trial(9.0, -math.inf, "failed", error="training diverged")),
        (16.0, trial(2.0, -math.inf, "stopped")),
    ):
        shown.now = now
        shown.display.watch.tried(tried)
    assert shown.lines() == [
        "settings of A, 4 drawn, 2 at a time",
        "1/4  training.lr=0.01235, training.epochs=2: 81.20 on validation samples; about 30.0 s left",
        "2/4  training.lr=1, training.epochs=2: no result on validation samples, ended early; "
        "about 12.0 s left",
        "3/4  training.lr=9, training.epochs=2: failed: training diverged; about 5.0 s left",
    ]


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        ("accuracy_mean", "accuracy 66.0 % on validation samples in 3.0 s"),
        ("accuracy_worst10", "accuracy_worst10 44.0 % on validation samples in 3.0 s"),
        ("r2_mean", "r2 0.25 on validation samples in 3.0 s"),
        ("rmse_mean", "done"),
        ("", "accuracy 77.0 % in 3.0 s"),
    ],
)
def test_who_chooses_settings_sees_no_test_accuracy(metric: str, text: str, tmp_path: Path) -> None:
    summary = {"accuracy_mean": 77, "r2_mean": 9, "seconds": 3}
    held_out = {"accuracy_mean": 66, "accuracy_worst10": 44, "r2_mean": 0.25}
    summary |= {f"validation_{name}": value for name, value in held_out.items()}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert progress._result_text(tmp_path, metric) == text


def test_a_regression_is_told_by_its_loss(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"accuracy_mean": null, "loss_mean": 0.1234567, "seconds": 3}')
    assert progress._result_text(tmp_path, "") == "loss 0.1235 in 3.0 s"


def test_a_notebook_has_a_bar_and_the_newest_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Runs(monkeypatch, "ab")
    seen: list[str] = []
    display = progress.StudyDisplay(progress.Notebook(seen.append), lambda: shown.now)
    display.watch.stage(Stage("<runs>", shown.runs, Allocation(1, 0)))
    for now, rounds in ((1, 1), (2, 2), (11, 10)):
        shown.now, shown.done["a"] = now, rounds
        display._update()
    assert '<progress value="10" max="20"' in seen[-1]
    assert "1/2 runs · 10 of 20 rounds · ETA 11.1 s" in seen[-1]
    assert seen[-1].endswith("&lt;runs&gt;: 2 to do<br>1/2  a: done</div>")
    display.close()
    assert "<progress" not in seen[-1]

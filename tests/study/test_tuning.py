"""Settings chosen on validation samples: never by what is tested, and by nobody who has set them himself."""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayfl.errors import ConfigError
from rayfl.rundir import RunDirectory
from rayfl.runtime import trials
from rayfl.study import Study, Watch, check_places, execute, page, prepare, tables, take
from rayfl.study.estimate import _Cost, estimate_search
from rayfl.study.file import Tune
from rayfl.study.preparation import as_chosen
from rayfl.study.running import Allocation, directory_of
from rayfl.study.searching import Work, first_trials
from rayfl.study.study import Runner

TUNED: dict[str, Any] = {
    "name": "tuned",
    "settings": {
        "rounds": 2,
        "training.epochs": 1,
        "partition": {"name": "label_skew", "clients": 6, "validation": 0},
        "output": {"report": False, "tensorboard": False},
    },
    "methods": {
        "FedAvg": {"algorithm": "fedavg"},
        "fixed": {"algorithm": "fedavg", "training.lr": 0.05},
    },
    "tune": {"training.lr": [0.001, 0.2, 1e30], "on": "validation", "seeds": [100]},
    "seeds": [0, 1],
}


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayfl.study.writing.write_figures", lambda results, folder: [])


def run(root: Path, inline: bool = True, watch: Watch | None = None, **changes: Any) -> Study:
    values = {**TUNED, **changes}
    prepared = prepare(take(values, root, settings=[f"output.root={root / 'runs'}"]))
    return execute(prepared, root / "out", inline, 2, watch)


def test_the_best_on_validation_samples_is_taken(tmp_path: Path) -> None:
    study = run(tmp_path)
    tried = json.loads((tmp_path / "out" / "tuned.json").read_text())
    assert [(each["method"], each["settings"]["training.lr"]) for each in tried] == [
        ("FedAvg", 0.001),
        ("FedAvg", 0.2),
        ("FedAvg", 1e30),  # a method's own rate is not tuned
    ]
    assert tried[2]["score"] is None  # training diverged
    scores = [each["score"] for each in tried[:2]]
    for each, score in zip(tried, scores, strict=False):
        (path,) = each["paths"]
        rounds = RunDirectory(Path(path)).read_frame("rounds.csv")
        assert rounds["validation_accuracy_mean"].iloc[-1] == score
    best = tried[int(np.argmax(scores))]["settings"]["training.lr"]
    assert [each["chosen"] for each in tried] == [each["settings"]["training.lr"] == best for each in tried]
    rates = {run.method: run.config.training.lr for run in study.results.runs}
    assert rates == {"FedAvg": best, "fixed": 0.05}
    assert {run.seed for run in study.results.runs} == {0, 1}
    # Clients of the study's own runs keep all their samples.
    assert {run.config.partition.validation for run in study.results.runs} == {0.0}
    assert f"lr {best:g}" in study.results.runs[0].title
    assert study.results.study.tune is not None
    chosen = tables.choice_table(study.tuned, study.results.study.tune)
    assert chosen is not None
    assert chosen.header == ("method", "training.lr", "mean accuracy (%), on validation samples")
    assert chosen.rows == (("FedAvg", f"{best:g}", f"{max(scores):.2f}"),)
    assert chosen.caption in (tmp_path / "out" / "table.md").read_text()


def test_settings_of_an_algorithm_are_tried_for_the_methods_that_have_them(tmp_path: Path) -> None:
    methods = {
        "FedAvg": {"algorithm": "fedavg"},
        "FedAdam": {"algorithm": "fedadam"},
        "with a section": {"algorithm": {"name": "fedadam", "beta1": 0.5}},
        "fixed": {"algorithm": "fedadam", "algorithm.server_lr": 0.02},
    }
    tune = {"algorithm.server_lr": [1e-6, 0.03], "seeds": [100]}
    study = run(tmp_path, methods=methods, tune=tune, seeds=[0])
    tried = json.loads((tmp_path / "out" / "tuned.json").read_text())
    assert [(each["method"], each["settings"]["algorithm.server_lr"]) for each in tried] == [
        (method, rate) for method in ("FedAdam", "with a section") for rate in (1e-6, 0.03)
    ]
    found = {each.method: each.config.algorithm for each in study.results.runs}
    best = {each["method"]: each["settings"]["algorithm.server_lr"] for each in tried if each["chosen"]}
    for method in ("FedAdam", "with a section"):
        assert found[method].server_lr == best[method]  # type: ignore[attr-defined]
    assert found["with a section"].beta1 == 0.5  # type: ignore[attr-defined]
    assert found["fixed"].server_lr == 0.02  # type: ignore[attr-defined]


def test_a_setting_that_no_algorithm_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tune: algorithm.server_rl: no method has such .*'server_lr'"):
        run(tmp_path, methods={"FedAdam": {"algorithm": "fedadam"}}, tune={"algorithm.server_rl": [0.1, 1]})


def test_a_setting_that_only_another_method_of_the_study_has_is_not_tried(tmp_path: Path) -> None:
    content: dict[str, Any] = {
        **TUNED,
        "methods": {"FedAvg": {"algorithm": "fedavg"}, "FedAdam": {"algorithm": "fedadam"}},
    }
    content["tune"] = {"algorithm.server_lr": [0.1, 1], "seeds": [100]}
    prepared = prepare(take(content, tmp_path, only=["FedAvg"]), check_data=False)
    assert prepared.candidates == ()


def test_a_single_value_is_what_is_chosen(tmp_path: Path) -> None:
    """Also for a method to which further values of the space make no difference."""
    methods = {"FedAvg": {"algorithm": "fedavg"}, "FedAdam": {"algorithm": "fedadam"}}
    tune = {"training.lr": [0.15], "algorithm.server_lr": [1e-6, 0.03], "seeds": [100]}
    study = run(tmp_path, methods=methods, tune=tune, seeds=[0])
    assert {run.config.training.lr for run in study.results.runs} == {0.15}
    assert [each["method"] for each in study.tuned] == ["FedAvg", "FedAdam", "FedAdam"]
    assert [len(each["settings"]) for each in study.tuned] == [1, 2, 2]  # FedAvg has no server_lr
    assert study.runs["training.lr"].tolist() == [0.15, 0.15]  # chosen, though it is the same in all runs


@pytest.mark.parametrize(
    ("per", "where"), [("method", "FedAvg"), ("point", r"FedAvg, lr 1e\+30")], ids=["method", "point"]
)
def test_a_method_without_a_trial_that_finished_is_refused(tmp_path: Path, per: str, where: str) -> None:
    """Untuned it would be compared with others that are tuned."""
    grid = {"training.lr": [0.05, 1e30]}
    tune = {"training.momentum": [0.0, 0.5], "seeds": [100], "per": per}
    with pytest.raises(ConfigError, match=f"^tune: {where}: no combination of values has runs that all fin"):
        run(tmp_path, grid=grid, tune=tune, seeds=[0], methods={"FedAvg": {"algorithm": "fedavg"}})


def test_seeds_of_the_command_line_are_no_seeds_of_tune_either(tmp_path: Path) -> None:
    assert take(TUNED, tmp_path, seeds="98-99").seeds == (98, 99)
    with pytest.raises(ConfigError, match=r"^seeds: tune.seeds: 100 is one of the study's seeds"):
        take(TUNED, tmp_path, seeds="99-100")


def test_the_choice_knows_nothing_of_the_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it to look at test accuracies, other ones would change it."""
    first = [run.config.training.lr for run in run(tmp_path).results.runs]
    for path in (tmp_path / "runs").glob("*-seed100-*/summary.json"):
        summary = json.loads(path.read_text())
        summary["accuracy_mean"] = 100.0 - summary["accuracy_mean"]
        path.write_text(json.dumps(summary))
    assert [run.config.training.lr for run in run(tmp_path).results.runs] == first


def test_a_search_says_what_it_chose_for_all_points_together(tmp_path: Path, searches: list[str]) -> None:
    study = run(tmp_path, inline=False, tune=DRAWN, grid={"training.epochs": [1, 2]})
    assert [each["chosen"] for each in study.tuned] == [False, True]


def test_each_point_of_the_grid_may_choose_for_itself(tmp_path: Path) -> None:
    tune = {**TUNED["tune"], "training.lr": [0.001, 0.2], "per": "point"}
    study = run(tmp_path, grid={"training.epochs": [1, 2]}, tune=tune, seeds=0, methods={"FedAvg": {}})
    assert len(study.tuned) == 4
    chosen = [each for each in study.tuned if each["chosen"]]
    assert [each["at"] for each in chosen] == [{"training.epochs": "1"}, {"training.epochs": "2"}]


def trial(method: str, value: float, score: float, chosen: bool = True, **at: str) -> dict[str, Any]:
    settings = {"training.lr": value}
    return {"method": method, "at": at, "settings": settings, "score": score, "chosen": chosen}


def test_the_table_of_choices_has_the_score_by_which_was_chosen() -> None:
    tune = Tune.model_validate({"training.lr": [0.1, 0.3], "seeds": [100, 101]})
    tried = [
        *(trial("A", 0.1, score, n=n) for n, score in (("6", 60.0), ("8", 70.0))),
        *(trial("A", 0.3, score, False, n=n) for n, score in (("6", 20.0), ("8", 80.0))),
    ]
    table = tables.choice_table(tried, tune)
    assert table is not None
    assert table.rows == (("A", "0.1", "65.00"),)
    assert "by the mean over 2 seeds and the mean over all points of the grid" in table.caption
    each = [{**one, "chosen": one["score"] in (60.0, 80.0)} for one in reversed(tried)]
    by_point = tables.choice_table(each, tune.model_copy(update={"per": "point"}))
    assert by_point is not None
    assert by_point.header[:3] == ("method", "n", "training.lr")
    assert by_point.rows == (("A", "8", "0.3", "80.00"), ("A", "6", "0.1", "60.00"))
    drawn = [trial("A", 0.0234112359, score) for score in (40.0, 50.0, -math.inf)]  # the same, several times
    table = tables.choice_table(drawn, tune)
    assert table is not None
    assert table.rows == (("A", "0.02341", "50.00"),)
    assert tables.choice_table([trial("A", 0.1, -math.inf, False)], tune) is None


def test_the_page_has_the_mean_by_which_was_chosen(tmp_path: Path) -> None:
    methods = {"FedAvg": {"algorithm": "fedavg"}}
    tune = {"training.lr": [0.01, 0.2], "seeds": [100]}
    study = run(tmp_path, methods=methods, tune=tune, grid={"training.epochs": [1, 2]}, seeds=[0])
    section = page._choices(study)
    assert section is not None
    (table,) = section.tables
    columns = {column.title: column.values for column in table.columns}
    assert columns["at"] == ["epochs 1", "epochs 2"] * 2
    score = "mean accuracy (%), on validation samples"
    scores = np.array(columns[score], float).reshape(2, 2)
    means = np.array(columns[f"{score}, mean over all points"], float).reshape(2, 2)
    np.testing.assert_allclose(means, np.tile(scores.mean(axis=1, keepdims=True), 2), atol=0.011)


@pytest.mark.parametrize(
    ("values", "chosen", "said"),
    [
        ([0.1, 0.3, 1], 1, "other values may be better: training.lr of A."),
        ([0.1, 0.3, 1], 0.1, "other values may be better: training.lr of A."),
        ([0.1, 0.3, 1], 0.3, ""),
        ([0.1, 0.3], 0.3, ""),  # one of two is always at an edge
        ({"uniform": [0.1, 0.3]}, 0.3, ""),
    ],
)
def test_a_choice_at_the_edge_of_the_values_is_named(values: Any, chosen: float, said: str) -> None:
    samples = {"samples": 2} if isinstance(values, dict) else {}
    tune = Tune.model_validate({"training.lr": values, "seeds": [100], **samples})
    table = tables.choice_table([trial("A", chosen, 50.0)], tune)
    assert table is not None
    assert table.caption.endswith(said or "were tried.")


@pytest.mark.ray
@pytest.mark.parametrize(
    ("scheduler", "actors"),
    [pytest.param("none", 2, marks=pytest.mark.slow), pytest.param("asha", 1, marks=pytest.mark.slow)],
)
def test_a_search_draws_points(ray_cluster: None, tmp_path: Path, scheduler: str, actors: int) -> None:
    """On one actor a run is the process of its trial: what a trial costs is starting processes."""
    tune = {"training.lr": {"loguniform": [0.001, 0.5]}, "seeds": [100], "samples": 2, "scheduler": scheduler}
    settings = {**TUNED["settings"], "execution.actors": actors}
    told: list[Any] = []
    changes = {"tune": tune, "methods": {"FedAvg": {}}, "seeds": 0, "settings": settings}
    study = run(tmp_path, False, Watch(tried=told.append), **changes)
    assert len(study.tuned) == 2
    said, kept = ([(each["settings"], each["state"]) for each in trials] for trials in (told, study.tuned))
    assert sorted(said, key=repr) == sorted(kept, key=repr)
    assert all(0.001 < each["settings"]["training.lr"] < 0.5 for each in study.tuned)
    finished = [each for each in study.tuned if each["state"] == "finished"]
    assert finished
    (chosen,) = [each for each in study.tuned if each["chosen"]]
    assert chosen["score"] == max(each["score"] for each in finished)
    (run_,) = study.results.runs
    assert run_.config.training.lr == chosen["settings"]["training.lr"]
    assert directory_of(run_).joinpath("summary.json").is_file()


def test_a_stopped_search_does_not_begin_the_next_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[str] = []

    def stopped(work: Any, how: Any, room: Any, folder: Path, *watch: Any) -> list[Any]:
        searched.append(work.method)
        Path(work.stop).touch()  # as Ctrl-C does
        return [({"training.lr": 0.1}, {"state": "stopped"})]

    monkeypatch.setattr("rayfl.runtime.trials.search", stopped)
    monkeypatch.setattr(Runner, "allocate", lambda self, runs, first: Allocation(1, 0))
    tune = {"training.lr": {"loguniform": [0.001, 0.5]}, "seeds": [100], "samples": 2}
    methods = {"FedAvg": {"algorithm": "fedavg"}, "SOLO": {"algorithm": "solo"}}
    study = run(tmp_path, inline=False, tune=tune, methods=methods)
    assert study.stopped
    assert searched == ["FedAvg"]
    assert study.results.finished == 0
    # The study's own runs are not known yet, so nothing is said of those that are there by chance.
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"study.yaml", "tuned.json"}
    assert study.judgements == ()
    assert "FedAvg" in study._repr_html_()


def test_a_choice_by_numbers_that_no_run_has_is_refused(tmp_path: Path) -> None:
    """Six clients with few samples hold none of them out: every score would be unknown."""
    tune = {"training.lr": [0.1, 0.2], "seeds": [100], "share": 1e-6}
    with pytest.raises(ConfigError, match="FedAvg: validation_accuracy_mean is unknown in all runs"):
        run(tmp_path, tune=tune, methods={"FedAvg": {}}, seeds=0)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("optuna", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_more_trials_at_once_than_asked_for(ray_cluster: None, tmp_path: Path, optuna: bool) -> None:
    if optuna:
        pytest.importorskip("optuna")
    how = trials.Search({"a": [0, 1, 2]}, "score", 3, optuna, False, 2, 0)
    found = trials.search(Alone(tmp_path), how, trials.Room(cpus=0.5, jobs=1), tmp_path)
    assert [told["score"] for _, told in found] == [1, 1, 1]


@dataclass(frozen=True)
class Alone:
    """Work that scores 1 if no other is being done when it begins and when it ends."""

    folder: Path

    def __call__(self, given: Any) -> dict[str, Any]:
        settings, _ = given
        own = self.folder / f"{os.getpid()}-{settings['a']}"
        own.touch()
        time.sleep(0.5)
        alone = len(list(self.folder.iterdir())) == 1
        own.unlink()
        return {"score": int(alone)}


DRAWN: dict[str, Any] = {
    "training.lr": {"loguniform": [0.001, 0.5]},
    "seeds": [100],
    "samples": 2,
    "scheduler": "asha",
}


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods whose settings are searched; each search prefers other settings, as ASHA's timing may."""
    found: list[str] = []

    def drawn(work: Any, how: Any, room: Any, folder: Path, *watch: Any) -> list[Any]:
        found.append(work.method)
        lr = 0.1 + 0.1 * len(found)
        early = ({"training.lr": 0.05}, {"validation_accuracy_mean": 99.0, "done": 0})
        return [early, ({"training.lr": lr}, {"state": "finished", "validation_accuracy_mean": 50.0})]

    monkeypatch.setattr("rayfl.runtime.trials.search", drawn)
    monkeypatch.setattr(Runner, "allocate", lambda self, runs, first: Allocation(1, 0))

    def run(self: Runner, title: str, runs: Any, chosen_by: str = "") -> None:
        assert not self.stopped

    monkeypatch.setattr(Runner, "run", run)
    return found


def rates(study: Study) -> dict[str, float]:
    return {run.method: run.config.training.lr for run in study.results.runs}


def test_a_search_that_has_ended_is_not_repeated(tmp_path: Path, searches: list[str]) -> None:
    """Were it repeated, it could choose otherwise, and all runs of the study would be new ones."""
    first = run(tmp_path, inline=False, tune=DRAWN)
    assert searches == ["FedAvg"]  # the other method sets its rate itself
    assert rates(first) == {"FedAvg": pytest.approx(0.2), "fixed": 0.05}
    assert [each["chosen"] for each in first.tuned] == [False, True]
    again = run(tmp_path, inline=False, tune=DRAWN)
    assert rates(again) == rates(first)
    assert again.tuned == first.tuned
    # A study that grows by seeds, methods or numbers searches no more; another space is another search.
    grown = {**TUNED["methods"], "SOLO": {"algorithm": "solo"}}
    assert rates(run(tmp_path, inline=False, tune=DRAWN, methods=grown, seeds=[0, 1, 2]))["FedAvg"] == (
        pytest.approx(0.2)
    )
    assert searches == ["FedAvg", "SOLO"]
    run(tmp_path, inline=False, tune={**DRAWN, "samples": 3})
    assert searches == ["FedAvg", "SOLO", "FedAvg"]


def test_a_dry_run_knows_what_was_searched(tmp_path: Path, searches: list[str]) -> None:
    values = {**TUNED, "tune": DRAWN}
    study = take(values, tmp_path, settings=[f"output.root={tmp_path / 'runs'}"])
    assert [(run.method, run.seed) for run in first_trials(study)] == [("FedAvg", 100)]
    execute(prepare(study), tmp_path / "out", jobs=2)
    assert first_trials(study) == []
    lrs = {run.method: run.config.training.lr for run in as_chosen(prepare(study))}
    assert lrs == {"FedAvg": pytest.approx(0.2), "fixed": 0.05}
    for damaged in ("", "[]", '{"tried": 3}', '{"tried": [{}]}', '{"tried": []}'):
        (kept,) = (tmp_path / "runs" / "searches").iterdir()
        kept.write_text(damaged)
        assert len(first_trials(study)) == 1, damaged


def test_settings_that_are_invalid_together_fail_with_their_reason(tmp_path: Path) -> None:
    study = take({**TUNED, "tune": DRAWN}, tmp_path, settings=[f"output.root={tmp_path / 'runs'}"])
    work = Work(study, "FedAvg", str(tmp_path / "stop"), {"backend": "inline"})
    report = work(({"training.lr": -1.0}, lambda numbers: None))
    assert (report["state"], report["validation_accuracy_mean"]) == ("failed", -math.inf)
    assert "training.lr" in report["error"]


def test_a_search_is_estimated_and_needs_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight trials with two seeds, each of 5 seconds and 2 for every round."""
    cost = _Cost(once=5.0, of_round=2.0, disk=1e6, disk_of_round=1e3)
    monkeypatch.setattr("rayfl.study.estimate._timed_cost", lambda run: (cost, ""))
    values = {**TUNED, "tune": {**DRAWN, "samples": 8, "seeds": [100, 101]}}
    study = take(values, tmp_path, settings=[f"output.root={tmp_path / 'runs'}", "rounds=10"])
    runs, time, disk = estimate_search(study, jobs=2)
    assert runs == "at most 16 runs; 160 rounds"
    assert time.startswith("about 6 min 40 s of work, 3 min 20 s with 2 at a time (an estimate: a round of")
    assert disk == "about 16.2 MB of disk"
    with pytest.raises(ConfigError, match=r"^inline: a search needs Ray"):
        check_places(prepare(study), tmp_path / "out", True, None)
    check_places(prepare(study), tmp_path / "out", False, None)


def test_a_stopped_or_failed_search_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, "allocate", lambda self, runs, first: Allocation(1, 0))
    for last in ({"state": "stopped"}, {"error": "the process of the trial died: a"}):
        told: list[Any] = [({"training.lr": 0.1}, last)]
        if "error" not in last:
            told.append(({"training.lr": 0.2}, {"state": "finished", "validation_accuracy_mean": 50.0}))
        monkeypatch.setattr("rayfl.runtime.trials.search", lambda *given, told=told: told)
        monkeypatch.setattr(Runner, "run", lambda self, title, runs, chosen_by="": None)
        with pytest.raises(ConfigError, match="no combination") if "error" in last else nullcontext():
            run(tmp_path, inline=False, tune=DRAWN)
        assert not (tmp_path / "runs" / "searches").exists()

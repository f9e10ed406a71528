"""Whole studies on small real data, in this process: what runs, what is found again, what is written."""

from __future__ import annotations

import json
import math
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import rayfl
from rayfl import plugins
from rayfl.algorithms import ServerState
from rayfl.data import DATASETS
from rayfl.errors import ClientError, ConfigError, RayflError
from rayfl.events import RoundDone
from rayfl.report.methods import averaged, of_clients
from rayfl.rundir import RunDirectory
from rayfl.runtime.resources import Node
from rayfl.servers import testing
from rayfl.servers.driver import Driver
from rayfl.statistics import mean_interval
from rayfl.study import Study, Watch, execute, prepare, take
from rayfl.study import tables as study_tables
from rayfl.study.estimate import _Cost, estimate
from rayfl.study.methods import MethodsAt
from rayfl.study.page import page_of
from rayfl.study.plan import PlannedRun, key_of, plan
from rayfl.study.preparation import check_groups, judge
from rayfl.study.results import Results, better, known_numbers, numbers_of, title_of
from rayfl.study.running import Outcome, allocate, directory_of, divergence_of, unfinished
from rayfl.study.study import check_folder
from tests.runs import TASKS

DRIFT = {"name": "drift", "round": 1, "fraction": 0.5, "kind": "permuted_labels"}

SMALL: dict[str, Any] = {
    "name": "small",
    "settings": {
        "rounds": 2,
        "training.epochs": 1,
        "partition": {"name": "label_skew", "clients": 6},
        "output": {"report": False, "tensorboard": False},
    },
    "methods": {"FedAvg": {"algorithm": "fedavg"}, "SOLO": {"algorithm": "solo"}},
    "grid": {"training.lr": [0.05, 0.2]},
    "seeds": [0, 1],
    "report": {"columns": ["accuracy_mean", {"rounds_to": 20}, "bytes_up"], "by": ["training.lr"]},
    "expected": [{"source": "a paper", "protocol": "with <two> models", "figures": {"SOLO": {"0.2": 90.0}}}],
    "claims": [
        "FedAvg.bytes_up > 0",
        "SOLO.bytes_up <= 0",
        "SOLO[lr=0.2].accuracy_mean - SOLO[lr=0.05].accuracy_mean > -100",
    ],
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("study")
    return run(root, root / "first")


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test brings is gone after it: Ray of later tests does not have it."""
    monkeypatch.setattr(plugins, "_loaded", {})


@pytest.fixture(autouse=True)
def no_figures(done: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matplotlib takes seconds: the first study has shown what it draws."""
    monkeypatch.setattr("rayfl.study.writing.write_figures", lambda results, folder: [])


def run(root: Path, out: Path, **changes: Any) -> Any:
    """The small study with its runs below ``root``; a list of the runs that were done is kept with it."""
    values = {**SMALL, **changes}
    prepared = prepare(take(values, root, settings=[f"output.root={root / 'runs'}"]))
    began: list[str] = []
    watch = Watch(stage=lambda stage: began.extend(run.title for run in stage.runs))
    study = execute(prepared, out, inline=True, watch=watch)
    return study, began


def test_all_combinations_run_and_pair_by_seed(done: Any) -> None:
    study, began = done
    assert len(began) == 8
    assert study.results.finished == 8
    frame = study.runs
    assert frame.groupby(["method", "training.lr"]).size().tolist() == [2, 2, 2, 2]
    environments = [json.loads((Path(p) / "environment.json").read_text())["clients"] for p in frame["path"]]
    by_seed = pd.Series(environments).groupby(frame["seed"].to_numpy()).nunique()
    assert by_seed.tolist() == [1, 1]  # one division of the data among clients for each seed


def test_accuracies_of_groups_are_those_of_the_models_that_a_column_names(tmp_path: Path) -> None:
    clients = {"group": [0, 0, 1], "local_accuracy_last": [90.0, 80.0, None]}
    pd.DataFrame(clients).to_csv(tmp_path / "clients.csv", index_label="client")
    groups = [{"id": 0, "accuracy_mean": 50.0}, {"id": 1, "accuracy_mean": None}]
    (tmp_path / "summary.json").write_text(json.dumps({"by_group": groups}))
    prefixes = ("", "local_", "finetuned_")
    found = numbers_of(tmp_path, [f"{prefix}accuracy_group_{i}" for prefix in prefixes for i in (0, 1)])
    assert (found["accuracy_group_0"], found["local_accuracy_group_0"]) == (50, 85)
    assert np.isnan([found[f"{prefix}accuracy_group_1"] for prefix in prefixes[1:]]).all()
    assert np.isnan(found["finetuned_accuracy_group_0"])
    assert title_of("local_accuracy_group_0") == "accuracy of group 0 (%), models as clients trained them"


def test_targets_are_those_of_the_models_that_a_column_names(tmp_path: Path) -> None:
    rounds = {
        "accuracy_mean": [None, 40.0, 60.0, 70.0],
        "local_accuracy_mean": [None, 70.0, 75.0, 60.0],
        "bytes_up": [10, 10, 20, 20],
    }
    pd.DataFrame(rounds).to_csv(tmp_path / "rounds.csv", index_label="round")
    (tmp_path / "summary.json").write_text("{}")
    names = [
        "rounds_to_60",
        "local_rounds_to_60",
        "local_bytes_to_72.5",
        "local_rounds_to_80",
        "common_rounds_to_1",
    ]
    found = numbers_of(tmp_path, names)
    assert list(found.values())[:3] == [3, 2, 40]
    assert np.isnan(found["local_rounds_to_80"])
    assert "common_rounds_to_1" not in found  # it was not measured
    assert title_of("local_rounds_to_60") == "rounds to 60 %, models as clients trained them"
    assert better("local_bytes_to_72.5") == "less"


def test_numbers_are_those_of_the_runs(done: Any) -> None:
    study, _ = done
    row = study.runs.iloc[0]
    summary = json.loads((Path(row["path"]) / "summary.json").read_text())
    assert row["accuracy_mean"] == summary["accuracy_mean"]
    rounds = pd.read_csv(Path(row["path"]) / "rounds.csv")
    reached = np.flatnonzero(rounds["accuracy_mean"] >= 20)
    assert row["rounds_to_20"] == reached[0] + 1 if len(reached) else np.isnan(row["rounds_to_20"])
    table = study.table
    cell = table[(table.method == "SOLO") & (table["training.lr"] == 0.2) & (table.column == "accuracy_mean")]
    values = study.runs.query("method == 'SOLO' and `training.lr` == 0.2")["accuracy_mean"]
    expected = mean_interval(values)
    assert cell[["mean", "low", "high", "seeds"]].iloc[0].tolist() == [
        expected.mean,
        expected.low,
        expected.high,
        2,
    ]
    assert cell["published: a paper"].iloc[0] == 90.0


def test_every_published_figure_is_shown(done: Any) -> None:
    """Also of a number that the report does not name, and of several sources."""
    study, _ = done
    expected = [
        {"source": "a paper", "figures": {"SOLO": 90.0}},
        {"source": "another", "figures": {"SOLO": 80.0, "FedAvg": 70.0}},
        {"source": "a paper", "column": "loss_mean", "figures": {"FedAvg": 0.5}},
    ]
    file = take({**SMALL, "claims": [], "expected": expected}, study.folder)
    results = Results(file, study.results.runs, prepare(file).columns, {})
    table = study_tables.main_table(results, tall=True)
    shown = ("mean accuracy (%)", "a paper", "another", "rounds to 20 %", "sent up", "loss", "a paper")
    assert table.header == ("method", "lr", *shown)
    assert table.rows[0][:2] == ("FedAvg", "0.05")
    assert [table.rows[0][place] for place in (3, 4, 8)] == ["–", "70.0", "0.50"]
    frame = study_tables.tidy(results)
    of_solo = frame[(frame.column == "accuracy_mean") & (frame.method == "SOLO")]
    assert set(of_solo["published: a paper"]) == {90.0}
    assert set(of_solo["published: another"]) == {80.0}
    assert "loss_mean" in set(frame.column)


def test_differences_of_percentages_are_points(done: Any) -> None:
    table = study_tables.comparison_table(done[0].results)
    assert table is not None
    assert "mean accuracy (points), difference" in table.header


def test_claims_are_judged_at_every_point(done: Any) -> None:
    study, _ = done
    assert [(claim["verdict"], claim.get("at")) for claim in study.claims] == [
        ("holds", {"training.lr": "0.05"}),
        ("holds", {"training.lr": "0.2"}),
        ("holds", {"training.lr": "0.05"}),
        ("holds", {"training.lr": "0.2"}),
        ("holds", None),  # it names its points itself
    ]
    assert study.verdict == "holds"


def test_everything_is_written(done: Any) -> None:
    study, _ = done
    names = {path.name for path in study.folder.iterdir()}
    assert {"runs.csv", "table.csv", "table.md", "table.tex", "claims.json", "study.yaml", "figures"} <= names
    figures = {path.name for path in (study.folder / "figures").iterdir()}
    assert {
        "accuracy-0.05.svg",
        "accuracy-0.2.pdf",
        "bytes-0.2.svg",
        "clients-0.2.svg",
        "trade_off-0.2.svg",
    } <= figures
    markdown = (study.folder / "table.md").read_text()
    assert "| method | mean accuracy (%), lr 0.05 | a paper, lr 0.05 |" in markdown
    assert "Holm" in markdown
    assert r"\begin{tabular}{lrr" in (study.folder / "table.tex").read_text()
    assert json.loads((study.folder / "claims.json").read_text())["verdict"] == "holds"
    assert "holds" in study._repr_html_()
    assert "with &lt;two&gt; models" in study._repr_html_()
    assert len(repr(study)) < 300


def test_results_of_an_earlier_state_of_the_study_do_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(results: Results, folder: Path) -> list[Path]:
        paths = [folder / f"accuracy-{point['training.lr']}.svg" for point in results.points]
        folder.mkdir(exist_ok=True)
        for path in paths:
            path.touch()
        return paths

    monkeypatch.setattr("rayfl.study.writing.write_figures", drawn)
    folder = tmp_path / "out"
    few: dict[str, Any] = {"methods": {"SOLO": {"algorithm": "solo"}}, "seeds": 0, "claims": []}
    few |= {"expected": [], "report": {}}
    run(tmp_path, folder, grid={"training.lr": [0.05, 0.2]}, **few)
    (folder / "figures" / "accuracy-mine.svg").touch()
    (folder / "tuned.json").touch()  # as if it had once been tuned
    run(tmp_path, folder, grid={"training.lr": [0.2]}, **few)
    names = {path.name for path in (folder / "figures").glob("*.svg")}
    assert names == {"accuracy-0.2.svg", "accuracy-mine.svg"}  # the latter is the user's
    assert not (folder / "tuned.json").exists()


def test_the_page_has_the_numbers_of_all_points(done: Any) -> None:
    study, _ = done
    shown = page_of(study)
    (chart,) = next(section.charts for section in shown.sections if section.title == "Over rounds")
    assert [choice.label for choice in chart.selectors[0].choices] == ["lr 0.05", "lr 0.2"]
    source = chart.option["dataset"][1]["source"]  # of the second method
    runs = study.runs.query("method == 'SOLO' and `training.lr` == 0.2")
    means = [pd.read_csv(Path(path) / "rounds.csv")["accuracy_mean"] for path in runs["path"]]
    assert source["accuracy_mean @1"] == pytest.approx(np.mean(means, axis=0), abs=0.01)
    assert source["round @0"] == [1, 2]
    html = (study.folder / "study.html").read_text()
    assert len(html) < 8e6
    assert "SOLO.bytes_up &lt;= 0" in html


def test_the_page_works_in_a_browser(done: Any) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (the dev extra)")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium: none on PATH")
    study, _ = done
    wrong: list[str] = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": 500, "height": 900})
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        tab.goto((study.folder / "study.html").as_uri())
        tab.evaluate("document.querySelectorAll('[data-chart]').forEach(rayfl.open)")
        encoded = "rayfl.charts[0].chart.getOption().series[1].encode.y"
        assert tab.evaluate(encoded) == "accuracy_mean @0"
        tab.locator("[data-chart]").first.locator("[data-selector=at]").select_option("lr 0.2")
        assert tab.evaluate(encoded) == "accuracy_mean @1"
        assert tab.evaluate("document.documentElement.scrollWidth") <= 500
        browser.close()
    assert wrong == []


def test_figures_for_notebooks(done: Any) -> None:
    study, _ = done
    figure = study.plot.accuracy({"training.lr": "0.2"})
    assert all(tick == int(tick) for tick in figure.axes[0].get_xticks())  # rounds
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[0].lines}
    runs = study.runs.query("method == 'SOLO' and `training.lr` == 0.2")
    means = [pd.read_csv(Path(path) / "rounds.csv")["accuracy_mean"] for path in runs["path"]]
    assert lines["SOLO"] == pytest.approx(np.mean(means, axis=0))
    short = study.plot.accuracy({"lr": 0.2})  # as in claims
    assert [line.get_ydata().tolist() for line in short.axes[0].lines] == [y.tolist() for y in lines.values()]
    with pytest.raises(rayfl.RayflError, match=r"at: training\.lr has no point '0\.3'; valid: 0\.05, 0\.2"):
        study.plot.clients({"training.lr": "0.3"})
    with pytest.raises(rayfl.RayflError, match="at: the grid has no axis 'momentum'"):
        study.plot.clusters({"momentum": "0.3"})


def test_a_study_gives_its_runs_and_their_models(done: Any) -> None:
    study, _ = done
    runs = study.runs.query("method == 'SOLO' and `training.lr` == 0.2 and seed == 1")
    result = study.result("SOLO", seed=1, at={"lr": 0.2})
    assert str(result.path) == runs["path"].item()
    assert study.result("FedAvg").config.seed == 0
    x = DATASETS["digits"]().load(Path()).x_test[:4]
    where: dict[str, Any] = {"client": 3, "seed": 1, "at": {"lr": 0.2}}
    assert isinstance(study.model("SOLO", **where), torch.nn.Module)
    np.testing.assert_array_equal(study.predict(x, "SOLO", **where), result.predict(x, client=3))
    for arguments, text in (
        (("SOLLO",), "method: no method 'SOLLO'; did you mean 'SOLO'?"),
        (("SOLO", 7), "seed: no run with seed 7; valid: 0, 1"),
        (("SOLO", 0, {"lr": 3}), "at: training.lr has no point '3'; valid: 0.05, 0.2"),
    ):
        with pytest.raises(rayfl.RayflError) as raised:
            study.result(*arguments)
        assert str(raised.value) == text


def test_the_map_of_each_method_s_clusters(tmp_path: Path) -> None:
    changes = {
        "methods": {
            "FedAvg": {"algorithm": "fedavg"},
            "PACFL": {"algorithm": "pacfl", "clustering.n_clusters": 3},
        },
        "settings": {**SMALL["settings"], "rounds": 1, "partition": {"name": "tasks", "tasks": TASKS}},
        "grid": {},
        "seeds": [0],
        "claims": [],
        "expected": [],
        "report": {},
    }
    study, _ = run(tmp_path, tmp_path / "out", **changes)
    [path] = (tmp_path / "runs").glob("*pacfl*")
    labels = json.loads((path / "clusters.json").read_text())["timeline"][-1]["labels"]
    axes = study.plot.clusters().axes
    assert [each.get_title().splitlines()[0] for each in axes] == ["FedAvg", "PACFL"]
    assert len(axes[0].collections) == 1  # one model for all
    drawn = [points.get_offsets() for points in axes[1].collections]
    assert sorted(map(len, drawn)) == sorted(np.bincount(labels)[np.bincount(labels) > 0])


def test_a_study_that_grows_runs_only_what_is_new(done: Any, tmp_path: Path) -> None:
    study, _ = done
    root = study.folder.parent
    _, again = run(root, tmp_path / "again")
    assert again == []
    prox = {**SMALL["methods"], "Prox": {"algorithm": "fedprox", "local.mu": 0.1}}
    grid = {"training.lr": [0.2]}
    grown, began = run(root, tmp_path / "grown", methods=prox, grid=grid, claims=[], name="another-name")
    assert began == [f"Prox, lr 0.2, seed {seed}" for seed in (0, 1)]
    assert grown.results.finished == 6


@pytest.mark.parametrize(
    "damage",
    [
        "cut",
        "no summary",
        "no clients",
        *(
            pytest.param(d, marks=pytest.mark.slow)
            for d in ("gone", "empty", "half a summary", "half the clients")
        ),
    ],
)
def test_a_run_whose_files_are_damaged_is_continued(done: Any, tmp_path: Path, damage: str) -> None:
    """From its last checkpoint, which writes them again."""
    root = shutil.copytree(done[0].folder.parent, tmp_path / "root")
    path = min((root / "runs").glob("digits-fedavg-seed1-*"))
    before = (path / "rounds.csv").read_bytes()
    if "summary" in damage:
        (path / "summary.json").write_text("{}" if damage == "no summary" else "{")
    elif "clients" in damage:
        clients = (path / "clients.csv").read_bytes()
        (path / "clients.csv").write_bytes(b"\0" * 400 if damage == "no clients" else clients[:-20])
    elif damage == "gone":
        (path / "rounds.csv").unlink()
    else:
        (path / "rounds.csv").write_bytes(b"" if damage == "empty" else before[:-5])
    study, began = run(root, tmp_path / "again")
    assert len(began) == 1
    assert study.results.finished == 8
    assert (path / "rounds.csv").read_bytes() == before
    assert study.table.equals(done[0].table)


def test_runs_that_do_not_differ_are_one(tmp_path: Path) -> None:
    """FedAvg has no use for a number of clusters: it runs once for the whole axis."""
    methods = {"FedAvg": {"algorithm": "fedavg"}, "PACFL": {"algorithm": "pacfl"}}
    prepared = prepare(
        take(
            {
                **SMALL,
                "methods": methods,
                "grid": {"clustering.n_clusters": [2, 3]},
                "report": {},
                "claims": [],
                "expected": [],
            },
            tmp_path,
            settings=[f"output.root={tmp_path}"],
        )
    )
    assert len(prepared.runs) == 8
    assert len(unfinished(prepared.runs)) == 2 * (1 + 2)


def test_the_key_knows_what_determines_a_run() -> None:
    config = rayfl.load({"rounds": 3})
    same = rayfl.load(
        {"rounds": 3, "name": "x", "execution": {"backend": "inline"}, "output": {"root": "/tmp/x"}}
    )
    assert key_of(config) == key_of(same)
    for other in ("rounds=4", "seed=1", "training.lr=0.5", "execution.block_size=3", "evaluation.every=2"):
        assert key_of(config) != key_of(rayfl.load(config, [other])), other
    # A run that left clients out is none that had to have all.
    assert key_of(config) != key_of(rayfl.load(config, ["execution.tolerate_failures=1"]))


def test_runs_from_before_a_setting_was_there_or_had_its_name_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their keys are hashes of settings without it, or with its former name."""
    told: list[str] = []
    dumps = json.dumps
    monkeypatch.setattr(
        json, "dumps", lambda *given, **named: told.append(dumps(*given, **named)) or told[-1]
    )
    config = rayfl.load({"rounds": 3, "algorithm": {"name": "cfl", "criteria": "relative"}})
    assert key_of(config) != key_of(rayfl.load(config, ["training.precision=bf16"]))
    assert key_of(config) != key_of(rayfl.load(config, ["aggregation=median"]))
    default, reduced, _, median = (text for text in told if '"rounds": 3' in text)
    assert "precision" not in default
    assert "aggregation" not in default
    assert '"aggregation": {"name": "median"}' in median
    assert '"precision": "bf16"' in reduced
    assert '"norms": "relative", "patience": 3}' in default


def test_a_run_that_was_resumed_with_more_rounds_is_another_one(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "methods": {"FedAvg": {}},
        "report": {},
        "grid": {},
        "seeds": 0,
        "claims": [],
        "expected": [],
    }
    first, _ = run(tmp_path, tmp_path / "out", **changes)
    folder = Path(first.runs["path"][0])
    rayfl.resume(folder, ["rounds=3"])
    again, began = run(tmp_path, tmp_path / "out", **changes)
    assert began == ["FedAvg, seed 0"]
    assert again.results.finished == 0
    (error,) = again.failed.values()
    assert "was resumed with 3 rounds, but this run has 2; move that directory" in error
    shutil.move(folder, tmp_path / "longer")
    assert run(tmp_path, tmp_path / "out", **changes)[0].results.finished == 1


def test_an_axis_keeps_its_column_where_runs_have_a_number_of_that_name(tmp_path: Path) -> None:
    grid = {"clients": {"few": {"partition.clients": 4}, "many": {"partition.clients": 6}}}
    study, _ = run(tmp_path, tmp_path / "out", grid=grid, seeds=0, claims=[], expected=[], report={})
    assert study.runs["clients"].tolist() == ["few", "few", "many", "many"]


def test_runs_without_their_tables_are_left_out_of_figures(done: Any, tmp_path: Path) -> None:
    study, _ = done
    results = Results(study.results.study, study.results.runs, [], {})
    point, path = results.points[0], directory_of(study.results.runs[0])

    def tested() -> int:
        methods = MethodsAt(results, point)
        assert any(len(averaged(methods.runs(label))) for label in methods.names)
        return sum(len(of_clients(methods.runs(label))) for label in methods.names)

    whole = tested()
    for name in ("rounds.csv", "clients.csv"):
        kept = (path / name).read_bytes()
        (path / name).write_bytes(b"")
        try:
            assert tested() == whole - 6
            with pytest.raises(RayflError, match=rf"{name}: cannot be read"):
                RunDirectory(path).read_frame(name)
        finally:
            (path / name).write_bytes(kept)


def test_what_was_stopped_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    values = {
        **SMALL,
        "methods": {"FedAvg": {"algorithm": "fedavg"}},
        "grid": {},
        "seeds": 0,
        "claims": [],
        "expected": [],
        "report": {},
    }
    undisturbed, _ = whole(values, tmp_path / "a")

    def stop(run: Any, event: Any) -> None:
        if isinstance(event, RoundDone) and event.round == 1:
            next((tmp_path / "b").glob("**/out")).joinpath(f".stop-{__import__('os').getpid()}").touch()

    first, _ = whole(values, tmp_path / "b", Watch(event=stop))
    assert first.stopped
    assert first.results.finished == 0
    assert (first.folder / "table.md").is_file()
    assert not (first.folder / "study.html").exists()  # it takes seconds
    second, began = whole(values, tmp_path / "b")
    assert began == ["FedAvg, seed 0"]
    assert (second.folder / "study.html").is_file()
    hashes = [
        json.loads((Path(s.runs["path"][0]) / "summary.json").read_text())["models_sha256"]
        for s in (undisturbed, second)
    ]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_two_runs_stops_the_study_and_keeps_what_is_done(
    tmp_path: Path, number: signal.Signals
) -> None:
    values = {**SMALL, "grid": {}, "seeds": 0, "claims": [], "expected": [], "report": {}}
    prepared = prepare(take(values, tmp_path, settings=[f"output.root={tmp_path / 'runs'}", "rounds=2"]))
    assert len(prepared.runs) == 2

    def interrupt(run: Any, outcome: Any) -> None:
        if outcome.state == "finished":
            signal.raise_signal(number)

    watch = Watch(done=interrupt)
    study = execute(prepared, tmp_path / "out", inline=True, watch=watch, archive=tmp_path / "archive")
    assert study.stopped
    assert study.results.finished == len(list((tmp_path / "archive").glob("*.zip"))) == 1
    assert study.runs["state"].tolist() == ["finished", "missing"]
    assert (study.folder / "table.md").is_file()
    assert not list(study.folder.glob(".stop-*"))
    assert not execute(prepared, tmp_path / "out", inline=True, archive=tmp_path / "archive").stopped


def whole(values: dict[str, Any], root: Path, watch: Watch | None = None) -> Any:
    prepared = prepare(take(values, root, settings=[f"output.root={root / 'runs'}", "rounds=4"]))
    began: list[str] = []
    watch = watch or Watch(stage=lambda stage: began.extend(run.title for run in stage.runs))
    return execute(prepared, root / "out", inline=True, watch=watch), began


def test_a_run_that_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    methods = {"good": {"algorithm": "fedavg"}, "wild": {"algorithm": "fedavg", "training.lr": 1e30}}
    study, _ = run(
        tmp_path,
        tmp_path / "out",
        methods=methods,
        claims=["good.accuracy_mean > wild.accuracy_mean"],
        expected=[],
        grid={},
        report={},
    )
    assert list(study.failed) == ["wild, seed 0", "wild, seed 1"]
    assert "client" in study.failed["wild, seed 0"]
    assert study.runs["state"].tolist() == ["finished", "failed"] * 2
    assert study.claims[0]["verdict"] == "undecided"
    assert study.claims[0]["why"] == "2 of 2 runs failed (wild)"


def test_a_method_has_one_colour_on_the_page(tmp_path: Path) -> None:
    """Also where one before it has no numbers."""
    methods = {"wild": {"algorithm": "fedavg", "training.lr": 1e30}, "FedAvg": {"algorithm": "fedavg"}}
    methods["IFCA"] = {"algorithm": "ifca"}
    study, _ = run(
        tmp_path, tmp_path / "out", methods=methods, seeds=0, claims=[], expected=[], grid={}, report={}
    )
    drawn = [section for section in page_of(study).sections if section.charts]
    sections = {section.title: section.charts[0].option.get("series", []) for section in drawn}
    colours = [
        {part["name"]: part["itemStyle"]["color"] for part in sections[title] if part["type"] == kind}
        for title, kind in (("Over rounds", "line"), ("Accuracy against bytes", "scatter"))
    ]
    assert colours[0].pop("wild") == "$0"
    assert colours[0] == colours[1] == {"FedAvg": "$1", "IFCA": "$2"}


def test_a_method_may_replace_a_number_that_is_impossible_for_it(tmp_path: Path) -> None:
    values = {
        **SMALL,
        "settings": {"training": {"momentum": 0.9}, "rounds": 1},
        "methods": {
            "FedAvg": {"algorithm": "fedavg"},
            "own": {"algorithm": "per_fedavg", "training.momentum": 0},
        },
        "grid": {}, "claims": [], "expected": [], "report": {},
    }  # fmt: skip
    runs = prepare(take(values, tmp_path), check_data=False).runs
    assert {run.method: run.config.training.momentum for run in runs} == {"FedAvg": 0.9, "own": 0}
    values["settings"]["algorithm.clusters"] = -1  # also in the section of the algorithm
    values["methods"]["IFCA"] = {"algorithm": {"name": "ifca", "clusters": 2}}
    assert len(prepare(take(values, tmp_path), check_data=False).runs) == len(runs) // 2 * 3
    values["methods"]["own"] = {"algorithm": "per_fedavg"}
    with pytest.raises(
        ConfigError, match=r"settings: config: training.momentum 0.9 makes no sense with per_fedavg"
    ):
        prepare(take(values, tmp_path), check_data=False)


def test_a_run_that_diverged_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the same folder, and not with the archive elsewhere; but once its directory is removed."""
    methods = {"good": {"algorithm": "fedavg"}, "wild": {"algorithm": "fedavg", "training.lr": 1e30}}
    values = {**SMALL, "methods": methods, "grid": {}, "seeds": 0, "claims": [], "expected": [], "report": {}}

    def again(folder: str) -> tuple[Study, list[str]]:
        prepared = prepare(take(values, tmp_path, settings=[f"output.root={tmp_path / folder}"]))
        began: list[str] = []
        watch = Watch(stage=lambda stage: began.extend(run.title for run in stage.runs))
        out, archive = tmp_path / "out", tmp_path / "archive"
        return execute(prepared, out, inline=True, watch=watch, archive=archive), began

    first, began = again("runs")
    assert began == ["good, seed 0", "wild, seed 0"]
    second, began = again("runs")
    assert began == []
    elsewhere, began = again("elsewhere")
    assert began == []
    (error,) = first.failed.values()
    assert "FloatingPointError" in error
    place = tmp_path / "runs" / directory_of(first.results.runs[1]).name
    again_text = f"{error} (an earlier attempt; to repeat it, remove {place}, and its file from the archive)"
    assert second.failed == {"wild, seed 0": again_text}
    assert elsewhere.failed["wild, seed 0"].startswith(error)
    assert elsewhere.runs["state"].tolist() == ["finished", "failed"]
    prepared = prepare(take(values, tmp_path, settings=[f"output.root={tmp_path / 'runs'}"]))
    assert estimate(prepared.runs).lines() == ["2 runs: 1 finished, 1 diverged, 0 to resume, 0 new; 0 rounds"]

    wild = next(run for run in prepared.runs if run.method == "wild")
    assert divergence_of(wild)
    for ask in (
        lambda: second.result("wild"),
        lambda: rayfl.compare([second.result("good"), directory_of(wild)]),
    ):
        with pytest.raises(ConfigError, match=r"did not finish: client .* failed in round 1"):
            ask()
    with monkeypatch.context() as patch:  # the record is that of the last attempt
        patch.setattr(ClientError, "diverged", False)
        with pytest.raises(ClientError):
            rayfl.resume(directory_of(wild))
    assert not divergence_of(wild)
    shutil.rmtree(directory_of(wild))
    next((tmp_path / "archive").glob(f"*{wild.key}.zip")).unlink()
    assert again("runs")[1] == ["wild, seed 0"]


def test_a_signal_after_the_last_run_of_a_stage_stops_the_study(tmp_path: Path) -> None:
    tune = {"training.lr": [0.05, 0.2], "seeds": [100]}
    methods = {"FedAvg": {"algorithm": "fedavg"}}
    values = {**SMALL, "methods": methods, "tune": tune, "grid": {}, "seeds": 0, "claims": []}
    values |= {"expected": [], "report": {}}
    prepared = prepare(take(values, tmp_path, settings=[f"output.root={tmp_path / 'runs'}"]))
    ended: list[str] = []

    def interrupt(run: Any, outcome: Any) -> None:
        ended.append(outcome.state)
        if len(ended) == 2:
            signal.raise_signal(signal.SIGINT)

    study = execute(prepared, tmp_path / "out", inline=True, watch=Watch(done=interrupt))
    assert study.stopped
    assert ended == ["finished"] * 2
    assert not execute(prepared, tmp_path / "out", inline=True).stopped


GROUPED: dict[str, Any] = {"name": "relabelled", "clients": 6, "clusters": 2}


@pytest.mark.parametrize(
    ("partition", "more", "column", "answer"),
    [
        (GROUPED, {}, "accuracy_group_1", ""),
        (
            GROUPED,
            {},
            "accuracy_group_2",
            "no client is in group 2; valid: accuracy_group_0, accuracy_group_1",
        ),
        (GROUPED, {}, "accuracy_group_01", "no run has a number named 'accuracy_group_01'"),
        ({**GROUPED, "clients": 14, "clusters": 14}, {}, "accuracy_group_1", "14 planted groups; at most 12"),
        ({"name": "label_skew", "clients": 6}, {}, "accuracy_group_0", "no client is in group 0; no planted"),
        (GROUPED, {}, "ari", ""),
        ({"name": "label_skew", "clients": 6}, {}, "ari", "no run measures ari"),
        ({"name": "label_skew", "clients": 6}, {}, "group_var_within", "no run measures group_var_within"),
        (GROUPED, {}, "perplexity_mean", "no run measures perplexity_mean: its data are no texts"),
        # Clients that drift form a new group.
        (GROUPED, {"events": [DRIFT]}, "accuracy_group_2", ""),
        # A point of the grid with too many groups does not concern the others.
        (GROUPED, {"grid": {"n": {"few": {}, "many": {"partition.clusters": 14}}}}, "accuracy_group_1", ""),
    ],
)
@pytest.mark.parametrize("named", ["claim", "column"])
def test_groups_that_no_run_has_are_refused(
    tmp_path: Path, partition: Any, more: dict[str, Any], column: str, answer: str, named: str
) -> None:
    values = {
        **SMALL,
        "settings": {"rounds": 2, "partition": partition, "events": more.get("events", [])},
        "grid": more.get("grid", {}),
        "expected": [],
        "claims": [f"FedAvg.{column} > 0"] if named == "claim" else [],
        "report": {"columns": ["accuracy_mean", *([column] if named == "column" else [])]},
    }
    if "grid" in more:
        values["settings"]["partition"] = {**partition, "clients": 14}

    def check() -> None:
        check_groups(prepare(take(values, tmp_path)))

    if not answer:
        return check()
    with pytest.raises(ConfigError, match=answer) as raised:
        check()
    assert str(raised.value).startswith("claims: 'FedAvg." if named == "claim" else "report.columns: ")


def test_a_run_that_finished_where_this_machine_does_not_look_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a node that has another folder under the same path."""

    def elsewhere(jobs: Any, watch: Any) -> Any:
        return ((job, Outcome("finished", f"/elsewhere/{job.name}")) for job in jobs)

    monkeypatch.setattr("rayfl.study.study.run_inline", elsewhere)
    study, _ = run(tmp_path / "runs", tmp_path / "out")
    assert len(study.failed) == 8
    assert all("a node that does not write to the same folder" in error for error in study.failed.values())


def test_equal_data_for_all_methods_even_if_some_are_left_out(tmp_path: Path) -> None:
    """FLIS's server holds out samples, so all clients have fewer."""
    methods = {"FedAvg": {"algorithm": "fedavg"}, "FLIS": {"algorithm": "flis_dc"}}
    prepared = prepare(take({**SMALL, "methods": methods, "claims": [], "expected": []}, tmp_path))
    assert len({run.config.data.server_share for run in prepared.runs}) == 1
    assert prepared.held_out.startswith("FLIS uses training samples that the server holds out")
    for same in ({"FedAvg": methods["FedAvg"]}, {"FLIS": methods["FLIS"]}):
        assert not prepare(take({**SMALL, "methods": same, "claims": [], "expected": []}, tmp_path)).held_out


def test_a_part_of_the_methods_has_the_same_data_as_the_whole_study(tmp_path: Path) -> None:
    methods = {"FedAvg": {"algorithm": "fedavg"}, "FLIS": {"algorithm": "flis_dc"}}
    values = {**SMALL, "methods": methods, "claims": [], "expected": []}
    whole, part = (plan(take(values, tmp_path, only=only)) for only in ([], ["FedAvg"]))
    assert {run.method for run in part} == {"FedAvg"}
    assert [run.key for run in part] == [run.key for run in whole if run.method == "FedAvg"]


def test_a_claim_that_fixes_the_point_of_one_method_is_judged_at_all_points_of_the_other(done: Any) -> None:
    study, _ = done
    claim = "SOLO[lr=0.2].accuracy_mean - FedAvg.accuracy_mean > 0"
    prepared = prepare(take({**SMALL, "claims": [claim], "expected": []}, study.folder))
    found = judge(prepared, study.results)
    by_place = study.runs.groupby(["method", "training.lr"])["accuracy_mean"].mean()
    means = [by_place["SOLO", 0.2] - by_place["FedAvg", lr] for lr in (0.05, 0.2)]
    assert [each.interval.mean for each in found] == pytest.approx(means)


def test_a_claim_of_which_a_seed_failed_is_undecided(done: Any) -> None:
    """Also where it speaks of one method: the seeds that did not diverge are no fair sample."""
    study, _ = done
    first, *others = study.results.runs
    other = rayfl.load(first.config, ["rounds=9"])
    lost = PlannedRun(first.method, first.point, first.seed, other, {})
    results = Results(study.results.study, [lost, *others], study.results.columns, {lost.key: "diverged"})
    claim = f"{first.method}.accuracy_mean > 0"
    found = judge(prepare(take({**SMALL, "claims": [claim], "expected": []}, study.folder)), results)
    assert found[0].why == "1 of 2 runs failed (FedAvg)"
    missing = Results(study.results.study, [lost, *others], study.results.columns, {})
    said = missing.why_without(first.method, first.point, first.point, "accuracy_mean")
    assert said == "1 of 2 runs is not finished (FedAvg, lr 0.05)"
    assert found[1].why != found[0].why  # at the other point nothing is lost


def test_a_target_that_no_run_reached_decides_as_far_as_it_can(done: Any) -> None:
    study, _ = done
    claims = {
        "FedAvg.rounds_to_99 < 2": "fails",
        "FedAvg.rounds_to_99 + 3 <= 5": "fails",
        "FedAvg.rounds_to_99 < 50": "undecided",  # two rounds were run
        "FedAvg.rounds_to_99 > 1": "holds",
        "-1 * FedAvg.rounds_to_99 > 0": "fails",
        "FedAvg.rounds_to_99 ~ 1 +- 1": "fails",
        "FedAvg.rounds_to_99 - SOLO.rounds_to_20 > 0": "undecided",
        "FedAvg.bytes_to_99 > 1": "undecided",
    }
    values = {**SMALL, "report": {"columns": ["rounds_to_99", "rounds_to_1"]}, "expected": []}
    prepared = prepare(take({**values, "claims": [*claims]}, study.folder))
    results = Results(prepared.study, study.results.runs, prepared.columns, {})
    for verdict, each in zip(np.repeat([*claims.values()], 2), judge(prepared, results), strict=True):
        assert each.verdict == verdict, each.statement.text
        assert "2 of 2 runs never reached it (FedAvg)" in each.why
    table = study_tables.main_table(results)
    assert {row[2:] for row in table.rows if row[0] == "FedAvg"} == {("never", "1")}
    assert "never: no run reached this accuracy" in table.caption
    alone = Results(prepared.study, [run for run in study.results.runs if not run.seed], prepared.columns, {})
    assert {each.verdict for each in judge(prepared, alone)} == {"undecided"}  # as all claims of one seed
    first, *others = study.results.runs
    lost = PlannedRun(first.method, first.point, first.seed, rayfl.load(first.config, ["rounds=9"]), {})
    part = Results(prepared.study, [lost, *others], prepared.columns, {lost.key: "diverged"})
    assert part.least("FedAvg", first.point, "rounds_to_99") is None
    table = study_tables.main_table(part)
    assert table.rows[0][2:] == ("– (1 of 2 never)", "1 (1 of 2)")
    assert "Failed, and without numbers: 1 run of FedAvg; runs.csv says why." in table.caption
    compared = study_tables.comparison_table(part)
    assert compared is not None
    assert "are left out, however good the other's is" in compared.caption


def test_a_target_that_was_not_measured_is_not_one_that_was_never_reached(tmp_path: Path) -> None:
    rounds = pd.DataFrame({"accuracy_mean": [50.0, 60.0], "local_accuracy_mean": [None, None], "bytes_up": 1})
    rounds.to_csv(tmp_path / "rounds.csv", index_label="round")
    (tmp_path / "summary.json").write_text("{}")
    columns = ["rounds_to_60", "rounds_to_70", "local_rounds_to_60", "validation_rounds_to_60"]
    found = numbers_of(tmp_path, columns)
    assert (found["rounds_to_60"], math.isnan(found["rounds_to_70"])) == (2, True)
    assert not {"local_rounds_to_60", "validation_rounds_to_60"} & set(found)


def test_figures_of_several_protocols_have_columns_of_their_own(tmp_path: Path) -> None:
    local, served = (
        {"source": "paper", "protocol": p, "figures": {}} for p in ("local models", "served ones")
    )
    other = {"source": "thesis", "protocol": "best round", "figures": {"SOLO": 3}}
    expected = [
        {**local, "figures": {"FedAvg": 97}},
        {**served, "figures": {"FedAvg": 49, "SOLO": 90}},
        other,
    ]
    study = take({**SMALL, "grid": {}, "report": {}, "claims": [], "expected": expected}, tmp_path)
    results = Results(study, (), ["accuracy_mean"], {})
    table = study_tables.main_table(results)
    assert table.header[2:5] == ("paper, local models", "paper, served ones", "thesis")
    assert [row[2:5] for row in table.rows] == [("97.0", "49.0", "–"), ("–", "90.0", "3.0")]
    assert "Published figures are, in thesis (mean accuracy (%)): best round." in table.caption
    tidy = study_tables.tidy(results)
    assert tidy["published: paper, local models"].dropna().tolist() == [97.0]


def test_a_study_without_claims_has_no_verdict(tmp_path: Path) -> None:
    claims = ["FedAvg.bytes_up > 0", "FedAvg.bytes_up - SOLO.bytes_up > 0"]
    values = {**SMALL, "grid": {}, "report": {}, "expected": [], "claims": claims[1:]}
    prepared = prepare(take(values, tmp_path, only=["SOLO"], settings=[f"output.root={tmp_path / 'runs'}"]))
    study = execute(prepared, tmp_path / "out", inline=True)
    assert study.verdict is None
    written = json.loads((tmp_path / "out" / "claims.json").read_text())
    assert written == {"verdict": None, "claims": [], "not_checked": claims[1:]}


def test_results_of_another_study_are_not_replaced(done: Any) -> None:
    study, _ = done
    check_folder(study.folder, study.results.study)
    renamed = {f"{label}, again": method for label, method in SMALL["methods"].items()}
    same = {**SMALL, "title": "a title", "claims": [], "expected": []}
    (study.folder / "study.yaml").rename(study.folder / "kept.yaml")
    (study.folder / "study.yaml").write_text("[]")
    check_folder(study.folder, take({**same, "methods": renamed}, study.folder))
    (study.folder / "study.yaml").write_text(json.dumps(same))
    check_folder(study.folder, take({**same, "methods": renamed}, study.folder))
    (study.folder / "kept.yaml").replace(study.folder / "study.yaml")
    other = take(
        {**SMALL, "methods": {"CFL": {"algorithm": "cfl"}}, "claims": [], "expected": []}, study.folder
    )
    with pytest.raises(
        ConfigError, match=r"holds the results of another study \(of FedAvg, SOLO\); give this"
    ):
        check_folder(study.folder, other)


def test_seeds_and_overrides_come_from_the_command_line_too(tmp_path: Path) -> None:
    study = take(SMALL, tmp_path, settings=["rounds=7"], seeds="4,5")
    runs = plan(study)
    assert {run.config.rounds for run in runs} == {7}
    assert {run.seed for run in runs} == {4, 5}


@pytest.mark.parametrize(
    ("runs", "cpus", "jobs", "execution", "expected"),
    [
        (18, [2], None, {}, (2, 0)),
        (1, [2], None, {}, (1, 2)),
        (3, [16], None, {}, (3, 5)),
        (18, [8, 4, 4], None, {}, (16, 1)),
        (18, [2], 1, {}, (1, 2)),
        (18, [8], None, {"actors": 4}, (2, 4)),
        (18, [8], None, {"backend": "inline"}, (8, 0)),
        (1, [8, 8], None, {"cpus_per_actor": 3}, (1, 4)),  # an actor does not extend over nodes
    ],
)
def test_how_runs_share_a_machine(
    runs: int, cpus: list[float], jobs: int | None, execution: dict[str, Any], expected: tuple[int, int]
) -> None:
    nodes = [Node(each, 0.0) for each in cpus]
    found = allocate(runs, rayfl.load({"execution": execution}), nodes, jobs)
    assert (found.jobs, found.actors) == expected


def test_the_table_may_be_tall(done: Any) -> None:
    study, _ = done
    tall = study_tables.main_table(study.results, tall=True)
    assert tall.header[:3] == ("method", "lr", "mean accuracy (%)")
    assert len(tall.rows) == 4


def test_methods_of_a_user_s_own(tmp_path: Path) -> None:
    (tmp_path / "study_plugin.py").write_text(
        "from typing import Literal\n"
        "from rayfl.algorithms.fedavg import FedAvg\n\n"
        'class Mine(FedAvg):\n    """Mine."""\n\n    name: Literal[\'study_mine\'] = \'study_mine\'\n'
    )
    values = {
        **SMALL,
        "plugins": ["study_plugin.py"],
        "methods": {"Mine": {"algorithm": "study_mine"}},
        "grid": {},
        "seeds": 0,
        "claims": [],
        "expected": [],
        "report": {},
    }
    prepared = prepare(take(values, tmp_path, settings=[f"output.root={tmp_path}"]))
    study = execute(prepared, tmp_path / "out", inline=True)
    assert study.results.finished == 1
    assert (directory_of(study.results.runs[0]) / "plugins.json").is_file()


def test_data_that_are_not_there_are_refused_before_anything_runs(tmp_path: Path) -> None:
    values = {**SMALL, "settings": {"data.name": "table", "data.path": str(tmp_path / "none.csv")}}
    with pytest.raises((ConfigError, rayfl.DataError)):
        prepare(take(values, tmp_path))


def test_the_key_knows_the_files_that_a_config_names(tmp_path: Path) -> None:
    table = tmp_path / "owners.csv"
    table.write_text("sample,client\n0,0\n1,1\n")
    values = {"partition": {"name": "file", "path": str(table)}}
    before = key_of(rayfl.load(values))
    assert key_of(rayfl.load(values)) == before
    table.write_text("sample,client\n0,1\n1,0\n\n")
    assert key_of(rayfl.load(values)) != before


def test_the_key_knows_the_images_of_a_folder(tmp_path: Path) -> None:
    values = {
        "data": {"name": "image_folder", "root": str(tmp_path / "images"), "test_fraction": 0.5},
        "output": {"root": str(tmp_path / "runs")},
    }
    for name in ("cat/1.png", "dog/1.png"):
        (tmp_path / "images" / name).parent.mkdir(parents=True)
        (tmp_path / "images" / name).write_bytes(b"12")
    (tmp_path / "runs").mkdir()
    before = key_of(rayfl.load(values))
    (tmp_path / "runs" / "a-run").mkdir()
    assert key_of(rayfl.load(values)) == before
    (tmp_path / "images/dog/2.png").write_bytes(b"12")
    assert key_of(rayfl.load(values)) != before


def test_the_key_knows_the_source_of_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "keyed_net.py"
    keys = []
    for width in (3, 4):
        source.write_text(f"from torch import nn\n\nclass Net(nn.Linear):\n    width = {width}\n")
        monkeypatch.setattr(plugins, "_loaded", {})
        sys.modules.pop("keyed_net", None)
        keys.append(key_of(rayfl.load({"model": {"name": "module", "target": f"{source}:Net"}})))
    assert keys[0] != keys[1]


def test_studies_with_other_bases_share_runs(tmp_path: Path) -> None:
    """The name of a directory is that of the run alone, also for two that begin at the same time."""
    values = {**SMALL, "claims": [], "expected": []}
    (first, *_), (second, *_) = (
        plan(take({**values, "settings": {**SMALL["settings"], "name": name}}, tmp_path))
        for name in ("a", "b")
    )
    assert directory_of(first) == directory_of(second)


def test_a_method_that_exits_is_a_run_that_failed(tmp_path: Path) -> None:
    (tmp_path / "exits_plugin.py").write_text(
        "import sys\nfrom typing import Literal\n"
        "from rayfl.algorithms.fedavg import FedAvg\n\n"
        'class Exits(FedAvg):\n    """Exits."""\n\n    name: Literal[\'study_exits\'] = \'study_exits\'\n\n'
        "    def begin(self, *given, **more):\n        sys.exit(3)\n"
    )
    methods = {"Exits": {"algorithm": "study_exits"}, "FedAvg": {"algorithm": "fedavg"}}
    values = {**SMALL, "plugins": ["exits_plugin.py"], "methods": methods, "grid": {}, "seeds": 0}
    values |= {"claims": [], "expected": [], "report": {}}
    prepared = prepare(take(values, tmp_path, settings=[f"output.root={tmp_path}"]))
    study = execute(prepared, tmp_path / "out", inline=True)
    assert study.failed == {"Exits, seed 0": "SystemExit: 3"}
    assert study.results.finished == 1


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    prepared = prepare(take({**SMALL, "claims": []}, tmp_path, settings=[f"output.root={tmp_path / 'runs'}"]))
    with pytest.raises(RayflError):
        execute(prepared, tmp_path / "out", inline=True)
    (tmp_path / "other" / "study.yaml").mkdir(parents=True)
    with pytest.raises(RayflError):
        execute(prepared, tmp_path / "other", inline=True)
    assert not (tmp_path / "runs").exists()


def test_a_refused_study_leaves_no_trace_and_the_copy_of_the_former(tmp_path: Path) -> None:
    """That no run can have so many clusters is found when the clients are given their data."""
    settings = [f"output.root={tmp_path / 'runs'}"]
    bad = {**SMALL["methods"], "PACFL": {"algorithm": "pacfl", "clustering.n_clusters": 1000}}
    refused = prepare(take({**SMALL, "methods": bad}, tmp_path, settings=settings))
    with pytest.raises(ConfigError, match="PACFL"):
        execute(refused, tmp_path / "out", inline=True)
    assert list(tmp_path.iterdir()) == []
    execute(prepare(take({**SMALL, "seeds": 0}, tmp_path, settings=settings)), tmp_path / "out", inline=True)
    former = (tmp_path / "out" / "study.yaml").read_text()
    with pytest.raises(ConfigError, match="PACFL"):
        execute(refused, tmp_path / "out", inline=True)
    assert (tmp_path / "out" / "study.yaml").read_text() == former


def test_an_estimate_says_what_could_not_be_timed(tmp_path: Path) -> None:
    values = {**SMALL, "claims": [], "expected": [], "grid": {}, "report": {}, "seeds": 0}
    methods = {"good": {"algorithm": "fedavg"}, "wild": {"algorithm": "fedavg", "training.lr": 1e30}}
    settings = {**SMALL["settings"], "rounds": 30, "events": [{"name": "leave", "round": 20, "clients": 1}]}
    prepared = prepare(
        take(
            {**values, "methods": methods, "settings": settings},
            tmp_path,
            settings=[f"output.root={tmp_path}"],
        )
    )
    found = estimate(prepared.runs)
    assert found.seconds > 0
    assert "a round of wild failed and is not counted: " in found.how
    assert "a round of good" not in found.how


def test_an_estimate_tests_few_of_many_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tested, evaluate = list[int](), testing.evaluate

    def counted(*args: Any) -> Any:
        tested.append(len(args[4]))
        return evaluate(*args)

    monkeypatch.setattr(testing, "evaluate", counted)
    values = {**SMALL, "claims": [], "expected": [], "grid": {}, "report": {}, "seeds": 0}
    values |= {"methods": {"one": {"algorithm": "fedavg"}}}
    overrides = [f"output.root={tmp_path}", "partition.clients=60"]
    found = estimate(prepare(take(values, tmp_path, settings=overrides)).runs)
    assert found.seconds > 0
    assert found.disk > 0
    assert set(tested) == {16}
    assert "with tests of 16 clients" in found.how


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_the_disk_that_runs_take_is_estimated(tmp_path: Path, algorithm: str) -> None:
    """Of as many rounds as they will have, and with what each client keeps."""
    values = {**SMALL, "claims": [], "expected": [], "grid": {}, "report": {}, "seeds": 0}
    values |= {"methods": {"one": {"algorithm": algorithm}}}
    overrides = [f"output.root={tmp_path / 'runs'}", "rounds=60", "output.checkpoint_every=20"]
    prepared = prepare(take(values, tmp_path, settings=overrides))
    found = estimate(prepared.runs)
    execute(prepared, tmp_path / "out", inline=True)
    [run] = (tmp_path / "runs").iterdir()
    taken = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
    assert 0.6 * taken < found.disk < 1.6 * taken


def test_what_happens_once_is_estimated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start of 50 seconds, a first round of 1,000 with clustering in it, and 7 for each later one.

    Runs of 2 and of 30 rounds are of one kind, which is timed once.
    """
    clock, costs = [0.0], {0: 1000.0, 1: 7.0}
    start, one_round = Driver.start, Driver.round

    def started(driver: Driver) -> ServerState:
        clock[0] += 50.0
        return start(driver)

    def timed(driver: Driver, state: ServerState) -> ServerState:
        clock[0] += costs[state.round]
        return one_round(driver, state)

    monkeypatch.setattr("rayfl.study.estimate.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(Driver, "start", started)
    monkeypatch.setattr(Driver, "round", timed)
    values = {**SMALL, "claims": [], "expected": [], "report": {}, "seeds": 0, "grid": {"rounds": [2, 30]}}
    values["methods"] = {"one": {"algorithm": "fedavg"}}
    found = estimate(prepare(take(values, tmp_path, settings=[f"output.root={tmp_path}"])).runs)
    assert found.seconds == pytest.approx((50 + 1000 + 7) + (50 + 1000 + 29 * 7))
    assert clock == [50 + 1000 + 7]


def test_a_large_study_is_estimated_from_some_kinds_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2 methods x 3 numbers of clients, as many as 60 seconds allow: each method first."""
    clock, timed, told = [0.0], list[str](), list[str]()

    def cost(run: PlannedRun) -> tuple[_Cost, str]:
        timed.append(f"{run.method} {run.config.partition.clients}")
        clock[0] += 25.0
        return _Cost(of_round=10.0 if run.method == "slow" else 1.0), ""

    monkeypatch.setattr("rayfl.study.estimate.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr("rayfl.study.estimate._timed_cost", cost)
    values = {**SMALL, "claims": [], "expected": [], "report": {}, "seeds": 0}
    values["grid"] = {"partition.clients": [4, 5, 6]}
    values["methods"] = {"slow": {"algorithm": "fedavg"}, "fast": {"algorithm": "fedavg", "training.lr": 0.2}}
    prepared = prepare(take(values, tmp_path, settings=["rounds=2", f"output.root={tmp_path}"]))
    found = estimate(prepared.runs, watch=told.append)
    assert timed == ["slow 4", "fast 4", "slow 6"]
    assert found.seconds == pytest.approx(2 * 3 * (10 + 1))
    assert "a round of 3 of 6 kinds of runs was timed" in found.how
    assert told[0] == "a round of slow is timed (1 of 6)"


def test_the_first_run_of_a_process_is_timed_again_if_it_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It imports and compiles what all others find."""
    costs = iter(_Cost(once, of_round) for once, of_round in ((5.0, 1.0), (0.5, 1.0), (0.5, 2.0)))
    monkeypatch.setattr("rayfl.study.estimate.time", SimpleNamespace(perf_counter=lambda: 0.0))
    monkeypatch.setattr("rayfl.study.estimate._timed_cost", lambda run: (next(costs), ""))
    values = {**SMALL, "claims": [], "expected": [], "report": {}, "seeds": 0, "grid": {}}
    values["methods"] = {"one": {"algorithm": "fedavg"}, "two": {"algorithm": "fedavg", "training.lr": 0.2}}
    prepared = prepare(take(values, tmp_path, settings=["rounds=2", f"output.root={tmp_path}"]))
    assert estimate(prepared.runs).seconds == pytest.approx(0.5 + 2 * 1 + 0.5 + 2 * 2)


def test_an_estimate_of_which_nothing_is_known_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayfl.study.estimate._TIMING_SECONDS", -1.0)
    monkeypatch.setattr("rayfl.study.estimate._timed_cost", lambda run: (_Cost(), "boom"))
    values = {**SMALL, "claims": [], "expected": [], "report": {}, "seeds": 0, "grid": {}}
    values["methods"] = {"one": {"algorithm": "fedavg"}, "two": {"algorithm": "fedavg", "training.lr": 0.2}}
    found = estimate(prepare(take(values, tmp_path, settings=[f"output.root={tmp_path}"])).runs)
    assert "a round of one failed and is not counted: boom" in found.how
    assert "1 further kind of runs not timed and not counted" in found.how


def test_a_method_of_which_nothing_is_known_is_estimated_as_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayfl.study.estimate._TIMING_SECONDS", -1.0)
    monkeypatch.setattr("rayfl.study.estimate._timed_cost", lambda run: (_Cost(once=1.0, of_round=3.0), ""))
    values = {**SMALL, "claims": [], "expected": [], "report": {}, "seeds": 0, "grid": {}}
    values["methods"] = {"one": {"algorithm": "fedavg"}, "two": {"algorithm": "fedavg", "training.lr": 0.2}}
    prepared = prepare(take(values, tmp_path, settings=["rounds=2", f"output.root={tmp_path}"]))
    found = estimate(prepared.runs)
    assert found.seconds == pytest.approx(2 * (1 + 2 * 3))
    assert "a round of 1 of 2 kinds of runs was timed" in found.how


def test_runs_that_are_there_say_what_happens_once(tmp_path: Path) -> None:
    """A finished run of two rounds: 50 seconds for its start, 1,000 for the first round, 7 for the second."""
    values = {**SMALL, "claims": [], "expected": [], "report": {}, "seeds": 0, "grid": {"rounds": [2, 30]}}
    values["methods"] = {"one": {"algorithm": "fedavg"}}
    prepared = prepare(take(values, tmp_path, settings=[f"output.root={tmp_path}"]))
    directory = RunDirectory(directory_of(prepared.runs[0]))
    directory.path.mkdir()
    directory.write_json("summary.json", {"seconds": 1057.0, "rounds": 2})
    directory.table("rounds.csv", [{"round": 0, "seconds": 1000.0}, {"round": 1, "seconds": 7.0}])
    directory.table("clients.csv", [{"client": 0}], ["client"])
    restored = estimate(prepared.runs)  # without checkpoints: from an archive, perhaps of another machine
    assert restored.finished == 1
    assert restored.how.startswith("an estimate: a round of each method was timed")
    (directory.path / "checkpoints").mkdir()
    found = estimate(prepared.runs)
    assert found.seconds == pytest.approx(50 + 1000 + 29 * 7)
    assert found.how == "finished runs"


def test_runs_of_another_version_are_told(done: Any, tmp_path: Path) -> None:
    study, _ = done
    assert set(study.runs["rayfl"]) == {rayfl.__version__}
    assert "version" not in study_tables.main_table(study.results).caption
    shutil.copytree(study.folder.parent / "runs", tmp_path / "runs")
    path = min((tmp_path / "runs").glob("*/environment.json"))
    told = json.loads(path.read_text())
    told["versions"]["rayfl"] = "0.0.9"
    path.write_text(json.dumps(told))
    again, began = run(tmp_path, tmp_path / "again")
    assert not began
    caption = study_tables.main_table(again.results).caption
    assert f"different versions of rayfl: 0.0.9 (1), {rayfl.__version__} (7)" in caption
    assert again.runs.set_index("path").loc[str(path.parent), "rayfl"] == "0.0.9"


def test_a_run_that_never_reached_a_target_is_the_last(done: Any) -> None:
    study, _ = done
    reached = {"FedAvg": math.nan, "SOLO": 1.0}
    numbers = {place: {"rounds_to_99": reached[place[0]]} for place in study.results._numbers}
    results = Results(study.results.study, study.results.runs, ["rounds_to_99"], {})
    vars(results)["_numbers"] = numbers
    assert results.ranks("rounds_to_99") == {"FedAvg": 2.0, "SOLO": 1.0}
    vars(results)["_numbers"] = {place: n for place, n in numbers.items() if place[0] == "SOLO"}
    ranks = results.ranks("rounds_to_99")
    assert math.isnan(ranks["FedAvg"])  # all of its runs are missing
    assert ranks["SOLO"] == 1
    vars(results)["_numbers"] = {p: n if p[0] == "SOLO" else {} for p, n in numbers.items()}
    assert math.isnan(results.ranks("rounds_to_99")["SOLO"])  # of the other it was not measured


def test_errors_and_costs_rank_the_least_first() -> None:
    expected = {
        "more": ("accuracy_mean", "ari", "r2_mean", "common_f1_macro_mean", "newcomers_accuracy_worst10"),
        "less": (
            *("rmse_mean", "validation_mae_mean", "newcomers_rmse_mean", "rmse_mean_best_test", "loss_mean"),
            *("accuracy_var", "cluster_var_within", "accuracy_se", "perplexity_mean", "seconds"),
            *("bytes_up", "newcomers_bytes_up"),
        ),
        None: ("clusters", "fallbacks", "newcomers", "pruned_weights_mean", "round_best_validation",
               "local_common_round_best_test"),
    }  # fmt: skip
    for direction, columns in expected.items():
        assert {column: better(column) for column in columns} == dict.fromkeys(columns, direction)
    unknown = {name for names in expected.values() for name in names} - known_numbers()
    assert unknown <= {"local_common_round_best_test"}, unknown
    assert better("rounds_to_80") == "less"


def test_a_regression_has_the_columns_of_its_measures(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.ones((60, 3)), y=np.arange(60.0))
    data = {"data": {"name": "npz", "path": str(tmp_path / "d.npz"), "test_fraction": 0.2}, "loss": "mse"}
    values = {k: v for k, v in SMALL.items() if k in ("name", "methods", "seeds")}
    settings = {**data, "partition": {"name": "iid", "clients": 3}, "model": "linear", "rounds": 1}
    study = prepare(take({**values, "settings": settings}, tmp_path)).study
    assert study.report.names == ("rmse_mean", "mae_mean", "r2_mean", "bytes_up")
    named = {**values, "settings": settings, "report": {"columns": ["loss_mean"]}}
    assert prepare(take(named, tmp_path)).study.report.names == ("loss_mean",)


def test_runs_that_cannot_be_written_are_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    prepared = prepare(take({**SMALL, "claims": []}, tmp_path, settings=[f"output.root={tmp_path / 'runs'}"]))
    with pytest.raises(RayflError, match="runs: is a file; name a folder"):
        execute(prepared, tmp_path / "out", inline=True)


def test_equal_seeds_have_equal_cohorts_and_first_models(tmp_path: Path) -> None:
    """FedProx without a pull is FedAvg: the same bits in the end, also where FLIS holds out data."""
    methods = {
        "FedAvg": {"algorithm": "fedavg"},
        "FedProx": {"algorithm": "fedprox", "local.mu": 1e-30},
        "FLIS": {"algorithm": "flis_dc"},
    }
    settings = {**SMALL["settings"], "training.participation": 0.5}
    study, _ = run(
        tmp_path,
        tmp_path / "out",
        methods=methods,
        settings=settings,
        grid={},
        seeds=0,
        claims=[],
        expected=[],
        report={},
    )
    models = [json.loads((Path(p) / "summary.json").read_text())["models_sha256"] for p in study.runs["path"]]
    assert models[0] == models[1] != models[2]

"""Figures of a comparison: a curve or box for each group of runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rayfl.errors import RayflError
from rayfl.report.compare import Comparison
from rayfl.report.files import RunFiles
from rayfl.report.methods import averaged, of_clients
from rayfl.report.plots import Plots
from rayfl.statistics import mean_interval

MakeRun = Callable[[str], Path]


def changed(run: Path, file: str, old: str, new: str) -> Path:
    text = (run / file).read_text()
    assert old in text
    (run / file).write_text(text.replace(old, new))
    return run


@pytest.fixture
def two_groups(make_run: MakeRun) -> Comparison:
    """PACFL with two seeds, and one run of IFCA."""
    second = changed(make_run("second"), "config.yaml", "seed: 3", "seed: 4")
    changed(second, "rounds.csv", "2,1.0,2,2,1.2,90.0", "2,1.0,2,2,1.2,70.0")
    other = changed(make_run("other"), "config.yaml", "pacfl", "ifca")
    changed(other, "clients.csv", "1,10,0,0,99.0", "1,10,0,0,9.0")
    return Comparison.of([make_run("first"), second, other])


def test_curves_are_means_over_seeds_in_a_band(two_groups: Comparison) -> None:
    axes = two_groups.plot.accuracy().axes[0]
    pacfl, ifca = axes.lines
    assert [line.get_label() for line in axes.lines] == [group.name for group in two_groups.groups]
    assert pacfl.get_xydata().tolist() == [[1, 60], [3, 80], [4, 85]]  # tested in these rounds, from 1
    assert ifca.get_xydata().tolist() == [[1, 60], [3, 90], [4, 85]]
    (band,) = axes.collections  # one run has none
    interval = mean_interval([90.0, 70.0])
    ys = band.get_paths()[0].vertices[:, 1]
    assert (ys.min(), ys.max()) == pytest.approx((interval.low, interval.high))
    sent = two_groups.plot.bytes().axes[0].lines[0].get_xdata()
    assert np.asarray(sent).tolist() == [5.3, 5.9, 6.2]  # kB, up and down, with 5 kB of signatures before


def test_boxes_have_the_clients_of_all_seeds(two_groups: Comparison) -> None:
    axes = two_groups.plot.clients().axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == [group.name for group in two_groups.groups]
    ends = sorted(float(y) for line in axes.lines for y in np.atleast_1d(line.get_ydata()))
    assert (ends[0], ends[-1]) == (9.0, 99.0)
    pacfl = two_groups.groups[0]
    assert of_clients(pacfl.runs).tolist() == [65, 99, 88, 88] * 2


def test_the_front_is_not_drawn_through_runs_with_other_data(make_run: MakeRun) -> None:
    """More accuracy for more bytes: both are on the front, if they can be compared."""
    better = changed(make_run("better"), "config.yaml", "pacfl", "ifca")
    changed(better, "rounds.csv", "3,1.5,2,2,1.1,85.0", "3,1.5,2,2,1.1,95.0")
    changed(better, "communication.csv", "0,client_lps,up,model,1000", "0,client_lps,up,model,9000")

    def fronts() -> int:
        lines = Comparison.of([make_run("one"), better]).plot.trade_off().axes[0].lines
        return sum(line.get_label() == "Pareto front" for line in lines)

    assert fronts() == 1
    (better.parent / "one").rename(better.parent / "former")
    changed(better, "config.yaml", "clients: 4", "clients: 5")
    assert fronts() == 0


def test_a_figure_without_numbers_is_refused(make_run: MakeRun) -> None:
    runs = [make_run("one"), make_run("two")]
    (runs[0] / "rounds.csv").unlink()
    assert len(Comparison.of(runs).plot.accuracy().axes[0].lines) == 1
    (runs[1] / "rounds.csv").unlink()
    with pytest.raises(RayflError, match="no finished run has the numbers for this figure"):
        Comparison.of(runs).plot.accuracy()


def test_a_single_test_is_a_point(make_run: MakeRun) -> None:
    runs = [make_run("one"), changed(make_run("two"), "config.yaml", "seed: 3", "seed: 4")]
    for run in runs:
        (run / "rounds.csv").write_text("\n".join((run / "rounds.csv").read_text().splitlines()[:2]))
    changed(runs[1], "rounds.csv", "60.0", "50.0")
    axes = Comparison.of(runs).plot.accuracy().axes[0]
    (container,) = axes.containers
    assert container.lines[0].get_xydata().tolist() == [[1, 55]]
    assert container.has_yerr


def test_text_in_place_of_numbers_is_left_out(make_run: MakeRun) -> None:
    empty = make_run("empty")
    for name in ("rounds.csv", "clients.csv", "communication.csv"):
        (empty / name).write_text("")
    rounds = pd.DataFrame({"round": [0, 1], "accuracy_mean": ["x", 2.5], "bytes_up": 1, "bytes_down": 2})
    clients = pd.DataFrame({"accuracy_last": ["x", "2.5", None]})
    nothing = RunFiles.read(empty)
    runs = [replace(nothing, rounds=rounds, clients=clients), replace(nothing, rounds=rounds[["round"]])]
    frame = averaged(runs)
    assert frame[["round", "bytes", "mean"]].to_numpy().tolist() == [[2, 6.0, 2.5]]
    assert frame[["low", "high"]].isna().all(axis=None)
    assert of_clients([*runs, nothing]).tolist() == [2.5]
    assert of_clients([]).shape == (0,)


@pytest.fixture
def regressions(make_run: MakeRun) -> list[Path]:
    """FedAvg with more bytes and a smaller error, and IFCA."""
    runs = [changed(make_run(name), "config.yaml", "pacfl", name) for name in ("fedavg", "ifca")]
    for run, last, sent in zip(runs, (1.5, 2.5), (9000, 1000), strict=True):
        with (run / "config.yaml").open("a") as config:
            config.write("loss: {name: mse}\n")
        means = [9.0, None, 4.0, last, None]
        rounds = pd.read_csv(run / "rounds.csv").assign(accuracy_mean=None, rmse_mean=means)
        rounds.to_csv(run / "rounds.csv", index=False)
        rmse = [last - 1, last - 0.5, last + 0.5, last + 1]
        clients = pd.read_csv(run / "clients.csv").assign(accuracy_last=None, rmse_last=rmse)
        clients.to_csv(run / "clients.csv", index=False)
        changed(run, "communication.csv", "up,model,1000", f"up,model,{sent}")
    return runs


def test_regressions_are_drawn_by_what_their_loss_measures(regressions: list[Path]) -> None:
    plots = Comparison.of(regressions).plot
    assert plots.results == ["rmse"]
    for axes in (plots.curves().axes[0], plots.curves("rmse").axes[0]):
        assert axes.get_ylabel() == "mean root mean squared error of\nclients"
        assert [line.get_ydata().tolist() for line in axes.lines] == [[9.0, 4.0, 1.5], [9.0, 4.0, 2.5]]
    assert plots.clients().axes[0].get_ylabel() == "root mean squared error of a client"
    assert plots.bytes().axes[0].get_ylabel() == "mean root mean squared error of\nclients"
    (front,) = (line for line in plots.trade_off().axes[0].lines if line.get_label() == "Pareto front")
    assert front.get_ydata().tolist() == [2.5, 1.5]  # a smaller error for more bytes
    with pytest.raises(RayflError, match="result: no run has a result 'mea'; did you mean 'rmse'"):
        plots.curves("mea")
    with pytest.raises(RayflError, match="result: no run has a result 'accuracy'"):
        plots.accuracy()


def test_a_regression_alone(regressions: list[Path]) -> None:
    plots = Plots(regressions[0])
    axes = plots.curves().axes[0]
    assert axes.lines[0].get_xydata().tolist() == [[1, 9.0], [3, 4.0], [4, 1.5]]
    assert axes.get_ylabel() == "root mean squared error"
    assert plots.curves("loss").axes[0].lines[0].get_ydata().tolist() == [1.5, 0.8, 0.7]
    (text,) = plots.clients().axes[0].texts
    assert text.get_text() == "mean 1.5"
    with pytest.raises(RayflError, match="result: the run has no result 'rsme'; did you mean 'rmse'"):
        plots.curves("rsme")
    with pytest.raises(RayflError, match="has no accuracy over rounds to draw"):
        plots.accuracy()
    with pytest.raises(RayflError, match="has no accuracy of clients to draw"):
        plots.clients("accuracy")

"""What a person sees of a run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rayfl.display import Display, closing, closing_table, comparison_table, group_table, text_tables
from rayfl.errors import ConfigError, Damaged, OtherFormat
from rayfl.events import Begun, BlockDone, Clustered, Finished, Note, RoundDone, RunEvent, Stopped
from rayfl.monitor import Pace
from rayfl.servers.serialisation import StateError

SUMMARY = {
    "algorithm": "pacfl",
    "clusters": 3,
    "ari": 1.0,
    "accuracy_mean": 97.46,
    "accuracy_worst10": 90.0,
    "accuracy_var": 3.21,
    "bytes_up": 1_234_567,
    "bytes_down": 0,
    "seconds": 12.34,
}


def lines(*events: RunEvent, terminal: bool = False) -> list[str]:
    file = io.StringIO()
    display = Display(Console(file=file, width=200, force_terminal=terminal), "[x] on digits")
    for event in events:
        display(event)
    display.close()
    return [line.strip() for line in file.getvalue().splitlines()]


ROUND = {"round": 4, "train_loss": 0.12345, "seconds": 1.5}


def done(row: dict[str, Any]) -> RoundDone:
    return RoundDone(4, 20, row)


def test_plain_lines():
    tested = {**ROUND, "accuracy_mean": 91.23, "accuracy_worst10": 80.0}
    assert lines(done(ROUND), done(tested))[1:] == [
        "round   5/20  loss 0.123  1.5 s",
        "round   5/20  loss 0.123  accuracy  91.2 %  worst 10 %  80.0 %  1.5 s",
    ]


def test_an_estimate_is_marked():
    few = {"accuracy_mean": 91.23, "accuracy_worst10": 80.0, "estimated_from": 8, "accuracy_se": 2.345}
    assert lines(done({**ROUND, **few}))[1:] == [
        "round   5/20  loss 0.123  accuracy ≈  91.2 %  worst 10 % ≈  80.0 %  "
        "(estimated from 8 clients; standard error 2.3)  1.5 s",
    ]


def test_results_without_accuracy():
    loss = {**ROUND, "loss_mean": 0.98765}
    assert lines(done(loss), done({**loss, "estimated_from": 8}), done({**loss, "perplexity_mean": 7.0}))[
        1:
    ] == [
        "round   5/20  loss 0.123  test loss 0.9877  1.5 s",
        "round   5/20  loss 0.123  (estimated from 8 clients)  test loss 0.9877  1.5 s",
        "round   5/20  loss 0.123  perplexity 7  1.5 s",
    ]
    measured = RoundDone(4, 20, {**loss, "rmse_mean": 0.5}, measures=("rmse_mean", "r2_mean"))
    assert lines(measured)[1:] == ["round   5/20  loss 0.123  rmse 0.5  1.5 s"]


def test_commands_can_be_copied():
    stopped = lines(Stopped(2, Path("my runs/x")))[1:]
    assert stopped == ["stopped after 2 complete rounds; resume with: rayfl resume 'my runs/x'"]


def test_clusters():
    given = Clustered(0, "before", 3, None, 0.25, {"threshold": 12.0, "suggested": False})
    proposed = Clustered(0, "before", 3, 0.987, 0.25, {"threshold": 0.123456, "suggested": True})
    assert lines(given, proposed)[1:] == [
        "clustered into 3 groups, cut at 12 (0.25 s)",
        "clustered into 3 groups (the tree's own proposal), cut at 0.123; "
        "agreement with the planted groups (ARI) 0.99 (0.25 s)",
    ]


def test_the_end_and_unknown_events():
    summary = {"accuracy_mean": None, "accuracy_worst10": None, "rounds": 3, "seconds": 1.0}
    path = Path("runs/x")
    shown = lines(RunEvent(), Stopped(2, path), Stopped(1, path, repeats=True), Finished(summary, path))[1:]
    assert shown == [
        "stopped after 2 complete rounds; resume with: rayfl resume runs/x",
        "stopped after 1 complete round",  # for example since training diverges
        "accuracy –, worst 10 % of the clients – after 3 rounds in 1.0 s",
    ]


def test_text_in_brackets_is_shown_as_it_is():
    """An override such as model.hidden=[8] or a path with brackets is no markup."""
    assert "see [bold] runs/[a]" in lines(Note("see [bold] runs/[a]"))


def test_the_progress_bar_goes_away():
    shown = lines(BlockDone(4, 1, 2), done(ROUND), terminal=True)
    assert not any("round   5/20" in line for line in shown)
    assert any("5/20" in line for line in shown)


def test_closing_table():
    file = io.StringIO()
    other = {**SUMMARY, "algorithm": "fedavg", "clusters": 1, "ari": None, "accuracy_mean": None}
    Console(file=file, width=120).print(closing_table([SUMMARY, other]))
    rows = [
        [c.strip() for c in line.split("│")[1:-1]] for line in file.getvalue().splitlines() if "│" in line
    ]
    assert rows == [
        ["pacfl", "3", "1.00", "97.5", "90.0", "3.2", "1.23 MB", "0 B", "12.3"],
        ["fedavg", "–", "–", "–", "90.0", "3.2", "1.23 MB", "0 B", "12.3"],
    ]


def test_a_method_that_has_found_one_cluster_says_so():
    one = {**SUMMARY, "clusters": 1, "ari": None, "by_cluster": [of_group(0, 91, 1, 3)]}
    alone = {**one, "algorithm": "fedavg", "by_cluster": []}
    rows, _ = shown(closing_table([one, alone]))
    assert [row[1] for row in rows[-2:]] == ["1", "–"]
    assert "0, 1 client" in str(
        shown(group_table([{**one, "by_cluster": [of_group(0, 91, 1, 1)]}], "cluster"))
    )
    line = lines(Clustered(0, "before", 1, None, 0.25, {"threshold": 12.0, "suggested": False}))
    assert line[1:] == ["clustered into 1 group, cut at 12 (0.25 s)"]


def shown(table, width=120):
    """The cells of the rows, and the text below them."""
    file = io.StringIO()
    Console(file=file, width=width).print(table)
    found = file.getvalue().splitlines()
    cells = [[c.strip() for c in line.split("│")[1:-1]] for line in found if "│" in line]
    return cells, " ".join(line.strip() for line in found if not set("│┏┃┡└├") & set(line))


def test_the_closing_table_says_how_certain_the_means_are_and_on_what_they_were_measured():
    sure = {"accuracy_se": 0.51, "accuracy_se_samples": 1.78}
    tests = {"distinct_test_samples": 1359, "client_test_samples": [70, 128.5, 169]}
    rows, text = shown(closing_table([{**SUMMARY, **sure, **tests}, {**SUMMARY, **tests}]))
    assert [row[3] for row in rows] == ["97.5 ± 0.5", "97.5"]
    assert "±: standard error over clients (over test samples: 1.8, –)" in text
    assert text.count("tested on 1,359 distinct test samples, 70 to 169 a client;") == 1
    assert "test samples" not in shown(closing_table([SUMMARY]))[1]


def test_the_closing_table_says_which_other_models_were_tested() -> None:
    more = {"local_accuracy_mean": 96.04, "common_accuracy_mean": 41.0}
    rows, text = shown(closing_table([{**SUMMARY, **more}, SUMMARY]), 140)
    assert [row[6:8] for row in rows] == [["96.0", "41.0"], ["–", "–"]]
    assert "local: mean accuracy with the model that the client itself had trained last" in text
    assert "common: mean accuracy on all test samples" in text
    assert "fine-tuned" not in text


def of_group(i, mean, var, clients=10):
    return {"id": i, "clients": clients, "accuracy_mean": mean, "accuracy_var": var}


def test_groups_beside_each_other():
    one = {**SUMMARY, "by_group": [of_group(0, 91.26, 1.04), of_group(2, 80, 0, 4)], "group_var_within": 0.74}
    two = {**SUMMARY, "algorithm": "fedavg", "by_group": [of_group(0, 70, 2)], "group_var_within": 2.0}
    rows, text = shown(group_table([one, two], "group"))
    assert rows == [
        ["0, 10 clients", "91.3 (1.0)", "70.0 (2.0)"],
        ["2, 4 clients", "80.0 (0.0)", "–"],
        ["variance within", "0.7", "2.0"],
        ["variance between", "–", "–"],
    ]
    assert "variance over all clients is that within planted groups plus that between them" in text
    assert group_table([SUMMARY], "group") is None
    assert group_table([{**SUMMARY, "by_group": [of_group(i, 1, 1) for i in range(13)]}], "group") is None


def test_clusters_are_shown_where_no_groups_are_planted():
    clusters = [of_group(0, 91, 1, 3), of_group(4, 80, 0)]
    one, two = {**SUMMARY, "by_cluster": clusters}, {**SUMMARY, "by_cluster": clusters[1:]}
    assert shown(group_table([one, two], "cluster"))[0][1] == ["4, 10 clients", "80.0 (0.0)", "80.0 (0.0)"]
    assert group_table([{**one, "by_group": clusters}, two], "cluster") is None
    assert "by cluster" in shown(closing([one]))[1]
    assert "by planted group" not in shown(closing([one]))[1]


def test_the_closing_table_of_texts_has_their_perplexity():
    file = io.StringIO()
    untested = {**SUMMARY, "perplexity_mean": None}
    Console(file=file, width=120).print(closing_table([{**SUMMARY, "perplexity_mean": 41.43}, untested]))
    shown = file.getvalue().splitlines()
    assert [c.strip() for c in shown[1].split("┃")[1:-1]][5:7] == ["variance", "perplexity"]
    rows = [[c.strip() for c in line.split("│")[1:-1]] for line in shown if "│" in line]
    assert [row[6] for row in rows] == ["41.4", "–"]


def test_a_round_of_texts_shows_its_perplexity():
    tested = {**ROUND, "accuracy_mean": 31.23, "accuracy_worst10": 20.0}
    assert "perplexity" not in lines(done({**tested, "perplexity_mean": None}))[-1]
    assert "perplexity 41.43 " in lines(done({**tested, "perplexity_mean": 41.43}))[-1]


def test_a_narrow_terminal_has_a_column_a_method() -> None:
    console = Console(file=io.StringIO(), width=40)
    console.print(closing_table([SUMMARY, {**SUMMARY, "algorithm": "fedavg"}], 40))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in printed
    (mean,) = [line for line in printed.splitlines() if "mean" in line and "97.5" in line]
    assert mean.count("97.5") == 2
    assert all(len(line) <= 40 for line in printed.splitlines())


@pytest.mark.parametrize("width", [30, 40, 80])
def test_every_number_can_be_read_however_narrow_the_terminal(width: int) -> None:
    """Where neither a row nor a column for each run fits, the runs follow one another."""
    names = [f"base-fedavg-path=a-rather-long-name-{i}.npz-seed0-20261122-204218" for i in range(5)]
    runs = [
        {**SUMMARY, "algorithm": name, "accuracy_mean": 70.25 + i, "by_group": [of_group(0, 61.5 + i, 1)]}
        for i, name in enumerate(names)
    ]
    columns = [("run", names), ("accuracy", [f"{70.25 + i} %" for i in range(5)])]
    console = Console(file=io.StringIO(), width=width)
    console.print(closing(runs, width))
    console.print(comparison_table(columns, "", width))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in printed
    assert all(len(line) <= width for line in printed.splitlines())
    for i in range(5):
        assert f"{70.25 + i:.2f} %" in printed
        assert f"{70.25 + i:.1f}" in printed
        assert f"{61.5 + i} (1.0)" in printed


@pytest.mark.parametrize("width", [60, 80])
def test_a_wide_comparison_goes_on_below_and_names_its_rows_again(width: int) -> None:
    """Where only several columns tell the rows apart, each part has all of these."""
    columns = [("method", ["fedavg", "mt_hfl", "mt_hfl"]), ("n_clusters", ["–", "2", "3"])]
    columns += [(f"number {i}", [f"{10 * i + k}.5 % ± 1.0" for k in range(3)]) for i in range(7)]
    console = Console(file=io.StringIO(), width=width)
    console.print(comparison_table(columns, "What the numbers are.", width, naming=2))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in printed.splitlines())
    assert printed.count("What the numbers are.") == 1
    for i in range(7):
        rows = [[cell.strip() for cell in line.split("│")] for line in printed.splitlines()]
        (row,) = [row for row in rows if f"{10 * i + 1}.5 % ± 1.0" in row]
        assert row[1:3] == ["mt_hfl", "2"]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_wide_table_of_a_study_breaks_headings_but_no_numbers(width: int) -> None:
    header = ["method", "foreign", *(f"mean accuracy (%), models as clients trained {i}" for i in range(8))]
    rows = [[label, "0.1", *(f"9{i}.5 ± 17.2 (2 of 3)" for i in range(8))] for label in ("A, two", "B [x]")]
    console = Console(file=io.StringIO(), width=width)
    console.print(text_tables(header, rows, 2, "The caption.", width))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in printed.splitlines())
    for i in range(8):
        assert printed.count(f"9{i}.5 ± 17.2 (2 of 3)") == 2
    assert printed.count("A, two") == printed.count("B [x]") >= 1 + (width < 200)
    assert printed.rstrip().endswith("The caption.")


@pytest.mark.parametrize("width", [20, 40, 53, 60, 79, 80, 81, 82, 83, 90, 120])
def test_no_number_of_a_studys_table_is_cut_off_at_any_width(width: int) -> None:
    """Rich makes columns narrower than their least width rather than a table wider than the terminal."""
    header = ["method", "alpha", "batch_size", "training.lr", "mean accuracy (%), on validation samples"]
    rows = [
        ["A", "0.1", "small", "0.25", "71.11"],
        ["B, with a label of two lines", "0.3", "big", "0.5", "–"],
    ]
    console = Console(file=io.StringIO(), width=width)
    console.print(text_tables(header, rows, 3, "", width))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in printed.splitlines())
    assert "71.11" in printed
    assert "0.25" in printed
    if width > 40:
        words = {*" ".join(header).split(), *" ".join(rows[1]).split()}
        assert words <= set(printed.replace("┃", " ").replace("│", " ").split())


def _fail(*events, error: Exception | None = None) -> None:
    with Display(Console(file=io.StringIO()), "title") as display:
        for event in events:
            display(event)
        raise error or ZeroDivisionError


def test_a_failure_says_how_to_go_on_unless_that_was_said(tmp_path, capsys) -> None:
    (tmp_path / "checkpoints").mkdir()
    begun = Begun(tmp_path)
    with pytest.raises(ZeroDivisionError):
        _fail(begun)
    assert f"resume with: rayfl resume {tmp_path}" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        _fail(begun, Stopped(3, tmp_path))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [ConfigError("a", "b"), Damaged("c"), OtherFormat("d"), StateError("e")])
def test_no_failure_that_would_come_again_says_how_to_go_on(tmp_path, capsys, error: Exception) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(type(error)):
        _fail(Begun(tmp_path), error=error)
    assert capsys.readouterr().err == ""


def test_the_progress_bar_shows_the_time_that_is_left():
    """Also where a round takes minutes, and in a resumed run."""
    now = [0.0]
    file = io.StringIO()
    display = Display(Console(file=file, width=200, force_terminal=True), "x", Pace(lambda: now[0]))
    for number in (4, 5):
        display(RoundDone(number, 20, {**ROUND, "seconds": 120.0}))
        now[0] += 120
    display._progress.refresh()
    display.close()
    assert "ETA 26 min 00 s" in file.getvalue()

"""``report.html``: one self-contained, interactive page about one run."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rayfl.angles import ANGLES
from rayfl.report import maps, page
from rayfl.report.charts import (
    Colour,
    Frame,
    Line,
    Metric,
    Points,
    alternatives,
    bars,
    box,
    client_map,
    curves,
    heatmap,
    histogram,
    round_edges,
    sankey,
    scatter,
    spaced,
    steps,
)
from rayfl.report.files import (
    TESTS_AT_THE_END,
    TESTS_IN_ROUNDS,
    RunFiles,
    Value,
    column_of,
    described_in,
    numbers,
    numeric,
)
from rayfl.report.page import Chart, Column, Data, Page, Section, Table, formatted, rounded, significant
from rayfl.units import UNKNOWN, counted, duration, number, percent, size, three_digits, uncertain

MOST_GROUPS = 20
"""With at most this many planted groups the table of clusters has a column for each."""
MOST_LINES = 28
"""With more groups than this there is no chart, only the table."""
MOST_BOXES = 40
"""The largest clusters or groups, at most this many, have a box plot each."""
MOST_NAMES = 8
"""If clients have the user's own ids, at most this many members of a cluster are named."""
MOST_ROUNDS = 1000
"""With more rounds than this, evenly spaced ones are drawn."""
FEW_CLUSTERS = 8
"""With at most this many clusters the size chart is omitted."""
TIER_ENDS = {"client_lps": ("clients", "local servers"), "lps_gps": ("local servers", "global server")}

ROUNDS = (
    Metric("round", "round", "number:0"),
    Metric("bytes", "bytes sent so far, up and down", "size"),
    Metric("time", "time so far", "duration"),
)
"""The horizontal axes of a run's curves."""
METRICS = (
    Metric("accuracy_mean", "test accuracy, mean over clients (%)", "percent:1", "accuracy_worst10",
           "accuracy_best10", "Band: mean of the worst 10 % to mean of the best 10 % of clients."),
    Metric("accuracy_worst10", "test accuracy, worst 10 % of clients (%)", "percent:1"),
    Metric("accuracy_best10", "test accuracy, best 10 % of clients (%)", "percent:1"),
    Metric("accuracy_median", "test accuracy, median client (%)", "percent:1"),
    Metric("accuracy_weighted", "test accuracy, weighted by test samples (%)", "percent:1"),
    Metric("accuracy_var", "variance of accuracy over clients (%²)", "number:1"),
    Metric("local_accuracy_mean", "test accuracy of models as clients trained them, mean (%)", "percent:1"),
    Metric("validation_accuracy_mean", "validation accuracy, mean over clients (%)", "percent:1"),
    Metric("common_accuracy_mean", "accuracy on all test samples, mean over clients (%)", "percent:1"),
    Metric("label_accuracy_mean", "share of labels that are right, mean over clients (%)", "percent:1"),
    Metric("f1_micro_mean", "F1 over all labels together, mean over clients (%)", "percent:1"),
    Metric("f1_macro_mean", "mean F1 of the labels, mean over clients (%)", "percent:1"),
    Metric("loss_mean", "test loss, mean over clients", "number:4"),
    Metric("rmse_mean", "root mean squared error, mean over clients", "number:4"),
    Metric("mae_mean", "mean absolute error, mean over clients", "number:4"),
    Metric("r2_mean", "R², mean over clients", "number:3"),
    Metric("perplexity_mean", "test perplexity, mean over clients", "number:1"),
    Metric("train_loss", "training loss, mean over participants", "number:4"),
    Metric("clusters", "clusters", "number:0"),
    Metric("ari", "agreement of clusters with planted groups (ARI)", "number:2"),
)  # fmt: skip
"""The columns of ``rounds.csv`` that are drawn, the most important first; :func:`metrics_of` adds others."""


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into a run directory and return its path.

    Missing or unreadable files of the run are listed at the foot of the page. The page is replaced
    atomically, so a reader never sees a partial one.

    Raises:
        RayflError: if there is no such directory.
    """
    return page.write(run_dir / "report.html", page_of(RunFiles.read(run_dir)))


def page_of(run: RunFiles) -> Page:
    """The page about a run."""
    headline = run.headline()
    clients = client_columns(run)
    sections = [
        _over_rounds(run, headline),
        _by_group(run, "group"),
        _by_group(run, "cluster"),
        _clients(run, clients),
        map_section(run, clients),
        _clusters(run),
        _threshold(run),
        _communication(run),
    ]
    names = [str(headline[part]) for part in ("algorithm", "data", "partition", "model") if headline[part]]
    environment = Table.of(
        ["what", "value"], _flat(run.environment), left=2, caption="environment", wrap=True
    )
    return Page(
        title=run.path.resolve().name,
        subtitle=" · ".join(names),
        facts=_facts(run, headline),
        notes=[(run.unfinished, [])] if run.unfinished else [],
        lead=_results_table(run, headline),
        sections=[section for section in sections if section is not None],
        folded=[
            *([("Configuration", run.config_text)] if run.config_text else []),
            *([("Environment", environment)] if run.environment else []),
        ],
        missing=run.missing,
        data={name: columns for name, columns in (("clients", clients),) if columns},
    )


def summary_html(run_dir: Path) -> str:
    """A run in a few lines, for notebooks.

    Raises:
        RayflError: if there is no such directory.
    """
    run = RunFiles.read(run_dir)
    headline = run.headline()
    parts = [str(headline[part]) for part in ("algorithm", "data", "partition", "model") if headline[part]]
    rows = "".join(
        f"<tr><th style='text-align: left'>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in _facts(run, headline)
    )
    lines = (
        f"<b>{html.escape(run.path.resolve().name)}</b>",
        html.escape(" · ".join(parts)),
        f"<table>{rows}</table>",
    )
    return f"<div>{'<br>'.join(lines)}<code>{html.escape(str(run.path))}</code></div>"


def _measured(value: Value) -> str:
    return UNKNOWN if value is None else three_digits(float(value))


def _facts(run: RunFiles, headline: Mapping[str, Value]) -> list[tuple[str, str]]:
    """The main numbers, at the top; failures, over all rounds, only if there were any."""
    failures = numbers(run.rounds, "failures")
    failed = 0 if failures is None else int(np.nansum(failures))
    estimate = headline["estimated_from"] is not None
    scores = [
        ("mean accuracy", uncertain(headline["accuracy_mean"], None, estimate)),
        ("worst 10 % of clients", uncertain(headline["accuracy_worst10"], None, estimate)),
    ]
    if headline["accuracy_mean"] is None and run.measures:
        scores = [(f"mean {name}", _measured(headline[f"{name}_mean"])) for name in run.measures]
    elif headline["accuracy_mean"] is None and headline.get("loss_mean") is not None:
        scores = [("mean test loss", _measured(headline["loss_mean"]))]
    done, planned = len(run.rounds), run.planned
    unfinished = planned is not None and done < planned
    facts = [
        *scores,
        ("clients", number(headline["clients"], 0)),
        (f"of {planned:,} rounds" if unfinished else "rounds", number(headline["rounds"], 0)),
        ("clusters", number(headline["clusters"], 0)),
        ("ARI", number(headline["ari"])),
        ("sent up", size(headline["bytes_up"])),
        ("sent down", size(headline["bytes_down"])),
        ("time", duration(headline["seconds"])),
        *([("failures of clients", number(failed))] if failed else []),
    ]
    return [(name, value) for name, value in facts if value != UNKNOWN]


def _results_table(run: RunFiles, headline: Mapping[str, Value]) -> Table:
    """The results: what was measured, on which clients, last and best."""
    last, estimate = "last evaluation", headline["estimated_from"] is not None
    if isinstance(headline["last_round"], int):
        last += f" (round {headline['last_round'] + 1:,})"
    if estimate:
        last += f", estimated from {number(headline['estimated_from'], 0)} clients"
    best = percent(headline["accuracy_mean_max"])
    if isinstance(headline["max_round"], int):
        best += f" (round {headline['max_round'] + 1:,})"
    rows = [
        ["Accuracy, mean over clients", uncertain(headline["accuracy_mean"], None, estimate), best],
        ["Its standard error over clients", percent(headline["accuracy_se"]), ""],
        ["Its standard error over test samples", percent(headline["accuracy_se_samples"]), ""],
        ["Distinct test samples", number(headline["distinct_test_samples"], 0), ""],
        ["Test samples of a client, least to most", _test_sizes(run), ""],
        ["Accuracy, weighted by test samples", percent(headline["accuracy_weighted"]), ""],
        ["Accuracy, median client", percent(headline["accuracy_median"]), ""],
        ["Accuracy, mean of the worst 10 % of clients", percent(headline["accuracy_worst10"]), ""],
        ["Accuracy, mean of the best 10 % of clients", percent(headline["accuracy_best10"]), ""],
        ["Accuracy, fine-tuned by each client", percent(headline["finetuned_accuracy_mean"]), ""],
        ["Accuracy of models as clients trained them", percent(headline["local_accuracy_mean"]), ""],
        ["Accuracy on all test samples", percent(headline["common_accuracy_mean"]), ""],
        ["Accuracy on validation samples", percent(headline["validation_accuracy_mean"]), ""],
        ["Variance over clients, %²", number(headline["accuracy_var"], 1), ""],
        ["Variance within planted groups, %²", number(headline["group_var_within"], 1), ""],
        ["Variance between planted groups, %²", number(headline["group_var_between"], 1), ""],
        ["Variance within clusters, %²", number(headline["cluster_var_within"], 1), ""],
        ["Variance between clusters, %²", number(headline["cluster_var_between"], 1), ""],
        ["Accuracy of clients that joined at the end", percent(headline["newcomers_accuracy_mean"]), ""],
        ["The same, fine-tuned", percent(headline["newcomers_finetuned_accuracy_mean"]), ""],
        ["Mean of each client's own best round", "", percent(headline["accuracy_client_best"])],
        *(
            [f"{name} ({about}), mean over clients", number(headline[f"{name}_mean"], 3), ""]
            for name, about in run.measures.items()
        ),
        *(
            [f"{name}, {where}", number(headline[f"{test}{name}_mean"], 3), ""]
            for name in run.described
            for test, where in {**TESTS_IN_ROUNDS, **TESTS_AT_THE_END}.items()
        ),
        ["Test loss, mean over clients", number(headline["loss_mean"], 4), ""],
        ["Perplexity, mean over clients", number(headline["perplexity_mean"], 1), ""],
    ]
    return Table.of(
        ["", last, "best"],
        [row for row in rows if not {row[1], row[2]} <= {UNKNOWN, ""}] or [["No evaluation", UNKNOWN, ""]],
        caption="what was measured",
        sortable=False,
        wrap=True,
    )


def _test_sizes(run: RunFiles) -> str:
    """``70 to 169``, or ``70`` if all are equal."""
    sizes = numbers(run.clients, "test_samples")
    if sizes is None or not (sizes > 0).any():
        return UNKNOWN
    least, most = f"{sizes[sizes > 0].min():,.0f}", f"{np.nanmax(sizes):,.0f}"
    return least if least == most else f"{least} to {most}"


# --- over rounds ----------------------------------------------------------------------------------------


def metrics_of(run: RunFiles) -> list[Metric]:
    """The columns of a run's ``rounds.csv`` that are drawn: :data:`METRICS`, and its loss's measures."""
    metrics = {metric.column: metric for metric in METRICS}
    for name, about in run.described.items():
        for test, where in {"": "", **TESTS_IN_ROUNDS}.items():
            column, label = f"{test}{name}_mean", f"{about}{where and f', {where}'}, mean over clients"
            metrics.setdefault(column, Metric(column, label, "number:4"))
    return list(metrics.values())


def line_of(run: RunFiles, name: str) -> Line:
    """The rounds of a run as a line: :func:`metrics_of` over :data:`ROUNDS`, for every round with any of
    them.
    """
    if "round" not in run.rounds:
        return Line(name, {"round": []})
    rounds, metrics = numeric(run.rounds), metrics_of(run)
    wanted = [n for metric in metrics for n in (metric.column, metric.low, metric.high) if n in rounds]
    wanted = [name for name in wanted if name != "clusters" or run.clustered]
    columns: dict[str, Any] = {"round": rounded(rounds["round"] + 1, 0)}
    if run.sent is not None:
        columns["bytes"] = rounded(run.sent, 0)
    if "seconds" in rounds:
        columns["time"] = rounded(rounds["seconds"].fillna(0).cumsum(), 2)
    columns |= {name: significant(rounds[name]) for name in dict.fromkeys(wanted)}
    hollow = ""
    if "estimated_from" in rounds and rounds["estimated_from"].notna().any():
        hollow, columns["estimated"] = "estimated", rounds["estimated_from"].notna().tolist()
    return Line(name, columns, hollow, metrics)


def thinned(line: Line, most: int = MOST_ROUNDS) -> Line:
    """At most ``most`` evenly spaced rows of a line, and as many of those with an evaluation."""
    count = len(line.columns["round"])
    chosen = set(spaced(count, most).tolist())
    tests = [line.columns[name] for name in ("accuracy_mean", "loss_mean") if name in line.columns]
    tested = [i for i in range(count) if any(values[i] is not None for values in tests)]
    chosen |= {tested[i] for i in spaced(len(tested), most).tolist()}
    rows = sorted(chosen)
    columns = {name: [values[i] for i in rows] for name, values in line.columns.items()}
    return replace(line, columns=columns)


def known(metrics: Sequence[Metric], lines: Sequence[Line]) -> list[Metric]:
    """The metrics for which some line has a value, without bands that no line has."""
    available = []
    for metric in metrics:
        if any(value is not None for line in lines for value in line.columns.get(metric.column, ())):
            banded = any(metric.low in line.columns and metric.high in line.columns for line in lines)
            available.append(metric if banded else Metric(metric.column, metric.label, metric.format))
    return available


def offered(lines: Sequence[Line]) -> list[Metric]:
    """The metrics of lines, each once."""
    return list({metric.column: metric for line in lines for metric in line.metrics}.values())


def _over_rounds(run: RunFiles, headline: Mapping[str, Value]) -> Section | None:
    line = thinned(line_of(run, "this run"))
    metrics = known(offered([line]), [line])
    if not metrics:
        return None
    note = "Each client is tested on its own test samples with the model that it would use."
    counts = numbers(run.evaluated, "estimated_from")
    if counts is not None:
        note += (
            f" Hollow points are estimates from {np.nanmin(counts):,.0f} clients that represent all; none of "
            "them counts as best."
        )
    drawn = len(line.columns["round"])
    if drawn < len(run.rounds):
        note += f" {drawn:,} of {len(run.rounds):,} rounds are drawn, evenly spaced."
    alt = f"{metrics[0].label} over rounds"
    if headline["accuracy_mean"] is not None:
        alt = f"Mean accuracy over rounds, last {percent(headline['accuracy_mean'])}"
    return Section("Over rounds", note, [curves([line], metrics, known(ROUNDS, [line]), alt)])


def _by_group(run: RunFiles, kind: str) -> Section | None:
    """Accuracies by planted group or by cluster: over rounds, and in the last evaluation."""
    last = run.last_groups(kind)
    if last.empty:
        return None
    name = "planted group" if kind == "group" else "cluster"
    evaluated = run.evaluated
    inside, apart = (numbers(evaluated, f"{kind}_var_{part}") for part in ("within", "between"))
    note = f"Means over the clients of each {name}."
    if inside is not None and apart is not None:
        within, between = float(inside[-1]), float(apart[-1])
        note += (
            f" Of the variance over all clients, {number(within + between)} %², {number(within)} lie within "
            f"{name}s and {number(between)} between them."
        )
    accurate = bool(last["accuracy_mean"].notna().any())
    what = "Accuracy" if accurate else "Test loss"
    if accurate:
        note += (
            " Standard errors of the mean: ± clients if other clients of the kind were drawn, ± samples if "
            "other test samples were."
        )
    base = note
    columns = [
        ("clients", "clients", "number:0"),
        ("distinct_test_samples", "test samples", "number:0"),
        ("accuracy_mean", "mean accuracy", "percent:1"),
        ("accuracy_se", "± clients", "number:1"),
        ("accuracy_se_samples", "± samples", "number:1"),
        ("accuracy_var", "variance, %²", "number:2"),
        ("loss_mean", "test loss", "number:4"),
    ]
    ids = last["id"].map(_id_text).tolist()
    table = Table(
        [
            Column(kind, ids),
            *(
                Column(title, _rounded_column(last, c, 6), f)
                for c, title, f in columns
                if accurate or "accuracy" not in c
            ),
        ],
        caption=f"{what.lower()} by {name}",
    )
    charts = []
    if len(last) <= MOST_LINES:
        of_kind = numeric(run.groups[run.groups["kind"] == kind])
        lines = []
        for i in pd.to_numeric(last["id"], errors="coerce").tolist():
            rows = of_kind[of_kind["id"] == i]
            if len(rows) > MOST_ROUNDS // 2:
                rows = rows.iloc[spaced(len(rows), MOST_ROUNDS // 2)]
                note = f"{base} Of the rounds with tests {len(rows):,} are drawn, evenly spaced."
            shown = {"round": rounded(rows["round"] + 1, 0)}
            shown |= {c: significant(rows[c]) for c, _, _ in columns[2:] if c in rows}
            hollow = ""
            if "estimated_from" in rows and rows["estimated_from"].notna().any():
                hollow, shown["estimated"] = "estimated", rows["estimated_from"].notna().tolist()
            place = int(i) if i >= 0 else None  # as far as colours go, that of the map
            lines.append(Line(f"{kind} {_id_text(i)}", shown, hollow, place=place))
        choices = known(
            [
                Metric("accuracy_mean", "test accuracy, mean (%)", "percent:1"),
                Metric("accuracy_var", "variance of accuracy over clients (%²)", "number:1"),
                Metric("loss_mean", "test loss, mean", "number:4"),
            ],
            lines,
        )
        charts.append(curves(lines, choices, ROUNDS[:1], f"Mean accuracy of each {name} over rounds"))
    return Section(f"{what} by {name}", note, charts, [table])


# --- clients --------------------------------------------------------------------------------------------

CLIENT_COLUMNS = (
    ("client", "client", "text"),
    ("n", "training samples", "number:0"),
    ("test_samples", "test samples", "number:0"),
    ("group", "planted group", "text"),
    ("cluster", "cluster", "text"),
    ("rounds_trained", "rounds trained", "number:0"),
    ("accuracy_last", "accuracy, last", "percent:1"),
    ("accuracy_best", "best", "percent:1"),
    ("best_round", "best round", "number:0"),
    ("local_accuracy_last", "local model", "percent:1"),
    ("local_round", "trained in round", "number:0"),
    ("validation_accuracy_last", "on validation samples", "percent:1"),
    ("common_accuracy_last", "on all test samples", "percent:1"),
    ("accuracy_finetuned", "fine-tuned", "percent:1"),
    ("newcomers_accuracy", "newcomer", "percent:1"),
    ("newcomers_finetuned_accuracy", "newcomer, fine-tuned", "percent:1"),
    ("perplexity_last", "perplexity, last", "number:1"),
    ("perplexity_best", "lowest perplexity", "number:1"),
)
"""Columns of the table of clients: name in the page's data, heading, format. Others follow under their own
names.
"""


def client_columns(run: RunFiles) -> dict[str, list[Any]]:
    """The columns of ``clients.csv`` as they are shown: clients with the user's own ids, rounds counted from
    1.
    """
    frame = run.clients
    if frame.empty or "client" not in frame:
        return {}
    names = frame["name"].astype(str) if "name" in frame else frame["client"]
    columns: dict[str, list[Any]] = {"client": names.tolist()}
    for column in frame.columns:
        values = numbers(frame, column)
        if column in ("client", "name") or values is None:
            continue
        if column in ("best_round", "local_round"):
            values = np.where(values < 0, np.nan, values + 1)
        columns[column] = significant(values)
    absent, results = run.absent_at_end.tolist(), tuple(f"{name}_last" for name in run.described)
    for column in columns:
        if "accuracy" in column or column.startswith(("perplexity", "best", *results)):
            columns[column] = [None if left else v for v, left in zip(columns[column], absent, strict=True)]
    if not run.clustered:
        columns.pop("cluster", None)
    return {name: values for name, values in columns.items() if any(v is not None for v in values)}


def result_of_clients(runs: Sequence[RunFiles]) -> Metric | None:
    """The main result of single clients: their accuracy, else the first measure of the loss; None if the
    clients of no run have one.
    """
    about = described_in(runs)
    metrics = [
        Metric("accuracy_last", "last test accuracy of the client (%)", "percent:1"),
        *(Metric(f"{name}_last", f"last {text} of the client", "number:3") for name, text in about.items()),
    ]
    return next((m for m in metrics if any(results_of(run, m) is not None for run in runs)), None)


def results_of(run: RunFiles, metric: Metric) -> NDArray[np.float64] | None:
    """The results of the clients ``(N,)``, NaN for absent ones; None if no client has one."""
    results = numbers(run.clients, metric.column)
    results = None if results is None else np.where(run.absent_at_end, np.nan, results)
    return None if results is None or np.isnan(results).all() else results


def _noun(metric: Metric) -> str:
    """``accuracy``, ``rmse``."""
    return metric.column.removesuffix("_last")


def _clients(run: RunFiles, columns: Mapping[str, list[Any]]) -> Section | None:
    metric = result_of_clients([run])
    last = None if metric is None else results_of(run, metric)
    if metric is None or last is None or not columns:
        return None
    tested = int((~np.isnan(last)).sum())
    note = f"Last {_noun(metric)} of {tested:,} of {len(last):,} clients."
    if run.absent_at_end.any():
        note += f" Those that left ({int(run.absent_at_end.sum()):,}) are not shown."
    late = run.newcomers & np.isnan(last)
    if late.any():
        note += f" Those that joined after the last round ({int(late.sum()):,}) are in the table only."
    titles = {name: (title, format) for name, title, format in CLIENT_COLUMNS}
    titles |= {f"{name}_last": (f"{name}, last", "number:3") for name in run.described}
    for name in run.described:
        titles |= {
            f"{test}{name}_last": (f"{name}, {where}", "number:3") for test, where in TESTS_IN_ROUNDS.items()
        }
        titles |= {
            column_of(test, name): (f"{name}, {where}", "number:3")
            for test, where in TESTS_AT_THE_END.items()
        }
    order = [name for name in titles if name in columns] + [name for name in columns if name not in titles]
    table = Table(
        [
            Column(title, Data("clients", name), format, right=format != "text" or name != "client")
            for name in order
            for title, format in [titles.get(name, (name.replace("_", " "), "general"))]
        ],
        caption="clients",
        filter=True,
    )
    return Section("Clients", note, [_spread_of_clients(columns, last, metric)], [table])


def _spread_of_clients(columns: Mapping[str, list[Any]], last: NDArray[np.float64], metric: Metric) -> Chart:
    label, noun = metric.label, _noun(metric)
    alt = f"Histogram of clients by {noun}, mean {formatted(float(np.nanmean(last)), metric.format)}"
    accuracy = metric.format.startswith("percent")
    edges = np.arange(0, 101, 5.0) if accuracy else round_edges(last)
    bins = histogram(last, label, alt, edges, "percent:0" if accuracy else "general")
    charts = {"all clients": bins}
    for column, name in (("group", "planted group"), ("cluster", "cluster")):
        if column not in columns:
            continue
        labels = pd.Series(columns[column])
        largest = labels.value_counts().index[:MOST_BOXES]
        groups = {_id_text(i): last[(labels == i).to_numpy()] for i in sorted(largest)}
        boxes = {i: values for i, values in groups.items() if not np.isnan(values).all()}
        if boxes and labels.nunique() < len(labels):
            alt = f"Box plots of client {noun} by {name}"
            charts[f"by {name}"] = box(boxes, label, alt, metric.format)
    if "n" in columns:
        tip = [("training samples", "n", "number:0"), (noun, metric.column, metric.format)]
        tip += [(name, name, "text") for name in ("cluster", "group") if name in columns]
        x = Metric("n", "training samples", "number:0")
        points = Points("@clients", x, metric, "client", tip, 7)
        alt = f"{noun.capitalize()} of clients over their number of training samples"
        charts["by size"] = scatter(points, alt)
    return alternatives(f"{noun} of", charts)


def map_section(
    run: RunFiles, columns: dict[str, list[Any]], table: str = "clients", title: str = "Map of clients"
) -> Section | None:
    """Clients in the plane with a slider over the clusterings; None if their places are unknown.

    Args:
        run: whose clients.
        columns: from :func:`client_columns`; the columns of the map are added.
        table: their name in the page's data.
        title: of the section.
    """
    timeline = maps.steps_of(run) if run.clustered else []
    placement = maps.map_of(run, timeline) if columns else None
    if placement is None or placement.places.shape[1] != len(columns["client"]):
        return None
    positions = _present_places(placement.places, timeline, run)
    moving = len(positions) > 1
    for t, places in enumerate(positions):
        for axis, values in zip("xy", places.T, strict=True):
            columns[f"{axis}{t if moving else ''}"] = rounded(values, maps.DIGITS)
    frames, previous = [], None
    for t, step in enumerate(timeline):
        columns[f"cluster {t}"] = [None if label < 0 else label for label in step.labels.tolist()]
        what = "" if previous is None else maps.change(previous, step.labels)
        count = len(np.unique(step.labels[step.labels >= 0]))
        label = ", ".join(filter(None, (f"{step.when}: {counted(count, 'cluster')}", what)))
        frames.append(Frame(label, str(t)))
        previous = step.labels
    colours, tip = [], []
    if frames:
        colours.append(Colour("cluster {slider}", "cluster"))
        tip.append(("cluster", "cluster {slider}", "text"))
    if "group" in columns:
        colours.append(Colour("group", "planted group"))
        tip.append(("planted group", "group", "text"))
    metric = result_of_clients([run])
    scales = [("n", "training samples", "number:0")]
    scales += [] if metric is None else [(metric.column, f"{_noun(metric)}, last", metric.format)]
    for name, label, format in scales:
        if name in columns:
            values = [v for v in columns[name] if v is not None]
            colours.append(Colour.scale(name, label, format, values))
            tip.append((label, name, format))
    x, y = (
        Metric(f"{axis}{{slider}}" if moving else axis, f"dimension {i}") for i, axis in enumerate("xy", 1)
    )
    count = len(columns["client"])
    points = Points(f"@{table}", x, y, "client", tip, 12 if count <= 100 else 8 if count <= 1000 else 4)
    alt = f"Map of {count:,} clients" + (f", {frames[-1].label}" if frames else "")
    note = f"Similar clients are close together: by {placement.meaning}. Drag to zoom in."
    if len(frames) > 1:
        note += " The slider goes through the clusterings in time."
    if timeline:
        placed = np.isfinite(positions[-1]).all(axis=1)
        unplaced = int((~placed & (timeline[-1].labels >= 0)).sum())
        if unplaced:
            note += f" Without {counted(unplaced, 'client')} whose position is unknown: they joined later."
    charts, matrix = [client_map(points, colours, frames, alt)], maps.matrix_of(run)
    if matrix is not None:
        names = [str(columns["client"][i]) for i in matrix.clients]
        label = matrix.meaning
        if len(names) < count:
            label += f", {len(names)} of {count:,} clients"
        alt = f"Matrix of {label}, alike is dark"
        charts.append(heatmap(matrix.distances, names, names, alt, dark="low", label=label))
        note += " In the matrix similar clients are side by side; dark: alike."
    return Section(title, note, charts, beside=len(charts) > 1)


def _present_places(places: maps.Array, timeline: Sequence[maps.Step], run: RunFiles) -> maps.Array:
    """The positions ``(T, N, 2)`` of the clients that are present at each step, NaN of the others; T = 1 if
    nothing changes.
    """
    absent = np.array([step.labels < 0 for step in timeline] or [run.absent_at_end])
    if len(places) == 1 and (absent == absent[0]).all():
        absent = absent[:1]
    return np.where(absent[:, :, None], np.nan, places)


# --- clusters -------------------------------------------------------------------------------------------


def _clusters(run: RunFiles) -> Section | None:
    """Sizes, results and planted groups of the last clustering, and how it was found."""
    labels, metric = _last_clusters(run), result_of_clients([run])
    if labels is None or not run.clustered:
        return None
    clients = pd.DataFrame({"cluster": labels})
    results = None if metric is None else numbers(run.clients, metric.column)
    for name, values in (("result", results), ("group", _planted_groups(run))):
        if values is not None and len(values) == len(clients):
            clients[name] = np.asarray(values)
    if "name" in run.clients and len(run.clients) == len(clients):
        clients["name"] = run.clients["name"].to_numpy()
    is_member = clients["cluster"].notna() & (clients["cluster"] >= 0)
    late = 0
    if len(run.clients) == len(clients):
        is_member &= ~run.absent_at_end
        late = int((is_member & run.newcomers).sum())
        is_member &= ~run.newcomers
    clients = clients[is_member]
    if clients.empty:
        return None
    sizes = clients["cluster"].value_counts().sort_index()
    cluster_ids = sizes.index
    note = "Members of the last clustering"
    columns = [
        Column("cluster", [_id_text(i) for i in cluster_ids]),
        Column("clients", sizes.tolist(), "number:0"),
    ]
    if metric is not None and "result" in clients:
        spread = clients.groupby("cluster")["result"].agg(["mean", "min", "max"]).loc[cluster_ids]
        titles = {"mean": f"mean {_noun(metric)}", "min": "lowest", "max": "highest"}
        columns += [Column(title, significant(spread[name]), metric.format) for name, title in titles.items()]
        note += f", last {_noun(metric)} of the members"
    if "group" in clients and clients["group"].nunique() <= MOST_GROUPS:
        crossed = pd.crosstab(clients["cluster"], clients["group"]).reindex(cluster_ids, fill_value=0)
        for group in crossed:
            counts = crossed[group].tolist()
            shares = [n / of if n else None for n, of in zip(counts, sizes.tolist(), strict=True)]
            texts = [f"{n:,}" if n else "·" for n in counts]
            columns.append(Column(f"group {_id_text(group)}", texts, order=counts, shares=shares))
        note += ", and how many members come from each planted group"
    if "name" in clients:
        named = clients.groupby("cluster")["name"].agg(list)
        columns.append(Column("members", [_some_names(named[i]) for i in cluster_ids]))
    tables = [Table(columns, caption="clusters")]

    timeline = run.timeline
    if len(timeline) > 1:
        history = {
            "clustered": [maps.when(entry) for entry in timeline],
            "who": [maps.who(entry) for entry in timeline],
            "clusters": [number(entry.get("n_clusters"), 0) for entry in timeline],
            "ARI": [number(entry.get("ari")) for entry in timeline],
        }
        if not any(history["who"]):
            del history["who"]
        columns = [Column(name, of, right=name in ("clusters", "ARI")) for name, of in history.items()]
        tables.append(Table(columns, caption="clusterings in time", sortable=False))
    charts = []
    if len(sizes) > FEW_CLUSTERS:
        largest = sizes.sort_values(ascending=False, kind="stable").head(MOST_BOXES)
        which = "" if len(largest) == len(sizes) else f", the {MOST_BOXES} largest"
        names = [_id_text(i) for i in largest.index]
        charts.append(
            bars(names, largest.tolist(), "clients", f"Sizes of {len(sizes)} clusters{which}", "number:0")
        )
        note += f" (the chart: the {MOST_BOXES} largest of {len(sizes):,} clusters)" if which else ""
    note += f". Without {counted(late, 'client')} that joined after the last round" if late else ""
    return Section("Clusters", note + ".", charts, tables)


def _threshold(run: RunFiles) -> Section | None:
    """The latest clustering that records how many clusters each threshold would have given."""
    for entry in reversed(run.timeline):
        candidates = (entry.get("threshold"), run.setting("clustering.threshold"))
        beta = next((float(value) for value in candidates if isinstance(value, (int, float))), None)
        proximity = run.setting("clustering.proximity")
        chart = threshold_chart(entry.get("curve"), beta, entry.get("n_clusters"), proximity)
        if chart is not None:
            note = f"The number of clusters that each threshold would have given, {maps.when(entry)}."
            return Section("Choice of threshold", note, [chart])
    return None


def threshold_chart(
    curve: Any, threshold: float | None, clusters: object, proximity: str | None
) -> Chart | None:
    """The number of clusters over the threshold (``threshold`` and ``n_clusters`` of ``clusters.json``)."""
    if not isinstance(curve, dict) or not curve.get("threshold") or not curve.get("n_clusters"):
        return None
    thresholds, counts = (np.asarray(curve[name], np.float64) for name in ("threshold", "n_clusters"))
    if thresholds.shape != counts.shape:
        return None
    chosen = None
    if threshold is not None and np.isfinite(threshold):
        result = f"{counted(clusters, 'cluster')} at " if isinstance(clusters, int) else ""
        chosen = threshold, f"chosen: {result}{threshold:.4g}"
    alt = "Number of clusters over the threshold" + ("" if chosen is None else f"; {chosen[1]}")
    axis = "threshold (degrees)" if proximity in ANGLES else "threshold"
    return steps(thresholds, counts, (axis, "clusters"), alt, chosen)


def _communication(run: RunFiles) -> Section | None:
    ledger = run.communication
    if ledger.empty or not {"round", "tier", "direction", "kind", "bytes"} <= set(ledger.columns):
        return None
    rows, links = [], Counter[tuple[str, str]]()
    for (tier, kind), transfers in ledger.groupby(["tier", "kind"]):
        low, high = TIER_ENDS.get(str(tier), (str(tier), f"{tier} (above)"))
        amounts = [int(transfers.loc[transfers["direction"] == way, "bytes"].sum()) for way in ("up", "down")]
        rows.append([f"{low} – {high}", str(kind), *amounts])
        up, down = ("clients", "servers") if len(set(ledger["tier"])) == 1 else (low, high)
        links[f"from {up}", str(kind)] += amounts[0]
        links[f"from {down}", str(kind)] += amounts[1]
    columns = list(zip(*rows, strict=True))
    table = Table(
        [
            Column("between", columns[0]), Column("what", columns[1]),
            Column("up", columns[2], "size"), Column("down", columns[3], "size"),
        ],
        caption="bytes by tier and kind",
    )  # fmt: skip
    if not ledger["bytes"].sum():
        return Section("Communication", "Nothing was sent.")
    charts = []
    lines = _traffic_lines(ledger)
    if lines:
        metric = Metric("bytes", "bytes a round", "size")
        total = Metric("total", "bytes so far", "size")
        charts.append(curves(lines, [metric, total], ROUNDS[:1], "Bytes a round by tier and direction", 300))
    total_size = size(int(ledger["bytes"].sum()))
    flows = [(*ends, sent) for ends, sent in links.items()]
    charts.append(sankey(flows, f"What was sent by whom over the whole run, {total_size} in all"))
    before = int(ledger.loc[ledger["round"] < 0, "bytes"].sum())
    note = f"{total_size} in all: who sends what, and how much in each round."
    note += f" Before training: {size(before)}, once." if before else ""
    return Section("Communication", note, charts, [table], beside=True)


def _traffic_lines(ledger: pd.DataFrame) -> list[Line]:
    """Bytes of each round, by tier and direction."""
    during = ledger[ledger["round"] >= 0]
    rounds = np.sort(during["round"].unique())
    lines = []
    indices = spaced(len(rounds), MOST_ROUNDS)
    for (tier, way), part in during.groupby(["tier", "direction"]):
        sums = part.groupby("round")["bytes"].sum().reindex(rounds, fill_value=0)
        low, high = TIER_ENDS.get(str(tier), (str(tier), str(tier)))
        all_rounds = {"round": rounds + 1, "bytes": sums.to_numpy(), "total": sums.cumsum().to_numpy()}
        columns = {name: values[indices].tolist() for name, values in all_rounds.items()}
        lines.append(Line(f"{low} to {high}" if way == "up" else f"{high} to {low}", columns))
    return lines


# --- small ----------------------------------------------------------------------------------------------


def _rounded_column(frame: pd.DataFrame, column: str, digits: int) -> list[Any]:
    values = numbers(frame, column)
    return [None] * len(frame) if values is None else rounded(values, digits)


def _last_clusters(run: RunFiles) -> pd.Series[Any] | None:
    """The cluster of each client at the end: from the timeline, else from the table of clients."""
    for entry in reversed(run.timeline):
        if entry.get("labels"):
            return pd.Series(entry["labels"])
    return run.clients["cluster"] if numbers(run.clients, "cluster") is not None else None


def _planted_groups(run: RunFiles) -> pd.Series[Any] | None:
    """The planted group of each client, if there is one."""
    if run.clusters.get("groups"):
        return pd.Series(run.clusters["groups"])
    return run.clients["group"] if numbers(run.clients, "group") is not None else None


def _some_names(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def _id_text(value: object) -> str:
    """A cluster or group as users name it; tables with gaps store integers as floats."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested mappings as dotted names and values."""
    rows: list[tuple[str, str]] = []
    for name, value in tree.items():
        rows += (
            _flat(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else [(f"{prefix}{name}", str(value))]
        )
    return rows

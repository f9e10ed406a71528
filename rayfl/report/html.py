"""``report.html``: one self-contained page about one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup
from numpy.typing import NDArray

from rayfl import files
from rayfl.report import figures
from rayfl.report.files import RunFiles, Value, numbers
from rayfl.report.tables import Cell, Table
from rayfl.units import UNKNOWN, duration, number, percent, size, uncertain

MOST_ROWS = 40
"""Rows of the cluster table; larger clusterings show their largest clusters."""
FEW_CLIENTS = 10
"""Of more named clients than :data:`MOST_ROWS`, so many of the least and of the most accurate."""
MOST_GROUPS = 20
MOST_LINES = 12
"""Groups in one chart; of more groups there is only the table."""
MOST_NAMES = 8
"""Members of a cluster that are named, where clients have ids of the user's own."""
FEW_CLUSTERS = 8
"""Up to so many clusters the table alone shows the sizes."""


@dataclass(frozen=True)
class Section:
    """A part of the page: a title, a line about it, a chart, tables."""

    title: str
    note: str = ""
    figure: Markup | None = None
    tables: tuple[Table, ...] = ()


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into a run directory and return its path.

    Whatever of the run's files is missing or broken is left out and named at the foot of the page. The
    file is replaced at once, so a reader never sees half of it.

    Raises:
        RayflError: if there is no such directory.
    """
    run = RunFiles.read(run_dir)
    headline = run.headline()
    sections = [
        part
        for part in (
            _accuracy(run, headline),
            _by_group(run, "group"),
            _by_group(run, "cluster"),
            _perplexity(run),
            _clients(run),
            _clusters(run),
            _threshold(run),
            _communication(run),
            _loss(run),
        )
        if part is not None
    ]
    names = [str(headline[part]) for part in ("algorithm", "data", "partition", "model") if headline[part]]
    page = render(
        "report.html",
        title=run.path.resolve().name,
        subtitle=" · ".join(names),
        facts=_facts(run, headline),
        headline=_headline(run, headline),
        sections=sections,
        config=run.config_text,
        environment=_flat(run.environment),
        missing=run.missing,
    )
    return write(run_dir / "report.html", page)


def render(template: str, **values: Any) -> str:
    """Fill in one of the templates that lie beside this module."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template(template).render(**values)


def write(path: Path, text: str) -> Path:
    """Replace a file at once.

    Raises:
        DiskError
    """
    files.write(path, text)
    return path


def _facts(run: RunFiles, headline: Mapping[str, Value]) -> list[tuple[str, str]]:
    """The handful of numbers at the top; failures only if there were some."""
    failures = numbers(run.rounds, "failures")
    failed = 0 if failures is None else int(np.nansum(failures))
    estimate = headline["estimated_from"] is not None
    return [
        ("mean accuracy", uncertain(headline["accuracy_mean"], None, estimate)),
        ("worst 10 % of clients", uncertain(headline["accuracy_worst10"], None, estimate)),
        ("clusters", number(headline["clusters"], 0)),
        ("ARI", number(headline["ari"])),
        ("sent up", size(headline["bytes_up"])),
        ("sent down", size(headline["bytes_down"])),
        ("time", duration(headline["seconds"])),
        *([("failed clients", number(failed))] if failed else []),
    ]


def _headline(run: RunFiles, headline: Mapping[str, Value]) -> Table:
    """What was measured, on whom, last and best."""
    last, estimate = "last evaluation", headline["estimated_from"] is not None
    if headline["last_round"] is not None:
        last += f" (round {headline['last_round']})"
    if estimate:
        last += f", estimated from {number(headline['estimated_from'], 0)} clients"
    best = percent(headline["accuracy_mean_max"])
    if headline["max_round"] is not None:
        best += f" (round {headline['max_round']})"
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
        ["Variance over clients, %²", number(headline["accuracy_var"], 1), ""],
        ["Variance within planted groups, %²", number(headline["group_var_within"], 1), ""],
        ["Variance between planted groups, %²", number(headline["group_var_between"], 1), ""],
        ["Variance within clusters, %²", number(headline["cluster_var_within"], 1), ""],
        ["Variance between clusters, %²", number(headline["cluster_var_between"], 1), ""],
        ["Mean of each client's own best round", "", percent(headline["accuracy_client_best"])],
        ["Test loss, mean over clients", number(headline["loss_mean"], 4), ""],
        ["Perplexity, mean over clients", number(headline["perplexity_mean"], 1), ""],
    ]
    return Table.of(
        ["", last, "best"],
        [row for row in rows if not {row[1], row[2]} <= {UNKNOWN, ""}] or [["No evaluation", UNKNOWN, ""]],
    )


def _test_sizes(run: RunFiles) -> str:
    """``70 to 169``."""
    sizes = numbers(run.clients, "test_samples")
    if sizes is None or not (sizes > 0).any():
        return UNKNOWN
    return f"{sizes[sizes > 0].min():,.0f} to {np.nanmax(sizes):,.0f}"


def _accuracy(run: RunFiles, headline: Mapping[str, Value]) -> Section | None:
    evaluated = run.evaluated()
    if evaluated.empty:
        return None
    alt = f"Mean accuracy over rounds, last {percent(headline['accuracy_mean'])}"
    note = "Each client is tested on its own test samples with the model that it would use."
    few = numbers(evaluated, "estimated_from")
    if few is not None:
        note += (
            f" Hollow points are estimates from {np.nanmin(few):,.0f} clients that stand for all; none of "
            "them counts as best."
        )
    return Section(
        "Accuracy over rounds", note, figures.picture(figures.accuracy_over_rounds(evaluated), alt)
    )


def _by_group(run: RunFiles, kind: str) -> Section | None:
    """Accuracies by planted group or by cluster: over rounds, and of the last evaluation."""
    last = run.last_groups(kind)
    if last.empty:
        return None
    name = "planted group" if kind == "group" else "cluster"
    evaluated = run.evaluated()
    inside, apart = (numbers(evaluated, f"{kind}_var_{part}") for part in ("within", "between"))
    note = f"Means over the clients of each {name}."
    if inside is not None and apart is not None:
        within, between = float(inside[-1]), float(apart[-1])
        note += (
            f" Of the variance over all clients, {number(within + between)} %², {number(within)} lie within "
            f"{name}s and {number(between)} between them."
        )
    note += (
        " Standard errors of the mean: ± clients if other clients of the kind were drawn, ± samples if other "
        "test samples were."
    )
    columns: list[tuple[str, str, Callable[[object], str]]] = [
        ("clients", "clients", lambda value: number(value, 0)),
        ("distinct_test_samples", "test samples", lambda value: number(value, 0)),
        ("accuracy_mean", "mean accuracy", percent),
        ("accuracy_se", "± clients", lambda value: number(value, 1)),
        ("accuracy_se_samples", "± samples", lambda value: number(value, 1)),
        ("accuracy_var", "variance, %²", number),
        ("loss_mean", "test loss", lambda value: number(value, 4)),
    ]
    rows = [
        [_id(row["id"]), *(form(row.get(column)) for column, _, form in columns)]
        for row in last.head(MOST_ROWS).to_dict("records")
    ]
    if len(last) > MOST_ROWS:
        note += f" The first {MOST_ROWS} of {len(last)} {name}s."
    figure = None
    if len(last) <= MOST_LINES and (kind == "group" or run.last_groups("group").empty):
        its = run.groups[run.groups["kind"] == kind]
        lines = [(f"{kind} {i}", its[its["id"] == i]) for i in last["id"].tolist()]
        draw = figures.curves(lines, "accuracy_mean", "test accuracy (%)")
        figure = figures.picture(draw, f"Mean accuracy of each {name} over rounds")
    table = Table.of([kind, *(title for _, title, _ in columns)], rows)
    return Section(f"Accuracy by {name}", note, figure, (table,))


def _perplexity(run: RunFiles) -> Section | None:
    evaluated = run.evaluated()
    if numbers(evaluated, "perplexity_mean") is None:
        return None
    draw = figures.curves([("mean over clients", evaluated)], "perplexity_mean", "test perplexity")
    note = "exp of a client's mean loss for a word, at best 1."
    return Section("Perplexity over rounds", note, figures.picture(draw, "Perplexity over rounds"))


def _loss(run: RunFiles) -> Section | None:
    if "round" not in run.rounds:
        return None
    rounds = run.rounds.apply(pd.to_numeric, errors="coerce")
    evaluated = run.evaluated()
    if numbers(rounds, "train_loss") is None and numbers(evaluated, "loss_mean") is None:
        return None
    return Section(
        "Loss", "", figures.picture(figures.loss_over_rounds(rounds, evaluated), "Loss over rounds")
    )


def _clients(run: RunFiles) -> Section | None:
    last = numbers(run.clients, "accuracy_last")
    if last is None:
        return None
    gone = _gone(run)
    last = np.where(gone, np.nan, last)
    if np.isnan(last).all():
        return None
    tested = int((~np.isnan(last)).sum())
    note = f"Last accuracy of {tested:,} of {len(last):,} clients."
    if gone.any():
        note += f" Those that left ({int(gone.sum()):,}) are not shown."
    alt = f"Histogram of client accuracies, mean {np.nanmean(last):.1f} %"
    figure = figures.picture(figures.accuracy_histogram(last), alt, height=2.8)
    return Section("Clients", note, figure, _named_clients(run, last))


def _named_clients(run: RunFiles, last: NDArray[np.float64]) -> tuple[Table, ...]:
    """Where clients have ids of the user's own: the least and the most accurate of them."""
    if "name" not in run.clients:
        return ()
    order = np.argsort(last, kind="stable")[: int((~np.isnan(last)).sum())]
    shown = order if len(order) <= MOST_ROWS else np.concatenate([order[:FEW_CLIENTS], order[-FEW_CLIENTS:]])
    columns = [("n", "samples"), ("test_samples", "test samples"), ("cluster", "cluster")]
    rows = [
        [str(row["name"]), percent(row["accuracy_last"]), *(_id(row.get(column)) for column, _ in columns)]
        for row in run.clients.iloc[shown].to_dict("records")
    ]
    return (Table.of(["client, lowest accuracy first", "accuracy", *(title for _, title in columns)], rows),)


def _gone(run: RunFiles) -> NDArray[np.bool_]:
    """Which clients are not there in the end ``(N,)``: those without training samples."""
    sizes = numbers(run.clients, "n")
    none = np.zeros(len(run.clients), bool)
    return none if sizes is None or not (sizes > 0).any() else sizes == 0


def _clusters(run: RunFiles) -> Section | None:
    """Sizes, accuracies and planted groups of the last clustering, and how it came about."""
    labels = _labels(run)
    if labels is None:
        return None
    clients = pd.DataFrame({"cluster": labels})
    if "name" in run.clients and len(run.clients) == len(labels):
        clients["name"] = run.clients["name"].astype(str)
    last = numbers(run.clients, "accuracy_last")
    if last is not None and len(last) == len(labels):
        clients["accuracy"] = last
    groups = _groups(run)
    if groups is not None and len(groups) == len(labels):
        clients["group"] = groups
    if len(run.clients) == len(labels):
        clients = clients[~_gone(run)]
    sizes = clients.groupby("cluster").size().sort_values(ascending=False, kind="stable")
    shown = sizes.index[:MOST_ROWS]

    header = ["cluster", "clients"]
    columns: list[list[Cell]] = [
        [Cell(_id(i)) for i in shown],
        [Cell(f"{n:,}") for n in sizes.loc[shown].tolist()],
    ]
    note = "Sizes of the last clustering"
    if "accuracy" in clients:
        spread = clients.groupby("cluster")["accuracy"].agg(["mean", "min", "max"]).loc[shown]
        header += ["mean accuracy", "lowest", "highest"]
        columns += [
            [Cell(percent(float(value))) for value in spread[name]] for name in ("mean", "min", "max")
        ]
        note += ", last accuracy of the members"
    if "group" in clients and clients["group"].nunique() <= MOST_GROUPS:
        crossed = pd.crosstab(clients["cluster"], clients["group"]).reindex(shown, fill_value=0)
        header += [f"group {_id(group)}" for group in crossed]
        columns += [
            [
                Cell(f"{n:,}" if n else "·", n / of if n else None)
                for n, of in zip(crossed[group].tolist(), sizes.loc[shown].tolist(), strict=True)
            ]
            for group in crossed
        ]
        note += ", and how many members come from each planted group"
    if "name" in clients:
        header.append("members")
        named = clients.groupby("cluster")["name"].agg(list)
        columns.append([Cell(_some(named[i])) for i in shown])
    note += "." if len(sizes) <= MOST_ROWS else f". The {MOST_ROWS} largest of {len(sizes):,} clusters."
    tables = [Table(header, list(zip(*columns, strict=True)))]

    timeline = run.timeline
    if len(timeline) > 1:
        rows = [
            [_when(entry), number(entry.get("n_clusters"), 0), number(entry.get("ari"))]
            for entry in timeline[-MOST_ROWS:]
        ]
        tables.append(Table.of(["clustered", "clusters", "ARI"], rows))
    figure = None
    if len(sizes) > FEW_CLUSTERS:
        draw = figures.cluster_sizes(np.asarray(sizes, np.int64))
        figure = figures.picture(draw, f"Sizes of {len(sizes)} clusters", height=2.6)
    return Section("Clusters", note, figure, tuple(tables))


def _threshold(run: RunFiles) -> Section | None:
    """The latest clustering that tells how many clusters each threshold would have given."""
    for entry in reversed(run.timeline):
        curve = entry.get("curve")
        if not isinstance(curve, dict) or not curve.get("threshold") or not curve.get("n_clusters"):
            continue
        thresholds = np.asarray(curve["threshold"], np.float64)
        counts = np.asarray(curve["n_clusters"], np.float64)
        if thresholds.shape != counts.shape:
            continue
        candidates = (entry.get("threshold"), run.setting("clustering.threshold"))
        chosen = next((float(value) for value in candidates if isinstance(value, (int, float))), None)
        draw = figures.threshold_curve(thresholds, counts, chosen, entry.get("n_clusters"))
        note = f"The number of clusters that each threshold would have given, {_when(entry)}."
        return Section(
            "Choice of threshold", note, figures.picture(draw, "Clusters over threshold", height=2.8)
        )
    return None


def _communication(run: RunFiles) -> Section | None:
    ledger = run.communication
    if ledger.empty or not {"round", "tier", "direction", "kind", "bytes"} <= set(ledger.columns):
        return None
    rows = []
    for tier, kind in sorted(set(zip(ledger["tier"], ledger["kind"], strict=True))):
        these = ledger[(ledger["tier"] == tier) & (ledger["kind"] == kind)]
        ways = [int(these.loc[these["direction"] == way, "bytes"].sum()) for way in ("up", "down")]
        rows.append([figures.TIERS.get(tier, str(tier)), str(kind), *map(size, ways)])
    table = Table.of(["between", "what", "up", "down"], rows, left=2)
    figure = None
    if (ledger["round"] >= 0).any():
        figure = figures.picture(figures.communication(ledger), "Bytes a round by tier and direction")
    before = int(ledger.loc[ledger["round"] < 0, "bytes"].sum())
    note = f"Before training: {size(before)}, once; the chart shows the rounds." if before else ""
    return Section("Communication", note, figure, (table,))


def _labels(run: RunFiles) -> pd.Series[Any] | None:
    """The cluster of each client at the end: from the timeline, else from the table of clients."""
    for entry in reversed(run.timeline):
        if entry.get("labels"):
            return pd.Series(entry["labels"])
    return run.clients["cluster"] if numbers(run.clients, "cluster") is not None else None


def _groups(run: RunFiles) -> pd.Series[Any] | None:
    """The planted group of each client, if there is one."""
    if run.clusters.get("groups"):
        return pd.Series(run.clusters["groups"])
    return run.clients["group"] if numbers(run.clients, "group") is not None else None


def _some(names: list[str]) -> str:
    """The first of the names, and how many more there are."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def _id(value: object) -> str:
    """A cluster or group as users name it; tables with gaps hold whole numbers as floats."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _when(entry: Mapping[str, Any]) -> str:
    round = entry.get("round")
    return "before training" if round == -1 else f"round {round}"


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

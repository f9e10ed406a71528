"""``rayfl partition``: show a partition, without training."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from rayfl.config import Config
from rayfl.data import Federation, Stage, build_stages, data_root, describe
from rayfl.data.held_out import read
from rayfl.data.heterogeneity.base import Measure
from rayfl.data.heterogeneity.distances import (
    MEASURES,
    AverageDistance,
    average,
    distance_matrix,
    draw_clients,
)
from rayfl.errors import ArgumentError, DataError, nearest
from rayfl.report import maps, page
from rayfl.report.charts import (
    Colour,
    Metric,
    Points,
    alternatives,
    box,
    client_map,
    heatmap,
    histogram,
    spaced,
    whole_edges,
)
from rayfl.report.page import Chart, Column, Data, Page, Section, render, rounded
from rayfl.report.page import Table as PageTable
from rayfl.units import UNKNOWN

SHOWN_CLIENTS = 12
"""Rows of the table of clients; if there are more, the first and the last are shown."""

SHOWN_CLASSES = 12
"""With more classes than this, the table gives the number of labels of a client instead of samples per label.
"""

DRAWN_GROUPS = 40
"""With at most this many planted groups each has a box plot of its sizes."""

_LONGEST_HEADINGS = 40
"""If the names of all classes together have more characters, the table has their numbers."""

DRAWN_CLIENTS = 1000
"""Rows of the picture of clients and classes; if there are more clients, evenly spaced ones are drawn."""


@dataclass(frozen=True)
class Measured:
    """One measure of a partition.

    Attributes:
        measure: with its settings.
        average: over the compared pairs; None if the measure is not defined for these data.
        values: between the compared clients ``(m, m)``; None if it is not defined.
        refused: why it is not defined, else empty.
    """

    measure: Measure
    average: AverageDistance | None = None
    values: NDArray[np.float64] | None = None
    refused: str = ""


@dataclass(frozen=True)
class PartitionView:
    """A partition from one event to the next, from :func:`rayfl.partition`; a notebook shows it.

    Attributes:
        config: the config.
        stage: the present clients and their samples.
        number, stage_count: which of how many stages, from 1.
        clients: one row per present client (:func:`rayfl.data.describe`).
        compared: ids of the clients between which distances were measured ``(m,)``, ascending.
        measured: one entry per measure.
    """

    config: Config
    stage: Stage
    number: int
    stage_count: int
    clients: pd.DataFrame
    compared: NDArray[np.int64]
    measured: tuple[Measured, ...]

    @property
    def federation(self) -> Federation:
        """All clients; absent ones have no samples."""
        return self.stage.federation

    @property
    def present(self) -> NDArray[np.int64]:
        """Ids of the present clients, ascending."""
        return np.flatnonzero(self.stage.active)

    @property
    def planted(self) -> NDArray[np.int64] | None:
        """The planted groups of the present clients, if there are any."""
        return None if self.federation.groups is None else self.federation.groups[self.present]

    @property
    def folder(self) -> str:
        """The subfolder for the files of this stage."""
        return "" if self.number == 1 else f"round-{self.stage.round}"

    def heading(self) -> str:
        """The heading: which stage is shown."""
        config = self.config
        text = f"{config.partition.name} partition of {self.federation.samples.name}, seed {config.seed}"
        if self.stage_count == 1:
            return text
        return f"{text}, stage {self.number} of {self.stage_count} " + (
            "(at first)" if self.number == 1 else f"(after {self.stage.round} rounds: {self._changes()})"
        )

    def _changes(self) -> str:
        changes = ((self.stage.joined, "join"), (self.stage.left, "leave"), (self.stage.drifted, "drift"))
        return ", ".join(f"{len(ids)} {what}" for ids, what in changes if len(ids)) or "nothing changes"

    def distances(self, measure: str) -> pd.DataFrame:
        """The distances between the compared clients by a measure, with the clients' ids.

        Raises:
            ConfigError: if it was not measured, or is not defined for these data.
        """
        parts = {part.measure.name: part for part in self.measured}
        if measure not in parts:
            raise ArgumentError("measure", f"{measure!r} was not measured", nearest(measure, parts))
        values = parts[measure].values
        if values is None:
            raise ArgumentError("measure", f"{measure!r} is not defined here: {parts[measure].refused}")
        names = self.federation.names
        ids = pd.Index(self.compared if names is None else names[self.compared], name="client")
        return pd.DataFrame(values, index=ids, columns=ids.rename(None))

    def write(self, path: Path | str) -> Path:
        """Write the page about the partition, as ``rayfl partition`` does."""
        return page.write(Path(path), page_of(self))

    def _repr_html_(self) -> str:
        """For notebooks: the main numbers, and the average distances."""
        facts = pd.DataFrame(_few_facts(self.summary())).to_html(index=False, header=False)
        averages = pd.DataFrame(
            [
                {
                    "measure": part.measure.name,
                    "all pairs": part.average.mean,
                    "same group": part.average.within,
                    "other group": part.average.across,
                }
                for part in self.measured
                if part.average is not None
            ]
        ).dropna(axis=1, how="all")
        table = averages.to_html(index=False, float_format=lambda value: f"{value:.4g}", na_rep=UNKNOWN)
        return f"<b>{html.escape(self.heading())}</b>{facts}{table if len(averages) else ''}"

    @property
    def counts(self) -> NDArray[np.int64]:
        """Training samples of each present client and class ``(n, C)``; of numeric targets, one class."""
        if not self.labelled:
            return self.clients[["n"]].to_numpy(np.int64)
        classes = [f"class_{label}" for label in range(self.federation.samples.classes)]
        return self.clients[classes].to_numpy(np.int64)

    @property
    def labelled(self) -> bool:
        """Whether the samples have labels; if models predict numbers they have none."""
        return not self.federation.samples.numeric

    @property
    def labels(self) -> list[str]:
        """The name of each class; its number if classes have no names."""
        samples = self.federation.samples
        named = len(samples.class_names) == samples.classes
        return list(samples.class_names) if named else list(map(str, range(samples.classes)))

    def summary(self) -> dict[str, Any]:
        """Plain values, as written to ``partition.json``."""
        samples, groups, stage = self.federation.samples, self.planted, self.stage
        return {
            "dataset": samples.name,
            "partition": self.config.partition.model_dump(mode="json"),
            "seed": self.config.seed,
            "stage": self.number,
            "stages": self.stage_count,
            "after_rounds": stage.round,
            "joined": stage.joined.tolist(),
            "left": stage.left.tolist(),
            "drifted": stage.drifted.tolist(),
            "clients": len(self.present),
            "classes": samples.classes if self.labelled else None,
            "unused_samples": len(samples.y_train) - len(np.unique(_held_samples(self.federation))),
            "sizes": {name: _spread(self.clients[name]) for name in ("n", "validation", "test")},
            "labels_per_client": _spread((self.counts > 0).sum(axis=1)) if self.labelled else None,
            "groups": None if groups is None else len(np.unique(groups)),
            "group_rows": self.groups(),
            "compared_clients": len(self.compared),
            "measures": {
                part.measure.name: {
                    "settings": part.measure.model_dump(mode="json", exclude={"name"}),
                    "unit": part.measure.unit,
                    "similarity": part.measure.similarity,
                    "refused": part.refused,
                    **({} if part.average is None else asdict(part.average)),
                }
                for part in self.measured
            },
        }

    def groups(self) -> list[dict[str, Any]]:
        """The planted groups: clients, samples, and main labels (those with at least half of an even
        share).
        """
        groups = self.planted
        if groups is None:
            return []
        rows = []
        for group in np.unique(groups).tolist():
            held = self.counts[groups == group].sum(axis=0)
            rows.append(
                {
                    "group": group,
                    "clients": int((groups == group).sum()),
                    "samples": int(held.sum()),
                    "labels": np.flatnonzero(2 * len(held) * held >= held.sum()).tolist(),
                }
            )
        return rows


def views(config: Config, measures: Sequence[str] = (), compare: int = 100) -> list[PartitionView]:
    """Build the federation of a config and measure it; with events, a view of each stage.

    Args:
        config: dataset, partition, events and seed are used.
        measures: names; empty: all.
        compare: maximum number of clients to compare; if there are more, this many are drawn at random.

    Raises:
        ConfigError: for an unknown measure, a number of clients that cannot be compared, or impossible
            events.
        DataError: if the data do not exist, or cannot be divided as asked.
    """
    for name in measures:
        if name not in MEASURES:
            raise ArgumentError("measures", f"no measure {name!r}", nearest(name, MEASURES))
    if compare < 2:
        raise ArgumentError("compare", f"got {compare}", "expected 2 clients or more")
    partition = config.partition
    stages = build_stages(
        read(config.data, config.data.root or data_root(), config.public_samples, config.seed),
        partition,
        config.events,
        validation=partition.validation,
        test_samples=partition.test_samples,
        seed=config.seed,
        rounds=config.rounds,
    )
    chosen = [MEASURES[name]() for name in measures or MEASURES]
    stage_views = []
    for number, stage in enumerate(stages, start=1):
        federation = stage.federation
        compared = draw_clients(federation, compare, config.seed)
        measured = tuple(_measure(federation, compared, measure, config.seed) for measure in chosen)
        clients = describe(federation)[stage.active]
        stage_views.append(PartitionView(config, stage, number, len(stages), clients, compared, measured))
    return stage_views


def _measure(federation: Federation, compared: NDArray[np.int64], measure: Measure, seed: int) -> Measured:
    try:
        values = distance_matrix(federation, measure, compared, seed)
        return Measured(measure, average(federation, compared, values), values)
    except DataError as error:
        return Measured(measure, refused=str(error))


def _held_samples(federation: Federation) -> NDArray[np.integer]:
    """The training samples that clients hold, validation included."""
    held = np.concatenate([federation.train.values, federation.validation.values])
    return np.asarray(held % len(federation.samples.y_train))


def _spread(values: Any) -> dict[str, float]:
    numbers = np.asarray(values)
    return {"min": int(numbers.min()), "median": float(np.median(numbers)), "max": int(numbers.max())}


# --- on the screen --------------------------------------------------------------------------------------


def show(view: PartitionView, console: Console) -> None:
    """Print the partition: facts, groups, clients and classes, distances."""
    summary = view.summary()
    console.print(view.heading(), style="bold", highlight=False, markup=False, soft_wrap=True)
    for line in _facts(summary):
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    if view.planted is not None:
        console.print(_group_table(view))
    console.print(_client_table(view))
    console.print(_distance_table(view))
    for reason in dict.fromkeys(part.refused for part in view.measured if part.refused):
        console.print(f"not defined here: {reason}", highlight=False, markup=False, soft_wrap=True)
    pairs = len(view.compared) * (len(view.compared) - 1) // 2
    console.print(
        f"{_compared_clients(view)}: {pairs:,} pairs", highlight=False, markup=False, soft_wrap=True
    )


def _facts(summary: dict[str, Any]) -> list[str]:
    def spread(values: dict[str, float]) -> str:
        return f"{values['min']:,} / {values['median']:,g} / {values['max']:,}"

    sizes, groups, unused = summary["sizes"], summary["groups"], summary["unused_samples"]
    qualifier = " that is present" if summary["stages"] > 1 else ""
    labels = summary["labels_per_client"]
    classes = "numbers to predict" if labels is None else f"{summary['classes']} classes"
    return [
        f"{summary['clients']:,} clients, {classes}, "
        + ("no planted groups" if groups is None else f"{groups} planted groups"),
        f"smallest / median / largest client: {spread(sizes['n'])} training, "
        f"{spread(sizes['validation'])} validation, {spread(sizes['test'])} test samples",
        *([] if labels is None else [f"labels a client: {spread(labels)}"]),
        *([f"{unused:,} training samples are used by no client{qualifier}"] if unused else []),
    ]


def _group_table(view: PartitionView) -> Table:
    table = _table("planted groups")
    for name in ("group", "clients", "samples"):
        table.add_column(name, justify="right")
    if view.labelled:
        table.add_column("main labels")
    for row in view.groups()[:SHOWN_CLIENTS]:
        labels = row["labels"]
        text = ", ".join(map(str, labels[:20])) + (f", ... ({len(labels)})" if len(labels) > 20 else "")
        cells = [str(row["group"]), f"{row['clients']:,}", f"{row['samples']:,}"]
        table.add_row(*cells, *([text] if view.labelled else []))
    if len(view.groups()) > SHOWN_CLIENTS:
        table.caption = f"the first {SHOWN_CLIENTS} of {len(view.groups())} groups"
    return table


def _client_table(view: PartitionView) -> Table:
    counts, ids, groups = view.counts, view.present, view.planted
    clients = len(ids)
    few = counts.shape[1] <= SHOWN_CLASSES
    table = _table("training samples by client" + (" and class" if few and view.labelled else ""))
    names = view.federation.names
    table.add_column("client", justify="right")
    if names is not None:
        table.add_column("name")
    if groups is not None:
        table.add_column("group", justify="right")
    table.add_column("samples", justify="right")
    short = sum(map(len, view.labels)) <= _LONGEST_HEADINGS
    headings = view.labels if short else list(map(str, range(counts.shape[1])))
    shown_labels = [*map(escape, headings)] if few else ["labels", "most frequent labels"]
    for heading in shown_labels if view.labelled else ():
        table.add_column(heading, justify="right" if few or heading == "labels" else "left")
    half = SHOWN_CLIENTS // 2
    shown = range(clients) if clients <= SHOWN_CLIENTS else [*range(half), *range(clients - half, clients)]
    for client in shown:
        row = [f"{ids[client]:,}", f"{counts[client].sum():,}"]
        if groups is not None:
            row.insert(1, str(groups[client]))
        if names is not None:
            row.insert(1, escape(str(names[ids[client]])))
        if few and view.labelled:
            row += [f"{count:,}" if count else "·" for count in counts[client]]
        elif view.labelled:
            frequent = np.argsort(-counts[client], kind="stable")[:3]
            texts = [f"{view.labels[i]} ({counts[client, i]:,})" for i in frequent if counts[client, i]]
            row += [str(int((counts[client] > 0).sum())), escape(", ".join(texts))]
        table.add_row(*row, end_section=client == half - 1 and clients > SHOWN_CLIENTS)
    if clients > SHOWN_CLIENTS:
        table.caption = f"{SHOWN_CLIENTS} of {clients:,} clients"
    return table


def _distance_table(view: PartitionView) -> Table:
    table = _table("average distance between two clients")
    table.add_column("measure")
    grouped = view.planted is not None
    for name in ("all pairs", *(("same group", "other group") if grouped else ())):
        table.add_column(name, justify="right")
    table.add_column("")
    for part in view.measured:
        note = part.measure.unit or ("1: alike" if part.measure.similarity else "")
        if part.average is None:
            blanks = [UNKNOWN] * (3 if grouped else 1)
            table.add_row(part.measure.name, *blanks, "not defined")
            continue
        values = [part.average.mean, *((part.average.within, part.average.across) if grouped else ())]
        table.add_row(part.measure.name, *(UNKNOWN if v is None else f"{v:.4g}" for v in values), note)
    return table


def _compared_clients(view: PartitionView) -> str:
    if len(view.compared) == len(view.present):
        return f"all {len(view.present):,} clients"
    return f"{len(view.compared):,} clients drawn from {len(view.present):,}"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", caption_justify="left", padding=(0, 0))


# --- in files -------------------------------------------------------------------------------------------


def write(view: PartitionView, folder: Path) -> list[Path]:
    """Write ``index.html``, ``partition.json``, ``clients.csv``, ``distances.csv`` and two pictures.

    Returns:
        The files. Distances are left out if no measure is defined.

    Raises:
        ConfigError: if the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / "partition.json", folder / "clients.csv"]
        files[0].write_text(json.dumps(view.summary(), indent=1) + "\n", encoding="utf-8")
        view.clients.to_csv(files[1])
        if view.labelled:
            files.append(folder / "classes.png")
            _draw_classes(view, files[-1])
        if any(part.values is not None for part in view.measured):
            files += [folder / "distances.csv", folder / "distances.png"]
            _pairs(view).to_csv(files[-2], index=False)
            _draw_distances(view, files[-1])
        files.append(folder / "index.html")
        files[-1].write_text(render(page_of(view)), encoding="utf-8")
    except OSError as error:
        raise ArgumentError(
            "out", f"{folder} cannot be written ({error.strerror or error})", "name another folder"
        ) from None
    return files


def page_of(view: PartitionView) -> Page:
    """The page about a partition."""
    clients = _client_columns(view)
    return Page(
        view.heading(),
        f"{_facts(view.summary())[0]}; nothing was trained",
        facts=_few_facts(view.summary()),
        sections=[
            *([_labels_section(view)] if view.labelled else []),
            *([_groups_section(view)] if view.planted is not None else []),
            _sizes_section(view, clients),
            *_map_section(view, clients),
            _distances_section(view),
            _clients_section(view, clients),
        ],
        data={"clients": clients},
    )


def _few_facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    def spread(values: dict[str, float]) -> str:
        least, most = values["min"], values["max"]
        return f"{least:,}" if least == most else f"{least:,} to {most:,}"

    groups, sizes, labels = summary["groups"], summary["sizes"], summary["labels_per_client"]
    return [
        ("clients", f"{summary['clients']:,}"),
        *([] if labels is None else [("classes", f"{summary['classes']:,}")]),
        ("planted groups", UNKNOWN if groups is None else f"{groups:,}"),
        ("training samples of a client", spread(sizes["n"])),
        ("test samples of a client", spread(sizes["test"])),
        *([] if labels is None else [("labels of a client", spread(labels))]),
        ("unused training samples", f"{summary['unused_samples']:,}"),
    ]


def _client_names(view: PartitionView) -> list[str]:
    names = view.federation.names
    return [str(i if names is None else names[i]) for i in view.present.tolist()]


def _client_columns(view: PartitionView) -> dict[str, list[Any]]:
    """The columns of the page about the present clients."""
    counts = view.counts
    frequent = np.argsort(-counts, axis=1, kind="stable")[:, :3]
    columns: dict[str, list[Any]] = {"client": _client_names(view)}
    columns |= {name: view.clients[name].tolist() for name in ("n", "validation", "test")}
    if view.planted is not None:
        columns["group"] = view.planted.tolist()
    if not view.labelled:
        return columns
    columns["labels"] = (counts > 0).sum(axis=1).tolist()
    labels = view.labels
    columns["main label"] = [labels[first] for first in frequent[:, 0].tolist()]
    if counts.shape[1] <= SHOWN_CLASSES:
        columns |= {f"class {label}": counts[:, i].tolist() for i, label in enumerate(labels)}
    else:
        columns["most frequent labels"] = [
            ", ".join(f"{labels[label]} ({counts[i, label]:,})" for label in row if counts[i, label])
            for i, row in enumerate(frequent.tolist())
        ]
    return columns


def _labels_section(view: PartitionView) -> Section:
    counts = view.counts
    order: NDArray[np.integer] = np.arange(len(counts))
    if view.planted is not None:
        order = np.argsort(view.planted, kind="stable")
    drawn = order[spaced(len(order))]
    classes = spaced(counts.shape[1])
    names = _client_names(view)
    shares = 100 * counts[drawn] / counts[drawn].sum(axis=1, keepdims=True)
    label = "share of the client's training samples (%)"
    note = "Which labels the clients have (after permutations); dark: many."
    note += " Clients are in the order of their planted groups." if view.planted is not None else ""
    if len(drawn) < len(order):
        note += f" {len(drawn)} of {len(order):,} clients, evenly spaced."
    if len(classes) < counts.shape[1]:
        note += f" {len(classes)} of {counts.shape[1]:,} classes, evenly spaced."
    rows, columns = [f"client {names[i]}" for i in drawn], [f"class {view.labels[i]}" for i in classes]
    chart = heatmap(shares[:, classes], rows, columns, f"Matrix of clients and classes: {label}", label=label)
    return Section("Labels", note, [chart])


def _groups_section(view: PartitionView) -> Section:
    rows = view.groups()
    texts = [", ".join(map(str, row["labels"][:20])) + ", ..." * (len(row["labels"]) > 20) for row in rows]
    columns = [
        Column("group", [row["group"] for row in rows], "number:0"),
        Column("clients", [row["clients"] for row in rows], "number:0"),
        Column("training samples", [row["samples"] for row in rows], "number:0"),
        *([Column("main labels", texts)] if view.labelled else []),
    ]
    note = "Main labels have at least half of an even share." if view.labelled else ""
    return Section("Planted groups", note, tables=[PageTable(columns, caption="planted groups")])


def _sizes_section(view: PartitionView, clients: dict[str, list[Any]]) -> Section:
    sizes = np.asarray(clients["n"])
    what = "training samples of the client"
    alt = f"Histogram of {what}, {sizes.min():,} to {sizes.max():,}"
    charts = {"all clients": histogram(sizes, what, alt, whole_edges(sizes), "number:0")}
    groups = view.planted
    if groups is not None and 1 < len(np.unique(groups)) <= DRAWN_GROUPS:
        members = {str(group): sizes[groups == group] for group in np.unique(groups).tolist()}
        charts["by planted group"] = box(members, what, f"Box plots of {what} by planted group", "number:0")
    return Section("Sizes", "", [alternatives("sizes of", charts)])


def _map_section(view: PartitionView, clients: dict[str, list[Any]]) -> list[Section]:
    """A map of clients by their shares of labels; adds their positions to the columns of the clients."""
    counts = view.counts
    shares = np.sqrt(counts / counts.sum(axis=1, keepdims=True))
    if not np.ptp(shares, axis=0).max() > 0:
        return []
    places = maps.spread(maps.principal(shares))
    for axis, values in zip("xy", places.T, strict=True):
        clients[axis] = rounded(values, maps.DIGITS)
    tip = [("training samples", "n", "number:0"), ("main label", "main label", "text")]
    colours = [Colour("main label", "most frequent label")]
    if "group" in clients:
        tip.append(("planted group", "group", "text"))
        colours.insert(0, Colour("group", "planted group"))
    colours.append(Colour.scale("n", "training samples", "number:0", clients["n"]))
    count = len(places)
    dots = 12 if count <= 100 else 8 if count <= 1000 else 4
    points = Points("@clients", Metric("x", "x"), Metric("y", "y"), "client", tip, dots)
    note = (
        "Clients with similar shares of labels are close together (principal components of the square roots "
        "of the shares)."
    )
    return [Section("Map of clients", note, [client_map(points, colours, (), f"Map of {count:,} clients")])]


def _distances_section(view: PartitionView) -> Section:
    """Averages of all measures, and the matrices of those that are defined."""
    grouped, parts = view.planted is not None, view.measured
    averages = [part.average for part in parts]
    columns = [
        Column("measure", [part.measure.name for part in parts]),
        Column(
            "unit", [part.measure.unit or ("1: alike" if part.measure.similarity else "") for part in parts]
        ),
        Column("all pairs", [None if a is None else a.mean for a in averages], "general"),
    ]
    if grouped:
        columns.append(Column("same group", [None if a is None else a.within for a in averages], "general"))
        columns.append(Column("other group", [None if a is None else a.across for a in averages], "general"))
    if any(part.refused for part in parts):
        columns.append(Column("", [f"not defined: {part.refused}" if part.refused else "" for part in parts]))
    tables = [PageTable(columns, caption="average distance between two clients", wrap=True)]
    drawn = {part.measure.name: _matrix(view, part) for part in parts if part.values is not None}
    note = f"Between two clients, {_compared_clients(view)}."
    if drawn:
        note += " In a matrix they are in the order of its dendrogram (average linkage); dark: similar."
    return Section("Distances", note, [alternatives("measure", drawn)] if drawn else (), tables)


def _matrix(view: PartitionView, part: Measured) -> Chart:
    measure, values = part.measure, part.values
    assert values is not None
    distances = values.max() - values if measure.similarity else values
    condensed = squareform((distances + distances.T) / 2, checks=False)
    order = (
        leaves_list(linkage(np.nan_to_num(condensed), "average"))
        if len(values) > 2
        else np.arange(len(values))
    )
    drawn = order[spaced(len(order))]
    names = view.federation.names
    ids = [str(i if names is None else names[i]) for i in view.compared[drawn].tolist()]
    label = f"{measure.name} ({measure.unit})" if measure.unit else measure.name
    alt = f"Matrix of {label} between {len(drawn)} clients, alike is dark"
    return heatmap(
        values[np.ix_(drawn, drawn)], ids, ids, alt, "high" if measure.similarity else "low", label
    )


def _clients_section(view: PartitionView, clients: dict[str, list[Any]]) -> Section:
    titles = {"n": "training", "group": "planted group"}
    columns = [
        Column(
            titles.get(name, name),
            Data("clients", name),
            "text" if name in ("client", "group", "main label", "most frequent labels") else "number:0",
            right=name not in ("client", "most frequent labels"),
        )
        for name in clients
        if name not in ("x", "y")
    ]
    note = (
        "Numbers of training, validation and test samples, of labels, and of training samples of each class."
    )
    return Section("Clients", note, tables=[PageTable(columns, caption="clients", filter=True)])


def _pairs(view: PartitionView) -> pd.DataFrame:
    """One row per pair of compared clients, one column per measure."""
    i, j = np.triu_indices(len(view.compared), 1)
    columns = {part.measure.name: part.values[i, j] for part in view.measured if part.values is not None}
    first, second, names = view.compared[i], view.compared[j], view.federation.names
    name_columns = {} if names is None else {"name": names[first], "other_name": names[second]}
    return pd.DataFrame({"client": first, "other": second, **name_columns, **columns})


def _draw_classes(view: PartitionView, path: Path) -> None:
    counts = view.counts
    clients, classes = counts.shape
    rows = np.linspace(0, clients - 1, min(clients, DRAWN_CLIENTS)).astype(np.intp)
    figure = Figure(figsize=(min(4 + 0.3 * classes, 12), min(2 + 0.08 * len(rows), 8)), layout="constrained")
    axes = figure.add_subplot()
    shares = counts[rows] / counts[rows].sum(axis=1, keepdims=True)
    image = axes.imshow(shares, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest",
                        extent=(-0.5, classes - 0.5, clients - 0.5, -0.5))  # fmt: skip
    axes.set_xlabel("class")
    what = "client" if clients == view.federation.clients else f"the {clients:,} present clients"
    axes.set_ylabel(what if len(rows) == clients else f"{what} ({len(rows):,} of {clients:,} drawn)")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if classes <= 30:
        upright = max(map(len, view.labels)) > 2
        names = [label.replace("$", r"\$") for label in view.labels]  # no mathematics
        axes.set_xticks(range(classes), names, rotation=90 if upright else 0)
    for edge in _group_edges(view.planted):
        axes.axhline(edge - 0.5, color="#D55E00", linewidth=0.8)
    figure.colorbar(image, label="share of the client's training samples")
    axes.set_title(view.heading().replace(", stage", "\nstage"), fontsize=10)
    _save(figure, path)


def _draw_distances(view: PartitionView, path: Path) -> None:
    parts = [(part.measure, part.values) for part in view.measured if part.values is not None]
    columns = min(3, len(parts))
    rows = -(-len(parts) // columns)
    figure = Figure(figsize=(3.6 * columns + 0.4, 3.2 * rows + 0.5), layout="constrained")
    groups = None if view.federation.groups is None else view.federation.groups[view.compared]
    for place, (measure, values) in enumerate(parts):
        axes = figure.add_subplot(rows, columns, place + 1)
        colours = "viridis_r" if measure.similarity else "viridis"
        image = axes.imshow(values, cmap=colours, interpolation="nearest")
        figure.colorbar(image, ax=axes, shrink=0.85)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(f"{measure.name} ({measure.unit})" if measure.unit else measure.name, fontsize=9)
        for edge in _group_edges(groups):
            axes.axhline(edge - 0.5, color="#D55E00", linewidth=0.8)
            axes.axvline(edge - 0.5, color="#D55E00", linewidth=0.8)
    figure.suptitle(f"{view.heading()}: {_compared_clients(view)}, dark: alike", fontsize=10)
    _save(figure, path)


def _group_edges(groups: NDArray[np.int64] | None) -> list[int]:
    """Where one group ends and the next begins, if clients are numbered group by group."""
    if groups is None:
        return []
    edges = np.flatnonzero(np.diff(groups)) + 1
    return edges.tolist() if len(edges) < min(len(np.unique(groups)), 50) else []


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=120, metadata={"Software": None})

"""Several runs side by side: a table, and their accuracies in one chart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from rayfl import files
from rayfl.report import figures
from rayfl.report.files import RunFiles, numbers
from rayfl.report.html import MOST_GROUPS
from rayfl.report.tables import Table
from rayfl.units import UNKNOWN, duration, number, percent, size, uncertain

_PLACES = ("root", "path")
"""Settings of a dataset that say where it lies, not what it is."""


def compare_table(runs: Sequence[Path]) -> pd.DataFrame:
    """One row a run, in the order given.

    Returns:
        The columns of :meth:`rayfl.report.files.RunFiles.headline`; ``run`` is the directory's name, with
        its parent's where two are equal.

    Raises:
        RayflError: if a run directory does not exist.
    """
    return _table([RunFiles.read(Path(path)) for path in runs])


def differences(runs: Sequence[Path]) -> list[str]:
    """Why the accuracies of these runs do not compare: what they were trained and tested on differs.

    Returns:
        One line for each difference in dataset, partition, events or seed, with the runs that have each
        value; empty if the runs had the same clients with the same data.

    Raises:
        RayflError: if a run directory does not exist.
    """
    read = [RunFiles.read(Path(path)) for path in runs]
    return _differences(_table(read)["run"].tolist(), read)


def write_comparison(runs: Sequence[Path], out: Path) -> Path:
    """Write the comparison as a self-contained page ``out`` and its table as CSV beside it.

    Args:
        runs: run directories.
        out: the HTML file, or a folder, where it becomes ``comparison.html``.

    Returns:
        The path of the page.

    Raises:
        RayflError: if a run directory does not exist.
    """
    read = [RunFiles.read(Path(path)) for path in runs]
    frame = _table(read)
    page = out / "comparison.html" if out.is_dir() else out
    page.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(page.with_suffix(".csv"), index=False)
    names = frame["run"].tolist()
    lines = [(name, run.evaluated()) for name, run in zip(names, read, strict=True)]
    charts = [
        (
            title,
            figures.picture(figures.curves(lines, column, label), title, width=10.5, height=4.2),
        )
        for column, title, label in (
            ("accuracy_mean", "Mean accuracy over clients", "test accuracy (%)"),
            ("accuracy_worst10", "Mean accuracy of the worst 10 % of clients", "test accuracy (%)"),
            ("perplexity_mean", "Mean perplexity over clients (lower is better)", "test perplexity"),
        )
        if any(numbers(evaluated, column) is not None for _, evaluated in lines)
    ]
    found = _differences(names, read)
    text = render(
        "compare.html",
        title="Comparison",
        width="72rem",
        differences=found,
        estimates="estimated_from" in frame and frame["estimated_from"].notna().any(),
        table=_readable(frame),
        details=_details(frame, read, with_groups=not found),
        charts=charts,
    )
    files.write(page, text)
    return page


def render(template: str, **values: Any) -> str:
    """Fill in one of the templates that lie beside this module."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template(template).render(**values)


def _table(runs: Sequence[RunFiles]) -> pd.DataFrame:
    rows = [run.headline() for run in runs]
    names = [row["run"] for row in rows]
    for run, row in zip(runs, rows, strict=True):
        if names.count(row["run"]) > 1:
            row["run"] = f"{run.path.resolve().parent.name}/{row['run']}"
    return pd.DataFrame(rows, dtype=object) if rows else pd.DataFrame(columns=["run"])


def _differences(names: Sequence[str], runs: Sequence[RunFiles]) -> list[str]:
    lines = []
    for section in ("data", "partition"):
        settings = [run.setting(section) for run in runs]
        lines += _different(names, section, [_get(one, "name") for one in settings]) or [
            line
            for key in sorted({key for one in settings if isinstance(one, Mapping) for key in one})
            if not (section == "data" and key in _PLACES)
            for line in _different(names, f"{section}.{key}", [_get(one, key) for one in settings])
        ]
    for setting in ("events", "seed"):
        lines += _different(names, setting, [run.setting(setting) for run in runs])
    # Partitions may draw label maps with the seed, which are part of the fingerprint.
    return lines or [
        line
        for key, what in (("data", "contents of the dataset"), ("clients", "the clients' samples"))
        for line in _different(names, what, [run.environment.get(key) for run in runs])
    ]


def _get(settings: Any, key: str) -> Any:
    return settings.get(key) if isinstance(settings, Mapping) else None


def _different(names: Sequence[str], what: str, values: Sequence[Any]) -> list[str]:
    """A line if the values differ. None is no value: an older version may not have written the setting."""
    runs_of: dict[str, list[str]] = {}
    for name, value in zip(names, values, strict=True):
        if value is not None:
            runs_of.setdefault(str(value), []).append(name)
    if len(runs_of) < 2:
        return []
    short = {text: text if len(text) <= 40 else f"{text[:37]}..." for text in runs_of}
    return [f"{what}: " + "; ".join(f"{short[text]} ({', '.join(of)})" for text, of in runs_of.items())]


def _details(frame: pd.DataFrame, runs: Sequence[RunFiles], with_groups: bool) -> Table | None:
    """How certain the accuracies are, and what they are in each planted group; one row a run.

    Args:
        frame: of the runs.
        runs: the same runs.
        with_groups: whether the groups of all runs are the same.
    """
    last = [run.last_groups("group") if with_groups else pd.DataFrame() for run in runs]
    ids = sorted({i for of in last if len(of) for i in of["id"].tolist()})
    ids = ids if len(ids) <= MOST_GROUPS else []
    shown = [
        ("accuracy_se_samples", "± samples", 1),
        ("distinct_test_samples", "test samples", 0),
        ("group_var_within", "within, %²", 1),
        ("group_var_between", "between, %²", 1),
    ]
    kept = [entry for entry in shown if entry[0] in frame and frame[entry[0]].notna().any()]
    if not kept and not ids:
        return None
    rows = []
    for row, of in zip(frame.to_dict("records"), last, strict=True):
        found = {} if of.empty else {one["id"]: one for one in of.to_dict("records")}
        cells = [_group(found[i]) if i in found else UNKNOWN for i in ids]
        rows.append([str(row["run"]), *(number(row[name], digits) for name, _, digits in kept), *cells])
    return Table.of(["run", *(title for _, title, _ in kept), *(f"group {i}" for i in ids)], rows)


def _group(row: Mapping[Any, Any]) -> str:
    """Mean and variance of a group: ``91.0 % (4.7)``."""
    estimate = row["estimated_from"] == row["estimated_from"]  # not NaN
    return f"{uncertain(row['accuracy_mean'], None, estimate)} ({number(row['accuracy_var'], 1)})"


def _readable(frame: pd.DataFrame) -> Table:
    """The columns that a reader compares, formatted; those that no run has are left out."""

    def accuracy(name: str, error: str = "") -> Callable[[Mapping[Any, Any]], str]:
        return lambda row: uncertain(row[name], row.get(error), row.get("estimated_from") is not None)

    def plain(name: str, form: Callable[[Any], str]) -> Callable[[Mapping[Any, Any]], str]:
        return lambda row: form(row[name])

    shown: list[tuple[str, str, Callable[[Mapping[Any, Any]], str]]] = [
        ("algorithm", "algorithm", plain("algorithm", str)),
        ("accuracy_mean", "accuracy, last", accuracy("accuracy_mean", "accuracy_se")),
        ("accuracy_mean_max", "best", plain("accuracy_mean_max", percent)),
        ("accuracy_worst10", "worst 10 %", accuracy("accuracy_worst10")),
        ("accuracy_var", "variance, %²", plain("accuracy_var", lambda value: number(value, 1))),
        ("finetuned_accuracy_mean", "fine-tuned", plain("finetuned_accuracy_mean", percent)),
        ("perplexity_mean", "perplexity", plain("perplexity_mean", lambda value: number(value, 1))),
        ("clusters", "clusters", plain("clusters", lambda value: number(value, 0))),
        ("ari", "ARI", plain("ari", number)),
        ("bytes_up", "up", plain("bytes_up", size)),
        ("bytes_down", "down", plain("bytes_down", size)),
        ("seconds", "time", plain("seconds", duration)),
    ]
    kept = [entry for entry in shown if entry[0] in frame and frame[entry[0]].notna().any()]
    rows = [
        [str(row["run"]), *(UNKNOWN if row[name] is None else form(row) for name, _, form in kept)]
        for row in frame.to_dict("records")
    ]
    left = 2 if kept and kept[0][0] == "algorithm" else 1
    return Table.of(["run", *(title for _, title, _ in kept)], rows, left)

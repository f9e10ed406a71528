"""Several runs side by side: a table, and their accuracies in one chart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from rayfl.report import figures
from rayfl.report.files import RunFiles, numbers
from rayfl.report.html import render, write
from rayfl.report.tables import Table, duration, number, percent, size


def compare_table(runs: Sequence[Path]) -> pd.DataFrame:
    """One row a run, in the order given.

    Returns:
        The columns of :meth:`rayfl.report.files.RunFiles.headline`; ``run`` is the directory's name, with
        its parent's where two are equal.

    Raises:
        RayflError: if a run directory does not exist.
    """
    return _table([RunFiles.read(Path(path)) for path in runs])


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
    lines = [(name, run.evaluated()) for name, run in zip(frame["run"], read, strict=True)]
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
    return write(
        page, render("compare.html", title="Comparison", width="72rem", table=_readable(frame), charts=charts)
    )


def _table(runs: Sequence[RunFiles]) -> pd.DataFrame:
    rows = [run.headline() for run in runs]
    names = [row["run"] for row in rows]
    for run, row in zip(runs, rows, strict=True):
        if names.count(row["run"]) > 1:
            row["run"] = f"{run.path.resolve().parent.name}/{row['run']}"
    return pd.DataFrame(rows, dtype=object) if rows else pd.DataFrame(columns=["run"])


def _readable(frame: pd.DataFrame) -> Table:
    """The columns that a reader compares, formatted; those that no run has are left out."""
    shown: list[tuple[str, str, Callable[[object], str]]] = [
        ("algorithm", "algorithm", str),
        ("accuracy_mean", "accuracy, last", percent),
        ("accuracy_mean_max", "best", percent),
        ("accuracy_worst10", "worst 10 %", percent),
        ("accuracy_var", "variance, %²", lambda value: number(value, 1)),
        ("finetuned_accuracy_mean", "fine-tuned", percent),
        ("perplexity_mean", "perplexity", lambda value: number(value, 1)),
        ("clusters", "clusters", lambda value: number(value, 0)),
        ("ari", "ARI", number),
        ("bytes_up", "up", size),
        ("bytes_down", "down", size),
        ("seconds", "time", duration),
    ]
    kept = [entry for entry in shown if entry[0] in frame and frame[entry[0]].notna().any()]
    rows = [
        [str(row["run"]), *("–" if row[name] is None else form(row[name]) for name, _, form in kept)]
        for row in frame.to_dict("records")
    ]
    left = 2 if kept and kept[0][0] == "algorithm" else 1
    return Table.of(["run", *(title for _, title, _ in kept)], rows, left)

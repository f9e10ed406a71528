"""The console output of a run: a progress bar, or plain lines if it is not a terminal; a table at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.cells import cell_len
from rich.console import Console, Group
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from rayfl.errors import repeats
from rayfl.events import Begun, BlockDone, Clustered, Finished, Note, RoundDone, RunEvent, Stopped
from rayfl.units import UNKNOWN, counted, duration, number, percent, size

if TYPE_CHECKING:
    from rayfl.monitor import Pace


def short(path: Path) -> Path:
    """A path relative to the current folder, if it is below it."""
    try:
        return path.resolve().relative_to(Path.cwd())
    except (ValueError, OSError):
        return path


class Output(Console):
    """Standard output; a closed pipe is reported to the caller (rich would end the process)."""

    def on_broken_pipe(self) -> None:
        """Stop writing, and raise the error."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
        raise BrokenPipeError


class _Remaining(ProgressColumn):
    """The remaining time; rich's own column ignores rounds that took longer than half a minute."""

    max_refresh = 0.5

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def render(self, task: Task) -> Text:
        seconds_left = None if task.total is None else self._pace.remaining(int(task.total))
        return Text("" if seconds_left is None else f"ETA {duration(seconds_left)}")


class Display:
    """Shows the events of one run.

    Args:
        console: where to print.
        title: of the run.
        pace: estimates the remaining time.
    """

    def __init__(self, console: Console, title: str, pace: Pace | None = None) -> None:
        from rayfl.monitor import Pace  # imports configs; --help needs none

        self.console = console
        self._pace = pace or Pace()
        self._output_closed = False  # whether the output pipe is closed
        self._path: Path | None = None  # the run directory, until the command to resume has been printed
        console.print(title, style="bold", highlight=False, markup=False)
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("  {task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("rounds"),
                _Remaining(self._pace),
                TextColumn("{task.fields[note]}"),
                console=console,
                transient=True,
            )
            self._task = self._progress.add_task("starting", total=None, note="")
            self._progress.start()

    def __call__(self, event: RunEvent) -> None:
        """Show one event."""
        if self._output_closed and not isinstance(event, Stopped):
            return
        try:
            self._show(event)
        except BrokenPipeError:  # as in ``rayfl run ... | head``
            self._output_closed = True
            self._print_to_stderr("the output was closed: stopping")
            signal.raise_signal(signal.SIGTERM)  # stopping writes a checkpoint

    def __enter__(self) -> Display:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Remove the progress bar; after a failure print how to resume, unless that was already printed."""
        self.close()
        if kind is None or self._path is None or repeats(error):
            return
        if (self._path / "checkpoints").is_dir():
            self._print_to_stderr(f"resume with: {_resume_command(self._path)}")

    def close(self) -> None:
        """Remove the progress bar."""
        if self._progress is not None:
            self._progress.stop()

    def _print_to_stderr(self, text: str) -> None:
        """Print a line to standard error."""
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)

    def _show(self, event: RunEvent) -> None:
        match event:
            case Begun(path=path):
                self._path = path
                self._line(f"run directory: {short(path)}")
            case Note(text=text):
                self._line(text)
            case BlockDone(done=done, total=total):
                if self._progress is not None:
                    self._progress.update(self._task, note=f"block {done}/{total}")
            case Clustered():
                self._show_clustered(event)
            case RoundDone():
                self._show_round(event)
            case Stopped():
                self._show_stopped(event)
            case Finished(summary=summary):
                self._show_finished(summary)

    def _line(self, text: str) -> None:
        self.console.print(f"  {text}", highlight=False, markup=False, soft_wrap=True)

    def _show_clustered(self, event: Clustered) -> None:
        threshold = event.facts.get("threshold")
        cut = "" if threshold is None else f", cut at {threshold:.3g}"
        how = " (the tree's own proposal)" if event.facts.get("suggested") else ""
        truth = "" if event.ari is None else f"; agreement with the planted groups (ARI) {event.ari:.2f}"
        groups = counted(event.n_clusters, "group")
        self._line(f"clustered into {groups}{how}{cut}{truth} ({duration(event.seconds)})")

    def _show_round(self, event: RoundDone) -> None:
        data, done = event.row, event.round + 1
        accuracy, few = data.get("accuracy_mean"), data.get("estimated_from")
        tested = ""
        if accuracy is not None:
            mark = "" if few is None else "≈ "
            tested = f"  accuracy {mark}{accuracy:5.1f} %  worst 10 % {mark}{data['accuracy_worst10']:5.1f} %"
        if few is not None:
            error = data.get("accuracy_se")
            how = "" if error is None else f"; standard error {error:.1f}"
            tested += f"  (estimated from {few} clients{how})"
        for name, value in event.results.items():
            tested += f"  {name} {value:.4g}"
        text = f"loss {data['train_loss']:.3f}{tested}"
        self._pace.round(done, data["seconds"])
        if self._progress is None:
            self._line(f"round {done:3d}/{event.rounds}  {text}  {duration(data['seconds'])}")
        else:
            self._progress.update(self._task, description=text, completed=done, total=event.rounds, note="")

    def _show_stopped(self, event: Stopped) -> None:
        self.close()
        self._path = None
        how = "" if event.repeats else f"; resume with: {_resume_command(event.path)}"
        text = f"stopped after {counted(event.rounds, 'complete round')}{how}"
        if self._output_closed:
            self._print_to_stderr(text)
        else:
            self._line(text)

    def _show_finished(self, summary: Mapping[str, Any]) -> None:
        self.close()
        if summary["accuracy_mean"] is None and summary.get("loss_mean") is not None:
            score = f"test loss {summary['loss_mean']:.4g}"
        else:
            worst = percent(summary["accuracy_worst10"])
            score = f"accuracy {percent(summary['accuracy_mean'])}, worst 10 % of the clients {worst}"
        self._line(f"{score} after {counted(summary['rounds'], 'round')} in {duration(summary['seconds'])}")


MOST_GROUPS = 12
"""Most groups or clusters in the table of groups; if there are more, see ``groups.csv`` and the report."""


def closing(summaries: Sequence[Mapping[str, Any]], width: int | None = None) -> Group:
    """What is shown at the end: :func:`closing_table`, and :func:`group_table` if there are groups."""
    tables = [group_table(summaries, kind, width) for kind in ("group", "cluster")]
    return Group(closing_table(summaries, width), *(table for table in tables if table is not None))


def closing_table(summaries: Sequence[Mapping[str, Any]], width: int | None = None) -> Table:
    """The table at the end: one row per method, accuracies in percent over the clients' own test data.

    Args:
        summaries: of the runs.
        width: of the terminal, see :func:`fitted`.
    """
    accurate = any(s["accuracy_mean"] is not None for s in summaries)
    measures = {name: text for s in summaries for name, text in s.get("measures", {}).items()}
    more = {
        **_EXTRA_COLUMNS,
        **{f"{name}_mean": (name, f"{text}, mean over clients") for name, text in measures.items()},
        **{
            key.replace("accuracy", name): (f"{name}, {heading}", "")
            for name in measures or ([] if accurate else ["loss"])
            for key, (heading, _) in _EXTRA_COLUMNS.items()
            if "accuracy" in key
        },
    }
    extra = {key: text for key, text in more.items() if any(s.get(key) is not None for s in summaries)}
    what = (
        "mean, worst 10 %, variance: of the clients' accuracies in % after the last round"
        if accurate
        else "loss: mean of the clients' test losses after the last round"
    )
    tests = "; ".join(dict.fromkeys(text for s in summaries if (text := _test_sizes(s))))
    sample_errors = [s.get("accuracy_se_samples") for s in summaries]
    errors = ", ".join(number(value, 1) for value in sample_errors)
    table = Table(
        caption=f"{what}, each on its own test data with the model that it would use"
        + ("; ±: standard error over clients" if accurate else "")
        + (f" (over test samples: {errors})" if any(value is not None for value in sample_errors) else "")
        + (f"; tested on {tests}" if tests else "")
        + "".join(f"; {heading}: {about}" for heading, about in extra.values() if about)
        + "; up, down: bytes that the clients and servers send",
        caption_justify="left",
        padding=(0, 0),
    )
    scores = ("mean", "worst 10 %", "variance") if accurate else ("loss",)
    headings = ("clusters", "ARI", *scores, *(h for h, _ in extra.values()), "up", "down", "seconds")
    rows = [
        (
            s["algorithm"],
            str(s["clusters"])
            if s["ari"] is not None or s["clusters"] > 1 or s.get("by_cluster")
            else UNKNOWN,
            UNKNOWN if s["ari"] is None else f"{s['ari']:.2f}",
            *(_accuracies(s) if accurate else (number(s.get("loss_mean"), 4),)),
            *(number(s.get(key), 1 if key in _EXTRA_COLUMNS else 3) for key in extra),
            size(s["bytes_up"]),
            size(s["bytes_down"]),
            f"{s['seconds']:.1f}",
        )
        for s in summaries
    ]
    return fitted(table, [("method", *headings), *rows], width)


def comparison_table(
    columns: Sequence[tuple[str, Sequence[str]]], caption: str, width: int | None = None, naming: int = 1
) -> Table | Group:
    """Runs side by side: one row per run, or per group of runs that differ only in their seeds.

    Args:
        columns: headings and cells.
        caption: what the numbers are.
        width: of the terminal. A table that is wider is continued below, where the columns that name the rows
            are repeated. If these alone are too wide, see :func:`fitted`.
        naming: number of the first columns that name the rows together.
    """
    texts = [(escape(name), list(map(escape, cells))) for name, cells in columns]
    turned = [[name, *cells] for name, cells in texts]
    alone = naming == 1  # so that rows may become columns
    fits = alone and width is not None and _width(turned) <= width
    parts = [texts] if fits else _column_parts(texts, width, naming)
    tables = []
    for part in parts:
        headings, cells = zip(*part, strict=True)
        table = Table(caption_justify="left", padding=(0, 0))
        tables.append(fitted(table, [headings, *zip(*cells, strict=True)], width, alone))
    if len(tables) > 1:
        return Group(*tables, Text(caption, style="italic"))
    tables[0].caption = escape(caption)
    return tables[0]


def _column_parts(
    columns: Sequence[tuple[str, Sequence[str]]], width: int | None, naming: int
) -> list[list[tuple[str, Sequence[str]]]]:
    """Divide columns into parts that fit into the width; a single part if that is impossible."""
    names, rest = list(columns[:naming]), list(columns[naming:])

    def fits(part: Sequence[tuple[str, Sequence[str]]]) -> bool:
        return width is None or _width([[name, *cells] for name, cells in part], columns=True) <= width

    if fits(columns) or not all(fits([*names, column]) for column in rest):
        return [list(columns)]
    parts: list[list[tuple[str, Sequence[str]]]] = []
    for column in rest:
        if parts and fits([*parts[-1], column]):
            parts[-1].append(column)
        else:
            parts.append([*names, column])
    return parts


_LONGEST_LABEL = 24
"""Labels of up to this many characters are kept on one line."""


def text_tables(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: int, caption: str, width: int
) -> Group:
    """A table whose headings and labels may be broken at spaces, but not its numbers.

    Args:
        header: titles of the columns.
        rows: cells.
        left: number of the first columns, which name the rows and are aligned to the left.
        caption: below the table.
        width: of the terminal. A wider table is continued below, where the first columns are repeated.
    """

    columns = [_ColumnWidths.of(header[i], [row[i] for row in rows], i < left) for i in range(len(header))]
    parts: list[list[int]] = []
    for place in range(left, len(header)):
        if parts and _framed(columns[i].usual for i in (*range(left), *parts[-1], place)) <= width:
            parts[-1].append(place)
        else:
            parts.append([place])
    tables: list[Table] = []
    for part in parts:
        places = [*range(left), *part]
        if _framed(columns[place].least for place in places) > width:
            lines = [list(map(escape, line)) for line in (header, *rows)]
            tables = [fitted(Table(padding=(0, 0)), lines, width, turn=False)]
            break
        # Rich narrows all columns of a table that is too wide, even below their min_width
        widths = _shared(width, [columns[place] for place in places])
        table = Table(padding=(0, 1))
        for place, wide in zip(places, widths, strict=True):
            side: Literal["left", "right"] = "left" if place < left else "right"
            table.add_column(escape(header[place]), justify=side, width=wide, overflow="fold")
        for row in rows:
            table.add_row(*(escape(row[place]) for place in places))
        tables.append(table)
    return Group(*tables, *([Text(caption, style="italic")] if caption else []))


@dataclass(frozen=True)
class _ColumnWidths:
    """The widths that a column of :func:`text_tables` may have, in characters.

    Attributes:
        least: no word of a heading or label is broken, and no number.
        usual: short labels are not broken either.
        most: nothing is broken.
    """

    least: int
    usual: int
    most: int

    @classmethod
    def of(cls, heading: str, cells: Sequence[str], names_rows: bool) -> _ColumnWidths:
        longest = max(map(cell_len, cells), default=1)
        breakable = [word for cell in cells for word in cell.split()] if names_rows else cells
        least = max(map(cell_len, [*heading.split(), *breakable]), default=1)
        usual = max(least, min(_LONGEST_LABEL, longest)) if names_rows else least
        return cls(least, usual, max(usual, longest, cell_len(heading)))


def _framed(widths: Iterable[int]) -> int:
    """The width of a table with columns of these widths, a space on both sides of each, and borders."""
    return 1 + sum(3 + width for width in widths)


def _shared(width: int, columns: Sequence[_ColumnWidths]) -> list[int]:
    """The widths of columns in a table of at most this width; the first get what is free beyond the least."""
    widths = [column.least for column in columns]
    spare = width - _framed(widths)
    for wanted in ([column.usual for column in columns], [column.most for column in columns]):
        for place, wide in enumerate(wanted):
            wider = min(spare, wide - widths[place])
            widths[place] += wider
            spare -= wider
    return widths


def fitted(table: Table, lines: Sequence[Sequence[str]], width: int | None, turn: bool = True) -> Table:
    """Fill a table so that every number can be read.

    Args:
        table: empty; its cells have no padding.
        lines: the headings, then the rows; the first cell of each names it.
        width: of the terminal; None: any. A table that is wider is transposed. If it is still too wide, its
            rows are shown one below the other, with two columns for heading and value.
        turn: whether the table may be transposed: its first column alone names the rows.
    """
    turned: Sequence[Sequence[str]] = list(zip(*lines, strict=True)) if turn else lines
    fits = [lines] if width is None else [each for each in (lines, turned) if _width(each) <= width]
    if not fits:
        table.show_header = False
        table.add_column(overflow="fold")
        table.add_column(justify="right", overflow="fold")
        headings, *records = min(lines, turned, key=lambda each: max(map(len, each[0])))
        for record in records:
            for pair in zip(headings, record, strict=True):
                table.add_row(*pair)
            table.add_section()
        return table
    (first, *others), *rows = fits[0]
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _width(lines: Sequence[Sequence[str]], columns: bool = False) -> int:
    """The width of a table of these lines, or columns, with a border at each column and at the end."""
    table_columns = lines if columns else zip(*lines, strict=True)
    return 1 + sum(1 + max(Text.from_markup(cell).cell_len for cell in column) for column in table_columns)


def _accuracies(summary: Mapping[str, Any]) -> tuple[str, str, str]:
    error = "" if summary.get("accuracy_se") is None else f" ± {summary['accuracy_se']:.1f}"
    worst, variance = (number(summary[name], 1) for name in ("accuracy_worst10", "accuracy_var"))
    return number(summary["accuracy_mean"], 1) + error, worst, variance


def _resume_command(path: Path) -> str:
    from rayfl.rundir import RunDirectory  # deferred: --help should not take its time

    return RunDirectory(path).resume


_EXTRA_COLUMNS = {
    "perplexity_mean": ("perplexity", ""),
    "local_accuracy_mean": (
        "local",
        "mean accuracy with the model that the client itself had trained last, before it was averaged",
    ),
    "finetuned_accuracy_mean": (
        "fine-tuned",
        "mean accuracy after each client has fine-tuned its model for evaluation.finetune_epochs",
    ),
    "newcomers_accuracy_mean": (
        "newcomers",
        "mean accuracy of clients that join after the last round, with the models that they are given",
    ),
    "newcomers_finetuned_accuracy_mean": (
        "newcomers, fine-tuned",
        "mean accuracy of these clients after evaluation.finetune_epochs",
    ),
    "common_accuracy_mean": ("common", "mean accuracy on all test samples, the same for every client"),
}
"""Further columns, if a run has them: heading, and explanation in the caption."""


def _test_sizes(summary: Mapping[str, Any]) -> str:
    """``359 distinct test samples, 70 to 169 a client``."""
    if summary.get("distinct_test_samples") is None or not summary.get("client_test_samples"):
        return ""
    least, _, most = summary["client_test_samples"]
    return f"{summary['distinct_test_samples']:,} distinct test samples, {least:,} to {most:,} a client"


def group_table(summaries: Sequence[Mapping[str, Any]], kind: str, width: int | None = None) -> Table | None:
    """Mean accuracy and variance by planted group or by cluster, one column per method.

    Args:
        summaries: of the runs.
        kind: ``group`` or ``cluster``. Clusters are shown only if no groups are planted: every method has its
            own clusters, whose numbers do not correspond.
        width: of the terminal, see :func:`fitted`.

    Returns:
        None if no run has such groups, or more than :data:`MOST_GROUPS`.
    """
    rows_by_id = [
        {row["id"]: row for row in s.get(f"by_{kind}") or () if row["accuracy_mean"] is not None}
        for s in summaries
    ]
    ids = sorted({i for rows in rows_by_id for i in rows})
    if not ids or len(ids) > MOST_GROUPS or (kind == "cluster" and any(s.get("by_group") for s in summaries)):
        return None
    name = "planted group" if kind == "group" else "cluster"
    table = Table(
        caption=f"by {name}: mean of the clients' accuracies in % (their variance in %²); the variance over "
        f"all clients is that within {name}s plus that between them",
        caption_justify="left",
        padding=(0, 0),
    )
    lines = [(name, *(escape(s["algorithm"]) for s in summaries))]
    for i in ids:
        sizes = {rows[i]["clients"] for rows in rows_by_id if i in rows}
        means = (
            f"{rows[i]['accuracy_mean']:.1f} ({rows[i]['accuracy_var']:.1f})" if i in rows else UNKNOWN
            for rows in rows_by_id
        )
        lines.append((f"{i}, {counted(sizes.pop(), 'client')}" if len(sizes) == 1 else str(i), *means))
    for part in ("within", "between"):
        lines.append((f"variance {part}", *(number(s.get(f"{kind}_var_{part}"), 1) for s in summaries)))
    return fitted(table, lines, width)

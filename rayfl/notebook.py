"""Progress of a run in a notebook, unless the caller handles events."""

from __future__ import annotations

import html
import sys
from collections.abc import Callable

from rayfl.events import Begun, Clustered, Finished, Listener, Note, RoundDone, RunEvent, Stopped
from rayfl.monitor import Pace
from rayfl.units import counted, duration, percent

SHOWN_NOTES = 6
"""Number of the newest notes that are shown below the bar."""


def listener() -> Listener:
    """A listener that shows progress if this is a notebook, else does nothing."""
    show = output()
    return (lambda event: None) if show is None else Progress(show)


def output() -> Callable[[str], None] | None:
    """A place below the running cell: a function that replaces its HTML. None if this is no notebook; then
    IPython is not imported.
    """
    shell = sys.modules.get("IPython")
    running = shell.get_ipython() if shell is not None and hasattr(shell, "get_ipython") else None
    if getattr(running, "kernel", None) is None:  # no notebook kernel, e.g. IPython in a terminal
        return None
    from IPython.display import display  # type: ignore[import-not-found]

    handle = display(_Shown(""), display_id=True)
    return lambda content: handle.update(_Shown(content))


def bar(done: int, total: int) -> str:
    """A progress bar as HTML."""
    return f'<progress value="{done}" max="{total}" style="width: 24em"></progress>'


class _Shown:
    """An object that a notebook shows as HTML; elsewhere its text is empty."""

    def __init__(self, content: str) -> None:
        self._content = content

    def _repr_html_(self) -> str:
        return self._content

    def __repr__(self) -> str:
        return ""


class Progress:
    """Listener that shows a progress bar, the last round, and the newest notes.

    Args:
        show: replaces what is shown by other HTML.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._title, self._done, self._total, self._row = "starting", 0, 1, ""
        self._pace = Pace()
        self._notes: list[str] = []

    def __call__(self, event: RunEvent) -> None:
        """Show an event."""
        match event:
            case Begun(path=path):
                self._title = path.name
            case Note(text=text):
                self._notes.append(text)
            case Clustered(n_clusters=count, ari=ari):
                truth = "" if ari is None else f", agreement with the planted groups (ARI) {ari:.2f}"
                self._notes.append(f"clustered into {counted(count, 'group')}{truth}")
            case RoundDone(row=row):
                self._done, self._total = event.round + 1, event.rounds
                self._row = f"round {self._done} of {self._total}, loss {row['train_loss']:.3f}"
                self._pace.round(self._done, row["seconds"])
                if row.get("accuracy_mean") is not None:
                    mark = "" if row.get("estimated_from") is None else "≈ "
                    self._row += f", accuracy {mark}{percent(row['accuracy_mean'])}"
                    self._row += f", worst 10 % of clients {mark}{percent(row['accuracy_worst10'])}"
                for name, value in event.results.items():
                    self._row += f", {name} {value:.4g}"
            case Finished(summary=summary):
                self._notes.append(f"finished in {duration(summary['seconds'])}")
            case Stopped(rounds=rounds, repeats=repeats):
                how = "" if repeats else "; resume with rayfl.resume"
                self._notes.append(f"stopped after {counted(rounds, 'complete round')}{how}")
            case _:
                return
        self._show(self._html())

    def _html(self) -> str:
        lines = "<br>".join(html.escape(text) for text in (self._row, *self._notes[-SHOWN_NOTES:]) if text)
        seconds_left = self._pace.remaining(self._total)
        eta = f" ETA {duration(seconds_left)}" if seconds_left and self._done < self._total else ""
        shown = f"{bar(self._done, self._total)}{eta}"
        return f"<div><b>{html.escape(self._title)}</b><br>{shown}<br>{lines}</div>"

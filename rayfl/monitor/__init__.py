"""The progress of runs, for observers in other processes: small files in the run directories.

``status`` describes what a run is doing or how it ended, ``writer`` keeps that up to date while the run lasts
and writes ``log.jsonl``, ``looking`` reads it, ``pace`` estimates the remaining time.
"""

from rayfl.monitor.looking import RunView, newest_running, runs_below, view
from rayfl.monitor.pace import Pace
from rayfl.monitor.status import Status
from rayfl.monitor.writer import Monitor

__all__ = ["Monitor", "Pace", "RunView", "Status", "newest_running", "runs_below", "view"]

"""The progress of runs, for observers in other processes: small files in the run directories.

``status`` says what a run does now and how it ended, ``writer`` keeps that up to date while it runs and
writes ``log.jsonl``, ``looking`` reads it, ``pace`` estimates the remaining time.
"""

from rayfl.monitor.looking import RunView, newest_running, runs_below, view
from rayfl.monitor.pace import Pace
from rayfl.monitor.status import Status
from rayfl.monitor.writer import Monitor

__all__ = ["Monitor", "Pace", "RunView", "Status", "newest_running", "runs_below", "view"]

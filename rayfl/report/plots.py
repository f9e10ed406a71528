"""Figures of a run for notebooks and papers: ``result.plot.accuracy().savefig("accuracy.pdf")``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from rayfl.errors import RayflError
from rayfl.report import figures, maps
from rayfl.report.figures import Picture, picture
from rayfl.report.files import RunFiles, numbers, numeric


class Plots:
    """Matplotlib figures of a run. Each raises :class:`~rayfl.errors.RayflError` if the run lacks numbers.

    Args:
        path: the run directory.
    """

    def __init__(self, path: Path) -> None:
        self._run = RunFiles.read(path)

    def accuracy(self) -> Picture:
        """Mean accuracy over rounds, in a band from the worst to the best 10 % of clients."""
        evaluated = self._run.evaluated
        measured = "accuracy_mean" in evaluated and bool(evaluated["accuracy_mean"].notna().any())
        self._require(measured, "accuracy over rounds")
        return picture(figures.accuracy_over_rounds(_rounds_from_one(evaluated)))

    def loss(self) -> Picture:
        """Training loss of the participants and test loss of all clients over rounds."""
        self._require("round" in self._run.rounds, "round")
        rounds = numeric(self._run.rounds)
        return picture(
            figures.loss_over_rounds(_rounds_from_one(rounds), _rounds_from_one(self._run.evaluated))
        )

    def clients(self) -> Picture:
        """Histogram of the clients' accuracies."""
        last = numbers(self._run.clients, "accuracy_last")
        if last is None:
            raise self._missing_error("accuracy of clients")
        return picture(figures.accuracy_histogram(last), height=2.8)

    def clusters(self) -> Picture:
        """The clients in the plane, coloured by their last clusters, as on the map in ``report.html``."""
        steps = maps.steps_of(self._run)
        client_map = maps.map_of(self._run, steps)
        if client_map is None or not steps:
            raise self._missing_error("clusters")
        return picture(
            figures.map_of_clients(client_map.places[-1], steps[-1].labels, client_map.meaning), height=5
        )

    def communication(self) -> Picture:
        """Bytes of each round by tier and direction."""
        ledger = self._run.communication
        self._require("round" in ledger and bool((ledger["round"] >= 0).any()), "traffic")
        return picture(figures.communication(ledger))

    def threshold(self) -> Picture:
        """Number of clusters over the threshold, and the chosen threshold."""
        for entry in reversed(self._run.timeline):
            curve = entry.get("curve")
            if isinstance(curve, dict) and curve.get("threshold"):
                x, y = (np.asarray(curve[name], np.float64) for name in ("threshold", "n_clusters"))
                candidates = (entry.get("threshold"), self._run.setting("clustering.threshold"))
                chosen = next((float(v) for v in candidates if isinstance(v, (int, float))), None)
                return picture(figures.threshold_curve(x, y, chosen, entry.get("n_clusters")), height=2.8)
        raise self._missing_error("clustering with a threshold")

    def _require(self, available: bool, what: str) -> None:
        if not available:
            raise self._missing_error(what)

    def _missing_error(self, what: str) -> RayflError:
        return RayflError(f"{self._run.path}: the run has no {what} to draw")


def _rounds_from_one(frame: pd.DataFrame) -> pd.DataFrame:
    """Count rounds from 1."""
    return frame.assign(round=frame["round"] + 1) if "round" in frame else frame

"""Figures of a run for notebooks and papers: ``result.plot.accuracy().savefig("accuracy.pdf")``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from rayfl.errors import ArgumentError, RayflError, nearest
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

    def curves(self, result: str | None = None) -> Picture:
        """A result of the tests over rounds: its mean over clients.

        Args:
            result: ``accuracy``, a measure of the loss such as ``rmse``, or ``loss``; None: the first of
                these that the run has.
        """
        drawn, about = self._result(result)
        evaluated, column = self._run.evaluated, f"{drawn}_mean"
        self._require(column in evaluated and bool(evaluated[column].notna().any()), f"{drawn} over rounds")
        frame = _rounds_from_one(evaluated)
        if drawn == "accuracy":
            return picture(figures.accuracy_over_rounds(frame))
        return picture(figures.result_over_rounds(frame, column, about))

    def accuracy(self) -> Picture:
        """Mean accuracy over rounds, in a band from the worst to the best 10 % of clients."""
        return self.curves("accuracy")

    def loss(self) -> Picture:
        """Training loss of the participants and test loss of all clients over rounds."""
        self._require("round" in self._run.rounds, "round")
        rounds = numeric(self._run.rounds)
        return picture(
            figures.loss_over_rounds(_rounds_from_one(rounds), _rounds_from_one(self._run.evaluated))
        )

    def clients(self, result: str | None = None) -> Picture:
        """Histogram of the clients' last results.

        Args:
            result: as of :meth:`curves`.
        """
        drawn, about = self._result(result)
        last = numbers(self._run.clients, f"{drawn}_last")
        if last is None or np.isnan(last).all():
            raise self._missing_error(f"{drawn} of clients")
        if drawn == "accuracy":
            return picture(figures.accuracy_histogram(last), height=2.8)
        return picture(figures.histogram(last, f"last {about} of the client"), height=2.8)

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

    def _result(self, name: str | None) -> tuple[str, str]:
        """The name of what is drawn, and what it is."""
        described = {"accuracy": "accuracy (%)"} if self._run.has("accuracy") else {}
        described |= {"loss": "test loss", **self._run.described}
        main = next((result for result in described if result != "loss"), "loss")
        name = main if name is None else name
        if name not in ("accuracy", *described):
            raise ArgumentError("result", f"the run has no result {name!r}", nearest(name, described))
        return name, described.get(name, name)

    def _require(self, available: bool, what: str) -> None:
        if not available:
            raise self._missing_error(what)

    def _missing_error(self, what: str) -> RayflError:
        return RayflError(f"{self._run.path}: the run has no {what} to draw")


def _rounds_from_one(frame: pd.DataFrame) -> pd.DataFrame:
    """Count rounds from 1."""
    return frame.assign(round=frame["round"] + 1) if "round" in frame else frame

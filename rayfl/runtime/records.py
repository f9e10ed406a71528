"""What a run has measured so far, and how it is written into the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rayfl.algorithms import ServerState
from rayfl.clustering.quality import adjusted_rand_index
from rayfl.coresets.clients import weighted_summary
from rayfl.data import Federation
from rayfl.evaluation import BestLast, Ledger, Transfer, accuracy, perplexity, summary
from rayfl.runtime.rundir import RunDirectory
from rayfl.runtime.tensorboard import Board

_SCALARS = (
    "train_loss",
    "accuracy_mean",
    "accuracy_worst10",
    "accuracy_var",
    "loss_mean",
    "perplexity_mean",
    "ari",
    "clusters",
)


class Records:
    """Rounds, clusters over time, bytes, best and last accuracy of every client.

    Args:
        run: where to write.
        federation: for client sizes, test sizes and planted groups.
        tensorboard: whether to write TensorBoard events.
    """

    def __init__(self, run: RunDirectory, federation: Federation, tensorboard: bool) -> None:
        self.run, self.federation = run, federation
        self.best_last = BestLast.start(federation.clients)
        self.perplexity: NDArray[np.float64] = np.full((2, federation.clients), np.nan)
        """Of texts: each client's last and lowest perplexity ``(2, N)``."""
        self._finetuned: NDArray[np.float64] | None = None
        self._facts: dict[str, NDArray[np.float64]] = {}
        self._tested_with: NDArray[np.int64] | None = None
        self.ledger = Ledger()
        self.rounds: list[dict[str, Any]] = []
        self.timeline: list[dict[str, Any]] = []
        self.diagnostics: list[dict[str, Any]] = []
        self._board = Board(run.path) if tensorboard else None

    def start(self) -> None:
        """Write the tables as they are before the first round, or as a checkpoint left them."""
        self.run.write_rounds(self.rounds)
        self._write_clusters()

    def entered(self) -> None:
        """The federation is that of another stage: so may be the planted groups."""
        self._write_clusters()

    def ari(self, state: ServerState) -> float | None:
        """Agreement with the planted groups (adjusted Rand index), for methods that cluster."""
        if self.federation.groups is None or not state.clustered:
            return None
        known = (self.federation.sizes > 0) & (state.clusters >= 0)
        return adjusted_rand_index(state.clusters[known], self.federation.groups[known])

    def transfer(self, *transfers: Transfer) -> None:
        """Enter bytes into the ledger."""
        self.ledger = self.ledger.add(*transfers)

    def clusters(self, state: ServerState, facts: Mapping[str, Any], after: bool = False) -> dict[str, Any]:
        """Record who belongs together from now on, and how it was found.

        Args:
            state: with the new clusters.
            facts: how they were found.
            after: whether they were found at the end of a round (which ``state`` counts already) and not
                before the coming one.
        """
        entry = {
            "round": state.round - after,
            "when": "after" if after else "before",
            "labels": state.assignment.tolist(),
            "n_clusters": self.clusters_in_use(state),
            **facts,
            "ari": self.ari(state),
        }
        self.timeline.append(entry)
        self._write_clusters()
        return entry

    def diagnosis(self, round: int, rows: list[dict[str, Any]]) -> None:
        """What a method says of a round besides the common numbers."""
        self.diagnostics += [{"round": round, **row} for row in rows]

    def clusters_in_use(self, state: ServerState) -> int:
        """Models that a client uses who is there."""
        return len(np.unique(state.assignment[self.federation.sizes > 0]))

    def selection(self, state: ServerState) -> None:
        """Record who uses which model, where clients choose, if it has changed."""
        labels = state.assignment.tolist()
        if not self.timeline or self.timeline[-1]["labels"] != labels:
            self.clusters(state, {}, after=True)

    def tested_with(self, models: NDArray[np.int64] | None) -> None:
        """The model that each client is tested with ``(N,)``, where that may differ from its cluster's."""
        self._tested_with = models

    def finetuned(
        self, who: NDArray[np.int64], correct: NDArray[np.int64], losses: NDArray[np.float64]
    ) -> dict[str, float]:
        """Record the test of models that clients have trained on: metrics for the closing table."""
        sizes = self.federation.predictions[who]
        self._finetuned = np.full(self.federation.clients, np.nan)
        self._finetuned[who] = accuracy(correct, sizes)
        found = summary(correct, losses, sizes)
        names = ("accuracy_mean", "accuracy_worst10", "accuracy_var")
        return {f"finetuned_{name}": found[name] for name in names}

    def client_facts(
        self, clients: NDArray[np.int64], facts: Mapping[str, NDArray[np.float64]]
    ) -> dict[str, float]:
        """Record columns for ``clients.csv``: values ``(n,)`` of some clients, NaN for all others.

        Returns:
            The mean of each over the clients that have one, for the closing table.
        """
        for name, values in facts.items():
            self._facts[name] = np.full(self.federation.clients, np.nan)
            self._facts[name][clients] = values
        return {f"{name}_mean": float(np.mean(values)) for name, values in facts.items()}

    def evaluation(
        self,
        round: int,
        who: NDArray[np.int64],
        correct: NDArray[np.int64],
        losses: NDArray[np.float64],
        weights: NDArray[np.float64] | None = None,
    ) -> dict[str, float | None]:
        """Record the tests of clients; the metrics over clients. Perplexity is one of texts.

        Args:
            round: 0-based.
            who: the clients tested ``(n,)``.
            correct, losses: right predictions, and sums of losses ``(n,)``.
            weights: for what share of all clients each stands ``(n,)``: the metrics are then estimates.
        """
        sizes = self.federation.predictions[who]
        self.best_last = self.best_last.update(round, who, accuracy(correct, sizes))
        over = (
            summary(correct, losses, sizes)
            if weights is None
            else weighted_summary(correct, losses, sizes, weights)
        )
        if not self.federation.samples.tokens:
            return {**over, "perplexity_mean": None}
        found = perplexity(losses, sizes)
        known = ~np.isnan(found)
        tested = who[known]
        self.perplexity[0, tested] = found[known]
        self.perplexity[1, tested] = np.fmin(self.perplexity[1, tested], found[known])
        shares = None if weights is None else weights[known]
        mean = float(np.average(found[known], weights=shares)) if known.any() else None
        return {**over, "perplexity_mean": mean}

    def round(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Record a round, completed by its bytes."""
        number = row["round"]
        complete = {
            **row,
            "bytes_up": self.ledger.total(round=number, direction="up"),
            "bytes_down": self.ledger.total(round=number, direction="down"),
        }
        self.rounds.append(complete)
        self.run.append_round(complete)
        if self._board is not None:
            for name in _SCALARS:
                if complete.get(name) is not None:
                    self._board.add(name, complete[name], number)
            self._board.flush()
        return complete

    def write_tables(self, state: ServerState) -> None:
        """``communication.csv`` and ``clients.csv``: O(N), so only when a run ends or stops."""
        self.run.write_frame("communication.csv", self.ledger.to_frame())
        if self.diagnostics:
            self.run.write_frame("diagnostics.csv", pd.DataFrame(self.diagnostics))
        groups = self.federation.groups
        frame = pd.DataFrame(
            {
                "client": np.arange(self.federation.clients),
                "n": self.federation.sizes,
                "group": pd.NA if groups is None else groups,
                "cluster": state.assignment,
                "accuracy_last": self.best_last.last,
                "accuracy_best": self.best_last.best,
                "best_round": self.best_last.best_round,
                "test_samples": self.federation.test.sizes,
            }
        )
        if self.federation.samples.tokens:
            frame["perplexity_last"], frame["perplexity_best"] = self.perplexity
        if self._tested_with is not None:
            frame["model"] = self._tested_with
        if self._finetuned is not None:
            frame["accuracy_finetuned"] = self._finetuned
        for name, values in self._facts.items():
            frame[name] = values
        self.run.write_frame("clients.csv", frame)

    def _write_clusters(self) -> None:
        groups = None if self.federation.groups is None else self.federation.groups.tolist()
        self.run.write_json("clusters.json", {"groups": groups, "timeline": self.timeline})

    def summary(self, state: ServerState) -> dict[str, Any]:
        """The numbers of the closing table."""
        tested = [row for row in self.rounds if row.get("accuracy_mean") is not None]
        last = tested[-1] if tested else {}
        names = (
            "accuracy_mean",
            "accuracy_weighted",
            "accuracy_median",
            "accuracy_worst10",
            "accuracy_var",
            "perplexity_mean",
        )
        fallbacks = {}
        if self._tested_with is not None:
            elsewhere = self._tested_with != state.assignment
            fallbacks = {"fallbacks": int(elsewhere[self.federation.sizes > 0].sum())}
        return {
            "rounds": state.round,
            "clients": self.federation.clients,
            "clusters": self.clusters_in_use(state),
            **fallbacks,
            **{name: last.get(name) for name in names},
            "accuracy_mean_best": max((row["accuracy_mean"] for row in tested), default=None),
            "ari": self.ari(state),
            "bytes_up": self.ledger.total(direction="up"),
            "bytes_down": self.ledger.total(direction="down"),
        }

    def save(self, state: ServerState) -> tuple[dict[str, NDArray[np.generic]], dict[str, Any]]:
        """Arrays and tables for a checkpoint after ``state.round`` rounds."""
        arrays: dict[str, NDArray[np.generic]] = {
            "last": self.best_last.last,
            "best": self.best_last.best,
            "best_round": self.best_last.best_round,
            "perplexity": self.perplexity,
        }
        tables = {
            "rounds": [row for row in self.rounds if row["round"] < state.round],
            "timeline": [entry for entry in self.timeline if entry["round"] < state.round],
            "diagnostics": [row for row in self.diagnostics if row["round"] < state.round],
            "communication": [vars(t) for t in self.ledger.transfers if t.round < state.round],
        }
        return arrays, tables

    def restore(self, arrays: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
        """Take up what :meth:`save` gave."""
        self.best_last = BestLast(arrays["last"], arrays["best"], arrays["best_round"])
        self.perplexity = np.array(arrays.get("perplexity", self.perplexity), np.float64)
        self.rounds, self.timeline = list(tables["rounds"]), list(tables["timeline"])
        self.diagnostics = list(tables["diagnostics"])
        self.ledger = Ledger().add(*(Transfer(**row) for row in tables["communication"]))

    def close(self) -> None:
        """Flush TensorBoard."""
        if self._board is not None:
            self._board.close()

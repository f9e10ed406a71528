"""The measurements of a run so far, and how they are written to the run directory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from rayfl import rundir
from rayfl.algorithms import Served, ServerState
from rayfl.clustering.quality import adjusted_rand_index
from rayfl.coresets.clients import weighted_summary
from rayfl.data import Federation, TestedOn
from rayfl.data.federation import class_counts
from rayfl.evaluation import (
    BestLast,
    ByGroup,
    Ledger,
    LocalTests,
    Score,
    Scores,
    TestSets,
    Transfer,
    accuracy,
    perplexity,
    protocols,
    summary,
)
from rayfl.evaluation.ledger import COLUMNS, Direction
from rayfl.kept import Kept
from rayfl.losses import CrossEntropy, Loss
from rayfl.rundir import GrowingTable, RunDirectory, clean

if TYPE_CHECKING:
    import pandas as pd

MOST_GROUPS = 100
"""With more clusters than this (SOLO has one per client), ``groups.csv`` has no rows for clusters."""

MOST_CLASSES = 100
"""With more classes than this there is no ``labels.csv``."""

_LONG_TIMELINE = 1 << 20
"""If the timeline has more characters, ``clusters.json`` is not written with each new entry."""


@dataclass(frozen=True)
class Snapshot:
    """The state that :meth:`Records.rollback` restores if a round is not completed."""

    federation: Federation
    arrived: NDArray[np.bool_]
    best_last: BestLast
    local: LocalTests | None
    last_on: Mapping[TestedOn, NDArray[np.float64]]
    measured: Mapping[str, NDArray[np.float64]]
    perplexity: NDArray[np.float64]
    ledger: Ledger
    clusterings: int
    tables: Mapping[str, GrowingTable]
    last: int | None
    tested_with: Served | None


class Records:
    """Rounds, groups, clusters over time, bytes, best and last accuracy of every client.

    Args:
        run: where to write.
        federation: for client sizes, test sizes and planted groups.
        on: the data that clients are tested on.
        local: whether the trained models of clients are also tested before they are averaged.
        loss: the loss, and what it measures.
    """

    def __init__(
        self,
        run: RunDirectory,
        federation: Federation,
        on: Sequence[TestedOn] = ("test",),
        local: bool = False,
        loss: Loss = CrossEntropy(),  # noqa: B008 (frozen)
    ) -> None:
        self.run, self.federation, self.on, self.loss = run, federation, on, loss
        self._tests_locally = local
        self._columns = protocols.columns(on, ("served", "local") if local else ("served",), loss)
        self.arrived: NDArray[np.bool_] = federation.sizes > 0
        """Which clients have been present so far ``(N,)``."""
        self.rounds_trained: NDArray[np.int32] | None = np.zeros(federation.clients, np.int32)
        """In how many rounds each client has trained ``(N,)``; None if an older checkpoint did not say.
        Changed in place: a round must not cost time for each client.
        """
        self._counted: list[NDArray[np.int64]] = []
        """Who has trained since the last snapshot."""
        self._reset_tests()
        self._finetuned: dict[str, NDArray[np.float64]] = {}
        self._client_facts: dict[str, NDArray[np.float64]] = {}
        self._tested_with: Served | None = None
        self.ledger = Ledger()
        self.rounds: list[dict[str, Any]] = []
        self.groups: list[dict[str, Any]] = []
        """The rows of ``groups.csv``."""
        self._tested_groups: list[dict[str, Any]] = []
        self._test_sets: dict[str, Kept[TestSets]] = {}
        self._kept_in_use: Kept[int] = Kept()
        self._kept_ari: Kept[float] = Kept()
        self.timeline: list[dict[str, Any]] = []
        self._timeline_texts: list[tuple[dict[str, Any], str]] = []
        """The entries of the timeline that have become text."""
        self._written_size = 0
        """Characters of the entries in ``clusters.json``."""
        self.diagnostics: list[dict[str, Any]] = []
        """The rows of ``diagnostics.csv``."""
        self._round_diagnostics: list[dict[str, Any]] = []
        self._tables: dict[str, GrowingTable] = {}
        """The files that grow by some rows a round."""
        self._first_written: dict[int, dict[str, list[dict[str, Any]]]] = {}
        """Of rounds that were amended, the rows as they were first, by table."""
        self._labels_written_for: Federation | None = None
        """The federation that ``labels.csv`` describes."""

    def start(self) -> None:
        """Write the tables as they are before the first round, or as restored from a checkpoint."""
        table, last_round = self.run.table, self._last_round
        self._tables = {
            "rounds": table("rounds.csv", self.rounds, self._columns),
            "groups": table("groups.csv", self.groups),
            "communication": table("communication.csv", self.ledger.rows(upto=last_round), COLUMNS),
        }
        self._write_diagnostics(self.diagnostics)
        self._write_clusters()

    def entered(self) -> None:
        """Switch to the federation of another stage, whose planted groups may differ.

        Best and last accuracies are reset, because the earlier ones are of other clients or on other data.
        """
        self._reset_tests()
        self._write_clusters()

    def _reset_tests(self) -> None:
        clients = self.federation.clients
        self.best_last = BestLast.start(clients)
        sums = self.loss.width(self.federation.samples.outputs)
        self.local = LocalTests.start(clients, self.on, sums) if self._tests_locally else None
        self.measured: Mapping[str, NDArray[np.float64]] = {
            f"{protocols.prefix(on)}{name}": np.full(clients, np.nan)
            for on in self.on
            for name in self._result_names
        }
        """The measures of the loss in each client's last test ``(N,)``, on all data that it is tested on."""
        self.last_on: Mapping[TestedOn, NDArray[np.float64]] = {
            on: np.full(clients, np.nan) for on in self.on if on != "test"
        }
        """Each client's last accuracy on data other than its own test data ``(N,)``."""
        self.perplexity: NDArray[np.float64] = np.full((2, clients), np.nan)
        """For texts: each client's last and lowest perplexity ``(2, N)``."""

    def snapshot(self) -> Snapshot:
        """The current state, for :meth:`rollback` if the next round is not completed."""
        self._counted.clear()
        return Snapshot(
            federation=self.federation,
            arrived=self.arrived,
            best_last=self.best_last,
            local=self.local,
            last_on=self.last_on,
            measured=self.measured,
            perplexity=self.perplexity,
            ledger=self.ledger,
            clusterings=len(self.timeline),
            tables=dict(self._tables),
            last=self._last_round,
            tested_with=self._tested_with,
        )

    def rollback(self, before: Snapshot) -> None:
        """Discard what an incomplete round has recorded."""
        self.federation, self.arrived, self.best_last = before.federation, before.arrived, before.best_last
        if self.rounds_trained is not None:
            for who in self._counted:
                self.rounds_trained[who] -= 1
        self._counted.clear()
        self.local, self.last_on, self.measured = before.local, before.last_on, before.measured
        self.perplexity, self.ledger = before.perplexity, before.ledger
        self._tables, last = dict(before.tables), -1 if before.last is None else before.last
        self.rounds, self.groups, self.diagnostics = (
            [row for row in rows if row["round"] <= last]
            for rows in (self.rounds, self.groups, self.diagnostics)
        )
        del self.timeline[before.clusterings :]
        self._tested_with = before.tested_with

    def ari(self, state: ServerState) -> float | None:
        """Agreement with the planted groups (adjusted Rand index), for methods that cluster."""
        if self.federation.groups is None or not state.clustered:
            return None
        clusters, groups, sizes = state.clusters, self.federation.groups, self.federation.sizes

        def compare() -> float:
            compared = (sizes > 0) & (clusters >= 0)
            return adjusted_rand_index(clusters[compared], groups[compared])

        return self._kept_ari.of(compare, clusters, self.federation)

    def transfer(self, *transfers: Transfer) -> None:
        """Record bytes in the ledger."""
        self.ledger = self.ledger.add(*transfers)

    def clusters(self, state: ServerState, facts: Mapping[str, Any], after: bool = False) -> dict[str, Any]:
        """Record new clusters and how they were found. Clusters without ``facts`` that equal the last entry
        are skipped: methods such as FedSoft look for clusters in every round.

        Args:
            state: with the new clusters.
            facts: how they were found.
            after: whether they were found at the end of a round (``state.round`` already counts it) and not
                before the next one.
        """
        entry = {
            "round": state.round - after,
            "when": "after" if after else "before",
            "labels": self._labels(state).tolist(),
            "n_clusters": self.clusters_in_use(state),
            **facts,
            "ari": self.ari(state),
        }
        last = self.timeline[-1] if self.timeline else {}
        if facts or any(last.get(name) != entry[name] for name in ("labels", "n_clusters", "ari")):
            self.timeline.append(entry)
            self._write_clusters(grown=True)
        return entry

    def _labels(self, state: ServerState) -> NDArray[np.int64]:
        """The cluster of each client ``(N,)``; -1 for clients that have not joined yet."""
        return np.where(self.arrived, state.assignment, -1)

    def diagnosis(self, round: int, rows: list[dict[str, Any]]) -> None:
        """Record the method's own diagnostics of a round."""
        self._round_diagnostics = [clean({"round": round} | row | {"round": round}) for row in rows]

    def clusters_in_use(self, state: ServerState) -> int:
        """Number of models used by at least one present client."""
        assignment, sizes = state.assignment, self.federation.sizes
        return self._kept_in_use.of(
            lambda: int(np.count_nonzero(np.bincount(assignment[sizes > 0]))), assignment, self.federation
        )

    def selection(self, state: ServerState) -> None:
        """If clients choose their models, record which client uses which model, if that has changed."""
        labels = self._labels(state).tolist()
        if not self.timeline or self.timeline[-1]["labels"] != labels:
            self.clusters(state, {}, after=True)

    def tested_with(self, models: Served | None) -> None:
        """Record the model ``(N,)``, or mixture ``(N, K)``, that each client is tested with, if it may differ
        from its cluster's.
        """
        self._tested_with = models

    def finetuned(self, who: NDArray[np.int64], scores: Scores) -> dict[str, float | None]:
        """Record the tests of fine-tuned models of clients ``who`` ``(n,)``; returns metrics for the closing
        table.
        """
        results = self._results(who, scores["test"])
        self._finetuned = {f"{name}_finetuned": values for name, values in results.items()}
        return self._metrics("finetuned", who, scores)

    def newcomers(
        self, who: NDArray[np.int64], tests: Mapping[protocols.Tested, Scores]
    ) -> dict[str, float | None]:
        """Record the tests of clients ``(n,)`` that have joined after the last round; returns metrics for the
        closing table.
        """
        all_metrics: dict[str, float | None] = {"newcomers": len(who)}
        for model, scores in tests.items():
            prefix = f"{protocols.NEWCOMERS}{protocols.prefix(model=model)}"
            for name, values in self._results(who, scores["test"]).items():
                self._client_facts[f"{prefix}{name}"] = values
            metrics = self._metrics(model, who, scores)
            all_metrics |= {f"{protocols.NEWCOMERS}{name}": value for name, value in metrics.items()}
        return all_metrics

    def _results(self, who: NDArray[np.int64], score: Score) -> dict[str, NDArray[np.float64]]:
        """The accuracy, and the measures of the loss, of clients ``who`` ``(n,)`` on their test data, each
        ``(N,)``; NaN for the others.
        """
        sizes, unknown = self.federation.predictions[who], np.full(self.federation.clients, np.nan)
        results = {"accuracy": self._accuracy(score, sizes), **self._measured(score, sizes)}
        return {name: _updated(unknown, who, values) for name, values in results.items()}

    @property
    def _result_names(self) -> Sequence[str]:
        """What is measured of each client besides accuracy: the measures of the loss, else the loss itself if
        there is no accuracy.
        """
        return [*self.loss.measures] or ([] if self.loss.accurate else ["loss"])

    def _measured(self, score: Score, sizes: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
        """:attr:`_result_names` of clients, each ``(n,)``; NaN for clients without samples."""
        if self._result_names == ["loss"]:
            return {"loss": score.losses / np.where(sizes > 0, sizes, np.nan)}
        return self.loss.measured(score.sums, sizes)

    def trained(self, round: int, who: NDArray[np.int64], scores: Scores) -> None:
        """Record that clients ``who`` ``(n,)`` trained in a round, and the tests of their models before
        averaging.
        """
        if self.rounds_trained is not None:
            self.rounds_trained[who] += 1
            self._counted.append(who)
        if self.local is not None:
            self.local = self.local.update(round, who, scores)

    def _metrics(
        self,
        model: protocols.Tested,
        who: NDArray[np.int64],
        scores: Scores,
        weights: NDArray[np.float64] | None = None,
    ) -> dict[str, float | None]:
        """The metrics of a model on all data that clients ``(n,)`` were tested on, by name."""
        all_metrics: dict[str, float | None] = {}
        for on, score in scores.items():
            metrics = self._score_metrics(score, self.federation.predictions_on(on)[who], weights)
            prefix = protocols.prefix(on, model)
            all_metrics |= {f"{prefix}{metric}": value for metric, value in metrics.items()}
        return all_metrics

    def _score_metrics(
        self, score: Score, sizes: NDArray[np.int64], weights: NDArray[np.float64] | None
    ) -> dict[str, float | None]:
        tests = score.correct, score.losses, sizes
        if weights is None:
            metrics: dict[str, float | None] = {**summary(*tests)}
        else:
            metrics = {**weighted_summary(*tests, weights, int((self.federation.sizes > 0).sum()))}
        if not self.loss.accurate:
            metrics = {"loss_mean": metrics["loss_mean"]}
        for name, values in self.loss.measured(score.sums, sizes).items():
            measured = ~np.isnan(values)
            shares = None if weights is None else weights[measured]
            metrics[f"{name}_mean"] = (
                float(np.average(values[measured], weights=shares)) if measured.any() else None
            )
        return metrics

    def _accuracy(self, score: Score, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
        """The accuracy of each client in percent ``(n,)``; NaN if the loss has no notion of a right
        prediction.
        """
        return accuracy(score.correct, sizes) if self.loss.accurate else np.full(len(sizes), np.nan)

    def client_facts(
        self, clients: NDArray[np.int64], facts: Mapping[str, NDArray[np.float64]]
    ) -> dict[str, float]:
        """Record columns for ``clients.csv``: values ``(n,)`` of some clients, NaN for all others.

        Returns:
            The mean of each column over the present clients that have a value, for the closing table.
        """
        present = self.federation.sizes[clients] > 0
        for name, values in facts.items():
            self._client_facts[name] = np.full(self.federation.clients, np.nan)
            self._client_facts[name][clients[present]] = values[present]
        return {f"{name}_mean": float(np.mean(values[present])) for name, values in facts.items()}

    def evaluation(
        self,
        state: ServerState,
        who: NDArray[np.int64],
        scores: Scores,
        weights: NDArray[np.float64] | None = None,
    ) -> dict[str, float | None]:
        """Record the tests of clients after a round and return the metrics over clients (for texts with
        perplexity).

        Args:
            state: after the round, with the clusters of the clients.
            who: the clients tested ``(n,)``.
            scores: their tests ``(n,)``.
            weights: the share of all clients that each tested client represents ``(n,)``; the metrics are
                then estimates.

        Returns:
            The columns of ``rounds.csv`` about tests.
        """
        sizes, estimate = self.federation.predictions[who], weights is not None
        test = scores["test"]
        self.best_last = self.best_last.update(state.round - 1, who, self._accuracy(test, sizes), estimate)
        measured = {
            f"{protocols.prefix(on)}{name}": values
            for on, score in scores.items()
            for name, values in self._measured(score, self.federation.predictions_on(on)[who]).items()
        }
        self.measured = {name: _updated(last, who, measured[name]) for name, last in self.measured.items()}
        metrics = self._metrics("served", who, scores, weights)
        self.last_on = {
            on: _updated(last, who, self._accuracy(scores[on], self.federation.predictions_on(on)[who]))
            for on, last in self.last_on.items()
        }
        if self.local is not None:
            local_clients = np.flatnonzero((self.local.round >= 0) & (self.federation.sizes > 0))
            tests = {on: score.take(local_clients) for on, score in self.local.scores.items()}
            metrics |= {
                **self._metrics("local", local_clients, tests),
                protocols.LOCAL_CLIENTS: len(local_clients),
            }
        mean = metrics.get("accuracy_mean")
        sets = self._group_test_sets("all", who, None, weights)
        return {
            **metrics,
            "accuracy_se_samples": None if mean is None else float(sets.standard_error(mean).sum()),
            "distinct_test_samples": int(sets.distinct.sum()),
            "estimated_from": len(who) if estimate else None,
            **self._group_metrics(state, who, test, weights),
            "perplexity_mean": self._perplexities(who, test.losses, weights),
        }

    def _group_metrics(
        self,
        state: ServerState,
        who: NDArray[np.int64],
        score: Score,
        weights: NDArray[np.float64] | None,
    ) -> dict[str, float | None]:
        """The variances within and between planted groups and clusters; also records the rows of
        ``groups.csv``.
        """
        sizes, variances = self.federation.predictions[who], dict[str, float | None]()
        accurate, estimate = self.loss.accurate, weights is not None
        self._tested_groups = []
        for kind, labels in self._divisions(state).items():
            groups = ByGroup.of(score.correct, score.losses, sizes, labels[who], weights)
            variances[f"{kind}_var_within"] = groups.within if accurate else None
            variances[f"{kind}_var_between"] = groups.between if accurate else None
            if len(groups.ids) > MOST_GROUPS:
                continue
            sets = self._group_test_sets(kind, who, labels, weights)
            errors = sets.standard_error(groups.accuracy_mean)
            for place, row in enumerate(groups.rows()):
                undefined = () if accurate else [name for name in row if name.startswith("accuracy")]
                members = (labels == row["id"]) & (self.federation.sizes > 0)
                self._tested_groups.append(
                    {
                        "round": state.round - 1,
                        "kind": kind,
                        **row,
                        **dict.fromkeys(undefined),
                        "clients": int(members.sum()),
                        "distinct_test_samples": int(sets.distinct[place]),
                        "accuracy_se_samples": float(errors[place]) if accurate else None,
                        "estimated_from": row["clients"] if estimate else None,
                    }
                )
        return variances

    def _perplexities(
        self, who: NDArray[np.int64], losses: NDArray[np.float64], weights: NDArray[np.float64] | None
    ) -> float | None:
        """Record the perplexities of clients with texts and return their mean."""
        if self.federation.samples.task != "words":
            return None
        values = perplexity(losses, self.federation.predictions[who])
        defined = ~np.isnan(values)
        tested = who[defined]
        self.perplexity = self.perplexity.copy()
        self.perplexity[0, tested] = values[defined]
        if weights is None:
            self.perplexity[1, tested] = np.fmin(self.perplexity[1, tested], values[defined])
        shares = None if weights is None else weights[defined]
        return float(np.average(values[defined], weights=shares)) if defined.any() else None

    def _divisions(self, state: ServerState) -> dict[str, NDArray[np.int64]]:
        """The divisions for which accuracies are reported: the planted group and the cluster of each client
        ``(N,)``.
        """
        planted, assignment = self.federation.groups, state.assignment
        return {
            **({} if planted is None else {"group": planted}),
            **({"cluster": assignment} if state.clustered else {}),
        }

    def _group_test_sets(
        self,
        kind: str,
        who: NDArray[np.int64],
        labels: NDArray[np.int64] | None,
        weights: NDArray[np.float64] | None,
    ) -> TestSets:
        """The test samples of each group of tested clients; computed again only when the groups change.

        Args:
            kind: of the groups.
            who: the clients tested ``(n,)``.
            labels: the group of every client ``(N,)``; None: one group of all clients.
            weights: how much each tested client counts ``(n,)``; None: equally.
        """
        federation = self.federation

        def count() -> TestSets:
            tested = federation.predictions[who] > 0
            tested_clients = who[tested]
            return TestSets.of(
                federation.test.among(tested_clients),
                np.zeros(len(tested_clients), np.int64) if labels is None else labels[tested_clients],
                len(federation.samples.y_test),
                None if weights is None else weights[tested],
            )

        return self._test_sets.setdefault(kind, Kept()).of(count, federation, who, labels, weights)

    def round(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Record a round and add its bytes to the row."""
        number = row["round"]
        complete = {
            **row,
            "bytes_up": self.ledger.total(round=number, direction="up"),
            "bytes_down": self.ledger.total(round=number, direction="down"),
        }
        self._write_labels()
        self._extend_table("rounds", [complete])
        self._extend_table("groups", self._tested_groups)
        self._extend_table("communication", self.ledger.rows(after=self._last_round, upto=number))
        self.diagnostics += self._round_diagnostics
        self._write_diagnostics(self._round_diagnostics)
        self.groups += self._tested_groups
        self.rounds.append(complete)
        self._tested_groups, self._round_diagnostics = [], []
        return complete

    def reopen(self) -> None:
        """Prepare for a test after the last round, which takes the place of an estimate: :meth:`amend`."""
        last = self.rounds[-1]
        self._first_written[last["round"]] = self._of_round(last["round"])
        entry = self.timeline[-1] if self.timeline else {}
        chosen_by_some = last.get("estimated_from") is not None and entry.keys() == _SELECTED
        if chosen_by_some and (entry["round"], entry["when"]) == (last["round"], "after"):
            self.timeline.pop()  # now all choose

    def amend(self, row: Mapping[str, Any]) -> None:
        """Add tests to the last round, which is already in the files; after :meth:`reopen`."""
        last = self.rounds[-1]
        number = last["round"]
        sent = {f"bytes_{way}": self.ledger.total(round=number, direction=way) for way in get_args(Direction)}
        self.rounds[-1] = {**last, **row, **sent}
        self.groups = [group for group in self.groups if group["round"] < number] + self._tested_groups
        self._tested_groups = []
        self.start()

    def _of_round(self, number: int) -> dict[str, list[dict[str, Any]]]:
        """The rows of a round in the tables that :meth:`amend` changes."""
        return {name: [row for row in getattr(self, name) if row["round"] == number] for name in _AMENDED}

    @property
    def _last_round(self) -> int | None:
        """The last round in the files; None if there is none yet."""
        return self.rounds[-1]["round"] if self.rounds else None

    def _extend_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._tables[name] = self._tables[name].extended(rows)

    def _write_diagnostics(self, new: Sequence[Mapping[str, Any]]) -> None:
        """Add rows to ``diagnostics.csv``. If a row has a new column, the whole file is written again; if the
        method reports nothing, there is no file.
        """
        table = self._tables.get("diagnostics")
        old_columns = () if table is None else table.columns
        if any(name not in old_columns for row in new for name in row):
            columns = dict.fromkeys(name for row in self.diagnostics for name in row)
            self._tables["diagnostics"] = self.run.table("diagnostics.csv", self.diagnostics, [*columns])
        elif table is not None:
            self._tables["diagnostics"] = table.extended(new)

    def write_tables(self, state: ServerState) -> None:
        """Write ``clients.csv`` (every client's last test) when a run ends or stops, since this takes O(N).

        The files that grow round by round are completed; rows of a round that was rolled back are removed.
        """
        import pandas as pd

        self._write_clusters()  # the file may have rows of a round that was rolled back
        self._extend_table("communication", self.ledger.rows(after=self._last_round))
        # A round that was rolled back may have written it with other columns.
        self._tables.pop("diagnostics", None)
        self._write_diagnostics(self.diagnostics)
        for table in self._tables.values():
            table.cut()
        self._write_labels()
        columns, clients = self._client_columns(state), self.federation.clients
        starts = range(0, max(1, clients), rundir.AT_ONCE)
        slices = (slice(first, first + rundir.AT_ONCE) for first in starts)  # a few clients at a time
        pieces = (pd.DataFrame({name: column[part] for name, column in columns.items()}) for part in slices)
        self.run.write_frames("clients.csv", pieces)

    def _client_columns(self, state: ServerState) -> dict[str, NDArray[Any]]:
        """The columns of ``clients.csv``, each ``(N,)``."""
        clients, groups, names = self.federation.clients, self.federation.groups, self.federation.names
        columns: dict[str, NDArray[Any]] = {
            "client": np.arange(clients),
            **({} if names is None else {"name": names}),
            "n": self.federation.sizes,
            # One NaN that all clients share
            "group": np.broadcast_to(np.nan, clients) if groups is None else groups,
            "cluster": self._labels(state),
            **({} if self.rounds_trained is None else {"rounds_trained": self.rounds_trained}),
            "accuracy_last": self.best_last.last,
            "accuracy_best": self.best_last.best,
            "best_round": self.best_last.best_round,
            "test_samples": self.federation.test.sizes,
        }
        if self.federation.samples.task == "words":
            columns["perplexity_last"], columns["perplexity_best"] = self.perplexity
        columns |= shares_of(self._tested_with)
        columns |= {f"{name}_last": values for name, values in self.measured.items()}
        for on, values in self.last_on.items():
            columns[f"{protocols.prefix(on)}accuracy_last"] = values
        if self.local is not None:
            trained = self.local.round >= 0
            for on, score in self.local.scores.items():
                sizes, prefix = self.federation.predictions_on(on), protocols.prefix(on, "local")
                results = {
                    "accuracy": self._accuracy(score, sizes),
                    **self._measured(score, sizes),
                }
                for name, values in results.items():
                    columns[f"{prefix}{name}_last"] = np.where(trained, values, np.nan)
            columns["local_round"] = self.local.round
        return {**columns, **self._finetuned, **self._client_facts}

    def _write_labels(self) -> None:
        """Write ``labels.csv``, unless it already describes this federation, which only events change."""
        samples = self.federation.samples
        if self._labels_written_for is self.federation or samples.classes > MOST_CLASSES:
            return
        if not (samples.task == "words" or samples.numeric):
            self.run.write_frames("labels.csv", self._class_counts())
        self._labels_written_for = self.federation

    def _class_counts(self) -> Iterator[pd.DataFrame]:
        """The rows of ``labels.csv``, some clients at a time."""
        import pandas as pd

        clients, classes = self.federation.clients, self.federation.samples.classes
        for first in range(0, clients, rundir.AT_ONCE):
            block = slice(first, min(first + rundir.AT_ONCE, clients))
            columns = [f"class_{label}" for label in range(classes)]
            frame = pd.DataFrame(class_counts(self.federation, block), columns=columns)
            frame.insert(0, "client", np.arange(block.start, block.stop))
            yield frame

    def _write_clusters(self, grown: bool = False) -> None:
        """Write all of ``clusters.json``, since it is one object; only new entries are converted to text.

        Args:
            grown: whether only one entry was added. A long file is then written only if it has grown by an
                eighth; otherwise the total cost would be quadratic in the number of rounds. When a run ends,
                the file is complete.
        """
        groups, names = self.federation.groups, self.federation.names
        pairs = zip(self._timeline_texts, self.timeline, strict=False)
        unchanged = itertools.takewhile(lambda pair: pair[0][0] is pair[1], pairs)
        self._timeline_texts = [written for written, _ in unchanged]
        self._timeline_texts += [
            (entry, rundir.item(entry)) for entry in self.timeline[len(self._timeline_texts) :]
        ]
        size = sum(len(text) for _, text in self._timeline_texts)
        if grown and _LONG_TIMELINE < size < 1.125 * self._written_size:
            return
        self._written_size = size
        head = {
            **({} if names is None else {"names": names.tolist()}),
            "groups": None if groups is None else groups.tolist(),
        }
        self.run.write_json_with(
            "clusters.json", head, "timeline", [text for _, text in self._timeline_texts]
        )

    def summary(self, state: ServerState) -> dict[str, Any]:
        """The numbers of the closing table."""
        tested = [row for row in self.rounds if row.get("loss_mean") is not None]
        last = tested[-1] if tested else {}
        names = (
            "accuracy_mean",
            "accuracy_weighted",
            "accuracy_median",
            "accuracy_worst10",
            "accuracy_best10",
            "accuracy_var",
            "accuracy_se",
            "group_var_within",
            "group_var_between",
            "cluster_var_within",
            "cluster_var_between",
            "loss_mean",
            "perplexity_mean",
            "distinct_test_samples",
            "accuracy_se_samples",
        )
        present = self.federation.sizes > 0
        tests = self.federation.test.sizes[present]
        contenders = [
            row
            for row in tested
            if row.get("estimated_from") is None and row.get("stage") == last.get("stage")
        ]
        fallbacks = {}
        if isinstance(self._tested_with, np.ndarray):
            elsewhere = self._tested_with != state.assignment
            fallbacks = {"fallbacks": int(elsewhere[present].sum())}
        return {
            "rounds": state.round,
            "clients": self.federation.clients,
            "clusters": self.clusters_in_use(state),
            **fallbacks,
            **({"measures": dict(self.loss.measures)} if self.loss.measures else {}),
            **{name: last.get(name) for name in (*names, *self._columns)},
            **protocols.best(contenders, self.loss),
            "client_test_samples": [int(tests.min()), float(np.median(tests)), int(tests.max())],
            "ari": self.ari(state),
            "bytes_up": self.ledger.total(direction="up"),
            "bytes_down": self.ledger.total(direction="down"),
            **{f"by_{kind}": self._last_groups(kind, last.get("round")) for kind in ("group", "cluster")},
        }

    def _last_groups(self, kind: str, round: int | None) -> list[dict[str, Any]]:
        """The rows of ``groups.csv`` of one round and kind, without the columns that are constant."""
        return [
            {name: value for name, value in row.items() if name not in ("round", "kind", "estimated_from")}
            for row in self.groups
            if row["round"] == round and row["kind"] == kind
        ]

    def save(self, state: ServerState) -> tuple[dict[str, NDArray[np.generic]], dict[str, Any]]:
        """Arrays and tables for a checkpoint after ``state.round`` rounds."""
        arrays: dict[str, NDArray[np.generic]] = {
            "last": self.best_last.last,
            "best": self.best_last.best,
            "best_round": self.best_last.best_round,
            **({"perplexity": self.perplexity} if self.federation.samples.task == "words" else {}),
            **{f"last.{on}": last for on, last in self.last_on.items()},
            **{f"measured.{name}": last for name, last in self.measured.items()},
            **({} if self.local is None else self.local.arrays()),
            **({} if self.rounds_trained is None else {"rounds_trained": self.rounds_trained.copy()}),
        }
        grown = {
            name: [row for row in getattr(self, name) if row["round"] < state.round] for name in _AMENDED
        }
        amended = {str(number): self._of_round(number) for number in self._first_written}
        for number, rows in self._first_written.items():  # the files of these tables only grow
            grown = _with_round(number, grown, rows)
        tables = {
            **grown,
            **({"amended": amended} if amended else {}),
            "diagnostics": [row for row in self.diagnostics if row["round"] < state.round],
            "communication": [vars(t) for t in self.ledger.transfers if t.round < state.round],
        }
        return arrays, tables

    def restore(self, arrays: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
        """Restore the output of :meth:`save`."""
        self.best_last = BestLast(arrays["last"], arrays["best"], arrays["best_round"])
        self.perplexity = np.array(arrays.get("perplexity", self.perplexity), np.float64)
        # Checkpoints of older versions do not have these.
        counts = arrays.get("rounds_trained")
        self.rounds_trained = None if counts is None else counts.copy()
        self.last_on = {on: arrays.get(f"last.{on}", last) for on, last in self.last_on.items()}
        self.measured = {name: arrays.get(f"measured.{name}", last) for name, last in self.measured.items()}
        if self.local is not None:
            self.local = self.local.restored(arrays)
        self.rounds, self.timeline = list(tables["rounds"]), list(tables["timeline"])
        self.groups, self.diagnostics = list(tables["groups"]), list(tables["diagnostics"])
        for text, rows in tables.get("amended", {}).items():
            number = int(text)
            self._first_written[number] = self._of_round(number)
            current = {name: getattr(self, name) for name in _AMENDED}
            for name, changed in _with_round(number, current, rows).items():
                setattr(self, name, changed)
        self.ledger = Ledger().add(*(Transfer(**row) for row in tables["communication"]))


_AMENDED = ("rounds", "groups", "timeline")
"""The tables with results of tests, which a later test of the last round may change."""

_SELECTED = {"round", "when", "labels", "n_clusters", "ari"}
"""What ``clusters.json`` says of clients that have chosen their models."""


def _with_round(
    number: int, tables: Mapping[str, list[dict[str, Any]]], new: Mapping[str, list[dict[str, Any]]]
) -> dict[str, list[dict[str, Any]]]:
    """Tables with other rows of a round."""
    return {
        name: [
            *(row for row in tables[name] if row["round"] < number),
            *new[name],
            *(row for row in tables[name] if row["round"] > number),
        ]
        for name in _AMENDED
    }


def shares_of(served: Served | None) -> dict[str, NDArray[Any]]:
    """Columns for clients that are not tested with the model of their cluster: the number of their model, or
    the share of each of at most :data:`MOST_GROUPS` models.
    """
    if served is None:
        return {}
    if isinstance(served, np.ndarray):
        return {"model": served}
    if served.shape[1] > MOST_GROUPS:
        return {}
    dense = served.toarray().astype(np.float64)
    with np.errstate(invalid="ignore"):
        shares = dense / dense.sum(axis=1, keepdims=True)
    return {f"share_{model}": values for model, values in enumerate(shares.T)}


def _updated(
    values: NDArray[np.float64], who: NDArray[np.int64], new: NDArray[np.float64]
) -> NDArray[np.float64]:
    """A copy with other values of some clients."""
    updated = values.copy()
    updated[who] = new
    return updated

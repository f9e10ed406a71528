"""Read a run directory, even if it is incomplete."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rayfl.config.text import NOT_YAML, parse
from rayfl.errors import RayflError
from rayfl.files import regular
from rayfl.losses import LOSSES
from rayfl.rundir import METRIC_COLUMNS, read_table

TESTS_IN_ROUNDS = {
    "local_": "local models",
    "common_": "common test set",
    "validation_": "validation samples",
}
"""Tests of a round other than the main one, by the prefix of their metrics, and what they are called; see
:mod:`rayfl.evaluation.protocols`.
"""

TESTS_AT_THE_END = {
    "finetuned_": "fine-tuned",
    "newcomers_": "newcomers",
    "newcomers_finetuned_": "newcomers, fine-tuned",
}
"""The same for tests after the last round."""


def column_of(prefix: str, result: str) -> str:
    """The column of ``clients.csv`` with a result of each client in a test after the last round."""
    return f"{result}_finetuned" if prefix == "finetuned_" else f"{prefix}{result}"


def described_in(runs: Iterable[RunFiles]) -> dict[str, str]:
    """:attr:`RunFiles.described` of several runs together."""
    return {name: text for run in runs for name, text in run.described.items()}


def smaller_is_better(result: str) -> bool | None:
    """Whether a smaller value of what tests measure is better; None for a measure of an unknown loss."""
    if result in ("accuracy", "loss"):
        return result == "loss"
    losses = [loss for loss in LOSSES.values() if result in loss.measures]
    return any(result in loss.lower_is_better for loss in losses) if losses else None


Value = str | int | float | None


@dataclass(frozen=True)
class RunFiles:
    """The content of a run directory; missing files are empty.

    Attributes:
        path: the run directory.
        config: ``config.yaml``, parsed; and ``config_text``, as it stands.
        environment: ``environment.json``.
        clusters: ``clusters.json``.
        summary: ``summary.json``; empty while the run is not finished.
        status: ``status.json``; empty for older runs.
        plugins: ``plugins.json``; empty without plug-ins.
        rounds, groups, clients, communication, labels: the CSV files of these names. Older runs have no
            ``groups.csv`` or ``labels.csv``; these are not reported as missing.
        missing: files that do not exist or cannot be read, each with the reason.
    """

    path: Path
    config: dict[str, Any]
    config_text: str
    environment: dict[str, Any]
    clusters: dict[str, Any]
    summary: dict[str, Any]
    status: dict[str, Any]
    plugins: dict[str, Any]
    rounds: pd.DataFrame
    groups: pd.DataFrame
    clients: pd.DataFrame
    communication: pd.DataFrame
    labels: pd.DataFrame
    missing: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> RunFiles:
        """Read ``path``.

        Raises:
            RayflError: if there is no such folder.
        """
        if not path.is_dir():
            raise RayflError(f"{path}: no such run directory")
        missing: list[str] = []

        def text(name: str) -> str:
            try:
                return regular(path / name).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                missing.append(f"{name} ({_reason(error)})")
                return ""

        def mapping(name: str, content: str) -> dict[str, Any]:
            try:
                parsed = parse(content) if name.endswith(".yaml") else json.loads(content or "{}")
            except NOT_YAML as error:
                missing.append(f"{name} ({_reason(error)})")
                return {}
            return parsed if isinstance(parsed, dict) else {}

        def table(name: str, numeric: Sequence[str] = ()) -> pd.DataFrame:
            try:
                frame = read_table(regular(path / name))
                for column in set(numeric) & set(frame):
                    pd.to_numeric(frame[column])
                return frame
            except (OSError, ValueError) as error:
                missing.append(f"{name} ({_reason(error)})")
                return pd.DataFrame()

        def optional_table(name: str) -> pd.DataFrame:
            return table(name) if (path / name).exists() else pd.DataFrame()

        def optional_mapping(name: str) -> dict[str, Any]:
            return mapping(name, text(name)) if (path / name).exists() else {}

        config_text = text("config.yaml")
        return cls(
            path=path,
            config=mapping("config.yaml", config_text),
            config_text=config_text,
            environment=mapping("environment.json", text("environment.json")),
            clusters=mapping("clusters.json", text("clusters.json")),
            summary=optional_mapping("summary.json"),
            status=optional_mapping("status.json"),
            plugins=optional_mapping("plugins.json"),
            rounds=table("rounds.csv"),
            groups=optional_table("groups.csv"),
            clients=table("clients.csv"),
            communication=table("communication.csv", ("round", "bytes")),
            labels=optional_table("labels.csv"),
            missing=tuple(missing),
        )

    def setting(self, dotted: str) -> Any:
        """A setting such as ``algorithm.name``; None if there is none."""
        value: Any = self.config
        for step in dotted.split("."):
            value = value.get(step) if isinstance(value, dict) else None
        return value

    @property
    def code(self) -> dict[str, str]:
        """The version of rayfl, and the hash of each plug-in that the run imported, by name, if known."""
        versions = self.environment.get("versions")
        version = versions.get("rayfl") if isinstance(versions, dict) else None
        entries = self.plugins.get("plugins")
        known = [each for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []
        hashes = {str(each.get("module")): str(each.get("sha256")) for each in known}
        return {**({} if version is None else {"rayfl": str(version)}), **hashes}

    @property
    def measures(self) -> Mapping[str, str]:
        """The additional measures of the loss, by name, and their descriptions."""
        name = self.setting("loss.name")
        measures = LOSSES[name].measures if name in LOSSES else self.summary.get("measures")
        return measures if isinstance(measures, Mapping) else {}

    @functools.cached_property
    def sent(self) -> pd.Series[float] | None:
        """Bytes sent up and down by the end of each row of :attr:`rounds`, those before the first included;
        None if they are not known.
        """
        if not {"bytes_up", "bytes_down"} <= set(self.rounds):
            return None
        each, ledger = (
            numeric(self.rounds[["bytes_up", "bytes_down"]]).fillna(0).sum(axis=1),
            self.communication,
        )
        known = {"round", "bytes"} <= set(ledger)
        return each.cumsum() + (float(ledger.loc[ledger["round"] < 0, "bytes"].sum()) if known else 0.0)

    @property
    def results(self) -> tuple[str, ...]:
        """What tests measure, by name: accuracy, and :attr:`described`."""
        return ("accuracy", *self.described)

    def has(self, result: str) -> bool:
        """Whether a test in some round, or of some client, gave a result."""
        columns = ((self.rounds, f"{result}_mean"), (self.clients, f"{result}_last"))
        return any(column in table and bool(table[column].notna().any()) for table, column in columns)

    @property
    def described(self) -> Mapping[str, str]:
        """What tests measure besides accuracy, and what that is: the measures of the loss, or the loss itself
        if there is nothing else.
        """
        if not self.measures and "loss_last" in self.clients:
            return {"loss": "test loss"}
        return self.measures

    @property
    def planned(self) -> int | None:
        """The number of rounds that the run is to have; None if it is not known."""
        candidates = [_number(rounds) for rounds in (self.setting("rounds"), self.status.get("rounds"))]
        return next((rounds for rounds in candidates if isinstance(rounds, int) and rounds > 0), None)

    @property
    def unfinished(self) -> str:
        """How the run ended before its last round, or that it has not ended; empty if it is finished."""
        state, done = self.status.get("state"), len(self.rounds)
        summed = _number(self.summary.get("rounds"))
        finished = isinstance(summed, int) and summed >= max(done, self.planned or 0)
        if finished or state not in ("starting", "running", "stopped", "failed"):
            return ""
        of = f" of {self.planned:,}" if self.planned else ""
        after = f"after {done:,}{of} round{'' if (self.planned or done) == 1 else 's'}"
        why = f": {self.status['why']}" if self.status.get("why") else "."
        if state in ("starting", "running"):
            return f"The run had not ended when this page was written, {after}."
        return f"The run {'was stopped' if state == 'stopped' else 'failed'} {after}{why}"

    @property
    def clustered(self) -> bool:
        """Whether the method clusters the clients, though it may have found a single cluster."""
        counts, ari = numbers(self.rounds, "clusters"), numbers(self.rounds, "ari")
        labels = numbers(self.clients, "cluster")
        several = counts is not None and bool(np.nanmax(counts) > 1)
        several = several or (labels is not None and len(np.unique(labels[labels >= 0])) > 1)
        return bool(self.timeline) or ari is not None or several

    @property
    def absent_at_end(self) -> NDArray[np.bool_]:
        """Which clients are absent at the end ``(N,)``, because they have no training samples."""
        sizes = numbers(self.clients, "n")
        none = np.zeros(len(self.clients), bool)
        return none if sizes is None or not (sizes > 0).any() else sizes == 0

    @property
    def newcomers(self) -> NDArray[np.bool_]:
        """Which clients joined after the last round ``(N,)``: they were tested, but not trained with."""
        found = np.zeros(len(self.clients), bool)
        for result in self.results:
            values = numbers(self.clients, f"newcomers_{result}")
            found |= False if values is None else ~np.isnan(values)
        return found

    def absent_at(self, entry: Mapping[str, Any]) -> NDArray[np.bool_]:
        """Which clients had left by an entry of :attr:`timeline` ``(N,)``.

        Only the clients absent at the end are known: before the last event by which clients leave, no client
        counts as absent.
        """
        events = self.setting("events")
        valid = [event for event in events if isinstance(event, dict)] if isinstance(events, list) else []
        leaves = [event for event in valid if event.get("name") == "leave"]
        since = max((int(e.get("round") or 0) for e in leaves), default=-1)
        round = entry.get("round")
        earlier = not isinstance(round, int) or round < since
        return np.zeros(len(self.clients), bool) if earlier and leaves else self.absent_at_end

    @property
    def timeline(self) -> list[dict[str, Any]]:
        """The clusterings of the run in time, from ``clusters.json``."""
        return [entry for entry in self.clusters.get("timeline") or [] if isinstance(entry, dict)]

    @functools.cached_property
    def evaluated(self) -> pd.DataFrame:
        """The rounds with an evaluation, numeric."""
        tests = [name for name in ("accuracy_mean", "loss_mean") if name in self.rounds]
        if "round" not in self.rounds or "accuracy_mean" not in tests:
            return pd.DataFrame()
        frame = numeric(self.rounds)
        tested: pd.DataFrame = frame[frame[tests].notna().any(axis=1)]
        return tested.sort_values("round").reset_index(drop=True)

    def contenders(self) -> pd.DataFrame:
        """The rounds among which the best is chosen: those with tests of all clients since the last event.

        Rounds in which only some clients were tested are estimates; before an event other clients were
        tested, or on other data.
        """
        frame: pd.DataFrame = self.evaluated
        if "estimated_from" in frame:
            frame = frame[frame["estimated_from"].isna()]
        if "stage" in frame and len(frame):
            frame = frame[frame["stage"] == self.rounds["stage"].max()]
        return frame

    def last_groups(self, kind: str) -> pd.DataFrame:
        """The rows of ``groups.csv`` of the last evaluation, of one kind (``group`` or ``cluster``)."""
        if not {"round", "kind", "id"} <= set(self.groups.columns):
            return pd.DataFrame()
        of_kind: pd.DataFrame = self.groups[self.groups["kind"] == kind]
        last: pd.DataFrame = of_kind[of_kind["round"] == self.groups["round"].max()]
        return last.reset_index(drop=True)

    def headline(self) -> dict[str, Value]:
        """The run in one row; None for unknown values.

        ``accuracy_mean`` and the like are those of the last evaluation; if ``estimated_from`` is set, it is
        an estimate from that many clients. ``accuracy_mean_max`` is the highest mean among
        :meth:`contenders`, in round ``max_round``; ``accuracy_mean_best_validation`` is that of the contender
        with the highest validation accuracy; ``accuracy_client_best`` is the mean over clients of each
        client's own best round. Rounds are indices from 0. Bytes and seconds are totals of the run, as in the
        closing table; for an unfinished run, seconds are the sum over its rounds.
        """
        row: dict[str, Value] = {
            "run": self.path.resolve().name,
            **{
                part: _text(self.setting(f"{part}.name"))
                for part in ("algorithm", "data", "partition", "model")
            },
            "seed": _number(self.setting("seed")),
            "clients": len(self.clients) or None,
            "rounds": len(self.rounds) or None,
        }
        evaluated = self.evaluated
        in_rounds = [f"{test}{result}_mean" for result in self.results for test in ("", *TESTS_IN_ROUNDS)]
        for name in dict.fromkeys((*METRIC_COLUMNS, *in_rounds)):
            row[name] = _number(evaluated[name].iloc[-1]) if name in evaluated and len(evaluated) else None
        row["last_round"] = row["accuracy_mean_max"] = row["max_round"] = None
        row["accuracy_mean_best_validation"] = None
        if len(evaluated):
            row["last_round"] = int(evaluated["round"].iloc[-1])
        contenders = self.contenders()
        if len(contenders) and contenders["accuracy_mean"].notna().any():
            best = int(contenders["accuracy_mean"].argmax())
            row["accuracy_mean_max"] = _number(contenders["accuracy_mean"].iloc[best])
            row["max_round"] = int(contenders["round"].iloc[best])
            validated = numbers(contenders, "validation_accuracy_mean")
            if validated is not None and not np.isnan(validated).all():
                chosen = contenders["accuracy_mean"].iloc[int(np.nanargmax(validated))]
                row["accuracy_mean_best_validation"] = _number(chosen)
        means = {
            f"{test}{result}_mean": column_of(test, result)
            for result in self.results
            for test in TESTS_AT_THE_END
        }
        for name, column in {"accuracy_client_best": "accuracy_best", **means}.items():
            values = numbers(self.clients, column)
            has_values = values is not None and not np.isnan(values).all()
            row[name] = float(np.nanmean(values)) if values is not None and has_values else None
        clusters = self._latest("clusters", "n_clusters") if self.clustered else None
        row["clusters"] = None if clusters is None else int(clusters)
        row["ari"] = self._latest("ari", "ari")
        for direction in ("up", "down"):
            row[f"bytes_{direction}"] = self._bytes(direction)
        row["seconds"] = self._seconds()
        return row

    def _latest(self, column: str, key: str) -> Value:
        """The last known value of a column of ``rounds.csv``, else of the timeline of clusterings."""
        values = numbers(self.rounds, column)
        if values is not None:
            return _number(values[~np.isnan(values)][-1])
        recorded = [entry[key] for entry in self.timeline if entry.get(key) is not None]
        return _number(recorded[-1]) if recorded else None

    def _seconds(self) -> Value:
        """The seconds of the run from the start of its workers, over all sessions."""
        rounds = _number(self.summary.get("rounds"))
        # Not the summary from before the number of rounds was raised
        if isinstance(rounds, int) and rounds >= len(self.rounds):
            return _number(self.summary.get("seconds"))
        values = numbers(self.rounds, "seconds")
        return None if values is None else float(np.nansum(values))

    def _bytes(self, direction: str) -> Value:
        """Bytes over all rounds and tiers, from the ledger, which includes those before the first round."""
        ledger = self.communication
        if {"direction", "bytes"} <= set(ledger.columns):
            return int(ledger.loc[ledger["direction"] == direction, "bytes"].sum())
        values = numbers(self.rounds, f"bytes_{direction}")
        return None if values is None else int(np.nansum(values))


def numeric(frame: pd.DataFrame) -> pd.DataFrame:
    """A table of numbers, NaN for what is none; columns of numbers are taken as they are."""
    table = frame.copy()
    for name in frame.select_dtypes(exclude="number"):
        table[name] = pd.to_numeric(frame[name], errors="coerce")
    return table


def numbers(frame: pd.DataFrame, column: str) -> NDArray[np.float64] | None:
    """A column as floats, NaN where empty; None if it is missing or holds no number at all."""
    if column not in frame:
        return None
    values = pd.to_numeric(frame[column], errors="coerce").to_numpy(np.float64)
    return None if np.isnan(values).all() else values


def _number(value: Any) -> Value:
    """A plain int or float; None for NaN and anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return None
    if np.isnan(value):
        return None
    return int(value) if float(value).is_integer() and not isinstance(value, float) else float(value)


def _text(value: Any) -> Value:
    return None if value is None else str(value)


def _reason(error: Exception) -> str:
    """Why a file could not be read, in a few words."""
    if isinstance(error, FileNotFoundError):
        return "not there"
    return f"unreadable: {str(error).splitlines()[0] if str(error) else type(error).__name__}"

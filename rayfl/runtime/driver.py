"""The driver, which is the global parameter server (GPS): it runs the rounds, one after another."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import save_file

from rayfl.algorithms import Mixing, Plan, ServerState, Setup
from rayfl.config import Config
from rayfl.data import Federation
from rayfl.errors import ConfigError, DataError, RayflError
from rayfl.evaluation.ledger import Direction, Transfer
from rayfl.report import write_report
from rayfl.runtime.backend import Backend
from rayfl.runtime.checkpoint import Checkpoint, checkpoints, models_hash
from rayfl.runtime.jobs import HostSpec
from rayfl.runtime.records import Records
from rayfl.runtime.rundir import RunDirectory
from rayfl.runtime.servers import RoundReport, Servers
from rayfl.runtime.signing import cluster_clients, facts
from rayfl.runtime.states import ClientStates
from rayfl.training import LocalWork, length


@dataclass(frozen=True)
class Event:
    """Something that happened, for whoever watches the run.

    Attributes:
        kind: ``note`` (a line of text), ``blocks`` (progress within a round), ``clusters`` (an entry of
            ``clusters.json`` without its labels), ``round`` (a row of ``rounds.csv``), ``stopped`` or
            ``done`` (the summary).
        data: what there is to say.
    """

    kind: str
    data: dict[str, Any]


class Interrupted(Exception):
    """The run was asked to stop, and a checkpoint has been written."""


class Driver:
    """Runs a config from begin to end, or from its newest checkpoint.

    Args:
        config: the resolved config.
        federation: the data divided among clients.
        backend: who does the work; :meth:`run` starts its client actors.
        run: where to write.
        host: what the client actors run.
        emit: called with every :class:`Event`.
        should_stop: asked every now and then; true makes the run write a checkpoint and stop.
    """

    def __init__(
        self,
        config: Config,
        federation: Federation,
        backend: Backend,
        run: RunDirectory,
        host: HostSpec,
        emit: Callable[[Event], None] = lambda event: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config, self.backend, self.run_dir, self.host = config, backend, run, host
        self.emit, self.should_stop = emit, should_stop
        self._data = backend.put(federation)
        self.federation: Federation = backend.get(self._data)  # with Ray: read where the workers read it
        self.algorithm = config.algorithm
        self.setup = Setup(
            clients=federation.clients,
            sizes=federation.sizes,
            spec=host.spec,
            rounds=config.rounds,
            seed=config.seed,
            training=config.training,
            hierarchy=config.hierarchy,
            clustering=config.clustering,
        )
        self.block_size = block_rule(config, self.federation, host)
        self.servers = Servers(
            backend,
            host.spec,
            federation.sizes,
            federation.test,
            block_size=self.block_size,
            clients_per_actor=config.execution.clients_per_actor,
            tolerate=config.execution.tolerate_failures,
            batch_size=config.evaluation.batch_size,
        )
        self.records = Records(run, self.federation, config.output.tensorboard)
        self._seconds_before = 0.0
        self._begun = time.perf_counter()

    def run(self) -> dict[str, Any]:
        """Run all rounds that are left; the summary.

        Raises:
            Interrupted: after ``should_stop`` said so.
            RayflError: what the user can mend. In both cases the last complete round is in a checkpoint.
        """
        state = self.start()
        every = self.config.output.checkpoint_every
        while state.round < self.config.rounds:
            before = (state, list(self.servers.models), self.records.ledger)
            states = self.servers.states.copy()  # a stop may come after training, while clients are tested
            try:
                state = self.round(state)
            except (Interrupted, RayflError) as error:
                state, self.servers.models, self.records.ledger = before
                self.servers.states = states
                if state.round or not isinstance(error, ConfigError | DataError):
                    self._checkpoint(state)
                    self.records.write_tables(state)
                if isinstance(error, Interrupted):
                    self.emit(Event("stopped", {"round": state.round, "path": str(self.run_dir.path)}))
                raise
            if every and state.round % every == 0:
                self._checkpoint(state)
        return self._finish(state)

    def start(self) -> ServerState:
        """Start the client actors; the state before the first round, or that of the newest checkpoint."""
        self._begun = time.perf_counter()
        self.backend.start(self._data, self.host)
        self.backend.tick = self._check_stop
        state = self._resume() or self._begin()
        self.records.start()
        return state

    def _begin(self) -> ServerState:
        starts = self.algorithm.initial(self.setup)
        models = {index: self.backend.put(self.host.spec.initial(index=index)) for index in set(starts)}
        self.servers.models = [models[index] for index in starts]
        return self.algorithm.begin(self.setup)

    def _resume(self) -> ServerState | None:
        found = checkpoints(self.run_dir.path / "checkpoints")
        if not found:
            return None
        saved = Checkpoint.load(found[-1])
        self.servers.models = [self.backend.put(row) for row in saved.models]
        self.servers.states = ClientStates.restore(self.backend, saved.state_clients, saved.state_rows)
        self.records.restore(saved.arrays, saved.tables)
        self._seconds_before = float(saved.tables["seconds"])
        text = f"resuming: {saved.state.round} of {self.config.rounds} rounds are complete"
        self.emit(Event("note", {"text": text}))
        return saved.state

    def round(self, state: ServerState) -> ServerState:
        """One local round in every cluster: recluster if due, plan, train, mix, evaluate, record."""
        begun = time.perf_counter()
        state = self._recluster(state)
        plan = self.algorithm.plan(self.setup, state)
        work = self.algorithm.work(self.setup, state)
        mixing = self.algorithm.mix(self.setup, state, plan)
        report = self.servers.train(state.round, plan, work, mixing, self._progress(state.round))
        new = self.algorithm.end(self.setup, state, plan)
        metrics = self._evaluate(new, work)
        self._account(state, plan, work, mixing)
        row = self.records.round(
            {
                "round": state.round,
                "seconds": time.perf_counter() - begun,
                "clients": len(plan.cohort),
                "clusters": new.models,
                "lr": work.lr,
                "train_loss": _weighted_loss(report, self.setup.sizes[plan.cohort]),
                **metrics,
                "ari": self.records.ari(new),
                "failures": len(report.failures),
            }
        )
        self.emit(Event("round", {**row, "rounds": self.config.rounds, "busy": dict(report.busy)}))
        for client, text in sorted(report.failures.items()):
            line = text.strip().splitlines()[-1]
            self.emit(
                Event("note", {"text": f"round {state.round}: client {client} failed, left out: {line}"})
            )
        return new

    def _progress(self, round: int) -> Callable[[int, int], None]:
        def progress(done: int, total: int) -> None:
            self.emit(Event("blocks", {"round": round, "done": done, "total": total}))

        return progress

    def _check_stop(self) -> None:
        if self.should_stop():
            raise Interrupted

    def _recluster(self, state: ServerState) -> ServerState:
        """Cluster by signature if the algorithm asks for it now."""
        clustering = self.algorithm.clustering(self.setup, state)
        if clustering is None:
            return state
        begun = time.perf_counter()
        clusters, transfers = cluster_clients(
            self.backend,
            self.federation,
            clustering,
            self.config.seed,
            state.round,
            self.block_size(self.federation.clients),
        )
        regrouping = self.algorithm.regroup(self.setup, state, clusters.labels)
        self.servers.models = [self.servers.models[parent] for parent in regrouping.parents.tolist()]
        self.records.transfer(*transfers)
        entry = self.records.clusters(regrouping.state, facts(clusters))
        seconds = time.perf_counter() - begun
        self.emit(Event("clusters", {k: v for k, v in entry.items() if k != "labels"} | {"seconds": seconds}))
        return regrouping.state

    def _evaluate(self, state: ServerState, work: LocalWork) -> dict[str, float | None]:
        if state.round % self.config.evaluation.every and state.round != self.config.rounds:
            return {}
        correct, losses = self.servers.evaluate(state.assignment, work.personal)
        return self.records.evaluation(state.round - 1, correct, losses)

    def _account(self, state: ServerState, plan: Plan, work: LocalWork, mixing: Mixing) -> None:
        """Enter the round's model traffic into the ledger, 4 bytes a number."""
        sent = 4 * (self.host.spec.P - length(work.personal)) * len(plan.cohort)
        common = 4 * length(mixing.common)
        # Every LPS receives the common layers; those whose clients took part have sent theirs.
        servers = {"up": len(np.unique(mixing.weights.nonzero()[0])), "down": state.models}
        directions: tuple[Direction, ...] = ("up", "down")
        for direction in directions:
            self.records.transfer(Transfer(state.round, "client_lps", direction, "model", sent))
            if common:
                count = common * servers[direction]
                self.records.transfer(Transfer(state.round, "lps_gps", direction, "model", count))

    def _seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._begun

    def _checkpoint(self, state: ServerState) -> Checkpoint:
        clients, rows = self.servers.states.fetch(self.backend)
        arrays, tables = self.records.save(state)
        checkpoint = Checkpoint(
            state=state,
            models=np.stack(self.backend.get(self.servers.models)),
            state_clients=clients,
            state_rows=rows,
            arrays=arrays,
            tables={**tables, "seconds": self._seconds()},
        )
        checkpoint.save(self.run_dir.path / "checkpoints", self.config.output.keep_checkpoints)
        return checkpoint

    def _finish(self, state: ServerState) -> dict[str, Any]:
        checkpoint = self._checkpoint(state)
        self.records.write_tables(state)
        folder = self.run_dir.path / "models"
        folder.mkdir(exist_ok=True)
        for k, vector in enumerate(checkpoint.models):
            tensors = {
                name: t.contiguous() for name, t in self.host.spec.to_state_dict(vector.copy()).items()
            }
            save_file({n: t.clone() for n, t in tensors.items()}, folder / f"model_{k}.safetensors")
        summary = {
            "algorithm": self.algorithm.name,
            **self.records.summary(state),
            "seconds": self._seconds(),
            "models_sha256": models_hash(checkpoint.models, checkpoint.state_rows),
        }
        self.run_dir.write_json("summary.json", summary)
        self.records.close()
        if self.config.output.report:
            write_report(self.run_dir.path)
        self.emit(Event("done", {**summary, "path": str(self.run_dir.path)}))
        return summary


def block_rule(config: Config, federation: Federation, host: HostSpec) -> Callable[[int], int]:
    """Clients in a block, given how many train in a round."""
    work = host.spec.P * float(federation.sizes.mean()) * config.training.epochs
    return lambda cohort: config.execution.clients_per_block(cohort, work)


def _weighted_loss(report: RoundReport, sizes: NDArray[np.int64]) -> float:
    """The cohort's mean local training loss, weighted by n_i."""
    there = ~np.isnan(report.losses)
    return float(np.average(report.losses[there], weights=sizes[there])) if there.any() else float("nan")

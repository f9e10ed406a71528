"""The driver, which is also the global parameter server (GPS): it runs the rounds one after another."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from rayfl import files
from rayfl.algorithms import Mixing, Plan, Regrouping, RoundReport, Served, ServerState
from rayfl.backend import Backend, Done, Ref, Task
from rayfl.clients.jobs import HostSpec, LocalTest
from rayfl.clients.state import StateLayout
from rayfl.config import BLOCK_SETTINGS, CHANGEABLE, Config
from rayfl.coresets.base import Coreset
from rayfl.coresets.clients import evaluation_coreset
from rayfl.data.base import TestedOn, called
from rayfl.data.events import Stage
from rayfl.errors import ConfigError, DataError, DiskError, Interrupted, RayflError, ResultsLost, repeats
from rayfl.evaluation import Scores, protocols
from rayfl.evaluation.ledger import Direction, Ledger, Tier, Transfer
from rayfl.evaluation.protocols import Tested
from rayfl.events import (
    BlockDone,
    CheckpointSaved,
    Clustered,
    Finished,
    Listener,
    Note,
    RoundDone,
    Stopped,
)
from rayfl.local import LocalObjective
from rayfl.memory import resident, total_memory
from rayfl.models import ModelSpec
from rayfl.rundir import RunDirectory, clean
from rayfl.servers import hooks, testing
from rayfl.servers.building import servers_of, setup_of, stage_of
from rayfl.servers.checkpoint import CLIENTS, Checkpoint, checkpoints, collect, models_hash, round_of
from rayfl.servers.mixing import check_rule
from rayfl.servers.queries import HISTOGRAM, ClientQueries
from rayfl.servers.records import Records
from rayfl.servers.rounds import AskedReport, Progress, Round, train, unadapted
from rayfl.servers.serialisation import flatten
from rayfl.servers.shards import Shards
from rayfl.servers.states import ClientStates, Rows
from rayfl.settings import dotted
from rayfl.training import complement, length
from rayfl.training.reports import ClientReport, Reports
from rayfl.training.server import ServerTraining
from rayfl.units import counted

if TYPE_CHECKING:
    import torch

_MAX_LOSSES = 5
"""How often results may be lost between two checkpoints; each time the run goes back to the newest one."""

_ACTIVITY_INTERVAL = 0.5
"""Seconds between two checks of which client actors are busy."""


class Driver:
    """Runs a config from beginning to end, or from its newest checkpoint.

    Args:
        config: the resolved config.
        stages: the clients' data, one stage from each event to the next.
        backend: executes the work; :meth:`run` starts its client actors.
        run: where to write.
        host: what the client actors run.
        emit: called with every :class:`~rayfl.events.RunEvent`.
        should_stop: called regularly; if it returns true the run writes a checkpoint and stops.
    """

    def __init__(
        self,
        config: Config,
        stages: Sequence[Stage],
        backend: Backend,
        run: RunDirectory,
        host: HostSpec,
        emit: Listener = lambda event: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config, self.backend, self.run_dir, self.host = config, backend, run, host
        self.emit, self.should_stop = emit, should_stop
        self._data = backend.put(tuple(stage.federation for stage in stages))
        # With Ray, read the data where the workers read them.
        federations = backend.get(self._data)
        self.stages = [replace(s, federation=f) for s, f in zip(stages, federations, strict=True)]
        self.algorithm = config.algorithm
        self.servers = servers_of(config, host, backend, self.stages[0].federation)
        memory = config.execution.state_memory * total_memory()
        self.shards = Shards(run.path / "checkpoints" / CLIENTS, memory)
        self.servers.states, self.servers.updates = ClientStates(self.shards), ClientStates(self.shards)
        self._first_snapshot = self.servers.snapshot()
        self.records = self._new_records()
        self._enter_stage(0)
        self._prepared_refs: dict[ClientReport | ServerTraining, Ref] = {}
        self._coreset: tuple[int, Coreset, NDArray[np.int64]] | None = None
        self._seconds_before = 0.0
        self._begun = time.perf_counter()

    def _enter_stage(self, stage: int) -> None:
        """Switch to the clients and data of this stage."""
        self.stage = stage
        federation = self.stages[stage].federation
        self.federation = self.servers.federation = self.records.federation = federation
        self.records.arrived = np.any([stage.active for stage in self.stages[: stage + 1]], axis=0)
        self.setup = setup_of(self.config, federation, self.host.spec, self.servers.edges)

    def run(self, accepted: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Run all remaining rounds; returns the summary.

        After an error, also one in a round that is not listed here (such as from a method's hook), the last
        complete round is in a checkpoint, unless that cannot be written.

        Args:
            accepted: called before the first round, once the newest checkpoint (if any) is known to fit this
                config. The caller writes the files that describe the run there, so that a refused resume
                changes nothing.

        Raises:
            Interrupted: if ``should_stop`` returned true.
            RayflError: an error that the user can fix.
        """
        try:
            return self._run(accepted)
        except DiskError:
            if self.run_dir.rounds_complete():
                self._report_stop()
            raise

    def _run(self, accepted: Callable[[], None]) -> dict[str, Any]:
        state, losses = self.start(), 0
        accepted()
        while True:
            first_round = state.round
            try:
                return self._finish(self._rounds(state))
            except ResultsLost as error:
                paths = checkpoints(self.run_dir.path / "checkpoints")
                losses = 1 if paths and round_of(paths[-1]) > first_round else losses + 1
                if losses > _MAX_LOSSES:
                    raise
                state = self._go_back(error)

    def _rounds(self, state: ServerState) -> ServerState:
        """Run all remaining rounds; returns the state after the last."""
        if state.round >= self.config.rounds:
            state = self._conclude_tests(state)
        every = self.config.output.checkpoint_every
        while state.round < self.config.rounds:
            # A stop may come after training, while clients are tested.
            previous, servers, records = state, self.servers.snapshot(), self.records.snapshot()
            if self.shards.grown:
                live = self.servers.states.names | self.servers.updates.names
                collect(self.run_dir.path / "checkpoints", live, self.shards)
            calls = self.backend.mark()
            try:
                state = self.round(state)
            except ResultsLost:
                raise
            except Exception as error:  # also from a user's hook: earlier rounds are kept
                self.backend.forget(calls)
                state = previous
                self.servers.restore(servers)
                self.records.rollback(records)
                self._save_before_stop(state, error)
                raise
            if every and state.round % every == 0:
                with self._deferring_stop():
                    self.checkpoint(state)
        return state

    def _conclude_tests(self, state: ServerState) -> ServerState:
        """Test all clients with the final models, if that has not been done: a run that was to have more
        rounds, and ends now, had no reason to; one that was killed before it wrote its tables has.
        """
        last = self.records.rounds[-1] if self.records.rounds else {}
        if not last or (last.get("loss_mean") is not None and last.get("estimated_from") is None):
            self._tested_with(state)
            return state
        self.records.reopen()
        self.emit(Note(f"testing all clients after round {state.round}, which is the last one now"))
        try:
            state, metrics = self._evaluate(state, self._last_round(state))
        except Interrupted:
            self._report_stop()
            raise
        clusters, ari = self.records.clusters_in_use(state), self.records.ari(state)
        self.records.amend({**metrics, "clusters": clusters, "ari": ari})
        return state

    def _save_before_stop(self, state: ServerState, error: Exception) -> None:
        """Write a checkpoint if possible, and say how to resume."""
        if not state.round and isinstance(error, ConfigError | DataError):
            return  # refused before anything was trained
        self.backend.hurry()
        try:
            with self._deferring_stop():
                self._client_facts(state, self.checkpoint(state))
                self.records.write_tables(state)
        except DiskError as full:
            self.emit(Note(f"no checkpoint after {state.round} rounds: {full}"))
        if not isinstance(error, DiskError):  # ``run`` documents these, wherever they come from
            self._report_stop(repeats(error))

    @contextlib.contextmanager
    def _deferring_stop(self) -> Iterator[None]:
        """Defer a request to stop until the end of this context."""
        tick, self.backend.tick = self.backend.tick, lambda: None
        try:
            yield
        finally:
            self.backend.tick = tick

    def _report_stop(self, repeats: bool = False) -> None:
        """Report how many rounds are in a checkpoint, and whether resuming would repeat the error."""
        paths = checkpoints(self.run_dir.path / "checkpoints")
        rounds = round_of(paths[-1]) if paths else 0
        self.emit(Stopped(rounds, self.run_dir.path, repeats))

    def _go_back(self, error: ResultsLost) -> ServerState:
        """Go back to the newest checkpoint, or to the start; the rounds after it are repeated."""
        self.backend.forget()
        self.records, self._coreset = self._new_records(), None
        self.servers.restore(self._first_snapshot)
        self._first_snapshot = self.servers.snapshot()
        self._enter_stage(0)
        seconds = self._seconds()  # the time of repeated rounds counts too
        self._begun = time.perf_counter()
        self.emit(Note(f"{error}: going back to the last checkpoint"))
        state = self._resume() or self._begin()
        self._seconds_before = seconds
        self.records.start()
        return state

    def _new_records(self) -> Records:
        federation, tests = self.stages[0].federation, self.config.evaluation
        return Records(self.run_dir, federation, self._test_data, tests.local, self.config.loss)

    @property
    def _test_data(self) -> tuple[TestedOn, ...]:
        """The data that clients are tested on."""
        settings = self.config.evaluation
        held_out = any(stage.federation.validation.sizes.any() for stage in self.stages)
        included = {"validation": settings.validation and held_out, "common": settings.common}
        return ("test", *(on for on in ("validation", "common") if included[on]))

    def start(self) -> ServerState:
        """Start the client actors; returns the state before the first round, or that of the newest
        checkpoint.
        """
        self._begun = time.perf_counter()
        self.backend.say = lambda text: self.emit(Note(text))
        self.backend.start(self._data, self.host)
        if self.host.device != "cpu":
            (done,) = self.backend.run([Task("about", None)])
            self.emit(Note(f"on the device: {done.report}"))
        self.backend.tick = self._check_stop
        state = self._resume() or self._begin()
        self._check_signatures(state)
        self.records.start()
        return state

    def _check_signatures(self, state: ServerState) -> None:
        """Refuse clients of later stages whose data give no signature, before any training.

        Raises:
            DataError: naming the first client, if a stage has more such clients than may fail.
        """
        clustering = self.config.clustering
        if not self._signatures_are_compared:
            return
        if clustering.signature.trained:  # whether these exist depends on training, not only on the data
            return
        for number in range(self.stage + 1, len(self.stages)):
            stage = self.stages[number]
            changed = np.union1d(stage.joined, stage.drifted)
            failures = self._missing_signatures(state, number, changed)
            if len(failures) > self.config.execution.tolerate_failures:
                raise DataError(f"after {counted(stage.round, 'round')}: {failures[min(failures)]}")

    def _missing_signatures(
        self, state: ServerState, stage: int, changed: NDArray[np.int64]
    ) -> Mapping[int, RayflError]:
        """The clients without a signature in a stage, and why; repeats the query if a node is lost."""
        for _ in range(_MAX_LOSSES):
            try:
                return self._queries(state, stage).missing_signatures(self.config.clustering, changed)
            except ResultsLost:
                self.backend.forget()
        return self._queries(state, stage).missing_signatures(self.config.clustering, changed)

    def _begin(self) -> ServerState:
        starts = hooks.initial(self.algorithm, self.setup)
        models = {
            index: self.servers.put(self.host.permute(self.host.spec.initial(index=index)))
            for index in set(starts)
        }
        self.servers.begin([models[index] for index in starts])
        state: ServerState = hooks.begin(self.algorithm, self.setup)
        flatten(state)  # a state that cannot be written is refused now
        remark = self.config.clustering.features.remark(self.config.data)
        if remark and self._signatures_are_compared:
            self.emit(Note(remark))
        return state

    @property
    def _signatures_are_compared(self) -> bool:
        return "clustering" in self.algorithm.takes and self.config.clustering.needs_signatures

    def _resume(self, reading: bool = False) -> ServerState | None:
        """The state of the newest checkpoint; with ``reading``, nothing on the disk is changed."""
        kind = type(hooks.begin(self.algorithm, self.setup))
        saved, notes = Checkpoint.newest(self.run_dir.path / "checkpoints", kind, reading)
        for text in notes:
            self.emit(Note(text))
        if saved is None:
            return None
        self._check_settings(saved.settings or {})
        if saved.state.round > self.config.rounds:
            what = f"{saved.state.round} rounds are complete, more than rounds={self.config.rounds}"
            raise ConfigError(str(self.run_dir.path), what, f"rounds={saved.state.round} ends the run here")
        self.run_dir.verify(self.stages, lambda line: self.emit(Note(line)))
        servers, put = self.servers, self.backend.put
        servers.models = [servers.put(row) for row in saved.models]
        servers.vectors = [servers.put(row, servers.ranges.evenly(len(row))) for row in saved.vectors]
        servers.memories = [None if np.isnan(row).all() else put(row) for row in saved.memories]
        servers.gathered = saved.gathered
        servers.states, servers.updates = (
            ClientStates.restore(self.backend, clients, rows, saved.stored.get(name), self.shards)
            for name, clients, rows in (
                ("states", saved.state_clients, saved.state_rows),
                ("updates", saved.update_clients, saved.update_rows),
            )
        )
        # The events of the next round have not happened yet.
        self._enter_stage(stage_of(self.stages, saved.state.round - 1))
        self.records.restore(saved.arrays, saved.tables)
        self._seconds_before = float(saved.tables["seconds"])
        text = f"resuming: {saved.state.round} of {self.config.rounds} rounds are complete"
        self.emit(Note(text))
        return saved.state

    def _fixed_settings(self) -> dict[str, Any]:
        """The settings that determine the results and so must not change when a run is resumed."""
        settings = self.config.to_dict()
        settings["training"]["engine"] = self.host.engine
        block_settings = {name: settings["execution"][name] for name in BLOCK_SETTINGS}
        fixed = {name: value for name, value in settings.items() if name not in CHANGEABLE}
        return {**fixed, "execution": block_settings}

    def _check_settings(self, saved: Mapping[str, Any]) -> None:
        """Refuse to resume with settings that differ from those of the start.

        A relative path, as stored by earlier versions, equals its absolute path.
        """
        for name, was in dotted(saved):
            now: Any = self._fixed_settings()
            for key in name.split("."):
                now = now.get(key, was) if isinstance(now, dict) else was
            if clean(now) != was and not (isinstance(was, str) and now == str(Path(was).absolute())):
                raise ConfigError(
                    f"{self.run_dir.path / 'config.yaml'}: {name}",
                    f"is {now!r}, but the run was begun with {was!r}",
                    "restore the old value, or begin a new run",
                )

    def round(self, state: ServerState) -> ServerState:
        """One local round in every cluster: events, clusters, plan, training, mixing, tests, records."""
        start_time, algorithm = time.perf_counter(), self.algorithm
        state = self._apply_events(state)
        clients = self._queries(state)
        outcome = algorithm.recluster(self.setup, state, clients)
        regrouping = hooks.regrouping(algorithm, self.setup, "recluster", outcome, state.models)
        state = self._regroup(state, regrouping)
        self._note_absent_servers(state)
        state, cohort = hooks.cohort(algorithm, self.setup, state, clients)
        state = hooks.select(algorithm, self.setup, state, cohort, clients)
        plan = self.servers.ordered(hooks.plan(algorithm, self.setup, state, cohort))
        this_round = self._round_of(state, plan)
        former_models = list(self.servers.models)
        report = train(self.servers, this_round, self._progress(state.round))
        self._record_traffic(state, plan, this_round, report)
        delivered = ~np.isin(plan.cohort, list(report.failures))
        local_scores = {on: score.take(np.flatnonzero(delivered)) for on, score in report.scores.items()}
        self.records.trained(state.round, plan.cohort[delivered], local_scores)
        # Methods must not see results on test data.
        next_state = hooks.end(algorithm, self.setup, state, plan, replace(report, scores={}))
        clients = self._queries_after(next_state)
        self.records.diagnosis(state.round, hooks.diagnose(algorithm, self.setup, next_state, clients))
        outcome = algorithm.split(self.setup, next_state, clients)
        regrouping = hooks.regrouping(algorithm, self.setup, "split", outcome, next_state.models)
        next_state = self._regroup(next_state, regrouping, after=True, former=former_models)
        next_state, metrics = self._evaluate(next_state, this_round)
        row = self.records.round(
            {
                "round": state.round,
                "stage": self.stage,
                "seconds": time.perf_counter() - start_time,
                "clients": len(plan.cohort),
                "clusters": self.records.clusters_in_use(next_state),
                "lr": this_round.work.lr,
                "train_loss": _weighted_loss(report, self.setup.sizes[plan.cohort]),
                **metrics,
                "ari": self.records.ari(next_state),
                "failures": len(report.failures),
            }
        )
        measures = tuple(protocols.measures_of(self.config.loss))
        traffic = {
            f"{tier}_{way}": self.records.ledger.total(round=state.round, tier=tier, direction=way)
            for tier in get_args(Tier)
            for way in get_args(Direction)
        }
        self.emit(
            RoundDone(
                state.round,
                self.config.rounds,
                row,
                dict(report.seconds),
                measures,
                steps=int(report.steps.sum()),
                traffic=traffic,
                memory=resident(),
            )
        )
        names = self.federation.names
        for client, text in sorted(report.failures.items()):
            line = text.strip().splitlines()[-1]
            line = f"round {state.round + 1}: client {called(names, client)} failed, left out: {line}"
            self.emit(Note(line))
        for text, ids in report.remarks.items():
            self._remark(state.round, ids, text)
        return next_state

    def _note_absent_servers(self, state: ServerState) -> None:
        """Note if an outage that begins names clusters that do not exist: their number is known only now."""
        if self.setup.edges is not None:  # numbers of edges are checked before the run
            return
        for outage in self.setup.outages:
            absent = [str(server) for server in outage.servers if server >= state.models]
            if outage.round == state.round and absent:
                what = f"no cluster {', '.join(absent)}, so the outage does not affect it"
                self._note(f"round {state.round + 1}: there is {what}; use 0 to {state.models - 1}")

    def _remark(self, round: int, ids: Sequence[int], text: str) -> None:
        """Emit a note about some clients; ``round`` is 0-based."""
        names = [called(self.federation.names, client) for client in sorted(ids)[:5]]
        shown = ", ".join(names) + (f" and {len(ids) - 5} more" if ids[5:] else "")
        self.emit(Note(f"round {round + 1}: client {shown}: {text}"))

    def _round_of(self, state: ServerState, plan: Plan) -> Round:
        """Everything that the servers need to run this round."""
        algorithm, setup = self.algorithm, self.setup
        waits, work = algorithm.mixes_by_reports, hooks.work(algorithm, setup, state)
        mixing_setup = hooks.counting_steps(setup, work)

        def mix(reports: Reports) -> Mixing:
            mixing = hooks.mix(algorithm, mixing_setup, state, plan, reports)
            return check_rule(mixing, self.config.aggregation)

        server_step, global_step = hooks.steps(algorithm, setup, state)
        if len(self.servers.ranges) > 1 and server_step is not None and not server_step.elementwise:
            what = (
                f"{type(server_step).__name__} of {algorithm.name} is not elementwise: it needs whole models"
            )
            raise ConfigError("execution.shard_models", what, "set it to false")
        training = hooks.server_training(algorithm, setup, state)
        client_reports = hooks.reports(algorithm, setup, state)
        parts = {training, *client_reports.values()}
        self._prepared_refs = {part: ref for part, ref in self._prepared_refs.items() if part in parts}
        return Round(
            round=state.round,
            plan=plan,
            work=work,
            mixing=None if waits else mix({}),
            mix=mix if waits else None,
            server_step=server_step,
            step=global_step,
            training=None if training is None else self._prepared(training),
            stage=self.stage,
            local=self.config.local,
            order=self.config.order,
            aggregation=self.config.aggregation,
            assignment=state.assignment,
            reports={name: self._asked_report(r) for name, r in client_reports.items()},
            updates=algorithm.keeps_updates,
            test=self._local_test(state),
        )

    def _local_test(self, state: ServerState) -> LocalTest | None:
        """How clients test their trained models before averaging; None if they do not."""
        if not self.config.evaluation.local:
            return None
        adaptation = hooks.adaptation(self.algorithm, self.setup, state)
        return LocalTest(self._test_data, self.servers.batch_size, adaptation)

    def _asked_report(self, report: ClientReport) -> AskedReport:
        """A report, with its prepared form by reference."""
        return AskedReport(report, self._prepared(report))

    def _prepared(self, part: ClientReport | ServerTraining) -> Ref:
        """The prepared form by reference, which stays as long as each round has the same part."""
        if part not in self._prepared_refs:
            prepared = part.prepare(self.federation.samples, self.config.seed)
            self._prepared_refs[part] = self.backend.put(prepared)
        return self._prepared_refs[part]

    def _queries(
        self,
        state: ServerState,
        stage: int | None = None,
        account: Callable[[Transfer], None] | None = None,
    ) -> ClientQueries:
        """The queries that the algorithm may make now, or would make in a later stage.

        Args:
            state: its round is the next one.
            stage: None for the current one.
            account: called with what clients send; None records it for the next round.
        """
        stages = self.stages[: (self.stage if stage is None else stage) + 1]
        account = account or self._record_transfer
        return ClientQueries(self.config, self.servers, stages, state, account, self._note)

    def _queries_after(self, state: ServerState) -> ClientQueries:
        """The queries after the training of the round before the next one; what clients send counts for
        it.
        """

        def account(transfer: Transfer) -> None:
            self._record_transfer(replace(transfer, round=transfer.round - 1))

        return self._queries(state, account=account)

    def _note(self, text: str) -> None:
        self.emit(Note(text))

    def _record_transfer(self, transfer: Transfer) -> None:
        """Record what clients sent; label histograms only once per stage, also in a resumed run."""
        if transfer.kind == HISTOGRAM:
            stage_start, transfers = self.stages[self.stage].round, self.records.ledger.transfers
            if any(t.kind == HISTOGRAM and t.round >= stage_start for t in transfers):
                return
        self.records.transfer(transfer)

    def _apply_events(self, state: ServerState) -> ServerState:
        """Apply the events before this round: clients that join, leave or change."""
        for number in range(self.stage + 1, stage_of(self.stages, state.round) + 1):
            self._enter_stage(number)
            self.records.entered()
            stage, clients = self.stages[number], self._queries(state)
            text = ", ".join(
                f"{counted(len(ids), 'client')} {what}"
                for ids, what in ((stage.joined, "join"), (stage.left, "leave"), (stage.drifted, "drift"))
                if len(ids)
            )
            self.emit(Note(f"after round {state.round}: {text or 'nothing changes'}"))
            # Clients with new data first: newcomers are compared with the current data.
            if len(stage.drifted):
                drifted = self.algorithm.drift(self.setup, state, stage.drifted, clients)
                found = hooks.moved(self.algorithm, self.setup, "drift", drifted, state.models)
                state = self._adopt(state, found)
            if len(stage.joined):
                joined = self.algorithm.join(self.setup, state, stage.joined, clients)
                found = hooks.moved(self.algorithm, self.setup, "join", joined, state.models)
                state = self._adopt(state, found)
        return state

    def _adopt(
        self, state: ServerState, outcome: ServerState | Regrouping, after: bool = False
    ) -> ServerState:
        return self._regroup(state, outcome, after) if isinstance(outcome, Regrouping) else outcome

    def _progress(self, round: int) -> Progress:
        activity, looked = self.backend.activity(), time.monotonic()

        def progress(done: int, tasks: Sequence[Task], last: Done) -> None:
            nonlocal activity, looked
            if time.monotonic() - looked > _ACTIVITY_INTERVAL:
                activity, looked = self.backend.activity(), time.monotonic()
            clients, report = tasks[last.task].job.clients, last.report
            self.emit(
                BlockDone(
                    round,
                    done,
                    len(tasks),
                    worker=last.worker,
                    clients=len(clients),
                    first=int(clients[0]),
                    seconds=report.seconds,
                    memory=report.memory,
                    **activity._asdict(),
                )
            )

        return progress

    def _check_stop(self) -> None:
        if self.should_stop():
            raise Interrupted

    def _regroup(
        self,
        state: ServerState,
        regrouping: Regrouping | None,
        after: bool = False,
        former: Sequence[Ref] = (),
    ) -> ServerState:
        """Adopt new clusters: each model starts from its parent, or from an earlier model (``former``)."""
        if regrouping is None:
            return state
        self.servers.inherit(regrouping.parents)
        self.servers.restore_models(regrouping.restored, former)
        cluster_facts = {} if regrouping.clusters is None else regrouping.clusters.facts()
        entry = self.records.clusters(regrouping.state, {**cluster_facts, **regrouping.facts}, after)
        seconds = 0.0 if regrouping.clusters is None else regrouping.clusters.seconds
        fields = {name: entry[name] for name in ("round", "when", "n_clusters", "ari")}
        facts = {name: value for name, value in entry.items() if name not in (*fields, "labels")}
        self.emit(Clustered(**fields, seconds=seconds, facts=facts))
        return regrouping.state

    def _evaluate(self, state: ServerState, this_round: Round) -> tuple[ServerState, dict[str, float | None]]:
        """Test clients, if a test is due; clients that choose their models do so first."""
        if state.round % self.config.evaluation.every and state.round != self.config.rounds:
            return state, {}
        who, weights = self._tested_clients(state)
        if self.algorithm.selects:
            state = hooks.select(self.algorithm, self.setup, state, who, self._queries_after(state))
            self.records.selection(state)
        scores = self._scores(state, this_round, who, self._tested_with(state, self._queries_after(state)))
        return state, self.records.evaluation(state, who, scores, weights)

    def _scores(
        self,
        state: ServerState,
        this_round: Round,
        who: NDArray[np.int64],
        models: Served,
        epochs: int | None = None,
    ) -> Scores:
        """Test clients ``(n,)`` with ``models``, if ``epochs`` is given after fine-tuning."""
        adapting = self._adaptation_round(state, this_round, epochs)
        if adapting is not None:
            tolerate = self.config.execution.tolerate_failures
            adapted = testing.adapt(self.servers, adapting, who, models[who], self._test_data, tolerate)
            for client, text in sorted(adapted.failures.items()):
                self._remark(state.round - 1, [client], unadapted(text))
            return adapted.scores
        personal, local = this_round.work.personal, this_round.local
        return {
            on: testing.evaluate(self.servers, models, personal, local, who, on) for on in self._test_data
        }

    def _tested_clients(self, state: ServerState) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
        """The clients to test, and the share of all clients that each represents; None if all are tested."""
        present, sample_size = self.setup.present, self.config.evaluation.coreset
        if sample_size is None or sample_size >= len(present) or state.round == self.config.rounds:
            return present, None
        if self._coreset is None or self._coreset[0] != self.stage:
            previous_state = replace(state, round=state.round - 1)  # a test belongs to the previous round
            graph = self._queries(previous_state).relatedness()
            core = evaluation_coreset(graph, sample_size, seed=self.config.seed)
            self._coreset = self.stage, core, present[core.ids]
        _, core, ids = self._coreset
        return ids, core.weights

    def _tested_with(self, state: ServerState, clients: ClientQueries | None = None) -> Served:
        """The model, or mixture, that each client is tested with ``(N,)`` or ``(N, K)``.

        Args:
            state: after the round.
            clients: to ask them; None if what they send has been counted at an earlier test.
        """
        clients = clients or self._queries(state, account=lambda transfer: None)
        models = hooks.tested_with(self.algorithm, self.setup, state, clients)
        self.records.tested_with(models if models is not state.assignment else None)
        return models

    def _adaptation_round(
        self, state: ServerState, this_round: Round, epochs: int | None = None
    ) -> Round | None:
        """How clients adapt their models before a test; None if they do not.

        Args:
            state: before the test.
            this_round: the round that the test follows.
            epochs: of fine-tuning; methods with test-time adaptation fine-tune the same way.
        """
        work = hooks.adaptation(self.algorithm, self.setup, state)
        if epochs is not None:
            work = work or self.config.local.finetuning(this_round.work, self.host.spec)
            assert work is not None, "refused by check_finetuning"
            work = replace(work, epochs=epochs)
        return (
            None
            if work is None
            else replace(this_round, work=replace(work, personal=this_round.work.personal))
        )

    def tested_models(
        self, clients: Sequence[int] | None = None, finetuned: bool = False
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield the models ``(P,)`` with which clients of the newest checkpoint are tested, one by one.

        Args:
            clients: ids; None for all present clients.
            finetuned: fine-tune them for ``evaluation.finetune_epochs``, as for ``accuracy_finetuned``.

        Raises:
            RayflError: if there is no checkpoint, or a client was not present.
        """
        self.backend.start(self._data, self.host)
        state = self._resume(reading=True)
        if state is None:
            raise self.run_dir.without_checkpoint()
        present = self.setup.present
        wanted = present if clients is None else np.unique(np.array(clients, np.int64))
        missing = np.setdiff1d(wanted, present)
        if len(missing):
            client = called(self.federation.names, missing[0])
            if not 0 <= missing[0] < self.setup.clients:
                valid_ids = f"the clients are 0 to {self.setup.clients - 1}"
                raise RayflError(f"{self.run_dir.path}: there is no client {client}; {valid_ids}")
            raise RayflError(
                f"{self.run_dir.path}: client {client} was absent after round {state.round}; "
                f"{len(present)} of the clients 0 to {self.setup.clients - 1} were present"
            )
        this_round, models = self._last_round(state), self._tested_with(state)
        adapting = self._adaptation_round(
            state, this_round, self.config.evaluation.finetune_epochs if finetuned else None
        )
        block_size = self.servers.blocks.size(len(present))
        for first in range(0, len(wanted), block_size):
            ids = wanted[first : first + block_size]
            if adapting is None:
                rows = testing.client_models(
                    self.servers, ids, models[ids], this_round.work.personal, this_round.local
                )
            else:
                rows = testing.adapted_models(self.servers, adapting, present, models[present], ids)
            yield from zip(ids.tolist(), rows, strict=True)

    def _record_traffic(self, state: ServerState, plan: Plan, this_round: Round, report: RoundReport) -> None:
        """Record the round's model traffic in the ledger."""
        extra_downloads = hooks.downloads(self.algorithm, self.setup, state, plan) - len(plan.cohort)
        down = report.bytes_down + 4 * extra_downloads * length(
            complement(this_round.work.personal, self.host.spec.P)
        )
        record = self.records.transfer
        record(Transfer(state.round, "client_lps", "up", "model", report.bytes_up))
        record(Transfer(state.round, "client_lps", "down", "model", down))
        floats = sum(asked.report.floats for asked in this_round.reports.values())
        if floats:
            senders = len(plan.cohort) - len(report.failures)
            record(Transfer(state.round, "client_lps", "up", "report", 4 * floats * senders))
        if report.gps_bytes_down:
            record(Transfer(state.round, "lps_gps", "up", "model", report.gps_bytes_up))
            record(Transfer(state.round, "lps_gps", "down", "model", report.gps_bytes_down))

    def _seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._begun

    def checkpoint(self, state: ServerState) -> Checkpoint:
        """Write a checkpoint; returns its contents."""
        servers, get = self.servers, self.backend.get
        clients, rows, states = servers.states.save(self.backend)
        update_clients, update_rows, updates = servers.updates.save(self.backend)
        stored = {"states": states, "updates": updates}
        arrays, tables = self.records.save(state)
        checkpoint = Checkpoint(
            state=state,
            models=np.stack(get(servers.models)),
            state_clients=clients,
            state_rows=rows,
            vectors=np.stack(get(servers.vectors)) if servers.vectors else np.empty((0, 0), np.float32),
            memories=self._memories(),
            gathered=servers.gathered,
            update_clients=update_clients,
            update_rows=update_rows,
            arrays=arrays,
            tables={**tables, "seconds": self._seconds()},
            settings=self._fixed_settings(),
            stored={name: where for name, where in stored.items() if where is not None},
        )
        folder, keep = self.run_dir.path / "checkpoints", self.config.output.keep_checkpoints
        path = checkpoint.save(folder, keep, self._note)
        self.emit(CheckpointSaved(state.round, path))
        return checkpoint

    def _memories(self) -> NDArray[np.float64]:
        """The memory of the server step for each model ``(K, V, n)``; NaN where there is none yet."""
        refs = [ref for ref in self.servers.memories if ref is not None]
        if not refs:
            return np.empty((0, 0, 0))
        values = self.backend.get(refs)
        remaining = iter(values)
        missing = np.full(values[0].shape, np.nan)
        return np.stack([missing if ref is None else next(remaining) for ref in self.servers.memories])

    def _client_facts(self, state: ServerState, checkpoint: Checkpoint) -> dict[str, float]:
        """Record what the local objective reports about the clients' states; returns the means over
        clients.
        """
        local, spec = self.config.local, self.host.spec
        facts: dict[str, NDArray[np.float64]] = {}
        has_facts = type(local).client_facts is not LocalObjective.client_facts  # otherwise nothing is read
        if has_facts and len(checkpoint.state_clients) and local.state_size(spec):
            layers = hooks.work(self.algorithm, self.setup, state).personal
            layout, rows = StateLayout.of(spec, layers, local, self.config.order), checkpoint.state_rows
            pieces = rows.pieces() if isinstance(rows, Rows) else (rows,)
            piece_facts = [local.client_facts(layout.objective(piece), spec) for piece in pieces]
            facts = {name: np.concatenate([each[name] for each in piece_facts]) for name in piece_facts[0]}
        return self.records.client_facts(checkpoint.state_clients, facts)

    def _finish(self, state: ServerState) -> dict[str, Any]:
        """Write the last checkpoint and all that follows it; returns the summary."""
        with self._deferring_stop():
            checkpoint = self.checkpoint(state)
        try:
            return self._conclude(state, checkpoint)
        except Interrupted:  # while clients adapt; all rounds are in the checkpoint
            self._report_stop()
            raise

    def _conclude(self, state: ServerState, checkpoint: Checkpoint) -> dict[str, Any]:
        """What follows the last round; returns the summary."""
        from safetensors.torch import save_file

        facts = self._client_facts(state, checkpoint)
        finetuned = self._finetune(state)
        numbers = self.records.summary(state)
        state, newcomers = self._newcomers(state)
        self.records.write_tables(state)
        folder = self.run_dir.path / "models"
        files.make(folder)
        models = self.host.unpermute(checkpoint.models)
        paths = [folder / f"model_{self.servers.name(k)}.safetensors" for k in range(len(models))]
        for path in {*folder.glob("model_*.safetensors")} - {*paths}:  # of a run that had fewer rounds
            files.remove(path)
        for path, vector in zip(paths, models, strict=True):
            with files.writing(path):
                save_file(tensors_of(self.host.spec, vector), path)
        summary = {
            "algorithm": self.algorithm.name,
            **numbers,
            **facts,
            **finetuned,
            **newcomers,
            "seconds": self._seconds(),
            "models_sha256": models_hash(models, checkpoint.state_rows),
        }
        self.run_dir.write_json("summary.json", summary)
        if self.config.output.report:
            from rayfl.report import write_report  # deferred: Matplotlib is not needed to train

            with files.boundary(self.run_dir.path / "report.html"):
                write_report(self.run_dir.path)
        self.emit(Finished(summary, self.run_dir.path))
        return summary

    def _finetune(self, state: ServerState) -> dict[str, float | None]:
        """The suffix +: every client fine-tunes its final model before a last test."""
        epochs = self.config.evaluation.finetune_epochs
        if not epochs:
            return {}
        present, models = self.setup.present, self._tested_with(state)
        scores = self._scores(state, self._last_round(state), present, models, epochs)
        return self.records.finetuned(present, scores)

    def _newcomers(self, state: ServerState) -> tuple[ServerState, dict[str, float | None]]:
        """Clients that join after the last round: assigned, tested, fine-tuned and tested again.

        They are in no checkpoint: if the run is resumed with more rounds, they join before the next round.
        """
        if self.stages[-1].round < state.round:
            return state, {}
        self._enter_stage(len(self.stages) - 1)
        newcomers, transfers = self.stages[-1].joined, list[Transfer]()
        self.emit(Note(f"after round {state.round}: {counted(len(newcomers), 'client')} join"))
        clients = ClientQueries(self.config, self.servers, self.stages, state, transfers.append, self._note)
        joined = self.algorithm.join(self.setup, state, newcomers, clients)
        found = hooks.moved(self.algorithm, self.setup, "join", joined, state.models)
        state = self._adopt(state, found, after=True)
        last_round, epochs = self._last_round(state), self.config.evaluation.finetune_epochs
        models = self._tested_with(state, self._queries(state, account=transfers.append))
        tests: dict[Tested, Scores] = {"served": self._scores(state, last_round, newcomers, models)}
        if epochs:
            tests["finetuned"] = self._scores(state, last_round, newcomers, models, epochs)
        bytes_up = Ledger().add(*transfers).total(direction="up")
        return state, {**self.records.newcomers(newcomers, tests), "newcomers_bytes_up": bytes_up}

    def _last_round(self, state: ServerState) -> Round:
        """The last complete round, with an empty cohort."""
        return self._round_of(replace(state, round=max(0, state.round - 1)), Plan.nobody())


def tensors_of(spec: ModelSpec, vector: NDArray[np.float32]) -> dict[str, torch.Tensor]:
    """A model ``(P,)`` as the tensors of its module; no memory is shared."""
    return {name: tensor.clone() for name, tensor in spec.to_state_dict(vector).items()}


def _weighted_loss(report: RoundReport, sizes: NDArray[np.int64]) -> float:
    """The cohort's mean local training loss, weighted by n_i."""
    reported = ~np.isnan(report.losses)
    return (
        float(np.average(report.losses[reported], weights=sizes[reported]))
        if reported.any()
        else float("nan")
    )

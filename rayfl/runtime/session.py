"""Run a config from Python: ``rayfl.run(config)``. Connects to Ray, starts the driver, relays its events."""

from __future__ import annotations

import contextlib
import queue
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import ray
import torch
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayfl.config import Config, load
from rayfl.data import Federation, Samples, fingerprint
from rayfl.data import data_root as default_root
from rayfl.data.events import Outage, Stage, build_stages
from rayfl.data.held_out import read
from rayfl.data.remarks import remarks
from rayfl.data.scaling import Scaling
from rayfl.errors import ConfigError, DataError, DiskError, RayflError
from rayfl.models import MODELS, Model, ModelSpec
from rayfl.runtime.backend import Backend, InlineBackend
from rayfl.runtime.connection import available, await_room, connect
from rayfl.runtime.driver import CHANGEABLE, Driver, Event, Interrupted, block_rule, tensors_of
from rayfl.runtime.environment import machine, versions
from rayfl.runtime.jobs import HostSpec
from rayfl.runtime.processes import TICK, Deadlines, Process, Silence, died, plain_errors
from rayfl.runtime.ray_backend import RayBackend, settle
from rayfl.runtime.remote import Whereabouts, whereabouts
from rayfl.runtime.resources import Available, ResourcePlan, check_model, plan_resources
from rayfl.runtime.rundir import RunDirectory
from rayfl.training import choose_engine

Listener = Callable[[Event], None]

_DRIVER_DEADLINE = 300.0
"""Seconds for which the driver may be silent; it answers while it trains, so a busy machine is no reason."""

_DRIVER_STOPS = 60.0
"""The same when it has been asked to stop: it may be writing a large checkpoint."""

_MAX_DRIVER_DEATHS = 3
"""How often the driver may die without a further round."""


@dataclass(frozen=True)
class Result:
    """A finished (or stopped) run, read from its directory.

    Attributes:
        path: the run directory.
    """

    path: Path

    @property
    def config(self) -> Config:
        """The resolved config."""
        return RunDirectory(self.path).config

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """One row a round."""
        return RunDirectory(self.path).read_frame("rounds.csv")

    @cached_property
    def groups(self) -> pd.DataFrame:
        """Accuracy by planted group and by cluster: one row each in every round with tests."""
        return RunDirectory(self.path).read_frame("groups.csv")

    @cached_property
    def clients(self) -> pd.DataFrame:
        """One row a client: size, group, cluster, accuracy last and best."""
        return RunDirectory(self.path).read_frame("clients.csv")

    @cached_property
    def communication(self) -> pd.DataFrame:
        """Bytes by round, tier, direction and kind."""
        return RunDirectory(self.path).read_frame("communication.csv")

    @cached_property
    def clusters(self) -> dict[str, Any]:
        """Planted groups, and the clusters over time."""
        return dict(RunDirectory(self.path).read_json("clusters.json"))

    def client_model(self, client: int, finetuned: bool = False) -> dict[str, torch.Tensor]:
        """The model that a client was tested with last, see :func:`client_models`."""
        return next(client_models(self.path, [client], finetuned))[1]

    @cached_property
    def scaling(self) -> Scaling:
        """How the models take inputs: ``result.scaling.apply(x)`` of inputs as the dataset stores them."""
        return Scaling.from_dict(RunDirectory(self.path).read_json("normalisation.json"))

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The closing numbers; empty if the run is not finished."""
        return dict(RunDirectory(self.path).read_json("summary.json") or {})


def run(
    config: Config | str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    on_event: Listener = lambda event: None,
) -> Result:
    """Run a config to the end.

    Args:
        config: a :class:`~rayfl.config.Config`, a preset's name, a YAML file, or a mapping.
        overrides: dotted settings such as ``"rounds=5"``.
        on_event: called with everything that happens.

    Raises:
        ConfigError, DataError: before anything starts, in one line.
        Interrupted: after SIGINT or SIGTERM; the run can be resumed.
    """
    resolved = load(config, overrides)
    check(resolved)
    if resolved.execution.backend == "ray":
        connect(resolved)  # first: where Ray does not start no run directory is left behind
    directory = RunDirectory.create(resolved)
    on_event(Event("begun", {"path": str(directory.path)}))
    try:
        return _execute(resolved, directory, on_event)
    except (ConfigError, DataError, DiskError):
        if directory.is_empty():  # nothing was trained
            shutil.rmtree(directory.path, ignore_errors=True)
        raise


def resume(
    path: Path | str, overrides: Sequence[str] = (), on_event: Listener = lambda event: None
) -> Result:
    """Go on with a stopped run, bit for bit as if it had not stopped.

    Args:
        path: the run directory.
        overrides: settings to change: ``rounds``, ``execution.*`` and ``output.*`` (but its root) only.
        on_event: called with everything that happens.

    Raises:
        ConfigError: if it is not a run, or another setting is changed.
    """
    directory = RunDirectory.open(path)
    for text in overrides:
        if text.split("=")[0].split(".")[0].strip() not in CHANGEABLE:
            raise ConfigError(
                text, "cannot be changed in a resumed run", "rounds, execution.* and output.* can"
            )
    begun = directory.config
    config = load(begun, overrides)
    if config.output.root != begun.output.root:
        raise ConfigError(
            "output.root",
            "cannot be changed in a resumed run",
            "move the run directory first",
        )
    finished = directory.read_json("summary.json")
    if finished is not None and finished.get("rounds", 0) >= config.rounds:
        on_event(Event("note", {"text": f"all {config.rounds} rounds are complete; nothing to resume"}))
        return Result(directory.path)
    check(config)
    on_event(Event("begun", {"path": str(directory.path)}))
    return _execute(config, directory, on_event)


def client_models(
    path: Path | str, clients: Sequence[int] | None = None, finetuned: bool = False
) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """Rebuild the models with which clients of a run were tested last: those of ``accuracy_last``.

    That is the server's model with what the client has of its own (layers, a mask, a whole model), after the
    training that comes before a test (Per-FedAvg). All of it is in the newest checkpoint, and the data. A run
    that was stopped was last tested some rounds before it; a run on a GPU trained there what is trained here
    again on what this machine has.

    Args:
        path: the run directory.
        clients: ids; None for all that are there in the end.
        finetuned: the models of ``accuracy_finetuned``, after ``evaluation.finetune_epochs``.

    Yields:
        The client's id and its model, tensors by their names in the module, as in ``models/*.safetensors``;
        in the order of the ids.

    Raises:
        ConfigError: if it is no run, or one without fine-tuning.
        RayflError: if there is no checkpoint yet, or a client was not there.
    """
    directory = RunDirectory.open(path)
    config = load(directory.config, ["output.tensorboard=false"])
    if finetuned and not config.evaluation.finetune_epochs:
        raise ConfigError(str(path), "clients did not fine-tune", "that takes evaluation.finetune_epochs")
    stages, host = build(config, directory.scaling)
    if not torch.cuda.is_available():
        host = replace(host, device="cpu")
    backend = InlineBackend()
    try:
        driver = Driver(config, stages, backend, directory, host)
        for client, row in driver.tested_models(clients, finetuned):
            yield client, tensors_of(host.spec, row)
    finally:
        backend.close()


def check(config: Config) -> None:
    """Refuse what can be refused without reading data: missing datasets, LPS layers, devices.

    Raises:
        ConfigError, DataError
    """
    root = data_root(config)
    if not config.data.available(root):
        config.data.load(root)  # raises the dataset's own message
        raise DataError(f"{config.data} is not available in {root}")
    if (
        config.execution.device == "cuda"
        and config.execution.backend == "inline"
        and not torch.cuda.is_available()
    ):
        raise ConfigError(
            "execution.device", "no CUDA device here", "execution.device=auto takes what there is"
        )


def data_root(config: Config) -> Path:
    """Where the config's dataset lies."""
    return config.data.root or default_root()


def build(config: Config, scaling: Scaling | None = None) -> tuple[tuple[Stage, ...], HostSpec]:
    """The stages of the federation and what its hosts run: a function of the config alone.

    Args:
        config: of the run.
        scaling: that of a run that has begun (:attr:`RunDirectory.scaling`), whatever its dataset holds now.

    Raises:
        ConfigError, DataError: if data, partition and model do not fit together.
    """
    samples = read(config.data, data_root(config), config.public_samples, config.seed, scaling)
    stages = build_stages(
        samples,
        config.partition,
        config.events,
        validation=config.partition.validation,
        test_samples=config.partition.test_samples,
        seed=config.seed,
        rounds=config.rounds,
    )
    check_inputs(config.model, samples)
    spec = ModelSpec.of(config.model, samples.shape, samples.outputs, config.seed)
    check_model(spec.P, float(psutil.virtual_memory().total))
    check_hierarchy(config, spec, stages[0].federation.clients)
    config.algorithm.check(spec)
    config.local.check(spec, config.training, config.partition.validation)
    config.order.check(spec)
    e = config.execution
    device = e.device if e.device != "auto" else ("auto" if e.gpus_per_actor else "cpu")
    engine, why = choose_engine(spec, config.training.engine)
    private, graphs = config.algorithm.private, config.training.cuda_graphs == "auto"
    return stages, HostSpec(spec, config.seed, engine, why, device, e.gpus_per_actor, private, graphs)


def check_hierarchy(config: Config, spec: ModelSpec, clients: int) -> None:
    """Refuse common layers that the model lacks, and edges that do not fit the clients or the events.

    Raises:
        ConfigError
    """
    config.hierarchy.common(spec)
    edges = int(config.hierarchy.place(clients, config.seed).max()) + 1
    for place, event in enumerate(config.events):
        if isinstance(event, Outage) and edges > 1 and max(event.servers) >= edges:
            raise ConfigError(
                f"events.{place}.servers",
                f"there is no edge {max(event.servers)}",
                f"use 0 to {edges - 1}",
            )


def check_inputs(model: Model, samples: Samples) -> None:
    """Refuse a network for words on other data, and the other way round.

    Raises:
        ConfigError
    """
    if model.tokens == samples.tokens:
        return
    kind, other = ("words", "other data") if model.tokens else ("images and features", "texts")
    suited = ", ".join(name for name, part in MODELS.items() if part.tokens == samples.tokens)
    raise ConfigError(
        "model.name", f"{model.name_of()!r} takes {kind}; {samples.name} has {other}", f"use one of {suited}"
    )


def arithmetic(config: Config, federation: Federation, host: HostSpec, available: Available) -> ResourcePlan:
    """The resource plan of a config.

    Raises:
        ConfigError: if it does not fit; the message names what would.
    """
    samples = federation.samples
    size = samples.x_train.nbytes + samples.x_test.nbytes + federation.train.values.nbytes * 2
    block = block_rule(config, federation, host)(config.training.cohort(federation.clients))
    return plan_resources(config, federation.clients, block, host.spec.P, size, available)


def _execute(config: Config, directory: RunDirectory, listen: Listener) -> Result:
    with directory.locked():
        if config.execution.backend == "ray":
            connect(config)  # before the signals: ray.init puts a handler of its own for SIGTERM
        stop = threading.Event()
        with _signals(stop):
            if config.execution.backend == "inline":
                _drive(config, directory, listen, stop.is_set)
            else:
                _execute_on_ray(config, directory, listen, stop)
    return Result(directory.path)


def make_backend(config: Config, plan: ResourcePlan) -> Backend:
    """The backend that the config names; with Ray it must be connected."""
    e = config.execution
    if e.backend == "inline":
        return InlineBackend()
    deadline = None if e.deadline == "auto" else e.deadline
    return RayBackend(plan.actors, e.cpus_per_actor, e.gpus_per_actor, config.hierarchy.lps_actors, deadline)


def _drive(config: Config, directory: RunDirectory, emit: Listener, should_stop: Callable[[], bool]) -> None:
    """Build everything and run it in this process: the whole run inline, or the body of the driver actor."""
    stages, host = build(config, directory.scaling)
    federation = stages[0].federation
    plan = arithmetic(config, federation, host, available(config))
    backend = make_backend(config, plan)
    directory.write_json(
        "environment.json",
        {
            **machine(),
            "versions": versions(),
            "dataset": federation.samples.name,
            "data": fingerprint(federation.samples),
            "engine": host.engine,
            "resources": plan.to_dict(),
        },
    )
    scaling = federation.samples.scaling
    assert scaling is not None
    directory.write_json("normalisation.json", scaling.to_dict())
    engine = f"training engine: {host.engine} ({host.why})"
    for line in (*plan.lines(), engine, *remarks(federation)):
        emit(Event("note", {"text": line}))
    # A resumed run must not choose again: another version might choose otherwise.
    training = config.training.model_copy(update={"engine": host.engine})
    directory.write_config(config.model_copy(update={"training": training}))
    try:
        Driver(config, stages, backend, directory, host, emit, should_stop).run()
    finally:
        backend.close()


class DriverActor:
    """The driver in a Ray actor of its own: events are kept until somebody asks for them."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._stop = threading.Event()

    def run(self, config: Config, path: Path) -> bool:
        """Run to the end; false if it was stopped."""
        settle()
        try:
            _drive(config, RunDirectory(path), self._events.put, self._stop.is_set)
        except Interrupted:
            return False
        return True

    def poll(self, timeout: float) -> list[Event]:
        """The events since the last call; waits up to ``timeout`` seconds for the first."""
        events = []
        with contextlib.suppress(queue.Empty):
            events.append(self._events.get(timeout=timeout))
            while True:
                events.append(self._events.get_nowait())
        return events

    def stop(self) -> None:
        """Write a checkpoint and stop."""
        self._stop.set()

    def whereabouts(self) -> Whereabouts:
        """Says that the actor is ready, and where."""
        return whereabouts()


def _execute_on_ray(config: Config, directory: RunDirectory, listen: Listener, stop: threading.Event) -> None:
    await_room(config, lambda text: listen(Event("note", {"text": text})), stop)
    deadline = _DRIVER_DEADLINE if config.execution.deadline == "auto" else config.execution.deadline
    deaths, reached = 0, -1
    while True:
        try:
            _watch_driver(config, directory, listen, stop, deadline)
            return
        except _DriverDied as error:
            rounds = directory.rounds_complete()
            deaths, reached = (1 if rounds > reached else deaths + 1), max(rounds, reached)
            if stop.is_set() or deaths > _MAX_DRIVER_DEATHS:
                raise RayflError(f"the driver {error}; go on with: rayfl resume {directory.path}") from None
            listen(Event("note", {"text": f"the driver {error}: a new one goes on from the last checkpoint"}))


class _DriverDied(Exception):
    """The driver died, or was killed for its silence."""


def _watch_driver(
    config: Config, directory: RunDirectory, listen: Listener, stop: threading.Event, deadline: float
) -> None:
    """Run the driver in an actor, and relay its events."""
    # The driver writes the run directory, so it lives on this node. It mostly waits: no CPU is reserved.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "max_concurrency": 3, "scheduling_strategy": here}
    driver = Process.of("the driver", ray.remote(DriverActor).options(**options).remote())
    done = driver.actor.run.remote(config, directory.path)
    deadlines = Deadlines(deadline, lambda text: listen(Event("note", {"text": text})))
    told = False
    try:
        while True:
            finished, _ = ray.wait([done], timeout=0)
            events, silence = driver.actor.poll.remote(0.0 if finished else 0.25), Silence()
            while not ray.wait([events], timeout=TICK)[0]:
                driver.greet()
                allowed = min(deadline, _DRIVER_STOPS) if stop.is_set() else deadline
                if driver.where is None:  # it is still being started
                    allowed = max(allowed, _DRIVER_DEADLINE)
                if deadlines.over(silence, allowed, driver):
                    driver.kill()
                    raise _DriverDied("did not answer")
            for event in ray.get(events):
                listen(event)
            if finished:
                break
            if stop.is_set() and not told:
                driver.actor.stop.remote()
                told = True
        with plain_errors():
            if not ray.get(done):
                raise Interrupted
    except RayError as error:
        if not died(error):
            raise
        raise _DriverDied("died") from None
    finally:
        driver.drop()


@contextlib.contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP ask for a checkpoint and an orderly end; a second one interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

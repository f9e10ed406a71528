"""Runs a config in this process, or in a driver actor on Ray that is watched and replaced if it dies."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import ray
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayfl import files, plugins, remote
from rayfl.backend import Backend
from rayfl.clients.jobs import HostSpec
from rayfl.clients.state import StateLayout
from rayfl.config import Config
from rayfl.config.kinds import KINDS
from rayfl.data import Federation
from rayfl.data.remarks import remarks as data_remarks
from rayfl.errors import DiskError, Interrupted, RayflError
from rayfl.events import CheckpointSaved, Listener, Note, RunEvent, Stopped
from rayfl.given import own_variables
from rayfl.loggers import LoggedRun, OpenLoggers
from rayfl.loggers.base import environment
from rayfl.models.remarks import remarks as model_remarks
from rayfl.rundir import RunDirectory
from rayfl.runtime.connection import Head, available, await_room, refuse_without_gpus
from rayfl.runtime.environment import machine, versions
from rayfl.runtime.placement import Placement
from rayfl.runtime.processes import TICK, Deadlines, Process, Silence, alive, died, plain_errors
from rayfl.runtime.remote import UNRECORDED, Whereabouts, named, whereabouts
from rayfl.runtime.resources import Available, Keeping, ResourcePlan, plan_resources
from rayfl.servers import hooks
from rayfl.servers.building import block_rule, build, setup_of
from rayfl.servers.driver import Driver
from rayfl.training import precision
from rayfl.training.batched.calls import clients_in_a_call

_DRIVER_DEADLINE = 300.0
"""Seconds for which the driver may be silent; it answers even while it trains."""


_STOP_DEADLINE = 60.0
"""As :data:`_DRIVER_DEADLINE`, after a request to stop: the driver may be writing a large checkpoint."""


_HEADLESS = 30.0
"""Seconds that the driver has for a last checkpoint after Ray's head is lost, before Ray ends it."""


_NODE_LOST = 10.0
"""Seconds of silence after which rayfl checks whether this node still belongs to the cluster."""


_MAX_DRIVER_DEATHS = 3
"""How often the driver may die without completing another round."""


def arithmetic(config: Config, federation: Federation, host: HostSpec, available: Available) -> ResourcePlan:
    """The resource plan of a config.

    Raises:
        ConfigError: if it does not fit; the message says what would.
    """
    samples = federation.samples
    size = samples.x_train.nbytes + samples.x_test.nbytes + sum(a.nbytes for a in federation.train.arrays) * 2
    block = block_rule(config, federation, host)(config.training.cohort(federation.clients))
    models = len(hooks.initial(config.algorithm, setup_of(config, federation, host.spec)))
    models = max(models, config.clustering.n_clusters or 1)
    plan = plan_resources(config, federation.clients, block, host.spec.P, size, available, models)
    plan = plan.with_activations(_activations(config, federation, host, block))
    numbers = kept_numbers(config, federation, host)
    return replace(plan, keeping=Keeping.of(config, federation.clients, numbers)) if numbers else plan


def _activations(config: Config, federation: Federation, host: HostSpec, block: int) -> float:
    """Bytes of main memory for the activations of a batch; on a GPU they are in its own memory."""
    from rayfl.training import activations  # deferred: it imports PyTorch

    if config.execution.wants_gpu:
        return 0.0
    numbers = activations.per_sample(host.spec)
    alone = host.engine == "loop" or (host.engine == "vmap" and numbers > activations.MANY_ACTIVATIONS)
    together = 1 if alone else min(block, clients_in_a_call(host.spec.P))
    trained = together * min(config.training.batch_size, int(federation.sizes.max()))
    tested = min(config.evaluation.batch_size, len(federation.samples.y_test))
    return activations.batch_bytes(numbers, trained, tested)


def kept_numbers(config: Config, federation: Federation, host: HostSpec) -> int:
    """How many numbers a client keeps between rounds, its latest update included."""
    algorithm, setup = config.algorithm, setup_of(config, federation, host.spec)
    work = hooks.work(algorithm, setup, hooks.begin(algorithm, setup))
    layout = StateLayout.of(host.spec, work.personal, config.local, config.order)
    return layout.size + host.spec.P * algorithm.keeps_updates


def make_backend(config: Config, plan: ResourcePlan, run: str = "") -> Backend:
    """The backend that the config names; Ray must be connected.

    Args:
        config: of the run.
        plan: the actors.
        run: the name of the run in the names of its actors; the config's name if empty.
    """
    e = config.execution
    if e.backend == "inline":
        from rayfl.runtime.inline import InlineBackend

        return InlineBackend()
    from rayfl.runtime.ray_backend import RayBackend

    deadline = None if e.deadline == "auto" else e.deadline
    size, servers = plan.most_actors, config.hierarchy.lps_actors
    placement = Placement.of(config)
    return RayBackend(
        size, e.cpus_per_actor, e.gpus_per_actor, servers, deadline, run or config.name, placement
    )


def drive(config: Config, directory: RunDirectory, emit: Listener, should_stop: Callable[[], bool]) -> None:
    """Build everything and run it in this process: the whole run inline, or the body of the driver actor."""
    stages, host = build(config, directory.scaling if directory.begun else None)
    federation = stages[0].federation
    plan = arithmetic(config, federation, host, available(config))
    scaling, dataset = federation.samples.scaling, federation.samples.name
    assert scaling is not None
    directory.write_scaling(scaling)
    division, inputs = directory.division(stages), directory.inputs(config)
    in_bf16 = "" if host.precision == "float32" else f" in {host.precision}"
    engine = f"training engine: {host.engine}{in_bf16} ({host.why})"
    about_precision = precision.remarks(host.precision, host.device)
    about_model, about_data = model_remarks(host.spec), data_remarks(federation)
    for line in (*plan.lines(), engine, *about_precision, *about_model, *about_data):
        emit(Note(line))

    def describe() -> None:
        # Results of fewer rounds are out of date from the next round on.
        for name in ("summary.json", "newcomers.csv", "newcomers_communication.csv", "models/clients"):
            files.remove(directory.path / name)
        current, original = versions(), directory.versions
        changed = ", ".join(
            f"{package} {version}"
            for package, version in original.items()
            if current.get(package, version) != version
        )
        if changed:
            emit(Note(f"the run began with {changed}, and continues with other versions"))
        environment = {
            **machine(),
            "versions": original or current,
            **({"resumed_with": current} if changed else {}),
            "dataset": dataset,
            **division,
            **({"inputs": inputs} if inputs else {}),
            "engine": host.engine,
            "precision": host.precision,
            "resources": plan.to_dict(),
        }
        directory.write_json("environment.json", environment)
        # A resumed run keeps its choice: another version might choose differently.
        training = config.training.model_copy(update={"engine": host.engine})
        directory.write_config(config.model_copy(update={"training": training}))

    backend = make_backend(config, plan, directory.path.name)
    try:
        loggers = OpenLoggers(config.output.all_loggers, LoggedRun(directory.path, config.to_dict()), emit)
        try:
            listen = _publishing(directory, loggers)
            driver = Driver(config, stages, backend, directory, host, listen, should_stop)
            del stages, federation  # the driver reads the backend's copy
            driver.run(describe)
        finally:
            loggers.close()
    finally:
        backend.close()


def _publishing(directory: RunDirectory, emit: Listener) -> Listener:
    """Publish the run after each checkpoint; if that fails, it is tried again after the next one."""

    def listen(event: RunEvent) -> None:
        emit(event)
        if isinstance(event, CheckpointSaved):
            try:
                directory.publish()
            except DiskError as error:
                emit(Note(f"{error}; it is tried again after the next checkpoint"))

    return listen


class DriverActor:
    """The driver in a Ray actor; events are queued until :meth:`poll` fetches them."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[RunEvent] = queue.SimpleQueue()
        self._stop = threading.Event()

    def run(
        self,
        config: Config,
        path: Path,
        modules: Sequence[str],
        folder: Path,
        variables: Mapping[str, str],
    ) -> bool:
        """Run to the end; returns false if the run was stopped.

        Args:
            config: of the run.
            path: the run directory.
            modules: plug-ins to import here, by name.
            folder: the user's working folder, to which relative paths of the config refer; actors start in
                the folder in which their node was started.
            variables: environment variables for loggers; passed here because Ray's dashboard shows those of
                actors.
        """
        from rayfl.runtime.ray_backend import settle

        os.environ.update(variables)
        with contextlib.suppress(OSError):  # it no longer exists; absolute paths still work
            os.chdir(folder)
        plugins.adopt(modules, KINDS.values())
        settle()
        try:
            drive(config, RunDirectory(path), self._events.put, self._stop.is_set)
        except Interrupted:
            return False
        return True

    def poll(self, timeout: float) -> list[RunEvent]:
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
        """Where the actor runs; an answer means that it is ready."""
        return whereabouts()


def drive_on_ray(config: Config, directory: RunDirectory, listen: Listener, stop: threading.Event) -> None:
    """Run a config in a driver actor; if it dies, a new one continues from the last checkpoint.

    Raises:
        Interrupted: after ``stop`` was set.
        RayflError: if drivers keep dying.
    """
    Placement.of(config)  # raises early if there is none
    refuse_without_gpus(config)
    await_room(config, lambda text: listen(Note(text)), stop)
    if stop.is_set():
        raise Interrupted
    deadline = _DRIVER_DEADLINE if config.execution.deadline == "auto" else config.execution.deadline
    deaths, reached = 0, -1
    while True:
        try:
            # Doubled each time: on a very busy machine the driver may just be slow.
            _watch_driver(config, directory, listen, stop, deadline * 2.0**deaths)
            return
        except _DriverDied as error:
            rounds = directory.rounds_complete()
            deaths, reached = (1 if rounds > reached else deaths + 1), max(rounds, reached)
            if stop.is_set() or deaths > _MAX_DRIVER_DEATHS:
                how = f"resume with: {directory.resume}"
                raise RayflError(f"the driver {error}; {how}") from None
            listen(Note(f"the driver {error}: a new one continues from the last checkpoint"))


def _driver_variables(config: Config) -> dict[str, str]:
    """The environment variables that rayfl, loggers and object storage read where the driver runs: a Ray that
    was started before has others.
    """
    storage_variables = {} if isinstance(config.output.root, Path) else remote.variables(os.environ)
    return {**own_variables(os.environ), **environment(config.output.all_loggers), **storage_variables}


class _DriverDied(Exception):
    """The driver died, or was killed because it did not answer."""


def _head_lost(head: Head, directory: RunDirectory) -> RayflError:
    how = f"resume with: {directory.resume}"
    return RayflError(f"Ray's head at {head.address} is gone; {how}")


def _watch_driver(
    config: Config, directory: RunDirectory, listen: Listener, stop: threading.Event, deadline: float
) -> None:
    """Run the driver in an actor and relay its events."""
    # The driver writes the run directory, so it runs on this node. It mostly waits, so no CPU is reserved.
    node = ray.get_runtime_context().get_node_id()
    this_node = NodeAffinitySchedulingStrategy(node, soft=False)
    names = named(directory.path.name, "driver")
    options = {**UNRECORDED, **names, "num_cpus": 0, "max_concurrency": 3, "scheduling_strategy": this_node}
    driver = Process.of("the driver", ray.remote(DriverActor).options(**options).remote())
    modules, variables = [p.module for p in plugins.loaded()], _driver_variables(config)
    done = driver.actor.run.remote(config, directory.path, modules, Path.cwd(), variables)
    deadlines = Deadlines(deadline, lambda text: listen(Note(text)))
    asked_to_stop = False
    head, headless = Head(), None
    try:
        while True:
            if headless is None and head.silent():
                listen(Note(f"Ray's head at {head.address} does not answer: stopping"))
                headless = Silence()
                stop.set()
            if headless is not None and headless.seconds > _HEADLESS:
                raise _head_lost(head, directory)
            finished, _ = ray.wait([done], timeout=0)
            events, silence = driver.actor.poll.remote(0.0 if finished else 0.25), Silence()
            while not ray.wait([events], timeout=TICK)[0]:
                driver.greet()
                if silence.seconds > _NODE_LOST and not head.silent() and not alive(node):
                    raise RayflError(
                        "this node's Ray has ended (the head may have been restarted); resume with: "
                        f"{directory.resume}"
                    )
                allowed = min(deadline, _STOP_DEADLINE) if stop.is_set() else deadline
                if driver.where is None:  # it is still being started
                    allowed = max(allowed, _DRIVER_DEADLINE)
                if deadlines.over(silence, allowed, driver):
                    driver.kill()
                    raise _DriverDied("did not answer")
            for event in ray.get(events):
                listen(event)
                if headless is not None and isinstance(event, Stopped):
                    raise _head_lost(head, directory)
            if finished:
                break
            if stop.is_set() and not asked_to_stop:
                driver.actor.stop.remote()
                asked_to_stop = True
        with plain_errors():
            if not ray.get(done):
                raise Interrupted
    except RayError as error:
        if not died(error):
            raise
        cause = error.cause if isinstance(error, RayTaskError) else error
        memory = isinstance(cause, OutOfMemoryError)
        raise _DriverDied("was killed for lack of memory" if memory else "died") from None
    finally:
        driver.drop()

"""Independent work in parallel on Ray, with Ray Tune: the runs of a study."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import ray
from ray import tune
from ray.exceptions import RayError
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import ConcurrencyLimiter
from ray.tune.search.basic_variant import BasicVariantGenerator

from rayfl import plugins, remote
from rayfl.config.kinds import KINDS
from rayfl.given import own_variables
from rayfl.loggers import LOGGERS
from rayfl.runtime.connection import reachable

_ATTEMPTS = 3
"""How often a trial is restarted if its process or node dies."""


@dataclass(frozen=True)
class Search:
    """How Tune proposes points.

    Attributes:
        space: by name a list of values, or ``{kind: range}`` (see :class:`rayfl.study.file.Tune`).
        metric: the reported number that is maximised.
        samples: points to draw.
        optuna: whether Optuna proposes them.
        asha: whether unpromising trials are ended early.
        rounds: largest number of reports of a trial, including the one at its end.
        seed: of the draws.
    """

    space: Mapping[str, Any]
    metric: str
    samples: int
    optuna: bool
    asha: bool
    rounds: int
    seed: int


@dataclass(frozen=True)
class Room:
    """The resources of a trial, and how many run in parallel.

    Attributes:
        cpus, gpus: reserved for the trial's own process.
        actors: its client actors, with one CPU each; 0 if the process does all the work.
        jobs: number of parallel trials; None for as many as there is room for.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    actors: int = 0
    jobs: int | None = None


def run_trials(
    work: Callable[[Any], Mapping[str, Any]],
    items: Sequence[Any],
    room: Room,
    folder: Path,
    lost: Callable[[int], None] = lambda place: None,
    ended: Callable[[int], None] = lambda place: None,
    stopping: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Call ``work(item)`` for every item, each in a trial.

    A trial whose process or node dies is restarted; ``work`` has to resume where it was.

    Args:
        work: a function of a module, called in a separate process; its result is small.
        items: one per trial.
        room: the resources of a trial.
        folder: the user's working folder, to which relative paths refer.
        lost: called with the index of an item whose process or node died and which is restarted.
        ended: called with the index of an item as soon as its work is done, while others go on; it must not
            raise.
        stopping: returns whether the trials have been asked to stop.

    Yields:
        The index of each item, and the result of its work or ``{"error": ...}``; when all have ended, in the
        order of the items.
    """
    begin = partial(_trial, work=work, items=ray.put(list(items)), surroundings=Surroundings.here(folder))
    with _tune_folder(stopping) as store:
        results = tune.Tuner(
            tune.with_resources(begin, _resources(room)),
            param_space={"place": tune.grid_search(list(range(len(items))))},
            tune_config=tune.TuneConfig(max_concurrent_trials=room.jobs, reuse_actors=True),
            run_config=_run_config(
                store,
                _Listener(
                    lambda config: lost(config["place"]), lambda config, report: ended(config["place"])
                ),
            ),
        ).fit()
        outcomes = {}
        for result in results:
            place = (result.config or {}).get("place")
            if place is not None:
                outcomes[place] = _outcome(result)
    for place in range(len(items)):
        yield place, outcomes.get(place, {"error": "was not begun"})


def search(
    work: Callable[[Any], Mapping[str, Any]],
    how: Search,
    room: Room,
    folder: Path,
    stopping: Callable[[], bool] = lambda: False,
    ended: Callable[[Mapping[str, Any], Mapping[str, Any]], None] = lambda point, report: None,
) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Let Tune propose points, and call ``work((point, report))`` for each.

    Args:
        work: as for :func:`run_trials`; ``report(numbers)`` tells Tune the progress of a trial, once per
            round.
        how: the space and the search algorithm.
        room: the resources of a trial.
        folder: the user's working folder.
        stopping: returns whether the trials have been asked to stop.
        ended: called with a point and what its work returned as soon as it has, while others go on; it must
            not raise.

    Returns:
        Every point that was tried, and what its work returned.
    """
    kinds = {"uniform": tune.uniform, "loguniform": tune.loguniform, "randint": tune.randint}
    space: dict[str, Any] = {}
    for name, values in how.space.items():
        kind, arguments = ("choice", values) if isinstance(values, list) else next(iter(values.items()))
        space[name] = tune.choice(arguments) if kind == "choice" else kinds[kind](*arguments)
    searcher: Any  # also limits the trials: Tune's own limit does not apply to a given searcher
    if how.optuna:
        import optuna
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        searcher = OptunaSearch(metric=how.metric, mode="max", seed=how.seed)
        if room.jobs is not None:
            searcher = ConcurrencyLimiter(searcher, max_concurrent=room.jobs)
    else:
        searcher = BasicVariantGenerator(random_state=how.seed, max_concurrent=room.jobs or 0)
    scheduler = ASHAScheduler(max_t=how.rounds, grace_period=min(3, how.rounds)) if how.asha else None
    begin = partial(_search_trial, work=work, surroundings=Surroundings.here(folder))
    with _tune_folder(stopping) as store:
        results = tune.Tuner(
            tune.with_resources(begin, _resources(room)),
            param_space=space,
            tune_config=tune.TuneConfig(
                metric=how.metric,
                mode="max",
                num_samples=how.samples,
                search_alg=searcher,
                scheduler=scheduler,
            ),
            run_config=_run_config(store, _Listener(ended=ended, failed=ended)),
        ).fit()
        return [(dict(result.config or {}), _outcome(result)) for result in results]


@dataclass(frozen=True)
class Surroundings:
    """What the process of a trial has to know about the process that started it."""

    folder: Path
    modules: tuple[str, ...]
    variables: Any
    """A reference to environment variables: Tune writes everything else to a disk, and some are secret."""

    @classmethod
    def here(cls, folder: Path) -> Surroundings:
        """The surroundings of this process."""
        prefixes = tuple(prefix for logger in LOGGERS.values() for prefix in logger.variables)
        variables = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
        variables |= {**own_variables(os.environ), **remote.variables(os.environ)}
        return cls(folder, tuple(plugin.module for plugin in plugins.loaded()), ray.put(variables))

    def enter(self) -> None:
        """Apply them in the process of a trial."""
        logging.getLogger("ray").setLevel(logging.ERROR)
        os.environ.update(ray.get(self.variables))
        with contextlib.suppress(OSError):
            os.chdir(self.folder)
        plugins.adopt(self.modules, KINDS.values())


def _trial(config: dict[str, Any], work: Any, items: Any, surroundings: Surroundings) -> None:
    surroundings.enter()
    try:
        outcome = dict(work(ray.get(items)[config["place"]]))
    # The same error would occur again; only trials whose process died are restarted
    except Exception as error:
        outcome = {"error": f"{type(error).__name__}: {error}"}
    tune.report({"outcome": outcome})


def _search_trial(config: dict[str, Any], work: Any, surroundings: Surroundings) -> None:
    surroundings.enter()
    tune.report(dict(work((config, tune.report))))


def _outcome(result: Any) -> Mapping[str, Any]:
    if result.error is not None:
        return {"error": _reason(result.error)}
    metrics = dict(result.metrics or {})
    return dict(metrics.get("outcome", metrics))


def _reason(error: Any) -> str:
    """Why a trial failed, in a line."""
    cause = getattr(error, "cause", None) or error
    line = str(cause or "").strip().splitlines()
    died = cause is None or isinstance(cause, RayError)
    kind = "the process of the trial died" if died else type(cause).__name__
    return shorten(f"{kind}: {line[-1] if line else ''}", 200, placeholder=" ...")


def _resources(room: Room) -> dict[str, float]:
    if room.actors:  # client actors reserve their CPUs themselves; the driver of the run writes here
        node_id = ray.get_runtime_context().get_node_id()
        address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id)
        return {"CPU": 0.0, f"node:{address}": 0.001}
    return {"CPU": room.cpus} | ({"GPU": room.gpus} if room.gpus else {})


class _Listener(tune.Callback):  # type: ignore[misc]
    """Reports trials that are restarted, that are done, and that have failed for good."""

    def __init__(
        self,
        lost: Callable[[dict[str, Any]], None] = lambda config: None,
        ended: Callable[[dict[str, Any], Mapping[str, Any]], None] = lambda config, report: None,
        failed: Callable[[dict[str, Any], Mapping[str, Any]], None] = lambda config, report: None,
    ) -> None:
        self._lost, self._ended, self._failed = lost, ended, failed

    def __reduce__(self) -> tuple[Any, ...]:
        """Tune pickles its callbacks; the listeners exist only in this process and are left out."""
        return (_Listener, ())

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Called by Tune when a trial is restarted."""
        self._lost(trial.config)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Called by Tune when a trial is done."""
        self._ended(trial.config, dict(trial.last_result or {}))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Called by Tune when a trial has failed and is not restarted."""
        self._failed(trial.config, {"error": _reason(trial.get_pickled_error())})


def _run_config(store: str, listener: _Listener) -> Any:
    return tune.RunConfig(
        name="trials",
        storage_path=store,
        failure_config=tune.FailureConfig(max_failures=_ATTEMPTS),
        callbacks=[listener],
        verbose=0,
    )


@contextlib.contextmanager
def _tune_folder(stopping: Callable[[], bool]) -> Iterator[str]:
    """A folder for Tune's own files, which are not needed later: runs are found by their hashes."""
    environment = dict(os.environ)
    os.environ.update(_QUIET_VARIABLES)
    log = logging.getLogger("ray.tune")
    level = log.level
    log.setLevel(logging.CRITICAL)  # the caller reports a trial that dies, in one line
    store = tempfile.mkdtemp(prefix="rayfl-trials-")
    ended = threading.Event()
    threading.Thread(target=_watch_node, args=(ended, stopping), name="rayfl-node", daemon=True).start()
    try:
        yield store
    finally:
        ended.set()
        log.setLevel(level)
        os.environ.clear()
        os.environ.update(environment)
        shutil.rmtree(store, ignore_errors=True)


def _watch_node(ended: threading.Event, stopping: Callable[[], bool]) -> None:
    """Print one line if this node's Ray has died: Ray then ends this process without a message.

    A signal to a whole group of processes, as by ``timeout``, ends Ray and asks the trials to stop. Then it
    is no error.
    """
    node_id = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    address = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    while reachable(address):
        if ended.wait(_NODE_CHECK):
            return
    asked = stopping()
    what = "this node's Ray has ended; complete rounds are kept; run the same command again to continue"
    print(f"{'stopped' if asked else 'error'}: {what}", file=sys.stderr, flush=True)
    if not ended.wait(_NODE_CHECK if asked else _PATIENCE):
        os._exit(130 if asked else 1)  # what waits for Ray would wait for ever


_NODE_CHECK, _PATIENCE = 2.0, 60.0
"""Seconds between two checks of this node, and until this process ends if Ray does not end it."""


_QUIET_VARIABLES = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_MAX_PENDING_TRIALS_PG": "4",
    "RAY_AIR_NEW_OUTPUT": "0",
}

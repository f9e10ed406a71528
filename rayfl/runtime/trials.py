"""Independent pieces of work side by side on Ray, by Ray Tune: the runs of a study."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
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
from ray.tune.search.basic_variant import BasicVariantGenerator

from rayfl import plugins
from rayfl.config.kinds import KINDS

_ATTEMPTS = 3
"""How often a trial is begun again when its process or its node died."""


@dataclass(frozen=True)
class Search:
    """How Tune proposes points.

    Attributes:
        space: by name a list of values, or ``{kind: range}`` (see :class:`rayfl.study.file.Tune`).
        metric: what trials report, to be maximized.
        samples: points to draw.
        optuna: whether Optuna proposes them.
        asha: whether unpromising trials are ended early.
        rounds: reports of a trial at most, the last one, of its end, among them.
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
    """What a trial takes, and how many there may be.

    Attributes:
        cpus, gpus: that a trial reserves in its own process.
        actors: client actors besides, a CPU each; 0 if the process does all the work.
        jobs: trials side by side; None for as many as there is room for.
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
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Do ``work(item)`` for every item.

    A trial whose process or node dies is begun again; going on where it was is up to ``work``.

    Args:
        work: a function of a module, given an item in a process of its own; what it returns is small.
        items: one a trial.
        room: what a trial takes.
        folder: in which the user works; relative paths begin there.
        lost: called with the place of an item whose process or node died, and which is begun again.

    Returns:
        The place of each item, and what its work returned, or ``{"error": ...}``; in the order of the items.
    """
    begin = partial(_trial, work=work, items=ray.put(list(items)), surroundings=Surroundings.here(folder))
    with _experiment() as store:
        results = tune.Tuner(
            tune.with_resources(begin, _resources(room)),
            param_space={"place": tune.grid_search(list(range(len(items))))},
            tune_config=tune.TuneConfig(max_concurrent_trials=room.jobs, reuse_actors=True),
            run_config=_run_config(store, _Losses(lambda config: lost(config["place"]))),
        ).fit()
        found = {}
        for result in results:
            place = (result.config or {}).get("place")
            if place is not None:
                found[place] = _outcome(result)
    for place in range(len(items)):
        yield place, found.get(place, {"error": "was not begun"})


def search(
    work: Callable[[Any], Mapping[str, Any]], how: Search, room: Room, folder: Path
) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Let Tune propose points, and do ``work((point, report))`` for each.

    Args:
        work: as for :func:`run_trials`; ``report(numbers)`` tells Tune how a trial goes, once a round.
        how: the space and who searches it.
        room: what a trial takes.
        folder: in which the user works.

    Returns:
        Every point that was tried, and what its work returned.
    """
    kinds = {"uniform": tune.uniform, "loguniform": tune.loguniform, "randint": tune.randint}
    space: dict[str, Any] = {}
    for name, values in how.space.items():
        kind, given = ("choice", values) if isinstance(values, list) else next(iter(values.items()))
        space[name] = tune.choice(given) if kind == "choice" else kinds[kind](*given)
    searcher = None
    if how.optuna:
        import optuna
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        searcher = OptunaSearch(metric=how.metric, mode="max", seed=how.seed)
    else:
        searcher = BasicVariantGenerator(random_state=how.seed)
    scheduler = ASHAScheduler(max_t=how.rounds, grace_period=min(3, how.rounds)) if how.asha else None
    begin = partial(_searching, work=work, surroundings=Surroundings.here(folder))
    with _experiment() as store:
        results = tune.Tuner(
            tune.with_resources(begin, _resources(room)),
            param_space=space,
            tune_config=tune.TuneConfig(
                metric=how.metric,
                mode="max",
                num_samples=how.samples,
                search_alg=searcher,
                scheduler=scheduler,
                max_concurrent_trials=None if how.optuna else room.jobs,
            ),
            run_config=_run_config(store, _Losses()),
        ).fit()
        return [(dict(result.config or {}), _outcome(result)) for result in results]


@dataclass(frozen=True)
class Surroundings:
    """What the process of a trial has to know of the one that asks for it."""

    folder: Path
    modules: tuple[str, ...]

    @classmethod
    def here(cls, folder: Path) -> Surroundings:
        """Of this process."""
        return cls(folder, tuple(plugin.module for plugin in plugins.loaded()))

    def enter(self) -> None:
        """Make the process of a trial like it."""
        logging.getLogger("ray").setLevel(logging.ERROR)
        with contextlib.suppress(OSError):
            os.chdir(self.folder)
        plugins.adopt(self.modules, KINDS.values())


def _trial(config: dict[str, Any], work: Any, items: Any, surroundings: Surroundings) -> None:
    surroundings.enter()
    try:
        outcome = dict(work(ray.get(items)[config["place"]]))
    except Exception as error:  # it would come again; only what dies is begun again
        outcome = {"error": f"{type(error).__name__}: {error}"}
    tune.report({"outcome": outcome})


def _searching(config: dict[str, Any], work: Any, surroundings: Surroundings) -> None:
    surroundings.enter()
    tune.report(dict(work((config, tune.report))))


def _outcome(result: Any) -> Mapping[str, Any]:
    if result.error is not None:
        cause = getattr(result.error, "cause", None) or result.error
        line = str(cause).strip().splitlines()
        kind = "the process of the trial died" if isinstance(cause, RayError) else type(cause).__name__
        return {"error": shorten(f"{kind}: {line[-1] if line else ''}", 200, placeholder=" ...")}
    metrics = dict(result.metrics or {})
    return dict(metrics.get("outcome", metrics))


def _resources(room: Room) -> dict[str, float]:
    if room.actors:  # which take their CPUs themselves; their driver writes here
        here = ray.get_runtime_context().get_node_id()
        address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here)
        return {"CPU": 0.0, f"node:{address}": 0.001}
    return {"CPU": room.cpus} | ({"GPU": room.gpus} if room.gpus else {})


class _Losses(tune.Callback):  # type: ignore[misc]
    """Tells of trials that are begun again."""

    def __init__(self, tell: Callable[[dict[str, Any]], None] = lambda config: None) -> None:
        self._tell = tell

    def __reduce__(self) -> tuple[Any, ...]:
        """Tune writes down all that it is given; whoever listens is of this process."""
        return (_Losses, ())

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Tune's name for it."""
        self._tell(trial.config)


def _run_config(store: str, losses: Any) -> Any:
    return tune.RunConfig(
        name="trials",
        storage_path=store,
        failure_config=tune.FailureConfig(max_failures=_ATTEMPTS),
        callbacks=[losses],
        verbose=0,
    )


@contextlib.contextmanager
def _experiment() -> Iterator[str]:
    """A folder for Tune's own notes, which are not needed later: runs are found again by their hashes."""
    before = dict(os.environ)
    os.environ.update(_QUIET)
    log = logging.getLogger("ray.tune")
    level = log.level
    log.setLevel(logging.CRITICAL)  # a trial that dies is told in a line, by whoever asked for it
    store = tempfile.mkdtemp(prefix="rayfl-trials-")
    try:
        yield store
    finally:
        log.setLevel(level)
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(store, ignore_errors=True)


_QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_MAX_PENDING_TRIALS_PG": "4",
    "RAY_AIR_NEW_OUTPUT": "0",
}

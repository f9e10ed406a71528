"""Call the hooks of a method and check what they return, so that a mistake in a user's method is reported
immediately, in one line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from rayfl.algorithms import (
    Algorithm,
    Clients,
    GlobalStep,
    Mixing,
    Plan,
    Regrouping,
    RoundReport,
    Served,
    ServerState,
    Setup,
)
from rayfl.errors import ConfigError, nearest, returned, type_of
from rayfl.server_step import ServerStep
from rayfl.servers import mixing
from rayfl.training import LocalWork
from rayfl.training.reports import ClientReport, Reports
from rayfl.training.server import ServerTraining


def initial(algorithm: Algorithm[Any], setup: Setup) -> Sequence[int]:
    """The initial models, as numbers of random initialisations.

    Raises:
        ConfigError: unless it is one integer or more.
    """
    where = f"{algorithm.name}.initial"
    numbers: Sequence[Any] = returned(where, algorithm.initial(setup), Sequence)  # type: ignore[type-abstract]
    if not numbers or not all(_is_integer(number) for number in numbers):
        raise ConfigError(where, f"returned {numbers!r}", "expected one integer or more, such as (0,)")
    return numbers


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def begin(algorithm: Algorithm[Any], setup: Setup) -> Any:
    """The state before round 0.

    Raises:
        ConfigError: if it is not a :class:`~rayfl.algorithms.ServerState`, or lacks a model for a client.
    """
    where = f"{algorithm.name}.begin"
    return _checked(where, algorithm.begin(setup), setup)


def _checked(where: str, state: Any, setup: Setup) -> Any:
    """A state that a hook has returned, with a model for each client.

    Raises:
        ConfigError
    """
    returned(where, state, ServerState)
    _check_integers(where, "assignment", state.assignment, setup.clients, state.models)
    return _read_only(state)


def _read_only(state: Any) -> Any:
    """Make the arrays in a state's fields read-only, and return the state. Results computed from an array are
    cached for that array, so a method that changed it in place would be tested with old models.
    """
    for entry in dataclasses.fields(state):
        value = getattr(state, entry.name)
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
    return state


def cohort(
    algorithm: Algorithm[Any], setup: Setup, state: Any, clients: Clients
) -> tuple[Any, NDArray[np.int64]]:
    """The next state, and the clients that take part.

    Raises:
        ConfigError: unless they are ids of present clients, ascending.
    """
    result = algorithm.cohort(setup, state, clients)
    where = f"{algorithm.name}.cohort"
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], ServerState)):
        raise ConfigError(where, f"returned {type_of(result)}", "expected (state, ids)")
    ids = result[1]
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        raise ConfigError(where, f"the ids are {type_of(ids)}", "expected one client or more, integers (M,)")
    if ids.min() < 0 or ids.max() >= setup.clients or not (setup.sizes[ids] > 0).all():
        absent = next(i for i in ids.tolist() if not 0 <= i < setup.clients or not setup.sizes[i])
        raise ConfigError(where, f"there is no client {absent} now", "take some of setup.present")
    if (np.diff(ids) <= 0).any():
        raise ConfigError(where, "the ids are not ascending", "return np.unique(ids)")
    _checked(where, result[0], setup)
    return result


def plan(algorithm: Algorithm[Any], setup: Setup, state: Any, cohort: NDArray[np.int64]) -> Plan:
    """What each client of ``cohort`` ``(M,)`` starts from.

    Raises:
        ConfigError: unless each array has an entry for every client of the cohort and names existing models;
            or for mixtures of models with a local objective that keeps a vector with each model.
    """
    where = f"{algorithm.name}.plan"
    cohort_plan = returned(where, algorithm.plan(setup, state, cohort), Plan)
    _check_integers(where, "cohort", cohort_plan.cohort, None, setup.clients)
    count = len(cohort_plan.cohort)
    _check_integers(where, "group", cohort_plan.group, count, state.models)
    _check_served(where, "start", cohort_plan.start, np.arange(count), (count, state.models))
    if sp.issparse(cohort_plan.start) and setup.local.server_size(setup.spec):
        what = f"clients start from mixtures, and {setup.local.name} keeps a vector with each model"
        raise ConfigError(where, what, "leave it out of the method's objectives")
    return cohort_plan


def select(
    algorithm: Algorithm[Any], setup: Setup, state: Any, who: NDArray[np.int64], clients: Clients
) -> Any:
    """The state with the models that the clients ``who`` ``(n,)`` want.

    Raises:
        ConfigError: if it is not a state.
    """
    return _checked(f"{algorithm.name}.select", algorithm.select(setup, state, who, clients), setup)


def moved(
    algorithm: Algorithm[Any], setup: Setup, hook: str, outcome: Any, models: int
) -> ServerState | Regrouping[Any]:
    """What ``join`` or ``drift`` has returned; ``models`` is the number of models before.

    Raises:
        ConfigError: if it is neither a state nor new clusters.
    """
    where = f"{algorithm.name}.{hook}"
    found: ServerState | Regrouping[Any] = returned(where, outcome, ServerState, Regrouping)
    if isinstance(found, Regrouping):
        _check_regrouping(where, found, setup, models, restores=False)
        return found
    unchanged: ServerState = _checked(where, found, setup)
    return unchanged


def regrouping(
    algorithm: Algorithm[Any], setup: Setup, hook: str, outcome: Any, models: int
) -> Regrouping[Any] | None:
    """What ``recluster`` or ``split`` has returned; ``models`` is the number of models before.

    Raises:
        ConfigError: if it is neither new clusters nor None, or clients have models that do not exist.
    """
    if outcome is None:
        return None
    where = f"{algorithm.name}.{hook}"
    found: Regrouping[Any] = returned(where, outcome, Regrouping)
    _check_regrouping(where, found, setup, models, restores=hook == "split")
    return found


def _check_regrouping(where: str, found: Regrouping[Any], setup: Setup, former: int, restores: bool) -> None:
    """Check new clusters.

    Args:
        where: the hook that has returned them.
        found: the clusters.
        setup: of the run.
        former: how many models there were.
        restores: whether there are models of before the round to restore.
    """
    _checked(where, found.state, setup)
    models = found.state.models
    if np.shape(found.parents) != (models,):
        what = f"parents is {type_of(found.parents)}"
        raise ConfigError(where, what, f"expected one parent per model ({models},)")
    _check_models(where, "parents", found.parents, former)
    if np.size(found.restored) and not restores:
        raise ConfigError(where, "only split restores models of before the round", "leave restored out")
    _check_models(where, "restored", found.restored, min(former, models))


def _check_models(where: str, name: str, values: Any, count: int) -> None:
    """Check numbers of models."""
    numbers = np.asarray(values)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise ConfigError(
            where, f"{name} is {type_of(values)}", "expected the numbers of models, as integers"
        )
    _check_below(where, name, numbers, count)


def work(algorithm: Algorithm[Any], setup: Setup, state: Any) -> LocalWork:
    """The local work of the round.

    Raises:
        ConfigError: if it has another type, or names parts of the model that do not exist.
    """
    where = f"{algorithm.name}.work"
    return _checked_work(where, returned(where, algorithm.work(setup, state), LocalWork), setup)


def adaptation(algorithm: Algorithm[Any], setup: Setup, state: Any) -> LocalWork | None:
    """What each client does with its model before a test, or None.

    Raises:
        ConfigError: if it has another type, or names parts of the model that do not exist.
    """
    where, found = f"{algorithm.name}.adaptation", algorithm.adaptation(setup, state)
    return None if found is None else _checked_work(where, returned(where, found, LocalWork), setup)


def _checked_work(where: str, work: LocalWork, setup: Setup) -> LocalWork:
    """Check the ranges of parameters that a round's work names."""
    for name in ("personal", "frozen"):
        segments = getattr(work, name)
        if not _are_segments(segments, setup.spec.P):
            what = (
                f"{name} is {segments!r}" if isinstance(segments, tuple) else f"{name} is {type_of(segments)}"
            )
            expected = f"pairs (start, stop) from 0 to {setup.spec.P}, ascending, without overlaps"
            raise ConfigError(where, what, f"expected {expected}: tuple(setup.spec.segment(layers))")
    return work


def _are_segments(segments: object, size: int) -> bool:
    """Whether these are ascending ranges ``(start, stop)`` of ``range(size)`` that do not overlap."""
    if not isinstance(segments, tuple) or not all(
        isinstance(pair, tuple) and len(pair) == 2 and all(map(_is_integer, pair)) for pair in segments
    ):
        return False
    edges = [edge for pair in segments for edge in pair]
    return edges == sorted(edges) and (not edges or (edges[0] >= 0 and edges[-1] <= size))


def downloads(algorithm: Algorithm[Any], setup: Setup, state: Any, plan: Plan) -> int:
    """Number of models that clients download in a round.

    Raises:
        ConfigError: if it is no count.
    """
    count: Any = algorithm.downloads(setup, state, plan)
    if not _is_integer(count) or count < 0:
        what = f"returned {count if _is_integer(count) else type_of(count)}"
        raise ConfigError(f"{algorithm.name}.downloads", what, "expected the number of models, 0 or more")
    return int(count)


def diagnose(algorithm: Algorithm[Any], setup: Setup, state: Any, clients: Clients) -> list[dict[str, Any]]:
    """Rows for ``diagnostics.csv``.

    Raises:
        ConfigError: unless it is a list of dictionaries.
    """
    rows: Any = algorithm.diagnose(setup, state, clients)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        what = f"returned {type_of(rows)}"
        raise ConfigError(
            f"{algorithm.name}.diagnose", what, "expected a list of dictionaries, one for each row"
        )
    return rows


def counting_steps(setup: Setup, work: LocalWork) -> Setup:
    """The setup whose section ``training`` has the round's epochs, batches and momentum: by the number of
    steps FedNova weighs clients.
    """
    names = ("epochs", "batch_size", "momentum", "lr_alpha", "lr_power")
    changed = {name: getattr(work, name) for name in names}
    changed["batch_size"] *= work.batches_a_step
    changed = {name: value for name, value in changed.items() if value != getattr(setup.training, name)}
    if not changed:
        return setup
    return dataclasses.replace(setup, training=setup.training.model_copy(update=changed))


def reports(algorithm: Algorithm[Any], setup: Setup, state: Any) -> Mapping[str, ClientReport]:
    """What clients report, by name.

    Raises:
        ConfigError: if it is not a dictionary of client reports.
    """
    where = f"{algorithm.name}.reports"
    found: Mapping[str, Any] = returned(where, algorithm.reports(setup, state), Mapping)  # type: ignore[type-abstract]
    for name, report in found.items():
        if not isinstance(report, ClientReport):
            raise ConfigError(where, f"{name!r} is {type_of(report)}", "expected a ClientReport")
        _check_hashable(where, report)
    return found


def _check_hashable(where: str, part: object) -> None:
    """Refuse a part that cannot be recognised in the next round."""
    try:
        hash(part)
    except TypeError as error:
        what = f"{type(part).__name__} cannot be compared with that of another round ({error})"
        raise ConfigError(
            where, what, "keep arrays out of its fields, or make it a @dataclass(eq=False)"
        ) from None


def mix(algorithm: Algorithm[Any], setup: Setup, state: Any, plan: Plan, answers: Reports) -> Mixing:
    """How the trained models are averaged.

    Raises:
        ConfigError: if it is not a mixing matrix of this round.
    """
    named = _Answers(answers, algorithm)
    matrix = returned(f"{algorithm.name}.mix", algorithm.mix(setup, state, plan, named), Mixing)
    return mixing.check(matrix, algorithm.name, state.models, len(plan.cohort))


class _Answers(dict[str, Any]):
    """What clients report, by name; a wrong name is refused with the reason."""

    def __init__(self, answers: Reports, algorithm: Algorithm[Any]) -> None:
        super().__init__(answers)
        self.algorithm = algorithm

    def __missing__(self, name: str) -> Any:
        where = f"{self.algorithm.name}.mix"
        if self.algorithm.mixes_by_reports:
            remedy = nearest(name, self) if self else f"{self.algorithm.name}.reports returns none"
            raise _NoReport(where, f"there is no report {name!r}", remedy)
        remedy = "set mixes_by_reports: ClassVar[bool] = True in the class"
        raise _NoReport(where, f"has no reports, such as {name!r}", remedy)


class _NoReport(ConfigError, KeyError):
    """There is no report of a name; a method may catch it as of any dictionary."""

    __str__ = ConfigError.__str__


def steps(algorithm: Algorithm[Any], setup: Setup, state: Any) -> tuple[ServerStep | None, GlobalStep | None]:
    """What the local servers do with their averages, and the global server after them.

    Raises:
        ConfigError: if one has another type and is not None.
    """
    local, common = algorithm.server_step(setup, state), algorithm.global_step(setup, state)
    if local is not None:
        returned(f"{algorithm.name}.server_step", local, ServerStep)  # type: ignore[type-abstract]
    if common is not None:
        returned(f"{algorithm.name}.global_step", common, GlobalStep)
    return local, common


def server_training(algorithm: Algorithm[Any], setup: Setup, state: Any) -> ServerTraining | None:
    """What servers do with their models after averaging.

    Raises:
        ConfigError: if it has another type and is not None; or if the servers see permuted models.
    """
    where = f"{algorithm.name}.server_training"
    training = algorithm.server_training(setup, state)
    if training is None:
        return None
    if algorithm.permutes:
        raise ConfigError(where, "the servers see permuted models, which they cannot train")
    found: ServerTraining = returned(where, training, ServerTraining)  # type: ignore[type-abstract]
    _check_hashable(where, found)
    return found


def end(algorithm: Algorithm[Any], setup: Setup, state: Any, plan: Plan, report: RoundReport) -> Any:
    """The state after the round.

    Raises:
        ConfigError: if it is not the state of the next round: a run would never end.
    """
    where = f"{algorithm.name}.end"
    next_state = returned(where, algorithm.end(setup, state, plan, report), ServerState)
    if next_state.round != state.round + 1:
        what = f"returned a state with round={next_state.round} after round {state.round}"
        raise ConfigError(where, what, f"expected round={state.round + 1}; return super().end(...)")
    return _checked(where, next_state, setup)


def tested_with(algorithm: Algorithm[Any], setup: Setup, state: Any, clients: Clients) -> Served:
    """What each client is tested with ``(N,)`` or ``(N, K)``.

    Raises:
        ConfigError: unless it is an existing model, or a mixture, for each present client.
    """
    served, shape = algorithm.tested_with(setup, state, clients), (setup.clients, state.models)
    _check_served(f"{algorithm.name}.tested_with", "the result", served, setup.present, shape)
    return served


def _check_served(
    where: str, name: str, served: Any, rows: NDArray[np.int64], shape: tuple[int, int]
) -> None:
    """Check the type and shape of models or mixtures, and that ``rows`` of mixtures have a positive sum."""
    if not sp.issparse(served):
        _check_integers(where, name, served, *shape)
        return
    if not isinstance(served, sp.csr_array) or served.shape != shape:
        raise ConfigError(
            where, f"{name} is {type_of(served)}", f"expected models, or a scipy.sparse.csr_array {shape}"
        )
    if not (np.isfinite(served.data).all() and (served.data >= 0).all()):
        raise ConfigError(where, f"{name} has shares that are negative or not finite")
    empty = rows[np.asarray(served.sum(axis=1), np.float64)[rows] <= 0]
    if len(empty):
        raise ConfigError(where, f"row {empty[0]} of {name} has no shares", "expected a positive sum")


def _check_integers(where: str, name: str, values: Any, count: int | None, below: int) -> None:
    """Check that an array has integers from 0 to ``below - 1`` and the required length."""
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
        raise ConfigError(where, f"{name} is {type_of(values)}", "expected integers, one for each client")
    if count is not None and len(values) != count:
        raise ConfigError(where, f"{name} has {len(values)} entries for {count} clients", "give one for each")
    _check_below(where, name, values, below)


def _check_below(where: str, name: str, numbers: NDArray[np.integer], below: int) -> None:
    """Check that integers lie between 0 and ``below - 1``."""
    if len(numbers) and not (numbers.min() >= 0 and numbers.max() < below):
        wrong = numbers.min() if numbers.min() < 0 else numbers.max()
        raise ConfigError(where, f"{name} holds {wrong}", f"expected 0 to {below - 1}")

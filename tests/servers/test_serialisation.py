"""States as arrays and JSON values, and back: any dataclass of the allowed types, to the bit."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import hypothesis
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from typing_extensions import TypeAliasType

import rayfl
from rayfl.algorithms import Algorithm, ServerState, Setup, per_client, per_model
from rayfl.algorithms.cfl import CFLState
from rayfl.api import resume
from rayfl.config import load
from rayfl.errors import Interrupted, RayflError
from rayfl.events import BlockDone, RunEvent
from rayfl.rundir import RunDirectory
from rayfl.runtime.inline import InlineBackend
from rayfl.servers.building import build
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from rayfl.servers.driver import Driver
from rayfl.servers.serialisation import StateError, flatten, restore
from tests.algorithms.fakes import assert_same_state


@dataclass(frozen=True)
class Inner:
    ids: NDArray[np.int64]
    share: float = 0.5


@dataclass(frozen=True)
class State(ServerState):
    array: NDArray[Any] = field(default_factory=lambda: np.empty(0))
    graph: sp.csr_array | None = None
    inner: Inner | None = None
    flag: bool = False
    count: int = 0
    number: float = 0.0
    word: str | None = None
    perhaps: NDArray[np.float64] | None = None
    name: ClassVar[str] = "no field"
    derived: int = field(init=False, default=7)


DTYPES = st.one_of(
    hnp.boolean_dtypes(), hnp.integer_dtypes(endianness="?"), hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
)  # fmt: skip
ARRAYS = DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)))


@st.composite
def graphs(draw: Any) -> sp.csr_array:
    dense = draw(hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=5)))
    return sp.csr_array(np.nan_to_num(dense))


STATES = st.builds(
    State,
    round=st.integers(0, 2**40),
    models=st.integers(0, 5),
    assignment=hnp.arrays(np.int64, st.integers(0, 9)),
    array=ARRAYS,
    graph=st.none() | graphs(),
    inner=st.none() | st.builds(Inner, ids=hnp.arrays(np.int64, 3), share=st.floats()),
    flag=st.booleans(),
    count=st.integers(),
    number=st.floats(),
    word=st.none() | st.text(),
    perhaps=st.none() | hnp.arrays(np.float64, 2),
)


def through_json(state: ServerState) -> Any:
    flat = flatten(state)
    return restore(type(state), flat.arrays, json.loads(json.dumps(flat.values, allow_nan=False)))


@hypothesis.settings(max_examples=30)
@given(STATES)
def test_any_state_comes_back_to_the_bit(state: State):
    back = through_json(state)
    assert_same_state(back, state)
    assert math.copysign(1, back.number) == math.copysign(1, state.number) or math.isnan(state.number)
    if state.graph is not None:
        assert back.graph.shape == state.graph.shape
        assert (back.graph.toarray() == state.graph.toarray()).all()


def test_any_array_comes_back_from_the_disk(tmp_path: Path):
    nobody, nothing = np.zeros(0, np.int64), np.zeros((0, 0), np.float32)

    @hypothesis.settings(max_examples=20)
    @given(ARRAYS)
    def check(array: NDArray[Any]) -> None:
        wide = np.asfortranarray(array) if array.ndim else array
        state = State(3, 1, np.zeros(2, np.int64), array=wide)
        saved = Checkpoint(state, nothing, nobody, nothing, nothing, nobody, nothing, {}, {})
        back = Checkpoint.load(saved.save(tmp_path, keep=1), State).state
        found, native = back.array, array.astype(array.dtype.newbyteorder("="))
        assert (found.dtype, found.shape, found.tobytes()) == (native.dtype, native.shape, native.tobytes())

    check()


FLAT = flatten(State(2, 1, np.zeros(3, np.int64), inner=Inner(np.arange(3)), graph=sp.csr_array(np.eye(3))))


@pytest.mark.parametrize("name", [*FLAT.arrays, *FLAT.values])
def test_a_missing_field_is_named(name: str):
    arrays, values = ({k: v for k, v in part.items() if k != name} for part in (FLAT.arrays, FLAT.values))
    with pytest.raises(StateError, match=f"the field '{name}' was not written: resume with the version"):
        restore(State, arrays, values)


def test_an_unknown_field_is_named():
    with pytest.raises(StateError, match=r"State has no field 'old.memory', which was written"):
        restore(State, FLAT.arrays, {**FLAT.values, "old.memory": 3})
    common = restore(ServerState, FLAT.arrays, FLAT.values, exact=False)
    assert_same_state(common, ServerState(2, 1, np.zeros(3, np.int64)))


def test_a_field_under_its_former_name_is_read():
    """``CFLState.update_norms`` was ``moved`` in checkpoints of earlier versions."""
    state = CFLState(1, 1, np.zeros(2, np.int64), update_norms=np.array([3.0]))
    flat = flatten(state)
    earlier = {"moved" if name == "update_norms" else name: array for name, array in flat.arrays.items()}
    assert "moved" in earlier
    assert_same_state(restore(CFLState, earlier, flat.values), state)


@pytest.mark.parametrize(
    ("name", "value"),
    [("count", 1.5), ("count", True), ("flag", 1), ("number", 1), ("round", None), ("graph.shape", "3")],
)
def test_a_field_of_another_type_is_named(name: str, value: object):
    with pytest.raises(StateError, match=f"'{name}' was written as"):
        restore(State, FLAT.arrays, {**FLAT.values, name: value})


@dataclass(frozen=True)
class Listing(ServerState):
    seen: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Either(ServerState):
    seen: int | str = 0


@dataclass(frozen=True)
class Unknown(ServerState):
    seen: Nowhere | None = None  # type: ignore[name-defined]  # noqa: F821


BEGUN = (0, 1, np.zeros(2, np.int64))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (Listing(*BEGUN), r"Listing.seen: no state can hold list\[int\]; use arrays of numbers"),
        (Either(*BEGUN), r"Either.seen: no state can hold int \| str"),
        (Unknown(*BEGUN), r"Unknown: 'Nowhere', in the type of a field, is not known in its module"),
        (State(*BEGUN, array=[1]), r"State.array: is of type list; expected numpy.ndarray"),
        (State(*BEGUN, array=np.array(["a"])), r"State.array: is an array of <U1"),
        (State(*BEGUN, array=np.array([None])), r"State.array: is an array of object"),
        (State(*BEGUN, array=np.ma.masked_array([1])), r"State.array: is an array of int64"),
        (State(*BEGUN, count=None), r"State.count: is of type NoneType; expected int"),
        (State(*BEGUN, count=True), r"State.count: is of type bool"),
        (State(*BEGUN, graph=sp.csc_array(np.eye(2))), r"State.graph: is of type scipy.*csc_array"),
    ],
)
def test_what_cannot_be_written_is_named(state: ServerState, message: str):
    with pytest.raises(StateError, match=message) as raised:
        flatten(state)
    assert "\n" not in str(raised.value)


def test_numbers_of_numpy_are_numbers():
    state = State(np.int64(3), 1, np.zeros(2, np.int64), flag=np.True_, number=np.float32(0.5))
    back = through_json(state)
    assert [type(value) for value in (back.round, back.flag, back.number)] == [int, bool, float]


# As NumPy's NDArray is since version 2.5, and what ``type`` statements make.
_T = TypeVar("_T", bound=np.generic)
Arrays = TypeAliasType("Arrays", np.ndarray[Any, np.dtype[_T]], type_params=(_T,))
Perhaps = TypeAliasType("Perhaps", Arrays[np.int64] | None)
Words = TypeAliasType("Words", list[str])


@dataclass(frozen=True)
class Aliased(ServerState):
    seen: Arrays[np.float64] = field(default_factory=lambda: np.empty(0))
    perhaps: Arrays[np.float64] | None = None
    sizes: Perhaps = None


@dataclass(frozen=True)
class Spoken(ServerState):
    words: Words | None = None


def test_aliases_of_types_are_the_types_behind_them():
    for arrays in ({}, {"perhaps": np.ones(2)}, {"sizes": np.arange(3)}):
        state = Aliased(*BEGUN, seen=np.arange(2.0), **arrays)
        assert_same_state(through_json(state), state)
    with pytest.raises(StateError, match=r"Spoken.words: no state can hold .*Words"):
        flatten(Spoken(*BEGUN))


@dataclass(frozen=True)
class Growing(ServerState):
    seen: NDArray[np.bool_] = per_client(False)
    gain: NDArray[np.float64] = per_model(np.nan)
    visits: NDArray[np.int64] = per_client(-1)


def test_arrays_grow_with_clients_and_models():
    state = Growing(0, 2, np.zeros(3, np.int64))
    assert (state.seen.tolist(), state.visits.tolist(), len(state.gain)) == ([False] * 3, [-1] * 3, 2)
    assert (state.seen.dtype, state.visits.dtype, state.gain.dtype) == (bool, np.int64, np.float64)
    state = replace(state, seen=np.ones(3, bool), gain=np.array([1.0, 2]))
    grown = replace(state, models=3, assignment=np.zeros(5, np.int64))
    assert grown.seen.tolist() == [True] * 3 + [False] * 2
    assert grown.gain[:2].tolist() == [1, 2]
    assert np.isnan(grown.gain[2])
    assert state.seen.tolist() == [True] * 3


# --- a method of one's own, in a module that rayfl has never heard of ---------------------------------------


@dataclass(frozen=True)
class Visit:
    last: NDArray[np.int64]
    total: int = 0


@dataclass(frozen=True)
class VisitsState(ServerState):
    """How often each client took part."""

    visits: NDArray[np.int64] = per_client(0)
    visit: Visit | None = None


class Visits(Algorithm[VisitsState]):
    """FedAvg that counts."""

    name: Literal["visits"] = "visits"

    def begin(self, setup: Setup) -> VisitsState:
        return VisitsState(0, 1, np.zeros(setup.clients, np.int64))

    def end(self, setup: Setup, state: VisitsState, plan: Any, report: Any) -> VisitsState:
        visits = state.visits.copy()
        visits[plan.cohort] += 1
        visit = Visit(plan.cohort, int(visits.sum()))
        return replace(super().end(setup, state, plan, report), visits=visits, visit=visit)


class Lists(Visits):
    """Remembers what it cannot."""

    def begin(self, setup: Setup) -> Any:
        return Listing(0, 1, np.zeros(setup.clients, np.int64))


@pytest.fixture
def counting(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings of a run whose driver takes :class:`Visits` in place of FedAvg."""
    usual = Driver.__init__

    def begin(self: Driver, *args: Any, **kwargs: Any) -> None:
        usual(self, *args, **kwargs)
        self.algorithm = Visits()

    monkeypatch.setattr(Driver, "__init__", begin)
    return {**settings, "algorithm": "fedavg", "rounds": 4, "training": {"participation": 0.5}}


def test_a_method_of_ones_own_goes_on_with_its_state(counting: dict[str, Any]):
    def after(settings: dict[str, Any], stop: int | None) -> VisitsState:
        config = load(settings)
        directory = RunDirectory.create(config)
        stages, host = build(config)
        begun: list[int] = []

        def watch(event: RunEvent) -> None:
            if isinstance(event, BlockDone):
                begun.append(event.round)

        backend = InlineBackend()
        try:
            driver = Driver(config, stages, backend, directory, host, watch, lambda: stop in begun)
            with pytest.raises(Interrupted) if stop is not None else contextlib.nullcontext():
                driver.run()
        finally:
            backend.close()
        if stop is not None:
            resume(directory.path)
        found = checkpoints(directory.path / "checkpoints")
        return Checkpoint.load(found[-1], VisitsState).state

    whole, resumed = after(counting, None), after(counting, 2)
    assert whole.visits.sum() == whole.visit.total > 0
    assert whole.round == 4
    assert_same_state(whole, resumed)


def test_the_state_in_brackets_makes_no_class_of_its_own():
    """Pydantic would make one, which a method sent to another process by value could not find there."""
    assert Algorithm[VisitsState] is Algorithm
    assert Visits.__bases__ == (Algorithm,)


def test_a_state_that_cannot_be_written_is_refused_before_the_first_round(
    counting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Visits, "begin", Lists.begin)
    with pytest.raises(RayflError, match=r"Listing.seen: no state can hold list"):
        rayfl.run(counting)

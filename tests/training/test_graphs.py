"""Recorded steps on a CPU: the same bits as the ordinary engine, for every kind of layer and option.

Two recorders stand in for CUDA graphs. :class:`Again` calls the function once more, whatever there is, so all
of the engine runs. :class:`Tape` is as strict as a graph: it writes down every operation on tensors and the
tensors themselves, and a replay repeats the operations on the memory of back then, without any Python of the
step. What a step took from anywhere but its fixed memory would be of yesterday.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rayfl.data import Samples
from rayfl.models import MODELS, Model, ModelSpec
from rayfl.training import NO_TERMS, LocalWork, Terms, TrainedBlock
from rayfl.training import engine as engines
from rayfl.training.batched import (
    BatchedEngine,
    Unsupported,
    fused,
    graphs,
    layers,
    network,
    parameters,
    recurrent,
)
from rayfl.training.batched.graphs import CudaRecorder, FixedMemory, Recorder
from rayfl.training.batched.network import BatchedNetwork
from rayfl.training.batched.reading import read
from rayfl.training.batched.vmap import VmapNetwork
from rayfl.training.batches import Batches
from rayfl.training.engine import choose_engine, open_engine, try_recording
from rayfl.training.loop import LoopEngine
from tests.training import fused_cell
from tests.training.bounds import Truth
from tests.training.conftest import make_samples, stepwise
from tests.training.test_recurrent import texts
from tests.training.test_terms import COMBINED, EXTRAS, OPTIONS, make_terms, make_work

CPU = torch.device("cpu")
PLAIN = LocalWork(epochs=6, batch_size=4, lr=0.02)
SIZES = [11, 6, 3, 15, 8, 4, 4]
MODEL_CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "linear": ("linear", {}, (20,)),
    "mlp": ("mlp", {"hidden": [9]}, (1, 4, 4)),
    "lenet5": ("lenet5", {}, (1, 28, 28)),
    "lenet5-bn": ("lenet5", {"batch_norm": True}, (1, 28, 28)),
    "leaf_cnn": ("leaf_cnn", {}, (1, 12, 12)),
    "resnet9": ("resnet9", {}, (3, 32, 32)),
    "mthfl_cnn": ("mthfl_cnn", {}, (3, 32, 32)),
    "subfedavg_cnn": ("subfedavg_cnn", {}, (1, 28, 28)),
    "averaging": ("averaging", {}, (1, 8, 8)),
    "dropping": ("dropping", {}, (1, 8, 8)),
    "lstm": ("lstm", {"depth": 2, "embedding": 5, "hidden": 6}, (5,)),
}
LARGE = ("leaf_cnn", "resnet9", "mthfl_cnn")


class Averaging(Model):
    """Has the layers that no model of the package has."""

    name: str = "averaging"

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        return {"conv": ("0",), "norm": ("4",), "out": ("5",)}

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        pool, flat, norm = nn.AvgPool2d(3, stride=2, padding=1), nn.Flatten(), nn.BatchNorm1d(27)
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), pool, flat, norm, nn.Linear(27, classes))


class Dropping(Model):
    """Drops pixels and features."""

    name: str = "dropping"

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        return {"conv": ("0",), "inner": ("4",), "out": ("6",)}

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        conv, inner = nn.Conv2d(1, 3, 3, stride=2), nn.Linear(27, 8)
        some, half = nn.Dropout(0.3), nn.Dropout(0.5)
        return nn.Sequential(conv, nn.Tanh(), some, nn.Flatten(), inner, half, nn.Linear(8, classes))


class Grouped(Model):
    """Convolutions with groups, strides, dilation and without bias."""

    name: str = "grouped"

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        return {"first": ("0",), "second": ("2",), "out": ("4",)}

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        first = nn.Conv2d(2, 6, 3, stride=2, padding=2, groups=2)
        second = nn.Conv2d(6, 3, 2, dilation=2, groups=3, bias=False)
        return nn.Sequential(first, nn.ReLU(), second, nn.Flatten(), nn.Linear(27, classes))


PARTS = {**MODELS, "averaging": Averaging, "dropping": Dropping, "grouped": Grouped}


class Again:
    """Calls the function."""

    def __init__(self) -> None:
        self.warmed = self.recorded = self.forgotten = 0

    def warm_up(self, function: Callable[[], None]) -> None:
        self.warmed += 1
        function()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        return function

    def forget(self) -> None:
        self.forgotten += 1


class _Writing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.operations.append((func, args, kwargs or {}, tensors))
        return result


class Tape(Again):
    """Repeats the operations on the tensors of the recording."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        with _Writing() as writing:
            function()  # which counts as the first replay
        replays = 0

        def replay() -> None:
            nonlocal replays
            replays += 1
            for func, args, kwargs, before in writing.operations if replays > 1 else ():
                after = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, torch.Tensor)]
                for old, new in zip(before, after, strict=True):
                    if old.data_ptr() != new.data_ptr():  # neither a view nor in place
                        old.copy_(new)

        return replay


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers do as they do on a GPU: without compiled loops, which write behind PyTorch's back."""
    for module in (layers, parameters, fused, network, recurrent):
        monkeypatch.setattr(module, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(recurrent, "_cell", fused_cell.cell)
    monkeypatch.setattr(recurrent, "_cell_backward", fused_cell.cell_backward)


def make_case(case: str) -> tuple[ModelSpec, Samples, list[int]]:
    name, config, shape = MODEL_CASES.get(case, (case, {}, (2, 8, 8)))
    if name == "lstm":
        return ModelSpec.of(PARTS[name](**config), shape, 12, 0), texts(shape[0], 12), SIZES
    samples = make_samples(shape, 60, 5)
    return ModelSpec.of(PARTS[name](**config), shape, 5, 0), samples, [4, 2] if name in LARGE else SIZES


def arguments(
    spec: ModelSpec, sizes: Sequence[int], round: int
) -> tuple[int, range, list[Any], torch.Tensor]:
    """Round, clients, their samples and start models."""
    rng = np.random.default_rng(round)
    indices = [rng.choice(60, n, replace=False) for n in sizes]
    start = torch.from_numpy(np.tile(spec.initial(), (len(sizes), 1)))
    return round, range(10, 10 + len(sizes)), indices, start


def rounds(
    engine: Any, work: LocalWork, sizes: Sequence[int], terms: Terms = NO_TERMS, count: int = 2
) -> list[TrainedBlock]:
    """Several rounds, each from the initial models with other samples."""
    found = []
    for round in range(count):
        found.append(engine.train(work, *arguments(engine.spec, sizes, round), terms))
        assert not found[-1].failures
    return found


def assert_same_bits(one: Sequence[TrainedBlock], other: Sequence[TrainedBlock]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.rows, b.rows)
        assert a.losses.tolist() == b.losses.tolist()
        assert a.steps.tolist() == b.steps.tolist()
        assert (a.snapshots is None) == (b.snapshots is None)
        if a.snapshots is not None and b.snapshots is not None:
            assert torch.equal(a.snapshots, b.snapshots)


def compare(
    case: str, recorder: Recorder, work: LocalWork, names: tuple[str, ...] = (), count: int = 2
) -> BatchedEngine:
    """The engine with recordings beside the ordinary one; returned after its rounds."""
    spec, samples, sizes = make_case(case)
    batches, terms = Batches(samples, CPU), make_terms(names, spec, sizes)
    ordinary, recording = (stepwise(spec, batches, 0, None, 3) for _ in range(2))
    recording.record(recorder)
    plain = rounds(ordinary, work, sizes, terms, count)
    assert (plain[0].rows[0] != torch.from_numpy(spec.initial())).any()
    assert_same_bits(rounds(recording, work, sizes, terms, count), plain)
    assert recording.recorded is not None
    return recording


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", [case for case in MODEL_CASES if case not in LARGE])
def test_every_kind_of_layer(case: str, as_on_a_gpu: None) -> None:
    recorder = Again()
    engine = compare(case, recorder, replace(PLAIN, momentum=0.5))
    assert engine.recorded is not None
    assert engine.recorded.replays > recorder.recorded > 0


def test_the_cases_have_every_kind_of_layer() -> None:
    def kinds(layer: layers.Layer) -> set[type]:
        inside = [*getattr(layer, "layers", ()), *filter(None, [getattr(layer, "inner", None)])]
        return {type(layer)}.union(*map(kinds, inside))

    found: set[type] = set()
    for name, config, shape in MODEL_CASES.values():
        network = BatchedNetwork(ModelSpec.of(PARTS[name](**config), shape, 5, 0))
        leaves = read(network.spec).leaves  # also those that are parts of fused ones
        found |= kinds(network.root) | {type(leaf.layer) for leaf in leaves}

    def ends(kind: type) -> set[type]:
        return set().union(*map(ends, kind.__subclasses__())) or {kind}

    # Those that make one sample of a text are tried with the networks of tests/models/test_own_texts.py.
    of_texts = {"MeanOfWords", "WordAt"}
    assert {kind.__name__ for kind in ends(layers.Layer) - found} == of_texts


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", [case for case in MODEL_CASES if case not in LARGE])
def test_a_step_is_a_function_of_its_fixed_memory_alone(case: str, as_on_a_gpu: None) -> None:
    """Without momentum, where layers write to the models themselves; with it below, for every option."""
    engine = compare(case, Tape(), PLAIN)
    assert engine.recorded is not None
    assert engine.recorded.replays > 4


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", [*MODEL_CASES, "grouped"])
def test_what_layers_do_on_a_gpu_equals_the_loop(case: str, as_on_a_gpu: None) -> None:
    """Convolutions of all clients in one, rows of embeddings added up in order."""
    spec, samples, _ = make_case(case)
    work = replace(PLAIN, epochs=1 if case in LARGE else 2, momentum=0.5)
    sizes = [2, 1] if case == "resnet9" else [5, 2] if case in LARGE else [6, 3, 2, 7, 4]
    given = arguments(spec, sizes, 0)
    truth = Truth.of(spec, Batches(samples, CPU), 0, work, *given)
    truth.check(BatchedEngine(spec, Batches(samples, CPU), 0).train(work, *given))


@pytest.mark.parametrize("need_input", [True, False])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [((3, 3), (1, 1), (1, 1), (1, 1)), ((5, 2), (2, 3), (2, 0), (1, 2)), ((1, 1), (2, 2), (0, 0), (1, 1))],
)
def test_convolutions_by_columns(
    kernel: layers.Pair, stride: layers.Pair, padding: layers.Pair, dilation: layers.Pair,
    need_input: bool, as_on_a_gpu: None,
) -> None:  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*shape, generator=draw) for shape in ((3, 4, 2, 9, 8), (3, 5, 2, *kernel)))
    bias, settings = torch.randn(3, 5, generator=draw), (stride, padding, dilation)
    inputs = [tensor.double().requires_grad_() for tensor in (x, w, bias)]
    exact = torch.stack([torch.conv2d(*(each[c] for each in inputs), *settings) for c in range(3)])
    dy = torch.randn(exact.shape, generator=draw)
    slopes = torch.autograd.grad(exact, inputs, dy.double())
    conv = layers.Conv2d(*settings, 1, 2, kernel)
    before = w.clone(), bias.clone()
    conv.bind(
        {
            "weight": parameters.Parameter(w, parameters.Sgd(1.0)),
            "bias": parameters.Parameter(bias, parameters.Sgd(1.0)),
        },
        {},
    )
    samples_first = x.transpose(0, 1).contiguous().transpose(0, 1)  # not contiguous, as from another layer
    y = conv.forward(samples_first, layers.Step(()))
    dx = conv.backward(dy, need_input)
    assert conv._columns is not None
    torch.testing.assert_close(y.double(), exact.detach(), rtol=1e-5, atol=1e-5)
    assert (dx is not None) == need_input
    found = [dx, before[0] - w, before[1] - bias]
    for one, other in zip(found[not need_input :], slopes[not need_input :], strict=True):
        assert one is not None
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", LARGE)
def test_large_models(case: str, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "WARM_UPS", 1)
    engine = compare(case, Tape(), replace(PLAIN, momentum=0.5, epochs=3), count=1)
    assert engine.recorded is not None
    assert engine.recorded.replays > 1


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("option", "extra"),
    [
        # With convolutions those that combine others; each one by itself is slow.
        pytest.param(option, extra, marks=[pytest.mark.slow] * (extra == "both" and option not in COMBINED))
        for option in OPTIONS
        for extra in EXTRAS
    ],
)
def test_every_option(option: str, extra: str, as_on_a_gpu: None) -> None:
    changes, names = OPTIONS[option]
    if "inner_lr" in changes and "momentum" in EXTRAS[extra]:
        return
    case = "lenet5-bn" if extra == "both" else "mlp"
    work = make_work(PLAIN, make_case(case)[0], {**changes, **EXTRAS[extra]})
    engine = compare(case, Tape(), work, names)
    assert engine.recorded is not None
    if "visits" not in names and "lr_alpha" not in changes:  # hardly any step has its like
        assert engine.recorded.replays > 4


@pytest.mark.parametrize("recorder", [Again, Tape])
def test_rates_that_fall_inside_a_round_come_up_again_in_the_next(
    recorder: Callable[[], Recorder], as_on_a_gpu: None
) -> None:
    spec, samples, _ = make_case("mlp")
    ordinary, recording = (stepwise(spec, Batches(samples, CPU), 0) for _ in range(2))
    recording.record(recorder())
    work = replace(PLAIN, epochs=2, lr_alpha=0.2)
    assert_same_bits(rounds(recording, work, [8, 8, 8], count=6), rounds(ordinary, work, [8, 8, 8], count=6))
    assert recording.recorded is not None
    assert recording.recorded.replays == (6 - graphs.WARM_UPS) * 4  # each of four rates, once a round


@pytest.mark.parametrize("ends", [(4, 4, 7), (7, 4, 4), (4, 7, 4)])
def test_passes_of_per_fedavg_whose_kinds_differ(ends: tuple[int, int, int], as_on_a_gpu: None) -> None:
    """The second pass of a step finds its models where the first one left them, replayed or not."""
    spec, samples, _ = make_case("mlp")
    batches, rng = Batches(samples, CPU), np.random.default_rng(0)
    # The first passes are always alike, and soon replayed; the second ones are not, and run.
    visits = [[rng.integers(0, 8, n) for k in range(24) for n in (4, ends[k % 3])] for _ in range(2)]
    work, terms = replace(PLAIN, inner_lr=0.05), Terms(visits=visits)
    ordinary, recording = (stepwise(spec, batches, 0) for _ in range(2))
    recording.record(Tape())
    assert_same_bits(rounds(recording, work, [8, 8], terms), rounds(ordinary, work, [8, 8], terms))


def test_blocks_of_other_sizes_share_recordings_until_one_is_larger(as_on_a_gpu: None) -> None:
    spec, samples, _ = make_case("mlp")
    batches, work = Batches(samples, CPU), replace(PLAIN, epochs=4)
    ordinary, recording = (stepwise(spec, batches, 0) for _ in range(2))
    recorder = Tape()
    recording.record(recorder)
    recorded = []
    for sizes in ([8, 8, 8], [8, 8], [8, 8, 8], [8] * 5, [8, 8, 8]):
        assert_same_bits(rounds(recording, work, sizes), rounds(ordinary, work, sizes))
        recorded.append(recorder.recorded)
    # Three clients; two; three are known; five move everything; three must be recorded anew.
    assert recorded == [1, 2, 2, 3, 4]


def test_other_work_has_recordings_of_its_own(as_on_a_gpu: None) -> None:
    spec, samples, sizes = make_case("mlp")
    ordinary, recording = (stepwise(spec, Batches(samples, CPU), 0) for _ in range(2))
    recording.record(Tape())
    terms = make_terms(("offset", "mask"), spec, sizes)
    works: list[tuple[LocalWork, Terms]] = [
        (PLAIN, NO_TERMS),
        (replace(PLAIN, lr=0.01), NO_TERMS),
        (replace(PLAIN, momentum=0.5), NO_TERMS),
        (PLAIN, terms),
        (PLAIN, Terms(offset=terms.offset)),
        (replace(PLAIN, proximal=0.5), NO_TERMS),
        (PLAIN, NO_TERMS),
    ]
    for work, own in works:
        assert_same_bits(rounds(recording, work, sizes, own), rounds(ordinary, work, sizes, own))


def test_larger_batches_in_later_steps_move_no_memory(as_on_a_gpu: None) -> None:
    """What dropout multiplies by has room for the largest batch before anything is recorded."""
    spec, samples, _ = make_case("dropping")
    ordinary, recording = (stepwise(spec, Batches(samples, CPU), 0) for _ in range(2))
    recording.record(Tape())
    lengths = [2] * 5 + [4] * 5 + [2] * 5
    terms = Terms(visits=[[np.arange(length) for length in lengths] for _ in range(3)])
    found, expected = (rounds(engine, PLAIN, [8, 8, 8], terms) for engine in (recording, ordinary))
    assert_same_bits(found, expected)
    assert recording.recorded is not None
    assert recording.recorded.replays > 10


def test_recordings_of_former_rates_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST", 3)
    spec, samples, _ = make_case("linear")
    recording, ordinary = (stepwise(spec, Batches(samples, CPU), 0) for _ in range(2))
    recorder = Again()
    recording.record(recorder)
    for k in range(8):  # one kind of step each
        work = replace(PLAIN, lr=0.1 / (1 + k))
        assert_same_bits(rounds(recording, work, [4, 4]), rounds(ordinary, work, [4, 4]))
    assert recorder.recorded == 8
    # More kinds than there is room for, all of one work: the rest is run as it is.
    before = recorder.recorded
    recording.recorded.release()  # type: ignore[union-attr]
    assert_same_bits(rounds(recording, PLAIN, SIZES), rounds(ordinary, PLAIN, SIZES))
    assert recorder.recorded == before + 3


@pytest.mark.parametrize("case", ["mlp", "dropping"])
def test_vmap_is_recorded_too(case: str) -> None:
    spec, samples, sizes = make_case(case)
    ordinary, recording = (stepwise(spec, Batches(samples, CPU), 0, VmapNetwork(spec)) for _ in range(2))
    recording.record(Again())
    assert_same_bits(rounds(recording, PLAIN, sizes), rounds(ordinary, PLAIN, sizes))
    assert recording.recorded is not None
    assert recording.recorded.replays > 0


def test_a_recorded_step_of_vmap_is_a_function_of_its_fixed_memory_alone() -> None:
    """BatchNorm's counter, which is no part of the model, lies there too, and padding is left out."""
    spec, samples, sizes = make_case("lenet5-bn")
    batches = Batches(samples, CPU)
    networks = VmapNetwork(spec), VmapNetwork(spec)
    ordinary, recording = (stepwise(spec, batches, 0, each) for each in networks)
    recording.record(Tape())
    for round in range(2):
        blocks = [engine.train(PLAIN, *arguments(spec, sizes, round)) for engine in (ordinary, recording)]
        assert_same_bits([blocks[0]], [blocks[1]])
        counters = [
            {name: int(b) for name, b in network._extra_on_device.items() if "num_batches" in name}
            for network in networks
        ]
        assert counters[0] == counters[1]
        assert set(counters[0].values()) == {int(blocks[0].steps.max())}
    assert recording.recorded is not None
    assert recording.recorded.replays > 4


# --- what goes wrong -------------------------------------------------------------------------------------


class Refusing(Again):
    """Like a device that has something against the step."""

    problem: Exception = RuntimeError("operation not permitted when stream is capturing\nand more")

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        super().record(function)
        raise self.problem


def test_what_cannot_be_recorded_is_run_and_said() -> None:
    spec, samples, sizes = make_case("mlp")
    recording, ordinary = (stepwise(spec, Batches(samples, CPU), 0, None, 3) for _ in range(2))
    recorder = Refusing()
    recording.record(recorder)
    with pytest.warns(UserWarning, match=r"without CUDA graphs: RuntimeError: operation not permitted.*ing$"):
        found = rounds(recording, PLAIN, sizes)
    assert_same_bits(found, rounds(ordinary, PLAIN, sizes))
    assert recorder.recorded == 1
    assert recording.recorded is None


@pytest.mark.parametrize("words", ["CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling"])
def test_a_recording_without_memory_is_tried_with_half_as_many_clients(words: str) -> None:
    class Full(Again):
        def record(self, function: Callable[[], None]) -> Callable[[], None]:
            if recording.clients_per_call > 2:
                try:
                    raise torch.OutOfMemoryError("no memory") if "CUDA" in words else RuntimeError(words)
                except Exception:
                    raise RuntimeError(f"in capture_end: {words}")  # noqa: B904 (as a context manager would)
            return super().record(function)

    spec, samples, _ = make_case("mlp")
    recording, ordinary = (stepwise(spec, Batches(samples, CPU), 0, None, n) for n in (8, 2))
    recording.record(Full())
    found = rounds(recording, PLAIN, [8] * 8)
    assert recording.clients_per_call == 2
    assert recording.recorded is not None
    assert recording.recorded.replays > 0
    assert_same_bits(found, rounds(ordinary, PLAIN, [8] * 8))


def test_a_client_that_diverges_fails_alone() -> None:
    spec, samples, _ = make_case("mlp")
    engine = BatchedEngine(spec, Batches(samples, CPU), 0)
    engine.record(Again())
    start = torch.from_numpy(np.tile(spec.initial(), (3, 1)))
    start[1] *= 1e25
    indices = [np.arange(8), np.arange(8, 16), np.arange(16, 24)]
    block = engine.train(PLAIN, 0, range(3), indices, start)
    assert list(block.failures) == [1]
    assert "smaller training.lr" in block.failures[1]
    assert torch.equal(block.rows[1], start[1])
    assert engine.recorded is not None
    ordinary = stepwise(spec, Batches(samples, CPU), 0)
    assert torch.equal(ordinary.train(PLAIN, 0, range(3), indices, start).rows, block.rows)


# --- fixed memory, and the trial -------------------------------------------------------------------------


def test_fixed_memory_moves_only_when_it_grows() -> None:
    memory = FixedMemory(CPU)
    first = memory.take("x", (3, 2), torch.float32)
    assert memory.take("x", (2, 2), torch.float32).data_ptr() == first.data_ptr()
    assert memory.take("y", (2,), torch.int64).data_ptr() != first.data_ptr()
    assert memory.moves == 2
    assert memory.copy("x", torch.arange(4.0).view(2, 2)).tolist() == [[0, 1], [2, 3]]
    assert first.flatten()[:4].tolist() == [0, 1, 2, 3]
    rows = memory.gather("x", torch.arange(6.0).view(3, 2), torch.tensor([2, 0]))
    assert rows.tolist() == [[4, 5], [0, 1]]
    assert memory.moves == 2
    memory.take("x", (7,), torch.float32)
    assert memory.moves == 3


@pytest.mark.parametrize("case", ["linear", "lenet5-bn", "lstm"])
def test_the_trial_agrees_with_what_is_right(case: str, as_on_a_gpu: None) -> None:
    assert try_recording(make_case(case)[0], BatchedEngine, CPU, Tape()) == 0


class Stale(Again):
    """A recording that misses a change: it replays the step as of its first samples."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        inputs = cells["inputs"].cell_contents
        old = inputs.clone()

        def replay() -> None:
            inputs.copy_(old)
            function()

        return replay


def test_the_trial_finds_a_recording_of_yesterday() -> None:
    assert try_recording(make_case("linear")[0], BatchedEngine, CPU, Stale()) > 10 * engines.TOLERANCE


def test_the_trial_refuses_what_never_replays_or_stops_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_case("linear")[0]
    with pytest.raises(UserWarning, match="without CUDA graphs"):
        try_recording(spec, BatchedEngine, CPU, Refusing())
    monkeypatch.setattr(graphs, "WARM_UPS", 1000)
    with pytest.raises(Unsupported, match="no step was replayed"):
        try_recording(spec, BatchedEngine, CPU, Again())


class FakeCuda:
    """What :func:`open_engine` sees of a GPU."""

    type = "cuda"


def opened(monkeypatch: pytest.MonkeyPatch, recorder: Any, graphs: bool = True, **model: Any) -> Any:
    """The engine as it is opened on a GPU, which is a CPU really."""
    spec = ModelSpec.of(MODELS["mlp"](hidden=[5], **model), (6,), 3, 0)
    batches = Batches(make_samples((6,), uint8=False), CPU)
    batches.device = FakeCuda()  # type: ignore[assignment]
    monkeypatch.setattr(engines, "CudaRecorder", lambda device: recorder)
    example = engines._trial_batches
    monkeypatch.setattr(engines, "_trial_batches", lambda spec, device, seed=0: example(spec, CPU, seed))
    monkeypatch.setattr(
        engines,
        "ENGINES",
        {"batched": lambda s, b, seed, precision: BatchedEngine(s, Batches(b.samples, CPU), seed)},
    )
    monkeypatch.setattr(
        engines,
        "LoopEngine",
        lambda s, b, seed, precision="float32": LoopEngine(s, Batches(b.samples, CPU), seed),
    )
    return open_engine("batched", spec, batches, 0, graphs)


def test_graphs_are_used_where_the_trial_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, why = opened(monkeypatch, Again())
    assert why == "batched on cuda with graphs"
    assert engine.recorded is not None


@pytest.mark.parametrize(
    ("recorder", "why"),
    [
        (Refusing(), "batched on cuda without graphs: UserWarning: training goes on without CUDA graphs: R"),
        (Stale(), "away from the engine itself in a trial"),
    ],
)
def test_graphs_are_left_out_where_it_does_not(
    monkeypatch: pytest.MonkeyPatch, recorder: Recorder, why: str
) -> None:
    engine, said = opened(monkeypatch, recorder)
    assert why in said
    assert "\n" not in said
    assert isinstance(engine, BatchedEngine)
    assert engine.recorded is None


def test_graphs_may_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, why = opened(monkeypatch, Again(), graphs=False)
    assert (engine.recorded, why) == (None, "batched on cuda without graphs, as set")


def test_dropout_is_recorded_without_a_trial_against_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that draws other numbers."""
    monkeypatch.setattr(engines, "_full_trial", None)  # not called
    engine, why = opened(monkeypatch, Again(), dropout=0.5)
    assert why == "batched on cuda with graphs"
    assert engine.recorded is not None


def test_an_engine_that_errs_on_the_gpu_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original = BatchedNetwork.step
    monkeypatch.setattr(
        BatchedNetwork, "step", lambda self, x, y, w, step: original(self, x, y, w * 1.01, step)
    )
    engine, why = opened(monkeypatch, Again())
    assert isinstance(engine, LoopEngine)
    assert why.startswith("loop on cuda, not batched:")
    assert "away from the plain loop" in why


def test_on_a_cpu_nothing_is_tried_or_recorded() -> None:
    spec, samples, _ = make_case("mlp")
    assert choose_engine(spec)[0] == "batched"
    engine, why = open_engine("batched", spec, Batches(samples, CPU), 0)
    assert isinstance(engine, BatchedEngine)
    assert (engine.recorded, why) == (None, "batched on cpu")


# --- the recorder of a GPU, on a pretended one -----------------------------------------------------------


class PretendedCuda:
    """The parts of ``torch.cuda`` that a recorder calls: keeps an account of them, and of the stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.current: Any = PretendedStream(self, "own")
        self.fails = ""
        pools = iter(range(100))
        for name, function in {
            "Stream": lambda device: PretendedStream(self, "side"),
            "current_stream": lambda device: self.current,
            "set_stream": lambda stream: setattr(self, "current", stream),
            "synchronize": lambda device: self.calls.append("synchronize"),
            "graph_pool_handle": lambda: next(pools),
            "CUDAGraph": lambda: SimpleNamespace(
                replay=lambda: self.calls.append(f"replay on {self.current}")
            ),
            "stream": self.stream,
            "graph": self.graph,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, graph: Any, pool: int, stream: Any, capture_error_mode: str) -> Iterator[None]:
        before, self.current = self.current, stream
        self.calls.append(f"capture on {stream} into pool {pool}, {capture_error_mode}")
        yield
        if self.fails:  # as PyTorch's, which then leaves the stream as it is
            raise RuntimeError(self.fails)
        self.current = before


class PretendedStream:
    def __init__(self, cuda: PretendedCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def __str__(self) -> str:
        return self.name

    def wait_stream(self, other: PretendedStream) -> None:
        self.cuda.calls.append(f"{self} waits for {other}")


def test_captures_are_on_a_side_stream_and_replays_on_the_current(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = PretendedCuda(monkeypatch)
    recorder = CudaRecorder(CPU)

    def function() -> None:
        cuda.calls.append(f"step on {cuda.current}")

    recorder.warm_up(function)
    assert cuda.calls == ["side waits for own", "step on side", "own waits for side"]
    cuda.calls.clear()
    replay = recorder.record(function)
    assert cuda.calls == ["capture on side into pool 0, thread_local", "step on side"]
    cuda.calls.clear()
    replay()
    recorder.forget()
    recorder.record(function)
    assert cuda.calls[:3] == ["replay on own", "synchronize", "capture on side into pool 1, thread_local"]
    assert str(cuda.current) == "own"


def test_after_a_capture_that_fails_the_stream_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = PretendedCuda(monkeypatch)
    recorder = CudaRecorder(CPU)
    cuda.fails = "operation failed due to a previous error during capture"
    with pytest.raises(RuntimeError, match="previous error"):
        recorder.record(lambda: None)
    assert str(cuda.current) == "own"

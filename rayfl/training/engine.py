"""Training engines by name, and the choice among them."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import torch

from rayfl.data import Samples
from rayfl.errors import ConfigError
from rayfl.models import ModelSpec
from rayfl.training.batched.engine import BatchedEngine
from rayfl.training.batched.graphs import WARM_UPS, CudaRecorder, Recorder
from rayfl.training.batched.reading import Unsupported
from rayfl.training.batched.vmap import VmapEngine
from rayfl.training.batches import Batches
from rayfl.training.forward import Forward
from rayfl.training.guides import Guides, Seen, watching
from rayfl.training.loop import LoopEngine
from rayfl.training.precision import Precision, check_device
from rayfl.training.work import NO_TERMS, Indices, LocalWork, Terms, TrainedBlock

TOLERANCE = 1e-3
"""Largest difference allowed between an engine and the plain loop in the trial, relative to the update."""

TRIALS = 3
"""Number of trials, one of which must agree. A ReLU input within rounding of zero, or two equal pixels of a
pooling window, may be resolved differently by another engine; a large network then ends up to a percent away.
It is very unlikely that this happens in all trials, whereas a fault shows in each."""

COARSER = 4
"""In reduced precision an engine may be this many times as far from the plain loop in float32 as the plain
loop in that precision is. Faults show in the trial in float32, which is always made as well."""


class Engine(Protocol):
    """Trains the clients of a block, each from its own start model on its own samples.

    The result for a client depends on the work, the round, its id, its samples, its start model and its
    terms. Up to rounding it depends neither on the other clients of the block nor on the engine; its last bit
    may depend on which clients train in the same call. (If a ReLU input is within rounding of zero the
    gradient may go either way: ResNet-9 with a loss of 30 ended 7e-7 or 3e-3 of its update away from float64,
    in all engines.) Runs are equal bit for bit on any number of workers because blocks depend only on the
    config and the data, and calls only on the block, the model and the device. The one exception is a GPU
    that runs out of memory, where calls get smaller.
    """

    spec: ModelSpec
    batches: Batches
    forward: Forward
    """Computes the outputs of models for tests."""

    def train(
        self,
        work: LocalWork,
        round: int,
        clients: Sequence[int],
        indices: Indices,
        start: torch.Tensor,
        terms: Terms = NO_TERMS,
    ) -> TrainedBlock:
        """Train B clients.

        Args:
            work: what to do.
            round: the round (0-based): part of the key of all randomness.
            clients: their ids.
            indices: each client's training samples.
            start: start models ``(B, P)`` float32; left as they are. One model may be expanded to all.
            terms: per-client offsets, masks, visits and guides.

        Raises:
            ValueError: if the terms do not fit this block, or ``work.frozen`` does not fit the model.
        """

    def one_by_one(self, clients: int) -> bool:
        """Whether a block of this many clients trains one by one, so that splitting it changes no bit."""


class Opener(Protocol):
    """An engine's class."""

    def __call__(
        self, spec: ModelSpec, batches: Batches, seed: int, *, precision: Precision = "float32"
    ) -> Engine:
        """The engine for a model and its samples, with the run's seed."""


ENGINES: dict[str, Opener] = {
    "batched": BatchedEngine,
    "vmap": VmapEngine,
    "loop": LoopEngine,
}
"""From the fastest to the one that supports every model."""


def choose_engine(spec: ModelSpec, wanted: str = "auto", precision: Precision = "float32") -> tuple[str, str]:
    """Choose an engine: ``wanted``, or the first of :data:`ENGINES` that covers model and precision.

    In a short trial the engine must agree with the plain loop. The choice depends only on the model, never on
    timings or on the threads of this process, so that it is the same in every run; the trial uses one thread,
    as a run does.

    Returns:
        The engine's name, and the reason for the choice in one line.

    Raises:
        ConfigError: if the wanted engine does not cover the model, or the model fails in this precision.
    """
    if wanted == "loop" and precision == "float32":
        return wanted, "as set"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if precision != "float32":
            _check_precision(spec, precision)
        return ("loop", "as set") if wanted == "loop" else _first_that_agrees(spec, wanted, precision)
    finally:
        torch.set_num_threads(threads)


def _check_precision(spec: ModelSpec, precision: Precision) -> None:
    """Check that a network trains in reduced precision, which not every operation supports.

    Raises:
        ConfigError: if it fails.
    """
    batches, work = _trial_batches(spec, torch.device("cpu")), LocalWork(epochs=1, batch_size=3, lr=1e-2)
    try:
        _trained_models(LoopEngine(spec, batches, 0), work, 0)
    except Unsupported:
        return  # it fails in float32, too; the run will report the client and the error
    try:
        _trained_models(LoopEngine(spec, batches, 0, precision=precision), work, 0)
    except Unsupported as problem:
        message = f"the network does not train in {precision}: {problem}"
        raise ConfigError("training.precision", message, "use float32") from None


_MOST_LETTERS = 120
"""Largest length of an error message quoted in a reason: torch.func writes whole paragraphs."""


def _short(text: str) -> str:
    return textwrap.shorten(text.split("\n")[0], _MOST_LETTERS, placeholder=" ...")


def _first_that_agrees(spec: ModelSpec, wanted: str, precision: Precision) -> tuple[str, str]:
    reasons = []
    for name in ENGINES if wanted == "auto" else (wanted,):
        if name == "loop":
            break
        try:
            gap, apart = _full_trial(spec, name, precision)
        except Unsupported as problem:
            reasons.append(f"not {name}: {_short(str(problem))}")
        except Exception as problem:  # a model that torch.func cannot vectorise fails in its own ways
            reasons.append(f"not {name}: {_short(f'{type(problem).__name__}: {problem}')}")
        else:
            if gap <= TOLERANCE:
                slow = [f"torch.func does {', '.join(apart)} for one client after another"] if apart else []
                return name, "; ".join(["a trial agrees with the plain loop", *slow, *reasons])
            reasons.append(f"not {name}: {gap:.0e} away from the plain loop in a trial")
    if wanted != "auto":
        remedy = "training.engine=auto takes one that does"
        why = reasons[0].removeprefix(f"not {wanted}: ")
        raise ConfigError("training.engine", f"{wanted} does not cover this model: {why}", remedy)
    return "loop", "; ".join(reasons)


def open_engine(
    name: str,
    spec: ModelSpec,
    batches: Batches,
    seed: int,
    graphs: bool = True,
    precision: Precision = "float32",
) -> tuple[Engine, str]:
    """Open an engine on its device; returns it with a one-line description.

    :func:`choose_engine` tries engines on the CPU where a run is started. On a GPU the engine is tried again,
    against the plain loop on the GPU, and CUDA graphs are tried against the engine without them. What fails
    its trial is not used, and the description says why.

    Args:
        name: of the engine.
        spec: the model and its flat layout.
        batches: where samples come from, and the device.
        seed: the run's seed.
        graphs: whether CUDA graphs may be used.
        precision: of forward and backward passes.

    Raises:
        ConfigError: if the device does not compute in this precision.
    """
    make, device = partial(ENGINES[name], precision=precision), batches.device
    check_device(precision, device)
    engine = make(spec, batches, seed)
    where = device.type if precision == "float32" else f"{device.type} in {precision}"
    if device.type == "cpu" or not isinstance(engine, BatchedEngine):
        return engine, f"{name} on {where}"
    problem = ""
    if not engine.network.draws:  # on a GPU a plain module and a generator per client draw different numbers
        problem = _problem(lambda: _full_trial(spec, name, precision, device)[0], "the plain loop")
    if problem:
        loop = LoopEngine(spec, batches, seed, precision=precision)
        return loop, f"loop on {where}, not {name}: {problem}"
    if not graphs:
        return engine, f"{name} on {where} without graphs, as set"
    problem = _problem(lambda: try_recording(spec, make, device, CudaRecorder(device)), "the engine itself")
    if problem:
        return engine, f"{name} on {where} without graphs: {problem}"
    engine.record(CudaRecorder(device))
    return engine, f"{name} on {where} with graphs"


class GuidedEngines:
    """The engines for local losses that use other models (:class:`~rayfl.training.Guides`).

    Args:
        spec: the model's layout.
        batches: where samples come from.
        seed: the run's seed.
        precision: of forward and backward passes.
    """

    def __init__(
        self, spec: ModelSpec, batches: Batches, seed: int, precision: Precision = "float32"
    ) -> None:
        self._spec, self._device = spec, batches.device
        self._loop = LoopEngine(spec, batches, seed, precision=precision)
        self._vmap: Engine | None = None
        try:
            engine = VmapEngine(spec, batches, seed, precision=precision)
            if engine.network.guided and _guided_gap(spec, precision, batches.device) <= TOLERANCE:
                self._vmap = engine
        except Exception:  # a model that torch.func cannot vectorise fails in its own ways
            pass

    def engine(self, guides: Guides) -> Engine:
        """The vmap engine if it supports the model and agrees with the plain loop in a short trial, else the
        plain loop. The choice depends only on the model, the device and the guides: a term that looks at
        other samples of the batch would see those that pad the batches of small clients.
        """
        if self._vmap is None:
            return self._loop
        try:
            apart = _looks_at_the_batch(self._spec, guides, self._device)
        except Exception:  # the loop says which client's term fails
            apart = True
        return self._loop if apart else self._vmap


def _looks_at_the_batch(spec: ModelSpec, guides: Guides, device: torch.device) -> bool:
    """Whether the term of a sample depends on the others: whether it changes if one is added."""
    x, targets = _trial_batches(spec, device).train(np.arange(4))
    module, seen = spec.build().to(device).eval(), []
    with torch.no_grad(), watching(module, guides.layer) as see:
        for index in range(1 + len(guides.models)):
            spec.load(module, torch.from_numpy(spec.initial(index=index)))
            seen.append(see(module(x)))
    values = []
    for count in (3, 4):
        own, *others = (Seen(each.outputs[:count], each.features[:count]) for each in seen)
        values.append(guides.compare(own, others, targets[:count])[:3])
    fewer, more = values
    return not torch.allclose(fewer, more, rtol=1e-4, atol=1e-7)


def _guided_gap(spec: ModelSpec, precision: Precision, device: torch.device) -> float:
    """As :func:`_trial`, with a loss that pulls outputs and features towards those of another model."""

    def pull(own: Seen, others: Sequence[Seen], targets: torch.Tensor) -> torch.Tensor:
        gaps = own.features - others[0].features, own.outputs - others[0].outputs
        return sum((0.1 * gap.flatten(1).square().mean(1) for gap in gaps), own.features.new_zeros(()))

    guide = torch.from_numpy(spec.initial(index=1)).to(device).expand(2, -1)
    work, gaps = LocalWork(epochs=1, batch_size=3, lr=1e-2), [math.inf]
    for seed in range(TRIALS):
        batches, terms = _trial_batches(spec, device, seed), Terms(guides=Guides((guide,), pull))
        engine = VmapEngine(spec, batches, 0, least=1, precision=precision)
        expected = _trained_models(LoopEngine(spec, batches, 0, precision=precision), work, 0, terms)
        gaps.append(_gap(_trained_models(engine, work, 0, terms), expected, spec))
        if gaps[-1] <= TOLERANCE:
            break
    return float(np.nanmin(gaps))


def _problem(gap: Callable[[], float], reference: str) -> str:
    """Describe what is wrong with the outcome of a trial; empty if nothing is."""
    try:
        distance = gap()
    except Exception as error:  # CUDA, its libraries and torch.func fail in their own ways
        return f"{type(error).__name__}: {error}".split("\n")[0]
    return "" if distance <= TOLERANCE else f"{distance:.0e} away from {reference} in a trial"


def _trial_batches(spec: ModelSpec, device: torch.device, seed: int = 0) -> Batches:
    """Seven samples for trials."""
    rng = np.random.default_rng(seed)
    x, words = spec.model.example(spec.shape, spec.classes, 7, rng)
    numbers = rng.integers(0, 2, (7, spec.classes)).astype(np.float32)  # as labels, which all losses take
    targets = numbers if spec.loss.numeric else words
    labels = np.zeros(7, np.int64) if targets is not None else np.arange(7) % spec.classes
    samples = Samples("trial", x, labels, x, labels, 1, targets_train=targets, targets_test=targets)
    return Batches(samples, device)


def _trial_model(spec: ModelSpec) -> torch.Tensor:
    """A model ``(P,)`` for trials, with noise on all parameters: otherwise an engine that ignores parameters
    that begin at one or zero, as those of normalisations do, would pass."""
    model, rng = spec.initial(), np.random.default_rng(0)
    for place in spec.slices:
        values = model[place]
        if place.start < spec.n_parameters and len(values):
            size = float(np.sqrt(np.square(values, dtype=np.float64).mean())) or 1.0
            values += np.float32(0.1 * size) * rng.uniform(-1, 1, len(values)).astype(np.float32)
    return torch.from_numpy(model)


def _trained_models(engine: Engine, work: LocalWork, round: int, terms: Terms = NO_TERMS) -> torch.Tensor:
    """Models of two clients ``(2, P)`` after training on five and two of the samples."""
    start = _trial_model(engine.spec).to(engine.batches.device).expand(2, -1)
    result = engine.train(work, round, [0, 1], [np.arange(5), np.arange(5, 7)], start, terms)
    if result.failures:
        raise Unsupported(next(iter(result.failures.values())).strip().splitlines()[-1])
    return result.rows


def _gap(rows: torch.Tensor, expected: torch.Tensor, spec: ModelSpec) -> float:
    """Distance between the results of two engines, relative to the update of ``expected``.

    The larger of the distances of parameters and of buffers: buffers may be few, or change little.
    """
    initial = _trial_model(spec).to(expected)
    gaps = [
        float((rows[:, part] - expected[:, part]).norm())
        / max(float((expected[:, part] - initial[part]).norm()), 1e-12)
        for part in (slice(spec.n_parameters), slice(spec.n_parameters, None))
    ]
    return float(np.max(gaps))  # NaN if one is


def _full_trial(
    spec: ModelSpec,
    name: str,
    precision: Precision,
    device: torch.device = torch.device("cpu"),  # noqa: B008 (a constant)
) -> tuple[float, list[str]]:
    """As :func:`_trial`; an engine for reduced precision has to agree in float32, too."""
    gap, apart = _trial(spec, ENGINES[name], precision, device)
    if precision == "float32" or not gap <= TOLERANCE:
        return gap, apart
    return _trial(spec, ENGINES[name], "float32", device)


def _trial(
    spec: ModelSpec, make: Opener, precision: Precision, device: torch.device
) -> tuple[float, list[str]]:
    """Train two clients for a step or two, in up to :data:`TRIALS` trials.

    Returns:
        The smallest gap to the plain loop, and :attr:`VmapEngine.apart`. In reduced precision
        :data:`COARSER` times the gap of the plain loop in this precision is subtracted.
    """
    apart: list[str] = []
    work, gaps = LocalWork(epochs=1, batch_size=3, lr=1e-2), [math.inf]
    for seed in range(TRIALS):
        batches = _trial_batches(spec, device, seed)
        engine = make(spec, batches, 0, precision=precision)
        if isinstance(engine, VmapEngine) and engine.least < math.inf:
            engine.least = 1  # so that two clients train together, as many would
        results = [_trained_models(engine, work, 0)]
        apart = sorted((engine.apart if isinstance(engine, VmapEngine) else None) or ())
        if isinstance(engine, BatchedEngine) and engine.compiled is not None:
            engine.compiled = None  # for some work it trains layer by layer: try that, too
            results.append(_trained_models(engine, work, 0))
        del engine  # before another one is built: models may be large
        expected, allowed = _trained_models(LoopEngine(spec, batches, 0), work, 0), 0.0
        if precision != "float32":
            loop = LoopEngine(spec, batches, 0, precision=precision)
            allowed = COARSER * _gap(_trained_models(loop, work, 0), expected, spec)
        gaps.append(float(np.max([_gap(result, expected, spec) for result in results])) - allowed)
        if gaps[-1] <= TOLERANCE:
            break
    return float(np.nanmin(gaps)), apart


def _first_layer(spec: ModelSpec) -> list[list[tuple[int, int]]]:
    """A list with the first layer's part of the vector; empty if it holds all parameters, or none."""
    part = spec.segment(first=1) if spec.layers else []
    parameters = sum(min(b, spec.n_parameters) - a for a, b in part if a < spec.n_parameters)
    return [part] if 0 < parameters < spec.n_parameters else []


def try_recording(
    spec: ModelSpec,
    make: Callable[[ModelSpec, Batches, int], Engine],
    device: torch.device,
    recorder: Recorder,
) -> float:
    """The largest gap between an engine whose steps are recorded and one whose steps are not.

    Trains two rounds each of plain SGD; of SGD with all other terms of a step; of Per-FedAvg; and with the
    first layer frozen, if there are several. All kinds of steps come up often enough to be replayed.

    Raises:
        Exception: if steps cannot be recorded.
    """
    batches, plain = _trial_batches(spec, device), LocalWork(epochs=2 * (WARM_UPS + 3), batch_size=3, lr=1e-2)
    ones = torch.ones(2, spec.P, device=batches.device)
    gaps = []
    for work, terms in (
        (plain, NO_TERMS),
        (replace(plain, momentum=0.5, weight_decay=0.01, proximal=0.1), Terms(offset=1e-3 * ones, mask=ones)),
        (replace(plain, inner_lr=1e-2), NO_TERMS),
        *((replace(plain, momentum=0.5, frozen=tuple(part)), NO_TERMS) for part in _first_layer(spec)),
    ):
        recorded, ordinary = make(spec, batches, 0), make(spec, batches, 0)
        assert isinstance(recorded, BatchedEngine)
        assert isinstance(ordinary, BatchedEngine)
        recorded.record(recorder)
        ordinary.compiled = None
        for round in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # the engine warns if it stops recording half-way
                models = _trained_models(recorded, work, round, terms)
            gaps.append(_gap(models, _trained_models(ordinary, work, round, terms), spec))
        if not (recorded.recorded and recorded.recorded.replays):
            raise Unsupported("no step was replayed")
    return float(np.max(gaps))  # NaN if one is

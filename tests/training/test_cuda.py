"""Training on a real GPU: graphs, memory, streams and arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayfl.models import MODELS, ModelSpec
from rayfl.training import NO_TERMS, LocalWork, Terms, TrainedBlock
from rayfl.training.batched import BatchedEngine
from rayfl.training.batched.graphs import CudaRecorder
from rayfl.training.batches import Batches
from rayfl.training.device import open_device
from rayfl.training.engine import COARSER, ENGINES, open_engine
from rayfl.training.loop import LoopEngine
from tests.runs import METHODS, TASKS
from tests.training.conftest import make_samples
from tests.training.test_graphs import MODEL_CASES, PLAIN, make_case
from tests.training.test_terms import EXTRAS, OPTIONS, make_terms, make_work

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    """The device, opened; the stream of before comes back."""
    before = torch.cuda.current_stream()
    yield open_device("cuda")
    torch.cuda.set_stream(before)


def rounds(
    engine: Any, work: LocalWork, sizes: list[int], terms: Terms = NO_TERMS, count: int = 2
) -> list[TrainedBlock]:
    """Several rounds from the initial models; the results on the CPU."""
    found = []
    for round in range(count):
        rng = np.random.default_rng(round)
        indices = [rng.choice(60, n, replace=False) for n in sizes]
        start = torch.from_numpy(np.tile(engine.spec.initial(), (len(sizes), 1))).to(engine.batches.device)
        block = engine.train(work, round, range(10, 10 + len(sizes)), indices, start, terms)
        assert not block.failures, next(iter(block.failures.values()))
        snapshots = None if block.snapshots is None else block.snapshots.cpu()
        found.append(replace(block, rows=block.rows.cpu(), snapshots=snapshots))
    return found


def gaps(one: list[TrainedBlock], other: list[TrainedBlock], spec: ModelSpec) -> list[float]:
    """Of every client and round, relative to how far it moved; ascending."""
    start, found = torch.from_numpy(spec.initial()), []
    for a, b in zip(one, other, strict=True):
        found += ((a.rows - b.rows).norm(dim=1) / (b.rows - start).norm(dim=1)).tolist()
        if a.snapshots is not None and b.snapshots is not None:
            found += ((a.snapshots - b.snapshots).norm(dim=1) / (b.rows - start).norm(dim=1)).tolist()
    return sorted(found)


@pytest.mark.parametrize("case", [case for case in (*MODEL_CASES, "grouped") if case != "dropping"])
def test_the_engine_equals_the_loop(case: str, gpu: torch.device) -> None:
    spec, samples, sizes = make_case(case)
    batches, work = Batches(samples, gpu), replace(PLAIN, epochs=2, momentum=0.5)
    ends = [rounds(make(spec, batches, 0), work, sizes) for make in (BatchedEngine, LoopEngine)]
    found = gaps(*ends, spec)
    # cuDNN's repeatable algorithms include Winograd's, which round by 1e-5 in a step; TF32 would by 1e-3.
    assert found[len(found) // 2] < 1e-4
    assert found[-1] < 1e-2  # a maximum of equals


def recorded_and_not(
    case: str, work: LocalWork, names: tuple[str, ...], gpu: torch.device
) -> tuple[BatchedEngine, list[float]]:
    spec, samples, sizes = make_case(case)
    batches, terms = Batches(samples, gpu), make_terms(names, spec, sizes)
    ordinary, recording = (BatchedEngine(spec, batches, 0, None, 3) for _ in range(2))
    recording.record(CudaRecorder(gpu))
    found = gaps(rounds(recording, work, sizes, terms), rounds(ordinary, work, sizes, terms), spec)
    assert recording.recorded is not None
    return recording, found


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("case", MODEL_CASES)
def test_graphs_equal_the_engine_without_them(case: str, momentum: float, gpu: torch.device) -> None:
    engine, found = recorded_and_not(case, replace(PLAIN, momentum=momentum, epochs=9), (), gpu)
    assert found[-1] < 1e-5
    assert engine.recorded is not None
    assert engine.recorded.replays > 4


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("option", OPTIONS)
def test_graphs_equal_the_engine_for_every_option(option: str, extra: str, gpu: torch.device) -> None:
    changes, names = OPTIONS[option]
    if "inner_lr" in changes and "momentum" in EXTRAS[extra]:
        return
    work = make_work(PLAIN, make_case("lenet5-bn")[0], {**changes, **EXTRAS[extra]})
    assert recorded_and_not("lenet5-bn", work, names, gpu)[1][-1] < 1e-5


def test_graphs_on_the_default_stream(gpu: torch.device) -> None:
    torch.cuda.set_stream(torch.cuda.default_stream())
    assert recorded_and_not("lenet5", PLAIN, (), gpu)[1][-1] < 1e-5


@pytest.mark.parametrize("case", ["mlp", "lenet5-bn", "resnet9", "lstm", "dropping"])
def test_graphs_are_used(case: str, gpu: torch.device) -> None:
    spec, samples, _ = make_case(case)
    engine, why = open_engine("batched", spec, Batches(samples, gpu), 0)
    assert why == "batched on cuda with graphs"
    assert isinstance(engine, BatchedEngine)
    assert engine.recorded is not None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", [*MODEL_CASES, "grouped"])
def test_training_repeats_bit_by_bit(case: str, engine: str, gpu: torch.device) -> None:
    spec, samples, sizes = make_case(case)
    one, other = (
        rounds(open_engine(engine, spec, Batches(samples, gpu), 0)[0], PLAIN, sizes) for _ in range(2)
    )
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.rows, b.rows)


def test_products_and_convolutions_are_of_float32(gpu: torch.device) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(64, 512, device=gpu), torch.randn(512, 512, device=gpu)
    exact = x.double() @ w.double()
    assert float(((x @ w) - exact).norm() / exact.norm()) < 1e-6  # TF32: 3e-4
    images, kernels = torch.randn(8, 32, 16, 16, device=gpu), torch.randn(32, 32, 3, 3, device=gpu)
    exact = torch.conv2d(images.double(), kernels.double())
    assert float((torch.conv2d(images, kernels) - exact).norm() / exact.norm()) < 1e-6


@pytest.mark.parametrize("graphs", [False, True])
def test_half_as_many_clients_where_memory_ends(graphs: bool, gpu: torch.device) -> None:
    clients, shape = 64, (1, 28, 28)
    spec = ModelSpec.of(MODELS["mlp"](hidden=[1024]), shape, 5, 0)
    batches = Batches(make_samples(shape, 60, 5), gpu)
    work = LocalWork(epochs=9, batch_size=4, lr=0.02, momentum=0.5)
    few = rounds(BatchedEngine(spec, batches, 0, None, 4), work, [8] * clients, count=1)
    torch.cuda.empty_cache()
    model = 4 * spec.P
    # Room for the start models and the results of all, and for the models and velocities of less than half.
    room = torch.cuda.memory_reserved() + model * 3 * clients + (64 << 20)
    engine = BatchedEngine(spec, batches, 0, None, clients)
    if graphs:
        engine.record(CudaRecorder(gpu))
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(gpu).total_memory, gpu)
    try:
        block = rounds(engine, work, [8] * clients, count=1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, gpu)
    assert 1 <= engine.clients_per_call < clients
    assert gaps(block, few, spec)[-1] < 1e-5


def test_a_share_of_the_memory_is_a_limit(gpu: torch.device) -> None:
    total = torch.cuda.get_device_properties(gpu).total_memory
    try:
        open_device("cuda", 0.1)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(total // 10, dtype=torch.uint8, device=gpu)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, gpu)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_on_a_gpu(method: str, tmp_path: Path, gpu: torch.device) -> None:
    """To the same accuracy as on a CPU, up to a few samples."""
    from rayfl.api import run

    summaries = []
    for device in ("cpu", "cuda"):
        settings = {
            "name": device, "rounds": 3, "seed": 3,
            "partition": {"name": "tasks", "tasks": TASKS, "foreign": 0.05},
            "model": {"name": "mlp", "hidden": [16]},
            "algorithm": method.split(",")[0],
            "training": {"epochs": 2, "batch_size": 10, "lr": 0.05},
            **METHODS[method],
            "execution": {"backend": "inline", "block_size": 2, "device": device},
            "output": {"root": str(tmp_path), "report": False, "tensorboard": False},
        }  # fmt: skip
        summaries.append(run(settings).summary)
    assert summaries[1]["clusters"] == summaries[0]["clusters"]
    assert abs(summaries[1]["accuracy_mean"] - summaries[0]["accuracy_mean"]) < 3


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("case", ["linear", "lstm"])
def test_reduced_precision_trains_there(case: str, engine: str, gpu: torch.device) -> None:
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bfloat16")
    spec, samples, sizes = make_case(case)
    opened, why = open_engine(engine, spec, Batches(samples, gpu), 0, precision="bf16")
    assert why.startswith(f"{engine} on cuda in bf16")
    exact, loop = (LoopEngine(spec, Batches(samples, gpu), 0, precision=kind) for kind in ("float32", "bf16"))
    truth, rounded, found = (rounds(each, PLAIN, sizes, count=1)[0].rows for each in (exact, loop, opened))
    assert found.dtype == torch.float32
    off = (rounded - truth).norm(dim=1)
    assert (off > 0).all()
    assert ((found - truth).norm(dim=1) <= COARSER * off.max()).all()

"""Reduced precision: forward and backward passes in bfloat16, everything else in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import rayfl
from rayfl.config import load
from rayfl.data import Samples
from rayfl.errors import ConfigError
from rayfl.events import Note
from rayfl.models import ModelSpec
from rayfl.random import orders
from rayfl.rundir import RunDirectory
from rayfl.servers.building import build, check
from rayfl.training import LocalWork, TrainedBlock, precision
from rayfl.training.batched import BatchedEngine, Unsupported
from rayfl.training.batched.vmap import VmapEngine
from rayfl.training.batches import Batches
from rayfl.training.engine import COARSER, ENGINES, choose_engine, open_engine
from rayfl.training.loop import LoopEngine
from tests.runs import assert_same
from tests.training.test_batched import random_samples
from tests.training.test_graphs import CPU, arguments, make_case
from tests.training.test_terms import make_terms
from tests.training.test_vmap import IMAGE, Skip, spec_of

WORK = LocalWork(epochs=2, batch_size=4, lr=0.02, momentum=0.5, weight_decay=0.01)
SIZES = [7, 4, 2]
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "mkldnn_rnn_layer")


class _Watching(TorchDispatchMode):
    """Notes what products and convolutions are computed in, and what has another type than float32."""

    def __init__(self) -> None:
        super().__init__()
        self.products: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            self.products |= {a.dtype for a in args if isinstance(a, torch.Tensor)}
        return func(*args, **(kwargs or {}))


def trained(engine: Any, sizes: Sequence[int], work: LocalWork = WORK, terms: Any = None) -> TrainedBlock:
    """One round of an engine."""
    given = [] if terms is None else [terms]
    block: TrainedBlock = engine.train(work, *arguments(engine.spec, list(sizes), 0), *given)
    assert not block.failures, next(iter(block.failures.values()))
    return block


def together(spec: ModelSpec, batches: Batches) -> VmapEngine:
    """In bfloat16, and not by plain steps."""
    return VmapEngine(spec, batches, 0, least=1, precision="bf16")


def by_hand(spec: ModelSpec, samples: Samples, indices: Any, clients: Any, round: int) -> torch.Tensor:
    """What everybody would write: nn.Module, torch.autocast, torch.optim.SGD; models ``(B, P)``.

    On CPUs without AVX-512 oneDNN has no LSTM in bfloat16.
    """
    rows, onednn = [], torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for client, own in zip(clients, indices, strict=True):
        x, y = Batches(samples, CPU).train(own)
        module = spec.build().train()
        optimizer = torch.optim.SGD(
            module.parameters(), lr=WORK.lr, momentum=WORK.momentum, weight_decay=WORK.weight_decay
        )
        for epoch in orders(0, round, [client], [len(own)], WORK.epochs)[0]:
            for at in range(0, len(epoch), WORK.batch_size):
                batch = epoch[at : at + WORK.batch_size].copy()
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16), torch.backends.mkldnn.flags(enabled=onednn):
                    outputs = module(x[batch])
                nn.CrossEntropyLoss()(outputs.float(), y[batch]).backward()
                optimizer.step()
        rows.append(torch.from_numpy(spec.flatten(module)))
    return torch.stack(rows)


@pytest.mark.parametrize("case", ["mlp", "lenet5", "averaging", "lstm"])
def test_the_loop_is_autocast_bit_for_bit(case: str) -> None:
    spec, samples, _ = make_case(case)
    block = trained(LoopEngine(spec, Batches(samples, CPU), 0, precision="bf16"), SIZES)
    round, clients, indices, _ = arguments(spec, SIZES, 0)
    assert torch.equal(block.rows, by_hand(spec, samples, indices, clients, round))


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("case", ["mlp", "lenet5", "averaging", "lstm"])
def test_products_are_bfloat16_and_models_are_not(case: str, engine: str) -> None:
    """Forwards and backwards; what arrives at the server is float32, losses too."""
    spec, samples, _ = make_case(case)
    make = together if engine == "vmap" else lambda s, b: LoopEngine(s, b, 0, precision="bf16")
    opened = make(spec, Batches(samples, CPU))
    with _Watching() as watching:
        block = trained(opened, SIZES)
    assert watching.products == {torch.bfloat16}
    assert block.rows.dtype == torch.float32
    changed = block.rows[:, : spec.n_parameters].view(torch.int32) & 0xFFFF
    assert (changed != 0).float().mean() > 0.9, "the weights have the mantissa of bfloat16"
    assert block.losses.dtype == np.float64


def test_gradients_and_momentum_are_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    from rayfl.training import loop

    kinds = set[torch.dtype]()
    step = loop.sgd_step

    def watched(parameters: Any, gradients: Any, velocity: Any, *others: Any) -> None:
        step(parameters, gradients, velocity, *others)
        kinds.update(t.dtype for t in (*parameters, *gradients, *velocity))

    monkeypatch.setattr(loop, "sgd_step", watched)
    spec, samples, _ = make_case("averaging")
    trained(LoopEngine(spec, Batches(samples, CPU), 0, precision="bf16"), SIZES)
    assert kinds == {torch.float32}


@pytest.mark.parametrize("extra", ["", "offset", "mask", "inner_lr"])
@pytest.mark.parametrize("case", ["linear", "lstm", "skip"])
def test_many_clients_together_are_as_near_as_the_loop(case: str, extra: str) -> None:
    """Ragged batches, BatchNorm without the padding, offsets, masks and Per-FedAvg.

    Networks without a ReLU: near zero, rounding would decide which way a gradient goes.
    """
    spec, samples = (
        make_case(case)[:2] if case != "skip" else (spec_of(Skip, IMAGE), random_samples(IMAGE, 60, 3))
    )
    sizes = [6, 4, 3]
    work, terms = (
        replace(WORK, epochs=1),
        make_terms((extra,) if extra in ("offset", "mask") else (), spec, sizes),
    )
    if extra == "inner_lr":
        work = replace(work, inner_lr=0.02, momentum=0.0)
    batches = Batches(samples, CPU)
    exact, loop, found = (
        trained(engine, sizes, work, terms).rows
        for engine in (
            LoopEngine(spec, batches, 0),
            LoopEngine(spec, batches, 0, precision="bf16"),
            together(spec, batches),
        )
    )
    off = (loop - exact).norm(dim=1)
    assert (off > 0).all()
    assert ((found - exact).norm(dim=1) <= COARSER * off.max()).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_default_never_rounds(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **named: Any) -> None:
        raise AssertionError("autocast was entered")

    monkeypatch.setattr(torch, "autocast", refuse)
    assert load({}).training.precision == "float32"
    spec, samples, _ = make_case("mlp")
    opened, said = open_engine(engine, spec, Batches(samples, CPU), 0)
    if isinstance(opened, BatchedEngine):
        opened.compiled = None  # whose products PyTorch does not see
    with _Watching() as watching:
        trained(opened, SIZES)
    assert watching.products == {torch.float32}
    assert said == f"{engine} on cpu"


# --- which engine ---------------------------------------------------------------------------------------


def test_auto_takes_one_that_can_and_says_so() -> None:
    spec, samples, _ = make_case("linear")
    name, why = choose_engine(spec, precision="bf16")
    assert (name, why) == (
        "vmap",
        "a trial agrees with the plain loop; not batched: its kernels, which are faster for small networks, "
        "compute in float32",
    )
    assert open_engine(name, spec, Batches(samples, CPU), 0, precision="bf16")[1] == "vmap on cpu in bf16"
    assert choose_engine(spec, "loop", "bf16") == ("loop", "as set")
    with pytest.raises(Unsupported, match="compute in float32"):
        BatchedEngine(spec, Batches(samples, CPU), 0, precision="bf16")


def test_the_trial_finds_an_engine_that_fails_in_bf16_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, _, _ = make_case("mlp")
    original = VmapEngine.train

    def wrong(self: Any, *given: Any, **named: Any) -> TrainedBlock:
        block = original(self, *given, **named)
        return replace(block, rows=block.rows * 1.1) if self.network._precision == "bf16" else block

    monkeypatch.setattr(VmapEngine, "train", wrong)
    name, why = choose_engine(spec, precision="bf16")
    assert name == "loop"
    assert "not vmap: " in why
    assert "away from the plain loop" in why


def test_the_trial_finds_a_fault_that_rounding_would_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of 1.01 times what it should be is less than bfloat16 is off: the trial in float32 shows it."""
    spec, _, _ = make_case("averaging")
    original = VmapEngine.train

    def wrong(self: Any, work: LocalWork, *given: Any, **named: Any) -> TrainedBlock:
        return original(self, replace(work, lr=1.01 * work.lr), *given, **named)

    monkeypatch.setattr(VmapEngine, "train", wrong)
    assert choose_engine(spec, precision="bf16")[0] == "loop"


class Scattering(nn.Module):
    """A network with an operation that takes no tensors of two types."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(shape[0], 4), nn.Linear(4, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.zeros(len(x), 4, dtype=torch.int64)
        return self.head(torch.ones(len(x), 4).scatter_add(1, places, self.first(x)))


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_a_network_that_fails_in_bf16_is_refused(engine: str) -> None:
    spec = spec_of(Scattering, (6,))
    assert choose_engine(spec, engine)[0] in ("vmap", "loop")
    with pytest.raises(ConfigError) as refusal:
        choose_engine(spec, engine, "bf16")
    line = str(refusal.value)
    assert line.startswith("training.precision: the network does not train in bf16: RuntimeError: ")
    assert line.endswith("; use float32")
    assert "\n" not in line


# --- settings, devices ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["training.precision=fp16"], "training.precision: got 'fp16'; expected 'float32' or 'bf16'"),
        (
            ["training.precision=bf16", "training.engine=batched"],
            "training: engine batched computes in float32, not in bf16; engine=auto takes another",
        ),
    ],
)
def test_bad_values_get_a_line(overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load({}, overrides)
    assert str(refusal.value) == line


@pytest.mark.parametrize(
    ("cpuinfo", "slow"),
    [
        ("flags\t\t: fpu avx2 avx512f\nflags\t\t: fpu avx2 avx512f\n", True),
        ("flags\t\t: fpu avx512f avx512_bf16\n", False),
        ("flags\t\t: fpu amx_bf16\n", False),
        ("Features\t: fp asimd\n", True),
        ("Features\t: fp asimd bf16\n", False),
        ("processor\t: 0\n", False),
        (None, False),
    ],
)
def test_a_cpu_without_instructions_is_remarked_upon(cpuinfo: str | None, slow: bool, tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        file.write_text(cpuinfo)
    line = (
        "training.precision: this CPU has no instructions for bf16, so training is slower than in float32, "
        "not faster"
    )
    assert precision.remarks("bf16", "cpu", file) == ([line] if slow else [])
    assert precision.remarks("float32", "cpu", file) == []
    assert precision.remarks("bf16", "cuda", file) == []


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which PyTorch emulates bfloat16."""
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)


def test_a_gpu_that_cannot_is_refused(old_gpu: None) -> None:
    given = {"execution": {"device": "cuda", "backend": "inline"}}
    check(load(given))
    with pytest.raises(ConfigError) as refusal:
        check(load(given, ["training.precision=bf16"]))
    assert str(refusal.value) == (
        "training.precision: Tesla T4 does not compute in bf16; use float32, or a GPU of compute capability "
        "8.0 or higher"
    )
    check(load({}, ["training.precision=bf16", "execution.backend=inline"]))  # clients train on the CPU
    precision.check_device("float32", torch.device("cuda"))


# --- runs -----------------------------------------------------------------------------------------------


def test_a_run_learns_and_says_how(settings: dict[str, Any]) -> None:
    """It is recorded where the engine is; models in checkpoints and results are float32."""
    notes: list[str] = []
    settings["rounds"] = 6
    settings["training"]["batch_size"] = 10
    exact = rayfl.run(settings)
    result = rayfl.run(
        settings,
        ["training.precision=bf16"],
        on_event=lambda event: notes.append(event.text) if isinstance(event, Note) else None,
    )
    assert result.summary["models_sha256"] != exact.summary["models_sha256"]
    assert exact.summary["accuracy_mean"] > 75
    assert result.summary["accuracy_mean"] == pytest.approx(exact.summary["accuracy_mean"], abs=3)
    assert any(
        line.startswith("training engine: vmap in bf16 (a trial agrees with the plain loop") for line in notes
    )
    environment = RunDirectory(result.path).read_json("environment.json")
    assert (environment["engine"], environment["precision"]) == ("vmap", "bf16")
    assert RunDirectory(exact.path).read_json("environment.json")["precision"] == "float32"
    assert load(result.path / "config.yaml").training.precision == "bf16"
    assert all(p.dtype == torch.float32 for p in result.model(client=3).parameters())


def test_tests_and_scores_are_float32(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast is entered in training alone: once a step."""
    entered = []
    original = torch.autocast

    def counted(*given: Any, **named: Any) -> Any:
        entered.append(given)
        return original(*given, **named)

    config = load(settings, ["training.precision=bf16", "training.engine=loop", "rounds=2"])
    stages, _ = build(config)
    monkeypatch.setattr(torch, "autocast", counted)
    result = rayfl.run(config)
    batch = settings["training"]["batch_size"]
    steps = sum(2 * -(-size // batch) for size in stages[0].federation.sizes.tolist())
    trial = 2 + 1  # of the network, before the run: batches of three of five and two samples
    assert len(entered) == 2 * steps + trial
    assert len(result.rounds) == 2


def test_stopped_and_resumed_is_uninterrupted(settings: dict[str, Any]) -> None:
    settings["training"]["precision"] = "bf16"

    def stop(event: Any) -> None:
        if type(event).__name__ == "RoundDone" and event.round == 1:
            raise KeyError("enough")

    with pytest.raises(KeyError):
        rayfl.run(settings, on_event=stop)
    (path,) = (folder for folder in Path(settings["output"]["root"]).iterdir() if folder.is_dir())
    resumed = rayfl.resume(path)
    assert_same(rayfl.run(settings), resumed)
    with pytest.raises(ConfigError, match=r"training\.precision"):
        rayfl.resume(path, ["training.precision=float32"])


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("actors", [1, 2])
def test_any_number_of_actors_is_inline(actors: int, settings: dict[str, Any], ray_cluster: None) -> None:
    """Blocks of ten clients, which train together."""
    settings["training"]["precision"] = "bf16"
    settings["partition"] = {"name": "dirichlet", "clients": 20, "alpha": 1.0}
    settings["execution"]["block_size"] = 10
    execution = {**settings["execution"], "backend": "ray", "actors": actors, "cpus_per_actor": 0.5}
    assert_same(rayfl.run(settings), rayfl.run({**settings, "execution": execution}))

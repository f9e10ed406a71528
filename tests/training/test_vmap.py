"""The vmap engine on networks with buffers: the plain loop decides what is right."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn import functional

from rayfl.models import MODELS, Model, ModelSpec
from rayfl.training import LocalWork
from rayfl.training import engine as training_engine
from rayfl.training.batched import Unsupported
from rayfl.training.batched.vmap import VmapEngine, VmapNetwork
from rayfl.training.batches import Batches
from rayfl.training.engine import choose_engine
from rayfl.training.loop import LoopEngine
from tests.training.test_batched import SGDS, assert_equal, random_samples


class Skip(nn.Module):
    """Convolutions with BatchNorm and a skip connection; the classifier works on mean pixels."""

    def __init__(
        self, shape: tuple[int, ...], classes: int, act: Callable[..., Any] = torch.tanh, **norm: Any
    ) -> None:
        super().__init__()
        self.act = act
        self.stem, self.norm1 = nn.Conv2d(shape[0], 4, 3, padding=1), nn.BatchNorm2d(4, **norm)
        self.conv, self.norm2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, **norm)
        self.head = nn.Linear(4, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.norm1(self.stem(x)))
        return self.head((x + self.norm2(self.conv(x))).mean((2, 3)))


class Rows(nn.Module):
    """BatchNorm on tables, where a batch of one is an error, and a layer used twice."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(shape[0], 6), nn.BatchNorm1d(6)
        self.twice, self.head = nn.Linear(6, 6), nn.Linear(6, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        return self.head(x + self.twice(torch.tanh(self.twice(x))))


class Tied(nn.Module):
    """The decoder's weight is the encoder's; positions are a constant buffer, a mask does not persist."""

    mask: torch.Tensor
    positions: torch.Tensor

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(shape[0], 5, bias=False), nn.Linear(shape[0], 5, bias=False)
        self.decode.weight = self.encode.weight
        self.scale, self.head = nn.Parameter(torch.ones(5)), nn.Linear(5, classes)
        self.register_buffer("positions", torch.arange(5.0))
        self.register_buffer("mask", torch.tensor([0.0, 0, 0, 0, -math.inf]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.encode(x)) * self.scale + self.positions
        return self.head(torch.softmax(y - self.decode(x) + self.mask, 1))


class Counting(nn.Module):
    """Buffers that change: one in place, one is replaced by another tensor."""

    mean: torch.Tensor
    steps: torch.Tensor

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(shape[0], classes)
        self.register_buffer("mean", torch.zeros(shape[0]))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps = self.steps + 1
            self.mean.add_(self.head.weight.detach().sum(0) / self.steps)
        return self.head(x - self.mean)


class Own(Model):
    """A module of this file as a model."""

    name: str = "own"
    module: Callable[..., nn.Module]
    settings: Mapping[str, Any] = MappingProxyType({})

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        module = self.build((3, 4, 4), 3)
        return {"all": tuple(name for name, _ in (*module.named_parameters(), *module.named_buffers()))}

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return self.module(shape, classes, **self.settings)


def spec_of(module: Callable[..., nn.Module], shape: tuple[int, ...], **settings: Any) -> ModelSpec:
    return ModelSpec.of(Own(module=module, settings=settings), shape, 3, 0)


IMAGE, ROW = (2, 5, 5), (6,)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "settings",
    [{}, {"momentum": 0.3, "affine": False}, {"momentum": None}, {"track_running_stats": False}],
    ids=["plain", "no affine map", "cumulative", "no running statistics"],
)
@pytest.mark.parametrize("work", [*SGDS, replace(SGDS[0], inner_lr=0.01)], ids=["plain", "momentum", "ahead"])
def test_running_statistics_are_the_clients_own(settings: dict[str, Any], work: LocalWork) -> None:
    """Ragged clients: padded batches, and clients that are done before others."""
    spec = spec_of(Skip, IMAGE, **settings)
    assert_equal(spec, work, [9, 6, 3, 1], VmapNetwork(spec))


@pytest.mark.parametrize(
    ("module", "shape", "sizes"), [(Rows, ROW, [6, 7, 2]), (Tied, ROW, [6, 3, 1]), (Counting, ROW, [6, 3, 1])]
)
def test_tied_weights_constant_and_changing_buffers(
    module: Callable[..., nn.Module], shape: tuple[int, ...], sizes: list[int]
) -> None:
    spec = spec_of(module, shape)
    assert "mask" not in spec.names
    assert_equal(spec, SGDS[1], sizes, VmapNetwork(spec))
    assert choose_engine(spec)[0] == "vmap"


@pytest.mark.parametrize("engine", [LoopEngine, lambda *given: VmapEngine(*given, least=1)])
def test_a_batch_of_one_without_pixels_fails_alone(engine: Any) -> None:
    """With PyTorch's words: 5 samples in batches of 4 leave one over, which has no variance."""
    spec = spec_of(Rows, ROW)
    batches = Batches(random_samples(ROW, 20, 3), torch.device("cpu"))
    indices = [np.arange(0, 6), np.arange(6, 11), np.arange(11, 19)]
    start = torch.from_numpy(np.tile(spec.initial(), (3, 1)))
    block = engine(spec, batches, 0).train(LocalWork(1, 4, 0.05), 0, [3, 4, 5], indices, start)
    assert list(block.failures) == [1]
    assert "Expected more than 1 value per channel when training" in block.failures[1]
    assert torch.equal(block.rows[1], start[1])


@pytest.mark.parametrize("engine", [LoopEngine, lambda *given: VmapEngine(*given, least=1)])
def test_nothing_passes_from_client_to_client(engine: Any) -> None:
    """Not even the number of batches that BatchNorm counts, which a momentum of None reads."""
    spec = spec_of(Skip, IMAGE, momentum=None)
    batches = Batches(random_samples(IMAGE, 20, 3), torch.device("cpu"))
    start = torch.from_numpy(np.tile(spec.initial(), (1, 1)))
    trained = engine(spec, batches, 0)
    first, again = (trained.train(SGDS[0], 0, [7], [np.arange(9)], start).rows for _ in range(2))
    assert torch.equal(first, again)


class Tired(nn.Module):
    """An integer counts the steps; outputs shrink with it."""

    seen: torch.Tensor

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(shape[0], classes)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return self.head(x) / (1 + self.seen)


class Late(Tired):
    """Replaces the number, and shows it only after some steps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = self.seen + 1
        return self.head(x) * (0.1 if self.training and self.seen > 3 else 1.0)


def test_buffers_that_would_be_lost_go_to_the_loop() -> None:
    """The trial of two steps does not see what they do later."""
    with pytest.raises(Unsupported, match="replaces seen"):
        VmapNetwork(spec_of(Late, ROW))
    assert choose_engine(spec_of(Late, ROW))[0] == "loop"
    VmapNetwork(spec_of(Tired, ROW))  # in place
    VmapNetwork(spec_of(Skip, IMAGE))  # BatchNorm counts in place


def test_tests_do_not_depend_on_who_trained_last() -> None:
    spec = spec_of(Tired, ROW)
    engine = LoopEngine(spec, Batches(random_samples(ROW, 30, 3), torch.device("cpu")), 0)
    start, x = torch.from_numpy(spec.initial()).unsqueeze(0), torch.ones(2, *ROW)

    def tested() -> torch.Tensor:
        spec.load(engine.module, start[0])
        return engine.module.eval()(x).detach()

    before = tested()
    engine.train(LocalWork(2, 3, 0.05), 0, [0], [np.arange(20)], start)
    assert torch.equal(tested(), before)


def test_the_trial_sees_buffers_that_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to 7,000 weights that move by a lot, 8 running statistics that do not move at all."""
    spec = spec_of(Skip, (200, 2, 2), act=functional.softplus)  # which has no batched counterpart
    assert choose_engine(spec)[0] == "vmap"
    original = VmapNetwork.step

    def forgetful(self: Any, *given: Any) -> Any:
        before = {name: buffer.clone() for name, buffer in self.buffers.items()}
        losses = original(self, *given)
        for name, buffer in self.buffers.items():
            buffer.copy_(before[name])
        return losses

    monkeypatch.setattr(VmapNetwork, "step", forgetful)
    name, why = choose_engine(spec)
    assert name == "loop"
    assert "not vmap: 1e+00 away from the plain loop" in why


class Drops(nn.Module):
    """All kinds of dropout: modules and functions, elements and channels, in place, of attention."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.conv, self.channels = nn.Conv2d(shape[0], 4, 3), nn.Dropout2d(0.3)
        self.elements, self.all = nn.Dropout(0.2, inplace=True), nn.Dropout(1.0)
        self.mixed, self.head = nn.Linear(4, 12), nn.Linear(4, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.elements(self.channels(functional.relu(self.conv(x))))
        x = x.flatten(2).transpose(1, 2).contiguous()
        query, key, value = functional.dropout(self.mixed(x), 0.1, self.training).chunk(3, -1)
        p = 0.25 if self.training else 0.0
        x = functional.scaled_dot_product_attention(query, key, value, None, p, True)
        x = x + functional.scaled_dot_product_attention(query, value, key, dropout_p=p, scale=0.3)
        return self.head(x.mean(1) + self.all(x[:, 0]))


@pytest.mark.parametrize("together", [1, 4])
def test_dropout_draws_what_each_client_would_draw_alone(together: int) -> None:
    spec = spec_of(Drops, (1, 6, 6))
    assert choose_engine(spec) == (
        "vmap",
        "a trial agrees with the plain loop; not batched: it calls dropout2d",
    )
    work = LocalWork(2, 4, 0.05, momentum=0.5)
    assert_equal(spec, work, [6, 3, 8, 4], VmapNetwork(spec), together)


class Noisy(nn.Module):
    """Draws random numbers that are not dropout's, in a function, so that no module says so."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(shape[0], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + torch.randn_like(x) * self.training)


class Crossed(Drops):
    """Drops samples, not numbers of each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(functional.dropout(x.transpose(0, 1), 0.5, self.training).transpose(0, 1))


@pytest.mark.parametrize(
    ("module", "shape", "why"),
    [(Noisy, ROW, "draws random numbers"), (Crossed, (1, 6, 6), "batch is not the batch of samples")],
)
def test_functions_that_draw_otherwise_go_to_the_loop(
    module: Callable[..., nn.Module], shape: tuple[int, ...], why: str
) -> None:
    spec = spec_of(module, shape)
    with pytest.raises(Unsupported, match=why):
        VmapNetwork(spec)
    assert choose_engine(spec)[0] == "loop"


class Wide(nn.Module):
    """Activations of 20,000 numbers a sample."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(functional.relu(self.norm(self.conv(x))).mean((2, 3)))


@pytest.mark.parametrize(
    ("module", "shape", "clients", "plain"),
    [(Skip, IMAGE, 8, False), (Skip, IMAGE, 7, True), (Wide, (1, 28, 28), 8, True)],
    ids=["small", "few clients", "large"],
)
def test_who_trains_together_follows_from_the_model_and_the_block(
    module: Callable[..., nn.Module], shape: tuple[int, ...], clients: int, plain: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """On a CPU a large network or a small block is trained by plain steps, and equals the loop."""
    spec = spec_of(module, shape)
    batches = Batches(random_samples(shape, 30, 3), torch.device("cpu"))
    indices = [np.arange(3 * c, 3 * c + 3) for c in range(clients)]
    start = torch.from_numpy(spec.initial()).expand(clients, -1)
    calls: list[int] = []
    original = VmapNetwork.step

    def counted(self: Any, x: Any, *given: Any) -> Any:
        calls.append(len(x))
        return original(self, x, *given)

    monkeypatch.setattr(VmapNetwork, "step", counted)
    assert choose_engine(spec, "vmap")[0] == "vmap"
    calls.clear()
    given = LocalWork(1, 3, 0.05), 0, range(clients), indices, start
    rows = VmapEngine(spec, batches, 0).train(*given).rows
    assert bool(calls) != plain
    torch.testing.assert_close(rows, LoopEngine(spec, batches, 0).train(*given).rows, rtol=0, atol=1e-4)


class Viewed(nn.Module):
    """As in PyTorch's tutorial: ``view`` takes no image in the channels-last layout."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(shape[0], 6, 5), nn.Linear(6 * 14 * 14, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(functional.max_pool2d(functional.relu(self.conv(x)), 2).view(-1, 6 * 14 * 14))


@pytest.mark.parametrize("clients", [2, 9])
def test_a_network_that_needs_one_layout_of_images_gets_it(clients: int) -> None:
    spec = spec_of(Viewed, (3, 32, 32))
    batches = Batches(random_samples(spec.shape, 30, 3), torch.device("cpu"))
    start = torch.from_numpy(spec.initial()).expand(clients, -1)
    work, indices = LocalWork(1, 3, 0.05), [np.arange(3 * c, 3 * c + 3) for c in range(clients)]
    given = work, 0, range(clients), indices, start
    assert choose_engine(spec, "vmap")[0] == "vmap"
    found = VmapEngine(spec, batches, 0).train(*given)
    assert not found.failures
    torch.testing.assert_close(found.rows, LoopEngine(spec, batches, 0).train(*given).rows, rtol=0, atol=1e-4)
    spec = spec_of(Skip, (3, 32, 32))
    assert VmapNetwork(spec).takes_channels_last()


def test_the_choice_of_an_engine_has_one_thread_whatever_the_process_has(monkeypatch):
    seen = []
    monkeypatch.setattr(
        training_engine, "_trial", lambda *_: seen.append(torch.get_num_threads()) or (0.0, [])
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        choose_engine(ModelSpec.of(MODELS["linear"](), (4,), 2, 0))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert seen == [1]


class Quantiles(nn.Module):
    """A network with an operation that ``torch.func`` does not vectorise, and a warning of its own."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(shape[0], 6), nn.Linear(6, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        warnings.warn("of the network's own", UserWarning, stacklevel=1)
        x = self.first(x)
        return self.head(x - x.quantile(0.3, 1, keepdim=True))


def test_what_is_not_vectorised_is_said_once_in_a_line_of_ours() -> None:
    """PyTorch would say it in every process, in five lines."""
    spec = spec_of(Quantiles, ROW)
    engine = VmapEngine(spec, Batches(random_samples(ROW, 60, 3), torch.device("cpu")), 0, least=1)
    start = torch.from_numpy(np.tile(spec.initial(), (2, 1)))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert choose_engine(spec) == (
            "vmap",
            "a trial agrees with the plain loop; torch.func does aten::lerp_ for one client after another; "
            "not batched: it calls quantile",
        )
        for round in range(2):
            block = engine.train(SGDS[0], round, [0, 1], [np.arange(5), np.arange(9)], start)
            assert not block.failures
    assert engine.apart == {"aten::lerp_"}
    assert {str(warning.message) for warning in seen} == {"of the network's own"}
    with pytest.warns(UserWarning, match="performance drop"):  # of others in this process, as before
        vmap(lambda x: x.quantile(0.3))(torch.rand(2, 3))


def test_long_reasons_are_cut() -> None:
    """torch.func's message about networks that look at numbers is a paragraph with links."""
    spec = ModelSpec.of(MODELS["module"](target=f"{__name__}:looks_at_numbers"), (1, 4, 4), 3, 0)
    name, why = choose_engine(spec)
    assert name == "loop"
    assert "not vmap: " in why
    assert len(why) < 400


class LooksAtNumbers(nn.Module):
    """Which layer comes depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images ``(n, 1, 4, 4)``."""
        logits: torch.Tensor = (self.one if x.mean() > 0 else self.other)(x.flatten(1))
        return logits


def looks_at_numbers() -> nn.Module:
    return LooksAtNumbers()

"""Networks read from their forward pass: they train as in the plain loop, however they are written."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rayfl.losses.mse import MeanSquaredError
from rayfl.models import Model, ModelSpec
from rayfl.models.lstm import Lstm
from rayfl.training import LocalWork
from rayfl.training.batched import BatchedEngine, Unsupported, layers
from rayfl.training.batched.reading import drawn, read
from rayfl.training.batches import Batches
from rayfl.training.engine import choose_engine
from rayfl.training.loop import LoopEngine, seeded
from tests.training.conftest import stepwise
from tests.training.test_batched import SGDS, assert_equal, random_samples
from tests.training.test_recurrent import texts

CPU, IMAGE = torch.device("cpu"), (2, 8, 8)

PARTS: dict[str, Callable[[], Any]] = {
    "last": lambda: nn.Linear(4, 3),  # in another order than they compute
    "norm": lambda: nn.BatchNorm2d(4),
    "conv": lambda: nn.Conv2d(2, 4, 3, padding=1),
    "inner": lambda: nn.Conv2d(4, 4, 3, padding="same", bias=False),
    "same": lambda: nn.BatchNorm2d(4),
    "wide": lambda: nn.Linear(64, 4),
    "vectors": lambda: nn.LayerNorm(4),
    "rows": lambda: nn.BatchNorm1d(4),
    "pixels": lambda: nn.LayerNorm((4, 8, 8)),
    "pool": lambda: nn.MaxPool2d(2),
    "drop": lambda: nn.Dropout(0.3),
    "act": nn.ReLU,
    "matrix": lambda: nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)),
    "vector": lambda: nn.Parameter(torch.zeros(3)),
    "embedding": lambda: nn.Embedding(20, 4),
    "lstm": lambda: nn.LSTM(4, 5, 2, batch_first=True),
    "words": lambda: nn.Linear(5, 20),
}


class Network(nn.Module):
    """Some of :data:`PARTS`, and a function of the network and its samples."""

    def __init__(self, parts: str, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        for part in PARTS:
            if part in parts.split():
                setattr(self, part, PARTS[part]())

    def forward(self, x: Tensor) -> Any:
        """What the function says."""
        return self.function(self, x)


class Written(Model):
    """A network of this file as a model."""

    name: str = "written"
    parts: str
    function: Callable[[Any, Tensor], Any]

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        network = Network(self.parts, self.function)
        return {"all": tuple(name for name, _ in (*network.named_parameters(), *network.named_buffers()))}

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return Network(self.parts, self.function)


class Sentences(Written):
    """One that predicts words."""

    tokens = True

    def example(self, shape: tuple[int, ...], classes: int, count: int, rng: np.random.Generator) -> Any:
        return Lstm().example(shape, classes, count, rng)


def spec_of(parts: str, function: Callable[[Any, Tensor], Any], loss: Any = None) -> ModelSpec:
    given = () if loss is None else (loss,)
    return ModelSpec.of(Written(parts=parts, function=function), IMAGE, 3, 0, *given)


def kinds(spec: ModelSpec, training: bool = True) -> list[str]:
    return [type(leaf.layer).__name__ for leaf in read(spec, training).leaves]


def tutorial(m: Any, x: Tensor) -> Tensor:
    x = F.max_pool2d(F.relu(m.conv(x)), 2).view(-1, 64)
    return m.last(F.relu(m.wide(x)))


def modules(m: Any, x: Tensor) -> Tensor:
    x = torch.flatten(m.act(m.pool(m.conv(x))), 1)
    return m.last(m.act(m.wide(x)))


def methods(m: Any, x: Tensor) -> Tensor:
    """What is asked of shapes and types is no question of numbers."""
    assert x.dim() == 4
    assert x.shape[1] == m.conv.in_channels
    x = torch.relu(m.conv(x.contiguous()))
    x = F.max_pool2d(x, kernel_size=2, stride=2).reshape(x.size(0), -1)
    return m.last(m.wide(x.view(len(x), 64) if x.is_floating_point() else x).relu_())


def averages(m: Any, x: Tensor) -> Tensor:
    x = F.adaptive_avg_pool2d(m.conv(x), (4, 2))
    return m.last(F.avg_pool2d(x, (4, 2)).flatten(1))


def log_probabilities(m: Any, x: Tensor) -> Tensor:
    return F.log_softmax(m.last(m.conv(x).mean(dim=[-1, -2])), dim=1)


def own_parameters(m: Any, x: Tensor) -> Tensor:
    return F.linear(m.conv(x).mean((3, 2), keepdim=True).flatten(1), m.matrix, bias=m.vector)


def dropout(m: Any, x: Tensor) -> Tensor:
    x = F.dropout(m.drop(m.conv(x)), 0.2, m.training)
    return m.last(x.mean((2, 3)))


def certain(m: Any, x: Tensor) -> Tensor:
    """Dropout of everything draws nothing, and none of nothing may be the same tensor."""
    x = F.relu(F.dropout(m.conv(x), 0.5, training=False), inplace=True)
    x = x + F.dropout(m.inner(x.clone()), 1.0, m.training)
    return m.last(m.drop(x).mean((2, 3)))


def dropped_in_place(m: Any, x: Tensor) -> Tensor:
    """What is dropped is missing in the sum, too."""
    x = m.conv(x)
    y = F.dropout(x, 0.4, m.training, inplace=True)
    return m.last((x + m.inner(y)).mean((2, 3)))


def clamped(m: Any, x: Tensor) -> Tensor:
    kept = m.conv(x).clamp(min=0)
    out = kept.clone()
    out += m.inner(kept)
    return nn.LogSoftmax()(m.last(torch.clamp(out, min=0).mean((2, 3))))


def residual(m: Any, x: Tensor) -> Tensor:
    """As torchvision writes it."""
    kept = m.norm(m.conv(x))
    out = m.same(m.inner(F.relu(kept)))
    out += kept
    return m.last(torch.relu_(out).mean((2, 3)))


def nested(m: Any, x: Tensor) -> Tensor:
    """A residual in a residual, whose inside begins with a ReLU in place."""
    x = m.conv(x)
    y = torch.add(x, m.norm(x))
    return m.last((x + F.relu(y + m.inner(y.relu()), inplace=True)).mean((2, 3)))


def activations(m: Any, x: Tensor) -> Tensor:
    x = torch.tanh(F.leaky_relu(m.conv(x), 0.2, inplace=True))
    x = F.silu(F.elu(m.inner(x), alpha=0.7))
    x = F.gelu(m.wide(F.avg_pool2d(x, 2).flatten(1)).sigmoid(), approximate="tanh")
    return m.last(F.gelu(x))


def layer_norm(m: Any, x: Tensor) -> Tensor:
    return m.last(m.vectors(m.wide(m.pool(m.conv(x)).flatten(1))).tanh())


WRITTEN = {
    "tutorial": ("conv wide last", tutorial),
    "modules": ("conv wide last pool act", modules),
    "methods": ("conv wide last", methods),
    "averages": ("conv last", averages),
    "log-probabilities": ("conv last", log_probabilities),
    "own parameters": ("matrix vector conv", own_parameters),
    "dropout": ("conv drop last", dropout),
    "residual": ("conv norm inner same last", residual),
    "certain dropout": ("conv inner drop last", certain),
    "dropout in place": ("conv inner last", dropped_in_place),
    "clamped": ("conv inner last", clamped),
    "nested": ("conv norm inner last", nested),
    "activations": ("conv inner wide last", activations),
    "LayerNorm": ("conv wide pool vectors last", layer_norm),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("work", SGDS, ids=str)
@pytest.mark.parametrize("written", WRITTEN)
def test_however_it_is_written_it_equals_the_loop(written: str, work: LocalWork) -> None:
    spec = spec_of(*WRITTEN[written])
    assert_equal(spec, work, [6, 4, 2, 5])
    name, why = choose_engine(spec)
    assert (name, why) == ("batched", "a trial agrees with the plain loop")


def test_the_same_network_has_the_same_bits_and_the_same_kernels() -> None:
    batches = Batches(random_samples(IMAGE, 30, 3), CPU)
    found = {}
    for written in ("tutorial", "modules", "methods"):
        spec = spec_of(*WRITTEN[written])
        engine = BatchedEngine(spec, batches, 0)
        assert engine.compiled is not None
        start = torch.from_numpy(spec.initial()).expand(2, -1)
        found[written] = engine.train(
            LocalWork(2, 4, 0.1), 0, [0, 1], [np.arange(9), np.arange(9, 30)], start
        )
        model, x = found[written].rows[0], batches.train(np.arange(5))[0]
        engine.forward.load(model)
        assert engine.forward._compiled is not None
        module = spec.build().eval()
        spec.load(module, model)
        torch.testing.assert_close(engine.forward(x), module(x).detach())
    assert torch.equal(found["tutorial"].rows, found["modules"].rows)
    assert torch.equal(found["tutorial"].rows, found["methods"].rows)


def test_what_is_read() -> None:
    assert kinds(spec_of(*WRITTEN["residual"])) == [
        "Conv2d", "BatchNorm", "ReLU", "Conv2d", "BatchNorm", "ReLU", "AvgPool2d", "Flatten", "Linear",
    ]  # fmt: skip
    root = read(spec_of(*WRITTEN["residual"])).root.layers
    assert [type(layer).__name__ for layer in root[2:4]] == ["Residual", "ReLU"]
    first, second = read(spec_of(*WRITTEN["averages"])).leaves[1:3]
    assert (first.layer.kernel, second.layer.kernel) == ((2, 4), (4, 2))  # type: ignore[attr-defined]
    conv, linear = (leaf for leaf in read(spec_of(*WRITTEN["own parameters"])).leaves if leaf.names)
    assert linear.names == {"weight": "matrix", "bias": "vector"}
    assert conv.names == {"weight": "conv.weight", "bias": "conv.bias"}
    cast = spec_of("conv last", lambda m, x: m.last(m.conv(x.float().to(torch.float32)).mean((2, 3))))
    assert kinds(cast) == ["Conv2d", "AvgPool2d", "Flatten", "Linear"]


def test_evaluation_is_read_apart() -> None:
    plain = spec_of("conv drop last", lambda m, x: m.last(m.drop(m.conv(x)).mean((2, 3))))
    assert "Dropout" in kinds(plain)
    assert "Dropout" not in kinds(plain, training=False)
    always = spec_of("wide last", lambda m, x: m.last(F.dropout(m.wide(x[:, 0]), 0.5)))
    with pytest.raises(Unsupported, match="it takes a part of a value"):
        read(always)
    always = spec_of("conv wide last", lambda m, x: m.last(F.dropout(tutorial_front(m, x), 0.5)))
    assert "Dropout" in kinds(always, training=False)  # a mistake of the network, and its own
    batches = Batches(random_samples(IMAGE, 30, 3), CPU)
    assert BatchedEngine(always, batches, 0).forward._compiled is None
    other = spec_of("conv wide last", lambda m, x: m.last(tutorial_front(m, x if m.training else -x)))
    assert BatchedEngine(other, batches, 0).compiled is not None
    assert BatchedEngine(other, batches, 0).forward._compiled is None
    ends = spec_of(*WRITTEN["log-probabilities"])
    read(ends)
    with pytest.raises(Unsupported, match="log_softmax"):  # tests report what the network says
        read(ends, training=False)
    with pytest.raises(Unsupported, match="log_softmax"):  # only the cross-entropy cannot tell
        read(spec_of(*WRITTEN["log-probabilities"], loss=MeanSquaredError()))


def tutorial_front(m: Any, x: Tensor) -> Tensor:
    return F.relu(m.wide(F.max_pool2d(F.relu(m.conv(x)), 2).flatten(1)))


class Reversed(torch.autograd.Function):
    """The identity, whose gradient has the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        return -dy[0]


def without_gradient(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = m.conv(x)
    return m.last(x.mean((2, 3)))


def in_bfloat16(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.last(m.conv(x).mean((2, 3)))


def view_changed(m: Any, x: Tensor) -> Tensor:
    x = m.conv(x)
    F.relu(x.view(len(x), -1), inplace=True)
    return m.last(x.mean((2, 3)))


def frozen_norm(m: Any, x: Tensor) -> Tensor:
    m.norm.eval()
    return m.last(m.norm(m.conv(x)).mean((2, 3)))


def never_mind(m: Any, x: Tensor) -> Tensor:
    """It hides the problem from whoever reads it."""
    x = m.conv(x)
    with contextlib.suppress(Exception):
        x = torch.cos(x)
    return m.last(x.mean((2, 3)))


def mean_of(m: Any, x: Tensor) -> Any:
    return m.last(m.conv(x).mean((2, 3)))


def until_large(m: Any, x: Tensor) -> Tensor:
    while float(x.norm()) < 1:
        x = x * 2
    return mean_of(m, x)


def counted(m: Any, x: Tensor) -> Tensor:
    m.calls = getattr(m, "calls", 0) + 1
    return mean_of(m, x)


def seldom(m: Any, x: Tensor) -> Tensor:
    m.random = getattr(m, "random", random.Random(0))
    return mean_of(m, x if m.random.random() < 2 else -x)


def times(m: Any, x: Tensor) -> Tensor:
    for _ in range(int(m.norm.num_batches_tracked + 10**12)):
        x = F.relu(x)
    return mean_of(m, x)


REFUSED = {
    "numbers that never come": ("conv last", until_large, "it calls (norm|linalg_vector_norm)"),
    "a number of a buffer": ("conv norm last", times, "it calls __int__ with norm.num_batches_tracked"),
    "a counter": ("conv last", counted, "it changes its attributes"),
    "a generator": ("conv last", seldom, "it changes its attributes"),
    "a batch of one": (
        "conv norm last",
        lambda m, x: m.last((m.norm(y) if len(y := m.conv(x)) > 1 else y).mean((2, 3))),
        "norm.weight is in none of its layers",
    ),
    "a batch of many": (
        "conv last",
        lambda m, x: m.last((F.relu(y) if len(y := m.conv(x)) > 3 else y).mean((2, 3))),
        "size of the batch",
    ),
    "a squeeze": (
        "conv last",
        lambda m, x: m.last(m.conv(x).mean((2, 3)).squeeze()),
        "if only in a batch of one",
    ),
    "another shape": (
        "conv last",
        lambda m, x: m.last(m.conv(x).view(len(x), 2, -1)),
        r"gives \(4, 8, 8\) the",
    ),
    "a clamp": (
        "conv last",
        lambda m, x: m.last(m.conv(x).clamp(0, 6).mean((2, 3))),
        "something else than a ReLU",
    ),
    "another function": (
        "conv last",
        lambda m, x: m.last(F.softplus(m.conv(x)).mean((2, 3))),
        "it calls softplus",
    ),
    "an operator": ("conv last", lambda m, x: mean_of(m, x / 255), "it calls"),
    "a number of the samples": ("conv last", lambda m, x: mean_of(m, x) * float(x.max()), "it calls max"),
    "a sample's number": ("conv last", lambda m, x: mean_of(m, x) if x.tolist() else 0, "it calls tolist"),
    "a number of the model": (
        "conv last",
        lambda m, x: mean_of(m, x) if m.last.bias.tolist() else 0,
        "it calls tolist with last.bias",
    ),
    "a changed parameter": (
        "conv last",
        lambda m, x: F.linear(m.conv(x).mean((2, 3)), m.last.weight.abs(), m.last.bias),
        "it calls abs with last.weight",
    ),
    "a buffer as weights": (
        "conv norm last",
        lambda m, x: F.linear(m.norm(m.conv(x)).mean((2, 3)), torch.diag(m.norm.running_mean)),
        "it calls diag with norm.running_mean",
    ),
    "a buffer as a bias": (
        "conv norm last",
        lambda m, x: m.last(F.conv2d(x, m.conv.weight, m.norm.running_mean).mean((2, 3))),
        "the bias of a Conv2d is not one of its parameters",
    ),
    "bits": ("conv last", lambda m, x: mean_of(m, x.view(torch.int32)), "the shape"),
    "a parameter of no layer": (
        "conv last vector",
        lambda m, x: mean_of(m, x) + m.vector,
        "vector outside of",
    ),
    "an unused layer": ("conv last wide", mean_of, "wide.weight is in none of its layers"),
    "a layer used twice": (
        "conv inner last",
        lambda m, x: m.last(m.inner(m.inner(m.conv(x))).mean((2, 3))),
        "share",
    ),
    "a part that leads nowhere": (
        "conv last drop",
        lambda m, x: mean_of(m, x) if m.drop(x) is not None else 0,
        "not in its outputs",
    ),
    "two branches": (
        "conv inner last",
        lambda m, x: m.last((F.relu(y := m.conv(x)) + m.inner(y)).mean((2, 3))),
        "a sum of two branches",
    ),
    "a LayerNorm of images": (
        "conv pixels last",
        lambda m, x: m.last(m.pixels(m.conv(x)).mean((2, 3))),
        "a LayerNorm of something else than vectors",
    ),
    "a ReLU that would change what tanh keeps": (
        "conv last",
        lambda m, x: m.last(F.relu(torch.tanh(m.conv(x))).mean((2, 3))),
        "a ReLU right behind Activation",
    ),
    "a sum with itself": (
        "conv last",
        lambda m, x: m.last((y := m.conv(x).mean((2, 3))) + y),
        "a sum of something",
    ),
    "a sum that is weighed": (
        "conv inner last",
        lambda m, x: m.last(torch.add(y := m.conv(x), m.inner(y), alpha=2).mean((2, 3))),
        "a sum",
    ),
    "random numbers": ("conv last", lambda m, x: mean_of(m, x) if random.random() < 2 else 0, "random"),
    "NumPy's": ("conv last", lambda m, x: mean_of(m, x) if np.random.rand() < 2 else 0, "random"),  # noqa: NPY002
    "PyTorch's": ("conv last", lambda m, x: mean_of(m, x) if torch.rand(1) is not None else 0, "random"),
    "the size of the batch": (
        "conv last",
        lambda m, x: m.last((m.conv(x) if len(x) < 3 else m.conv(x).relu()).mean((2, 3))),
        "size of the",
    ),
    "no gradient": ("conv last", without_gradient, "without a gradient"),
    "detached": ("conv last", lambda m, x: m.last(m.conv(x).detach().mean((2, 3))), "it calls detach"),
    "an own gradient": (
        "conv last",
        lambda m, x: m.last(Reversed.apply(m.conv(x)).mean((2, 3))),
        "it calls clone",
    ),
    "an own precision": ("conv last", in_bfloat16, "a precision of its own"),
    "another precision": ("conv last", lambda m, x: mean_of(m, x.double().float()), "it calls double"),
    "a view that changes": ("conv last", view_changed, "it calls linear with last.weight"),
    "a frozen norm": ("conv norm last", frozen_norm, "a BatchNorm is not in the mode"),
    "a problem it hides": ("conv last", never_mind, "it calls cos"),
    "an error": ("conv last", lambda m, x: m.missing(x), "cannot be read: .*missing"),
    "several outputs": ("conv last", lambda m, x: (mean_of(m, x), x), "its outputs cannot be read"),
    "images": ("conv", lambda m, x: m.conv(x), "its outputs have 4 dimensions"),
    "pixels on end": (
        "conv last",
        lambda m, x: m.last(m.conv(x).view(-1, 4)),
        "how many samples there are",
    ),
    "a linear layer of images": (
        "conv last",
        lambda m, x: m.last(m.conv(x).mean(3)).mean(2),
        "mean over something",
    ),
    "windows that overlap": (
        "conv last",
        lambda m, x: m.last(F.adaptive_avg_pool2d(m.conv(x), 3).mean((2, 3))),
        "overlap",
    ),
    "outputs that go on": (
        "conv last",
        lambda m, x: F.relu(log_probabilities(m, x)),
        "computes with its outputs",
    ),
    "probabilities over samples": (
        "conv last",
        lambda m, x: F.log_softmax(mean_of(m, x), 0),
        "it calls log_softmax",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_followed_is_refused(case: str) -> None:
    parts, function, why = REFUSED[case]
    with pytest.raises(Unsupported, match=why):
        read(spec_of(parts, function))


def test_hooks_are_refused() -> None:
    """Of parameters; those of modules are calls like others."""

    class Hooked(Written):
        def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
            module = super().build(shape, classes)
            next(module.parameters()).register_hook(lambda gradient: gradient.clamp(-1, 1))
            return module

    with pytest.raises(Unsupported, match="a parameter has a hook"):
        read(ModelSpec.of(Hooked(parts="conv last", function=mean_of), IMAGE, 3, 0))


def test_a_batch_of_one_is_no_batch_for_a_norm_of_vectors() -> None:
    spec = spec_of(
        "conv pool wide rows last", lambda m, x: m.last(m.rows(m.wide(m.pool(m.conv(x)).flatten(1))))
    )
    batches, start = (
        Batches(random_samples(IMAGE, 30, 3), CPU),
        torch.from_numpy(spec.initial()).expand(2, -1),
    )
    given = LocalWork(1, 4, 0.1), 0, [0, 1], [np.arange(5), np.arange(5, 13)], start
    for make in (LoopEngine, BatchedEngine):
        failures = make(spec, batches, 0).train(*given).failures
        assert list(failures) == [0]
        assert "more than" in failures[0]


def test_reading_changes_nothing() -> None:
    """Neither the generators nor what networks of this kind start from."""
    spec, drawing = spec_of(*WRITTEN["dropout"]), spec_of(*REFUSED["PyTorch's"][:2])
    before = torch.get_rng_state(), spec.initial()
    read(spec)
    with pytest.raises(Unsupported, match="random"):
        read(drawing)
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_array_equal(spec.initial(), before[1])


def sentences(function: Callable[[Any, Tensor], Any], parts: str = "embedding lstm words") -> ModelSpec:
    return ModelSpec.of(Sentences(parts=parts, function=function), (6,), 20, 0)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.words(m.lstm(m.embedding(x))[0]).transpose(1, 2),
        lambda m, x: m.words(m.lstm(m.embedding(x.long()))[0]).permute(0, 2, -2).contiguous(),
        lambda m, x: F.linear(m.lstm(m.embedding(x))[0], m.words.weight, m.words.bias).transpose(-1, -2),
    ],
    ids=["transpose", "permute", "function"],
)
def test_an_lstm_of_ones_own_equals_the_loop(function: Callable[[Any, Tensor], Any]) -> None:
    spec = sentences(function)
    assert choose_engine(spec) == ("batched", "a trial agrees with the plain loop")
    batches, start = Batches(texts(6, 20), CPU), torch.from_numpy(spec.initial()).expand(2, -1)
    given = LocalWork(2, 5, 0.3), 0, [0, 1], [np.arange(17), np.arange(17, 20)], start
    expected, found = (make(spec, batches, 0).train(*given) for make in (LoopEngine, BatchedEngine))
    torch.testing.assert_close(found.rows, expected.rows, rtol=0, atol=1e-5)
    assert not torch.allclose(found.rows, start, rtol=0, atol=1e-2)
    (lstm,) = (leaf.layer for leaf in read(spec).leaves if len(leaf.names) == 8)
    assert type(lstm).__name__ == "Lstm"


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda m, x: m.words(m.lstm(m.embedding(x))[0]), "its outputs cannot be read"),
        (lambda m, x: m.words(m.lstm(m.embedding(x))[1][0]), "something else than the last layer"),
        (lambda m, x: m.words(m.lstm(m.embedding(x))[1][1]), "it calls linear with words.weight"),
        (
            lambda m, x: m.words(m.lstm(m.embedding(x), (torch.ones(2, len(x), 5),) * 2)[0]),
            "states of its own",
        ),
        (lambda m, x: m.words(m.lstm(m.embedding(x).transpose(0, 1))[0]), "it transposes something else"),
        (
            lambda m, x: m.words(F.dropout(m.lstm(m.embedding(x))[0], 0.1)).transpose(1, 2),
            "dropout of the states",
        ),
        (lambda m, x: m.words(m.lstm(m.embedding(x))[0]).transpose(0, 2), "it transposes something else"),
        (lambda m, x: m.words(m.lstm(m.embedding(x))[0].flatten(0, 1)), "how many samples"),
        (lambda m, x: m.words(F.group_norm(m.lstm(m.embedding(x))[0], 1)).transpose(1, 2), "over the words"),
        (
            lambda m, x: m.words(m.lstm(m.embedding(x), (h := torch.zeros(2, len(x), 5).add_(1), h))[0]),
            "states of its own",
        ),
        (lambda m, x: m.words(F.relu(m.lstm(m.embedding(x))[0])).transpose(1, 2), "a ReLU right behind Lstm"),
    ],
    ids=[
        "not transposed",
        "states",
        "cells",
        "begun",
        "transposed",
        "dropout",
        "samples last",
        "flat",
        "GroupNorm",
        "changed",
        "ReLU",
    ],
)
def test_words_that_cannot_be_followed_are_refused(function: Callable[[Any, Tensor], Any], why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        read(sentences(function))


def test_small_images_of_all_clients_go_together_and_large_ones_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, work = spec_of(*WRITTEN["residual"]), LocalWork(1, 4, 0.1)
    batches = Batches(random_samples(IMAGE, 30, 3), CPU)
    start = torch.from_numpy(spec.initial()).expand(3, -1)
    given = work, 0, [0, 1, 2], [np.arange(4), np.arange(8), np.arange(9, 30)], start
    calls, grouped = [], layers.Conv2d._grouped_forward

    def counted(self: Any, *given: Any) -> Tensor:
        calls.append(len(given[0]))
        return grouped(self, *given)

    monkeypatch.setattr(layers.Conv2d, "_grouped_forward", counted)
    together = stepwise(spec, batches, 0).train(*given)
    assert set(calls) == {2, 3}  # one client alone has no company
    monkeypatch.setattr(layers, "_SMALL_CONVOLUTION", 0)
    monkeypatch.setattr(layers.BatchNorm, "small", 0)
    before = len(calls)
    apart = stepwise(spec, batches, 0).train(*given)
    assert len(calls) == before
    torch.testing.assert_close(together.rows, apart.rows, rtol=0, atol=1e-5)


def test_a_normal_number_kept_for_later_is_part_of_what_is_drawn() -> None:
    """NumPy draws two at a time."""
    with seeded(1):
        np.random.standard_normal()  # noqa: NPY002
        before = drawn()
        assert drawn() == before
        np.random.standard_normal()  # noqa: NPY002
        assert drawn() != before

"""Fused convolution, pooling and ReLU against PyTorch's own, one client at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from rayfl.training.batched import BatchedEngine, layers
from rayfl.training.batched.fused import LARGEST_WINDOW, ConvPoolReLU, fuse
from rayfl.training.batched.jit import jit
from rayfl.training.batched.layers import Step, pair
from rayfl.training.batched.parameters import Parameter, Sgd
from rayfl.training.batches import Batches
from rayfl.training.work import LocalWork
from tests.training.bounds import Truth, assert_within, sum_error
from tests.training.conftest import make_samples, make_spec

STEP = Step([])


def twins(conv: nn.Conv2d, pool: nn.MaxPool2d | None = None) -> list[layers.Layer]:
    """The layers of a convolution, a pooling (by default of 2 x 2) and a ReLU."""
    given = (pair(each) for each in (conv.stride, conv.padding, conv.dilation))  # type: ignore[arg-type]
    pool = pool or nn.MaxPool2d(2)
    of_pool = (pair(each) for each in (pool.kernel_size, pool.stride, pool.padding, pool.dilation))
    return [
        layers.Conv2d(*given, conv.groups, conv.in_channels, pair(conv.kernel_size)),
        layers.MaxPool2d(*of_pool, pool.ceil_mode),
        layers.ReLU(),
    ]


def fused(weight: torch.Tensor, bias: torch.Tensor | None, padding: int = 0, lr: float = 1.0) -> ConvPoolReLU:
    """The fused layer of C clients with copies of ``weight`` ``(C, O, I, K, K)`` and ``bias``."""
    _, outputs, channels, kernel, _ = weight.shape
    conv = nn.Conv2d(channels, outputs, kernel, padding=padding, bias=bias is not None)
    (layer,) = fuse(twins(conv))
    assert isinstance(layer, ConvPoolReLU)
    parameters = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    layer.conv.bind({n: Parameter(p.detach().clone(), Sgd(lr)) for n, p in parameters.items()}, {})
    return layer


def step(
    layer: ConvPoolReLU, x: torch.Tensor, dy: torch.Tensor, need_input: bool = True
) -> tuple[torch.Tensor, ...]:
    """Outputs, gradient of the input (or zeros), and the negative moves of the parameters at a rate of 1."""
    bias = layer.conv.bias
    before = [p.value.clone() for p in (layer.conv.weight, bias) if p is not None]
    y = layer.forward(x, STEP).clone()
    dx = layer.backward(dy, need_input)
    after = [p.value for p in (layer.conv.weight, bias) if p is not None]
    assert (dx is not None) == need_input
    return (
        y,
        torch.zeros(()) if dx is None else dx.clone(),
        *(b - a for a, b in zip(after, before, strict=True)),
    )


def decided(z: torch.Tensor, error: torch.Tensor) -> bool:
    """Whether rounding can change no decision: which of a window's pixels is the largest, and its sign."""
    height, width = (2 * (side // 2) for side in z.shape[-2:])
    windows = z[..., :height, :width].unfold(-2, 2, 2).unfold(-2, 2, 2).flatten(-2).sort().values
    most, second = windows[..., -1], windows[..., -2]
    return bool(torch.minimum(most.abs(), most - second).min() > 2 * error.max())


@settings(max_examples=60, deadline=None)
@given(
    clients=st.integers(1, 3),
    batch=st.integers(1, 4),
    channels=st.integers(1, 10),
    outputs=st.integers(1, 20),
    kernel=st.sampled_from([1, 2, 3, 4, 5, 6]),
    padding=st.integers(0, 2),
    more=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    bias=st.booleans(),
    channels_last=st.booleans(),
    seed=st.integers(0, 999),
)
def test_equals_autograd(clients, batch, channels, outputs, kernel, padding, more, bias, channels_last, seed):
    height, width = (max(1, kernel - 2 * padding + m) for m in more)
    if channels * kernel**2 > LARGEST_WINDOW:
        return
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(clients, batch, channels, height, width, generator=g)
    if channels_last:
        x = x.movedim(2, 4).contiguous().movedim(4, 2)
    weight = torch.randn(clients, outputs, channels, kernel, kernel, generator=g)
    b = torch.randn(clients, outputs, generator=g) if bias else None
    given_ = [t for t in (x, weight, b) if t is not None]

    def convolved(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(
            [functional.conv2d(*(t[c] for t in tensors), padding=padding) for c in range(clients)]
        )

    leaves = [t.double().requires_grad_() for t in given_]
    sizes = [t.double().abs().requires_grad_() for t in given_]  # the same sums of absolute values
    z, size = convolved(leaves), convolved(sizes)
    errors = sum_error(channels * kernel**2 + 1, size.detach())
    assume(decided(z.detach(), errors))
    expected = functional.max_pool2d(functional.relu(z.flatten(0, 1)), 2).unflatten(0, (clients, batch))
    dy = torch.randn(expected.shape, generator=g)
    dz, *gradients = torch.autograd.grad(expected, [z, *leaves], dy.double())
    magnitudes = torch.autograd.grad(size, sizes, dz.abs())
    with torch.no_grad():
        y, *got = step(fused(weight, b, padding), x, dy)
    assert_within((y - expected).abs().detach(), errors.max(), "outputs")
    terms = outputs * kernel**2, *[batch * z[0, 0, 0].numel() + 2] * 2
    # Parameters move by their gradients at a rate of 1, and what they moved by is a difference.
    kept = torch.zeros(()), *sizes[1:]
    for mine, exact, magnitude, n, size in zip(got, gradients, magnitudes, terms, kept, strict=False):
        assert_within((mine - exact).abs(), sum_error(n, magnitude + size.detach()) + 1e-30, "gradients")


def example(clients: int = 3, batch: int = 4) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(clients, batch, 3, 11, 9, generator=g)
    weight, bias = torch.randn(clients, 5, 3, 3, 3, generator=g), torch.randn(clients, 5, generator=g)
    return x, weight, bias, torch.randn(clients, batch, 5, 4, 3, generator=g)


def test_no_gradient_of_the_input_when_nobody_asks():
    x, weight, bias, dy = example()
    full, without = (step(fused(weight, bias), x, dy, need) for need in (True, False))
    for k in (0, 2, 3):
        assert torch.equal(full[k], without[k])


def test_bits_do_not_depend_on_who_shares_the_call():
    x, weight, bias, dy = example()
    together = step(fused(weight, bias), x, dy)
    for c in range(len(x)):
        alone = step(fused(weight[c : c + 1], bias[c : c + 1]), x[c : c + 1], dy[c : c + 1])
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a[0], b[c])


def test_bits_do_not_depend_on_padding_rows():
    x, weight, bias, dy = example()
    dy[:, 3:] = 0
    padded = step(fused(weight, bias), x, dy)
    short = step(fused(weight, bias), x[:, :3], dy[:, :3])
    for k in (0, 1):
        assert torch.equal(padded[k][:, :3], short[k])
    assert not padded[1][:, 3:].any()
    for k in (2, 3):
        assert torch.equal(padded[k], short[k])


def test_a_second_step_forgets_the_first():
    x, weight, bias, dy = example()
    layer = fused(weight, bias, lr=0.0)
    first = layer.forward(x, STEP).clone(), layer.backward(dy, True).clone()
    layer.forward(x[:2, :1] + 1, STEP)  # fewer clients would also be narrowed: only sizes matter here
    again = layer.forward(x, STEP).clone(), layer.backward(dy, True).clone()
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)


def test_the_first_of_equal_pixels_wins_and_a_maximum_of_zero_passes_nothing():
    weight, bias = torch.ones(1, 2, 1, 1, 1), torch.tensor([[0.0, -1.0]])
    x = torch.ones(1, 1, 1, 2, 2)
    y, dx, dw, db = step(fused(weight, bias), x, torch.ones(1, 1, 2, 1, 1))
    assert y.flatten().tolist() == [1.0, 0.0]
    assert dx.flatten().tolist() == [1.0, 0.0, 0.0, 0.0]
    assert dw.flatten().tolist() == [1.0, 0.0]
    assert db.flatten().tolist() == [1.0, 0.0]


def test_of_equal_pixels_the_right_one_comes_before_the_one_below():
    """In each of the two windows that are computed together."""
    rows = torch.tensor([[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]])
    layer = fused(torch.ones(1, 1, 1, 1, 1), None)
    _, dx, *_ = step(layer, rows.view(1, 1, 1, 2, 4), torch.ones(1, 1, 1, 1, 2))
    assert dx.view(2, 4).tolist() == [[0.0, 1.0, 0.0, 1.0], [0.0] * 4]


def test_nan_is_not_hidden_by_the_maximum_and_stays_with_its_client():
    x, weight, bias, dy = example(2)
    x[0, 1, 0, 2, 2] = float("nan")
    y, dx, dw, db = step(fused(weight, bias), x, dy)
    one = functional.max_pool2d(functional.conv2d(x[0], weight[0], bias[0]), 2)
    assert torch.equal(y[0].isnan(), one.isnan())
    assert y[0].isnan().any()
    assert dw[0].isnan().any()
    for t in (y, dx, dw, db):
        assert t[1].isfinite().all()


def test_infinite_gradients_stay_with_their_client():
    x, weight, bias, dy = example(2)
    dy[0] = float("inf")
    _, dx, dw, db = step(fused(weight, bias), x, dy)
    for t in (dx, dw, db):
        assert t[1].isfinite().all()


@pytest.mark.parametrize(
    ("conv", "pool"),
    [
        (nn.Conv2d(1, 2, 3, stride=2), None),
        (nn.Conv2d(1, 2, 3, dilation=2), None),
        (nn.Conv2d(2, 2, 3, groups=2), None),
        (nn.Conv2d(1, 2, (3, 5)), None),
        (nn.Conv2d(1, 2, 3, padding=(0, 1)), None),
        (nn.Conv2d(16, 2, 5), None),
        (nn.Conv2d(1, 2, 3), nn.MaxPool2d(3)),
        (nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, stride=1)),
        (nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, padding=1)),
        (nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, ceil_mode=True)),
    ],
)
def test_what_the_kernels_do_not_cover_stays_as_it_was(conv: nn.Conv2d, pool: nn.MaxPool2d | None):
    parts = twins(conv, pool)
    assert fuse(parts) == parts


def test_kernels_compile_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])

    def negate(x: np.ndarray) -> None:
        x[0] = -x[0]

    x = np.ones(1, np.float32)
    jit(fastmath=False)(negate)(x)
    assert x[0] == -1


@pytest.mark.one_in(5)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize(
    ("name", "shape", "chosen"),
    [
        ("lenet5", (1, 28, 28), 2),
        ("lenet5", (3, 32, 32), 2),
        ("mthfl_cnn", (3, 16, 16), 2),
        ("leaf_cnn", (1, 13, 13), 1),
    ],
)
def test_engines_agree(name: str, shape: tuple[int, ...], chosen: int, momentum: float):
    samples = make_samples(shape)
    spec, batches = make_spec(name, samples), Batches(samples, torch.device("cpu"))
    work = LocalWork(2, 4, 0.02, momentum=momentum, weight_decay=0.01)
    rng = np.random.default_rng(1)
    indices = [rng.choice(80, n, replace=False) for n in (6, 3, 1, 5)]
    start = torch.from_numpy(np.tile(spec.initial(), (len(indices), 1)))
    given = work, 1, range(len(indices)), indices, start
    truth = Truth.of(spec, batches, 0, *given)
    engines = [BatchedEngine(spec, batches, 0, clients_per_call=c) for c in (3, 1)]
    root = engines[0].network.root
    assert sum(isinstance(layer, ConvPoolReLU) for layer in root.layers) == chosen
    for engine in engines:
        truth.check(engine.train(*given))

"""The compiled products of linear layers, against NumPy in double precision; and a client's company."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from rayfl.training.batched.linear_kernels import descend, forward
from rayfl.training.batched.parameters import Parameter, Sgd
from tests.training.bounds import assert_within, sum_error

SHAPES = list(product((1, 2, 7), (1, 4, 5, 13), (1, 16, 33)))
"""Outputs (odd ones have a row without a partner), samples (fives and what is left), features."""


def product(what: str, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """In double precision."""
    return np.einsum(what, one.astype(np.float64), other.astype(np.float64))


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("outputs", "batch", "features"), SHAPES)
@pytest.mark.parametrize("pulled", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_step_is_the_formula(
    outputs: int, batch: int, features: int, pulled: bool, shifted: bool, masked: bool
):
    weights = (3, outputs, features)
    w, t, f, dy, x = arrays(weights, weights, weights, (3, batch, outputs), (3, batch, features))
    expected, size = w.astype(np.float64) * 0.9, np.abs(w, dtype=np.float64)
    if pulled:
        expected, size = expected + 0.25 * (t - expected), size + 0.25 * (np.abs(t) + size)
    expected -= 0.5 * (product("cbo,cbd->cod", dy, x) + (f if shifted else 0.0))
    size += 0.5 * (product("cbo,cbd->cod", np.abs(dy), np.abs(x)) + (np.abs(f) if shifted else 0.0))
    target, offset = (t if pulled else None), (f if shifted else None)
    mask = np.arange(w.size, dtype=np.uint8).reshape(w.shape) % 3 // 2 if masked else None
    descend(w, dy, x, np.float32(0.9), np.float32(-0.5), target, np.float32(0.25), offset, mask)
    if mask is not None:
        expected = expected * mask
        assert (w[mask == 0] == 0).all()
    assert_within(np.abs(w - expected), sum_error(batch + 6, size))


@pytest.mark.parametrize(("outputs", "batch", "features"), SHAPES)
def test_the_forward_product_is_the_formula(outputs: int, batch: int, features: int):
    w, b, x = arrays((3, outputs, features), (3, outputs), (3, batch, features))
    y = np.full((3, batch, outputs), np.nan, np.float32)
    forward(x, w, b, y)
    expected = product("cbd,cod->cbo", x, w) + b[:, None]
    size = product("cbd,cod->cbo", np.abs(x), np.abs(w)) + np.abs(b[:, None])
    assert_within(np.abs(y - expected), sum_error(features + 1, size))


def test_a_term_of_zeros_changes_no_bit():
    """SCAFFOLD before it has variates, FedProx where it starts."""
    w, dy, x = arrays((2, 5, 9), (2, 10, 5), (2, 10, 9))
    one, rate, mu = np.float32(1), np.float32(-0.1), np.float32(0.3)
    plain, shifted, pulled = w.copy(), w.copy(), w.copy()
    descend(plain, dy, x, one, rate, None, np.float32(0), None, None)
    descend(shifted, dy, x, one, rate, None, np.float32(0), np.zeros_like(w), None)
    descend(pulled, dy, x, one, rate, w.copy(), mu, None, None)
    assert (plain == shifted).all()
    assert (plain == pulled).all()
    assert not (plain == w).any()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("proximal", [0.0, 0.1])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_thin_and_thick_products_make_the_same_step(momentum: float, proximal: float, weight_decay: float):
    """A product is thin up to 32 samples: the same gradient once as 20 samples, once as 40 with zeros."""
    shapes = (2, 64, 65), (2, 64, 65), (2, 20, 64), (2, 20, 65)
    start, offset, dy, x = (torch.from_numpy(a) for a in arrays(*shapes))
    after = []
    for samples in (20, 40):
        more = samples - 20
        left = torch.nn.functional.pad(dy, (0, 0, 0, more)).transpose(1, 2)
        right = torch.nn.functional.pad(x, (0, 0, 0, more))
        sgd = Sgd(0.1, momentum, weight_decay, proximal)
        parameter = Parameter(start.clone(), sgd, offset)
        for _ in range(3):
            parameter.descend_product(left, right)
        after.append(parameter.value)
    # Three steps of 0.1 along gradients that momentum makes up to 5.6 gradients long.
    slope = torch.bmm(dy.double().abs().transpose(1, 2), x.double().abs()) + offset.abs()
    size = start.double().abs() + 0.1 * 5.61 * slope
    assert_within((after[0] - after[1]).abs(), 2 * sum_error(3 * (20 + 6), size))
    assert not torch.allclose(after[0], start, rtol=0, atol=1e-2)


@pytest.mark.parametrize("batch", [1, 3, 5, 8])
def test_padding_changes_no_bit(batch: int):
    """A client whose batch is shorter than its company's makes the step that it makes alone."""
    w, dy, x = arrays((2, 7, 33), (2, batch, 7), (2, batch, 33))
    wide = 10 - batch
    padded_dy, padded_x = (np.pad(a, ((0, 0), (0, wide), (0, 0))) for a in (dy, x))
    alone, together = w.copy(), w.copy()
    none = np.float32(1), np.float32(-0.1), None, np.float32(0), None, None
    descend(alone, dy, x, *none)
    descend(together, padded_dy, padded_x, *none)
    assert (alone == together).all()

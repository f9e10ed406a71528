"""The compiled LSTM against PyTorch's in double precision, and the exponentials that it is made of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from rayfl.models import MODELS, ModelSpec
from rayfl.training import LocalWork
from rayfl.training.batched import exponential, lstm_kernel
from tests.training.bounds import UNIT
from tests.training.test_recurrent import assert_equal, texts

Floats = NDArray[np.float32]


@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (exponential.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
        (exponential.tanh, np.tanh),
        (exponential.decay, lambda x: np.exp(-abs(x))),
    ],
)
def test_functions_of_numbers_are_right_to_a_few_roundings(
    function: Callable[[np.float32], float], exact: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> None:
    edges = [0.0, 1e-30, 1e-4, 0.6249999, 0.625, 0.6250001, 43.5, 86.9, 87.0, 87.1, 500.0, 3e38]
    near = np.concatenate([edges, np.linspace(0, 30, 500)]).astype(np.float32)
    x = np.concatenate([near, -near])
    given = -abs(x) if function is exponential.decay else x
    found = np.array([function(each) for each in given], np.float64)
    with np.errstate(over="ignore"):
        truth = exact(x.astype(np.float64))
    # e^-x is off by u (x + c) for what range reduction does to x, and is not below e^-87.
    allowed = UNIT * (abs(x.astype(np.float64)).clip(0, 87) + 8) * abs(truth) + 2e-38
    assert (abs(found - truth) <= allowed).all()
    assert np.isnan(function(np.float32("nan")))


@pytest.mark.parametrize(
    ("function", "end"), [(exponential.sigmoid, 1.0), (exponential.tanh, 1.0), (exponential.decay, 0.0)]
)
def test_functions_of_infinity(function: Callable[[np.float32], float], end: float) -> None:
    sign = -1 if function is exponential.decay else 1
    assert function(np.float32(sign * np.inf)) == pytest.approx(end, abs=2e-38)


def by_autograd(gates: Floats, recurrent: Floats, above: Floats) -> tuple[NDArray[np.float64], ...]:
    """States of one client ``(L, B, H)``, and gradients of ``sum above h`` for ``gates`` ``(L, B, 4 H)``.

    PyTorch's LSTM with ``W_ih = 1``: what enters it are the gates' arguments.
    """
    size = above.shape[2]
    lstm = nn.LSTM(4 * size, size, bias=False).double()
    with torch.no_grad():
        lstm.weight_ih_l0.copy_(torch.eye(4 * size))
        lstm.weight_hh_l0.copy_(torch.from_numpy(recurrent))
    x = torch.from_numpy(gates).double().requires_grad_()
    h = lstm(x)[0]
    (h * torch.from_numpy(above)).sum().backward()
    assert x.grad is not None
    return h.detach().numpy(), x.grad.numpy()


def through(gates: Floats, recurrent: Floats, above: Floats) -> tuple[Floats, Floats]:
    """The same by the kernel, for clients ``(C, L, B, ...)``."""
    a = gates.copy()
    h, c, tanh_c = (np.full_like(above, np.nan) for _ in range(3))
    lstm_kernel.forward(a, recurrent, h, c, tanh_c)
    kept = above.copy()
    lstm_kernel.backward(a, c, tanh_c, kept, np.ascontiguousarray(recurrent.transpose(0, 2, 1)))
    np.testing.assert_array_equal(kept, above)
    return h, a


@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 12), st.integers(1, 9), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_equals_autograd(clients: int, length: int, texts: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    gates = rng.normal(0, 2, (clients, length, texts, 4 * size)).astype(np.float32)
    recurrent = rng.normal(0, 1, (clients, 4 * size, size)).astype(np.float32)
    above = rng.normal(0, 1, (clients, length, texts, size)).astype(np.float32)
    h, slopes = through(gates, recurrent, above)
    for n in range(clients):
        states, gradients = by_autograd(gates[n], recurrent[n], above[n])
        # Every place multiplies what is off by about the largest of the products' factors.
        grown = (1 + abs(recurrent[n]).sum(0).max() / 4) ** length
        np.testing.assert_allclose(h[n], states, rtol=0, atol=64 * UNIT * grown)
        np.testing.assert_allclose(slopes[n], gradients, rtol=0, atol=64 * UNIT * grown * abs(above).max())


def test_a_client_has_the_same_bits_in_any_company() -> None:
    """With equally long batches."""
    rng = np.random.default_rng(0)
    gates = rng.normal(0, 1, (3, 4, 7, 20)).astype(np.float32)
    recurrent = rng.normal(0, 1, (3, 20, 5)).astype(np.float32)
    above = rng.normal(0, 1, (3, 4, 7, 5)).astype(np.float32)
    together = through(gates, recurrent, above)
    for n in range(3):
        alone = through(*(each[n : n + 1] for each in (gates, recurrent, above)))
        for both, own in zip(together, alone, strict=True):
            np.testing.assert_array_equal(both[n : n + 1], own)


@pytest.mark.parametrize(("batch", "compiled"), [(32, True), (33, False)])
def test_large_batches_are_left_to_the_library(
    batch: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for name in ("forward", "backward"):
        kernel = getattr(lstm_kernel, name)
        monkeypatch.setattr(lstm_kernel, name, lambda *a, f=kernel, n=name: (calls.append(n), f(*a)))
    spec = ModelSpec.of(MODELS["lstm"](embedding=4, hidden=5), (6,), 20, 0)
    assert_equal(spec, texts(6, 20), LocalWork(4, batch, 0.5), sizes=[batch, batch])
    assert ("forward" in calls, "backward" in calls) == (compiled, compiled)

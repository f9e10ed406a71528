"""Cross-entropy and its gradient, compiled and by torch: against autograd in double precision."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from rayfl.training.batched import network
from rayfl.training.batched.network import _plain_cross_entropy
from tests.training.bounds import assert_within, sum_error


def by_autograd(
    logits: torch.Tensor, y: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    z = logits.double().requires_grad_()
    each = functional.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
    loss = (each * weights).sum(1)
    loss.sum().backward()
    assert z.grad is not None
    return loss.detach(), z.grad


def check(
    loss: torch.Tensor, delta: torch.Tensor, logits: torch.Tensor, y: torch.Tensor, weights: torch.Tensor
) -> None:
    """Both are as near the truth as float32 can be.

    With ``x = z - max z``, rounded, ``e^x`` is off by a share of ``u (|x| + c)``, the sum over K classes by a
    share of ``K u`` more, and the sum over B samples by one of ``B u``; the constant c, for the polynomial
    and the few products, is below 16.
    """
    expected, gradient = by_autograd(logits, y, weights)
    z = logits.double()
    x = (z - z.amax(2, keepdim=True)).abs()
    label = torch.nn.functional.one_hot(y, z.shape[2])
    losses = (weights * (1 + (x * label).sum(2) + math.log(z.shape[2]))).sum(1)
    assert_within((loss - expected).abs(), sum_error(z.shape[1] + z.shape[2] + 16, losses), "losses")
    slopes = weights.unsqueeze(2) * (torch.softmax(z, 2) * (1 + x) + label)
    tiny = weights.unsqueeze(2).double() * 2e-38  # e^-87 stands for anything below
    assert_within((delta - gradient).abs(), sum_error(z.shape[2] + 16, slopes) + tiny, "gradients")


def batch(clients: int, samples: int, classes: int, scale: float, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(clients, samples, classes, generator=generator)
    y = torch.randint(classes, (clients, samples), generator=generator)
    weights = torch.rand(clients, samples, generator=generator)
    weights[:, samples // 2 :] *= torch.rand(clients, 1, generator=generator) < 0.5  # padding
    return logits, y, weights


@pytest.fixture(params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(network, "on_gpu", lambda tensor: True)
    return str(request.param)


@given(
    st.integers(1, 9),
    st.integers(1, 12),
    st.integers(1, 70),
    st.sampled_from([0.0, 0.1, 3.0, 100.0]),
    st.integers(0, 9),
)
@example(clients=7, samples=2, classes=5, scale=100.0, seed=2)  # a small loss of large logits
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("numba", [True, False])
def test_equals_autograd(
    numba: bool, clients: int, samples: int, classes: int, scale: float, seed: int
) -> None:
    logits, y, weights = batch(clients, samples, classes, scale, seed)
    given_ = logits.clone()
    with mock.patch.object(network, "on_gpu", return_value=not numba):
        loss, delta = _plain_cross_entropy(given_, y, weights)
    check(loss, delta, logits, y, weights)
    assert torch.equal(given_, logits)  # layers may keep them for their backward passes


@pytest.mark.parametrize("classes", [2, 10, 47])
@pytest.mark.parametrize("samples", [3, 7, 10])
def test_a_client_does_not_depend_on_its_company(way: str, classes: int, samples: int) -> None:
    logits, y, weights = batch(40, samples, classes, 3.0, 0)
    loss, delta = _plain_cross_entropy(logits.clone(), y, weights)
    for clients in range(1, 40):
        some, gradient = _plain_cross_entropy(logits[:clients].clone(), y[:clients], weights[:clients])
        assert torch.equal(some, loss[:clients])
        assert torch.equal(gradient, delta[:clients])


def test_slices_of_larger_arrays(way: str) -> None:
    logits, y, weights = batch(4, 6, 5, 1.0, 1)
    wide = torch.zeros(4, 9, dtype=torch.float32)
    wide[:, :6] = weights
    loss, delta = _plain_cross_entropy(logits.transpose(0, 1).contiguous().transpose(0, 1), y, wide[:, :6])
    check(loss, delta, logits, y, weights)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_diverged_stays_so(way: str, bad: float) -> None:
    """The engine refuses a client by its loss, so that one must not look healthy; others are not touched."""
    logits, y = torch.zeros(2, 1, 4), torch.zeros(2, 1, dtype=torch.int64)
    logits[0, 0, 2] = bad
    loss, delta = _plain_cross_entropy(logits, y, torch.ones(2, 1))
    assert not loss[0].isfinite()
    assert not delta[0].isfinite().all()
    assert loss[1] == pytest.approx(np.log(4))
    torch.testing.assert_close(delta[1, 0], torch.tensor([-0.75, 0.25, 0.25, 0.25]))


def test_a_class_that_is_impossible(way: str) -> None:
    logits = torch.tensor([[[0.0, -np.inf, -1e30, 0.0]]])
    loss, delta = _plain_cross_entropy(logits, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    assert loss.item() == pytest.approx(np.log(2))
    torch.testing.assert_close(delta[0, 0], torch.tensor([-0.5, 0.0, 0.0, 0.5]), rtol=1e-6, atol=1e-30)

"""Compiled pooling against PyTorch's own, also where pixels of a window are equal or not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from rayfl.training.batched import norm_kernels, pool_kernels
from rayfl.training.batched.vectors import LANES


@pytest.mark.parametrize("channels", [1, 8, 11])
@pytest.mark.parametrize("window", [(2, 2), (3, 2), (1, 4)])
def test_maxima_and_their_gradients_are_those_of_pytorch(window: tuple[int, int], channels: int) -> None:
    """Of three values only: the first of equal pixels wins, and NaN beats all."""
    generator = torch.Generator().manual_seed(channels)
    x = torch.randint(-1, 2, (3, channels, 7, 9), generator=generator).float()
    x[torch.rand(x.shape, generator=generator) < 0.02] = torch.nan
    x.requires_grad_()
    expected = functional.max_pool2d(x, window)
    dy = torch.randn(expected.shape, generator=generator)
    (gradient,) = torch.autograd.grad(expected, x, dy)
    pooling = pool_kernels.Pooling(3, channels, 7, 9, *window)
    y, winner = (np.full(expected.numel() + LANES, 9, kind) for kind in (np.float32, np.int32))
    pool_kernels.maximum(flat(x), pooling, y, winner)
    np.testing.assert_array_equal(y[:-LANES], flat(expected)[:-LANES])
    dx = np.full(x.numel() + LANES, np.nan, np.float32)
    pool_kernels.maximum_back(flat(dy), winner, pooling, dx)
    np.testing.assert_array_equal(dx[:-LANES], flat(gradient)[:-LANES])


@pytest.mark.parametrize("outputs", [3, 11])
def test_winners_behind_a_batch_norm_are_those_of_pytorch(outputs: int) -> None:
    """Also the first of equal pixels, and none where ReLU is zero; factors may be negative."""
    generator = torch.Generator().manual_seed(outputs)
    z = torch.randint(-1, 2, (2, outputs, 5, 7), generator=generator).float()
    gamma, beta = (torch.randn(outputs, generator=generator) for _ in range(2))
    normed = functional.batch_norm(z.double(), None, None, gamma.double(), beta.double(), training=True)
    values, places = functional.max_pool2d(normed, 2, return_indices=True)
    expected = torch.where(values > 0, places + 35 * torch.arange(2).view(2, 1, 1, 1), -1)
    lanes = -(-outputs // LANES) * LANES
    padded = functional.pad(z, (0, 0, 0, 0, 0, lanes - outputs))
    mean, variance, y = (np.empty(size, np.float32) for size in (lanes, lanes, values.numel() + LANES))
    winner = np.empty(len(y), np.int32)
    norm_kernels.pooled(
        flat(padded), norm_kernels.Plane(2, 5, 7, outputs), gamma.numpy(), beta.numpy(), np.float32(1e-5),
        mean, variance, y, winner,
    )  # fmt: skip
    np.testing.assert_array_equal(winner[:-LANES], expected.movedim(1, 3).flatten().numpy())
    np.testing.assert_allclose(y[:-LANES], flat(values.relu())[:-LANES], atol=1e-5)


def flat(images: torch.Tensor) -> np.ndarray:
    """With channels last, and longer by a vector."""
    return np.append(images.detach().movedim(1, 3).flatten().numpy(), np.zeros(LANES, np.float32))

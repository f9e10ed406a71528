"""Pooling of images with channels last over windows that do not overlap, compiled by Numba for the CPU.

A window begins where the one before ends; rows and columns that fill no window are left out, and their
gradient is zero. (A convolution with 2x2 maximum pooling and ReLU is one kernel, :mod:`.conv_kernels`.)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rayfl.training.batched.jit import jit
from rayfl.training.batched.vectors import LANES, load, multiply_add, splat, store, store_larger

_ZERO = np.float32(0)


class Pooling(NamedTuple):
    """Sizes: samples, their channels, height and width, and the rows and columns of a window."""

    batch: int
    channels: int
    height: int
    width: int
    rows: int
    columns: int


@jit(fastmath=False)  # NaN must win a maximum, as in PyTorch
def maximum(x, pooling, y, winner):  # type: ignore[no-untyped-def]
    """The maximum of each window. All arrays are flat, and longer than needed by LANES.

    Args:
        x: ``(B, height, width, channels)``.
        pooling: the sizes.
        y: receives ``(B, height // rows, width // columns, channels)``.
        winner: receives the position of the maximum in ``x`` (the first of equals); shaped as ``y``.
    """
    batch, channels, height, width, rows, columns = pooling
    to = 0
    for s in range(batch):
        for p in range(height // rows):
            for q in range(width // columns):
                corner = ((s * height + p * rows) * width + q * columns) * channels
                # From back to front: the last lanes may reach into the next pixel, which is written later.
                for lane in range((channels - 1) // LANES * LANES, -1, -LANES):
                    for v in range(rows):
                        for u in range(columns):
                            of = corner + (v * width + u) * channels + lane
                            store_larger(y, winner, to + lane, x, of, v + u == 0)
                    for i in range(lane, min(lane + LANES, channels)):
                        winner[to + i] += i - lane
                to += channels


@jit(fastmath={"contract"})
def maximum_back(dy, winner, pooling, dx):  # type: ignore[no-untyped-def]
    """The inputs' gradients ``dx`` from those of the maxima; shapes as in :func:`maximum`."""
    batch, channels, height, width, rows, columns = pooling
    for k in range(batch * height * width * channels):
        dx[k] = _ZERO
    for k in range(batch * (height // rows) * (width // columns) * channels):
        dx[winner[k]] = dy[k]  # windows do not overlap


@jit(fastmath={"contract"})
def mean(x, pooling, y):  # type: ignore[no-untyped-def]
    """The mean of each window; arrays as in :func:`maximum`."""
    batch, channels, height, width, rows, columns = pooling
    share, zero = splat(np.float32(1) / np.float32(rows * columns)), splat(_ZERO)
    to = 0
    for s in range(batch):
        for p in range(height // rows):
            for q in range(width // columns):
                corner = ((s * height + p * rows) * width + q * columns) * channels
                for lane in range((channels - 1) // LANES * LANES, -1, -LANES):
                    total = zero
                    for v in range(rows):
                        for u in range(columns):
                            of = corner + (v * width + u) * channels + lane
                            total = multiply_add(load(x, of), share, total)
                    store(y, to + lane, total)
                to += channels


@jit(fastmath={"contract"})
def mean_back(dy, pooling, dx):  # type: ignore[no-untyped-def]
    """The inputs' gradients ``dx`` from those of the means; arrays as in :func:`maximum`."""
    batch, channels, height, width, rows, columns = pooling
    share, zero = splat(np.float32(1) / np.float32(rows * columns)), splat(_ZERO)
    tall, wide = height // rows, width // columns
    # In the order of memory, so that lanes that reach into the next pixel are overwritten.
    to = 0
    for s in range(batch):
        for r in range(height):
            of = (s * tall + r // rows) * wide * channels
            inside = wide * columns if r < tall * rows else 0
            for c in range(inside):
                gradient = of + c // columns * channels
                for lane in range(0, channels, LANES):
                    store(dx, to + lane, multiply_add(load(dy, gradient + lane), share, zero))
                to += channels
            for k in range(to, to + (width - inside) * channels):
                dx[k] = _ZERO
            to += (width - inside) * channels

"""BatchNorm, 2x2 maximum pooling and ReLU behind a convolution, compiled by Numba for the CPU.

For one client. ``z`` is what the convolution returns (:mod:`.conv_kernels` without winners): ``(B, tall,
wide, lanes)``, the ``outputs`` of each pixel filled up to whole vectors. With the mean m and the variance s^2
of an output over all pixels of the batch (Ioffe and Szegedy 2015, Algorithm 1),

    ``z' = (z - m) / sqrt(s^2 + eps)``,  ``v = gamma z' + beta``,  ``y = relu(max v)``.

Only the winners of the pooling have a gradient, but through m and s every pixel has one:

    ``dz = gamma / sqrt(s^2 + eps) (dv - mean dv - z' mean(dv z'))``.

The result is the same whatever other clients a call trains.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rayfl.training.batched.jit import jit
from rayfl.training.batched.vectors import LANES, load, multiply_add, splat, store, store_maximum

_ZERO, _ONE = np.float32(0), np.float32(1)


class Plane(NamedTuple):
    """Sizes of ``z``: samples, rows and columns of pixels, and outputs, without what fills up a vector."""

    batch: int
    tall: int
    wide: int
    outputs: int


@jit(fastmath=False)  # NaN must win a maximum, as in PyTorch
def forward(z, plane, gamma, beta, eps, mean, variance, y, winner):  # type: ignore[no-untyped-def]
    """Normalise with the batch's own statistics, pool, apply ReLU. All arrays are flat.

    Args:
        z: see above.
        plane: the sizes.
        gamma, beta: ``(outputs,)``.
        eps: float32.
        mean, variance: receive m and s^2 ``(lanes,)``.
        y: receives ``(B, tall // 2, wide // 2, outputs)``; longer by LANES.
        winner: receives the winning pixel of each, or -1 where ReLU is 0; longer likewise.
    """
    batch, tall, wide, outputs = plane
    lanes = (outputs + LANES - 1) // LANES * LANES
    pixels = tall * wide
    share, one, less = splat(_ONE / np.float32(batch * pixels)), splat(_ONE), splat(-_ONE)
    zero = splat(_ZERO)
    scale, shift = np.zeros(lanes, np.float32), np.zeros(lanes, np.float32)
    for lane in range(0, lanes, LANES):
        total = zero
        for s in range(batch):  # of one image after another: the sums stay small
            part = zero
            for p in range(s * pixels, (s + 1) * pixels):
                part = multiply_add(load(z, p * lanes + lane), one, part)
            total = multiply_add(part, share, total)
        store(mean, lane, total)
        middle, total = total, zero
        for s in range(batch):
            part = zero
            for p in range(s * pixels, (s + 1) * pixels):
                off = multiply_add(middle, less, load(z, p * lanes + lane))
                part = multiply_add(off, off, part)
            total = multiply_add(part, share, total)
        store(variance, lane, total)
    for o in range(outputs):
        scale[o] = gamma[o] / np.sqrt(variance[o] + eps)
        shift[o] = beta[o] - mean[o] * scale[o]
    at = 0
    for s in range(batch):
        for p in range(tall // 2):
            for q in range(wide // 2):
                pixel = (s * tall + 2 * p) * wide + 2 * q
                # The last lanes may reach into the next pixel: from back to front, it is written later.
                for lane in range(lanes - LANES, -1, -LANES):
                    of, a, b = pixel * lanes + lane, load(scale, lane), load(shift, lane)
                    below = of + wide * lanes
                    store_maximum(
                        y, winner, at + lane, pixel, 1, wide,
                        multiply_add(load(z, of), a, b),
                        multiply_add(load(z, of + lanes), a, b),
                        multiply_add(load(z, below), a, b),
                        multiply_add(load(z, below + lanes), a, b),
                    )  # fmt: skip
                at += outputs


@jit(fastmath={"contract"})
def backward(dy, winner, z, plane, gamma, eps, mean, variance, dz, dgamma, dbeta):  # type: ignore[no-untyped-def]
    """Gradients from those of the pooled outputs. All arrays are flat.

    Args:
        dy, winner, z, plane, gamma, eps, mean, variance: as of :func:`forward`.
        dz: receives the gradients of ``z``, shaped alike.
        dgamma, dbeta: receive those of gamma and beta ``(outputs,)``.
    """
    batch, tall, wide, outputs = plane
    lanes = (outputs + LANES - 1) // LANES * LANES
    pooled, pixels = batch * (tall // 2) * (wide // 2), batch * tall * wide
    inverse, scale = np.zeros(lanes, np.float32), np.zeros(lanes, np.float32)
    for o in range(outputs):
        inverse[o] = _ONE / np.sqrt(variance[o] + eps)
        scale[o] = gamma[o] * inverse[o]
        dgamma[o] = dbeta[o] = _ZERO
    for p in range(pooled):
        for o in range(outputs):
            at = winner[p * outputs + o]
            if at >= 0:
                g = dy[p * outputs + o]
                dbeta[o] += g
                dgamma[o] += g * ((z[at * lanes + o] - mean[o]) * inverse[o])
    constant, slope = np.zeros(lanes, np.float32), np.zeros(lanes, np.float32)
    for o in range(outputs):
        constant[o] = -scale[o] * dbeta[o] / np.float32(pixels)
        slope[o] = -scale[o] * inverse[o] * dgamma[o] / np.float32(pixels)
    less = splat(-_ONE)
    for lane in range(0, lanes, LANES):
        middle, c0, c1 = load(mean, lane), load(constant, lane), load(slope, lane)
        for p in range(pixels):
            of = p * lanes + lane
            store(dz, of, multiply_add(multiply_add(middle, less, load(z, of)), c1, c0))
    for p in range(pooled):
        for o in range(outputs):
            at = winner[p * outputs + o]
            if at >= 0:
                dz[at * lanes + o] += scale[o] * dy[p * outputs + o]

"""Normalisations of one client, compiled by Numba for the CPU.

``x`` holds the pixels of all samples with channels last; a vector is one pixel. BatchNorm
(Ioffe and Szegedy 2015, Algorithm 1), with the mean m and the variance s^2 of a channel over all pixels of
the batch:

    ``x' = (x - m) / sqrt(s^2 + eps)``,  ``v = gamma x' + beta``,
    ``dx = gamma / sqrt(s^2 + eps) (dv - mean dv - x' mean(dv x'))``.

Between a convolution and 2x2 maximum pooling with ReLU, ``y = relu(max v)`` is computed in one pass from the
convolution's outputs (:mod:`.conv_kernels`), and only the winners of the pooling have a ``dv``. GroupNorm (Wu
and He 2018) has a mean and a variance for each sample and group of channels; with one group, for vectors, it
is LayerNorm.

The result does not depend on the other clients that a call trains. All arrays are flat; where vectors are
read or written beyond the channels of the last pixel, they are longer by LANES.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rayfl.training.batched.jit import jit
from rayfl.training.batched.vectors import LANES, load, multiply_add, splat, store, store_maximum

_ZERO, _ONE = np.float32(0), np.float32(1)


class Plane(NamedTuple):
    """Sizes of a convolution's outputs: samples, rows and columns of pixels, and channels (without the
    padding to whole vectors)."""

    batch: int
    tall: int
    wide: int
    outputs: int


@jit(fastmath={"contract"})
def _find_statistics(x, samples, pixels, stride, channels, mean, variance):  # type: ignore[no-untyped-def]
    """Mean and variance ``(lanes,)`` of each channel, where the pixels are ``stride`` numbers apart."""
    share, one, minus = splat(_ONE / np.float32(samples * pixels)), splat(_ONE), splat(-_ONE)
    zero = splat(_ZERO)
    for lane in range(0, channels, LANES):
        total = zero
        for s in range(samples):  # a separate sum for each image: sums stay small
            part = zero
            for p in range(s * pixels, (s + 1) * pixels):
                part = multiply_add(load(x, p * stride + lane), one, part)
            total = multiply_add(part, share, total)
        store(mean, lane, total)
        middle, total = total, zero
        for s in range(samples):
            part = zero
            for p in range(s * pixels, (s + 1) * pixels):
                off = multiply_add(middle, minus, load(x, p * stride + lane))
                part = multiply_add(off, off, part)
            total = multiply_add(part, share, total)
        store(variance, lane, total)


@jit(fastmath={"contract"})
def _find_scale_and_shift(gamma, beta, eps, mean, variance, scale, shift):  # type: ignore[no-untyped-def]
    """Write the normalisation and its affine map as one scale and one shift per channel."""
    for o in range(len(gamma)):
        scale[o] = gamma[o] / np.sqrt(variance[o] + eps)
        shift[o] = beta[o] - mean[o] * scale[o]


@jit(fastmath=False)  # NaN must win a maximum, as in PyTorch
def pooled(z, plane, gamma, beta, eps, mean, variance, y, winner):  # type: ignore[no-untyped-def]
    """BatchNorm with the batch's own statistics, pooling and ReLU.

    Args:
        z: a convolution's outputs ``(B, tall, wide, lanes)``, each pixel padded to whole vectors.
        plane: the sizes.
        gamma, beta: ``(outputs,)``.
        eps: float32.
        mean, variance: receive m and s^2 ``(lanes,)``.
        y: receives ``(B, tall // 2, wide // 2, outputs)``; longer by LANES.
        winner: receives the winning pixel of each, or -1 where ReLU is 0; longer by LANES.
    """
    batch, tall, wide, outputs = plane
    lanes = (outputs + LANES - 1) // LANES * LANES
    _find_statistics(z, batch, tall * wide, lanes, outputs, mean, variance)
    scale, shift = np.zeros(lanes, np.float32), np.zeros(lanes, np.float32)
    _find_scale_and_shift(gamma, beta, eps, mean, variance, scale, shift)
    at = 0
    for s in range(batch):
        for p in range(tall // 2):
            for q in range(wide // 2):
                pixel = (s * tall + 2 * p) * wide + 2 * q
                # From back to front: the last lanes may reach into the next pixel, which is written later.
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
def pooled_back(dy, winner, z, plane, gamma, eps, mean, variance, dz, dgamma, dbeta):  # type: ignore[no-untyped-def]
    """Gradients from those of the pooled outputs.

    Args:
        dy, winner, z, plane, gamma, eps, mean, variance: as for :func:`pooled`; ``dy`` is shaped as ``y``.
        dz: receives the gradients of ``z``, in its shape.
        dgamma, dbeta: receive those of gamma and beta ``(outputs,)``.
    """
    batch, tall, wide, outputs = plane
    lanes = (outputs + LANES - 1) // LANES * LANES
    winners, pixels = batch * (tall // 2) * (wide // 2), batch * tall * wide
    inverse, scale = np.zeros(lanes, np.float32), np.zeros(lanes, np.float32)
    for o in range(outputs):
        inverse[o] = _ONE / np.sqrt(variance[o] + eps)
        scale[o] = gamma[o] * inverse[o]
        dgamma[o] = dbeta[o] = _ZERO
    for p in range(winners):
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
    minus = splat(-_ONE)
    for lane in range(0, lanes, LANES):
        middle, c0, c1 = load(mean, lane), load(constant, lane), load(slope, lane)
        for p in range(pixels):
            of = p * lanes + lane
            store(dz, of, multiply_add(multiply_add(middle, minus, load(z, of)), c1, c0))
    for p in range(winners):
        for o in range(outputs):
            at = winner[p * outputs + o]
            if at >= 0:
                dz[at * lanes + o] += scale[o] * dy[p * outputs + o]


@jit(fastmath={"contract"})
def batch(x, samples, pixels, gamma, beta, eps, mean, variance, y):  # type: ignore[no-untyped-def]
    """BatchNorm alone, with the batch's own statistics.

    Args:
        x: ``(samples, pixels, channels)``.
        samples, pixels: number of samples, and of pixels per sample.
        gamma, beta: ``(channels,)``.
        eps: float32.
        mean, variance: receive m and s^2 ``(lanes,)``.
        y: receives ``v``, shaped as ``x``.
    """
    channels = len(gamma)
    _find_statistics(x, samples, pixels, channels, channels, mean, variance)
    affine(x, samples * pixels, gamma, beta, eps, mean, variance, y)


@jit(fastmath={"contract"})
def affine(x, pixels, gamma, beta, eps, mean, variance, y):  # type: ignore[no-untyped-def]
    """BatchNorm with known statistics; ``pixels`` of all samples, other arguments as for :func:`batch`."""
    channels = len(gamma)
    lanes = (channels + LANES - 1) // LANES * LANES
    scale, shift = np.zeros(lanes, np.float32), np.zeros(lanes, np.float32)
    _find_scale_and_shift(gamma, beta, eps, mean, variance, scale, shift)
    for p in range(pixels):  # lanes that reach into the next pixel are overwritten
        for lane in range(0, channels, LANES):
            at = p * channels + lane
            store(y, at, multiply_add(load(x, at), load(scale, lane), load(shift, lane)))


@jit(fastmath={"contract"})
def batch_back(dy, x, pixels, gamma, eps, mean, variance, dx, dgamma, dbeta):  # type: ignore[no-untyped-def]
    """Gradients of :func:`batch` for its inputs, gamma and beta; ``pixels`` is the number in all samples."""
    channels = len(gamma)
    lanes = (channels + LANES - 1) // LANES * LANES
    one, minus, zero = splat(_ONE), splat(-_ONE), splat(_ZERO)
    inverse, scale = np.zeros(lanes, np.float32), np.zeros(lanes, np.float32)
    sums, products = np.zeros(lanes, np.float32), np.zeros(lanes, np.float32)
    for o in range(channels):
        inverse[o] = _ONE / np.sqrt(variance[o] + eps)
        scale[o] = gamma[o] * inverse[o]
    for lane in range(0, channels, LANES):
        middle, total, product = load(mean, lane), zero, zero
        for p in range(pixels):
            g = load(dy, p * channels + lane)
            total = multiply_add(g, one, total)
            product = multiply_add(g, multiply_add(middle, minus, load(x, p * channels + lane)), product)
        store(sums, lane, total)
        store(products, lane, product)
    constant, slope = np.zeros(lanes, np.float32), np.zeros(lanes, np.float32)
    for o in range(channels):
        dbeta[o], dgamma[o] = sums[o], products[o] * inverse[o]
        constant[o] = -scale[o] * dbeta[o] / np.float32(pixels)
        slope[o] = -scale[o] * inverse[o] * dgamma[o] / np.float32(pixels)
    for p in range(pixels):
        for lane in range(0, channels, LANES):
            at = p * channels + lane
            off = multiply_add(load(mean, lane), minus, load(x, at))
            through = multiply_add(off, load(slope, lane), load(constant, lane))
            store(dx, at, multiply_add(load(dy, at), load(scale, lane), through))


@jit(fastmath={"contract"})
def group(x, samples, pixels, groups, gamma, beta, eps, mean, inverse, y):  # type: ignore[no-untyped-def]
    """GroupNorm.

    Args:
        x: ``(samples, pixels, channels)``.
        samples, pixels: number of samples, and of pixels per sample.
        groups: number of groups of channels.
        gamma, beta: ``(channels,)``.
        eps: float32.
        mean, inverse: receive the mean and ``1 / sqrt(s^2 + eps)`` of the group of each sample and channel.
        y: receives ``v``, shaped as ``x``.
    """
    channels = len(gamma)
    group_size = channels // groups
    lanes = (channels + LANES - 1) // LANES * LANES
    sums, scale, shift = np.zeros(lanes, np.float32), np.zeros(lanes, np.float32), np.zeros(lanes, np.float32)
    share, minus, one, zero = _ONE / np.float32(group_size * pixels), splat(-_ONE), splat(_ONE), splat(_ZERO)
    for s in range(samples):
        begin = s * pixels * channels
        m, v = mean[s * lanes : (s + 1) * lanes], inverse[s * lanes : (s + 1) * lanes]
        for lane in range(0, channels, LANES):
            total = zero
            for p in range(pixels):
                total = multiply_add(load(x, begin + p * channels + lane), one, total)
            store(sums, lane, total)
        _sum_groups(sums, groups, group_size, share, m)
        for lane in range(0, channels, LANES):
            middle, total = load(m, lane), zero
            for p in range(pixels):
                off = multiply_add(middle, minus, load(x, begin + p * channels + lane))
                total = multiply_add(off, off, total)
            store(sums, lane, total)
        _sum_groups(sums, groups, group_size, share, v)
        for o in range(channels):
            v[o] = _ONE / np.sqrt(v[o] + eps)
            scale[o] = gamma[o] * v[o]
            shift[o] = beta[o] - m[o] * scale[o]
        for p in range(pixels):
            for lane in range(0, channels, LANES):
                at = begin + p * channels + lane
                store(y, at, multiply_add(load(x, at), load(scale, lane), load(shift, lane)))


@jit(fastmath={"contract"})
def group_back(dy, x, samples, pixels, groups, gamma, mean, inverse, dx, dgamma, dbeta):  # type: ignore[no-untyped-def]
    """Gradients of :func:`group` for its inputs, gamma and beta."""
    channels = len(gamma)
    group_size = channels // groups
    lanes = (channels + LANES - 1) // LANES * LANES
    sums, products = np.zeros(lanes, np.float32), np.zeros(lanes, np.float32)
    constant, slope, scale = (
        np.zeros(lanes, np.float32),
        np.zeros(lanes, np.float32),
        np.zeros(lanes, np.float32),
    )
    share, minus, one, zero = _ONE / np.float32(group_size * pixels), splat(-_ONE), splat(_ONE), splat(_ZERO)
    for o in range(channels):
        dgamma[o] = dbeta[o] = _ZERO
    for s in range(samples):
        begin = s * pixels * channels
        m, v = mean[s * lanes : (s + 1) * lanes], inverse[s * lanes : (s + 1) * lanes]
        for lane in range(0, channels, LANES):
            middle, total, product = load(m, lane), zero, zero
            for p in range(pixels):
                at = begin + p * channels + lane
                g = load(dy, at)
                total = multiply_add(g, one, total)
                product = multiply_add(g, multiply_add(middle, minus, load(x, at)), product)
            store(sums, lane, total)
            store(products, lane, product)
        for o in range(channels):
            products[o] *= v[o]
            dbeta[o] += sums[o]
            dgamma[o] += products[o]
            sums[o] *= gamma[o]
            products[o] *= gamma[o]
            scale[o] = gamma[o] * v[o]
        _sum_groups(sums, groups, group_size, share, constant)
        _sum_groups(products, groups, group_size, share, slope)
        for o in range(channels):
            constant[o] *= -v[o]
            slope[o] *= -v[o] * v[o]
        for p in range(pixels):
            for lane in range(0, channels, LANES):
                at = begin + p * channels + lane
                off = multiply_add(load(m, lane), minus, load(x, at))
                through = multiply_add(off, load(slope, lane), load(constant, lane))
                store(dx, at, multiply_add(load(dy, at), load(scale, lane), through))


@jit(fastmath={"contract"})
def _sum_groups(sums, groups, group_size, share, group_sums):  # type: ignore[no-untyped-def]
    """Write for each channel the sum over its group, times ``share``."""
    part, one = np.zeros(LANES, np.float32), splat(_ONE)
    for g in range(groups):
        total, first = _ZERO, g * group_size
        if group_size >= LANES:  # eight independent sums: additions to one sum wait for each other
            lanes = splat(_ZERO)
            for o in range(first, first + group_size - LANES + 1, LANES):
                lanes = multiply_add(load(sums, o), one, lanes)
            store(part, 0, lanes)
            for k in range(LANES):
                total += part[k]
            first += group_size // LANES * LANES
        for o in range(first, (g + 1) * group_size):
            total += sums[o]
        for o in range(g * group_size, (g + 1) * group_size):
            group_sums[o] = total * share

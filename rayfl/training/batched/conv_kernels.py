"""Convolution, 2x2 maximum pooling and ReLU of small networks in one pass, compiled by Numba for the CPU.

At the sizes of LeNet-5 a call into a library costs as much as its arithmetic, and most of what a backward
pass multiplies is zero: pooling passes the gradient to one pixel in four, ReLU to fewer. So

- the forward pass writes only the pooled maxima, and for each the *position* of its winning window;
- the backward pass visits only the winners whose gradient is not zero.

Samples are held with channels last (``height, width, channels``), where the K pixels of one row of a window
are K * channels consecutive floats. Everything is then a product of a scalar with consecutive floats:

- forward, for each window: ``y[outputs] += x * w[outputs]``, over the window's floats x;
- weights, for each winner: ``dw[row of a window] += g * x[row of a window]``;
- input, for each winner: ``dx[row of a window] += g * w[row of a window]``.

The vectors are explicit (:mod:`.vectors`): sums stay in registers over a whole window. Their order depends
neither on the number of clients in a call nor on the width of the machine's registers.

Forward passes alone are up to twice as fast with interleaved samples (``height, width, channels, sample``):
see :func:`forward_interleaved`.

For a convolution without pooling, or before a normalisation (:mod:`.norm_kernels`), the forward pass writes
the outputs of the convolution alone, and every window has a gradient: :func:`weight_gradient` sums over all
windows, and :func:`input_gradient` is itself a convolution.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayfl.training.batched.jit import jit
from rayfl.training.batched.vectors import (
    LANES,
    WIDE,
    copy,
    get,
    largest,
    load,
    multiply_add,
    splat,
    store,
    store_maximum,
    wide_load,
    wide_splat,
)


class Geometry(NamedTuple):
    """Sizes of one call: C clients of B samples, and of the convolution (K x K, stride 1)."""

    clients: int
    batch: int
    channels: int
    height: int
    width: int
    outputs: int
    kernel: int
    padding: int


@jit(fastmath=False)  # NaN must win a maximum, as in PyTorch
def forward(
    x: NDArray[np.float32],
    weight: NDArray[np.float32],
    bias: NDArray[np.float32],
    geometry: Geometry,
    padded: NDArray[np.float32],
    y: NDArray[np.float32],
    winner: NDArray[np.int32],
) -> None:
    """Pad the samples and compute the pooled outputs, or those of the convolution. All arrays are flat.

    Args:
        x: samples ``(C, B, height, width, channels)``.
        weight: ``(C, outputs, channels, K, K)``.
        bias: ``(C, outputs)``.
        geometry: the sizes.
        padded: receives the samples with their padding; longer than that by LANES + 4 * channels.
        y: receives ``relu(maximum)``: ``(C, B, pooled height, pooled width, outputs)``; longer by LANES. If
            ``winner`` is empty, the convolution's outputs ``(C, B, tall, wide, lanes)``: at least 2 by 4
            pixels; the outputs of each pixel are padded to whole vectors with values that are not read.
        winner: receives where in ``padded`` the winning window of each output begins, or -1; longer by LANES.
    """
    clients, batch, channels, height, width, outputs, kernel, padding = geometry
    rows, row = height + 2 * padding, (width + 2 * padding) * channels
    tall, wide = rows - kernel + 1, width + 2 * padding - kernel + 1
    pools, pooled_height, pooled_width = len(winner) > 0, tall // 2, wide // 2
    size = kernel * channels  # floats of one row of a window
    lanes = (outputs + LANES - 1) // LANES * LANES
    w = np.zeros(kernel * size * lanes, np.float32)  # (row of the window, float of it, output)
    b = np.zeros(lanes, np.float32)
    for c in range(clients):
        k = c * outputs * size * kernel
        for o in range(outputs):
            b[o] = bias[c * outputs + o]
            for i in range(channels):
                for v in range(kernel):
                    for u in range(kernel):
                        w[(v * size + u * channels + i) * lanes + o] = weight[k]
                        k += 1
        for s in range(c * batch, (c + 1) * batch):
            start = s * rows * row
            if padding:
                padded[start : start + rows * row] = 0
            for r in range(height):
                to, of = start + (r + padding) * row + padding * channels, (s * height + r) * width * channels
                copy(padded, to, x, of, width * channels)
            for p in range(pooled_height if pools else (tall + 1) // 2):
                # Two outputs at a time: eight sums fill the multipliers' pipelines and fit into registers. An
                # odd last one repeats its neighbour.
                for pair in range(0, pooled_width if pools else (wide + 1) // 2, 2):
                    q = max(0, min(pair, pooled_width - 2))
                    top, left = (2 * p, 2 * q) if pools else (min(2 * p, tall - 2), min(2 * pair, wide - 4))
                    window = start + top * row + left * channels
                    at = ((s * pooled_height + p) * pooled_width + q) * outputs
                    pixel = ((s * tall + top) * wide + left) * lanes
                    # From back to front: the last lanes may reach into the next pixel, written later.
                    for lane in range(lanes - LANES, -1, -LANES):
                        a00 = a01 = a10 = a11 = b00 = b01 = b10 = b11 = load(b, lane)
                        tap = lane
                        for v in range(kernel):
                            for k in range(size):
                                weights = load(w, tap)
                                tap += lanes
                                of = window + v * row + k
                                a00 = multiply_add(splat(get(padded, of)), weights, a00)
                                a01 = multiply_add(splat(get(padded, of + channels)), weights, a01)
                                b00 = multiply_add(splat(get(padded, of + 2 * channels)), weights, b00)
                                b01 = multiply_add(splat(get(padded, of + 3 * channels)), weights, b01)
                                of += row
                                a10 = multiply_add(splat(get(padded, of)), weights, a10)
                                a11 = multiply_add(splat(get(padded, of + channels)), weights, a11)
                                b10 = multiply_add(splat(get(padded, of + 2 * channels)), weights, b10)
                                b11 = multiply_add(splat(get(padded, of + 3 * channels)), weights, b11)
                        if not pools:
                            to = pixel + lane
                            store(y, to, a00)
                            store(y, to + lanes, a01)
                            store(y, to + 2 * lanes, b00)
                            store(y, to + 3 * lanes, b01)
                            to += wide * lanes
                            store(y, to, a10)
                            store(y, to + lanes, a11)
                            store(y, to + 2 * lanes, b10)
                            store(y, to + 3 * lanes, b11)
                            continue
                        store_maximum(y, winner, at + lane, window, channels, row, a00, a01, a10, a11)
                        if q + 1 < pooled_width:
                            neighbour = window + 2 * channels
                            at_b = at + outputs + lane
                            store_maximum(y, winner, at_b, neighbour, channels, row, b00, b01, b10, b11)


@jit(fastmath=False)  # NaN must win a maximum, as in PyTorch
def forward_interleaved(padded, weight, bias, geometry, margin, y):  # type: ignore[no-untyped-def]
    """The pooled outputs of WIDE interleaved samples: each has a lane of the vectors.

    The sums have the order of those of :func:`forward`, so the results are the same, in half the time if all
    lanes are used; but there are no winners for a backward pass.

    Args:
        padded: samples ``(height + 2 padding, width + 2 padding, channels, WIDE)``.
        weight: ``(outputs, channels, K, K)``.
        bias: ``(outputs,)``.
        geometry: the sizes, of which the batch is not used.
        margin: width of a margin around the outputs, which remains as it is.
        y: receives ``relu(maximum)``: ``(pooled height + 2 margin, pooled width + 2 margin, outputs, WIDE)``.
    """
    _, _, channels, height, width, outputs, kernel, padding = geometry
    row = (width + 2 * padding) * channels * WIDE
    pooled_height = (height + 2 * padding - kernel + 1) // 2
    pooled_width = (width + 2 * padding - kernel + 1) // 2
    size, right = kernel * channels, channels * WIDE
    w = np.zeros((outputs + 1) // 2 * kernel * size * 2, np.float32)  # (pair, row, float of it, one of both)
    b = np.zeros(outputs + 1, np.float32)
    k = 0
    for o in range(outputs):
        b[o] = bias[o]
        for i in range(channels):
            for v in range(kernel):
                for u in range(kernel):
                    w[(o // 2 * kernel * size + v * size + u * channels + i) * 2 + o % 2] = weight[k]
                    k += 1
    for p in range(pooled_height):
        for q in range(pooled_width):
            to = ((p + margin) * (pooled_width + 2 * margin) + q + margin) * outputs * WIDE
            tap = 0
            for o in range(0, outputs, 2):  # eight sums, of two outputs, fill the multipliers' pipelines
                a00 = a01 = a10 = a11 = wide_splat(get(b, o))
                b00 = b01 = b10 = b11 = wide_splat(get(b, o + 1))
                for v in range(kernel):
                    of = (2 * p + v) * row + 2 * q * right
                    for _ in range(size):
                        weight_a, weight_b = wide_splat(get(w, tap)), wide_splat(get(w, tap + 1))
                        x = wide_load(padded, of)
                        a00, b00 = multiply_add(x, weight_a, a00), multiply_add(x, weight_b, b00)
                        x = wide_load(padded, of + right)
                        a01, b01 = multiply_add(x, weight_a, a01), multiply_add(x, weight_b, b01)
                        x = wide_load(padded, of + row)
                        a10, b10 = multiply_add(x, weight_a, a10), multiply_add(x, weight_b, b10)
                        x = wide_load(padded, of + row + right)
                        a11, b11 = multiply_add(x, weight_a, a11), multiply_add(x, weight_b, b11)
                        tap += 2
                        of += WIDE
                store(y, to, largest(a00, a01, a10, a11))
                if o + 1 < outputs:
                    store(y, to + WIDE, largest(b00, b01, b10, b11))
                to += 2 * WIDE


@jit(fastmath=False)  # NaN must win a maximum, as in PyTorch
def backward(
    dy: NDArray[np.float32],
    winner: NDArray[np.int32],
    padded: NDArray[np.float32],
    weight: NDArray[np.float32],
    geometry: Geometry,
    dweight: NDArray[np.float32],
    dbias: NDArray[np.float32],
    dpadded: NDArray[np.float32],
    need_input: bool,
    need_weight: bool,
) -> None:
    """Gradients from those of the pooled outputs. All arrays are flat.

    Args:
        dy: gradients of the pooled outputs, shaped as ``y`` of :func:`forward`.
        winner: from the forward pass.
        padded: from the forward pass.
        weight: ``(C, outputs, channels, K, K)``.
        geometry: the sizes.
        dweight: receives the gradients of the weights, shaped as they are, if ``need_weight``.
        dbias: receives those of the biases.
        dpadded: receives those of ``padded`` if ``need_input``; of the same length.
        need_input, need_weight: whether these gradients are needed.
    """
    clients, batch, channels, height, width, outputs, kernel, padding = geometry
    rows, row = height + 2 * padding, (width + 2 * padding) * channels
    tall, wide = rows - kernel + 1, width + 2 * padding - kernel + 1
    pixels = (tall // 2) * (wide // 2)
    size = kernel * channels
    lanes = (size + LANES - 1) // LANES * LANES
    starts, gradients = np.empty(batch * pixels + 1, np.int32), np.empty(batch * pixels + 1, np.float32)
    w = np.zeros(kernel * lanes, np.float32)  # of one output: (row of the window, float of it)
    dw = np.empty(kernel * lanes, np.float32)
    zero = splat(np.float32(0))
    for c in range(clients):
        if need_input:
            # Lanes beyond the window add zeros, those of a client's last window even to the next client's
            # first sample. If a gradient was not finite they added NaN, which is cleared here.
            dpadded[c * batch * rows * row : (c + 1) * batch * rows * row] = 0
        for o in range(outputs):
            # The outer loop is over pixels, the inner one over samples: overlapping windows should not follow
            # each other, because a load that overlaps a store still under way waits for it.
            count = 0
            for p in range(pixels):
                at = (c * batch * pixels + p) * outputs + o
                for _ in range(batch):
                    gradient, start = get(dy, at), get(winner, at)
                    store(gradients, count, gradient)
                    store(starts, count, start)
                    count += (start >= 0) & (gradient != 0)
                    at += pixels * outputs
            total = np.float32(0)
            for e in range(count):
                total += gradients[e]
            dbias[c * outputs + o] = total

            for lane in range(0, lanes if need_weight else 0, LANES):
                v = 0
                while v < kernel:  # five or three rows at a time, or one: their sums stay in registers
                    first = v * row + lane
                    to = v * lanes + lane
                    a0 = a1 = a2 = a3 = a4 = zero
                    if kernel - v >= 5:
                        for e in range(count):
                            g, start = splat(get(gradients, e)), get(starts, e) + first
                            a0 = multiply_add(g, load(padded, start), a0)
                            a1 = multiply_add(g, load(padded, start + row), a1)
                            a2 = multiply_add(g, load(padded, start + 2 * row), a2)
                            a3 = multiply_add(g, load(padded, start + 3 * row), a3)
                            a4 = multiply_add(g, load(padded, start + 4 * row), a4)
                        store(dw, to, a0)
                        store(dw, to + lanes, a1)
                        store(dw, to + 2 * lanes, a2)
                        store(dw, to + 3 * lanes, a3)
                        store(dw, to + 4 * lanes, a4)
                        v += 5
                    elif kernel - v >= 3:
                        for e in range(count):
                            g, start = splat(get(gradients, e)), get(starts, e) + first
                            a0 = multiply_add(g, load(padded, start), a0)
                            a1 = multiply_add(g, load(padded, start + row), a1)
                            a2 = multiply_add(g, load(padded, start + 2 * row), a2)
                        store(dw, to, a0)
                        store(dw, to + lanes, a1)
                        store(dw, to + 2 * lanes, a2)
                        v += 3
                    else:
                        for e in range(count):
                            start = get(starts, e) + first
                            a0 = multiply_add(splat(get(gradients, e)), load(padded, start), a0)
                        store(dw, to, a0)
                        v += 1

            k = (c * outputs + o) * size * kernel
            for i in range(channels):
                for v in range(kernel):
                    for u in range(kernel):
                        if need_weight:
                            dweight[k] = dw[v * lanes + u * channels + i]
                        w[v * lanes + u * channels + i] = weight[k]
                        k += 1
            if need_input:
                for e in range(count):
                    g, start = splat(get(gradients, e)), get(starts, e)
                    for v in range(kernel):
                        for lane in range(0, lanes, LANES):
                            to = start + v * row + lane
                            moved = multiply_add(g, load(w, v * lanes + lane), load(dpadded, to))
                            store(dpadded, to, moved)


@jit(fastmath={"contract"})
def weight_gradient(dy, padded, geometry, dweight, dbias):  # type: ignore[no-untyped-def]
    """Gradients of one client's parameters from those of the convolution's outputs. All arrays are flat.

    Args:
        dy: gradients ``(B, tall, wide, outputs)``; longer by LANES.
        padded: from the forward pass.
        geometry: the sizes.
        dweight: receives those of the weights ``(outputs, channels, K, K)``.
        dbias: receives those of the biases.
    """
    _, batch, channels, height, width, outputs, kernel, padding = geometry
    rows, row = height + 2 * padding, (width + 2 * padding) * channels
    tall, wide = rows - kernel + 1, width + 2 * padding - kernel + 1
    size = kernel * channels
    zero, one = splat(np.float32(0)), splat(np.float32(1))
    sums = np.empty(8 * LANES, np.float32)
    for lane in range(0, outputs, LANES):  # lanes beyond the last output belong to the next pixel: not used
        used_lanes = min(LANES, outputs - lane)
        total = zero
        for p in range(batch * tall * wide):
            total = multiply_add(load(dy, p * outputs + lane), one, total)
        store(sums, 0, total)
        for o in range(used_lanes):
            dbias[lane + o] = sums[o]
        for v in range(kernel):
            for first in range(0, size, 8):  # eight weights at a time: their sums stay in registers
                begin = max(0, min(first, size - 8))
                a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = zero
                for s in range(batch):
                    for r in range(tall):
                        of = (s * tall + r) * wide * outputs + lane
                        x = (s * rows + r + v) * row + begin
                        for _ in range(wide):
                            g = load(dy, of)
                            a0 = multiply_add(splat(get(padded, x)), g, a0)
                            a1 = multiply_add(splat(get(padded, x + 1)), g, a1)
                            a2 = multiply_add(splat(get(padded, x + 2)), g, a2)
                            a3 = multiply_add(splat(get(padded, x + 3)), g, a3)
                            a4 = multiply_add(splat(get(padded, x + 4)), g, a4)
                            a5 = multiply_add(splat(get(padded, x + 5)), g, a5)
                            a6 = multiply_add(splat(get(padded, x + 6)), g, a6)
                            a7 = multiply_add(splat(get(padded, x + 7)), g, a7)
                            of += outputs
                            x += channels
                store(sums, 0, a0)
                store(sums, LANES, a1)
                store(sums, 2 * LANES, a2)
                store(sums, 3 * LANES, a3)
                store(sums, 4 * LANES, a4)
                store(sums, 5 * LANES, a5)
                store(sums, 6 * LANES, a6)
                store(sums, 7 * LANES, a7)
                for k in range(begin, min(begin + 8, size)):  # an image of few channels has fewer
                    u, i = k // channels, k % channels
                    for o in range(used_lanes):
                        at = (((lane + o) * channels + i) * kernel + v) * kernel + u
                        dweight[at] = sums[(k - begin) * LANES + o]


@jit(fastmath={"contract"})
def input_gradient(dy, weight, geometry, padded, dx):  # type: ignore[no-untyped-def]
    """Gradients of one client's inputs: those of the outputs, padded, convolved with the flipped weights. All
    arrays are flat.

    Args:
        dy: gradients of the outputs ``(B, tall, wide, outputs)``.
        weight: ``(outputs, channels, K, K)``.
        geometry: the sizes; padding is less than K, and images have at least 2 by 4 pixels.
        padded: room for ``dy`` with a padding of ``K - 1 - padding``; longer by LANES + 4 * outputs.
        dx: receives ``(B, height, width, lanes)``: the channels of each pixel, padded to whole vectors.
    """
    _, batch, channels, height, width, outputs, kernel, padding = geometry
    flipped = np.empty(outputs * channels * kernel * kernel, np.float32)
    taps = kernel * kernel
    for o in range(outputs):
        for i in range(channels):
            for k in range(taps):
                flipped[(i * outputs + o) * taps + k] = weight[(o * channels + i) * taps + taps - 1 - k]
    growth = 2 * padding - kernel + 1
    dy_geometry = Geometry(
        1, batch, outputs, height + growth, width + growth, channels, kernel, kernel - 1 - padding
    )
    no_winners, zeros = np.empty(0, np.int32), np.zeros(channels, np.float32)
    forward(dy, flipped, zeros, dy_geometry, padded, dx, no_winners)

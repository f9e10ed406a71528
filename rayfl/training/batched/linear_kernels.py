"""Loops over many clients, compiled by Numba: the thin products of linear layers, and weighted sums.

With ten samples a batch the products are thin: a general matrix library reaches a third to a half of what
the core can do, because it is made for square ones. The forward loop keeps ten sums in registers (two
outputs times five samples) and lets the compiler vectorise along the features: measured 1.3 to 5 times
faster than MKL's batched product for 5 to 32 samples, from 84 x 10 to 3136 x 2048 weights. The step's loop
adds five samples at a time to two rows of weights: 1.7 times as fast as MKL for 10 samples and 784 x 200
weights, as fast for small layers or 32 samples; the other terms of the step need no second pass through
memory. The third product, the gradient of the input, is as fast or faster in MKL.

Clients are independent and each sum has a fixed order. The last bit of a sample's result depends on its place
in the batch (samples after the last group of five are summed in another order), and so on the padding.
"""

from __future__ import annotations

import numpy as np

from rayfl.training.batched.jit import jit

_ZERO = np.float32(0)


@jit(fastmath=True)
def forward(x, w, bias, y):  # type: ignore[no-untyped-def]
    """``y = x w^T + bias``.

    Args:
        x: ``(C, B, D)``, like all arrays here C-contiguous float32.
        w: ``(C, O, D)``.
        bias: ``(C, O)``.
        y: ``(C, B, O)``, written.
    """
    clients, batch, features = x.shape
    outputs = w.shape[1]
    for c in range(clients):
        for o in range(0, outputs - 1, 2):
            b = 0
            while b + 5 <= batch:
                s0 = s1 = s2 = s3 = s4 = t0 = t1 = t2 = t3 = t4 = _ZERO
                for k in range(features):
                    u, v = w[c, o, k], w[c, o + 1, k]
                    x0, x1, x2, x3, x4 = (
                        x[c, b, k],
                        x[c, b + 1, k],
                        x[c, b + 2, k],
                        x[c, b + 3, k],
                        x[c, b + 4, k],
                    )
                    s0 += u * x0
                    s1 += u * x1
                    s2 += u * x2
                    s3 += u * x3
                    s4 += u * x4
                    t0 += v * x0
                    t1 += v * x1
                    t2 += v * x2
                    t3 += v * x3
                    t4 += v * x4
                p, q = bias[c, o], bias[c, o + 1]
                y[c, b, o], y[c, b, o + 1] = s0 + p, t0 + q
                y[c, b + 1, o], y[c, b + 1, o + 1] = s1 + p, t1 + q
                y[c, b + 2, o], y[c, b + 2, o + 1] = s2 + p, t2 + q
                y[c, b + 3, o], y[c, b + 3, o + 1] = s3 + p, t3 + q
                y[c, b + 4, o], y[c, b + 4, o + 1] = s4 + p, t4 + q
                b += 5
            while b < batch:
                s0 = t0 = _ZERO
                for k in range(features):
                    s0 += w[c, o, k] * x[c, b, k]
                    t0 += w[c, o + 1, k] * x[c, b, k]
                y[c, b, o], y[c, b, o + 1] = s0 + bias[c, o], t0 + bias[c, o + 1]
                b += 1
        if outputs % 2:
            o = outputs - 1
            for b in range(batch):
                s0 = _ZERO
                for k in range(features):
                    s0 += w[c, o, k] * x[c, b, k]
                y[c, b, o] = s0 + bias[c, o]


@jit(fastmath={"contract"})
def descend(w, dy, x, keep, scale, target, pull, offset, mask):  # type: ignore[no-untyped-def]
    """``w <- keep w``, ``w <- w + pull (target - w)``, ``w <- w + scale (dy^T x + offset)``, ``w <- w mask``.

    Args:
        w: ``(C, O, D)``, like all arrays here C-contiguous float32; changed.
        dy: ``(C, B, O)``.
        x: ``(C, B, D)``.
        keep, scale, pull: float32.
        target: ``(C, O, D)``, or one for all clients ``(1, O, D)``; None for none.
        offset: ``(C, O, D)``, or None for none.
        mask: of bytes 0 and 1, ``(C, O, D)``, or None for none.
    """
    clients, outputs, features = w.shape
    batch = x.shape[1]
    for c in range(clients):
        o = 0
        while o < outputs:
            both = o + 1 < outputs
            p, q = w[c, o], w[c, o + 1 if both else o]
            for row in range(o, o + 1 + both):  # it stays in the cache until its last sample
                v = w[c, row]
                if keep != 1:
                    for k in range(features):
                        v[k] *= keep
                if target is not None:
                    t = target[c if len(target) > 1 else 0, row]
                    for k in range(features):
                        v[k] += pull * (t[k] - v[k])
                if offset is not None:
                    f = offset[c, row]
                    for k in range(features):
                        v[k] += scale * f[k]
            b = 0
            while both and b + 5 <= batch:
                x0, x1, x2, x3, x4 = x[c, b], x[c, b + 1], x[c, b + 2], x[c, b + 3], x[c, b + 4]
                a0, d0 = scale * dy[c, b, o], scale * dy[c, b, o + 1]
                a1, d1 = scale * dy[c, b + 1, o], scale * dy[c, b + 1, o + 1]
                a2, d2 = scale * dy[c, b + 2, o], scale * dy[c, b + 2, o + 1]
                a3, d3 = scale * dy[c, b + 3, o], scale * dy[c, b + 3, o + 1]
                a4, d4 = scale * dy[c, b + 4, o], scale * dy[c, b + 4, o + 1]
                for k in range(features):
                    u0, u1, u2, u3, u4 = x0[k], x1[k], x2[k], x3[k], x4[k]
                    p[k] = p[k] + a0 * u0 + a1 * u1 + a2 * u2 + a3 * u3 + a4 * u4
                    q[k] = q[k] + d0 * u0 + d1 * u1 + d2 * u2 + d3 * u3 + d4 * u4
                b += 5
            while b < batch:
                a0, x0 = scale * dy[c, b, o], x[c, b]
                for k in range(features):
                    p[k] += a0 * x0[k]
                if both:
                    d0 = scale * dy[c, b, o + 1]
                    for k in range(features):
                        q[k] += d0 * x0[k]
                b += 1
            if mask is not None:
                for row in range(o, o + 1 + both):
                    v, mask_row = w[c, row], mask[c, row]
                    for k in range(features):
                        v[k] *= np.float32(mask_row[k])
            o += 2


@jit(fastmath=False)
def weighted_sum(weights, rows, total):  # type: ignore[no-untyped-def]
    """``total += sum_c a_c w_c`` in double precision, one client after the other.

    Args:
        weights: ``(C,)`` float64.
        rows: ``(C, P)`` float32.
        total: ``(P,)`` float64, changed. A piece of it stays in the cache until all clients are added.
    """
    clients, size = rows.shape
    for start in range(0, size, 4096):
        piece = total[start : start + 4096]
        for c in range(clients):
            weight, row = weights[c], rows[c, start : start + 4096]
            for k in range(len(piece)):
                piece[k] += weight * row[k]

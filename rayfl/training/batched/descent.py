"""An SGD step for some of a client's weights, compiled by Numba for the CPU."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayfl.training.batched.jit import jit

Floats = NDArray[np.float32]


class Step(NamedTuple):
    """What an SGD step changes and reads: flat arrays ``(P,)``, empty for none, and numbers."""

    weights: Floats
    velocity: Floats
    target: Floats
    offset: Floats
    mask: NDArray[np.uint8]
    momentum: np.float32
    decay: np.float32
    rate: np.float32


@jit(fastmath={"contract"})
def descend_product(at, total, dy, x, terms):  # type: ignore[no-untyped-def]
    """One step of SGD along ``dy^T x``. Two rows of weights at a time stay in the cache through all samples.

    Args:
        at: where the layer's weights begin.
        total: its velocity, or without momentum its weights, ``(O, D)``.
        dy: ``(B, O)``.
        x: ``(B, D)``.
        terms: of the step.
    """
    outputs, size = total.shape
    batch = len(x)
    has_momentum = len(terms.velocity) > 0
    scale = np.float32(1) if has_momentum else -terms.rate
    for o in range(0, outputs, 2):
        both = o + 1 < outputs
        rows = (1 + both) * size
        if has_momentum or terms.decay != 0 or len(terms.offset):
            _add_other_terms(at, rows, terms)
        p, q = total[o], total[o + 1 if both else o]
        b = 0
        while both and b + 5 <= batch:
            x0, x1, x2, x3, x4 = x[b], x[b + 1], x[b + 2], x[b + 3], x[b + 4]
            a0, d0 = scale * dy[b, o], scale * dy[b, o + 1]
            a1, d1 = scale * dy[b + 1, o], scale * dy[b + 1, o + 1]
            a2, d2 = scale * dy[b + 2, o], scale * dy[b + 2, o + 1]
            a3, d3 = scale * dy[b + 3, o], scale * dy[b + 3, o + 1]
            a4, d4 = scale * dy[b + 4, o], scale * dy[b + 4, o + 1]
            for k in range(size):
                u0, u1, u2, u3, u4 = x0[k], x1[k], x2[k], x3[k], x4[k]
                p[k] = p[k] + a0 * u0 + a1 * u1 + a2 * u2 + a3 * u3 + a4 * u4
                q[k] = q[k] + d0 * u0 + d1 * u1 + d2 * u2 + d3 * u3 + d4 * u4
            b += 5
        while b < batch:
            a0, x0 = scale * dy[b, o], x[b]
            for k in range(size):
                p[k] += a0 * x0[k]
            if both:
                d0 = scale * dy[b, o + 1]
                for k in range(size):
                    q[k] += d0 * x0[k]
            b += 1
        if has_momentum or len(terms.mask):
            _move_and_mask(at, rows, terms)
        at += rows


@jit(fastmath={"contract"})
def descend(at, gradient, size, terms):  # type: ignore[no-untyped-def]
    """One step of SGD along a gradient, for ``size`` weights from ``at`` on."""
    has_momentum = len(terms.velocity) > 0
    if has_momentum or terms.decay != 0 or len(terms.offset):
        _add_other_terms(at, size, terms)
    scale = np.float32(1) if has_momentum else -terms.rate
    total = terms.velocity[at : at + size] if has_momentum else terms.weights[at : at + size]
    for k in range(size):
        total[k] += scale * gradient[k]
    if has_momentum or len(terms.mask):
        _move_and_mask(at, size, terms)


@jit(fastmath={"contract"})
def _add_other_terms(at, size, terms):  # type: ignore[no-untyped-def]
    """Add a step's terms other than the gradient to the velocity or, without momentum, to the weights.

    The two cases have separate loops. In a common loop the array that is read could be the one that is
    written, and LLVM would not vectorise it.
    """
    velocity, target, decay, rate = terms.velocity, terms.target, terms.decay, terms.rate
    w, pull = terms.weights[at : at + size], -rate * decay
    s = target[at : at + size]  # empty if there is none
    if len(velocity):
        v = velocity[at : at + size]
        for k in range(size):
            v[k] *= terms.momentum
        if len(target):
            for k in range(size):
                v[k] += decay * (w[k] - s[k])
        elif decay != 0:
            for k in range(size):
                v[k] += decay * w[k]
        _add_offset(v, np.float32(1), terms.offset, at)
        return
    if len(target):
        for k in range(size):
            w[k] += pull * (w[k] - s[k])
    elif decay != 0:
        for k in range(size):
            w[k] += pull * w[k]
    _add_offset(w, -rate, terms.offset, at)


@jit(fastmath={"contract"})
def _add_offset(total, scale, offset, at):  # type: ignore[no-untyped-def]
    if len(offset):
        f = offset[at : at + len(total)]
        for k in range(len(total)):
            total[k] += scale * f[k]


@jit(fastmath={"contract"})
def _move_and_mask(at, size, terms):  # type: ignore[no-untyped-def]
    """Move along the velocity, and hold masked weights at zero."""
    w = terms.weights[at : at + size]
    if len(terms.velocity):
        v = terms.velocity[at : at + size]
        for k in range(size):
            w[k] -= terms.rate * v[k]
    if len(terms.mask):
        m = terms.mask[at : at + size]
        for k in range(size):
            w[k] *= np.float32(m[k])

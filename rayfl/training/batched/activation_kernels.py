"""Elementwise activations and their derivatives, compiled by Numba for the CPU."""

from __future__ import annotations

import numpy as np

from rayfl.training.batched.exponential import decay_less_one, sigmoid, tanh
from rayfl.training.batched.jit import jit

RELU, TANH, SIGMOID, LEAKY_RELU, ELU, SILU = range(6)
"""The activations."""

_ZERO, _ONE = np.float32(0), np.float32(1)


@jit(fastmath={"contract"})
def forward(function, slope, x, y):  # type: ignore[no-untyped-def]
    """``y = f(x)``.

    Args:
        function: one of the above.
        slope: of a leaky ReLU left of zero, or alpha of an ELU; float32.
        x: ``(n,)`` float32.
        y: written, ``(n,)``.
    """
    n = len(x)
    if function == RELU:
        for k in range(n):
            y[k] = _ZERO if x[k] < 0 else x[k]
    elif function == TANH:
        for k in range(n):
            y[k] = tanh(x[k])
    elif function == SIGMOID:
        for k in range(n):
            y[k] = sigmoid(x[k])
    elif function == LEAKY_RELU:
        for k in range(n):
            y[k] = x[k] if x[k] > 0 else slope * x[k]
    elif function == ELU:
        for k in range(n):
            below = slope * decay_less_one(-abs(x[k]))
            y[k] = x[k] if x[k] > 0 else below
    else:
        for k in range(n):
            y[k] = x[k] * sigmoid(x[k])


@jit(fastmath={"contract"})
def backward(function, slope, x, y, dy, dx):  # type: ignore[no-untyped-def]
    """``dx = dy f'(x)``: arguments as for :func:`forward`, and gradients ``(n,)``; ``dx`` is written."""
    n = len(x)
    if function == RELU:
        for k in range(n):
            dx[k] = _ZERO if y[k] <= 0 else dy[k]
    elif function == TANH:
        for k in range(n):
            dx[k] = dy[k] * (_ONE - y[k] * y[k])
    elif function == SIGMOID:
        for k in range(n):
            dx[k] = dy[k] * (y[k] * (_ONE - y[k]))
    elif function == LEAKY_RELU:
        for k in range(n):
            dx[k] = dy[k] * (_ONE if x[k] > 0 else slope)
    elif function == ELU:
        for k in range(n):
            dx[k] = dy[k] * (_ONE if x[k] > 0 else y[k] + slope)
    else:
        for k in range(n):
            s = sigmoid(x[k])
            dx[k] = dy[k] * (s + x[k] * s * (_ONE - s))

"""A layer of LSTM through time, for many clients, compiled by Numba.

A text of twenty words is twenty steps of ten operations on a few thousand numbers, forwards and backwards:
calls from Python would cost more than the arithmetic. The products with the layer's input, for all places of
the texts at once, are left to the library.

Clients, texts and places are computed one after another. So a result depends on the other clients of a call
in one way only: batches are padded to the longest, and :mod:`.linear_kernels` sums the products of the texts
after the last group of five in another order.
"""

from __future__ import annotations

import numpy as np

from rayfl.training.batched import linear_kernels
from rayfl.training.batched.exponential import sigmoid, tanh
from rayfl.training.batched.jit import jit

_ONE = np.float32(1)


@jit(fastmath={"contract"})
def forward(gates, recurrent, h, c, tanh_c):  # type: ignore[no-untyped-def]
    """Compute the states of all places; see :class:`rayfl.training.batched.recurrent.Lstm` for the formulas.

    Args:
        gates: ``W_ih x_t + b_ih + b_hh``, ``(C, L, B, 4 H)`` float32, like all arrays here C-contiguous;
            receives i, f, g and o.
        recurrent: ``W_hh`` ``(C, 4 H, H)``.
        h, c, tanh_c: ``(C, L, B, H)``, written.
    """
    clients, length, texts, size = h.shape
    no_bias = np.zeros((1, 4 * size), np.float32)
    products = np.empty((1, texts, 4 * size), np.float32)
    for n in range(clients):
        w = recurrent[n].reshape(1, 4 * size, size)
        for t in range(length):
            if t:
                linear_kernels.forward(h[n, t - 1].reshape(1, texts, size), w, no_bias, products)
            for b in range(texts):
                a, h_t, c_t, tanh_t = gates[n, t, b], h[n, t, b], c[n, t, b], tanh_c[n, t, b]
                if t:
                    product = products[0, b]
                    for j in range(4 * size):
                        a[j] += product[j]
                for j in range(2 * size):
                    a[j] = sigmoid(a[j])
                for j in range(2 * size, 3 * size):
                    a[j] = tanh(a[j])
                for j in range(3 * size, 4 * size):
                    a[j] = sigmoid(a[j])
                i, f, g, o = a[:size], a[size : 2 * size], a[2 * size : 3 * size], a[3 * size :]
                if t:
                    c_before = c[n, t - 1, b]
                    for j in range(size):
                        c_t[j] = i[j] * g[j] + f[j] * c_before[j]
                else:
                    for j in range(size):
                        c_t[j] = i[j] * g[j]
                for j in range(size):
                    tanh_t[j] = tanh(c_t[j])
                    h_t[j] = o[j] * tanh_t[j]


@jit(fastmath={"contract"})
def backward(gates, c, tanh_c, dh, backwards):  # type: ignore[no-untyped-def]
    """Backpropagation through time.

    Args:
        gates: i, f, g and o, ``(C, L, B, 4 H)``; receives the gradients of their pre-activations.
        c, tanh_c: ``(C, L, B, H)``, of the forward pass.
        dh: gradients of the states, from the next layer, ``(C, L, B, H)``.
        backwards: ``W_hh`` with its two dimensions exchanged, ``(C, H, 4 H)``.
    """
    clients, length, texts, size = c.shape
    no_bias = np.zeros((1, size), np.float32)
    for n in range(clients):
        w = backwards[n].reshape(1, size, 4 * size)
        later = np.zeros((1, texts, size), np.float32)  # gradients of the states through the next states
        dc_of = np.zeros((texts, size), np.float32)
        for t in range(length - 1, -1, -1):
            for b in range(texts):
                a, dc, tanh_t = gates[n, t, b], dc_of[b], tanh_c[n, t, b]
                dh_above, dh_after = dh[n, t, b], later[0, b]
                i, f, g, o = a[:size], a[size : 2 * size], a[2 * size : 3 * size], a[3 * size :]
                for j in range(size):
                    through_h = dh_above[j] + dh_after[j]
                    dc[j] += through_h * o[j] * (_ONE - tanh_t[j]) * (_ONE + tanh_t[j])
                    o[j] = through_h * tanh_t[j] * o[j] * (_ONE - o[j])
                for j in range(size):
                    through_i = dc[j] * g[j] * i[j] * (_ONE - i[j])
                    g[j] = dc[j] * i[j] * (_ONE - g[j]) * (_ONE + g[j])
                    i[j] = through_i
                if t:
                    c_before = c[n, t - 1, b]
                    for j in range(size):
                        forget = f[j]
                        f[j] = dc[j] * c_before[j] * forget * (_ONE - forget)
                        dc[j] *= forget
                else:
                    f[:] = np.float32(0)
            if t:
                linear_kernels.forward(gates[n, t].reshape(1, texts, 4 * size), w, no_bias, later)

"""PyTorch's fused cells of an LSTM, which only CUDA has, written out."""

from __future__ import annotations

import torch

Cell = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def cell(
    a: torch.Tensor,
    b: torch.Tensor,
    c_before: torch.Tensor,
    a_bias: torch.Tensor | None = None,
    b_bias: torch.Tensor | None = None,
) -> Cell:
    """``aten::_thnn_fused_lstm_cell``: ``h_t``, ``c_t``, and the gates i, f, g, o."""
    for bias in (a_bias, b_bias):
        a = a if bias is None else a + bias
    i, f, g, o = (a + b).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = f * c_before + i * g
    return o * c.tanh(), c, torch.cat([i, f, g, o], 1)


def cell_backward(
    dh: torch.Tensor | None,
    dc: torch.Tensor | None,
    c_before: torch.Tensor,
    c: torch.Tensor,
    gates: torch.Tensor,
    has_bias: bool,
) -> Cell:
    """``aten::_thnn_fused_lstm_cell_backward_impl``: by the pre-activations, ``c_before``, the bias."""
    i, f, g, o = gates.chunk(4, 1)
    dh = torch.zeros_like(c) if dh is None else dh
    total = dh * o * (1 - c.tanh() ** 2) + (0 if dc is None else dc)
    slopes = [
        total * g * i * (1 - i),
        total * c_before * f * (1 - f),
        total * i * (1 - g * g),
        dh * c.tanh() * o * (1 - o),
    ]
    da = torch.cat(slopes, 1)
    return da, total * f, da.sum(0) if has_bias else da.new_empty(0)

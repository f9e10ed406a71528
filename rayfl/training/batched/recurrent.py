"""Layers for texts, whose leading dimension is the client: embedding, LSTM, mean of words, one word.

They work on words instead of samples: :class:`Embedding` maps words ``(C, B, L)`` to
``(C, B, L, features)``, and :class:`Lstm` returns its states as ``(C, B * L, hidden)``, so that the linear
layer and the loss that follow treat every word as a sample. :class:`MeanOfWords` and :class:`WordAt` reduce a
text to one sample.

A recurrent network is many small products one after another. For batches of up to :data:`THIN` texts these
and the operations between them are compiled (:mod:`.lstm_kernel`). For larger batches, and on a GPU, they are
batched products over all clients; on a GPU all that lies between two products is one kernel of PyTorch's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from typing_extensions import override

from rayfl.training.batched import lstm_kernel
from rayfl.training.batched.layers import Layer, Step
from rayfl.training.batched.parameters import THIN, Parameter
from rayfl.training.device import on_gpu

_cell = torch.ops.aten._thnn_fused_lstm_cell.default
"""The cell of ``nn.LSTM`` on a GPU without cuDNN: the two parts of the pre-activations ``(N, 4 H)`` and
``c_{t-1}`` ``(N, H)`` to ``h_t``, ``c_t``, and the gates ``(N, 4 H)``."""

_cell_backward = torch.ops.aten._thnn_fused_lstm_cell_backward_impl.default
"""The gradients of ``h_t`` and ``c_t`` (None: zero), ``c_{t-1}``, ``c_t``, the gates, and False to the
gradients of the pre-activations and of ``c_{t-1}``."""


class Embedding(Layer):
    """A row of the table for each word; only the rows of words that occur have a gradient.

    Args:
        padding: a word whose row has no gradient, either; None for no such word.
    """

    def __init__(self, padding: int | None = None) -> None:
        self.padding = padding

    @override
    def bind(self, parameters: Mapping[str, Parameter], buffers: Mapping[str, torch.Tensor]) -> None:
        super().bind(parameters, buffers)
        self.weight = parameters["weight"]

    @override
    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        clients, words, _ = (table := self.weight.value).shape
        first = torch.arange(clients, device=x.device).view(-1, 1, 1) * words
        self._rows = (x + first).flatten()  # of all clients' tables, one below the other
        self._no_padding = None if self.padding is None else (x != self.padding).flatten()
        return table.flatten(0, 1).index_select(0, self._rows).view(*x.shape, -1)

    @override
    def backward(self, dy: torch.Tensor, need_input: bool) -> torch.Tensor | None:
        dy = dy.reshape(len(self._rows), -1)
        if self._no_padding is not None:
            dy = dy * self._no_padding.unsqueeze(1)
        self.weight.descend_rows(self._rows, dy)
        return None


class Lstm(Layer):
    """Layers of LSTM (Hochreiter, Schmidhuber 1997; with the gates and names of ``nn.LSTM``).

    ``i, f, o = sigmoid(a)``, ``g = tanh(a)`` with ``a = W_ih x_t + b_ih + W_hh h_{t-1} + b_hh``;
    ``c_t = f c_{t-1} + i g``, ``h_t = o tanh(c_t)``; ``h_0 = c_0 = 0``.
    """

    def __init__(self, depth: int) -> None:
        self.depth, self.cells = depth, [_Cells() for _ in range(depth)]

    @override
    def bind(self, parameters: Mapping[str, Parameter], buffers: Mapping[str, torch.Tensor]) -> None:
        super().bind(parameters, buffers)
        for k, cells in enumerate(self.cells):
            cells.input, cells.recurrent = parameters[f"weight_ih_l{k}"], parameters[f"weight_hh_l{k}"]
            cells.biases = parameters[f"bias_ih_l{k}"], parameters[f"bias_hh_l{k}"]

    @override
    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        self._shape = x.shape
        h = x.transpose(1, 2).contiguous()  # (C, L, B, features): a time step is a batch of products
        for cells in self.cells:
            h = cells.forward(h)
        return h.transpose(1, 2).flatten(1, 2)

    @override
    def backward(self, dy: torch.Tensor, need_input: bool) -> torch.Tensor | None:
        clients, texts, length, _ = self._shape
        gradient: torch.Tensor | None = dy.view(clients, texts, length, -1).transpose(1, 2)
        learning = [cells.learns for cells in self.cells]
        for k in reversed(range(len(self.cells))):
            if not need_input and not any(learning[: k + 1]):
                return None
            assert gradient is not None
            gradient = self.cells[k].backward(gradient, need_input or any(learning[:k]))
        return None if gradient is None else gradient.transpose(1, 2)


class MeanOfWords(Layer):
    """The mean over the words of a text, ``(C, B, L, features)`` to ``(C, B, features)``."""

    @override
    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        self._shape = x.shape
        return x.mean(2)

    @override
    def backward(self, dy: torch.Tensor, need_input: bool) -> torch.Tensor | None:
        return (dy / self._shape[2]).unsqueeze(2).expand(self._shape) if need_input else None


class WordAt(Layer):
    """One word of each text: ``(C, B, features)`` of ``(C, B * L, features)``, as an LSTM returns them.

    Args:
        place: position of the word, 0-based.
        length: L.
    """

    def __init__(self, place: int, length: int) -> None:
        self.place, self.length = place, length

    @override
    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        self._shape = x.shape
        return x.reshape(len(x), -1, self.length, x.shape[2])[:, :, self.place]

    @override
    def backward(self, dy: torch.Tensor, need_input: bool) -> torch.Tensor | None:
        if not need_input:
            return None
        dx = dy.new_zeros(*dy.shape[:2], self.length, dy.shape[2])
        dx[:, :, self.place] = dy
        return dx.view(self._shape)


class _Cells:
    """One layer of LSTM: the same cell at every place of the texts. All tensors are ``(C, L, B, ...)``."""

    input: Parameter
    """``W_ih`` ``(C, 4 H, features)``; the gates i, f, g, o in this order."""
    recurrent: Parameter
    """``W_hh`` ``(C, 4 H, H)``."""
    biases: tuple[Parameter, Parameter]
    """``b_ih`` and ``b_hh`` ``(C, 4 H)``."""

    @property
    def learns(self) -> bool:
        """Whether any of these parameters is not frozen."""
        return not all(parameter.frozen for parameter in (self.input, self.recurrent, *self.biases))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The states h of all places."""
        clients, length, texts, _ = x.shape
        bias = (self.biases[0].value + self.biases[1].value).unsqueeze(1)
        a = torch.baddbmm(bias, x.flatten(1, 2), self.input.value.transpose(1, 2))
        gates = a.view(clients, length, texts, -1)
        self._on_gpu = on_gpu(x)
        if self._on_gpu:
            self._x, self._h = x, self._cell_by_cell(gates)
            return self._h
        h, c, tanh_c = (x.new_empty(clients, length, texts, gates.shape[3] // 4) for _ in range(3))
        self._compiled = texts <= THIN
        if self._compiled:
            arrays = (tensor.numpy() for tensor in (gates, self.recurrent.value, h, c, tanh_c))
            lstm_kernel.forward(*arrays)
        else:
            self._through_time(gates, h, c, tanh_c)
        self._x, self._gates, self._h, self._c, self._tanh_c = x, gates, h, c, tanh_c
        return h

    def _through_time(
        self, gates: torch.Tensor, h: torch.Tensor, c: torch.Tensor, tanh_c: torch.Tensor
    ) -> None:
        """As :func:`.lstm_kernel.forward`."""
        size, recurrent = h.shape[3], self.recurrent.value.transpose(1, 2)
        # All views at once: with one client a view costs as much as the arithmetic on it.
        parts = (gates, gates[..., : 2 * size], *gates.chunk(4, 3), h, c, tanh_c)
        previous: tuple[torch.Tensor, torch.Tensor] | None = None
        for a_t, i_and_f, i, f, g, o, h_t, c_t, tanh_c_t in zip(*(p.unbind(1) for p in parts), strict=True):
            if previous:
                a_t.baddbmm_(previous[0], recurrent)
            i_and_f.sigmoid_()
            g.tanh_()
            o.sigmoid_()
            torch.mul(i, g, out=c_t)
            if previous:
                c_t.addcmul_(f, previous[1])
            torch.tanh(c_t, out=tanh_c_t)
            torch.mul(o, tanh_c_t, out=h_t)
            previous = h_t, c_t

    def _cell_by_cell(self, a: torch.Tensor) -> torch.Tensor:
        """The states ``(C, L, B, H)`` from the inputs' part of the pre-activations, on a GPU."""
        clients, length, texts, width = a.shape
        recurrent = self.recurrent.value.transpose(1, 2)
        inputs = a.transpose(0, 1).reshape(length, clients * texts, width)  # a place is a contiguous matrix
        before, c = torch.zeros_like(inputs[0]), a.new_zeros(clients * texts, width // 4)
        states: list[torch.Tensor] = []
        self._kept: list[tuple[torch.Tensor, ...]] = []  # c before and after, and the gates
        for a_t in inputs.unbind(0):
            if states:
                before = torch.bmm(states[-1].view(clients, texts, -1), recurrent).flatten(0, 1)
            h, c_t, gates = _cell(a_t, before, c)
            self._kept.append((c, c_t, gates))
            states.append(h)
            c = c_t
        return torch.stack(states).view(length, clients, texts, -1).transpose(0, 1).contiguous()

    def _back_cell_by_cell(self, dh: torch.Tensor) -> torch.Tensor:
        """As :meth:`_back_through_time`, on a GPU."""
        clients, length, texts, _ = dh.shape
        recurrent, later = self.recurrent.value, dh.transpose(0, 1).contiguous()
        slopes: list[torch.Tensor] = []
        dc: torch.Tensor | None = None
        for t in reversed(range(length)):
            dh_t = later[t]
            if slopes:
                dh_t = torch.baddbmm(dh_t, slopes[-1].view(clients, texts, -1), recurrent)
            da, dc, _ = _cell_backward(dh_t.flatten(0, 1), dc, *self._kept[t], False)
            slopes.append(da)
        return torch.stack(slopes[::-1]).view(length, clients, texts, -1).transpose(0, 1)

    def backward(self, dh: torch.Tensor, need_input: bool) -> torch.Tensor | None:
        """Backpropagation through time, then the update; returns the input's gradient if it is needed."""
        if self._on_gpu:
            slopes = self._back_cell_by_cell(dh)
        elif self._compiled:
            slopes, backwards = self._gates, self.recurrent.value.transpose(1, 2)
            tensors = slopes, self._c, self._tanh_c, dh, backwards
            lstm_kernel.backward(*(tensor.contiguous().numpy() for tensor in tensors))
        else:
            slopes = self._back_through_time(dh)

        flat = slopes.flatten(1, 2)
        dx = torch.bmm(flat, self.input.value).view_as(self._x) if need_input else None
        self.input.descend_product(flat.transpose(1, 2), self._x.flatten(1, 2))
        h_before, da_after = self._h[:, :-1].flatten(1, 2), slopes[:, 1:].flatten(1, 2)
        self.recurrent.descend_product(da_after.transpose(1, 2), h_before)
        learning = [bias for bias in self.biases if not bias.frozen]
        total = flat.sum(1) if learning else None
        for bias in learning:
            assert total is not None
            bias.descend(total)
        return dx

    def _back_through_time(self, dh: torch.Tensor) -> torch.Tensor:
        """Gradients of the gates' pre-activations a, ``(C, L, B, 4 H)``."""
        gates, c, tanh_c = self._gates, self._c, self._tanh_c
        clients, length, texts, size = c.shape
        i, f, g, o = gates.chunk(4, 3)
        # Derivatives, for all places: of c by a (through i, f, g), of h by a (through o), and of h by c.
        slopes = torch.empty_like(gates)
        by_i, by_f, by_g, by_o = slopes.chunk(4, 3)
        torch.mul(g, i - i * i, out=by_i)
        by_f[:, 0] = 0
        torch.mul(c[:, :-1], (f - f * f)[:, 1:], out=by_f[:, 1:])
        torch.mul(i, 1 - g * g, out=by_g)
        torch.mul(tanh_c, o - o * o, out=by_o)
        by_c = o - o * tanh_c * tanh_c
        forget = f.contiguous()

        da, recurrent = slopes.view(clients, length, texts, 4, size), self.recurrent.value
        dc = dh.new_zeros(clients, texts, size)
        parts = (dh, by_c, da[..., :3, :], da[..., 3, :], forget, slopes)
        places = list(zip(*(p.unbind(1) for p in parts), strict=True))
        dh_later = None  # the gradient of h_t through the states after it
        for t in reversed(range(length)):
            dh_t, by_c_t, da_ifg, da_o, forget_t, da_t = places[t]
            dh_t = dh_t if dh_later is None else dh_later.add_(dh_t)
            dc.addcmul_(dh_t, by_c_t)
            da_ifg.mul_(dc.unsqueeze(2))
            da_o.mul_(dh_t)
            dc.mul_(forget_t)
            if t:
                dh_later = torch.bmm(da_t, recurrent)
        return slopes

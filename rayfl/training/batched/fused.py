"""Convolution, 2x2 maximum pooling and ReLU as one layer, for the kernels of :mod:`.conv_kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from rayfl.training.batched import conv_kernels
from rayfl.training.batched.layers import Conv2d, Layer, MaxPool2d, ReLU, Step
from rayfl.training.batched.vectors import LANES
from rayfl.training.device import on_gpu

LARGEST_WINDOW = 256
"""Convolutions with more inputs to an output pixel (``channels * K * K``) are left to the library: from about
400 on, where arithmetic dominates, the library is as fast or faster."""


class ConvPoolReLU(Layer):
    """A convolution, a 2x2 maximum pooling and a ReLU in one pass; the three layers themselves on a GPU."""

    def __init__(self, conv: Conv2d, pool: MaxPool2d, relu: ReLU) -> None:
        self.conv, self._parts = conv, (conv, pool, relu)
        self._scratch: dict[str, NDArray[np.generic]] = {}

    @override
    def settle(self) -> None:
        self.learns = self.conv.learns

    @staticmethod
    def supports(conv: Conv2d, pool: MaxPool2d) -> bool:
        """Whether the kernels support a convolution and the pooling after it, and are faster."""
        halves = (pool.kernel, pool.stride, pool.padding, pool.dilation) == ((2, 2), (2, 2), (0, 0), (1, 1))
        small = conv.channels * conv.kernel[0] ** 2 <= LARGEST_WINDOW
        return halves and not pool.ceil and small and ConvPoolReLU.supports_alone(conv)

    @staticmethod
    def supports_alone(conv: Conv2d) -> bool:
        """Whether the kernels support a convolution, of any size."""
        return (
            conv.stride == (1, 1)
            and conv.dilation == (1, 1)
            and conv.groups == 1
            and conv.kernel[0] == conv.kernel[1]
            and conv.padding[0] == conv.padding[1]
        )

    @override
    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        clients, batch, channels, height, width = x.shape
        outputs, inputs = self.conv.weight.value.shape[1:3]
        if channels != inputs:
            raise RuntimeError(f"images of {channels} channels; the convolution takes {inputs}")
        kernel = self.conv.kernel[0]
        padding = int(self.conv.padding[0])
        rows, columns = height + 2 * padding, width + 2 * padding
        pooled = ((rows - kernel + 1) // 2, (columns - kernel + 1) // 2)
        padded = clients * batch * rows * columns * channels
        self._fused = not on_gpu(x) and min(pooled) > 0 and padded < 2**31
        if not self._fused:
            for part in self._parts:
                x = part.forward(x, step)
            return x
        self._geometry = conv_kernels.Geometry(
            clients, batch, channels, height, width, outputs, kernel, padding
        )
        # Room for vectors beyond the last window, and for the second of two outputs beyond the last column.
        self._padded = self._buffer("padded", padded + LANES + 4 * channels, np.float32)
        size = clients * batch * pooled[0] * pooled[1] * outputs
        y = self._buffer("y", size + LANES, np.float32)
        self._winner = self._buffer("winner", size + LANES, np.int32)
        bias = self.conv.bias
        conv_kernels.forward(
            _channels_last(x),
            _flat(self.conv.weight.value),
            np.zeros(clients * outputs, np.float32) if bias is None else _flat(bias.value),
            self._geometry,
            self._padded,
            y,
            self._winner,
        )
        return torch.from_numpy(y[:size]).view(clients, batch, *pooled, outputs).permute(0, 1, 4, 2, 3)

    @override
    def backward(self, dy: torch.Tensor, need_input: bool) -> torch.Tensor | None:
        if not self._fused:
            gradient: torch.Tensor | None = dy
            for part in reversed(self._parts):
                assert gradient is not None
                gradient = part.backward(gradient, need_input or part is not self.conv)
            return gradient
        g = self._geometry
        weight, bias = self.conv.weight, self.conv.bias
        learns = not weight.frozen
        dweight = torch.empty_like(weight.value) if learns else torch.empty(0)
        dbias = torch.empty(g.clients, g.outputs)
        dpadded = self._buffer("dpadded", len(self._padded) if need_input else 0, np.float32)
        conv_kernels.backward(
            _channels_last(dy),
            self._winner,
            self._padded,
            _flat(weight.value),
            g,
            _flat(dweight),
            _flat(dbias),
            dpadded,
            need_input,
            learns,
        )
        if learns:
            weight.descend(dweight)
        if bias is not None:
            bias.descend(dbias)
        if not need_input:
            return None
        rows, columns = g.height + 2 * g.padding, g.width + 2 * g.padding
        dx = torch.from_numpy(dpadded[: g.clients * g.batch * rows * columns * g.channels])
        dx = dx.view(g.clients, g.batch, rows, columns, g.channels).permute(0, 1, 4, 2, 3)
        return dx.narrow(3, g.padding, g.height).narrow(4, g.padding, g.width)

    def _buffer(self, name: str, size: int, dtype: type[Any]) -> NDArray[Any]:
        """Memory that is reused in every step: allocating it costs more than the arithmetic."""
        array = self._scratch.get(name)
        if array is None or len(array) < size:
            self._scratch[name] = array = np.empty(size, dtype)
        return array[:size]


def fuse(layers: Sequence[Layer]) -> list[Layer]:
    """Replace each convolution, pooling and ReLU in a chain that the kernels support by one layer."""
    result: list[Layer] = []
    for layer in layers:
        result.append(layer)
        if len(result) >= 3:
            conv, pool, relu = result[-3:]
            if (
                isinstance(conv, Conv2d)
                and isinstance(pool, MaxPool2d)
                and isinstance(relu, ReLU)
                and ConvPoolReLU.supports(conv, pool)
            ):
                result[-3:] = [ConvPoolReLU(conv, pool, relu)]
    return result


def _flat(tensor: torch.Tensor) -> NDArray[np.float32]:
    """The memory of a contiguous tensor."""
    array: NDArray[np.float32] = tensor.view(-1).numpy()
    return array


def _channels_last(x: torch.Tensor) -> NDArray[np.float32]:
    """Images ``(C, B, channels, height, width)`` as a flat array, channels last; copied only if needed."""
    return _flat(x.permute(0, 1, 3, 4, 2).contiguous())

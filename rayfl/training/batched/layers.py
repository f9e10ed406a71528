"""Layers whose leading dimension is the client, with hand-written backward passes that apply the update.

Shapes: C clients, B samples of each in a step, then the layer's dimensions. A step may hold fewer than B
samples of a client: the rest of its rows is padding, whose gradients are zero (the loss gives padding the
weight 0, and BatchNorm, the only layer whose samples depend on each other, leaves padding out).

Each layer keeps what its backward pass needs between :meth:`Layer.forward` and :meth:`Layer.backward`;
``backward`` returns the gradient with respect to the input *before* it changes its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn import functional
from typing_extensions import override

from rayfl.training.batched import linear_kernels
from rayfl.training.batched.parameters import THIN, Parameter
from rayfl.training.device import on_gpu

_aten = torch.ops.aten

_SMALL_CONVOLUTION = 1 << 15
"""Outputs of a client's convolution up to which one operation for all clients is faster than one library call
for each: with BatchNorm 2.4 times as fast for ten samples of 16 x 8 x 8."""

_CACHED_NUMBERS = 1 << 20
"""Such outputs of all clients together above which it is not: they no longer fit in the cache."""

_COLUMN_BYTES, _CLIENTS_COLUMN_BYTES = 1 << 29, 1 << 25
"""Bytes of the windows of all clients, and of one, up to which a GPU gathers them as columns. Measured on an
H100: for several clients a product of columns takes 0.4 to 0.9 of the time of a convolution in groups, except
for images with 3 channels, or 32 and windows of 5 x 5 (1.3 to 2 times); beyond these sizes 1.3 times."""

Pair = tuple[int, int]
"""A setting for the height and one for the width of an image."""


@dataclass
class Step:
    """What layers need to know about the current step.

    Attributes:
        generators: one for each client, for dropout (empty if there is none).
        counts: samples of each client in this step ``(C,)`` int64, or None if all B rows are samples.
        lengths: the same counts as Python numbers; None also in a recorded step.
        factors: what the step's dropouts multiply by, ``(C, B, ...)`` each, if they were drawn beforehand.
    """

    generators: Sequence[torch.Generator]
    counts: torch.Tensor | None = None
    lengths: Sequence[int] | None = None
    factors: Sequence[torch.Tensor] | None = None


class Layer:
    """Base of the batched layers; the defaults are those of a layer without parameters."""

    learns: bool = False
    """Whether it, or a layer in it, has parameters that are not frozen. If not, and if the gradient of its
    input is not needed, there is no backward pass."""

    def bind(self, parameters: Mapping[str, Parameter], buffers: Mapping[str, torch.Tensor]) -> None:
        """Take the layer's parameters and buffers ``(C, ...)``, by their names in the layer."""
        self.learns = any(not parameter.frozen for parameter in parameters.values())

    def settle(self) -> None:
        """Set :attr:`learns` of a layer that contains layers, once these have their parameters."""

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Output ``(C, B, ...)`` of input ``(C, B, ...)``."""
        raise NotImplementedError

    def backward(self, dy: torch.Tensor, need_input: bool) -> torch.Tensor | None:
        """Update the parameters from the output's gradient ``(C, B, ...)``; returns the input's if
        ``need_input``.
        """
        raise NotImplementedError


class Linear(Layer):
    """``y = x W^T + b``; ``W -= eta dy^T x`` in one product."""

    @override
    def bind(self, parameters: Mapping[str, Parameter], buffers: Mapping[str, torch.Tensor]) -> None:
        super().bind(parameters, buffers)
        self.weight, self.bias = parameters["weight"], parameters.get("bias")

    @override
    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        self._x = x
        weight = self.weight.value
        if self.bias is None:
            return torch.bmm(x, weight.transpose(1, 2))
        if on_gpu(x) or x.shape[1] > THIN:
            return torch.baddbmm(self.bias.value.unsqueeze(1), x, weight.transpose(1, 2))
        y = x.new_empty(*x.shape[:2], weight.shape[1])
        linear_kernels.forward(x.contiguous().numpy(), weight.numpy(), self.bias.value.numpy(), y.numpy())
        return y

    @override
    def backward(self, dy: torch.Tensor, need_input: bool) -> torch.Tensor | None:
        dx = torch.bmm(dy, self.weight.value) if need_input else None
        self.weight.descend_product(dy.transpose(1, 2), self._x)
        if self.bias is not None and not self.bias.frozen:
            self.bias.descend(dy.sum(1))
        return dx


class Conv2d(Layer):
    """Convolution: one call per client on a CPU; for small images, and on a GPU, one grouped call for all.

    For several clients with small images a GPU gathers all windows as columns, and multiplies matrices.
    cuDNN's repeatable algorithms are slower for convolutions in groups, and Winograd's, which is among them,
    rounds gradients of 5 x 5 windows by 3e-4 to 1e-3.
    """

    def __init__(
        self, stride: Pair, padding: Pair, dilation: Pair, groups: int, channels: int, kernel: Pair
    ) -> None:
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.groups, self.channels, self.kernel = groups, channels, kernel

    @override
    def bind(self, parameters: Mapping[str, Parameter], buffers: Mapping[str, torch.Tensor]) -> None:
        super().bind(parameters, buffers)
        self.weight, self.bias = parameters["weight"], parameters.get("bias")

    @override
    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        self._x = x
        weight = self.weight.value
        bias = None if self.bias is None else self.bias.value
        outputs = self._outputs(x)
        self._columns: torch.Tensor | None = None
        if on_gpu(x) and self._columns_pay(x):
            return self._forward_by_columns(x, weight, bias)
        small = outputs <= _SMALL_CONVOLUTION and len(x) * outputs <= _CACHED_NUMBERS
        self._grouped = on_gpu(x) or (small and len(x) > 1)
        if self._grouped:
            return self._grouped_forward(x, weight, bias)
        return _stack(
            [
                functional.conv2d(
                    _channels_last(x[c]),
                    weight[c],
                    None if bias is None else bias[c],
                    self.stride,
                    self.padding,
                    self.dilation,
                    self.groups,
                )
                for c in range(len(x))
            ]
        )

    @override
    def backward(self, dy: torch.Tensor, need_input: bool) -> torch.Tensor | None:
        x, weight = self._x, self.weight.value
        if self._columns is not None:
            dx, dw, db = self._backward_by_columns(dy, self._columns, need_input)
        elif self._grouped:
            dx, dw, db = self._grouped_backward(dy, need_input)
        else:
            parts = [
                self._convolution_backward(
                    _channels_last(dy[c]), _channels_last(x[c]), weight[c], self.groups, need_input
                )
                for c in range(len(x))
            ]
            dw, db = (
                torch.stack([p[k] for p in parts]) if wanted else None
                for k, wanted in enumerate(self._needed_gradients(), start=1)
            )
            dx = _stack([p[0] for p in parts]) if need_input else None
        if dw is not None:
            self.weight.descend(dw)
        if self.bias is not None and db is not None:
            self.bias.descend(db)
        return dx

    def _sides(self, x: torch.Tensor) -> Pair:
        """Height and width of the output."""
        sizes = zip(x.shape[3:], self.kernel, self.stride, self.padding, self.dilation, strict=True)
        height, width = ((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes)
        return height, width

    def _outputs(self, x: torch.Tensor) -> int:
        """Number of outputs for the samples ``(B, channels, height, width)`` of a client."""
        return int(x.shape[1] * self.weight.value.shape[1] * math.prod(self._sides(x)))

    def _columns_pay(self, x: torch.Tensor) -> bool:
        """Whether columns take less time than a convolution in groups on a GPU, and fit its memory."""
        pixels = x.shape[1] * math.prod(self._sides(x))
        column_bytes = 4 * pixels * self.channels * math.prod(self.kernel)
        few = column_bytes <= _CLIENTS_COLUMN_BYTES and len(x) * column_bytes <= _COLUMN_BYTES
        return few and len(x) > 1 and self.groups == 1

    def _needed_gradients(self) -> tuple[bool, bool]:
        """Whether the gradients of the weight and of the bias are needed."""
        return not self.weight.frozen, self.bias is not None and not self.bias.frozen

    def _convolution_backward(
        self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, groups: int, need_input: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        output_mask = [need_input, *self._needed_gradients()]
        return _aten.convolution_backward(  # type: ignore[no-any-return]
            dy,
            x,
            weight,
            [weight.shape[0]],
            self.stride,
            self.padding,
            self.dilation,
            False,
            [0, 0],
            groups,
            output_mask,
        )

    def _forward_by_columns(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """A product of each client's kernels with all windows of its images."""
        (top, left), (height, width) = self.padding, self._sides(x)
        x = functional.pad(x, (left, left, top, top)) if top or left else x.contiguous()
        clients, batch, channels = x.shape[:3]
        of_client, of_sample, of_channel, of_row, of_pixel = x.stride()
        down, right = self.stride
        windows = x.as_strided(
            (clients, channels, *self.kernel, batch, height, width),
            (
                *(of_client, of_channel, self.dilation[0] * of_row, self.dilation[1] * of_pixel),
                *(of_sample, down * of_row, right * of_pixel),
            ),
        )
        self._columns = windows.reshape(clients, -1, batch * height * width)
        y = torch.bmm(weight.flatten(2), self._columns)
        if bias is not None:
            y.add_(bias.unsqueeze(2))
        return y.view(clients, -1, batch, height, width).transpose(1, 2)

    def _backward_by_columns(
        self, dy: torch.Tensor, columns: torch.Tensor, need_input: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        clients, batch = dy.shape[:2]
        weight, dy = self.weight.value, dy.transpose(1, 2).reshape(clients, dy.shape[2], -1)
        of_weight, of_bias = self._needed_gradients()
        dw = torch.bmm(dy, columns.transpose(1, 2)).view_as(weight) if of_weight else None
        db = dy.sum(2) if of_bias else None
        if not need_input:
            return None, dw, db
        dcolumns = torch.bmm(weight.flatten(2).transpose(1, 2), dy)
        dcolumns = dcolumns.view(clients, dcolumns.shape[1], batch, -1).transpose(1, 2).flatten(0, 1)
        dx = functional.fold(
            dcolumns, self._x.shape[3:], self.kernel, self.dilation, self.padding, self.stride
        )
        return dx.view_as(self._x), dw, db

    def _grouped_forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """One convolution with C times as many groups: channels of the clients side by side."""
        clients, batch = x.shape[:2]
        y = functional.conv2d(
            x.transpose(0, 1).flatten(1, 2),
            weight.flatten(0, 1),
            None if bias is None else bias.flatten(),
            self.stride,
            self.padding,
            self.dilation,
            self.groups * clients,
        )
        return y.view(batch, clients, -1, *y.shape[2:]).transpose(0, 1)

    def _grouped_backward(
        self, dy: torch.Tensor, need_input: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        x, weight = self._x, self.weight.value
        clients, batch = x.shape[:2]
        dx, dw, db = self._convolution_backward(
            dy.transpose(0, 1).flatten(1, 2),
            x.transpose(0, 1).flatten(1, 2),
            weight.flatten(0, 1),
            self.groups * clients,
            need_input,
        )
        dinput = dx.view(batch, clients, *x.shape[2:]).transpose(0, 1) if need_input else None
        of_weight, of_bias = self._needed_gradients()
        return dinput, dw.view_as(weight) if of_weight else None, db.view(clients, -1) if of_bias else None


class ReLU(Layer):
    """``max(x, 0)``, in place: no other layer needs the input."""

    @override
    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        self._y = x.clamp_min_(0)
        return self._y

    @override
    def backward(self, dy: torch.Tensor, need_input: bool) -> torch.Tensor | None:
        return _aten.threshold_backward(_laid_out(dy, self._y), self._y, 0) if need_input else None


class Activation(Layer):
    """Another elementwise function, computed by the library; it keeps its input and its output.

    Args:
        name: the function's name, and its settings.
        function: of the input.
        slope: the input's gradient, from the output's gradient, the input and the output.
    """

    def __init__(
        self,
        name: tuple[Any, ...],
        function: Callable[[torch.Tensor], torch.Tensor],
        slope: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        self.name, self._function, self._slope = name, function, slope

    @override
    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        self._x, self._y = x, self._function(x)
        return self._y

    @override
    def backward(self, dy: torch.Tensor, need_input: bool) -> torch.Tensor | None:
        return self._slope(_laid_out(dy, self._x), self._x, self._y) if need_input else None


class MaxPool2d(Layer):
    """Maximum over windows; the positions found in the forward pass are used again in the backward pass."""

    def __init__(self, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil: bool) -> None:
        self.kernel, self.stride = kernel, stride
        self.padding, self.dilation, self.ceil = padding, dilation, ceil

    @override
    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        self._x = x.flatten(0, 1)
        y, self._winners = _aten.max_pool2d_with_indices(
            self._x, self.kernel, self.stride, self.padding, self.dilation, self.ceil
        )
        return y.unflatten(0, x.shape[:2])  # type: ignore[no-any-return]

    @override
    def backward(self, dy: torch.Tensor, need_input: bool) -> torch.Tensor | None:
        if not need_input:
            return None
        dx = _aten.max_pool2d_with_indices_backward(
            dy.flatten(0, 1),
            self._x,
            self.kernel,
            self.stride,
            self.padding,
            self.dilation,
            self.ceil,
            self._winners,
        )
        return dx.unflatten(0, dy.shape[:2])  # type: ignore[no-any-return]


class Flatten(Layer):
    """All but clients and samples become one dimension."""

    @override
    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        self._shape = x.shape
        return x.flatten(2)

    @override
    def backward(self, dy: torch.Tensor, need_input: bool) -> torch.Tensor | None:
        return dy.reshape(self._shape) if need_input else None


class Dropout(Layer):
    """Multiplies by factors that are drawn before the forward pass.

    Args:
        p: probability of a zero, above 0.
        shape: of a sample.

    Attributes:
        factors: zeros and ``1 / (1 - p)``, ``(C, B, *shape)``; with ``p = 1`` a single zero.
    """

    factors: torch.Tensor

    def __init__(self, p: float, shape: Sequence[int]) -> None:
        self.p, self.shape = p, tuple(shape)

    @override
    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        if self.p == 1:
            self.factors = x.new_zeros(())
        return x * self.factors

    @override
    def backward(self, dy: torch.Tensor, need_input: bool) -> torch.Tensor | None:
        return dy * self.factors if need_input else None


class Norm(Layer):
    """Base of the normalisations, each followed by the client's own affine map, if the module has one.

    On a CPU the library normalises images, with one call per client, as for convolutions. Operations on all
    clients at once normalise vectors and small images, for which a call costs more than its arithmetic. They
    also normalise everything on a GPU and in a recorded step, whose counts are known only on the device.
    """

    small: ClassVar[int]
    """Numbers in a client's batch up to which images count as small."""

    def __init__(self, eps: float) -> None:
        self.eps = eps

    @override
    def bind(self, parameters: Mapping[str, Parameter], buffers: Mapping[str, torch.Tensor]) -> None:
        super().bind(parameters, buffers)
        self.weight, self.bias = parameters.get("weight"), parameters.get("bias")

    @override
    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        counts_known = step.counts is None or step.lengths is not None
        small = x.dim() == 3 or (x[0].numel() <= self.small and x.numel() <= _CACHED_NUMBERS)
        self._by_library = counts_known and not small and not on_gpu(x)
        if self._by_library:
            return self._forward_each(x, step)
        self._hat = self._normalise_all(x, step)
        if self.weight is None:
            return self._hat.clone()  # the next layer may work in place
        if self.bias is None:
            return self._hat * _per_channel(self.weight.value, x)
        return torch.addcmul(_per_channel(self.bias.value, x), self._hat, _per_channel(self.weight.value, x))

    @override
    def backward(self, dy: torch.Tensor, need_input: bool) -> torch.Tensor | None:
        if self._by_library:
            return self._backward_each(dy, need_input)
        dx = self._backward_all(dy) if need_input else None
        dims = (1, *range(3, dy.dim()))
        if self.weight is not None and not self.weight.frozen:
            self.weight.descend((dy * self._hat).sum(dims))
        if self.bias is not None and not self.bias.frozen:
            self.bias.descend(dy.sum(dims))
        return dx

    def _forward_each(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Normalise with one call per client, without padding."""
        parameters = [p.value for p in (self.weight, self.bias) if p is not None]
        lengths = step.lengths or [x.shape[1]] * len(x)
        self._inputs = [
            [tensor.detach().requires_grad_() for tensor in (x[c, :rows], *(p[c] for p in parameters))]
            for c, rows in enumerate(lengths)
        ]
        with torch.enable_grad():
            self._outputs = [self._normalise_one(c, *inputs) for c, inputs in enumerate(self._inputs)]
        return _stack([_pad(y.detach(), x.shape[1]) for y in self._outputs])

    def _backward_each(self, dy: torch.Tensor, need_input: bool) -> torch.Tensor | None:
        """Backward passes of these calls, for the inputs whose gradients are needed."""
        parameters = [parameter for parameter in (self.weight, self.bias) if parameter is not None]
        learning = [k for k, parameter in enumerate(parameters, start=1) if not parameter.frozen]
        wanted = [0] * need_input + learning
        gradients = [
            torch.autograd.grad(y, [inputs[k] for k in wanted], each[: len(y)]) if wanted else ()
            for y, inputs, each in zip(self._outputs, self._inputs, dy, strict=True)
        ]
        for k, tensors in zip(wanted, list(zip(*gradients, strict=True)), strict=True):
            if k:
                parameters[k - 1].descend(torch.stack(tensors))
        return _stack([_pad(each[0], dy.shape[1]) for each in gradients]) if need_input else None

    def _normalise_one(
        self,
        client: int,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Images ``(B, channels, ...)`` of one client, normalised and mapped."""
        raise NotImplementedError

    def _normalise_all(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The normalised inputs of all clients, before the affine map."""
        raise NotImplementedError

    def _backward_all(self, dy: torch.Tensor) -> torch.Tensor:
        """Gradient of the input of :meth:`_normalise_all`, from that of the mapped output."""
        raise NotImplementedError


class GroupNorm(Norm):
    """Normalisation within each sample, so clients are only more samples."""

    small = 1 << 14  # fewer than for BatchNorm, since groups are copied out of images with channels last

    def __init__(self, groups: int, eps: float) -> None:
        super().__init__(eps)
        self.groups = groups

    @override
    def _normalise_one(
        self,
        client: int,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return functional.group_norm(x, self.groups, weight, bias, self.eps)

    @override
    def _normalise_all(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        grouped = x.reshape(*x.shape[:2], self.groups, -1)
        var, mean = torch.var_mean(grouped, dim=-1, correction=0, keepdim=True)
        self._inverse = torch.rsqrt(var + self.eps)
        return ((grouped - mean) * self._inverse).view(x.shape)

    @override
    def _backward_all(self, dy: torch.Tensor) -> torch.Tensor:
        dhat = dy if self.weight is None else dy * _per_channel(self.weight.value, dy)
        shape = (*dy.shape[:2], self.groups, -1)
        dhat, hat = dhat.reshape(shape), self._hat.reshape(shape)
        mean = dhat.mean(-1, keepdim=True)
        slope = (dhat * hat).mean(-1, keepdim=True)
        return ((dhat - mean - hat * slope) * self._inverse).view(dy.shape)


class BatchNorm(Norm):
    """BatchNorm of 1d or 2d inputs in its federated meaning: statistics within each client's own batch.

    The running mean and variance are the client's, move with the module's momentum (unbiased variance), and
    are part of its model: aggregated and evaluated like weights.
    """

    small = 1 << 16

    def __init__(self, eps: float, momentum: float) -> None:
        super().__init__(eps)
        self.momentum = momentum

    @override
    def bind(self, parameters: Mapping[str, Parameter], buffers: Mapping[str, torch.Tensor]) -> None:
        super().bind(parameters, buffers)
        self._running_mean, self._running_var = buffers["running_mean"], buffers["running_var"]

    @override
    def _normalise_one(
        self,
        client: int,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        mean, var = self._running_mean[client], self._running_var[client]
        return functional.batch_norm(x, mean, var, weight, bias, True, self.momentum, self.eps)

    @override
    def _normalise_all(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        clients, batch = x.shape[:2]
        self._dims = (1, *range(3, x.dim()))
        spatial = x[0, 0, 0].numel()
        if spatial * (batch if step.lengths is None else min(step.lengths)) < 2:
            raise ValueError("a BatchNorm needs more than one value per channel")
        self._mask = None
        if step.counts is None:
            count = torch.full((), float(batch * spatial), device=x.device)
        else:
            rows = torch.arange(batch, device=x.device)[None, :] < step.counts[:, None]
            self._mask = rows.view(clients, batch, *[1] * (x.dim() - 2)).to(x.dtype)
            count = (step.counts * spatial).to(x.dtype)[:, None]
        mean = self._sum(x if self._mask is None else x * self._mask) / count
        centred = x - _per_channel(mean, x)
        if self._mask is not None:
            centred = centred * self._mask
        var = self._sum(centred * centred) / count
        self._count = count
        self._inverse = torch.rsqrt(var + self.eps)
        self._running_mean[:clients].lerp_(mean, self.momentum)
        self._running_var[:clients].lerp_(var * (count / (count - 1)), self.momentum)
        return centred * _per_channel(self._inverse, x)

    @override
    def _backward_all(self, dy: torch.Tensor) -> torch.Tensor:
        scale = self._inverse if self.weight is None else self._inverse * self.weight.value
        mean = self._sum(dy) / self._count
        slope = self._sum(dy * self._hat) / self._count
        dx = (dy - _per_channel(mean, dy) - self._hat * _per_channel(slope, dy)) * _per_channel(scale, dy)
        return dx if self._mask is None else dx * self._mask

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over samples and pixels: ``(C, channels)``."""
        return x.sum(self._dims)


class AvgPool2d(Layer):
    """Mean over windows."""

    def __init__(self, kernel: Pair, stride: Pair, padding: Pair, ceil: bool, include_pad: bool) -> None:
        self.kernel, self.stride, self.padding = kernel, stride, padding
        self.ceil, self.include_pad = ceil, include_pad

    @override
    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        self._x = x.flatten(0, 1)
        y = _aten.avg_pool2d(self._x, self.kernel, self.stride, self.padding, self.ceil, self.include_pad)
        return y.unflatten(0, x.shape[:2])  # type: ignore[no-any-return]

    @override
    def backward(self, dy: torch.Tensor, need_input: bool) -> torch.Tensor | None:
        if not need_input:
            return None
        dx = _aten.avg_pool2d_backward(
            dy.flatten(0, 1),
            self._x,
            self.kernel,
            self.stride,
            self.padding,
            self.ceil,
            self.include_pad,
            None,
        )
        return dx.unflatten(0, dy.shape[:2])  # type: ignore[no-any-return]


class Chain(Layer):
    """Layers one after another."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers

    @override
    def settle(self) -> None:
        for layer in self.layers:
            layer.settle()
        learning = [layer.learns for layer in self.layers]
        self.learns = any(learning)
        self._below = [any(learning[:k]) for k in range(len(learning))]

    @override
    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        for layer in self.layers:
            x = layer.forward(x, step)
        return x

    @override
    def backward(self, dy: torch.Tensor, need_input: bool) -> torch.Tensor | None:
        gradient: torch.Tensor | None = dy
        for layer, below in zip(reversed(self.layers), reversed(self._below), strict=True):
            if not (need_input or below or layer.learns):  # nor does a layer below
                return None
            assert gradient is not None
            gradient = layer.backward(gradient, need_input or below)
        return gradient


class Residual(Layer):
    """``x + f(x)``."""

    def __init__(self, inner: Chain) -> None:
        self.inner = inner
        # Other layers may change their input in place, or return it.
        self._keeps_input = bool(inner.layers) and isinstance(inner.layers[0], Linear | Conv2d | Norm)

    @override
    def settle(self) -> None:
        self.inner.settle()
        self.learns = self.inner.learns

    @override
    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return x + self.inner.forward(x if self._keeps_input else x.clone(), step)

    @override
    def backward(self, dy: torch.Tensor, need_input: bool) -> torch.Tensor | None:
        inner = self.inner.backward(dy, need_input)
        return None if inner is None else dy + inner


def _stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack C tensors ``(B, ...)`` to ``(C, B, ...)`` in their memory layout; a single one is not copied."""
    if len(tensors) == 1:
        return tensors[0].unsqueeze(0)
    together: torch.Tensor = torch.cat(list(tensors)).unflatten(  # type: ignore[no-untyped-call]
        0, (len(tensors), -1)
    )
    return together


def _per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``(C, channels)`` shaped to act on ``(C, B, channels, ...)``."""
    return values.view(values.shape[0], 1, -1, *[1] * (like.dim() - 3))


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    """Images ``(B, channels, height, width)`` with channels last, and with strides that say so.

    The library takes dense images of one channel for images in the order of dimensions, and then returns its
    results in that order.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    if x.shape[1] == 1:
        x = x.as_strided(x.shape, (x.shape[2] * x.shape[3], 1, x.shape[3], 1))
    return x


def _laid_out(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``x`` in the layout of ``like``: operations on two different layouts take several times as long."""
    return x if x.stride() == like.stride() else torch.empty_like(like).copy_(x)


def _pad(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Pad fewer samples ``(b, ...)`` with zeros to ``(rows, ...)``, in the same layout."""
    if len(x) == rows:
        return x
    padded = torch.empty_like(x[:1].expand(rows, *x.shape[1:])).zero_()
    padded[: len(x)] = x
    return padded


def pair(value: int | Sequence[int]) -> Pair:
    """A setting as a pair: it is one number for both dimensions of an image, or one for each."""
    if isinstance(value, int):
        return value, value
    return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])

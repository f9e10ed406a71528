"""Training, and forward passes, in one compiled call: what is supported, and what the call needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rayfl.losses import CrossEntropy
from rayfl.models import ModelSpec
from rayfl.models.base import task_of
from rayfl.training.batched import activation_kernels, layers
from rayfl.training.batched import client_kernel as kernel
from rayfl.training.batched.client_kernel import Memory
from rayfl.training.batched.descent import Floats
from rayfl.training.batched.fused import ConvPoolReLU
from rayfl.training.batched.parameters import THIN
from rayfl.training.batched.reading import Reading, Unsupported
from rayfl.training.batched.steps import StepPlan
from rayfl.training.batched.vectors import LANES, WIDE
from rayfl.training.work import LocalWork, Terms


def _refuse_texts(spec: ModelSpec) -> None:
    if task_of(spec.model) != "numbers":
        raise Unsupported("it takes words")


class CompiledTraining:
    """Trains clients in one call of :func:`.client_kernel.train`.

    Args:
        spec: the model and its flat layout.
        reading: its layers in training.

    Raises:
        Unsupported: if the kernel does not support a layer, the order of the layers, or the loss.
    """

    def __init__(self, spec: ModelSpec, reading: Reading) -> None:
        _refuse_texts(spec)
        if type(spec.loss) is not CrossEntropy or spec.loss.label_smoothing:
            raise Unsupported("its loss is not a plain cross-entropy")
        self.spec = spec
        table = _Table(spec, reading)
        self._layers = table.rows
        if not all(_is_small(row, _WINDOW) for row in self._layers):
            raise Unsupported("a convolution without a pooling behind it is large")
        self._numbers = np.array(table.numbers, np.float32)
        self._needs_two_samples = any(  # a variance over samples needs two of them
            row[kernel.KIND] == kernel.BATCH_NORM and row[kernel.SIZE] == row[kernel.OUTPUTS]
            for row in self._layers
        )
        self._dropouts, self._no_draws = table.dropouts, _no_draws(self._layers)
        self._images = _images(self._layers)
        self._memory: dict[tuple[bool, bool], tuple[int, tuple[NDArray[np.int64], Memory]]] = {}

    def covers(self, work: LocalWork, terms: Terms, plan: StepPlan) -> bool:
        """Whether it supports this work, in these steps."""
        if self._needs_two_samples and (plan.counts == 1).any():
            return False  # the layers then raise an error
        if plan.counts.sum(axis=0).max(initial=0) * sum(size for size, _ in self._dropouts) > _DRAWS:
            return False
        return not work.frozen and terms.guides is None and plan.places.shape[2] <= THIN

    def train(
        self, plan: StepPlan, work: LocalWork, models: torch.Tensor, terms: Terms, alike: bool,
        samples: tuple[torch.Tensor, torch.Tensor], generators: Sequence[torch.Generator] = (),
    ) -> tuple[NDArray[np.float64], torch.Tensor]:  # fmt: skip
        """Train C clients from ``models`` ``(C, P)``, which are changed.

        Args:
            plan: their steps.
            work: what to do.
            models: contiguous.
            terms: of these clients.
            alike: whether all rows of ``models`` are equal.
            samples: those of all clients, one after another, and their labels.
            generators: one for each client; needed for dropout.

        Returns:
            Their mean losses ``(C,)``, and the models after ``plan.snapshots`` steps; ``(0, P)`` if no
            epoch is to be kept.

        Raises:
            ValueError: if the samples or the labels do not fit the network.
        """
        x, y = samples
        clients, batch = plan.places.shape[1:]
        network, memory = self._prepare(int(batch), bool(work.momentum), bool(work.inner_lr))
        empty = np.empty((0, self.spec.P), np.float32)
        decay, mask = work.weight_decay + work.proximal, terms.mask
        masks = np.empty((0, self.spec.P), np.uint8)
        if mask is not None:
            masks = (mask != 0).to(torch.uint8).numpy()
            masks[:, self.spec.n_parameters :] = 1  # running statistics are not masked
        targets = empty
        if work.proximal:
            # lambda w + mu (w - w_start) = (lambda + mu) (w - target)
            start = models[:1] if alike and mask is None else models
            target = start * (work.proximal / decay)
            targets = (target if mask is None else target * (mask != 0)).numpy()
        snapshots = torch.empty((clients, self.spec.P) if work.snapshot_epoch else (0, self.spec.P))
        losses = np.empty(clients)
        size = self._layers[0][kernel.SIZE]
        if math.prod(x.shape[1:]) != size:
            raise ValueError(f"samples of {math.prod(x.shape[1:])} numbers; the network takes {size}")
        classes = self._layers[-1][kernel.OUTPUT]
        if len(y) and not (int(y.min()) >= 0 and int(y.max()) < classes):
            label_range = f"{int(y.min())} to {int(y.max())}"
            raise ValueError(f"labels from {label_range}; the network has {classes} outputs")
        offsets = empty if terms.offset is None else terms.offset.contiguous().numpy()
        rates = [work.rate(step) for step in range(plan.passes // work.batches_a_step)]
        for chunk, draws in self._calls(plan, generators):
            kernel.train(
                network,
                self._numbers,
                models[chunk].numpy(),
                self._images,
                targets if len(targets) == 1 else targets[chunk],
                offsets[chunk],
                masks[chunk],
                kernel.Rule(*map(np.float32, (work.momentum, decay, work.inner_lr))),
                x.reshape(len(x), size).contiguous().numpy(),
                y.numpy(),
                np.ascontiguousarray(plan.places[:, chunk]),
                np.ascontiguousarray(plan.counts[:, chunk]),
                np.array(rates, np.float32),
                plan.snapshots[chunk],
                snapshots[chunk].numpy(),
                draws,
                memory,
                losses[chunk],
            )
        return losses / np.maximum(1, plan.seen), snapshots

    def _calls(
        self, plan: StepPlan, generators: Sequence[torch.Generator]
    ) -> Iterator[tuple[slice, NDArray[np.uint8] | None]]:
        """Yield the clients of each call and its dropout mask: all clients in one call, or with dropout one
        client per call."""
        if not self._dropouts:
            yield slice(None), self._no_draws
            return
        for c, generator in enumerate(generators):
            yield slice(c, c + 1), self._draw(plan.counts[:, c], generator)

    def _draw(self, counts: NDArray[np.int64], generator: torch.Generator) -> NDArray[np.uint8]:
        """The dropout mask that the plain loop would draw for a client's passes over ``counts`` samples."""
        mask = np.empty(counts.sum() * sum(size for size, _ in self._dropouts), np.uint8)
        scratch = torch.empty(int(counts.max(initial=0)) * max(size for size, _ in self._dropouts))
        begin = 0
        for count in counts[counts > 0].tolist():
            for size, p in self._dropouts:
                length = count * size
                mask[begin : begin + length] = scratch[:length].bernoulli_(1 - p, generator=generator).numpy()
                begin += length
        return mask

    def _prepare(self, batch: int, has_momentum: bool, looks_ahead: bool) -> tuple[NDArray[np.int64], Memory]:
        """The network's table, and memory for ``batch`` samples or more; it grows with the longest batch."""
        capacity, prepared = self._memory.get((has_momentum, looks_ahead), (0, None))
        if prepared is None or capacity < batch:
            velocity, ahead = (self.spec.P if needed else 0 for needed in (has_momentum, looks_ahead))
            prepared = _lay_out(self._layers, batch, velocity, ahead)
            self._memory[has_momentum, looks_ahead] = batch, prepared
        return prepared


_WINDOW, _WINDOW_OF_TESTS, _OUTPUTS, _PRODUCTS = 216, 640, 64, 1 << 20
"""Bounds for a convolution in which each output pixel has a gradient.

It is compiled if a pixel has at most ``_WINDOW`` inputs (``_WINDOW_OF_TESTS`` for forward passes) and
``_OUTPUTS`` outputs, or if a sample takes at most ``_PRODUCTS``. With K = 1, which is a matrix product, the
only bound is a quarter of ``_PRODUCTS``. Measured with 6 to 48 channels, K = 3 and 5, images of 8 to 32
pixels and batches of 10 and 32: training is 0.96 to 5.9 times as fast as with the library within these
bounds, and 0.6 to 1.2 times above them; forward passes are 1.1 to 2.6 and 0.7 to 1 times as fast."""

_DRAWS = 1 << 26
"""Largest number of dropout's draws for a client, which are drawn before it trains and take a byte each."""

_SAMPLES_AT_ONCE = 10
"""Samples that go through all layers together; with more, none of the measured networks is faster."""

_NUMBERS_INTERLEAVED = 1 << 14
"""Numbers of a padded sample up to which convolutions take interleaved samples, at most 1 MB together."""

_MLP_WEIGHTS, _CNN_WEIGHTS = 1 << 16, 1 << 20
"""Weights of linear layers up to which forward passes of any number of samples are compiled: in networks
without convolutions, and with convolutions, which become two to five times as fast. With more weights the
library is faster: it reads them once."""


class CompiledForward:
    """Forward passes in one call of :func:`.client_kernel.outputs`.

    A few samples at a time go through all layers, so that the activations stay in the core's cache: LeNet-5
    takes a quarter of the library's time. Many samples in large linear layers are left to the library.

    Args:
        spec: the model and its flat layout.
        reading: its layers in evaluation mode.

    Raises:
        Unsupported: as for :class:`CompiledTraining`, except that the loss does not matter.
    """

    def __init__(self, spec: ModelSpec, reading: Reading) -> None:
        _refuse_texts(spec)
        table = _Table(spec, reading)
        if table.dropouts:
            raise Unsupported("it drops in evaluation, too")
        self._folds = [
            _Fold.of(row, numbers[kernel.EPSILON])
            for row, numbers in zip(table.rows, table.numbers, strict=True)
            if row[kernel.KIND] == kernel.NORMED
        ]
        rows = [_evaluation_row(row) for row in table.rows]
        if not all(_is_small(row, _WINDOW_OF_TESTS) for row in rows):
            raise Unsupported("a convolution without a pooling behind it is large")
        self._numbers = np.array(table.numbers, np.float32)
        self.spec, self._images = spec, _images(rows)
        linear = sum(
            row[kernel.SIZE] * row[kernel.OUTPUT] for row in rows if row[kernel.KIND] == kernel.LINEAR
        )
        convolves = any(row[kernel.KIND] in (kernel.CONVOLUTION, kernel.PLAIN) for row in rows)
        self._any_batch_size = linear <= (_CNN_WEIGHTS if convolves else _MLP_WEIGHTS)
        self._no_draws = _no_draws(rows)
        self._interleaved = _interleaved(rows)
        batch = max(WIDE, _SAMPLES_AT_ONCE) if self._interleaved else _SAMPLES_AT_ONCE
        self._network, self._memory = _lay_out(rows, batch, 0, 0)

    def covers(self, x: torch.Tensor) -> bool:
        """Whether it supports these samples ``(n, ...)``, and is faster than the library."""
        fits = x.shape[1:] == self.spec.shape and x.dtype == torch.float32
        return fits and (self._any_batch_size or len(x) <= THIN)

    def outputs(self, model: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Logits ``(n, classes)`` of a model ``(P,)``."""
        if self._folds:
            model = model.clone()
            for fold in self._folds:
                fold.apply(model)
        logits = torch.empty(len(x), int(self._network[-1, kernel.OUTPUT]))
        kernel.outputs(
            self._network,
            self._numbers,
            model.contiguous().numpy(),
            self._images,
            x.flatten(1).contiguous().numpy(),
            _SAMPLES_AT_ONCE,
            self._interleaved,
            self._no_draws,
            self._memory,
            logits.numpy(),
        )
        return logits


@dataclass(frozen=True)
class _Fold:
    """Folds a BatchNorm with running statistics into the weights and bias of the convolution before it.

    Attributes:
        weight: where the convolution's weights are in a model's flat vector.
        bias: where the convolution's bias is; None for none.
        gamma, beta, mean, variance: where those of the BatchNorm are. Beta is replaced by the bias of both.
        eps: epsilon of the BatchNorm.
    """

    weight: slice
    bias: slice | None
    gamma: slice
    beta: slice
    mean: slice
    variance: slice
    eps: float

    @classmethod
    def of(cls, row: list[int], eps: float) -> _Fold:
        """The fold for the row of a layer."""
        outputs = row[kernel.OUTPUTS]
        weights = outputs * row[kernel.CHANNELS] * row[kernel.KERNEL] ** 2
        weight, bias = row[kernel.WEIGHT], row[kernel.BIAS]
        of_norm = row[kernel.GAMMA : kernel.PLANE]
        gamma, beta, mean, variance = (slice(begin, begin + outputs) for begin in of_norm)
        bias_slice = None if bias < 0 else slice(bias, bias + outputs)
        return cls(slice(weight, weight + weights), bias_slice, gamma, beta, mean, variance, eps)

    def apply(self, model: torch.Tensor) -> None:
        """Fold the BatchNorm in a model ``(P,)``, in place."""
        scale = model[self.gamma] / torch.sqrt(model[self.variance] + self.eps)
        centred_bias = -model[self.mean] if self.bias is None else model[self.bias] - model[self.mean]
        model[self.weight].view(len(scale), -1).mul_(scale.unsqueeze(1))
        model[self.beta] += centred_bias * scale


def _evaluation_row(row: list[int]) -> list[int]:
    """The row of a layer in forward passes: a BatchNorm uses its running statistics, or is folded into its
    convolution, whose bias is then in the place of beta."""
    changed = list(row)
    if row[kernel.KIND] == kernel.BATCH_NORM:
        changed[kernel.KIND] = kernel.KNOWN_NORM
    elif row[kernel.KIND] == kernel.NORMED:
        changed[kernel.KIND], changed[kernel.BIAS] = kernel.CONVOLUTION, row[kernel.BETA]
    return changed


def _is_small(row: Sequence[int], window: int) -> bool:
    """False for a convolution that is large, and each of whose output pixels has a gradient."""
    if row[kernel.KIND] not in (kernel.NORMED, kernel.PLAIN):
        return True
    size = row[kernel.CHANNELS] * row[kernel.KERNEL] ** 2
    growth = 2 * row[kernel.PADDING] - row[kernel.KERNEL] + 1
    pixels, outputs = (row[kernel.HEIGHT] + growth) * (row[kernel.WIDTH] + growth), row[kernel.OUTPUTS]
    if row[kernel.KERNEL] == 1:
        return size * outputs * pixels <= _PRODUCTS // 4
    return (size <= window and outputs <= _OUTPUTS) or size * outputs * pixels <= _PRODUCTS


def _interleaved(rows: Sequence[Sequence[int]]) -> int:
    """How many layers take interleaved samples in forward passes: all convolutions, if they come first, are
    followed by poolings, and their inputs are small; else none."""
    is_pooled = [row[kernel.KIND] == kernel.CONVOLUTION for row in rows]
    count = is_pooled.index(False)
    if any(is_pooled[count:]) or any(row[kernel.KIND] == kernel.PLAIN for row in rows):
        return 0
    sizes = []
    for row in rows[:count]:
        channels, height, width, _, _, padding = row[kernel.CHANNELS : kernel.GAMMA]
        sizes.append((height + 2 * padding) * (width + 2 * padding) * channels)
    return count if max(sizes, default=0) <= _NUMBERS_INTERLEAVED else 0


def _no_draws(rows: Sequence[Sequence[int]]) -> NDArray[np.uint8] | None:
    """The kernels' ``draws`` without dropout: None if there are only the few kinds of layers, else empty."""
    return None if all(row[kernel.KIND] in kernel.FEW for row in rows) else np.empty(0, np.uint8)


def _images(rows: Sequence[Sequence[int]]) -> kernel.Images:
    """The sizes of the first layer's input."""
    channels, size = max(1, rows[0][kernel.CHANNELS]), rows[0][kernel.SIZE]
    return kernel.Images(channels, size // channels)


class _Table:
    """A network's layers as rows of numbers, read one after another.

    Attributes:
        rows: one for each layer (:data:`.client_kernel.INTEGERS` numbers), still without memory offsets.
        numbers: four floats for each layer, see :data:`.client_kernel.EPSILON`.
        dropouts: for each dropout, how many numbers it draws per sample, and the probability of a zero.

    Raises:
        Unsupported: if the kernel does not support a layer, or the order of the layers.
    """

    def __init__(self, spec: ModelSpec, reading: Reading) -> None:
        self.rows: list[list[int]] = []
        self.numbers: list[list[float]] = []
        self.dropouts: list[tuple[int, float]] = []
        self._begins = {name: part.start for name, part in zip(spec.names, spec.slices, strict=True)}
        self._shapes = dict(zip(spec.names, spec.shapes, strict=True))
        self._shape = tuple(spec.shape)  # of the next layer's input
        self._names = {id(leaf.layer): leaf.names for leaf in reading.leaves}
        self._add_layers(reading.root.layers)
        if not self.rows or self.rows[-1][kernel.KIND] != kernel.LINEAR:
            raise Unsupported("its last layer is not linear")

    def _add_layers(self, chain: Sequence[layers.Layer]) -> None:
        """Add layers that follow one another."""
        remaining = list(chain)
        while remaining:
            self._add_layer(remaining.pop(0), remaining)

    def _add_layer(self, layer: layers.Layer, behind: list[layers.Layer]) -> None:
        """Add a layer's row; layers that this row includes are removed from those ``behind`` it."""
        previous = self.rows[-1] if self.rows else None
        match layer:
            case ConvPoolReLU():
                self._add_convolution(kernel.CONVOLUTION, layer.conv)
            case layers.Conv2d() if norm := _norm_before_pooling(layer, behind):
                self._enter_norm(self._add_convolution(kernel.NORMED, layer), norm)
                del behind[:3]
            case layers.Conv2d() if ConvPoolReLU.supports_alone(layer):
                self._add_convolution(kernel.PLAIN, layer)
            case layers.Linear() if len(self._shape) == 1:
                row = self._add_row(kernel.LINEAR, self._shapes[self._names[id(layer)]["weight"]][:1])
                self._enter_weights(row, layer)
            case layers.BatchNorm() | layers.GroupNorm():
                self._add_norm(layer)
            case layers.Dropout() if layer.p < 1:
                row = self._add_row(kernel.DROPOUT, self._shape)
                row[kernel.DROPPED] = sum(size for size, _ in self.dropouts)
                self.numbers[-1][kernel.SCALE] = 1 / (1 - layer.p)
                self.dropouts.append((row[kernel.SIZE], layer.p))
            case layers.Residual():
                self._add_residual(layer)
            case layers.Flatten():
                if previous is None or len(self._shape) == 1:  # samples lie in the order of their dimensions
                    self._shape = (math.prod(self._shape),)
                else:
                    self._add_row(kernel.FLATTEN, (math.prod(self._shape),))
            case layers.ReLU() if previous and previous[kernel.KIND] == kernel.LINEAR:
                previous[kernel.RELU] = 1
            case layers.ReLU():
                self._add_activation("relu")
            case layers.Activation():
                self._add_activation(*layer.name)
            case layers.MaxPool2d() if (layer.padding, layer.dilation) == ((0, 0), (1, 1)):
                self._add_pooling(kernel.MAXIMUM, layer)
            case layers.AvgPool2d() if layer.padding == (0, 0):
                self._add_pooling(kernel.MEAN, layer)
            case _:
                raise Unsupported(f"{type(layer).__name__} here")

    def _add_row(self, kind: int, shape: tuple[int, ...]) -> list[int]:
        """Add a row for a layer whose output has this ``shape``; returns the row."""
        row = [0] * kernel.INTEGERS
        row[kernel.KIND] = kind
        row[kernel.SIZE], row[kernel.OUTPUT] = math.prod(self._shape), math.prod(shape)
        if len(self._shape) == 3:
            row[kernel.CHANNELS : kernel.OUTPUTS] = self._shape
        elif len(self._shape) != 1:
            raise Unsupported(f"samples of {len(self._shape)} dimensions")
        self._shape = shape
        self.rows.append(row)
        self.numbers.append([0.0] * 4)
        return row

    def _enter_weights(self, row: list[int], layer: layers.Layer) -> None:
        """Enter into the row where a layer's weights and bias are."""
        names = self._names[id(layer)]
        row[kernel.WEIGHT] = self._begins[names["weight"]]
        row[kernel.BIAS] = self._begins[names["bias"]] if "bias" in names else -1

    def _add_convolution(self, kind: int, convolution: layers.Conv2d) -> list[int]:
        """Add a convolution; returns its row."""
        if len(self._shape) != 3:
            raise Unsupported(f"a convolution of {len(self._shape)} dimensions")
        outputs, channels, size, _ = self._shapes[self._names[id(convolution)]["weight"]]
        padding, sides = int(convolution.padding[0]), self._shape[1:]
        if THIN * channels * math.prod(side + 2 * padding for side in sides) >= 2**31:
            raise Unsupported("its images are too large")  # winners are 32-bit integers
        pixels = [side + 2 * padding - size + 1 for side in sides]
        if min(pixels) < 2:
            raise Unsupported("an image is too small")
        if kind != kernel.CONVOLUTION:
            narrow = min(pixels[1], sides[1]) < 4 or sides[0] < 2
            if narrow or padding >= size:
                raise Unsupported("an image is too small, or its padding too large")
        pooled = kind != kernel.PLAIN
        row = self._add_row(kind, (outputs, *(side // 2 if pooled else side for side in pixels)))
        row[kernel.OUTPUTS : kernel.GAMMA] = [outputs, size, padding]
        self._enter_weights(row, convolution)
        return row

    def _add_norm(self, layer: layers.BatchNorm | layers.GroupNorm) -> None:
        """Add a normalisation that is not part of a convolution's row."""
        row = self._add_row(kernel.BATCH_NORM, self._shape)
        row[kernel.OUTPUTS] = self._shape[0]
        if isinstance(layer, layers.GroupNorm):
            row[kernel.KIND], row[kernel.GROUPS] = kernel.GROUP_NORM, layer.groups
        self._enter_norm(row, layer)

    def _enter_norm(self, row: list[int], norm: layers.BatchNorm | layers.GroupNorm) -> None:
        """Enter where a normalisation's parameters and statistics are, and its epsilon and momentum."""
        names = self._names[id(norm)]
        if "weight" not in names or "bias" not in names:
            raise Unsupported("a normalisation without weights")
        row[kernel.GAMMA], row[kernel.BETA] = (self._begins[names[part]] for part in ("weight", "bias"))
        self.numbers[-1][kernel.EPSILON] = norm.eps
        if isinstance(norm, layers.BatchNorm):
            statistics = (self._begins[names[part]] for part in ("running_mean", "running_var"))
            row[kernel.RUNNING_MEAN], row[kernel.RUNNING_VARIANCE] = statistics
            self.numbers[-1][kernel.MOMENTUM] = norm.momentum

    def _add_residual(self, layer: layers.Residual) -> None:
        """Add a skip connection; ``OTHER`` is the row of its other end until :func:`_lay_out`."""
        begin, shape = len(self.rows), self._shape
        branch = self._add_row(kernel.BRANCH, shape)
        self._add_layers(layer.inner.layers)
        if self._shape != shape:
            raise Unsupported("a skip connection between different shapes")
        branch[kernel.OTHER] = len(self.rows)
        self._add_row(kernel.JOIN, shape)[kernel.OTHER] = begin

    def _add_activation(self, name: str, slope: float = 0.0) -> None:
        """Add an elementwise activation."""
        if name not in _FUNCTIONS:
            raise Unsupported(f"{name} here")
        self._add_row(kernel.ACTIVATION, self._shape)[kernel.FUNCTION] = _FUNCTIONS[name]
        self.numbers[-1][kernel.SLOPE] = slope

    def _add_pooling(self, kind: int, layer: layers.MaxPool2d | layers.AvgPool2d) -> None:
        """Add a pooling whose windows neither overlap nor leave the image."""
        if layer.stride != layer.kernel or layer.ceil or len(self._shape) != 3:
            raise Unsupported("a pooling whose windows overlap or leave the image")
        channels, *sides = self._shape
        pooled = [side // window for side, window in zip(sides, layer.kernel, strict=True)]
        if min(pooled) < 1 or THIN * math.prod(self._shape) >= 2**31:  # winners are 32-bit integers
            raise Unsupported("an image is too small or too large")
        row = self._add_row(kind, (channels, *pooled))
        row[kernel.ROWS], row[kernel.COLUMNS] = layer.kernel


_FUNCTIONS = {
    "relu": activation_kernels.RELU,
    "tanh": activation_kernels.TANH,
    "sigmoid": activation_kernels.SIGMOID,
    "leaky_relu": activation_kernels.LEAKY_RELU,
    "elu": activation_kernels.ELU,
    "silu": activation_kernels.SILU,
}
"""The kernels' functions, by their names in :class:`.layers.Activation`."""


def _norm_before_pooling(conv: layers.Conv2d, behind: Sequence[layers.Layer]) -> layers.BatchNorm | None:
    """The BatchNorm after a convolution, if a supported pooling and a ReLU follow it; else None."""
    match behind[:3]:
        case [layers.BatchNorm() as norm, layers.MaxPool2d() as pool, layers.ReLU()]:
            return norm if ConvPoolReLU.supports(conv, pool) else None
    return None


def _lay_out(
    rows: Sequence[Sequence[int]], batch: int, velocity: int, ahead: int
) -> tuple[NDArray[np.int64], Memory]:
    """The table with memory offsets, and the memory."""
    network = np.array(rows, np.int64)
    acts = padded = winners = dpadded = dweight = dbias = planes = statistics = dplane = dinput = 0
    for layer in network:
        # Room for vectors beyond the last window, and for the second of two outputs beyond the last column.
        spare = LANES + 4 * int(layer[kernel.CHANNELS])
        layer[kernel.FROM] = acts
        acts += batch * int(layer[kernel.SIZE]) + spare
        layer[kernel.TO] = acts
        layer[kernel.PADDED], layer[kernel.WINNER] = padded, winners
        layer[kernel.PLANE], layer[kernel.STATISTICS] = planes, statistics
        if layer[kernel.KIND] == kernel.MAXIMUM:
            winners += batch * int(layer[kernel.OUTPUT]) + LANES
        if layer[kernel.KIND] in (kernel.CONVOLUTION, kernel.NORMED, kernel.PLAIN):
            channels, height, width, outputs, size, padding = map(int, layer[kernel.CHANNELS : kernel.GAMMA])
            padded_size = batch * (height + 2 * padding) * (width + 2 * padding) * channels + spare
            padded_size += -padded_size % _LINE
            padded, dpadded = padded + padded_size, max(dpadded, padded_size)
            dweight, dbias = max(dweight, outputs * channels * size**2), max(dbias, outputs)
            if layer[kernel.KIND] != kernel.PLAIN:
                winners += batch * int(layer[kernel.OUTPUT]) + LANES
            if layer[kernel.KIND] != kernel.CONVOLUTION:
                lanes, growth = -(-outputs // LANES) * LANES, 2 * padding - size + 1
                plane = batch * (height + growth) * (width + growth) * lanes
                dplane = max(dplane, plane)
                padded_plane = (height + size - 1) * (width + size - 1) * outputs
                dpadded = max(dpadded, batch * padded_plane + LANES + 4 * outputs)
                dinput = max(dinput, batch * height * width * -(-channels // LANES) * LANES)
                if layer[kernel.KIND] == kernel.NORMED:
                    planes, statistics = planes + plane, statistics + 2 * lanes
        else:
            dbias = max(dbias, int(layer[kernel.OUTPUT]))
        if layer[kernel.KIND] in (kernel.BATCH_NORM, kernel.GROUP_NORM):
            lanes = -(-int(layer[kernel.OUTPUTS]) // LANES) * LANES
            statistics += 2 * lanes * (batch if layer[kernel.KIND] == kernel.GROUP_NORM else 1)
    acts += batch * int(network[-1, kernel.OUTPUT]) + LANES
    for layer in network:
        if layer[kernel.KIND] == kernel.BRANCH:
            layer[kernel.OTHER] = network[layer[kernel.OTHER], kernel.TO]
        elif layer[kernel.KIND] == kernel.JOIN:
            layer[kernel.OTHER] = network[layer[kernel.OTHER], kernel.FROM]
    memory = Memory(
        acts=_zeros(acts),
        grads=_zeros(acts),
        padded=_zeros(padded),
        dpadded=_zeros(dpadded),
        winners=np.zeros(winners, np.int32),
        velocity=_zeros(velocity),
        ahead=_zeros(ahead),
        dweight=_zeros(dweight),
        dbias=_zeros(dbias),
        planes=_zeros(planes),
        statistics=_zeros(statistics),
        dplane=_zeros(dplane),
        dinput=_zeros(dinput),
        dnorm=_zeros(2 * dbias),
    )
    return network, memory


_LINE = 16
"""Floats of a cache line. A convolution takes a quarter less time if no vector crosses the end of one."""


def _zeros(size: int) -> Floats:
    """Zeros that begin with a cache line."""
    zeros = np.zeros(size + _LINE, np.float32)
    begin = -zeros.ctypes.data // zeros.itemsize % _LINE
    return zeros[begin : begin + size]

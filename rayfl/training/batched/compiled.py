"""Training and tests in one compiled call: which networks and work that is for, and what the call needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rayfl.losses import CrossEntropy
from rayfl.models import ModelSpec
from rayfl.training.batched import client_kernel as kernel
from rayfl.training.batched import layers
from rayfl.training.batched.client_kernel import Floats, Memory
from rayfl.training.batched.fused import ConvPoolReLU
from rayfl.training.batched.parameters import THIN
from rayfl.training.batched.reading import Leaf, Unsupported
from rayfl.training.batched.steps import StepPlan
from rayfl.training.batched.vectors import LANES
from rayfl.training.work import LocalWork, Terms


class CompiledTraining:
    """Trains clients in one call of :func:`.client_kernel.train`.

    Args:
        spec: the model and its flat layout.
        sequence: its layers in training.

    Raises:
        Unsupported: if a layer, their order or the loss is not among what the kernel knows.
    """

    def __init__(self, spec: ModelSpec, sequence: Sequence[Leaf]) -> None:
        if type(spec.loss) is not CrossEntropy or spec.loss.label_smoothing or spec.model.tokens:
            raise Unsupported("its loss is not a plain cross-entropy")
        self.spec = spec
        self._layers, norms = _read(spec, sequence)
        if max(map(_products, self._layers)) > _DENSE:
            raise Unsupported("a convolution before a BatchNorm is large")
        self._norms = np.array(norms, np.float32)
        self._images = _images(self._layers)
        self._memory: dict[tuple[bool, bool], tuple[int, tuple[NDArray[np.int64], Memory]]] = {}

    def covers(self, work: LocalWork, terms: Terms, batch: int) -> bool:
        """Whether it does this work, in steps of up to ``batch`` samples."""
        return not work.frozen and terms.guides is None and batch <= THIN

    def train(
        self, plan: StepPlan, work: LocalWork, models: torch.Tensor, terms: Terms, alike: bool,
        x: torch.Tensor, y: torch.Tensor,
    ) -> tuple[NDArray[np.float64], torch.Tensor]:  # fmt: skip
        """Train C clients from ``models`` ``(C, P)``, which are changed.

        Args:
            plan: their steps.
            work: what to do.
            models: contiguous.
            terms: of these clients.
            alike: whether all rows of ``models`` are one.
            x, y: the samples of all clients, one after another.

        Returns:
            Their mean losses ``(C,)``, and the models after ``plan.snapshots`` steps; ``(0, P)`` if no
            epoch is to be kept.
        """
        clients, batch = plan.places.shape[1:]
        network, memory = self._prepare(int(batch), bool(work.momentum), bool(work.inner_lr))
        nothing = np.empty((0, self.spec.P), np.float32)
        decay, mask = work.weight_decay + work.proximal, terms.mask
        masks = np.empty((0, self.spec.P), np.uint8)
        if mask is not None:
            masks = (mask != 0).to(torch.uint8).numpy()
            masks[:, self.spec.n_parameters :] = 1  # running statistics are not masked
        targets = nothing
        if work.proximal:
            # lambda w + mu (w - w_start) = (lambda + mu) (w - target)
            start = models[:1] if alike and mask is None else models
            target = start * (work.proximal / decay)
            targets = (target if mask is None else target * (mask != 0)).numpy()
        kept = torch.empty((clients, self.spec.P) if work.snapshot_epoch else (0, self.spec.P))
        losses = np.empty(clients)
        size = self._layers[0][kernel.SIZE]
        if math.prod(x.shape[1:]) != size:
            raise ValueError(f"samples of {math.prod(x.shape[1:])} numbers; the network takes {size}")
        kernel.train(
            network,
            self._norms,
            models.numpy(),
            self._images,
            targets,
            nothing if terms.offset is None else terms.offset.contiguous().numpy(),
            masks,
            kernel.Rule(*map(np.float32, (work.momentum, decay, work.inner_lr))),
            x.view(len(x), size).numpy(),
            y.numpy(),
            plan.places,
            plan.counts,
            np.array([work.rate(step) for step in range(plan.passes // work.batches_a_step)], np.float32),
            plan.snapshots,
            kept.numpy(),
            memory,
            losses,
        )
        return losses / np.maximum(1, plan.seen), kept

    def _prepare(self, batch: int, moves: bool, looks_ahead: bool) -> tuple[NDArray[np.int64], Memory]:
        """The network's table and memory for steps of up to ``batch`` samples, for the longest so far."""
        known, found = self._memory.get((moves, looks_ahead), (0, None))
        if found is None or known < batch:
            velocity, ahead = (self.spec.P if needed else 0 for needed in (moves, looks_ahead))
            found = _lay_out(self._layers, batch, velocity, ahead)
            self._memory[moves, looks_ahead] = batch, found
        return found


_NORM = "weight", "bias", "running_mean", "running_var"
"""What a BatchNorm has in a model, in the order of the kernel's columns."""

_DENSE = 400_000
"""Products of a sample in a convolution before a BatchNorm up to which its training is compiled. Every pixel
of it has a gradient, not one in four; measured 1.4 to 3 times as fast as the library up to 350,000 products,
with 590,000 faster for ten samples and slower for 32."""

_TOGETHER = 10
"""Samples that go through all layers before the next do: with more no network of those measured is faster."""

_FEW, _MORE = 1 << 16, 1 << 20
"""Weights of linear layers up to which forward passes of any number of samples are compiled, alone and behind
a convolution, which gains two to five times. With more weights the library is faster: it reads them once."""


class CompiledForward:
    """Forward passes in one call of :func:`.client_kernel.outputs`.

    A few samples at a time go through all layers, so that what lies between these stays in the core's cache:
    LeNet-5 takes a quarter of the library's time. Many samples in large linear layers are left to the
    library.

    Args:
        spec: the model and its flat layout.
        sequence: its layers in evaluation mode.

    Raises:
        Unsupported: as :class:`CompiledTraining`, but for the loss.
    """

    def __init__(self, spec: ModelSpec, sequence: Sequence[Leaf]) -> None:
        if spec.model.tokens:
            raise Unsupported("it takes words")
        rows, norms = _read(spec, sequence)
        self._folds = [
            _Fold.of(row, eps) for row, (eps, _) in zip(rows, norms, strict=True) if row[kernel.GAMMA] >= 0
        ]
        rows = [_without_norm(row) for row in rows]
        self.spec, self._images = spec, _images(rows)
        linear = sum(
            row[kernel.SIZE] * row[kernel.OUTPUT] for row in rows if row[kernel.KIND] == kernel.LINEAR
        )
        convolves = any(row[kernel.KIND] == kernel.CONVOLUTION for row in rows)
        self._always = linear <= (_MORE if convolves else _FEW)
        self._network, self._memory = _lay_out(rows, _TOGETHER, 0, 0)

    def covers(self, x: torch.Tensor) -> bool:
        """Whether it takes these samples ``(n, ...)``, and is faster than the library."""
        takes = x.shape[1:] == self.spec.shape and x.dtype == torch.float32
        return takes and (self._always or len(x) <= THIN)

    def outputs(self, model: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Logits ``(n, classes)`` of a model ``(P,)``."""
        if self._folds:
            model = model.clone()
            for fold in self._folds:
                fold.apply(model)
        logits = torch.empty(len(x), int(self._network[-1, kernel.OUTPUT]))
        kernel.outputs(
            self._network,
            model.contiguous().numpy(),
            self._images,
            x.flatten(1).contiguous().numpy(),
            _TOGETHER,
            self._memory,
            logits.numpy(),
        )
        return logits


@dataclass(frozen=True)
class _Fold:
    """A BatchNorm with its running statistics as a factor and a summand of the convolution before it.

    Attributes:
        weight: where the convolution's weights are in a model's flat vector.
        bias: where its bias is; None for none.
        gamma, beta, mean, variance: where the BatchNorm's are. In place of beta comes the bias of both.
        eps: its epsilon.
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
        """That of a layer."""
        outputs = row[kernel.OUTPUTS]
        weights = outputs * row[kernel.CHANNELS] * row[kernel.KERNEL] ** 2
        weight, bias = row[kernel.WEIGHT], row[kernel.BIAS]
        of_norm = row[kernel.GAMMA : kernel.PLANE]
        gamma, beta, mean, variance = (slice(at, at + outputs) for at in of_norm)
        known = None if bias < 0 else slice(bias, bias + outputs)
        return cls(slice(weight, weight + weights), known, gamma, beta, mean, variance, eps)

    def apply(self, model: torch.Tensor) -> None:
        """Change a model ``(P,)``."""
        scale = model[self.gamma] / torch.sqrt(model[self.variance] + self.eps)
        before = -model[self.mean] if self.bias is None else model[self.bias] - model[self.mean]
        model[self.weight].view(len(scale), -1).mul_(scale.unsqueeze(1))
        model[self.beta] += before * scale


def _without_norm(row: list[int]) -> list[int]:
    """The row of a layer whose BatchNorm has become its bias, in place of beta."""
    changed = list(row)
    if row[kernel.GAMMA] >= 0:
        changed[kernel.GAMMA], changed[kernel.BIAS] = -1, row[kernel.BETA]
    return changed


def _products(row: Sequence[int]) -> int:
    """Of a sample in a convolution before a BatchNorm; 0 for other layers."""
    if row[kernel.GAMMA] < 0:
        return 0
    less = 2 * row[kernel.PADDING] - row[kernel.KERNEL] + 1
    pixels = (row[kernel.HEIGHT] + less) * (row[kernel.WIDTH] + less)
    return row[kernel.OUTPUTS] * row[kernel.CHANNELS] * row[kernel.KERNEL] ** 2 * pixels


def _images(rows: Sequence[Sequence[int]]) -> kernel.Images:
    """What enters the first layer."""
    channels, size = max(1, rows[0][kernel.CHANNELS]), rows[0][kernel.SIZE]
    return kernel.Images(channels, size // channels)


def _read(spec: ModelSpec, sequence: Sequence[Leaf]) -> tuple[list[list[int]], list[tuple[float, float]]]:
    """A row for each layer (:data:`.client_kernel.COLUMNS`), without places in memory, and the epsilon and
    momentum of its BatchNorm."""
    begins = {name: part.start for name, part in zip(spec.names, spec.slices, strict=True)}
    shapes = dict(zip(spec.names, spec.shapes, strict=True))
    shape, rows, norms = tuple(spec.shape), list[list[int]](), list[tuple[float, float]]()
    left = list(sequence)
    while left:
        leaf = left.pop(0)
        layer, names = leaf.layer, leaf.names
        row, norm = [0] * kernel.COLUMNS, (0.0, 0.0)
        row[kernel.GAMMA] = -1
        row[kernel.SIZE] = row[kernel.OUTPUT] = math.prod(shape)
        convolution = layer.conv if isinstance(layer, ConvPoolReLU) else None
        if isinstance(layer, layers.Conv2d) and (found := _norm_before_pooling(layer, left)):
            convolution, (batch_norm, its) = layer, found
            if "weight" not in its:
                raise Unsupported("a BatchNorm without weights")
            row[kernel.GAMMA : kernel.PLANE] = [begins[its[part]] for part in _NORM]
            norm = batch_norm.eps, batch_norm.momentum
            del left[:3]
        if convolution or isinstance(layer, layers.Linear):
            row[kernel.WEIGHT] = begins[names["weight"]]
            row[kernel.BIAS] = begins[names["bias"]] if "bias" in names else -1
        if convolution and len(shape) == 3:
            outputs, channels, size, _ = shapes[names["weight"]]
            padding = int(convolution.padding[0])
            row[kernel.KIND] = kernel.CONVOLUTION
            row[kernel.CHANNELS : kernel.GAMMA] = [*shape, outputs, size, padding]
            wide = math.prod(side + 2 * padding for side in shape[1:])
            if THIN * channels * wide >= 2**31:  # winners are numbers of 32 bits
                raise Unsupported("its images are too large")
            pixels = [side + 2 * padding - size + 1 for side in shape[1:]]
            if min(pixels) < 2 or (row[kernel.GAMMA] >= 0 and pixels[1] < 4):
                raise Unsupported("an image is too small to be pooled")
            shape = (outputs, *(side // 2 for side in pixels))
        elif isinstance(layer, layers.Linear) and len(shape) == 1:
            row[kernel.KIND] = kernel.LINEAR
            shape = shapes[names["weight"]][:1]
        elif isinstance(layer, layers.Flatten):
            if not rows or len(shape) == 1:  # samples lie in the order of their dimensions
                shape = (math.prod(shape),)
                continue
            row[kernel.KIND] = kernel.FLATTEN
            row[kernel.CHANNELS : kernel.OUTPUTS] = shape
            shape = (math.prod(shape),)
        elif isinstance(layer, layers.ReLU) and rows and rows[-1][kernel.KIND] == kernel.LINEAR:
            rows[-1][kernel.RELU] = 1
            continue
        else:
            raise Unsupported(f"{type(layer).__name__} here")
        row[kernel.OUTPUT] = math.prod(shape)
        rows.append(row)
        norms.append(norm)
    if not rows or rows[-1][kernel.KIND] != kernel.LINEAR:
        raise Unsupported("its last layer is not linear")
    return rows, norms


def _norm_before_pooling(
    conv: layers.Conv2d, behind: Sequence[Leaf]
) -> tuple[layers.BatchNorm, Mapping[str, str]] | None:
    """The BatchNorm behind a convolution, if a pooling that the kernels know and a ReLU come next."""
    match [leaf.layer for leaf in behind[:3]]:
        case [layers.BatchNorm() as norm, layers.MaxPool2d() as pool, layers.ReLU()]:
            return (norm, behind[0].names) if ConvPoolReLU.supports(conv, pool) else None
    return None


def _lay_out(
    rows: Sequence[Sequence[int]], batch: int, velocity: int, ahead: int
) -> tuple[NDArray[np.int64], Memory]:
    """The table with places in memory, and the memory."""
    network = np.array(rows, np.int64)
    acts = padded = winners = most = dweight = dbias = planes = statistics = dplane = 0
    for layer in network:
        # Vectors reach beyond the last window, and the second of two outputs beyond the last column.
        beyond = LANES + 4 * int(layer[kernel.CHANNELS])
        layer[kernel.FROM] = acts
        acts += batch * int(layer[kernel.SIZE]) + beyond
        layer[kernel.TO] = acts
        layer[kernel.PADDED], layer[kernel.WINNER] = padded, winners
        layer[kernel.PLANE], layer[kernel.STATISTICS] = planes, statistics
        if layer[kernel.KIND] == kernel.CONVOLUTION:
            channels, height, width, outputs, size, padding = map(int, layer[kernel.CHANNELS : kernel.GAMMA])
            needed = batch * (height + 2 * padding) * (width + 2 * padding) * channels + beyond
            padded, most = padded + needed, max(most, needed)
            winners += batch * int(layer[kernel.OUTPUT]) + LANES
            dweight, dbias = max(dweight, outputs * channels * size**2), max(dbias, outputs)
            if layer[kernel.GAMMA] >= 0:
                lanes, less = -(-outputs // LANES) * LANES, 2 * padding - size + 1
                plane = batch * (height + less) * (width + less) * lanes
                planes, dplane, statistics = planes + plane, max(dplane, plane), statistics + 2 * lanes
        else:
            dbias = max(dbias, int(layer[kernel.OUTPUT]))
    acts += batch * int(network[-1, kernel.OUTPUT]) + LANES
    memory = Memory(
        acts=_zeros(acts),
        grads=_zeros(acts),
        padded=_zeros(padded),
        dpadded=_zeros(most),
        winners=np.zeros(winners, np.int32),
        velocity=_zeros(velocity),
        ahead=_zeros(ahead),
        dweight=_zeros(dweight),
        dbias=_zeros(dbias),
        planes=_zeros(planes),
        statistics=_zeros(statistics),
        dplane=_zeros(dplane),
        dnorm=_zeros(2 * dbias),
    )
    return network, memory


def _zeros(size: int) -> Floats:
    return np.zeros(size, np.float32)

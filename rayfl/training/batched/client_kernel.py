"""All local training of a client in one compiled call, for small networks for images and vectors.

A step of ten samples through LeNet-5 is 0.2 ms of arithmetic, and 0.3 ms of calls from Python, of which each
layer needs several. Here the loops over clients, steps and layers are compiled, too. Clients train one after
the other, so that a client's model, velocity and samples stay in the core's own cache through all its steps.
The result of a client does not depend on the other clients in the call at all.

The network is a table of integers, a row for each layer: its kind, its sizes, and where its parameters,
inputs, outputs and winners lie in flat arrays (the ``KIND`` and other columns below). Convolutions, their
normalisation, poolings, activations, forward products and the loss are those of :mod:`.conv_kernels`,
:mod:`.norm_kernels`, :mod:`.pool_kernels`, :mod:`.activation_kernels`, :mod:`.linear_kernels` and
:mod:`.loss_kernel`. The gradient of a linear layer's weights is never written to memory: it is added to the
weights, or to their velocity, as it is computed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayfl.training.batched import (
    activation_kernels,
    conv_kernels,
    linear_kernels,
    norm_kernels,
    pool_kernels,
)
from rayfl.training.batched.descent import Floats, Step, descend, descend_product
from rayfl.training.batched.jit import jit
from rayfl.training.batched.loss_kernel import cross_entropy
from rayfl.training.batched.vectors import LANES, WIDE, copy, get, store

(CONVOLUTION, NORMED, PLAIN, LINEAR, BATCH_NORM, KNOWN_NORM, GROUP_NORM) = range(7)
(FLATTEN, MAXIMUM, MEAN, ACTIVATION, DROPOUT, BRANCH, JOIN) = range(7, 14)
"""Kinds of layers. With parameters: a convolution with 2x2 maximum pooling and ReLU, a convolution with a
BatchNorm before these, or a convolution alone; a linear layer; a BatchNorm with the batch's statistics, or
with the running ones; a GroupNorm. Without parameters: channels last to channels first; maximum and mean
pooling; an elementwise activation; dropout; the beginning and the end of a skip connection."""
FEW = CONVOLUTION, LINEAR, FLATTEN
"""The kinds of LeNet-5 and of MLPs."""

(KIND, WEIGHT, BIAS, SIZE, OUTPUT, RELU, FROM, TO, PADDED, WINNER) = range(10)
(CHANNELS, HEIGHT, WIDTH, OUTPUTS, KERNEL, PADDING) = range(10, 16)
(GAMMA, BETA, RUNNING_MEAN, RUNNING_VARIANCE, PLANE, STATISTICS) = range(16, 22)
(ROWS, COLUMNS, FUNCTION, GROUPS, DROPPED, OTHER) = range(22, 28)
"""Columns of a layer's row.

``WEIGHT, BIAS``: where its parameters begin in the model's flat vector; -1 for no bias. ``SIZE, OUTPUT``:
numbers of a sample before and after it. ``RELU``: whether one follows a linear layer. ``FROM, TO``: where its
inputs and outputs begin in memory; ``PADDED, WINNER``: where a convolution's padded inputs, and the winners
of a pooling, begin. ``CHANNELS`` to ``PADDING`` are of a convolution, or the ``CHANNELS, HEIGHT, WIDTH`` of
what is flattened or pooled; ``OUTPUTS`` are also the channels of a normalisation. ``GAMMA`` to
``RUNNING_VARIANCE``: where the parameters and the running statistics of a normalisation begin in the model's
flat vector, also of the BatchNorm between a convolution and its pooling. ``PLANE``: where the inputs of such
a BatchNorm begin in memory. ``STATISTICS``: where mean and variance of a normalisation begin in memory.
``ROWS, COLUMNS``: of a pooling's windows. ``FUNCTION``: of an activation, see :mod:`.activation_kernels`.
``GROUPS``: of a GroupNorm. ``DROPPED``: numbers per sample that earlier dropouts draw. ``OTHER``: of a skip
connection, where its other end's inputs (at ``JOIN``) or outputs (at ``BRANCH``) begin in memory.
"""
INTEGERS = 28
"""Columns of a row."""

EPSILON, MOMENTUM, SLOPE, SCALE = range(4)
"""Columns of a layer's floats: epsilon and momentum of its normalisation, the slope of its activation, and
the scale of what its dropout keeps."""

_CHUNK = 512
"""Features for which all samples are visited before the next: their gradients stay in the nearest cache."""

_GROUPS = 5
"""Groups of WIDE interleaved samples before the other layers, which take five samples at a time, or ten."""

_ZERO = np.float32(0)


class Images(NamedTuple):
    """The network's input: ``channels`` of ``pixels`` each if the first layer takes images, which get their
    channels last; else one channel with all numbers of a sample."""

    channels: int
    pixels: int


class Rule(NamedTuple):
    """Settings of SGD: ``momentum``; ``decay`` of weights, or towards the target; ``alpha`` of Per-FedAvg, or
    0. With alpha, every other pass only determines where the next gradient is taken."""

    momentum: np.float32
    decay: np.float32
    alpha: np.float32


class Memory(NamedTuple):
    """Flat arrays that a step writes to.

    Attributes:
        acts, grads: inputs and outputs of all layers, and their gradients.
        padded: inputs of convolutions with their padding.
        dpadded: gradients of one convolution's padded inputs, or a convolution's output gradients, padded.
        winners: of the poolings.
        velocity: of a client ``(P,)``; empty without momentum.
        ahead: the weights where Per-FedAvg takes its second gradient ``(P,)``; empty without.
        dweight, dbias: gradients of a convolution's weights, and of a layer's bias; ``dbias`` is also the
            zero bias of a layer that has none.
        planes: inputs of each BatchNorm between a convolution and a pooling.
        statistics: mean and variance of each normalisation's inputs.
        dplane: outputs of a convolution alone, or gradients of the inputs of a BatchNorm.
        dinput: gradients of the inputs of a convolution alone.
        dnorm: gradients of gamma and beta.
    """

    acts: Floats
    grads: Floats
    padded: Floats
    dpadded: Floats
    winners: NDArray[np.int32]
    velocity: Floats
    ahead: Floats
    dweight: Floats
    dbias: Floats
    planes: Floats
    statistics: Floats
    dplane: Floats
    dinput: Floats
    dnorm: Floats


@jit(fastmath={"contract"})
def train(  # type: ignore[no-untyped-def]
    network,
    numbers,
    models,
    first,
    targets,
    offsets,
    masks,
    sgd,
    x,
    y,
    places,
    counts,
    rates,
    keep_after,
    kept,
    draws,
    memory,
    losses,
):
    """Train C clients.

    Args:
        network: a row for each layer ``(L, INTEGERS)`` int64.
        numbers: of each layer ``(L, 4)`` float32, see :data:`EPSILON`.
        models: ``(C, P)`` float32, changed.
        first: see :class:`Images`.
        targets: points towards which weights are pulled, ``(C, P)``, or one for all clients ``(1, P)``;
            ``(0, P)`` for none.
        offsets: added to gradients, ``(C, P)``; ``(0, P)`` for none.
        masks: of bytes 0 and 1, ``(C, P)``; ``(0, P)`` for none.
        sgd: see :class:`Rule`.
        x: samples ``(n, size)`` float32.
        y: labels ``(n,)`` int64.
        places: rows of the samples of each pass ``(T, C, B)`` int64.
        counts: how many of them are not padding ``(T, C)`` int64; 0 once a client has finished.
        rates: of each step ``(T,)`` float32.
        keep_after: after which step each model is copied to ``kept``, ``(C,)`` int64; 0 for never.
        kept: ``(C, P)``, or ``(0, P)``.
        draws: the dropout mask of one client, bytes of 1 (kept) and 0: for each pass and each dropout the
            samples, channels first; empty without dropout. None if the network has only layers of the
            :data:`FEW` kinds: then the kernel is compiled without the others, which takes half the time.
        memory: see :class:`Memory`.
        losses: ``(C,)`` float64: receives the sum over steps of loss times samples.
    """
    acts, grads, velocity, ahead = memory.acts, memory.grads, memory.velocity, memory.ahead
    clients, size = models.shape
    layers = len(network)
    passes = 2 if len(ahead) else 1
    width = places.shape[2]
    labels, shares, loss = np.empty(width, np.int64), np.empty(width, np.float32), np.empty(1, np.float32)
    empty, no_mask = np.empty(0, np.float32), np.empty(0, np.uint8)
    last = network[layers - 1]
    classes, logits_at = last[OUTPUT], last[TO]
    drawn, lowest = _draws_per_sample(network), _first_with_parameters(network)
    for c in range(clients):
        draws_used = 0
        w = models[c]
        target = empty if len(targets) == 0 else targets[c if len(targets) > 1 else 0]
        offset = empty if len(offsets) == 0 else offsets[c]
        mask = no_mask if len(masks) == 0 else masks[c]
        if len(mask):
            for k in range(size):
                w[k] *= np.float32(mask[k])
        velocity[:] = _ZERO
        losses[c] = 0.0
        for t in range(len(counts)):
            batch = counts[t, c]
            if batch == 0:
                break
            looks_ahead = passes == 2 and t % 2 == 0
            point = ahead if passes == 2 and not looks_ahead else w  # where the gradient is taken
            for b in range(batch):
                place = places[t, c, b]
                labels[b], shares[b] = y[place], np.float32(1) / np.float32(batch)
                _copy_sample(
                    x[place], first.channels, first.pixels, acts[network[0, FROM] + b * network[0, SIZE] :]
                )

            pass_draws = draws
            if draws is not None:
                pass_draws = draws[draws_used : draws_used + batch * drawn]
                draws_used += batch * drawn
            _forward(network, numbers, batch, point, w, pass_draws, memory)
            logits_end = logits_at + batch * classes
            cross_entropy(
                acts[logits_at:logits_end].reshape((1, batch, classes)),
                labels[:batch].reshape((1, batch)),
                shares[:batch].reshape((1, batch)),
                loss,
                grads[logits_at:logits_end].reshape((1, batch, classes)),
            )

            terms = Step(w, velocity, target, offset, mask, sgd.momentum, sgd.decay, rates[t // passes])
            if looks_ahead:
                ahead[:] = w
                terms = Step(ahead, empty, empty, empty, mask, _ZERO, _ZERO, sgd.alpha)
            else:
                losses[c] += np.float64(loss[0]) * batch
            for number in range(layers - 1, -1, -1):
                layer = network[number]
                kind = layer[KIND]
                if kind == CONVOLUTION:
                    _back_from_winners(layer, batch, number > lowest, point, memory, terms)
                elif kind == LINEAR:
                    _back_through_product(
                        layer, batch, number > lowest, point, acts, grads, memory.dbias, terms
                    )
                elif kind == FLATTEN:
                    if number > lowest:
                        _move_channels(layer, batch, grads, False)
                elif pass_draws is not None:
                    if kind in (NORMED, PLAIN):
                        _back_convolution(
                            layer, numbers[number], batch, number > lowest, point, memory, terms
                        )
                    elif kind in (BATCH_NORM, GROUP_NORM):
                        _back_through_norm(layer, numbers[number], batch, point, memory, terms)
                    elif number > lowest:
                        _back_weightless(layer, numbers[number], batch, pass_draws, memory)
            if not looks_ahead and keep_after[c] == t // passes + 1:
                kept[c] = w


@jit(fastmath={"contract"})
def outputs(network, numbers, w, first, x, most, interleaved, draws, memory, logits):  # type: ignore[no-untyped-def]
    """Compute the network's outputs for samples.

    Args:
        network, numbers, first: see :func:`train`; with ``KNOWN_NORM`` in place of ``BATCH_NORM``, without
            dropout, and without ``NORMED``: such a BatchNorm is part of its convolution's weights and bias.
        w: a model ``(P,)`` float32.
        x: samples ``(n, size)`` float32.
        most: number of samples for which there is memory.
        interleaved: how many of the first layers, each a ``CONVOLUTION``, take interleaved samples if there
            are enough of them; unless it is 0, there is memory for WIDE samples or more.
        draws: empty, or None as for :func:`train`.
        memory: see :class:`Memory`; of the gradients, only ``grads``, ``dbias`` and ``dplane`` are used.
        logits: ``(n, classes)`` float32, written.
    """
    last = network[len(network) - 1]
    classes, logits_at = last[OUTPUT], last[TO]
    convolved = interleaved if len(x) > WIDE // 2 else 0  # the other layers take a few samples at a time
    remaining = network[convolved:]
    size, at_once = remaining[0, SIZE], _GROUPS * WIDE if convolved else most
    features = np.empty(at_once * size if convolved else 0, np.float32)
    for start in range(0, len(x), at_once):
        stop = min(start + at_once, len(x))
        if convolved:
            _convolve_interleaved(network[:convolved], w, x[start:stop], memory, features)
        for begin in range(start, stop, most):
            batch = min(most, stop - begin)
            for b in range(batch):
                inputs = memory.acts[remaining[0, FROM] + b * size :]
                if convolved:
                    copy(inputs, 0, features, (begin - start + b) * size, size)
                else:
                    _copy_sample(x[begin + b], first.channels, first.pixels, inputs)
            _forward(remaining, numbers[convolved:], batch, w, w, draws, memory)
            for b in range(batch):
                logits_begin = logits_at + b * classes
                logits[begin + b] = memory.acts[logits_begin : logits_begin + classes]


@jit(fastmath={"contract"})
def _forward(network, numbers, batch, w, running, draws, memory):  # type: ignore[no-untyped-def]
    """Forward through all layers; ``running`` is the model whose running statistics are updated, and
    ``draws`` is the dropout mask of this pass."""
    acts = memory.acts
    for number in range(len(network)):
        layer = network[number]
        kind = layer[KIND]
        if kind == LINEAR:
            _multiply(layer, batch, w, acts, memory.dbias)
        elif kind == CONVOLUTION:
            _convolve(layer, batch, w, memory, acts[layer[TO] :], memory.winners[layer[WINNER] :])
        elif kind == FLATTEN:
            _move_channels(layer, batch, acts, True)
        elif draws is not None:
            if kind == NORMED:
                _convolve(layer, batch, w, memory, memory.planes[layer[PLANE] :], memory.winners[:0])
                _normalise_and_pool(layer, numbers[number], batch, w, running, memory)
            elif kind == PLAIN:
                _convolve(layer, batch, w, memory, memory.dplane, memory.winners[:0])
                _remove_padding(memory.dplane, batch * layer[OUTPUT], layer[OUTPUTS], acts[layer[TO] :])
            elif kind in (BATCH_NORM, KNOWN_NORM, GROUP_NORM):
                _normalise(layer, numbers[number], batch, w, running, memory)
            else:
                _forward_weightless(layer, numbers[number], batch, draws, memory)


@jit(fastmath={"contract"})
def _draws_per_sample(network):  # type: ignore[no-untyped-def]
    """How many numbers all dropouts draw per sample."""
    drawn = 0
    for number in range(len(network)):
        if network[number, KIND] == DROPOUT:
            drawn += network[number, SIZE]
    return drawn


@jit(fastmath={"contract"})
def _first_with_parameters(network):  # type: ignore[no-untyped-def]
    """The first layer with parameters; no layer before it needs a gradient."""
    for number in range(len(network)):
        if network[number, KIND] <= GROUP_NORM:
            return number
    return len(network)


@jit(fastmath={"contract"})
def _forward_weightless(layer, numbers, batch, draws, memory):  # type: ignore[no-untyped-def]
    """Forward through a layer without weights."""
    acts, kind = memory.acts, layer[KIND]
    x, y = _inputs_and_outputs(layer, batch, acts)
    if kind == MAXIMUM:
        winners = memory.winners[layer[WINNER] :]
        pool_kernels.maximum(acts[layer[FROM] :], _pooling(layer, batch), acts[layer[TO] :], winners)
    elif kind == MEAN:
        pool_kernels.mean(acts[layer[FROM] :], _pooling(layer, batch), acts[layer[TO] :])
    elif kind == DROPOUT:
        _drop(layer, numbers[SCALE], batch, draws, x, y)
    elif kind in (BRANCH, JOIN):
        _sum(x, acts[layer[OTHER] :], kind == JOIN, y)
    else:
        activation_kernels.forward(layer[FUNCTION], numbers[SLOPE], x, y)


@jit(fastmath={"contract"})
def _back_weightless(layer, numbers, batch, draws, memory):  # type: ignore[no-untyped-def]
    """Back through a layer without weights."""
    grads, kind = memory.grads, layer[KIND]
    dx, dy = _inputs_and_outputs(layer, batch, grads)
    if kind == MAXIMUM:
        winners, pooling = memory.winners[layer[WINNER] :], _pooling(layer, batch)
        pool_kernels.maximum_back(grads[layer[TO] :], winners, pooling, grads[layer[FROM] :])
    elif kind == MEAN:
        pool_kernels.mean_back(grads[layer[TO] :], _pooling(layer, batch), grads[layer[FROM] :])
    elif kind == DROPOUT:
        _drop(layer, numbers[SCALE], batch, draws, dy, dx)
    elif kind in (BRANCH, JOIN):
        _sum(dy, grads[layer[OTHER] :], kind == BRANCH, dx)
    else:
        x, y = _inputs_and_outputs(layer, batch, memory.acts)
        activation_kernels.backward(layer[FUNCTION], numbers[SLOPE], x, y, dy, dx)


@jit(fastmath={"contract"})
def _inputs_and_outputs(layer, batch, values):  # type: ignore[no-untyped-def]
    """Inputs and outputs of a layer, or their gradients."""
    of, to = layer[FROM], layer[TO]
    return values[of : of + batch * layer[SIZE]], values[to : to + batch * layer[OUTPUT]]


@jit(fastmath={"contract"})
def _drop(layer, scale, batch, draws, x, y):  # type: ignore[no-untyped-def]
    """``y`` is what is kept of ``x``, times ``scale``, and 0 elsewhere."""
    size, channels = layer[SIZE], max(1, layer[CHANNELS])
    pixels = size // channels
    for b in range(batch):
        first = batch * layer[DROPPED] + b * size
        for i in range(channels):
            for k in range(pixels):
                place = b * size + k * channels + i
                y[place] = x[place] * (scale * np.float32(draws[first + i * pixels + k]))


@jit(fastmath={"contract"})
def _sum(x, other, both, y):  # type: ignore[no-untyped-def]
    """``y = x``, or ``x + other``."""
    for k in range(len(y)):
        y[k] = x[k]
    if both:
        for k in range(len(y)):
            y[k] += other[k]


@jit(fastmath={"contract"})
def _pooling(layer, batch):  # type: ignore[no-untyped-def]
    return pool_kernels.Pooling(
        batch, layer[CHANNELS], layer[HEIGHT], layer[WIDTH], layer[ROWS], layer[COLUMNS]
    )


@jit(fastmath={"contract"})
def _copy_sample(sample, channels, pixels, inputs):  # type: ignore[no-untyped-def]
    """Copy a sample; an image gets its channels last."""
    if channels == 1:
        copy(inputs, 0, sample, 0, pixels)
        return
    for i in range(channels):
        for k in range(pixels):
            inputs[k * channels + i] = sample[i * pixels + k]


@jit(fastmath={"contract"})
def _move_channels(layer, batch, values, flatten):  # type: ignore[no-untyped-def]
    """Copy a layer's inputs (channels last) to its outputs (channels first, as PyTorch flattens), or back."""
    channels, pixels, size = layer[CHANNELS], layer[HEIGHT] * layer[WIDTH], layer[SIZE]
    for b in range(batch):
        for k in range(pixels):
            for i in range(channels):
                last = layer[FROM] + b * size + k * channels + i
                first = layer[TO] + b * size + i * pixels + k
                if flatten:
                    values[first] = values[last]
                else:
                    values[last] = values[first]


@jit(fastmath={"contract"})
def _geometry(layer, batch):  # type: ignore[no-untyped-def]
    return conv_kernels.Geometry(
        1, batch, layer[CHANNELS], layer[HEIGHT], layer[WIDTH], layer[OUTPUTS], layer[KERNEL], layer[PADDING]
    )


@jit(fastmath={"contract"})
def _bias(layer, w, memory):  # type: ignore[no-untyped-def]
    """The bias of a convolution; zeros if it has none."""
    outputs = layer[OUTPUTS]
    zeros = memory.dbias
    if layer[BIAS] < 0:
        zeros[:outputs] = _ZERO
    return zeros[:outputs] if layer[BIAS] < 0 else w[layer[BIAS] : layer[BIAS] + outputs]


@jit(fastmath={"contract"})
def _convolve(layer, batch, w, memory, y, winners):  # type: ignore[no-untyped-def]
    """Forward through a convolution and, unless ``winners`` is empty, its pooling and ReLU."""
    conv_kernels.forward(
        memory.acts[layer[FROM] :],
        _weights(layer, w),
        _bias(layer, w, memory),
        _geometry(layer, batch),
        memory.padded[layer[PADDED] :],
        y,
        winners,
    )


@jit(fastmath={"contract"})
def _convolve_interleaved(network, w, x, memory, features):  # type: ignore[no-untyped-def]
    """Forward through convolutions, with their poolings and ReLUs, of interleaved samples.

    The inputs of each layer lie in ``padded``, the outputs of the last one in ``grads``, from where they go
    to ``features``, sample by sample.
    """
    for number in range(len(network)):
        layer = network[number]
        if layer[PADDING]:
            rows, columns = layer[HEIGHT] + 2 * layer[PADDING], layer[WIDTH] + 2 * layer[PADDING]
            begin = layer[PADDED]
            memory.padded[begin : begin + rows * columns * layer[CHANNELS] * WIDE] = _ZERO
    last = network[len(network) - 1]
    size = last[OUTPUT]
    for start in range(0, len(x), WIDE):
        used = min(WIDE, len(x) - start)
        _interleave(x[start : start + used], network[0], memory.padded[network[0, PADDED] :])
        for number in range(len(network)):
            layer = network[number]
            margin, y = 0, memory.grads[last[TO] :]
            if number + 1 < len(network):
                margin, y = network[number + 1, PADDING], memory.padded[network[number + 1, PADDED] :]
            conv_kernels.forward_interleaved(
                memory.padded[layer[PADDED] :],
                _weights(layer, w),
                _bias(layer, w, memory),
                _geometry(layer, used),
                margin,
                y,
            )
        for b in range(used):
            of, begin = last[TO] + b, (start + b) * size
            for k in range(begin, begin + size):
                store(features, k, get(memory.grads, of))
                of += WIDE


@jit(fastmath={"contract"})
def _interleave(x, layer, padded):  # type: ignore[no-untyped-def]
    """Copy up to WIDE images, channels first, to ``(row, column, channel, WIDE)`` inside of the padding.

    Lanes without a sample repeat the last one: whatever lay there before could be numbers so small that the
    processor takes a hundred times as long for them.
    """
    channels, height, width, padding = layer[CHANNELS], layer[HEIGHT], layer[WIDTH], layer[PADDING]
    for i in range(channels):
        for r in range(height):
            of = (i * height + r) * width
            first_pixel = ((r + padding) * (width + 2 * padding) + padding) * channels + i
            for lane in range(WIDE):
                sample, to = x[min(lane, len(x) - 1)], first_pixel * WIDE + lane
                for k in range(of, of + width):
                    store(padded, to, get(sample, k))
                    to += channels * WIDE


@jit(fastmath={"contract"})
def _remove_padding(plane, size, channels, y):  # type: ignore[no-untyped-def]
    """Copy ``size`` numbers: each pixel's channels, without the padding to whole vectors; also in place."""
    lanes = (channels + LANES - 1) // LANES * LANES
    for p in range(size // channels):
        for i in range(channels):
            y[p * channels + i] = plane[p * lanes + i]


@jit(fastmath={"contract"})
def _plane(layer, batch):  # type: ignore[no-untyped-def]
    """Sizes of the inputs of a BatchNorm behind a convolution."""
    growth = 2 * layer[PADDING] - layer[KERNEL] + 1
    return norm_kernels.Plane(batch, layer[HEIGHT] + growth, layer[WIDTH] + growth, layer[OUTPUTS])


@jit(fastmath={"contract"})
def _statistics(layer, sets, memory):  # type: ignore[no-untyped-def]
    """Mean and variance of each channel: ``sets`` of them, one per sample for a GroupNorm, else one."""
    lanes = (layer[OUTPUTS] + LANES - 1) // LANES * LANES * sets
    begin = layer[STATISTICS]
    return memory.statistics[begin : begin + lanes], memory.statistics[begin + lanes : begin + 2 * lanes]


@jit(fastmath={"contract"})
def _normalise_and_pool(layer, numbers, batch, w, running, memory):  # type: ignore[no-untyped-def]
    """Forward through the BatchNorm, the pooling and the ReLU behind a convolution."""
    plane, outputs = _plane(layer, batch), layer[OUTPUTS]
    mean, variance = _statistics(layer, 1, memory)
    norm_kernels.pooled(
        memory.planes[layer[PLANE] :],
        plane,
        w[layer[GAMMA] : layer[GAMMA] + outputs],
        w[layer[BETA] : layer[BETA] + outputs],
        numbers[EPSILON],
        mean,
        variance,
        memory.acts[layer[TO] :],
        memory.winners[layer[WINNER] :],
    )
    _update_running(layer, numbers, plane.batch * plane.tall * plane.wide, mean, variance, running)


@jit(fastmath={"contract"})
def _update_running(layer, numbers, count, mean, variance, running):  # type: ignore[no-untyped-def]
    """Update a BatchNorm's running statistics; the running variance is the unbiased one."""
    unbiased = np.float32(count) / np.float32(count - 1)
    for o in range(layer[OUTPUTS]):
        m, v = layer[RUNNING_MEAN] + o, layer[RUNNING_VARIANCE] + o
        running[m] += numbers[MOMENTUM] * (mean[o] - running[m])
        running[v] += numbers[MOMENTUM] * (variance[o] * unbiased - running[v])


@jit(fastmath={"contract"})
def _normalise(layer, numbers, batch, w, running, memory):  # type: ignore[no-untyped-def]
    """Forward through a normalisation."""
    channels, eps = layer[OUTPUTS], numbers[EPSILON]
    pixels = layer[SIZE] // channels
    x, y = memory.acts[layer[FROM] :], memory.acts[layer[TO] :]
    gamma, beta = w[layer[GAMMA] : layer[GAMMA] + channels], w[layer[BETA] : layer[BETA] + channels]
    if layer[KIND] == GROUP_NORM:
        mean, inverse = _statistics(layer, batch, memory)
        norm_kernels.group(x, batch, pixels, layer[GROUPS], gamma, beta, eps, mean, inverse, y)
    elif layer[KIND] == BATCH_NORM:
        mean, variance = _statistics(layer, 1, memory)
        norm_kernels.batch(x, batch, pixels, gamma, beta, eps, mean, variance, y)
        _update_running(layer, numbers, batch * pixels, mean, variance, running)
    else:
        mean = w[layer[RUNNING_MEAN] : layer[RUNNING_MEAN] + channels]
        variance = w[layer[RUNNING_VARIANCE] : layer[RUNNING_VARIANCE] + channels]
        norm_kernels.affine(x, batch * pixels, gamma, beta, eps, mean, variance, y)


@jit(fastmath={"contract"})
def _back_through_norm(layer, numbers, batch, w, memory, terms):  # type: ignore[no-untyped-def]
    """Back through a normalisation."""
    channels = layer[OUTPUTS]
    pixels = layer[SIZE] // channels
    x, dx, dy = memory.acts[layer[FROM] :], memory.grads[layer[FROM] :], memory.grads[layer[TO] :]
    gamma = w[layer[GAMMA] : layer[GAMMA] + channels]
    dgamma, dbeta = memory.dnorm[:channels], memory.dnorm[channels : 2 * channels]
    if layer[KIND] == GROUP_NORM:
        mean, inverse = _statistics(layer, batch, memory)
        norm_kernels.group_back(dy, x, batch, pixels, layer[GROUPS], gamma, mean, inverse, dx, dgamma, dbeta)
    else:
        mean, variance = _statistics(layer, 1, memory)
        norm_kernels.batch_back(
            dy, x, batch * pixels, gamma, numbers[EPSILON], mean, variance, dx, dgamma, dbeta
        )
    descend(layer[GAMMA], dgamma, channels, terms)
    descend(layer[BETA], dbeta, channels, terms)


@jit(fastmath={"contract"})
def _multiply(layer, batch, w, acts, zeros):  # type: ignore[no-untyped-def]
    """Forward through a linear layer, and the ReLU after it."""
    size, outputs, to = layer[SIZE], layer[OUTPUT], layer[TO]
    if layer[BIAS] < 0:
        zeros[:outputs] = _ZERO
    bias = zeros[:outputs] if layer[BIAS] < 0 else w[layer[BIAS] : layer[BIAS] + outputs]
    linear_kernels.forward(
        acts[layer[FROM] : layer[FROM] + batch * size].reshape((1, batch, size)),
        w[layer[WEIGHT] : layer[WEIGHT] + outputs * size].reshape((1, outputs, size)),
        bias.reshape((1, outputs)),
        acts[to : to + batch * outputs].reshape((1, batch, outputs)),
    )
    if layer[RELU]:
        y = acts[to : to + batch * outputs]
        for k in range(batch * outputs):
            y[k] = _ZERO if y[k] < 0 else y[k]


@jit(fastmath={"contract"})
def _weights(layer, w):  # type: ignore[no-untyped-def]
    """The weights of a convolution, flat."""
    count = layer[OUTPUTS] * layer[CHANNELS] * layer[KERNEL] * layer[KERNEL]
    return w[layer[WEIGHT] : layer[WEIGHT] + count]


@jit(fastmath={"contract"})
def _back_convolution(layer, numbers, batch, need_input, w, memory, terms):  # type: ignore[no-untyped-def]
    """Back through a convolution all of whose outputs have a gradient: alone, or with a BatchNorm."""
    outputs, geometry, weights = layer[OUTPUTS], _geometry(layer, batch), _weights(layer, w)
    dy = memory.grads[layer[TO] :]
    if layer[KIND] == NORMED:
        plane = _plane(layer, batch)
        mean, variance = _statistics(layer, 1, memory)
        dgamma, dbeta = memory.dnorm[:outputs], memory.dnorm[outputs : 2 * outputs]
        norm_kernels.pooled_back(
            dy,
            memory.winners[layer[WINNER] :],
            memory.planes[layer[PLANE] :],
            plane,
            w[layer[GAMMA] : layer[GAMMA] + outputs],
            numbers[EPSILON],
            mean,
            variance,
            memory.dplane,
            dgamma,
            dbeta,
        )
        _remove_padding(memory.dplane, batch * plane.tall * plane.wide * outputs, outputs, memory.dplane)
        dy = memory.dplane
    conv_kernels.weight_gradient(dy, memory.padded[layer[PADDED] :], geometry, memory.dweight, memory.dbias)
    if need_input:
        conv_kernels.input_gradient(dy, weights, geometry, memory.dpadded, memory.dinput)
        _remove_padding(memory.dinput, batch * layer[SIZE], layer[CHANNELS], memory.grads[layer[FROM] :])
    _descend_convolution(layer, len(weights), memory, terms)
    if layer[KIND] == NORMED:
        descend(layer[GAMMA], memory.dnorm[:outputs], outputs, terms)
        descend(layer[BETA], memory.dnorm[outputs:], outputs, terms)


@jit(fastmath={"contract"})
def _back_from_winners(layer, batch, need_input, w, memory, terms):  # type: ignore[no-untyped-def]
    """Back through a convolution with pooling and ReLU."""
    channels, padding, height, weights = layer[CHANNELS], layer[PADDING], layer[HEIGHT], _weights(layer, w)
    conv_kernels.backward(
        memory.grads[layer[TO] :],
        memory.winners[layer[WINNER] :],
        memory.padded[layer[PADDED] :],
        weights,
        _geometry(layer, batch),
        memory.dweight[: len(weights)],
        memory.dbias[: layer[OUTPUTS]],
        memory.dpadded,
        need_input,
        len(weights) > 0,  # Numba gives a constant another type, and would compile the kernel again
    )
    if need_input:
        row = layer[WIDTH] * channels
        wide = row + 2 * padding * channels
        to = layer[FROM]
        for b in range(batch):
            for r in range(height):
                of = (b * (height + 2 * padding) + r + padding) * wide + padding * channels
                copy(memory.grads, to, memory.dpadded, of, row)
                to += row
    _descend_convolution(layer, len(weights), memory, terms)


@jit(fastmath={"contract"})
def _descend_convolution(layer, weights, memory, terms):  # type: ignore[no-untyped-def]
    descend(layer[WEIGHT], memory.dweight, weights, terms)
    if layer[BIAS] >= 0:
        descend(layer[BIAS], memory.dbias, layer[OUTPUTS], terms)


@jit(fastmath={"contract"})
def _back_through_product(layer, batch, need_input, w, acts, grads, dbias, terms):  # type: ignore[no-untyped-def]
    """Back through a linear layer and the ReLU after it."""
    size, outputs, weight, of, to = layer[SIZE], layer[OUTPUT], layer[WEIGHT], layer[FROM], layer[TO]
    x = acts[of : of + batch * size].reshape((batch, size))
    dy = grads[to : to + batch * outputs]
    if layer[RELU]:
        y = acts[to : to + batch * outputs]
        for k in range(batch * outputs):
            dy[k] = _ZERO if y[k] <= 0 else dy[k]
    dy = dy.reshape((batch, outputs))
    if layer[BIAS] >= 0:
        for o in range(outputs):
            dbias[o] = _ZERO
        for b in range(batch):
            for o in range(outputs):
                dbias[o] += dy[b, o]
        descend(layer[BIAS], dbias, outputs, terms)
    end = weight + outputs * size
    if need_input:
        dx = grads[of : of + batch * size].reshape((batch, size))
        _input_gradient(w[weight:end].reshape((outputs, size)), dy, dx)
    total = terms.velocity if len(terms.velocity) else terms.weights
    descend_product(weight, total[weight:end].reshape((outputs, size)), dy, x, terms)


@jit(fastmath={"contract"})
def _input_gradient(w, dy, dx):  # type: ignore[no-untyped-def]
    """``dx = dy w``, four outputs at a time."""
    outputs, size = w.shape
    batch = len(dy)
    for begin in range(0, size, _CHUNK):
        end = min(begin + _CHUNK, size)
        width = end - begin
        for b in range(batch):
            d = dx[b, begin:end]
            for k in range(width):
                d[k] = _ZERO
        o = 0
        while o + 4 <= outputs:
            p, q, r, s = w[o, begin:end], w[o + 1, begin:end], w[o + 2, begin:end], w[o + 3, begin:end]
            for b in range(batch):
                g0, g1, g2, g3 = dy[b, o], dy[b, o + 1], dy[b, o + 2], dy[b, o + 3]
                d = dx[b, begin:end]
                for k in range(width):
                    d[k] = d[k] + g0 * p[k] + g1 * q[k] + g2 * r[k] + g3 * s[k]
            o += 4
        while o < outputs:
            p = w[o, begin:end]
            for b in range(batch):
                g0, d = dy[b, o], dx[b, begin:end]
                for k in range(width):
                    d[k] += g0 * p[k]
            o += 1

"""All local training of a client in one compiled call, for networks of convolutions and linear layers.

A step of ten samples through LeNet-5 is 0.2 ms of arithmetic, and 0.3 ms of calls from Python, of which each
layer needs several. Here the loops over clients, steps and layers are compiled, too. Clients train one after
the other, so that a client's model, velocity and samples stay in the core's own cache through all its steps,
and its result does not depend on the others that the kernel trains in any way.

The network is a table of integers, a row for each layer: its kind, its sizes, and where its parameters,
inputs, outputs and winners lie in flat arrays (the ``KIND`` and other columns below). Convolutions, their
normalisation, forward products and the loss are those of :mod:`.conv_kernels`, :mod:`.norm_kernels`,
:mod:`.linear_kernels` and :mod:`.loss_kernel`. A row of weights is changed as soon as its gradient is
complete, which is never written to memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayfl.training.batched import conv_kernels, linear_kernels, norm_kernels
from rayfl.training.batched.jit import jit
from rayfl.training.batched.loss_kernel import cross_entropy
from rayfl.training.batched.vectors import LANES

CONVOLUTION, LINEAR, FLATTEN = 0, 1, 2
"""Kinds of layers: a convolution with pooling and ReLU; a linear layer; channels last to channels first."""

(KIND, WEIGHT, BIAS, SIZE, OUTPUT, RELU, FROM, TO, PADDED, WINNER) = range(10)
(CHANNELS, HEIGHT, WIDTH, OUTPUTS, KERNEL, PADDING) = range(10, 16)
(GAMMA, BETA, MEAN, VARIANCE, PLANE, STATISTICS) = range(16, 22)
"""Columns of a layer's row.

``WEIGHT, BIAS``: where its parameters begin in the model's flat vector; -1 for no bias. ``SIZE, OUTPUT``:
numbers of a sample before and after it. ``RELU``: whether one follows a linear layer. ``FROM, TO``: where its
inputs and outputs begin in memory; ``PADDED, WINNER``: a convolution's inputs with their padding, and its
winners. ``CHANNELS`` to ``PADDING`` are of a convolution, or the ``CHANNELS, HEIGHT, WIDTH`` of what is
flattened. ``GAMMA`` to ``VARIANCE``: where the parameters and the running statistics of the BatchNorm behind
a convolution begin in the model's flat vector; -1 if there is none. ``PLANE, STATISTICS``: where what enters
it, and the batch's mean and variance, begin in memory.
"""
COLUMNS = 22

EPSILON, MOMENTUM = range(2)
"""Columns of the numbers of a layer's BatchNorm."""

_CHUNK = 512
"""Features for which all samples are visited before the next: their gradients stay in the nearest cache."""

_ZERO = np.float32(0)

Floats = NDArray[np.float32]


class Images(NamedTuple):
    """What enters the network: ``channels`` of ``pixels`` each if that is a convolution, which takes channels
    last, else one of as many as a sample has numbers."""

    channels: int
    pixels: int


class Rule(NamedTuple):
    """``momentum``, ``decay`` (of weights, and towards the target), and ``alpha`` of Per-FedAvg, whose every
    other pass only determines where the next gradient is taken, or 0."""

    momentum: np.float32
    decay: np.float32
    alpha: np.float32


class Memory(NamedTuple):
    """Flat arrays that a step writes to.

    Attributes:
        acts, grads: inputs and outputs of all layers, and their gradients.
        padded, dpadded: inputs of convolutions with their padding, and the gradients of one of them.
        winners: of the poolings.
        velocity: of a client ``(P,)``; empty without momentum.
        ahead: the weights where Per-FedAvg takes its second gradient ``(P,)``; empty without.
        dweight, dbias: gradients of a convolution's weights, and of a layer's bias.
        planes, statistics: what enters each BatchNorm, and the batch's mean and variance of it.
        dplane, dnorm: gradients of one of the former, and of gamma and beta.
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
    dnorm: Floats


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
def train(  # type: ignore[no-untyped-def]
    network,
    norms,
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
    memory,
    losses,
):
    """Train C clients.

    Args:
        network: a row for each layer ``(L, COLUMNS)`` int64.
        norms: numbers of the BatchNorm of each layer ``(L, 2)`` float32, see :data:`EPSILON`.
        models: ``(C, P)`` float32, changed.
        first: see :class:`Images`.
        targets: of the terms that pull each weight towards a point, ``(C, P)``, or of all clients ``(1, P)``;
            ``(0, P)`` for none.
        offsets: added to gradients, ``(C, P)``; ``(0, P)`` for none.
        masks: of bytes 0 and 1, ``(C, P)``; ``(0, P)`` for none.
        sgd: see :class:`Rule`.
        x: samples ``(n, size)`` float32.
        y: labels ``(n,)`` int64.
        places: rows of the samples of each pass ``(T, C, B)`` int64.
        counts: how many of these count ``(T, C)`` int64; 0 once a client has finished.
        rates: of each step ``(T,)`` float32.
        keep_after: after which step each model is copied to ``kept``, ``(C,)`` int64; 0 for never.
        kept: ``(C, P)``, or ``(0, P)``.
        memory: see :class:`Memory`.
        losses: ``(C,)`` float64: receives the sum over steps of loss times samples.
    """
    acts, grads, velocity, ahead = memory.acts, memory.grads, memory.velocity, memory.ahead
    clients, size = models.shape
    layers = len(network)
    passes = 2 if len(ahead) else 1
    most = places.shape[2]
    labels, shares, loss = np.empty(most, np.int64), np.empty(most, np.float32), np.empty(1, np.float32)
    nothing, no_mask = np.empty(0, np.float32), np.empty(0, np.uint8)
    last = network[layers - 1]
    classes, logits_at = last[OUTPUT], last[TO]
    for c in range(clients):
        w = models[c]
        target = nothing if len(targets) == 0 else targets[c if len(targets) > 1 else 0]
        offset = nothing if len(offsets) == 0 else offsets[c]
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
            at = ahead if passes == 2 and not looks_ahead else w  # where the gradient is taken
            for b in range(batch):
                place = places[t, c, b]
                labels[b], shares[b] = y[place], np.float32(1) / np.float32(batch)
                _read(x[place], first.channels, first.pixels, acts[network[0, FROM] + b * network[0, SIZE] :])

            _forward(network, norms, batch, at, w, memory)
            end = logits_at + batch * classes
            cross_entropy(
                acts[logits_at:end].reshape((1, batch, classes)),
                labels[:batch].reshape((1, batch)),
                shares[:batch].reshape((1, batch)),
                loss,
                grads[logits_at:end].reshape((1, batch, classes)),
            )

            terms = Step(w, velocity, target, offset, mask, sgd.momentum, sgd.decay, rates[t // passes])
            if looks_ahead:
                ahead[:] = w
                terms = Step(ahead, nothing, nothing, nothing, mask, _ZERO, _ZERO, sgd.alpha)
            else:
                losses[c] += np.float64(loss[0]) * batch
            for number in range(layers - 1, -1, -1):
                layer = network[number]
                if layer[KIND] == CONVOLUTION:
                    _back_through_convolution(layer, norms[number], batch, number > 0, at, memory, terms)
                elif layer[KIND] == LINEAR:
                    _back_through_product(layer, batch, number > 0, at, acts, grads, memory.dbias, terms)
                elif number > 0:
                    _swap(layer, batch, grads, False)
            if not looks_ahead and keep_after[c] == t // passes + 1:
                kept[c] = w


@jit(fastmath={"contract"})
def outputs(network, w, first, x, most, memory, logits):  # type: ignore[no-untyped-def]
    """What the network makes of samples.

    Args:
        network, first: see :func:`train`; a BatchNorm is part of its convolution's weights and bias.
        w: a model ``(P,)`` float32.
        x: samples ``(n, size)`` float32.
        most: samples for which there is memory.
        memory: see :class:`Memory`; of gradients ``dbias`` alone is used, for biases that are missing.
        logits: ``(n, classes)`` float32, written.
    """
    last = network[len(network) - 1]
    classes, logits_at = last[OUTPUT], last[TO]
    norms = np.empty((0, 2), np.float32)
    for begin in range(0, len(x), most):
        batch = min(most, len(x) - begin)
        for b in range(batch):
            inputs = memory.acts[network[0, FROM] + b * network[0, SIZE] :]
            _read(x[begin + b], first.channels, first.pixels, inputs)
        _forward(network, norms, batch, w, w, memory)
        for b in range(batch):
            at = logits_at + b * classes
            logits[begin + b] = memory.acts[at : at + classes]


@jit(fastmath={"contract"})
def _forward(network, norms, batch, w, running, memory):  # type: ignore[no-untyped-def]
    """Through all layers, from the inputs of the first; ``running`` is where running statistics are kept."""
    acts, zeros = memory.acts, memory.dbias
    for number in range(len(network)):
        layer = network[number]
        if layer[KIND] == LINEAR:
            _multiply(layer, batch, w, acts, zeros)
        elif layer[KIND] == FLATTEN:
            _swap(layer, batch, acts, True)
        elif layer[GAMMA] < 0:
            winners = memory.winners[layer[WINNER] :]
            _convolve(layer, batch, w, memory, acts[layer[TO] :], winners)
        else:
            _convolve(layer, batch, w, memory, memory.planes[layer[PLANE] :], memory.winners[:0])
            _normalise(layer, norms[number], batch, w, running, memory)


@jit(fastmath={"contract"})
def _read(sample, channels, pixels, inputs):  # type: ignore[no-untyped-def]
    """Copy a sample; of images that enter a convolution with channels last."""
    if channels == 1:
        for k in range(pixels):
            inputs[k] = sample[k]
        return
    for i in range(channels):
        for k in range(pixels):
            inputs[k * channels + i] = sample[i * pixels + k]


@jit(fastmath={"contract"})
def _swap(layer, batch, values, flatten):  # type: ignore[no-untyped-def]
    """From a layer's inputs, channels last, to its outputs, channels first as PyTorch flattens; or back."""
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
def _convolve(layer, batch, w, memory, y, winners):  # type: ignore[no-untyped-def]
    """Forward through a convolution, and unless ``winners`` is empty through its pooling and ReLU."""
    outputs = layer[OUTPUTS]
    weights = outputs * layer[CHANNELS] * layer[KERNEL] * layer[KERNEL]
    zeros = memory.dbias
    if layer[BIAS] < 0:
        zeros[:outputs] = _ZERO
    bias = zeros[:outputs] if layer[BIAS] < 0 else w[layer[BIAS] : layer[BIAS] + outputs]
    conv_kernels.forward(
        memory.acts[layer[FROM] :],
        w[layer[WEIGHT] : layer[WEIGHT] + weights],
        bias,
        _geometry(layer, batch),
        memory.padded[layer[PADDED] :],
        y,
        winners,
    )


@jit(fastmath={"contract"})
def _plane(layer, batch):  # type: ignore[no-untyped-def]
    """Sizes of what enters a BatchNorm."""
    less = 2 * layer[PADDING] - layer[KERNEL] + 1
    return norm_kernels.Plane(batch, layer[HEIGHT] + less, layer[WIDTH] + less, layer[OUTPUTS])


@jit(fastmath={"contract"})
def _statistics(layer, memory):  # type: ignore[no-untyped-def]
    """Mean and variance of the batch, of each output."""
    lanes = (layer[OUTPUTS] + LANES - 1) // LANES * LANES
    at = layer[STATISTICS]
    return memory.statistics[at : at + lanes], memory.statistics[at + lanes : at + 2 * lanes]


@jit(fastmath={"contract"})
def _normalise(layer, norm, batch, w, running, memory):  # type: ignore[no-untyped-def]
    """Forward through a BatchNorm, the pooling and the ReLU behind it."""
    plane, outputs = _plane(layer, batch), layer[OUTPUTS]
    mean, variance = _statistics(layer, memory)
    norm_kernels.forward(
        memory.planes[layer[PLANE] :],
        plane,
        w[layer[GAMMA] : layer[GAMMA] + outputs],
        w[layer[BETA] : layer[BETA] + outputs],
        norm[EPSILON],
        mean,
        variance,
        memory.acts[layer[TO] :],
        memory.winners[layer[WINNER] :],
    )
    count = np.float32(plane.batch * plane.tall * plane.wide)
    for o in range(outputs):
        m, v = layer[MEAN] + o, layer[VARIANCE] + o
        running[m] += norm[MOMENTUM] * (mean[o] - running[m])
        running[v] += norm[MOMENTUM] * (variance[o] * (count / (count - np.float32(1))) - running[v])


@jit(fastmath={"contract"})
def _multiply(layer, batch, w, acts, zeros):  # type: ignore[no-untyped-def]
    """Forward through a linear layer, and the ReLU after it."""
    size, outputs, at = layer[SIZE], layer[OUTPUT], layer[TO]
    if layer[BIAS] < 0:
        zeros[:outputs] = _ZERO
    bias = zeros[:outputs] if layer[BIAS] < 0 else w[layer[BIAS] : layer[BIAS] + outputs]
    linear_kernels.forward(
        acts[layer[FROM] : layer[FROM] + batch * size].reshape((1, batch, size)),
        w[layer[WEIGHT] : layer[WEIGHT] + outputs * size].reshape((1, outputs, size)),
        bias.reshape((1, outputs)),
        acts[at : at + batch * outputs].reshape((1, batch, outputs)),
    )
    if layer[RELU]:
        y = acts[at : at + batch * outputs]
        for k in range(batch * outputs):
            y[k] = _ZERO if y[k] < 0 else y[k]


@jit(fastmath={"contract"})
def _back_through_convolution(layer, norm, batch, need_input, w, memory, terms):  # type: ignore[no-untyped-def]
    """Back through a convolution, its BatchNorm if it has one, its pooling and ReLU."""
    outputs, channels, padding = layer[OUTPUTS], layer[CHANNELS], layer[PADDING]
    weights = outputs * channels * layer[KERNEL] * layer[KERNEL]
    dy, winners = memory.grads[layer[TO] :], memory.winners[layer[WINNER] :]
    if layer[GAMMA] >= 0:
        mean, variance = _statistics(layer, memory)
        dgamma, dbeta = memory.dnorm[:outputs], memory.dnorm[outputs : 2 * outputs]
        norm_kernels.backward(
            dy,
            winners,
            memory.planes[layer[PLANE] :],
            _plane(layer, batch),
            w[layer[GAMMA] : layer[GAMMA] + outputs],
            norm[EPSILON],
            mean,
            variance,
            memory.dplane,
            dgamma,
            dbeta,
        )
        dy, winners = memory.dplane, memory.winners[:0]
    conv_kernels.backward(
        dy,
        winners,
        memory.padded[layer[PADDED] :],
        w[layer[WEIGHT] : layer[WEIGHT] + weights],
        _geometry(layer, batch),
        memory.dweight[:weights],
        memory.dbias[:outputs],
        memory.dpadded,
        need_input,
        weights > 0,  # a constant would be a type of its own, for which the kernel is compiled again
    )
    if need_input:
        height, row = layer[HEIGHT], layer[WIDTH] * channels
        wide = row + 2 * padding * channels
        to = layer[FROM]
        for b in range(batch):
            for r in range(height):
                of = (b * (height + 2 * padding) + r + padding) * wide + padding * channels
                for k in range(row):
                    memory.grads[to + k] = memory.dpadded[of + k]
                to += row
    _descend(layer[WEIGHT], memory.dweight, weights, terms)
    if layer[BIAS] >= 0:
        _descend(layer[BIAS], memory.dbias, outputs, terms)
    if layer[GAMMA] >= 0:
        _descend(layer[GAMMA], memory.dnorm[:outputs], outputs, terms)
        _descend(layer[BETA], memory.dnorm[outputs:], outputs, terms)


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
        _descend(layer[BIAS], dbias, outputs, terms)
    end = weight + outputs * size
    if need_input:
        dx = grads[of : of + batch * size].reshape((batch, size))
        _input_gradient(w[weight:end].reshape((outputs, size)), dy, dx)
    total = terms.velocity if len(terms.velocity) else terms.weights
    _descend_product(weight, total[weight:end].reshape((outputs, size)), dy, x, terms)


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


@jit(fastmath={"contract"})
def _descend_product(at, total, dy, x, terms):  # type: ignore[no-untyped-def]
    """One step of SGD along ``dy^T x``, two rows of weights at a time, which stay in the cache until their
    last sample.

    Args:
        at: where the layer's weights begin.
        total: its velocity, or without momentum its weights, ``(O, D)``.
        dy: ``(B, O)``.
        x: ``(B, D)``.
        terms: of the step.
    """
    outputs, size = total.shape
    batch = len(x)
    moving = len(terms.velocity) > 0
    scale = np.float32(1) if moving else -terms.rate
    for o in range(0, outputs, 2):
        both = o + 1 < outputs
        rows = (1 + both) * size
        if moving or terms.decay != 0 or len(terms.offset):
            _before(at, rows, terms)
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
        if moving or len(terms.mask):
            _after(at, rows, terms)
        at += rows


@jit(fastmath={"contract"})
def _descend(at, gradient, size, terms):  # type: ignore[no-untyped-def]
    """One step of SGD of ``size`` weights from ``at`` on along a gradient."""
    moving = len(terms.velocity) > 0
    if moving or terms.decay != 0 or len(terms.offset):
        _before(at, size, terms)
    scale = np.float32(1) if moving else -terms.rate
    total = terms.velocity[at : at + size] if moving else terms.weights[at : at + size]
    for k in range(size):
        total[k] += scale * gradient[k]
    if moving or len(terms.mask):
        _after(at, size, terms)


@jit(fastmath={"contract"})
def _before(at, size, terms):  # type: ignore[no-untyped-def]
    """What a step adds besides the gradient: to the velocity, or else to the weights.

    Both have loops of their own. If one loop took either, the array that is read could be the one that is
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
        _add(v, np.float32(1), terms.offset, at)
        return
    if len(target):
        for k in range(size):
            w[k] += pull * (w[k] - s[k])
    elif decay != 0:
        for k in range(size):
            w[k] += pull * w[k]
    _add(w, -rate, terms.offset, at)


@jit(fastmath={"contract"})
def _add(total, scale, offset, at):  # type: ignore[no-untyped-def]
    if len(offset):
        f = offset[at : at + len(total)]
        for k in range(len(total)):
            total[k] += scale * f[k]


@jit(fastmath={"contract"})
def _after(at, size, terms):  # type: ignore[no-untyped-def]
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

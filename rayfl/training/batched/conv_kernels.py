"""Convolution, 2x2 maximum pooling and ReLU of small networks in one pass, compiled by Numba for the CPU.

At the sizes of LeNet-5 a call into a library costs as much as its arithmetic, and most of what a backward
pass multiplies is zero: pooling passes the gradient to one pixel in four, ReLU to fewer. So

- the forward pass writes only the pooled maxima, and for each the *position* of its winning window;
- the backward pass visits only the winners whose gradient is not zero.

Samples are held with channels last (``height, width, channels``), where the K pixels of one row of a window
are K * channels consecutive floats. Everything is then a product of a scalar with consecutive floats:

- forward, for each window: ``y[outputs] += x * w[outputs]``, over the window's floats x;
- weights, for each winner: ``dw[row of a window] += g * x[row of a window]``;
- input, for each winner: ``dx[row of a window] += g * w[row of a window]``.

The vectors are explicit (:class:`_Vector`): of loops over scalars LLVM vectorises only the innermost and
keeps its sums in memory; here they stay in registers over a whole window, which is six to ten times faster.
Sums run in the same order whatever the number of clients in a call or the width of the machine's registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model
from numpy.typing import NDArray

from rayfl.training.batched.jit import jit

LANES = 8
"""Floats in a vector: one AVX register, two NEON registers; LLVM splits it where registers are narrower."""

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)

_Any = Callable[..., Any]
_operation: Callable[[_Any], _Any] = intrinsic
_model: Callable[[Any], Callable[[type], type]] = register_model

# Vectors in Numba ----------------------------------------------------------------------------------------


class _Vector(types.Type):  # type: ignore[misc]
    """Numba's name for LLVM's vector of LANES floats."""

    def __init__(self) -> None:
        super().__init__(f"float32x{LANES}")


@_model(_Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    """A vector is passed and kept as LLVM's own, in a register."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)


_vector = _Vector()


def _pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any, element: Any) -> Any:
    """Address of ``array[index]``, without Python's meaning of a negative index, as one of ``element``."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), ir.PointerType(element))


def _broadcast(builder: Any, scalar: Any, vector: Any) -> Any:
    """A vector of equal lanes."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))


@_operation
def _get(typing: Any, array: Any, index: Any) -> Any:
    """``array[index]`` for an index that is known to be in range."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = context.get_value_type(signature.return_type)
        return builder.load(_pointer(context, builder, array, args[0], args[1], element))

    return array.dtype(array, types.intp), generate


@_operation
def _splat(typing: Any, scalar: Any) -> Any:
    """A vector of equal lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _broadcast(builder, args[0], _FLOATS)

    return _vector(types.float32), generate


@_operation
def _load(typing: Any, array: Any, index: Any) -> Any:
    """``array[index : index + LANES]``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(context, builder, array, args[0], args[1], _FLOATS), align=4)

    return _vector(array, types.intp), generate


@_operation
def _store(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """``array[index] = value`` for an index that is known to be in range; from there on for a vector."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = context.get_value_type(value)
        builder.store(args[2], _pointer(context, builder, array, args[0], args[1], kind), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, value), generate


@_operation
def _multiply_add(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, rounded once where the machine can."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")
        return builder.call(function, args)

    return _vector(_vector, _vector, _vector), generate


@_operation
def _store_maximum(
    typing: Any,
    y: Any,
    winner: Any,
    at: Any,
    window: Any,
    right: Any,
    below: Any,
    a00: Any,
    a01: Any,
    a10: Any,
    a11: Any,
) -> Any:
    """Pool four pixels, apply ReLU, and store the results and the winners from ``at`` on.

    The pixels' windows begin at ``window``, ``right`` or ``below`` further, or both. As in PyTorch the first
    of equal pixels wins, and NaN beats all. A maximum that ReLU cuts off has the winner -1.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        y_, winner_, at_ = args[:3]
        window_, right_, below_ = (builder.trunc(a, _INT) for a in args[3:6])
        beside = builder.add(window_, right_)
        windows = (window_, beside, builder.add(window_, below_), builder.add(beside, below_))
        best, where = args[6], _broadcast(builder, window_, _INTS)
        for pixel, start in zip(args[7:], windows[1:], strict=True):
            greater = builder.fcmp_ordered(">", pixel, best)
            better = builder.or_(greater, builder.fcmp_unordered("uno", pixel, pixel))
            best = builder.select(better, pixel, best)
            where = builder.select(better, _broadcast(builder, start, _INTS), where)
        zero, none = ir.Constant(_FLOATS, [0.0] * LANES), ir.Constant(_INTS, [-1] * LANES)
        active = builder.fcmp_unordered(">", best, zero)
        best, where = builder.select(active, best, zero), builder.select(active, where, none)
        builder.store(best, _pointer(context, builder, y, y_, at_, _FLOATS), align=4)
        builder.store(where, _pointer(context, builder, winner, winner_, at_, _INTS), align=4)
        return context.get_dummy_value()

    numbers = [types.intp] * 4
    return types.void(y, winner, *numbers, *[_vector] * 4), generate


# The kernels ---------------------------------------------------------------------------------------------


class Geometry(NamedTuple):
    """Sizes of one call: C clients of B samples, and of the convolution (K x K, stride 1)."""

    clients: int
    batch: int
    channels: int
    height: int
    width: int
    outputs: int
    kernel: int
    padding: int


@jit(fastmath=False)  # NaN must win a maximum, as in PyTorch
def forward(
    x: NDArray[np.float32],
    weight: NDArray[np.float32],
    bias: NDArray[np.float32],
    geometry: Geometry,
    padded: NDArray[np.float32],
    y: NDArray[np.float32],
    winner: NDArray[np.int32],
) -> None:
    """Pad the samples and compute the pooled outputs. All arrays are flat.

    Args:
        x: samples ``(C, B, height, width, channels)``.
        weight: ``(C, outputs, channels, K, K)``.
        bias: ``(C, outputs)``.
        geometry: the sizes.
        padded: receives the samples with their padding; longer than that by LANES + 4 * channels.
        y: receives ``relu(maximum)``: ``(C, B, pooled height, pooled width, outputs)``; longer by LANES.
        winner: receives where in ``padded`` the winning window of each output begins, or -1; longer likewise.
    """
    clients, batch, channels, height, width, outputs, kernel, padding = geometry
    rows, row = height + 2 * padding, (width + 2 * padding) * channels
    pooled_height, pooled_width = (rows - kernel + 1) // 2, (width + 2 * padding - kernel + 1) // 2
    size = kernel * channels  # floats of one row of a window
    lanes = (outputs + LANES - 1) // LANES * LANES
    w = np.zeros(kernel * size * lanes, np.float32)  # (row of the window, float of it, output)
    b = np.zeros(lanes, np.float32)
    for c in range(clients):
        k = c * outputs * size * kernel
        for o in range(outputs):
            b[o] = bias[c * outputs + o]
            for i in range(channels):
                for v in range(kernel):
                    for u in range(kernel):
                        w[(v * size + u * channels + i) * lanes + o] = weight[k]
                        k += 1
        for s in range(c * batch, (c + 1) * batch):
            start = s * rows * row
            if padding:
                padded[start : start + rows * row] = 0
            for r in range(height):
                to, of = start + (r + padding) * row + padding * channels, (s * height + r) * width * channels
                for k in range(width * channels):  # an assignment of slices compiles for three seconds more
                    padded[to + k] = x[of + k]
            for p in range(pooled_height):
                # Two outputs at a time: eight sums fill the multipliers' pipelines and fit into registers.
                for pair in range(0, pooled_width, 2):
                    q = max(0, min(pair, pooled_width - 2))  # an odd last one repeats its neighbour
                    window = start + 2 * p * row + 2 * q * channels
                    at = ((s * pooled_height + p) * pooled_width + q) * outputs
                    # The last lanes may reach into the next pixel: from back to front, it is written later.
                    for lane in range(lanes - LANES, -1, -LANES):
                        a00 = a01 = a10 = a11 = b00 = b01 = b10 = b11 = _load(b, lane)
                        tap = lane
                        for v in range(kernel):
                            for k in range(size):
                                weights = _load(w, tap)
                                tap += lanes
                                of = window + v * row + k
                                a00 = _multiply_add(_splat(_get(padded, of)), weights, a00)
                                a01 = _multiply_add(_splat(_get(padded, of + channels)), weights, a01)
                                b00 = _multiply_add(_splat(_get(padded, of + 2 * channels)), weights, b00)
                                b01 = _multiply_add(_splat(_get(padded, of + 3 * channels)), weights, b01)
                                of += row
                                a10 = _multiply_add(_splat(_get(padded, of)), weights, a10)
                                a11 = _multiply_add(_splat(_get(padded, of + channels)), weights, a11)
                                b10 = _multiply_add(_splat(_get(padded, of + 2 * channels)), weights, b10)
                                b11 = _multiply_add(_splat(_get(padded, of + 3 * channels)), weights, b11)
                        _store_maximum(y, winner, at + lane, window, channels, row, a00, a01, a10, a11)
                        if q + 1 < pooled_width:
                            beside = window + 2 * channels
                            at_b = at + outputs + lane
                            _store_maximum(y, winner, at_b, beside, channels, row, b00, b01, b10, b11)


@jit(fastmath=False)  # NaN must win a maximum, as in PyTorch
def backward(
    dy: NDArray[np.float32],
    winner: NDArray[np.int32],
    padded: NDArray[np.float32],
    weight: NDArray[np.float32],
    geometry: Geometry,
    dweight: NDArray[np.float32],
    dbias: NDArray[np.float32],
    dpadded: NDArray[np.float32],
    need_input: bool,
    need_weight: bool,
) -> None:
    """Gradients from those of the pooled outputs. All arrays are flat.

    Args:
        dy: gradients of the pooled outputs, shaped as ``y`` of :func:`forward`.
        winner: from the forward pass.
        padded: from the forward pass.
        weight: ``(C, outputs, channels, K, K)``.
        geometry: the sizes.
        dweight: receives the gradients of the weights, shaped as they are, if ``need_weight``.
        dbias: receives those of the biases.
        dpadded: receives those of ``padded`` if ``need_input``; as long.
        need_input, need_weight: whether they are wanted.
    """
    clients, batch, channels, height, width, outputs, kernel, padding = geometry
    rows, row = height + 2 * padding, (width + 2 * padding) * channels
    pooled = ((rows - kernel + 1) // 2) * ((width + 2 * padding - kernel + 1) // 2)
    size = kernel * channels
    lanes = (size + LANES - 1) // LANES * LANES
    starts, gradients = np.empty(batch * pooled + 1, np.int32), np.empty(batch * pooled + 1, np.float32)
    w = np.zeros(kernel * lanes, np.float32)  # of one output: (row of the window, float of it)
    dw = np.empty(kernel * lanes, np.float32)
    zero = _splat(np.float32(0))
    for c in range(clients):
        if need_input:
            # Lanes beyond the window add zeros, the last of a client's even to the next client's first
            # sample: whatever zero times a gradient that is not finite left there is cleared now.
            dpadded[c * batch * rows * row : (c + 1) * batch * rows * row] = 0
        for o in range(outputs):
            # Pixels outside, samples inside: windows that overlap should not follow each other, because a
            # load that overlaps a store still under way waits for it.
            count = 0
            for p in range(pooled):
                at = (c * batch * pooled + p) * outputs + o
                for _ in range(batch):
                    start, gradient = _get(winner, at), _get(dy, at)
                    at += pooled * outputs
                    _store(starts, count, start)
                    _store(gradients, count, gradient)
                    count += (start >= 0) & (gradient != 0)
            total = np.float32(0)
            for e in range(count):
                total += gradients[e]
            dbias[c * outputs + o] = total

            for lane in range(0, lanes if need_weight else 0, LANES):
                v = 0
                while v < kernel:  # five or three rows at a time, or one: their sums stay in registers
                    first = v * row + lane
                    to = v * lanes + lane
                    a0 = a1 = a2 = a3 = a4 = zero
                    if kernel - v >= 5:
                        for e in range(count):
                            g, start = _splat(_get(gradients, e)), _get(starts, e) + first
                            a0 = _multiply_add(g, _load(padded, start), a0)
                            a1 = _multiply_add(g, _load(padded, start + row), a1)
                            a2 = _multiply_add(g, _load(padded, start + 2 * row), a2)
                            a3 = _multiply_add(g, _load(padded, start + 3 * row), a3)
                            a4 = _multiply_add(g, _load(padded, start + 4 * row), a4)
                        _store(dw, to, a0)
                        _store(dw, to + lanes, a1)
                        _store(dw, to + 2 * lanes, a2)
                        _store(dw, to + 3 * lanes, a3)
                        _store(dw, to + 4 * lanes, a4)
                        v += 5
                    elif kernel - v >= 3:
                        for e in range(count):
                            g, start = _splat(_get(gradients, e)), _get(starts, e) + first
                            a0 = _multiply_add(g, _load(padded, start), a0)
                            a1 = _multiply_add(g, _load(padded, start + row), a1)
                            a2 = _multiply_add(g, _load(padded, start + 2 * row), a2)
                        _store(dw, to, a0)
                        _store(dw, to + lanes, a1)
                        _store(dw, to + 2 * lanes, a2)
                        v += 3
                    else:
                        for e in range(count):
                            start = _get(starts, e) + first
                            a0 = _multiply_add(_splat(_get(gradients, e)), _load(padded, start), a0)
                        _store(dw, to, a0)
                        v += 1

            k = (c * outputs + o) * size * kernel
            for i in range(channels):
                for v in range(kernel):
                    for u in range(kernel):
                        if need_weight:
                            dweight[k] = dw[v * lanes + u * channels + i]
                        w[v * lanes + u * channels + i] = weight[k]
                        k += 1
            if need_input:
                for e in range(count):
                    g, start = _splat(_get(gradients, e)), _get(starts, e)
                    for v in range(kernel):
                        for lane in range(0, lanes, LANES):
                            to = start + v * row + lane
                            moved = _multiply_add(g, _load(w, v * lanes + lane), _load(dpadded, to))
                            _store(dpadded, to, moved)

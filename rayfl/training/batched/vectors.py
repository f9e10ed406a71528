"""Vectors of floats in Numba.

LLVM vectorises only the innermost of several loops over scalars, and keeps its sums in memory. With explicit
vectors the sums stay in registers over a whole loop, which is six to ten times faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic, models, register_model

LANES = 8
"""Floats in a vector: one AVX register, two NEON registers; LLVM splits it where registers are narrower."""

_features = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES

WIDE = 16 if "+avx512f" in _features else LANES
"""Floats in a wide vector, one register of AVX-512: for kernels whose results do not depend on it."""

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)

_Function = Callable[..., Any]
_operation: Callable[[_Function], _Function] = intrinsic
_model: Callable[[Any], Callable[[type], type]] = register_model


class _Vector(types.Type):  # type: ignore[misc]
    """Numba's type for LLVM's vector of floats."""

    def __init__(self, lanes: int) -> None:
        super().__init__(f"float32x{lanes}")
        self.lanes, self.floats = lanes, ir.VectorType(_FLOAT, lanes)


@_model(_Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    """Represents a vector by LLVM's own type, which is kept in a register."""

    def __init__(self, manager: Any, kind: _Vector) -> None:
        super().__init__(manager, kind, kind.floats)


_vector, _wide_vector = _Vector(LANES), _Vector(WIDE)
_FLOATS, _INTS = _vector.floats, ir.VectorType(_INT, LANES)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any, element: Any) -> Any:
    """Pointer to ``array[index]`` as an ``element``; a negative index does not count from the end."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), ir.PointerType(element))


def _broadcast(builder: Any, scalar: Any, vector: Any) -> Any:
    """A vector of equal lanes."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_INT, 0))
    zeros = ir.Constant(ir.VectorType(_INT, vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, undefined, zeros)


def _is_better(builder: Any, candidate: Any, best: Any) -> Any:
    """In which lanes the candidate is larger, or NaN, which beats all as in PyTorch."""
    greater = builder.fcmp_ordered(">", candidate, best)
    return builder.or_(greater, builder.fcmp_unordered("uno", candidate, candidate))


@_operation
def get(typing: Any, array: Any, index: Any) -> Any:
    """``array[index]`` for an index that is known to be in range."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = context.get_value_type(signature.return_type)
        return builder.load(_pointer(context, builder, array, args[0], args[1], element))

    return array.dtype(array, types.intp), generate


def _splatting(vector: _Vector) -> _Function:
    def splat(typing: Any, scalar: Any) -> Any:
        """A vector of equal lanes."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _broadcast(builder, args[0], vector.floats)

        return vector(types.float32), generate

    return _operation(splat)


def _loading(vector: _Vector) -> _Function:
    def load(typing: Any, array: Any, index: Any) -> Any:
        """The elements of ``array`` from ``index`` on, one in each lane."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(_pointer(context, builder, array, args[0], args[1], vector.floats), align=4)

        return vector(array, types.intp), generate

    return _operation(load)


splat, wide_splat = _splatting(_vector), _splatting(_wide_vector)
load, wide_load = _loading(_vector), _loading(_wide_vector)


@_operation
def store(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """``array[index] = value`` for an index known to be in range; a vector is stored from ``index`` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = context.get_value_type(value)
        builder.store(args[2], _pointer(context, builder, array, args[0], args[1], kind), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, value), generate


@_operation
def copy(typing: Any, to: Any, at: Any, of: Any, begin: Any, count: Any) -> Any:
    """``to[at : at + count] = of[begin : begin + count]`` of arrays that do not overlap.

    LLVM would make gathers and scatters of a loop, because Numba's indices may count from the end.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to_, at_, of_, begin_, count_ = args
        element = context.get_value_type(to.dtype)
        target = _pointer(context, builder, to, to_, at_, element)
        source = _pointer(context, builder, of, of_, begin_, element)
        cgutils.raw_memcpy(builder, target, source, count_, context.get_abi_sizeof(element))
        return context.get_dummy_value()

    return types.void(to, types.intp, of, types.intp, types.intp), generate


@_operation
def multiply_add(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, rounded once where the machine can."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(a.floats, [a.floats] * 3)
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{a.lanes}f32")
        return builder.call(function, args)

    return a(a, a, a), generate


@_operation
def largest(typing: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """ReLU of the maximum of four vectors in each lane. As in PyTorch, NaN beats all."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        best = args[0]
        for candidate in args[1:]:
            best = builder.select(_is_better(builder, candidate, best), candidate, best)
        zero = ir.Constant(a.floats, [0.0] * a.lanes)
        return builder.select(builder.fcmp_unordered(">", best, zero), best, zero)

    return a(a, a, a, a), generate


@_operation
def store_larger(typing: Any, y: Any, winner: Any, at: Any, x: Any, of: Any, first: Any) -> Any:
    """In each lane where ``x[of : of + LANES]`` is larger than ``y[at : at + LANES]``, store it in ``y``, and
    ``of`` in ``winner``; in all lanes if this is the ``first``. As in PyTorch, NaN beats all."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        y_, winner_, at_, x_, of_, first_ = args
        best_at = _pointer(context, builder, y, y_, at_, _FLOATS)
        winners_at = _pointer(context, builder, winner, winner_, at_, _INTS)
        best, winners = builder.load(best_at, align=4), builder.load(winners_at, align=4)
        candidate = builder.load(_pointer(context, builder, x, x_, of_, _FLOATS), align=4)
        better = _is_better(builder, candidate, best)
        better = builder.or_(better, _broadcast(builder, first_, ir.VectorType(ir.IntType(1), LANES)))
        position = _broadcast(builder, builder.trunc(of_, _INT), _INTS)
        builder.store(builder.select(better, candidate, best), best_at, align=4)
        builder.store(builder.select(better, position, winners), winners_at, align=4)
        return context.get_dummy_value()

    return types.void(y, winner, types.intp, x, types.intp, types.boolean), generate


@_operation
def store_maximum(
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
        neighbour = builder.add(window_, right_)
        windows = (window_, neighbour, builder.add(window_, below_), builder.add(neighbour, below_))
        best, winners = args[6], _broadcast(builder, window_, _INTS)
        for pixel, start in zip(args[7:], windows[1:], strict=True):
            better = _is_better(builder, pixel, best)
            best = builder.select(better, pixel, best)
            winners = builder.select(better, _broadcast(builder, start, _INTS), winners)
        zero, no_winner = ir.Constant(_FLOATS, [0.0] * LANES), ir.Constant(_INTS, [-1] * LANES)
        active = builder.fcmp_unordered(">", best, zero)
        best, winners = builder.select(active, best, zero), builder.select(active, winners, no_winner)
        builder.store(best, _pointer(context, builder, y, y_, at_, _FLOATS), align=4)
        builder.store(winners, _pointer(context, builder, winner, winner_, at_, _INTS), align=4)
        return context.get_dummy_value()

    numbers = [types.intp] * 4
    return types.void(y, winner, *numbers, *[_vector] * 4), generate

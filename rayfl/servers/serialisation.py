"""Convert a dataclass to named arrays and JSON values and back, by the types of its fields.

A field ``sweep`` that is a dataclass itself becomes ``sweep.begun`` and ``sweep.waiting``, a sparse matrix
``relatives`` becomes ``relatives.data``, ``.indices``, ``.indptr`` and ``.shape``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from rayfl.errors import RayflError

T = TypeVar("T")

_SCALARS = {bool: (bool, np.bool_), int: (int, np.integer), float: (float, np.floating), str: (str,)}
"""The types of scalar fields, and the types of values that they may hold."""

_ALLOWED = "arrays of numbers, csr_array, bool, int, float, str, dataclasses of these, each perhaps | None"

_CSR = ("data", "indices", "indptr")


class StateError(RayflError):
    """A state has a field that cannot be written, or differs from the state that was written."""

    lasting = True


@dataclass
class Flat:
    """The contents of a dataclass.

    Attributes:
        arrays: by the dotted name of the field.
        values: everything else, as JSON values, by the dotted name of the field.
    """

    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def flatten(value: object) -> Flat:
    """The fields of a dataclass. Arrays are not copied.

    Raises:
        StateError: naming the field whose type or value cannot be written.
    """
    flat = Flat()
    for name, kind, leaf in _leaves(value, ""):
        if leaf is None or kind is str:
            flat.values[name] = leaf
        elif kind is np.ndarray:
            flat.arrays[name] = leaf
        elif kind is sp.csr_array:
            flat.values[f"{name}.shape"] = [int(size) for size in leaf.shape]
            flat.arrays.update({f"{name}.{part}": getattr(leaf, part) for part in _CSR})
        elif kind is float and not math.isfinite(leaf):
            flat.values[name] = {"float": str(float(leaf))}  # JSON cannot represent it
        else:
            flat.values[name] = kind(leaf)
    return flat


def restore(
    kind: type[T], arrays: Mapping[str, NDArray[Any]], values: Mapping[str, Any], exact: bool = True
) -> T:
    """Rebuild the dataclass from the output of :func:`flatten`.

    Parts under a former name (``kind.renamed``, old name to new) are read, too.

    Args:
        kind: its class.
        arrays, values: the parts; arrays may have any shape.
        exact: refuse parts that are not fields of the class.

    Raises:
        StateError: naming a field that is missing, of another type, or unknown.
    """
    renamed: Mapping[str, str] = getattr(kind, "renamed", {})
    arrays = {renamed.get(name, name): array for name, array in arrays.items()}
    values = {renamed.get(name, name): value for name, value in values.items()}
    unread = {*arrays, *values}
    instance = _restored(kind, "", arrays, values, unread)
    if unread and exact:
        raise StateError(f"{_name(kind)} has no field {min(unread)!r}, which was written: {_REMEDY}")
    return instance


_REMEDY = "resume with the version of the method that wrote it, or start a new run"


def _restored(
    kind: type[T],
    prefix: str,
    arrays: Mapping[str, NDArray[Any]],
    values: Mapping[str, Any],
    unread: set[str],
) -> T:
    def read(name: str, expected: type) -> Any:
        source: Mapping[str, Any] = arrays if expected is np.ndarray else values
        if name not in source:
            raise StateError(f"{_name(kind)}: the field {name!r} was not written: {_REMEDY}")
        unread.discard(name)
        value = source[name]
        if expected is float and isinstance(value, dict):
            value = float(value["float"])
        if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
            raise StateError(f"{_name(kind)}: {name!r} was written as {value!r}: {_REMEDY}")
        return value

    arguments: dict[str, Any] = {}
    for name, (field_type, optional) in _field_types(kind).items():
        dotted = prefix + name
        if optional and values.get(dotted, 0) is None:
            unread.discard(dotted)
            arguments[name] = None
        elif is_dataclass(field_type):
            arguments[name] = _restored(field_type, f"{dotted}.", arrays, values, unread)
        elif field_type is sp.csr_array:
            parts = tuple(read(f"{dotted}.{part}", np.ndarray) for part in _CSR)
            arguments[name] = sp.csr_array(parts, shape=tuple(read(f"{dotted}.shape", list)))
        else:
            arguments[name] = read(dotted, field_type)
    return kind(**arguments)


def _leaves(value: object, prefix: str) -> Iterator[tuple[str, type, Any]]:
    """The dotted name, type and value of every field that is not itself a dataclass."""
    for name, (kind, optional) in _field_types(type(value)).items():
        entry = getattr(value, name)
        if entry is None and optional:
            yield prefix + name, kind, entry
            continue
        if kind is np.ndarray:
            fits = type(entry) is np.ndarray and entry.dtype.kind in "biuf" and entry.dtype.itemsize <= 8
        else:
            fits = isinstance(entry, _SCALARS.get(kind, kind))
            fits &= not (kind is int and isinstance(entry, bool))
        if not fits:
            actual = (
                f"an array of {entry.dtype}"
                if isinstance(entry, np.ndarray)
                else f"of type {_name(type(entry))}"
            )
            raise StateError(f"{_name(type(value))}.{name}: is {actual}; expected {_name(kind)}")
        if is_dataclass(kind):
            yield from _leaves(entry, f"{prefix}{name}.")
        else:
            yield prefix + name, kind, entry


def _options(hint: Any) -> Iterator[Any]:
    """The members of a union, or the hint itself, with type aliases resolved.

    ``NDArray`` is such an alias from NumPy 2.5 on, and so are those of ``type`` statements.
    """
    aliased = getattr(get_origin(hint) or hint, "__value__", None)
    if aliased is not None:
        yield from _options(aliased)
    elif get_origin(hint) in (Union, UnionType):
        for option in get_args(hint):
            yield from _options(option)
    else:
        yield hint


def _field_types(kind: type) -> dict[str, tuple[type, bool]]:
    """The class of each field's values, and whether it may be None."""
    try:
        hints = get_type_hints(kind)
    except NameError as error:
        raise StateError(
            f"{_name(kind)}: {error.name!r}, in the type of a field, is not known in its module; import it "
            "there, not for type checkers only"
        ) from None
    field_types: dict[str, tuple[type, bool]] = {}
    for member in fields(kind):
        if not member.init:  # csr_array computes it from the others
            continue
        hint = hints[member.name]
        options = tuple(_options(hint))
        classes = [get_origin(option) or option for option in options if option is not NoneType]
        allowed = len(classes) == 1 and (
            classes[0] in _SCALARS or classes[0] in (np.ndarray, sp.csr_array) or is_dataclass(classes[0])
        )
        if not allowed:
            raise StateError(f"{_name(kind)}.{member.name}: no state can hold {hint}; use {_ALLOWED}")
        field_types[member.name] = classes[0], NoneType in options
    return field_types


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"

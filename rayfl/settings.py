"""Building blocks of the typed configuration: frozen sections, and parts that are chosen by name.

A *part* is a class that is at once a config section (its fields are the settings, with ranges and
descriptions) and the thing itself (its methods do the work): a dataset, a partition, a model, a
signature, an algorithm. Parts are discovered: every module of a package is imported, and each subclass
of the package's base class that has a ``name`` field with a literal default is a choice. To add one,
add a file.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union

from annotated_types import Le, Lt
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


class Section(BaseModel):
    """A frozen part of the config; unknown keys and wrong types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _usable(cls, value: Any, info: ValidationInfo) -> Any:
        """Bound integers that have no upper bound of their own, and expand ``~`` in paths."""
        metadata = cls.model_fields[info.field_name].metadata if info.field_name else ()
        if isinstance(value, Path):
            if not str(value).isprintable():
                raise ValueError(f"{str(value)[:60]!r} cannot be a path; expected printable characters")
            expanded = os.path.expanduser(value)
            if len(os.fsencode(expanded)) > _PATH or any(len(os.fsencode(p)) > _NAME for p in value.parts):
                raise ValueError(f"{str(value)[:60]!r}... is too long for a path")
            return Path(expanded)
        if not any(isinstance(m, (Le, Lt)) for m in metadata):
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int) and abs(number) > _LARGEST:
                    raise ValueError(f"{_digits(number)} is too large; expected at most {_LARGEST}")
        return value


_LARGEST = 2**31 - 1
"""Of integers without an upper bound of their own: NumPy and PyTorch count and multiply in 64 bits."""


_PATH, _NAME = 4095, 255
"""Bytes that a path, and each name in it, may have on common systems."""


def _digits(number: int) -> str:
    """An integer, or how long it is."""
    bits = number.bit_length()
    return str(number) if bits < 64 else f"an integer of {bits} bits"


PartT = TypeVar("PartT", bound=Section)


def part_name(part: type[Section]) -> str | None:
    """The name by which a part is chosen: the default of its ``name`` field, None for abstract bases."""
    field = part.model_fields.get("name")
    return (field.default or None) if field is not None and isinstance(field.default, str) else None


def discover(package: str, base: type[PartT]) -> dict[str, type[PartT]]:
    """All parts of kind ``base`` defined in the modules of ``package``, by name, in alphabetical order.

    Raises:
        ValueError: if two classes claim the same name.
    """
    found: dict[str, type[PartT]] = {}
    path = importlib.import_module(package).__path__
    for info in pkgutil.iter_modules(path, prefix=package + "."):
        module = importlib.import_module(info.name)
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if not issubclass(cls, base) or cls.__module__ != info.name:
                continue
            name = part_name(cls)
            if name is None:
                continue
            if name in found:
                raise ValueError(f"{cls} and {found[name]} are both named {name!r}")
            found[name] = cls
    return dict(sorted(found.items()))


def _name_alone(value: object) -> object:
    """``algorithm: pacfl`` is short for ``algorithm: {name: pacfl}``."""
    return {"name": value} if isinstance(value, str) else value


class _ShortForm:
    """Says in the JSON schema that the name alone will do."""

    def __init__(self, parts: Mapping[str, type[Section]]) -> None:
        self.names = [
            name
            for name, part in parts.items()
            if not any(f.is_required() for f in part.model_fields.values())
        ]

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        full = handler(core)
        return {"anyOf": [{"enum": self.names, "type": "string"}, *full.get("oneOf", [full])]}


def choice(parts: dict[str, type[PartT]]) -> Any:
    """The annotation of a config field that holds one of ``parts``, chosen by its ``name``."""
    classes = tuple(parts.values())
    short = BeforeValidator(_name_alone), _ShortForm(parts)
    if len(classes) == 1:
        return Annotated[(classes[0], *short)]
    return Annotated[(Union[classes], Field(discriminator="name"), *short)]  # noqa: UP007


def summary(part: object) -> str:
    """The first sentence of a part's docstring, for ``rayfl list``."""
    paragraph = " ".join((inspect.getdoc(part) or "").split("\n\n", 1)[0].split())
    return re.split(r"\.\s+(?=[A-Z])", paragraph, maxsplit=1)[0].rstrip(".") + "."

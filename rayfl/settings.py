"""Building blocks of the typed configuration: frozen sections, and parts that are chosen by name.

A *part* is a class that is both a config section (its fields are the settings, with ranges and
descriptions) and the implementation (its methods do the work): a dataset, a partition, a model, a
signature, an algorithm. The parts of a kind are in a :class:`Registry`: to add one to rayfl, add a file to
its package; to add one from outside, see :mod:`rayfl.plugins`.

This module does not import ``annotations`` from ``__future__``: Pydantic would parse those of
:class:`Section` again for each part.
"""

import difflib
import importlib
import inspect
import math
import os
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from annotated_types import Le, Lt
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import override

from rayfl.errors import explained


def _as_written(value: Any, name: str) -> Any:
    """A value as it would be read back from ``config.yaml``.

    Raises:
        ValueError: if ``config.yaml`` cannot store it.
    """
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of NumPy or PyTorch
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}; config.yaml has finite numbers only")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (list, tuple)):
        return [_as_written(each, f"{name}.{place}") for place, each in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{name} has the key {key!r}; config.yaml has text only: quote it")
        return {key: _as_written(each, f"{name}.{key}".removeprefix("it.")) for key, each in value.items()}
    kind = type(value).__name__
    raise ValueError(
        f"{name} is of type {kind}; config.yaml has numbers, text, true and false, null, lists and sections "
        "(a date: quote it)"
    )


def _storable_kwargs(given: Any) -> Any:
    return _as_written(given, "it") if isinstance(given, Mapping) else given


Kwargs = Annotated[dict[str, Any], BeforeValidator(_storable_kwargs)]
"""Keyword arguments of a user's function or class, limited to what ``config.yaml`` can store, so that a
resumed run gets the same."""


class _Explaining(type(BaseModel)):  # type: ignore[misc]
    """Sections that are built from Python refuse their settings as those of files are refused: in one line.

    Sections within sections are validated without a call, so the outermost one explains the mistakes of all.
    """

    def __call__(cls, *args: Any, **given: Any) -> Any:
        try:
            return super().__call__(*args, **given)
        except ValidationError as error:
            raise explained(error, given, cls) from None


if TYPE_CHECKING:

    class _Explained(BaseModel):
        """Pydantic's own class, which tells type checkers how sections are called."""

        model_config = ConfigDict(extra="forbid")

else:

    class _Explained(BaseModel, metaclass=_Explaining):
        model_config = ConfigDict(extra="forbid", defer_build=True)


class Section(_Explained):
    """A frozen part of the config; unknown keys and wrong types are refused.

    Raises:
        ConfigError: if a setting is wrong; one line.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        defer_build=True,  # a command validates a few of a hundred parts
    )

    @classmethod
    @override
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Build the schema of parts from outside of rayfl when they are defined, to report errors there."""
        if not cls.__module__.startswith(_RAYFL):
            cls.model_rebuild(raise_errors=False)

    renamed: ClassVar[Mapping[str, str]] = {}
    """Accepted other names of settings, such as those of earlier versions, with the present names."""

    called_with: ClassVar[Mapping[str, str]] = {}
    """Methods that are called only if a class attribute is true, with the name of the attribute."""

    paths_from_here: ClassVar[bool] = False
    """Whether its paths stay as they are, relative to the folder in which a command is given."""

    classes_only: ClassVar[bool] = False
    """Whether this section is refused where models do not predict classes."""

    def needs_classes(self) -> bool:
        """Whether these settings make sense only where models predict classes (:attr:`classes_only`)."""
        return self.classes_only

    @model_validator(mode="before")
    @classmethod
    def _of_default_parts(cls, given: Any) -> Any:
        """Complete the settings of parts that are given without a name: :func:`named`.

        Settings under another name (:attr:`renamed`) get their present name, as settings in files do.
        """
        if not isinstance(given, Mapping):
            return given
        completed = _with_present_names(given, cls)
        for key, value in completed.items():
            if isinstance(value, Mapping) and key in cls.model_fields:
                default = default_part(cls, key)
                if default is not None:
                    completed[key] = named(_with_present_names(value, default), default)
        return completed

    @field_validator("*")
    @classmethod
    def _bounded_and_absolute(cls, value: Any, info: ValidationInfo) -> Any:
        """Bound numbers that have no upper bound of their own, and make paths absolute.

        Workers, and a process that resumes a run, may be in another folder.
        """
        if isinstance(value, Path):
            if not str(value).isprintable():
                raise ValueError(f"{str(value)[:60]!r} cannot be a path; expected printable characters")
            expanded = os.path.expanduser(value)
            if len(os.fsencode(expanded)) > _LONGEST_PATH or any(
                len(os.fsencode(p)) > _LONGEST_NAME for p in value.parts
            ):
                raise ValueError(f"{str(value)[:60]!r}... is too long for a path")
            return Path(expanded) if cls.paths_from_here else Path(expanded).absolute()
        if isinstance(value, (int, float, tuple)) and not _is_bounded(cls, info.field_name):
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int) and abs(number) > _LARGEST:
                    raise ValueError(f"{_digits(number)} is too large; expected at most {_LARGEST}")
                if isinstance(number, float) and abs(number) > _LARGEST_FLOAT:
                    raise ValueError(f"{number:g} is too large; expected at most {_LARGEST_FLOAT:g}")
        return value


@cache
def _is_bounded(section: type[Section], field: str | None) -> bool:
    """Whether a field declares an upper bound."""
    return field is not None and any(isinstance(m, (Le, Lt)) for m in section.model_fields[field].metadata)


def _with_present_names(settings: Mapping[str, Any], section: type[Section]) -> dict[str, Any]:
    """Settings of a section under their present names."""
    return {section.renamed.get(key, key): value for key, value in settings.items()}


_RAYFL = __name__.partition(".")[0] + "."

_LARGEST = 2**31 - 1
"""Largest value of integers that declare no upper bound: NumPy and PyTorch multiply them in 64 bits."""

_LARGEST_FLOAT = 3e38
"""Largest value of other numbers that declare no upper bound: models are computed in float32."""


_LONGEST_PATH, _LONGEST_NAME = 4095, 255
"""Maximum bytes of a path, and of each name in it, on common systems."""


def _digits(number: int) -> str:
    """An integer as text, or its number of bits if it is very large."""
    bits = number.bit_length()
    return str(number) if bits < 64 else f"an integer of {bits} bits"


PartT = TypeVar("PartT", bound=Section)


def part_name(part: type[Section]) -> str | None:
    """The name by which a part is chosen: the default of its ``name`` field, None for abstract bases."""
    field = part.model_fields.get("name")
    return (field.default or None) if field is not None and isinstance(field.default, str) else None


@cache
def default_part(section: type[BaseModel], key: str) -> type[Section] | None:
    """The class of the part that a field of a section has by default; None if the field is something else."""
    field = section.model_fields.get(key)
    if field is None:
        return None
    has_factory = field.default_factory is not None  # a default of another kind may have no copy
    default = field.get_default(call_default_factory=True) if has_factory else field.default
    return type(default) if isinstance(default, Section) else None


def named(settings: Mapping[str, Any], default: type[Section]) -> Mapping[str, Any]:
    """The settings of a part with its name; without one they belong to the default part of their field."""
    name = part_name(default)
    return settings if name is None or "name" in settings else {"name": name, **settings}


def dotted(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All settings of nested sections, as dotted names and values."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


class Registry(Mapping[str, type[PartT]]):
    """The parts of one kind by name, in alphabetical order: rayfl's own, and those that plug-ins bring.

    rayfl's own parts are found at the first access: every module of the package is imported, and each
    subclass of ``base`` that has a ``name`` field with a literal default is a choice.

    Args:
        kind: name of the kind in messages, such as ``model``.
        package: the package of rayfl's own parts.
        base: the base class of all parts of the kind.
        settings_of: returns the settings of the part that represents a user's object, such as a network or
            arrays; None if no part does.
    """

    def __init__(
        self,
        kind: str,
        package: str,
        base: type[PartT],
        settings_of: Callable[[Any], dict[str, Any] | None] = lambda thing: None,
    ) -> None:
        self.kind, self.package, self.base, self.settings_of = kind, package, base, settings_of
        self._own: dict[str, type[PartT]] | None = None
        self._added: dict[str, type[PartT]] = {}

    def __getitem__(self, name: str) -> type[PartT]:
        return self._all_parts()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all_parts())

    def __len__(self) -> int:
        return len(self._all_parts())

    @property
    def own(self) -> Mapping[str, type[PartT]]:
        """The parts that come with rayfl, without those of plug-ins."""
        if self._own is None:
            self._own = _find_parts(self.package, self.base)
        return self._own

    def _all_parts(self) -> Mapping[str, type[PartT]]:
        return dict(sorted({**self.own, **self._added}.items())) if self._added else self.own

    def register(self, part: type[PartT]) -> None:
        """Add a part from outside of rayfl; if its module is imported again, the new class replaces it.

        Raises:
            ValueError: if it has no name, or another part has the same name.
        """
        name = part_name(part)
        if name is None:
            raise ValueError(f"{part.__name__} has no name of its own; add: name: Literal['...'] = '...'")
        existing = self.get(name)
        if existing is not None and (existing.__module__, existing.__qualname__) != (
            part.__module__,
            part.__qualname__,
        ):
            raise ValueError(
                f"a {self.kind} named {name!r} exists already ({existing.__module__}); choose another name"
            )
        self._added[name] = part

    def withdraw(self, name: str) -> None:
        """Forget a part that was registered."""
        self._added.pop(name, None)


def _find_parts(package: str, base: type[PartT]) -> dict[str, type[PartT]]:
    """All parts of kind ``base`` defined in the modules of ``package``, by name, in alphabetical order.

    Raises:
        ValueError: if two classes claim the same name.
    """
    parts: dict[str, type[PartT]] = {}
    path = importlib.import_module(package).__path__
    for info in pkgutil.iter_modules(path, prefix=package + "."):
        for cls in parts_of(importlib.import_module(info.name), base):
            name = part_name(cls)
            assert name is not None
            if name in parts:
                raise ValueError(f"{cls} and {parts[name]} are both named {name!r}")
            parts[name] = cls
    return dict(sorted(parts.items()))


def parts_of(module: ModuleType, base: type[PartT]) -> list[type[PartT]]:
    """The classes of kind ``base`` with a name that are defined in a module, or below it in a package."""
    within = module.__name__ + "."
    return [
        cls
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, base) and part_name(cls) and (cls.__module__ + ".").startswith(within)
    ]


@dataclass(frozen=True)
class Choice:
    """Annotates a config field that holds one of ``parts``, chosen by its ``name`` when it is validated.

    The name alone is short for a section with only that name: ``algorithm: pacfl``. An instance of a part is
    used as it is. Settings without a name belong to the field's default part, if it has one.
    """

    parts: Mapping[str, type[Section]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validated_part)

    def _validated_part(self, value: object) -> Section:
        if isinstance(value, self._part_classes()):
            self._check_methods(type(value))
            return value
        name = value.get("name") if isinstance(value, Mapping) else value
        if not isinstance(name, str):
            raise PydanticCustomError("part_type", "expected a name, or a section with one")
        if name not in self.parts:
            raise PydanticCustomError("no_such_part", "no part has this name", {"part": name})
        part = self.parts[name]
        self._check_methods(part)
        return part.model_validate(value if isinstance(value, Mapping) else {"name": name})

    def _check_methods(self, part: type[Section]) -> None:
        if isinstance(self.parts, Registry):
            base: type[Section] = self.parts.base
            check_methods(part, base)

    def _part_classes(self) -> tuple[type[Section], ...]:
        return (self.parts.base,) if isinstance(self.parts, Registry) else tuple(self.parts.values())

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        complete = [
            name
            for name, part in self.parts.items()
            if not any(f.is_required() for f in part.model_fields.values())
        ]
        for part in self.parts.values():
            part.model_rebuild()
        sections = [handler(part.__pydantic_core_schema__) for part in self.parts.values()]
        return {"anyOf": [{"enum": complete, "type": "string"}, *sections]}


_MISSPELT = 0.85
"""Similarity from 0 to 1 above which the name of a method or attribute is taken for a misspelt one."""


@cache
def check_methods(part: type[Section], base: type[Section]) -> None:
    """Refuse a part that lacks a method of its base, whose method cannot be called with its arguments, or
    with a method or attribute that nobody asks for because its name is misspelt, or another is missing.

    Raises:
        ValueError: naming the method, its arguments and the expected ones.
    """
    known = [name for name in dir(base) if not name.startswith("_")]
    own_classes = part.__mro__[: part.__mro__.index(base)] if issubclass(part, base) else ()
    _check_attributes(part, base, own_classes)
    for each in own_classes:
        for name in vars(each):
            if inspect.isfunction(vars(each)[name]) and not name.startswith("_") and name not in known:
                close = difflib.get_close_matches(name, known, 1, _MISSPELT)
                if close:
                    where = f"{part_name(part) or part.__name__}.{name}"
                    remedy = f"did you mean {close[0]}? Names of helpers begin with _"
                    raise ValueError(f"{where} is no method of {base.__name__}; {remedy}")
    for name, method in vars(base).items():
        if not inspect.isfunction(method) or name.startswith("_"):
            continue
        where, own = f"{part_name(part) or part.__name__}.{name}", getattr(part, name)
        if own is method:
            if method.__code__.co_names == ("NotImplementedError",):
                raise ValueError(f"{where} is missing in class {part.__name__}")
            continue
        expected = list(inspect.signature(method).parameters)
        if not callable(own):
            raise ValueError(
                f"{where} is of type {type(own).__name__}; expected a method of ({', '.join(expected[1:])})"
            )
        without_self = isinstance(inspect.getattr_static(part, name), staticmethod | classmethod)
        try:
            inspect.signature(own).bind(*expected[without_self:])
        except TypeError:
            takes = list(inspect.signature(own).parameters)[not without_self :]
            raise ValueError(
                f"{where} takes ({', '.join(takes)}); expected ({', '.join(expected[1:])})"
            ) from None


def _check_attributes(part: type[Section], base: type[Section], own_classes: tuple[type, ...]) -> None:
    """Refuse class attributes that are named almost like one of the base, settings that should be one, a
    method that is called only with an attribute that is not set, and an ``__init__`` without settings.

    Raises:
        ValueError: naming the attribute.
    """
    label = part_name(part) or part.__name__
    attributes = [name for name in base.__class_vars__ if not name.startswith("_")]
    for each in own_classes:
        if not issubclass(each, Section):  # a mixin
            continue
        for name in attributes:
            if name in each.model_fields:
                raise ValueError(f"{label}.{name} is no setting; write {name}: ClassVar[Any] = ...")
        for name in each.__class_vars__ & {*vars(each), *vars(each).get("__annotations__", ())}:
            close = difflib.get_close_matches(name, attributes, 1, _MISSPELT)
            if close and not name.startswith("_") and name not in attributes:
                expected = f"expected {close[0]}: ClassVar[Any] = ..."
                raise ValueError(f"{label}.{name} is no attribute of {base.__name__}; {expected}")
        if "__init__" in vars(each) and not each.__module__.startswith(_RAYFL):
            parameters = inspect.signature(each.__init__).parameters.values()
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
                remedy = "settings are fields of the class, such as factor: float = 1.0"
                raise ValueError(f"{label} has its own __init__, which does not take its settings; {remedy}")
    for method, attribute in base.called_with.items():
        if getattr(part, method) is not getattr(base, method) and not getattr(part, attribute):
            remedy = f"add {attribute}: ClassVar[bool] = True, or leave it out"
            raise ValueError(f"{label}.{method} is called only if {attribute} is true; {remedy}")


def choice(parts: Mapping[str, type[PartT]]) -> Any:
    """The annotation of a config field that holds one of ``parts``."""
    base = parts.base if isinstance(parts, Registry) else Section
    return Annotated[base, Choice(parts)]


def summary(part: object) -> str:
    """The first sentence of a part's docstring, for ``rayfl list``."""
    return first_sentence(inspect.getdoc(part) or "")


def first_sentence(text: str) -> str:
    """The first sentence of a text's first paragraph."""
    paragraph = " ".join(text.split("\n\n", 1)[0].split())
    return re.split(r"\.\s+(?=[A-Z])", paragraph, maxsplit=1)[0].rstrip(".") + "."

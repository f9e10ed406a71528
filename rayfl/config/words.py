"""Valid values of a setting in words, and what its type annotation contains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rayfl.settings import Choice

_WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    Path: "a path",
    NoneType: "null",
}

_BOUND_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Valid values of a setting in words: ``an integer >= 1 or 'auto'``; its title, if it has one."""
    chosen = next((m for m in metadata if isinstance(m, Choice)), None)
    if chosen is not None:
        return "one of " + ", ".join(chosen.parts)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        titles = [a.title for a in args[1:] if isinstance(a, FieldInfo) and a.title]
        if titles:
            return titles[0]
        extra = [m for a in args[1:] for m in (a.metadata if isinstance(a, FieldInfo) else [a])]
        return describe(args[0], [*metadata, *extra])
    if origin is Literal:
        return _join_with_or([repr(a) for a in args])
    if origin in (Union, UnionType):
        words = [w for a in args for w in (map(repr, get_args(a)) if get_origin(a) is Literal else [a])]
        return _join_with_or(
            [w if isinstance(w, str) else describe(w, () if w is NoneType else metadata) for w in words]
        )
    if origin is tuple:
        items = "at least one item" if any(getattr(m, "min_length", 0) for m in metadata) else "items"
        return f"a list of {items}, each {describe(args[0])}"
    if origin is dict:
        return "a section"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a section with " + ", ".join(annotation.model_fields)
    bounds = [
        f"{sign} {getattr(m, key):g}"
        for m in metadata
        for key, sign in _BOUND_SIGNS.items()
        if hasattr(m, key) and getattr(m, key) < 2**53  # the range of 64 bits is not worth mentioning
    ]
    bounds += [f"a multiple of {m.multiple_of}" for m in metadata if getattr(m, "multiple_of", None)]
    patterns = [f"that matches {m.pattern}" for m in metadata if getattr(m, "pattern", None)]
    return " ".join([_WORDS.get(annotation, ""), " and ".join(bounds), *patterns]).replace("  ", " ").strip()


def shown(value: Any) -> str:
    """The value that was given, in a few words."""
    if isinstance(value, (Mapping, BaseModel)):
        return "got a section"
    try:
        text = "nothing" if value is None else repr(value if isinstance(value, _REPR_TYPES) else str(value))
    except ValueError:  # Python does not print integers of more than 4,300 digits
        text = "an integer of thousands of digits"
    return f"got {text if len(text) <= 60 else text[:57] + '...'}"


_REPR_TYPES = (str, int, float, list, tuple)


def printable(text: str) -> str:
    """User input as printable text, for messages."""
    return text if text.isprintable() else repr(text)


def _join_with_or(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def mixed(annotation: Any) -> bool:
    """Whether a setting may be a section or another value (other than None)."""
    kinds = [a for a in get_args(annotation) if a is not NoneType]
    sections = [a for a in kinds if isinstance(a, type) and issubclass(a, BaseModel)]
    return get_origin(annotation) in (Union, UnionType) and 0 < len(sections) < len(kinds)


def item_of(annotation: Any) -> Any:
    """The type annotation of the items of a list; None if the setting is not a list."""
    for a in (annotation, *_flat_args(annotation)):
        if get_origin(a) is tuple:
            return get_args(a)[0]
    return None


def sections(annotation: Any, metadata: Sequence[Any] = ()) -> Mapping[Any, type[BaseModel]]:
    """The sections that a field may hold: by part name if there is a choice, else under None."""
    candidates = [annotation, *metadata, *_flat_args(annotation)]
    chosen = next((a for a in candidates if isinstance(a, Choice)), None)
    if chosen is not None:
        return chosen.parts
    classes = [a for a in candidates if isinstance(a, type) and issubclass(a, BaseModel)]
    return {None: classes[0]} if classes else {}


@cache
def choices(section: type[BaseModel], key: str) -> Mapping[Any, type[BaseModel]]:
    """The :func:`sections` that a setting of a section may hold; empty if there is no such setting."""
    field = section.model_fields.get(key)
    return sections(field.annotation, field.metadata) if field is not None else {}


def _flat_args(annotation: Any) -> list[Any]:
    return [a for arg in get_args(annotation) for a in (arg, *_flat_args(arg))]

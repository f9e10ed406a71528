"""From the mistakes that Pydantic finds to one line: where, what, and what would be right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError

from rayfl import plugins
from rayfl.config.schema import Config
from rayfl.config.words import describe, item_of, mixed, printable, sections, shown
from rayfl.errors import ConfigError, nearest
from rayfl.settings import Section, part_name
from rayfl.units import counted


class _Place(NamedTuple):
    """Where an error lies.

    Attributes:
        path: dotted, in parts.
        owner: the section with its last element.
        siblings: the parts that the owner was chosen from, by name.
        choices: the parts that may be chosen here, by name.
        expected: the valid values, in words.
    """

    path: tuple[str, ...]
    owner: type[BaseModel] | None
    siblings: Mapping[str, type[BaseModel]]
    choices: Mapping[str, type[BaseModel]]
    expected: str


def explain(
    error: ValidationError, settings: Mapping[str, Any], root: type[BaseModel] = Config
) -> ConfigError:
    """The first mistake as an error with a helpful message.

    Args:
        error: the errors that Pydantic found.
        settings: the settings that were validated.
        root: the section that they were validated as.
    """
    details = error.errors()
    outer = {e["loc"][:depth] for e in details for depth in range(len(e["loc"]))}
    # Pydantic reports a list with wrong items as too short, too: the items are the mistake.
    relevant = [e for e in details if e["type"] != "too_short" or e["loc"] not in outer]
    errors = [(e, _locate(e["loc"], settings, root)) for e in relevant]
    # If a name or a section is allowed, mistakes within a section that was given are more helpful.
    parents = {p.path[:k] for _, p in errors for k in range(len(p.path))}
    errors = [(e, p) for e, p in errors if e["type"] != "literal_error" or p.path not in parents]
    # What the user wrote comes first, then what is missing, then what a part computed from other mistakes.
    first, place = min(errors, key=lambda e: (not _is_given(settings, e[1]), e[0]["type"] != "missing"))
    depth = len(place.path)
    # The branches of a union, and what lies within, are one mistake.
    rest = {p.path for _, p in errors if p.path[:depth] != place.path[: len(p.path)]}
    others = f" (and {counted(len(rest), 'more mistake')})" if rest else ""
    dotted, owner, last = ".".join(place.path), ".".join(place.path[:-1]), place.path[-1] if depth else ""
    kind, value = first["type"], first.get("input")
    named = part_name(root) if root is not Config and issubclass(root, Section) else None
    whole = named or "config"
    if kind in ("extra_forbidden", "invalid_key"):
        part = part_name(place.owner) if place.owner and owner and issubclass(place.owner, Section) else None
        within = f" in {owner}" + (f" ({part})" if part else "") if owner else ""
        return ConfigError(dotted, f"no such setting{within}{others}", _key_remedy(last, place))
    if kind == "no_such_part":
        name = str(first["ctx"]["part"])
        kind = last if not last.isdigit() else place.path[-2].rstrip("s")
        kind = "local objective" if kind == "local" else kind
        return ConfigError(dotted, f"no {kind} named {name!r}{others}", _part_remedy(dotted, name, place))
    if kind in ("value_error", "assertion_error"):
        return ConfigError(dotted or whole, _sentence(first["msg"]) + others)
    if kind == "too_short" and value == {}:  # a list says what its items are
        return ConfigError(dotted, f"is empty{others}", "expected at least one entry")
    what = "missing" if kind == "missing" else shown(value)
    expected = (
        place.expected.replace("number", "finite number") if kind == "finite_number" else place.expected
    )
    if kind == "less_than_equal" and "<" not in place.expected:  # the range of 64 bits
        expected += f" and <= {first['ctx']['le']}"
    return ConfigError(dotted or whole, what + others, f"expected {expected}" if expected else "")


def _part_remedy(dotted: str, name: str, place: _Place) -> str:
    """The remedy for an unknown part: how to name one's own class (``my_net:Net``), or the nearest part."""
    for choice, part in place.choices.items():
        if ":" in name and "target" in part.model_fields:
            section = dotted.removesuffix(".name")
            return f"for your own class or function give {section}={choice} {section}.target={name}"
    remedy = nearest(name, place.choices)
    alike = max((SequenceMatcher(None, name, each).ratio() for each in place.choices), default=0.0)
    if dotted.removesuffix(".name") not in _OWN_PARTS or alike >= _TYPING_ERROR:
        return remedy
    bases = set.intersection(*({*part.__mro__} for part in place.choices.values()))  # Algorithm, Section, ...
    nameless = plugins.nameless(max(bases, key=lambda base: len(base.__mro__)))
    own = "one of your own comes with its file: plugins or --plugin"
    if nameless:
        own = f"{nameless[0]} has no name: add name: Literal[{name!r}] = {name!r} to the class"
    return f"{remedy} ({own})" if remedy.endswith("?") else f"{remedy}; {own}"


_OWN_PARTS = (
    *("algorithm", "local", "order", "sampling", "aggregation", "model", "loss", "data", "partition"),
    *("clustering.signature", "clustering.features", "clustering.embedding"),
)
"""Sections for which plug-ins may have parts."""

_TYPING_ERROR = 0.75
"""Similarity from 0 to 1 above which an unknown name is taken for a misspelt one, and not for one's own."""


def _key_remedy(key: str, place: _Place) -> str:
    """The remedy for an unknown key: the part that has it, or the nearest key of its own section."""
    owners = [name for name, part in place.siblings.items() if name and key in part.model_fields]
    if owners:
        remedy = f"{', '.join(owners)} {'has' if len(owners) == 1 else 'have'} it"
        if any(step.isdigit() for step in place.path):  # an item of a list is given as a whole
            return remedy
        return f"{remedy} (set {'.'.join(place.path[:-1])}={owners[0] if len(owners) == 1 else 'NAME'})"
    if place.owner is Config:  # the last part of a dotted name alone
        candidates = [
            f"{name}.{key}"
            for name, field in Config.model_fields.items()
            if isinstance(field.annotation, type) and key in getattr(field.annotation, "model_fields", ())
        ]
        if candidates:
            return "did you mean " + " or ".join(map(repr, candidates)) + "?"
    return nearest(key, place.owner.model_fields if place.owner else ())


def _is_given(settings: Any, place: _Place) -> bool:
    """Whether the user (or an algorithm's default) wrote something at this place."""
    for step in place.path:
        if isinstance(settings, Mapping) and step in settings:
            settings = settings[step]
        elif isinstance(settings, (list, tuple)) and step.isdigit() and int(step) < len(settings):
            settings = settings[int(step)]
        else:
            return False
    return True


def _sentence(message: str) -> str:
    """A validator's message without Pydantic's prefix."""
    message = " ".join(message.removeprefix("Value error, ").removeprefix("Assertion failed, ").split())
    return message[:1].lower() + message[1:] if message[:2].istitle() else message


def _locate(loc: Sequence[int | str], settings: Any, root: type[BaseModel]) -> _Place:
    """Where an error lies.

    Pydantic's own path names the branch of a plain union (``execution.actors.int``), which is not part of
    what users write.
    """
    path: list[str] = []
    owner: type[BaseModel] | None = root
    siblings: Mapping[str, type[BaseModel]] = {}
    choices: Mapping[str, type[BaseModel]] = {}
    inner: type[BaseModel] | None = root  # the section that the next step lies in
    annotation: Any = None  # what the value at this place has to be
    metadata: Sequence[Any] = ()
    branched = False
    for step in loc:
        if isinstance(step, int) and item_of(annotation) is not None:
            path.append(str(step))
            annotation, metadata = item_of(annotation), ()
            settings = settings[step] if isinstance(settings, (list, tuple)) else None
        elif mixed(annotation) and not branched:
            branched = True  # Pydantic's name of the branch
            continue
        elif get_origin(annotation) is dict:
            path.append(printable(str(step)))
            annotation, metadata = get_args(annotation)[1], ()
            settings = settings.get(step) if isinstance(settings, Mapping) else None
        elif inner is not None:
            owner, siblings = inner, choices
            path.append(printable(str(step)))
            field = owner.model_fields.get(str(step))
            annotation, metadata = (field.annotation, field.metadata) if field else (None, ())
            settings = settings.get(step) if isinstance(settings, Mapping) else None
        parts = sections(annotation, metadata)
        inner, choices = parts.get(None), {} if None in parts else parts
        if choices:
            inner = choices.get(_chosen_name(settings))
        branched = False
    return _Place(tuple(path), owner, siblings, choices, describe(annotation, metadata))


def _chosen_name(settings: Any) -> str:
    """The name of the part that settings choose; empty if they name none."""
    name = settings.get("name") if isinstance(settings, Mapping) else settings
    return name if isinstance(name, str) else ""

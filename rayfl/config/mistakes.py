"""From the mistakes that Pydantic finds to one line: where, what, and what would be right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from rayfl.config.schema import Config
from rayfl.config.words import describe, item_of, mixed, one_line, sections, shown
from rayfl.errors import ConfigError, nearest
from rayfl.settings import Section, part_name


class _Place(NamedTuple):
    """Where an error lies: its dotted path, the section with its last element, and what is expected there."""

    path: tuple[str, ...]
    owner: type[BaseModel] | None
    siblings: Mapping[str | None, type[BaseModel]]
    expected: str


def explain(error: ValidationError, settings: Mapping[str, Any]) -> ConfigError:
    """The first mistake, in words that help."""
    found = error.errors()
    outer = {e["loc"][:depth] for e in found for depth in range(len(e["loc"]))}
    # A list whose items are wrong counts as too short, too: the items are the mistake.
    errors = [(e, _locate(e["loc"])) for e in found if e["type"] != "too_short" or e["loc"] not in outer]
    # Where a name or a section is possible, mistakes within a section that was given say more.
    around = {p.path[:k] for _, p in errors for k in range(len(p.path))}
    errors = [(e, p) for e, p in errors if e["type"] != "literal_error" or p.path not in around]
    # What the user wrote comes first, then what is missing, then what a part computed from other mistakes.
    first, place = min(errors, key=lambda e: (not _given(settings, e[1]), e[0]["type"] != "missing"))
    depth = len(place.path)
    # The branches of a union, and what lies within, are one mistake.
    rest = {p.path for _, p in errors if p.path[:depth] != place.path[: len(p.path)]}
    more = f" (and {len(rest)} more mistake{'s' * (len(rest) > 1)})" if rest else ""
    dotted, owner, last = ".".join(place.path), ".".join(place.path[:-1]), place.path[-1] if depth else ""
    kind, given = first["type"], first.get("input")
    if kind in ("extra_forbidden", "invalid_key"):
        part = part_name(place.owner) if place.owner and owner and issubclass(place.owner, Section) else None
        within = f" in {owner}" + (f" ({part})" if part else "") if owner else ""
        return ConfigError(dotted, f"no such setting{within}{more}", _right_key(last, place))
    if kind == "union_tag_invalid":
        names = [t.strip(" '") for t in str(first["ctx"]["expected_tags"]).split(",")]
        tag = str(first["ctx"]["tag"])
        kind = last if not last.isdigit() else place.path[-2].rstrip("s")
        return ConfigError(dotted, f"no {kind} named {tag!r}{more}", nearest(tag, names))
    if kind in ("value_error", "assertion_error"):
        return ConfigError(dotted or "config", _sentence(first["msg"]) + more)
    what = "missing" if kind == "missing" else shown(given)
    expected = (
        place.expected.replace("number", "finite number") if kind == "finite_number" else place.expected
    )
    return ConfigError(dotted or "config", what + more, f"expected {expected}" if expected else "")


def _right_key(key: str, place: _Place) -> str:
    """The remedy for an unknown key: the part that has it, or the nearest key of its own section."""
    having = [name for name, part in place.siblings.items() if name and key in part.model_fields]
    if having:
        return f"{', '.join(having)} {'has' if len(having) == 1 else 'have'} it"
    return nearest(key, place.owner.model_fields if place.owner else ())


def _given(settings: Any, place: _Place) -> bool:
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
    """A validator's own words without Pydantic's."""
    message = " ".join(message.removeprefix("Value error, ").removeprefix("Assertion failed, ").split())
    return message[:1].lower() + message[1:] if message[:2].istitle() else message


def _locate(loc: Sequence[int | str]) -> _Place:
    """Where an error lies.

    Pydantic's own path repeats the name of a chosen part (``algorithm.pacfl.x``) and names the branch of
    a plain union (``execution.actors.int``); neither is part of what users write.
    """
    where: list[str] = []
    owner: type[BaseModel] | None = Config
    siblings: Mapping[str | None, type[BaseModel]] = {}  # what the owner was chosen from
    chosen: Mapping[str | None, type[BaseModel]] = {}
    inner: dict[str | None, type[BaseModel]] = {None: Config}  # sections that the next step may lie in
    annotation: Any = None  # what the value at this place has to be
    metadata: Sequence[Any] = ()
    branched = False
    for step in loc:
        if isinstance(step, int) and item_of(annotation) is not None:
            where.append(str(step))
            annotation, metadata = item_of(annotation), ()
        elif mixed(annotation) and not branched:
            branched = True  # Pydantic's name of the branch
            continue
        elif None in inner:
            owner, siblings, chosen = inner[None], chosen, {}
            where.append(one_line(str(step)))
            field = owner.model_fields.get(str(step))
            annotation, metadata = (field.annotation, field.metadata) if field else (None, ())
            inner = sections(annotation)
        elif step in inner:
            chosen, inner = inner, {None: inner[str(step)]}
        branched = False
    return _Place(tuple(where), owner, siblings, describe(annotation, metadata))

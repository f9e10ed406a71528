"""Objects that Python users give in place of settings: parts, their classes, networks, arrays, functions.

Each is converted to equivalent settings, so that a run directory contains the whole run and a worker can
rebuild it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayfl import plugins
from rayfl.config import kinds
from rayfl.config.schema import Config
from rayfl.config.words import sections, shown
from rayfl.errors import ConfigError, DataError
from rayfl.settings import Registry, Section, part_name


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without objects; classes of the user's own become plug-ins.

    Raises:
        ConfigError: if an object does not fit its setting, or other processes could not create it.
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        field = Config.model_fields.get(key)
        choices = sections(field.annotation, field.metadata) if field else {}
        if isinstance(value, Section):
            bring_classes(value)
            found[key] = value.model_dump(mode="json")
        elif isinstance(choices, Registry) and not isinstance(value, (str, int, float, type(None))):
            found[key] = _settings_of(value, choices, key)
        else:
            found[key] = value
    return found


def _settings_of(thing: object, registry: Registry[Any], where: str) -> dict[str, Any]:
    if isinstance(thing, type) and issubclass(thing, registry.base):
        _bring_class(thing)
        return {"name": part_name(thing) or thing.__name__}
    try:
        found = registry.settings_of(thing)
    except DataError as error:
        raise ConfigError(where, str(error).removeprefix(where).lstrip(": ")) from None
    if found is None and isinstance(thing, Mapping):
        return dict(thing)
    if found is None:
        raise ConfigError(where, shown(thing), f"expected a {registry.kind}: its name, settings or object")
    if "target" in found:
        kinds.bring([found["target"].rpartition(":")[0]])
    return found


def bring_classes(section: Section) -> None:
    """Register the class of a part, and the classes of parts within it, as plug-ins."""
    _bring_class(type(section))
    for key in type(section).model_fields:
        value = getattr(section, key)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Section):
                bring_classes(each)


def modules_of(section: Section) -> set[str]:
    """The modules of the class of a part, and of the classes of parts within it."""
    found = {type(section).__module__}
    for key in type(section).model_fields:
        value = getattr(section, key)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Section):
                found |= modules_of(each)
    return found


def _bring_class(part: type[Section]) -> None:
    if part.__module__.partition(".")[0] != plugins.__name__.partition(".")[0]:
        kinds.bring([plugins.target_of(part).rpartition(":")[0]])

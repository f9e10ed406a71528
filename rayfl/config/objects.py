"""Objects that Python users give in place of settings: parts, their classes, networks, arrays, functions.

Each is converted to equivalent settings, so that a run directory contains the whole run and a worker can
rebuild it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
    plain_settings: dict[str, Any] = {}
    for key, value in settings.items():
        field = Config.model_fields.get(key)
        choices = sections(field.annotation, field.metadata) if field else {}
        if isinstance(value, Section):
            bring_classes(value)
            plain_settings[key] = value.model_dump(mode="json")
        elif isinstance(choices, Registry) and not isinstance(value, (str, int, float, type(None))):
            plain_settings[key] = _settings_of(value, choices, key)
        else:
            plain_settings[key] = value
    return plain_settings


def _settings_of(thing: object, registry: Registry[Any], where: str) -> dict[str, Any]:
    if isinstance(thing, type) and issubclass(thing, registry.base):
        _bring_class(thing)
        return {"name": part_name(thing) or thing.__name__}
    try:
        settings = registry.settings_of(thing)
    except DataError as error:
        raise ConfigError(where, str(error).removeprefix(where).lstrip(": ")) from None
    if settings is None and isinstance(thing, Mapping):
        return dict(thing)
    if settings is None:
        raise ConfigError(where, shown(thing), f"expected a {registry.kind}: its name, settings or object")
    if "target" in settings:
        kinds.bring([settings["target"].rpartition(":")[0]])
    return settings


def bring_classes(section: Section) -> None:
    """Register the class of a part, and the classes of parts within it, as plug-ins."""
    for each in _classes_in(section):
        _bring_class(each)


def modules_of(section: Section) -> set[str]:
    """The modules of the class of a part, and of the classes of parts within it."""
    return {each.__module__ for each in _classes_in(section)}


def plugins_of(things: Iterable[object]) -> list[str]:
    """The plug-ins that define the classes of the parts among some objects, or the parts that are classes.

    Raises:
        ConfigError: if other processes could not import one.
    """
    classes: list[type[Section]] = []
    for thing in things:
        if isinstance(thing, Section):
            classes += _classes_in(thing)
        elif isinstance(thing, type) and issubclass(thing, Section):
            classes.append(thing)
    return list(dict.fromkeys(_plugin_of(each) for each in classes if _is_own(each)))


def _classes_in(section: Section) -> Iterator[type[Section]]:
    """The class of a part, and the classes of the parts within it."""
    yield type(section)
    for key in type(section).model_fields:
        value = getattr(section, key)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Section):
                yield from _classes_in(part)


def _is_own(part: type[Section]) -> bool:
    """Whether a class is the user's, and not rayfl's."""
    return part.__module__.partition(".")[0] != plugins.__name__.partition(".")[0]


def _plugin_of(part: type[Section]) -> str:
    return plugins.target_of(part).rpartition(":")[0]


def _bring_class(part: type[Section]) -> None:
    if _is_own(part):
        kinds.bring([_plugin_of(part)])

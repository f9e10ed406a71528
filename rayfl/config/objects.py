"""Objects that Python users give in place of settings: parts, their classes, networks, arrays, functions.

Each is converted to equivalent settings, so that a run directory contains the whole run and a worker can
rebuild it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rayfl import plugins
from rayfl.config import kinds
from rayfl.config.schema import Config
from rayfl.config.words import choices, shown
from rayfl.errors import ConfigError, DataError
from rayfl.settings import Registry, Section, part_name


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without objects; classes of the user's own become plug-ins.

    Parts and their classes are converted at any depth; networks, datasets, functions and the like only in
    place of a whole section.

    Raises:
        ConfigError: if an object does not fit its setting, or other processes could not create it.
    """
    plain_settings: dict[str, Any] = {}
    for key, value in settings.items():
        parts = choices(Config, key)
        with not_in_itself(str(key)):
            if isinstance(parts, Registry):
                value = _of_section(value, parts, key)
            plain_settings[key] = _without_parts(value)
    return plain_settings


@contextlib.contextmanager
def not_in_itself(where: str) -> Iterator[None]:
    """Refuse a value that contains itself when it is walked through.

    Raises:
        ConfigError
    """
    try:
        yield
    except RecursionError:
        raise ConfigError(where, "contains itself, or is nested too deeply") from None


def _without_parts(value: Any) -> Any:
    """A setting, with settings in place of the parts and classes of parts in it."""
    if isinstance(value, Section):
        bring_classes(value)
        return value.model_dump(mode="json")
    if isinstance(value, type) and issubclass(value, Section):
        _bring_class(value)
        return {"name": part_name(value) or value.__name__}
    if isinstance(value, Mapping):
        return {key: _without_parts(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_parts(each) for each in value]
    return value


def _of_section(thing: Any, registry: Registry[Any], where: str) -> Any:
    """What stands for a section: settings in place of a network, dataset, function or the like.

    Raises:
        ConfigError: if the section cannot be made of it.
    """
    is_class = isinstance(thing, type) and issubclass(thing, registry.base)
    if is_class or isinstance(thing, str | int | float | Section | None):
        return thing
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
    """The plug-ins that define the classes of the parts in some settings, at any depth.

    Args:
        things: settings: parts, classes of parts, and whatever contains them.

    Raises:
        ConfigError: if other processes could not import one.
    """
    return list(dict.fromkeys(_plugin_of(each) for each in _classes_among(things) if _is_own(each)))


def _classes_among(things: Iterable[object]) -> Iterator[type[Section]]:
    for thing in things:
        if isinstance(thing, Section):
            yield from _classes_in(thing)
        elif isinstance(thing, type) and issubclass(thing, Section):
            yield thing
        elif isinstance(thing, Mapping):
            yield from _classes_among(thing.values())
        elif isinstance(thing, list | tuple):
            yield from _classes_among(thing)


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

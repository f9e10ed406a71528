"""Objects in a study that is given from Python: its base, and parts among its settings.

Each is converted to equivalent settings, as :func:`rayfl.run` does, so that the copy of the study file
contains the whole study, and other processes can read it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from rayfl.config.objects import not_in_itself, plain, plugins_of
from rayfl.config.reading import own_settings
from rayfl.config.schema import Config
from rayfl.errors import ConfigError
from rayfl.settings import Section

_PLACES = (("settings",), ("methods", "*"), ("grid", "*", "*"), ("tune", "settings"))
"""Where a study, or a size of it, has settings; ``*`` is any name."""


def plain_content(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a study file, without objects.

    Args:
        content: as :func:`rayfl.study.run_study` takes it: the base may be a :class:`~rayfl.config.Config`;
            settings may be parts, their classes, networks, arrays and functions; lists may be NumPy arrays.

    Raises:
        ConfigError: if an object does not fit its setting, or other processes could not create it.
    """
    plugins: list[str] = []
    result = dict(content)
    if "base" in result:
        result["base"] = _plain_base(result["base"], plugins)
    for place in (*_PLACES, *(("sizes", "*", *place) for place in _PLACES)):
        result = _replaced(result, place, (), plugins)
    named = result.get("plugins", ())
    if isinstance(named, list | tuple):  # reading the study refuses anything else
        result["plugins"] = [*named, *(each for each in dict.fromkeys(plugins) if each not in named)]
    simple: dict[str, Any] = {}
    for key, value in result.items():
        with not_in_itself(str(key)):
            simple[key] = _simple(value)
    return simple


def _plain_base(base: Any, plugins: list[str]) -> Any:
    if isinstance(base, Config):
        plugins += plugins_of([base])
        return own_settings(base)
    _refuse_section(base, "base", "a preset, a file, settings or a rayfl.Config")
    return _converted(base, "base", plugins) if isinstance(base, Mapping) else base


def _replaced(node: Any, place: tuple[str, ...], path: tuple[str, ...], plugins: list[str]) -> Any:
    """A copy of a part of the content, without objects in the settings at ``place``.

    What has another form than a study file is left as it is: reading the study refuses it.
    """
    _refuse_section(node, ".".join(path), "settings; only the base may be a rayfl.Config")
    if not isinstance(node, Mapping):
        return node
    if not place:
        return _plain_settings(node, ".".join(path), plugins)
    first, *rest = place
    keys = [key for key in node if first in ("*", key)]
    inner = {key: _replaced(node[key], tuple(rest), (*path, str(key)), plugins) for key in keys}
    return {**node, **inner}


def _plain_settings(settings: Mapping[str, Any], where: str, plugins: list[str]) -> dict[str, Any]:
    """Settings without objects.

    A network, dataset or the like replaces all that the base or other settings say of its section: its own
    settings follow an empty section. A part has all settings of its section anyway, and a class is a name.
    """
    converted = _converted(settings, where, plugins)
    emptied: dict[str, Any] = {}
    for key, value in converted.items():
        given = settings[key]
        is_part = isinstance(given, Section) or (isinstance(given, type) and issubclass(given, Section))
        if isinstance(value, Mapping) and not (isinstance(given, Mapping) or is_part):
            emptied |= {key: {}, **{f"{key}.{name}": each for name, each in value.items()}}
    return {**emptied, **{key: value for key, value in converted.items() if key not in emptied}}


def _converted(settings: Mapping[str, Any], where: str, plugins: list[str]) -> dict[str, Any]:
    try:
        result = plain(settings)
        plugins += plugins_of(settings.values())
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.where}", error.what, error.remedy) from None
    return result


def _refuse_section(node: Any, where: str, expected: str) -> None:
    if isinstance(node, Section):
        raise ConfigError(where, f"got {type(node).__name__}(...)", f"expected {expected}")


def _simple(value: Any) -> Any:
    """Numbers and lists of NumPy, ranges and paths as YAML has them."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, range):
        return list(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {_simple(key): _simple(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_simple(each) for each in value]
    return value

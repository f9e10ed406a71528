"""Objects in a study that is given from Python: its base, and parts among its settings.

Each is converted to equivalent settings, as :func:`rayfl.run` does, so that the copy of the study file
contains the whole study, and other processes can read it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from rayfl.config.objects import plain, plugins_of
from rayfl.config.reading import own_settings
from rayfl.config.schema import Config
from rayfl.errors import ConfigError

_PLACES = (("settings",), ("methods", "*"), ("grid", "*", "*"))
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
    base = result.get("base")
    if isinstance(base, Config):
        result["base"] = own_settings(base)
        plugins += plugins_of([base])
    elif isinstance(base, Mapping):
        result["base"] = _plain_settings(base, "base", plugins)
    for place in (*_PLACES, *(("sizes", "*", *place) for place in _PLACES)):
        result = _replaced(result, place, (), plugins)
    named = result.get("plugins", ())
    if isinstance(named, list | tuple):  # reading the study refuses anything else
        result["plugins"] = [*named, *(each for each in dict.fromkeys(plugins) if each not in named)]
    return {key: _simple(value) for key, value in result.items()}


def _replaced(node: Any, place: tuple[str, ...], path: tuple[str, ...], plugins: list[str]) -> Any:
    """A copy of a part of the content, without objects in the settings at ``place``.

    What has another form than a study file is left as it is: reading the study refuses it.
    """
    if not isinstance(node, Mapping):
        return node
    if not place:
        return _plain_settings(node, ".".join(path), plugins)
    first, *rest = place
    keys = [key for key in node if first in ("*", key)]
    inner = {key: _replaced(node[key], tuple(rest), (*path, str(key)), plugins) for key in keys}
    return {**node, **inner}


def _plain_settings(settings: Mapping[str, Any], where: str, plugins: list[str]) -> dict[str, Any]:
    try:
        result = plain(settings)
        plugins += plugins_of(settings.values())
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.where}", error.what, error.remedy) from None
    return result


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

"""The settings that appear in a run's name: those that its user changed, in short form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rayfl.config.reading import item, load
from rayfl.config.schema import CHANGEABLE, USED_BY_SOME, Config
from rayfl.errors import ConfigError

_ALREADY_IN_NAME = frozenset({"name", "plugins", "algorithm", "algorithm.name", "seed"})
"""Settings that the name of a run directory contains anyway, or does not need."""

_MAX_LENGTH = 24
"""Characters of one name or value."""


def changes(
    config: Config, source: str | Path | Mapping[str, Any] | Config, named: Sequence[str]
) -> tuple[str, ...]:
    """The settings of a run that are not as in its preset or file: ``("alpha=0.3", "lr=0.01")``.

    Args:
        config: of the run.
        source: what the user named, as in :func:`~rayfl.config.load`.
        named: settings that were given on top of it, dotted; a value after ``=`` is ignored.

    Returns:
        One short text for each, fit for a file name, in the order of ``named``. Settings that a continued run
        may change, such as where to run and what to write, are left out.
    """
    paths = dict.fromkeys(text.partition("=")[0].strip() for text in named)
    run_settings = config.to_dict()
    try:
        source_settings = load(source).to_dict() if paths else {}
    except ConfigError:  # it may be incomplete without what was given on top of it
        source_settings = {}
    differing: dict[str, Any] = {}
    unused_sections = [section for section in USED_BY_SOME if section not in config.algorithm.takes]
    for path in paths:
        if path.partition(".")[0] not in (*CHANGEABLE, *unused_sections) and path not in _ALREADY_IN_NAME:
            differing.update(_differing_settings(path.removesuffix(".name"), run_settings, source_settings))
    short = {path: path.rpartition(".")[2] for path in differing}
    names = list(short.values())
    return tuple(
        f"{_file_safe(name if names.count(name) == 1 else path)}={_file_safe(_short_value(differing[path]))}"
        for path, name in short.items()
    )


def _differing_settings(
    path: str, run_settings: Mapping[str, Any], source_settings: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The settings at ``path`` or below that differ; a part with another name counts as one setting."""
    value, old_value = _value_at(run_settings, path), _value_at(source_settings, path)
    if value == old_value or (value is None and old_value is None):
        return
    inner = value if isinstance(value, Mapping) else None
    if inner is None or inner.get("name") != (
        old_value.get("name") if isinstance(old_value, Mapping) else None
    ):
        yield path, value
        return
    for key in inner:
        yield from _differing_settings(f"{path}.{key}", run_settings, source_settings)


def _value_at(settings: Any, path: str) -> Any:
    for key in path.split("."):
        settings = item(settings, key)
    return settings


def _short_value(value: Any) -> str:
    """``0.3``, ``lenet5`` for a part, ``5-4-1`` for a list; for a list of sections their number."""
    if isinstance(value, Mapping):
        return str(value.get("name", len(value)))
    if isinstance(value, (list, tuple)):
        plain = not any(isinstance(each, Mapping) for each in value)
        return "-".join(map(_short_value, value)) if plain else str(len(value))
    if isinstance(value, float):
        return f"{value:g}"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value).rstrip("/").rpartition("/")[2]  # of a path its last part


def _file_safe(text: str) -> str:
    """Text as part of a file name: ASCII, short, without slashes and spaces."""
    return re.sub(r"[^A-Za-z0-9._+]+", "-", text)[:_MAX_LENGTH].strip("-") or "-"

"""Which settings also apply to another algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import ValidationError

from rayfl.algorithms import ALGORITHMS, Algorithm
from rayfl.config.schema import USED_BY_SOME, Config

_SIGNATURE_SETTINGS = (
    "signature",
    "features",
    "embedding",
    "proximity",
    "grouping",
    "linkage",
    "threshold",
    "gamma",
)
"""Settings of ``clustering`` that belong to a kind of signature; a number of clusters does not."""


def algorithm_of(settings: Mapping[str, Any]) -> type[Algorithm] | None:
    """The algorithm that settings name, None if there is none of that name."""
    chosen = settings.get("algorithm") or "fedavg"
    name = chosen.get("name", "fedavg") if isinstance(chosen, Mapping) else chosen
    return ALGORITHMS.get(name) if isinstance(name, str) else None


def used(settings: Mapping[str, Any], algorithm: type[Algorithm] | None) -> dict[str, Any]:
    """Settings without those of sections that the algorithm does not use."""
    remaining = dict(settings)
    for section, keys in USED_BY_SOME.items():
        values = settings.get(section)
        if isinstance(values, Mapping) and algorithm is not None and section not in algorithm.takes:
            remaining[section] = {key: value for key, value in values.items() if key not in keys}
    return remaining


def transferred(
    settings: Mapping[str, Any], algorithm: type[Algorithm] | None, complete: bool = False
) -> dict[str, Any]:
    """Settings of a source without those that are for its own algorithm and mean nothing to another.

    Left out are:

    - sections that its own algorithm does not use;
    - its local objective, if the other algorithm has another one;
    - settings for comparing signatures, if the other algorithm uses another kind of signature (degrees
      between subspaces mean nothing to it) or another default for the setting (PCA+kM+HC has no encoder, FLT
      has one).

    Settings without an algorithm are for any.

    Args:
        settings: of the source.
        algorithm: the other one; None: unknown, and nothing is left out.
        complete: whether they are those of a :class:`Config`, which names all defaults, too: then values that
            are its own algorithm's defaults are left out.
    """
    own = algorithm_of(settings)
    if own is None or algorithm is None or algorithm is own or not settings.get("algorithm"):
        return dict(settings)
    result, before, after = used(settings, own), _defaults_of(own), _defaults_of(algorithm)
    if _local_name(result, before) == before["local"]["name"] != after["local"]["name"]:
        result.pop("local", None)
    first, second = (_default_clustering(each) for each in (own, algorithm))
    if isinstance(clustering := result.get("clustering"), Mapping) and first and second:
        same_signature = first["signature"]["name"] == second["signature"]["name"]
        shared = {key for key in _SIGNATURE_SETTINGS if same_signature and first.get(key) == second.get(key)}
        result["clustering"] = {
            key: clustering[key] for key in clustering if key not in _SIGNATURE_SETTINGS or key in shared
        }
    for section in _SECTIONS if complete else ():
        if isinstance(given := result.get(section), Mapping):
            old, new = before[section], after[section]
            changed = {key for key in given if key in old and old[key] != new.get(key)}
            result[section] = {
                key: value for key, value in given.items() if key not in changed or value != old[key]
            }
    return result


_SECTIONS = ("clustering", "hierarchy", "local")
"""Sections whose defaults depend on the algorithm."""


def _defaults_of(algorithm: type[Algorithm]) -> dict[str, dict[str, Any]]:
    """The settings that a config has if it names nothing but an algorithm, by section."""
    try:
        settings = _completed(algorithm)
    except ValidationError:  # it has a setting without a default
        local = algorithm.defaults.get("local", "sgd")
        local = {"name": "sgd", **local} if isinstance(local, Mapping) else {"name": local}
        settings = {**algorithm.defaults, "local": local}
    return {section: settings.get(section, {}) for section in _SECTIONS}


@cache
def _completed(algorithm: type[Algorithm]) -> dict[str, Any]:
    """All settings of a config with an algorithm's defaults.

    Raises:
        ValidationError: if the algorithm has a setting without a default.
    """
    name = algorithm.model_fields["name"].default
    return Config.model_validate({**algorithm.defaults, "algorithm": {"name": name}}).to_dict()


def _local_name(settings: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]]) -> object:
    local = settings.get("local")
    named = local.get("name") if isinstance(local, Mapping) else local
    return named or defaults["local"]["name"]


def _default_clustering(algorithm: type[Algorithm]) -> Mapping[str, Any]:
    """How an algorithm clusters by default; empty if its defaults name no signature."""
    defaults: Mapping[str, Any] = algorithm.defaults.get("clustering", {})
    return defaults if "signature" in defaults else {}

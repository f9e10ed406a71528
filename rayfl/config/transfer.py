"""Which settings also apply to another algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayfl.algorithms import ALGORITHMS, Algorithm
from rayfl.config.schema import USED_BY_SOME

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


def transferred(settings: Mapping[str, Any], algorithm: type[Algorithm] | None) -> dict[str, Any]:
    """Settings of a source without those that are for its own algorithm and mean nothing to another.

    Left out are settings for comparing signatures, if the other algorithm uses another kind of signature
    (degrees between subspaces mean nothing to it) or another default for the setting (PCA+kM+HC has no
    encoder, FLT has one); and momentum and an aggregation rule, if they make no sense with it.
    """
    result, own = dict(settings), algorithm_of(settings)
    if algorithm is None or algorithm is own:
        return result
    clustering, training = settings.get("clustering"), settings.get("training")
    first, second = (_default_clustering(each) for each in (own, algorithm))
    if isinstance(clustering, Mapping) and first and second:
        same_signature = first["signature"]["name"] == second["signature"]["name"]
        shared = {key for key in _SIGNATURE_SETTINGS if same_signature and first.get(key) == second.get(key)}
        result["clustering"] = {
            key: clustering[key] for key in clustering if key not in _SIGNATURE_SETTINGS or key in shared
        }
    if isinstance(training, Mapping) and not algorithm.takes_momentum:
        result["training"] = {key: training[key] for key in training if key != "momentum"}
    if not algorithm.takes_aggregation:
        result.pop("aggregation", None)
    return result


def _default_clustering(algorithm: type[Algorithm] | None) -> Mapping[str, Any]:
    """How an algorithm clusters by default; empty if its defaults name no signature."""
    defaults: Mapping[str, Any] = algorithm.defaults.get("clustering", {}) if algorithm else {}
    return defaults if "signature" in defaults else {}

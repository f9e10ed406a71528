"""The same settings for another algorithm, and the same data for several: comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayfl.algorithms import ALGORITHMS, Algorithm
from rayfl.config.reading import (
    algorithm_of,
    bring_plugins,
    load,
    names_first,
    read,
    resolve,
    used,
    with_overrides,
)
from rayfl.config.schema import Config

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


def variant(
    source: str | Path | Mapping[str, Any] | Config, overrides: Sequence[str], algorithm: str
) -> Config:
    """The same settings with another algorithm (and that algorithm's defaults), for comparisons.

    Some settings of the source are left out. Settings for comparing signatures are, if the other algorithm
    uses another kind of signature (degrees between subspaces mean nothing to it) or another default for the
    setting (PCA+kM+HC has no encoder, FLT has one). So are momentum and an aggregation rule, if they make no
    sense with it. ``overrides`` apply to every algorithm, but sections that it does not use are dropped, even
    if set by an override: a number of clusters is only for algorithms that cluster.

    Raises:
        ConfigError: as :func:`load`.
    """
    source_settings, overrides = read(source), names_first(overrides)
    bring_plugins(with_overrides(source_settings, overrides))
    settings = _transferred_settings(source_settings, algorithm)
    settings = with_overrides(settings, [*overrides, f"algorithm={algorithm}"])
    return resolve(used(settings, ALGORITHMS.get(algorithm)))


def on_the_same_data(configs: Sequence[Config]) -> list[Config]:
    """The configs of a comparison, with the same training samples held out for the server.

    Configs whose ``data.server_share`` is ``auto`` hold out as many as the one whose server needs most, so
    that their clients have the same samples.
    """
    n_held_out = max((config.public_samples for config in configs), default=0)
    return [
        load(config, [f"data.server_share={n_held_out}"])
        if n_held_out and config.data.server_share == "auto"
        else config
        for config in configs
    ]


def _transferred_settings(settings: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """The settings of a source that also apply to another algorithm."""
    transferred, old_method, new_method = dict(settings), algorithm_of(settings), ALGORITHMS.get(algorithm)
    if new_method is None:
        return transferred
    clustering, training = settings.get("clustering"), settings.get("training")
    first, second = (_default_clustering(each) for each in (old_method, new_method))
    if isinstance(clustering, Mapping) and first and second:
        same_signature = first["signature"]["name"] == second["signature"]["name"]
        shared = {key for key in _SIGNATURE_SETTINGS if same_signature and first.get(key) == second.get(key)}
        transferred["clustering"] = {
            key: clustering[key] for key in clustering if key not in _SIGNATURE_SETTINGS or key in shared
        }
    if isinstance(training, Mapping) and not new_method.takes_momentum:
        transferred["training"] = {key: training[key] for key in training if key != "momentum"}
    if not new_method.takes_aggregation:
        transferred.pop("aggregation", None)
    return transferred


def _default_clustering(algorithm: type[Algorithm] | None) -> Mapping[str, Any]:
    """How an algorithm clusters by default; empty if its defaults name no signature."""
    defaults: Mapping[str, Any] = algorithm.defaults.get("clustering", {}) if algorithm else {}
    return defaults if "signature" in defaults else {}

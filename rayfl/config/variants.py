"""The same settings for another algorithm, and the same data for several: comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayfl.algorithms import ALGORITHMS, Algorithm
from rayfl.config.reading import bring_plugins, load, names_first, read, resolve, with_overrides
from rayfl.config.schema import Config
from rayfl.config.transfer import transferred, used


def variant(
    source: str | Path | Mapping[str, Any] | Config, overrides: Sequence[str], algorithm: str
) -> Config:
    """The same settings with another algorithm (and that algorithm's defaults), for comparisons.

    Settings of the source that are for its own algorithm are left out, and so are momentum and an aggregation
    rule, if the other algorithm does not take them. ``overrides`` apply to every algorithm, but sections that
    it does not use are dropped, even if set by an override: a number of clusters is only for algorithms that
    cluster.

    Raises:
        ConfigError: as :func:`load`.
    """
    source_settings, overrides = read(source), names_first(overrides)
    bring_plugins(with_overrides(source_settings, overrides))
    other = ALGORITHMS.get(algorithm)
    settings = _taken(transferred(source_settings, other, isinstance(source, Config)), other)
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


def _taken(settings: Mapping[str, Any], algorithm: type[Algorithm] | None) -> dict[str, Any]:
    """Settings without momentum and an aggregation rule, if the algorithm does not take them."""
    taken, training = dict(settings), settings.get("training")
    if algorithm is not None and isinstance(training, Mapping) and not algorithm.takes_momentum:
        taken["training"] = {key: training[key] for key in training if key != "momentum"}
    if algorithm is not None and not algorithm.takes_aggregation:
        taken.pop("aggregation", None)
    return taken

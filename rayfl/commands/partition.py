"""``rayfl partition`` from Python: who holds which data, before any training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayfl import plugins
from rayfl.config import Config, load
from rayfl.config.reading import names_first
from rayfl.errors import ArgumentError
from rayfl.report.partition import PartitionView, views
from rayfl.units import counted


def partition(
    config: Config | str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    measures: Sequence[str] = (),
    compare: int = 100,
    stage: int = 1,
    **parts: Any,
) -> PartitionView:
    """Divide the data of a config among clients, and measure how different they are; train nothing.

    Args:
        config, overrides, parts: as for :func:`rayfl.run`.
        measures: names of the measures of heterogeneity; empty: all.
        compare: maximum number of clients to compare; if there are more, this many are drawn at random.
        stage: which division; the first is 1, and each round with events begins another.

    Raises:
        ConfigError: if a setting is wrong, or there is no such measure or stage.
        DataError: if the data do not exist, or cannot be divided as asked.
    """
    plugins.refuse_while_importing()
    found = views(load(config, names_first(overrides), **parts), measures, compare)
    if not 1 <= stage <= len(found):
        raise ArgumentError(
            "stage", f"got {stage}", f"this config has {counted(len(found), 'stage')}, from 1"
        )
    return found[stage - 1]

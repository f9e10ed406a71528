"""Calls of a local parameter server with arrays instead of named objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayfl.clients.partial import Partial
from rayfl.servers.lps import FACTS, MODEL, VALUES, CombineJob, LocalServer, Reduced, ReduceJob

Ranges = tuple[tuple[int, int], ...]


def reduce(
    shared: Ranges, common: Ranges, model: NDArray[np.float32], *partials: Partial
) -> tuple[NDArray[np.float32], Reduced]:
    """The next model from the blocks' sums, and what the GPS learns."""
    sums = {("sum", block): partial for block, partial in enumerate(partials)}
    found = LocalServer().reduce(ReduceJob(7, shared, common), {MODEL: model, **sums}).objects
    return found[MODEL], found[FACTS][7]


def combine(
    shared: Ranges,
    common: Ranges,
    models: Sequence[NDArray[np.float32]],
    rows: Sequence[NDArray[np.float32]],
    **job: Any,
) -> tuple[list[NDArray[np.float32]], dict[int, Reduced]]:
    """The next models from the blocks' trained rows, and what the GPS learns."""
    numbers, blocks = tuple(range(len(models))), tuple(range(len(rows)))
    usual = {"kept": None, "keep": np.zeros(len(models)), "statistics": 0}
    message = CombineJob(shared, common, numbers, blocks, **{**usual, **job})
    objects = {("model", k): model for k, model in enumerate(models)}
    found = LocalServer().combine(message, {**objects, **{("rows", b): r for b, r in enumerate(rows)}})
    return [found.objects["model", k] for k in numbers], found.objects[FACTS]


def install(common: Ranges, model: NDArray[np.float32], values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The model with what the GPS sends back."""
    new: NDArray[np.float32] = LocalServer().install(common, {MODEL: model, VALUES: values}).objects[MODEL]
    return new

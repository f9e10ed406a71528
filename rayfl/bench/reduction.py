"""What reaches one LPS and what it costs there: one sum per block, or one per group of blocks (a tree).

``python -m rayfl.bench.reduction --help`` measures one case in this process.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from rayfl.backend import Key
from rayfl.clients.partial import Partial, added
from rayfl.servers.lps import MODEL, LocalServer, ReduceJob

BLOCKS, PARAMETERS, FAN_IN = 6400, 10_000, 80


def run() -> list[dict[str, Any]]:
    """All blocks' sums at one LPS, and the same in a tree."""
    return [measured(BLOCKS, PARAMETERS, fan_in) for fan_in in (0, FAN_IN)]


def measured(blocks: int, parameters: int, fan_in: int) -> dict[str, Any]:
    """Reduce the sums of many blocks.

    Args:
        blocks: number of blocks.
        parameters: number of parameters of the model.
        fan_in: how many sums are added before they are sent; 0: none.

    Returns:
        Sums, megabytes and CPU seconds at the LPS; CPU seconds of the largest group at an actor; and how many
        parameters of the new model differ from those obtained by adding all sums at once.
    """
    parts = list(_sums(blocks, parameters))
    sums, group_seconds = parts, [0.0]
    if fan_in:
        sums = []
        for first in range(0, blocks, fan_in):
            start_time = time.process_time()
            sums.append(added(parts[first : first + fan_in]))
            group_seconds.append(time.process_time() - start_time)
    job, model = ReduceJob(0, ((0, parameters),), ()), np.zeros(parameters, np.float32)

    def reduce(some: list[Partial]) -> Any:
        objects: dict[Key, Any] = {MODEL: model, **{("sum", place): p for place, p in enumerate(some)}}
        return LocalServer().reduce(job, objects).objects[MODEL]

    start_time = time.process_time()
    new = reduce(sums)
    seconds = time.process_time() - start_time
    return {
        "blocks": blocks,
        "parameters": parameters,
        "fan_in": fan_in,
        "sums": len(sums),
        "megabytes": 8e-6 * parameters * len(sums),
        "lps_cpu": seconds,
        "actor_cpu": max(group_seconds),
        "numbers_that_differ": int((new != reduce(parts)).sum()),
    }


def _sums(blocks: int, parameters: int) -> Iterator[Partial]:
    rng = np.random.default_rng(0)
    for _ in range(blocks):
        yield Partial(20.0 * rng.standard_normal(parameters, np.float32).astype(np.float64), 20.0).cut()


def main() -> None:
    """Measure one case; print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--fan-in", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps(measured(options.blocks, options.parameters, options.fan_in)))


if __name__ == "__main__":
    main()

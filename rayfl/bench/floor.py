"""The floor of a round: the arithmetic that training needs, divided by the speed of the machine's matrix
products.
"""

from __future__ import annotations

import time
import warnings

import numpy as np
import torch

from rayfl.models import ModelSpec
from rayfl.training.batches import Batches

_SIDE = 768
"""Side of the matrices whose product is timed: three of them fit into the cache, and edge effects are
negligible.
"""


def peak(tries: int = 9, device: torch.device = torch.device("cpu")) -> float:  # noqa: B008 (constant)
    """Floating-point operations per second in float32 products of large matrices, of one core or of a GPU;
    the best of several tries.

    A product and a sum are two operations.
    """
    side, clock = (_SIDE, time.process_time) if device.type == "cpu" else (8 * _SIDE, time.perf_counter)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a, b = (
            torch.randn(side, side, generator=torch.Generator().manual_seed(seed)).to(device)
            for seed in (0, 1)
        )
        found = []
        for _ in range(tries):
            wait(device)
            begun = clock()
            for _ in range(4):
                torch.mm(a, b)
            wait(device)
            found.append((clock() - begun) / 4)
    finally:
        torch.set_num_threads(threads)
    return 2 * side**3 / min(found)


def wait(device: torch.device) -> None:
    """Until a GPU has done what it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def operations(spec: ModelSpec, batches: Batches, samples: int) -> float:
    """Operations of products and convolutions in one step, forward and backward, on this many samples.

    Everything else (activations, normalisation, the update) is not counted. The input needs no gradient.
    """
    from torch.utils.flop_counter import FlopCounterMode  # deferred: its imports are slow

    module = spec.build().to(batches.device).train()
    x, y = batches.train(np.arange(samples))
    with warnings.catch_warnings(), FlopCounterMode(display=False) as counter:
        warnings.simplefilter("ignore")  # the next line warns about missing GPUs
        with torch.backends.mkldnn.flags(enabled=False):
            spec.loss.mean(module(x), y).backward()  # type: ignore[no-untyped-call]
    return float(counter.get_total_flops())

"""The floor of a round: the arithmetic that training needs, divided by the speed of large matrix products or
convolutions on the same device.
"""

from __future__ import annotations

import time
import warnings
from functools import partial

import numpy as np
import torch

from rayfl.data import Samples
from rayfl.models import ModelSpec
from rayfl.training.batches import Batches

_SIDE = 768
"""Side of the matrices whose product is timed: three of them fit into the cache, and edge effects are
negligible. The convolution that is timed has a third as many channels.
"""


def peak(tries: int = 9, device: torch.device = torch.device("cpu")) -> float:  # noqa: B008 (constant)
    """Floating-point operations per second in float32, of one core or of a GPU, in the best of several tries
    of a product of large matrices or of a large convolution.

    Either may be faster: on AMD's processors PyTorch's convolutions are. A multiplication and an addition
    count as two operations.
    """
    side, clock = (_SIDE, time.process_time) if device.type == "cpu" else (8 * _SIDE, time.perf_counter)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        draw, channels = torch.Generator().manual_seed(0), side // 3
        a, b, images, kernels = (
            torch.randn(*shape, generator=draw).to(device)
            for shape in ((side, side), (side, side), (32, channels, 16, 16), (channels, channels, 3, 3))
        )
        speeds = []
        for _ in range(tries):
            for work, needed in (
                (partial(torch.mm, a, b), 2 * side**3),
                (partial(torch.conv2d, images, kernels, padding=1), 2 * 9 * channels * images.numel()),
            ):
                work()
                wait(device)
                start_time = clock()
                for _ in range(4):
                    work()
                wait(device)
                speeds.append(4 * needed / (clock() - start_time))
    finally:
        torch.set_num_threads(threads)
    return max(speeds)


def wait(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def operations(spec: ModelSpec, data: Samples, samples: int) -> float:
    """Operations of products and convolutions in one step, forward and backward, on this many samples.

    Everything else (activations, normalisation, the update) is not counted. The input needs no gradient. The
    operations are counted on the CPU, also for a GPU, because PyTorch's counter does not count a GPU's LSTM.
    """
    from torch.utils.flop_counter import FlopCounterMode  # deferred: its imports are slow

    module = spec.build().train()
    x, y = Batches(data, torch.device("cpu")).train(np.arange(samples))
    with warnings.catch_warnings(), FlopCounterMode(display=False) as counter:
        warnings.simplefilter("ignore")  # the next line warns about missing GPUs
        with torch.backends.mkldnn.flags(enabled=False):
            spec.loss.mean(module(x), y).backward()  # type: ignore[no-untyped-call]
    return float(counter.get_total_flops())

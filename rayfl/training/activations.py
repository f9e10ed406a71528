"""How much memory a batch takes: the numbers that a forward pass keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from rayfl.models import ModelSpec

MANY_ACTIVATIONS = 1 << 14
"""Activations per sample above which plain steps are faster for any number of clients: call overhead no
longer matters, and the activations of one client fill the cache."""


@contextmanager
def kept(weights: Iterable[torch.Tensor]) -> Iterator[dict[int, int]]:
    """Record what forward passes keep for the backward pass, apart from the weights.

    Yields:
        For each address in memory the number of elements that are kept there.
    """
    known = {weight.data_ptr() for weight in weights}
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in known:
            sizes[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield sizes


def per_sample(spec: ModelSpec) -> int:
    """Numbers per sample that a network's forward pass keeps; 0 for one whose forward pass fails.

    The run reports such a failure, with the client and the error.
    """
    module = spec.build().train()
    x, _ = spec.model.example(spec.shape, spec.classes, 2, np.random.default_rng(0))
    inputs = torch.from_numpy(x)
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), kept(module.parameters()) as sizes:
        try:
            output = module(inputs.long() if x.dtype == np.int32 else inputs)
        except Exception:  # of any kind, in a user's network
            return 0
        del output
    return sum(sizes.values()) // 2


def batch_bytes(numbers: int, trained: int, tested: int) -> float:
    """Estimated memory for the activations of a batch, the larger of training and testing.

    Training also has a gradient for each activation. Testing keeps nothing for later, but the largest layers
    follow one another, and convolutions gather their windows: ResNet-9 takes 0.8 times its activations.

    Args:
        numbers: per sample (:func:`per_sample`).
        trained: samples that are trained on at the same time, of all clients in a call.
        tested: samples in a forward pass of a test.
    """
    return 4.0 * numbers * max(2 * trained, tested)

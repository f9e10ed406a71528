"""Remarks about a network that the user should read before the results, one line each."""

from __future__ import annotations

import numpy as np

from rayfl.losses import CrossEntropy
from rayfl.models._own import OwnNetwork
from rayfl.models.flat import ModelSpec
from rayfl.plugins import is_own


def remarks(spec: ModelSpec) -> list[str]:
    """Lines about a network from outside of rayfl, for the start of a run."""
    ours = is_own(spec.model) and not isinstance(spec.model, OwnNetwork)
    if ours or type(spec.loss) is not CrossEntropy or spec.classes < 2:
        return []
    return _probability_lines(spec)


def _probability_lines(spec: ModelSpec) -> list[str]:
    """A line if the outputs are probabilities, for which gradients are small and accuracies stay low."""
    import torch

    x, _ = spec.model.example(spec.shape, spec.classes, 3, np.random.default_rng(0))
    inputs = torch.from_numpy(x).long() if x.dtype == np.int32 else torch.from_numpy(x).sigmoid()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = spec.build().eval()(inputs)
        sums = outputs.sum(1)
    except Exception:  # of any kind, in a user's network; what is wrong is said where clients train
        return []
    if (outputs < 0).any() or not torch.allclose(sums, torch.ones_like(sums), atol=1e-4):
        return []
    return [
        f"model: the network returns probabilities, but {spec.loss.name} computes the softmax itself, so "
        "training is slow; return the values before the softmax"
    ]

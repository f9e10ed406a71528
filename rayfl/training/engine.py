"""Training engines by name, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import nn

from rayfl.data import Samples
from rayfl.errors import ConfigError
from rayfl.models import ModelSpec
from rayfl.training.batched.engine import BatchedEngine
from rayfl.training.batched.network import Unsupported
from rayfl.training.batched.vmap import VmapNetwork
from rayfl.training.batches import Batches
from rayfl.training.loop import LoopEngine
from rayfl.training.work import NO_TERMS, Indices, LocalWork, Terms, TrainedBlock

TOLERANCE = 1e-3
"""How far an engine may be from the plain loop in the trial, relative to how far the model moved."""


class Engine(Protocol):
    """Trains the clients of a block, each from its own start model on its own samples.

    The result for a client depends on the work, the round, its id, its samples, its start model and its
    terms; up to rounding not on which other clients are in the block, nor on the engine.
    """

    module: nn.Module

    def train(
        self,
        work: LocalWork,
        round: int,
        clients: Sequence[int],
        indices: Indices,
        start: torch.Tensor,
        terms: Terms = NO_TERMS,
    ) -> TrainedBlock:
        """Train B clients.

        Args:
            work: what to do.
            round: the round (0-based): part of the key of all randomness.
            clients: their ids.
            indices: each client's training samples.
            start: start models ``(B, P)`` float32; overwritten with the trained models, except where a
                client failed.
            terms: what is a client's own.

        Raises:
            ValueError: if the terms are not of this block.
        """


ENGINES: dict[str, Callable[[ModelSpec, Batches, int], Engine]] = {
    "batched": BatchedEngine,
    "vmap": lambda spec, batches, seed: BatchedEngine(spec, batches, seed, VmapNetwork(spec)),
    "loop": LoopEngine,
}
"""From the fastest to the one that takes every model."""


def choose_engine(spec: ModelSpec, wanted: str = "auto") -> tuple[str, str]:
    """The engine to use: ``wanted``, or the first of :data:`ENGINES` that covers the model.

    In a short trial it must equal the plain loop. The choice depends on the model alone, never on timings,
    so that it is the same in every run.

    Returns:
        Its name, and why it was chosen, in a line.

    Raises:
        ConfigError: if the wanted engine does not cover the model.
    """
    if wanted == "loop":
        return wanted, "as set"
    reasons = []
    for name in ENGINES if wanted == "auto" else (wanted,):
        if name == "loop":
            break
        try:
            gap = _trial(spec, ENGINES[name])
        except Unsupported as problem:
            reasons.append(f"not {name}: {problem}")
        except Exception as problem:  # a model that torch.func cannot vectorise fails in its own ways
            reasons.append(f"not {name}: {type(problem).__name__}: {problem}".split("\n")[0])
        else:
            if gap <= TOLERANCE:
                return name, "; ".join(["equals the plain loop in a trial", *reasons])
            reasons.append(f"not {name}: {gap:.0e} away from the plain loop in a trial")
    if wanted != "auto":
        remedy = "training.engine=auto takes one that does"
        raise ConfigError("training.engine", f"{wanted} does not cover this model, {reasons[0]}", remedy)
    return "loop", "; ".join(reasons)


def _trial(spec: ModelSpec, make: Callable[[ModelSpec, Batches, int], Engine]) -> float:
    """Two clients, a step or two each: the gap to the plain loop, relative to how far the models moved."""
    rng = np.random.default_rng(0)
    x, targets = spec.model.example(spec.shape, spec.classes, 7, rng)
    labels = np.zeros(7, np.int64)
    samples = Samples("trial", x, labels, x, labels, 1, targets_train=targets, targets_test=targets)
    batches = Batches(samples, torch.device("cpu"))
    work = LocalWork(epochs=1, batch_size=3, lr=1e-2)
    start = torch.from_numpy(np.tile(spec.initial(), (2, 1)))
    ends = [
        engine(spec, batches, 0).train(work, 0, [0, 1], [np.arange(5), np.arange(5, 7)], start.clone())
        for engine in (make, LoopEngine)
    ]
    for end in ends:
        if end.failures:
            raise Unsupported(next(iter(end.failures.values())).strip().splitlines()[-1])
    moved = float((ends[1].rows - start).norm())
    return float((ends[0].rows - ends[1].rows).norm()) / max(moved, 1e-12)

"""How far float32 may take training from the truth: the bound that all comparisons of engines share.

The truth is the plain loop in float64. Every engine (the loop in float32 too) adds the same products in an
order of its own, which the CPU decides with it: the width of its vectors, fused products, the library. A sum
of n products, in any order, is off by at most ``n u sum |a b|`` with the unit roundoff ``u = 2^-24``, and by
about ``sqrt(n) u`` times its root mean square, because roundings have both signs (Higham 2002, section 3.1;
Higham and Mary 2019). What such errors do to the end of training depends on the network, the data and the
steps, but not on the CPU. So it is computed (Monte Carlo arithmetic, Parker 1997): the loop runs in float64
again, and after every layer, in both directions, and in the gradient of every parameter, noise of

    ``LEVEL u sqrt(n)`` times the root mean square of the tensor, uniform, n its longest sum,

is added. Depth, steps, momentum, cancellation and normalisation act on the noise as on roundings. So do
kinks: a ReLU near zero, or two nearly equal pixels of a window, may decide otherwise, and then a gradient
takes another way, however small the rounding was. That is why LEVEL is far above 1, and why the noise is used
twice, with both signs: of any such decision that rounding could change, one of the two runs changes it, but
for one in LEVEL (where the noise itself is smaller than a rounding).

Allowed is twice the larger of the two distances from the truth, and what is not in the noise: each step
rounds each weight (``4 u sqrt(steps) |w|``), and the loss is a difference of outputs z
(``LEVEL u sqrt(n) max |z|``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rayfl.models import ModelSpec
from rayfl.training import NO_TERMS, LocalWork, Terms, TrainedBlock
from rayfl.training.batches import Batches
from rayfl.training.loop import LoopEngine
from rayfl.training.work import Indices

UNIT = 2.0**-24
LEVEL = 8.0
SHARP = 0.03
"""A bound above this share of the movement would catch too little: then a case has to be made milder."""


class ExactLoop(LoopEngine):
    """The plain loop in float64, with noise of ``level`` times what float32 is expected to do."""

    def __init__(self, spec: ModelSpec, batches: Batches, seed: int, level: float = 0.0) -> None:
        super().__init__(spec, batches, seed)
        self.module, self.batches = self.module.double(), _Doubles(batches)
        self.level, self.longest, self.largest = level, 1, 0.0
        self._lengths: dict[nn.Module, int] = {}
        self._generator = torch.Generator().manual_seed(0)
        for leaf in self.module.modules():
            if not list(leaf.children()):
                leaf.register_forward_hook(self._after)
                for parameter in leaf.parameters():
                    parameter.register_hook(lambda g, leaf=leaf: self._disturbed(g, self._lengths[leaf]))
        self.module.register_forward_hook(self._outputs)

    def _after(self, leaf: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        n = self._lengths[leaf] = longest_sum(leaf, inputs[0], output)
        self.longest = max(self.longest, n)
        if n == 1:  # nothing is added up
            return output
        output = self._disturbed(output, n)
        if output.requires_grad:  # not where nothing below learns
            output.register_hook(lambda g: self._disturbed(g, n))
        return output

    def _disturbed(self, x: torch.Tensor, n: int) -> torch.Tensor:
        if not self.level:
            return x
        noise = torch.rand(x.shape, dtype=x.dtype, generator=self._generator) * 2 - 1
        return x + noise * (self.level * UNIT * math.sqrt(n) * x.detach().square().mean().sqrt())

    def _outputs(self, module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        self.largest = max(self.largest, float(output.detach().abs().max()))


def longest_sum(leaf: nn.Module, x: torch.Tensor, y: torch.Tensor) -> int:
    """Terms of the longest sum in the outputs of a layer, or in its gradients."""
    if isinstance(leaf, nn.LSTM):
        return (leaf.input_size + leaf.hidden_size) * x.shape[1] * len(x)
    if isinstance(leaf, nn.Linear | nn.Conv2d):
        rows, columns = leaf.weight.shape[:2]
        window = leaf.weight[0, 0].numel()
        return max(columns * window, rows * window, y.numel() // rows)
    if isinstance(leaf, nn.GroupNorm):
        return max(x[0].numel() // leaf.num_groups, x.numel() // leaf.num_channels)
    if isinstance(leaf, nn.BatchNorm1d | nn.BatchNorm2d):
        return x.numel() // leaf.num_features
    if isinstance(leaf, nn.LayerNorm):
        return max(x.shape[-1], x.numel() // x.shape[-1])
    if isinstance(leaf, nn.AvgPool2d | nn.AdaptiveAvgPool2d):
        return max(1, x.numel() // y.numel())
    return x.numel() if isinstance(leaf, nn.Embedding) else 1


class _Doubles:
    """Batches in float64."""

    def __init__(self, batches: Batches) -> None:
        self._batches, self.device = batches, batches.device

    def train(self, indices: NDArray[np.integer]) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self._batches.train(indices)
        return x.double() if x.is_floating_point() else x, y.double() if y.is_floating_point() else y


@dataclass(frozen=True)
class Truth:
    """The end of training in float64, and how far an engine may be from it.

    Attributes:
        block: the truth (its rows rounded to float32).
        moved: how far each model moved ``(B,)``.
        rows, snapshots: distances allowed of each model ``(B,)``.
        losses: allowed of each loss ``(B,)``.
    """

    block: TrainedBlock
    moved: NDArray[np.float64]
    rows: NDArray[np.float64]
    snapshots: NDArray[np.float64]
    losses: NDArray[np.float64]

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        batches: Batches,
        seed: int,
        work: LocalWork,
        round: int,
        clients: Sequence[int],
        indices: Indices,
        start: torch.Tensor,
        terms: Terms = NO_TERMS,
    ) -> Truth:
        """The arguments are those of an engine and of its ``train``; ``start`` and ``terms`` on the CPU."""
        engines = [ExactLoop(spec, batches, seed, level) for level in (0.0, LEVEL, -LEVEL)]
        block, *noisy = (e.train(work, round, clients, indices, start, terms) for e in engines)
        assert not block.failures, block.failures
        steps = np.sqrt(block.steps + 1.0)
        first = start.clone()
        if terms.mask is not None:
            first[:, : spec.n_parameters] *= terms.mask[:, : spec.n_parameters]
        moved = distances(block.rows, first)
        stored = 4 * UNIT * steps * distances(block.rows, torch.zeros_like(first))
        rows = 2 * np.max([distances(b.rows, block.rows) for b in noisy], axis=0) + stored
        snapshots = np.zeros(len(rows))
        if block.snapshots is not None:
            gaps = [distances(b.snapshots, block.snapshots) for b in noisy if b.snapshots is not None]
            snapshots = 2 * np.max(gaps, axis=0) + stored
        losses = 2 * np.max([np.abs(b.losses - block.losses) for b in noisy], axis=0)
        losses += LEVEL * UNIT * math.sqrt(engines[0].longest) * engines[0].largest
        assert (block.steps[moved == 0] == 0).all()
        assert (rows <= SHARP * moved)[moved > 0].all(), f"not sharp: {(rows / moved).tolist()}"
        return cls(block, moved, rows, snapshots, losses)

    def check(self, other: TrainedBlock) -> None:
        """An engine's result is as near as float32 can be held to.

        Raises:
            AssertionError: if it is not.
        """
        assert not other.failures
        assert other.steps.tolist() == self.block.steps.tolist()
        assert_within(np.abs(other.losses - self.block.losses), self.losses, "losses")
        assert_within(distances(other.rows, self.block.rows), self.rows, "models")
        assert (other.snapshots is None) == (self.block.snapshots is None)
        if other.snapshots is not None and self.block.snapshots is not None:
            assert_within(distances(other.snapshots, self.block.snapshots), self.snapshots, "snapshots")


def rounding(terms: int, steps: int = 1, size: float = 1.0) -> float:
    """What float32 may do to numbers of about ``size`` in so many steps whose sums have so many terms.

    For small convex problems, where a later step does not enlarge the errors of an earlier one.
    """
    return LEVEL * UNIT * math.sqrt(terms) * steps * size


def sum_error(terms: int, magnitude: Any) -> Any:
    """The most that sums of n products can be off, in any order: ``n u sum |a b|`` (Higham 2002, 3.1).

    Args:
        terms: n; every rounding of what the sum is scaled by or added to counts as one more.
        magnitude: ``sum |a b|``, in float64.
    """
    return terms * UNIT / (1 - terms * UNIT) * magnitude


def distances(one: torch.Tensor, other: torch.Tensor) -> NDArray[np.float64]:
    """Between the rows of two blocks ``(B, P)``: ``(B,)``."""
    gaps: NDArray[np.float64] = (one.detach().cpu().double() - other.cpu().double()).norm(dim=1).numpy()
    return gaps


def assert_within(gaps: Any, allowed: Any, what: str = "values") -> None:
    """No gap is above what is allowed; NaN is."""
    share = np.asarray(gaps) / np.maximum(np.asarray(allowed), np.finfo(np.float64).tiny)
    assert np.all(share <= 1), f"{what}: {np.nanmax(share):.3g} times what float32 may be off"

"""What a block of clients is asked to do, and what it returns: plain data, no behaviour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from rayfl.data import Ragged
from rayfl.errors import type_of

if TYPE_CHECKING:
    import torch

    from rayfl.training.guides import Guides

Segments = tuple[tuple[int, int], ...]
"""Ranges ``(start, stop)`` of the flat parameter vector, ascending and disjoint."""

Indices = Sequence[NDArray[np.integer]] | Ragged
"""The training samples of each client of a block."""

Visits = Sequence[NDArray[np.intp]] | NDArray[np.intp]
"""The positions among a client's samples that each local step visits: arrays ``(b,)``, or ``(T, b)``."""

_Count = TypeVar("_Count", int, NDArray[np.int64])


@dataclass(frozen=True)
class LocalWork:
    """The local work of a round, the same for all its clients.

    Attributes:
        epochs: E.
        batch_size: B.
        lr: eta of this round.
        momentum, weight_decay: of SGD.
        personal: the part of the model that stays with the client (client state): it starts a round from the
            client's own values instead of the downloaded ones, and is never sent. Empty for FedAvg,
            everything for SOLO, the first layers for LG-FedAvg.
        proximal: mu of FedProx: ``(mu / 2) ||w - w_start||^2`` is added to the local loss.
        inner_lr: alpha of first-order Per-FedAvg (Fallah et al. 2020); 0 for plain SGD. A local step takes
            two batches: ``w' = w - alpha grad(w; batch 1)``, then ``w <- w - eta grad(w'; batch 2)``.
            Consecutive batches of an epoch are paired, an odd last one with the epoch's first. Weight decay,
            the proximal term and an offset act on the second, at w; the losses are those of batch 2 at w'.
        lr_alpha, lr_power: the learning rate inside a round, ``eta (1 + lr_alpha i)^-lr_power`` for the
            local steps i = 0, 1, ... (Vahidian's thesis, ch. 2).
        snapshot_epoch: keep each client's model after this many epochs; 0: do not.
        frozen: the part of the model whose parameters are not trained; whole tensors. Running statistics of
            BatchNorm in it are still updated.
        phase: index (0-based) of this training in the round, for clients that train several times in a round;
            each time they shuffle differently.

    Raises:
        ValueError: for ``inner_lr`` together with ``momentum``: momentum over gradients at two points is not
            defined. For negative or infinite numbers.
    """

    epochs: int
    batch_size: int
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    personal: Segments = ()
    proximal: float = 0.0
    inner_lr: float = 0.0
    lr_alpha: float = 0.0
    lr_power: float = 1.0
    snapshot_epoch: int = 0
    frozen: Segments = ()
    phase: int = 0

    def __post_init__(self) -> None:
        if self.inner_lr and self.momentum:
            raise ValueError("first-order Per-FedAvg (inner_lr) takes no momentum")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not (value >= least and math.isfinite(value)):
                raise ValueError(f"{name} is {value}; expected a finite number, {least} or more")
            if name in _WHOLE and value != int(value):
                raise ValueError(f"{name} is {value}; expected a whole number")

    @property
    def batches_a_step(self) -> int:
        """Batches of samples that a local step takes: two for Per-FedAvg."""
        return 2 if self.inner_lr else 1

    def rate(self, step: int) -> float:
        """The learning rate of local step ``step`` (0-based)."""
        return self.lr * (1 + self.lr_alpha * step) ** -self.lr_power if self.lr_alpha else self.lr

    def steps_an_epoch(self, samples: _Count) -> _Count:
        """Local steps per epoch for the given number of samples, of one client or of each."""
        return -(-samples // (self.batch_size * self.batches_a_step))

    def snapshot_step(self, samples: int, steps: int) -> int:
        """After how many of its ``steps`` local steps a client's model is kept; 0 for never.

        An epoch has as many steps as shuffled batches would take, even if the client visits other samples.
        """
        return min(steps, self.snapshot_epoch * self.steps_an_epoch(samples))


_LEAST = {
    "epochs": 0, "batch_size": 1, "lr": 0, "momentum": 0, "weight_decay": 0, "proximal": 0, "inner_lr": 0,
    "lr_alpha": 0, "lr_power": 0, "snapshot_epoch": 0, "phase": 0,
}  # fmt: skip
"""The least values of the settings of :class:`LocalWork`."""

_WHOLE = ("epochs", "batch_size", "snapshot_epoch", "phase")


@dataclass(frozen=True)
class Terms:
    """Per-client terms of the local work of a round, one row for each client of the block; None: unused.

    Attributes:
        offset: ``(B, P)``, added to every gradient: ``c - c_i`` of SCAFFOLD. Entries of buffers (running
            statistics of BatchNorm) are ignored.
        mask: ``(B, P)``; where it is 0 the weight is held at zero, in the start model and after every step.
            Entries of buffers are ignored.
        visits: for each client the positions among its samples that every local step visits (every batch,
            for Per-FedAvg), instead of shuffled epochs; ``LocalWork.epochs`` is then ignored.
            Clients may differ in their number of steps; batches may have any length above zero. A client
            whose batches are equally long may give one array ``(T, b)``.
        guides: other models with which the client's is compared in its loss.
    """

    offset: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    visits: Sequence[Visits] | NDArray[np.intp] | None = None
    guides: Guides | None = None

    def check(self, start: torch.Tensor) -> None:
        """Check that the terms fit the block whose start models ``(B, P)`` are given.

        Raises:
            ValueError: if a shape does not fit.
        """
        import torch  # takes seconds, and many import this module

        guides = () if self.guides is None else self.guides.models
        for name, values in (("offset", self.offset), ("mask", self.mask), *(("guides", m) for m in guides)):
            if values is not None and not (isinstance(values, torch.Tensor) and values.shape == start.shape):
                raise ValueError(f"{name}: a tensor {tuple(start.shape)} is needed, not {type_of(values)}")
        if self.visits is not None and len(self.visits) != len(start):
            raise ValueError(f"visits: of {len(self.visits)} clients; {len(start)} are needed")

    def check_finite(self) -> None:
        """Check that offsets are numbers.

        Raises:
            ValueError: if one is not finite.
        """
        if self.offset is not None and not self.offset.isfinite().all():
            raise ValueError("offset: has numbers that are not finite")


NO_TERMS = Terms()
"""The terms of FedAvg: none."""


@dataclass(frozen=True)
class TrainedBlock:
    """The outcome of training a block of B clients.

    Attributes:
        rows: the trained models, ``(B, P)`` float32: the block's rows of W.
        losses: mean training loss of each client over its local steps (weighted by batch size), ``(B,)``.
        steps: local optimizer steps tau_i of each client, ``(B,)``.
        failures: position in the block -> traceback, for clients whose training raised.
        snapshots: the models after ``LocalWork.snapshot_epoch`` epochs, ``(B, P)``; a client that trains
            fewer epochs has its last model there, one that failed its start model. None if not requested.
    """

    rows: torch.Tensor
    losses: NDArray[np.float64]
    steps: NDArray[np.int64]
    failures: dict[int, str]
    snapshots: torch.Tensor | None = None


def gather(vector: torch.Tensor, segments: Segments) -> torch.Tensor:
    """The values of ``segments`` in order: ``(..., P)`` -> ``(..., S)``."""
    import torch

    if not segments:
        return vector[..., :0]
    return torch.cat([vector[..., a:b] for a, b in segments], dim=-1)


def scatter_(vector: torch.Tensor, segments: Segments, values: torch.Tensor) -> None:
    """Put ``values`` ``(..., S)`` into the ``segments`` of ``vector`` ``(..., P)``, in place."""
    start = 0
    for a, b in segments:
        vector[..., a:b] = values[..., start : start + b - a]
        start += b - a


def length(segments: Segments) -> int:
    """S, how many parameters the segments cover."""
    return sum(b - a for a, b in segments)


def length_from(segments: Segments, place: int) -> int:
    """How many of the values that the segments cover lie at ``place`` or after it."""
    return sum(max(0, b - max(a, place)) for a, b in segments)


def complement(segments: Segments, size: int) -> Segments:
    """The ranges of ``range(size)`` that ``segments`` leave out."""
    edges = [0, *(edge for segment in segments for edge in segment), size]
    return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)


DIVERGED = 1e12
"""A client has diverged if its mean loss or the length of its model is above this, or is NaN.

All engines use this rule. Near the largest float32, 3e38, the order of operations decides what overflows, and
squares overflow from 1e19 on. The bound is low enough that engines, which agree up to rounding, agree on
which clients have diverged, and high enough that no model that learns comes near it.
"""


def check_diverged(loss: float, length: float) -> None:
    """Raise if a client has diverged (:data:`DIVERGED`), so that its model does not enter the average.

    Args:
        loss: a client's mean training loss.
        length: Euclidean norm of its trained model, including buffers.

    Raises:
        FloatingPointError: if the client has diverged.
    """
    for quantity, value in (("training loss", loss), ("length of the trained model", length)):
        if not value <= DIVERGED:  # NaN is not
            raise FloatingPointError(f"the {quantity} is {value:.3g}; a smaller training.lr may help")


def check_visits(visits: Visits, samples: int) -> None:
    """Refuse visits to samples that a client does not have.

    Args:
        visits: of one client.
        samples: how many samples this client has.

    Raises:
        IndexError: if a position is not below ``samples``, or a batch is empty.
    """
    is_array = isinstance(visits, np.ndarray) and visits.size > 0
    for batch in [np.ravel(visits)] if is_array else visits:
        if len(batch) == 0:
            raise IndexError("visits: a batch without samples")
        if batch.min() < 0 or batch.max() >= samples:
            raise IndexError(f"visits: positions from {batch.min()} to {batch.max()} of {samples} samples")

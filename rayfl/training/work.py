"""What a block of clients is asked to do, and what it answers: plain data, no behaviour."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Segments = tuple[tuple[int, int], ...]
"""Ranges ``(start, stop)`` of the flat parameter vector, ascending and disjoint."""


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
    """

    epochs: int
    batch_size: int
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    personal: Segments = ()


@dataclass(frozen=True)
class TrainedBlock:
    """The outcome of training a block of B clients.

    Attributes:
        rows: the trained models, ``(B, P)`` float32: the block's rows of W.
        losses: mean training loss of each client over its local steps (weighted by batch size), ``(B,)``.
        steps: local optimizer steps tau_i of each client, ``(B,)``.
        failures: position in the block -> traceback, for clients whose training raised.
    """

    rows: torch.Tensor
    losses: NDArray[np.float64]
    steps: NDArray[np.int64]
    failures: dict[int, str]


def gather(vector: torch.Tensor, segments: Segments) -> torch.Tensor:
    """The values of ``segments`` in order: ``(..., P)`` -> ``(..., S)``."""
    if not segments:
        return vector[..., :0]
    return torch.cat([vector[..., a:b] for a, b in segments], dim=-1)


def scatter_(vector: torch.Tensor, segments: Segments, values: torch.Tensor) -> None:
    """Put ``values`` ``(..., S)`` into the ``segments`` of ``vector`` ``(..., P)``, in place."""
    at = 0
    for a, b in segments:
        vector[..., a:b] = values[..., at : at + b - a]
        at += b - a


def length(segments: Segments) -> int:
    """S, how many parameters the segments cover."""
    return sum(b - a for a, b in segments)


def complement(segments: Segments, size: int) -> Segments:
    """The ranges of ``range(size)`` that ``segments`` leave out."""
    edges = [0, *(edge for segment in segments for edge in segment), size]
    return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)


def check_finite(loss: float, model: bool) -> None:
    """Refuse what diverged, before it spoils everybody's average.

    Args:
        loss: a client's mean training loss.
        model: whether all numbers of its trained model are finite.

    Raises:
        FloatingPointError: if one of them is not.
    """
    if not math.isfinite(loss):
        raise FloatingPointError(f"the training loss is {loss}; a smaller training.lr may help")
    if not model:
        raise FloatingPointError("the trained model is not finite; a smaller training.lr may help")

"""The messages between the driver, the local parameter servers and the client actors: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rayfl.models import ModelSpec
from rayfl.signatures.base import Signature
from rayfl.signatures.features.base import Fitted
from rayfl.training import LocalWork


@dataclass(frozen=True)
class HostSpec:
    """What a client actor needs to know once.

    Attributes:
        spec: the model's flat layout.
        seed: the run's seed.
        engine: name of the training engine.
        why: why that one, in a line.
        device: ``cpu`` or ``cuda``.
        gpu_fraction: the share of the GPU's memory that the actor may use; 0 for no cap.
    """

    spec: ModelSpec
    seed: int
    engine: str
    why: str = ""
    device: str = "cpu"
    gpu_fraction: float = 0.0


@dataclass(frozen=True)
class TrainJob:
    """Train a block of B clients and multiply its part of ``A W``.

    The start models, and after them the objects with client state, travel beside the job by reference.

    Attributes:
        round: 0-based.
        clients: ids ``(B,)``.
        start: for each client the position of its start model among the references, ``(B,)``.
        states: for each client (position among the references, row) of its state, or None if it has none yet;
            empty for methods without client state.
        work: the local work.
        rows: numbers of the output models that the block contributes to, ``(R,)``.
        weights: their part of A, ``(R, B)``, not normalised.
    """

    round: int
    clients: NDArray[np.int64]
    start: NDArray[np.int64]
    states: tuple[tuple[int, int] | None, ...]
    work: LocalWork
    rows: NDArray[np.int64]
    weights: NDArray[np.float64]


@dataclass(frozen=True)
class TrainReport:
    """What the driver learns about a trained block: never a model.

    Attributes:
        losses: mean local training loss of each client, ``(B,)``.
        steps: local steps of each client, ``(B,)``.
        failures: client id -> traceback.
        seconds: time spent in the job.
        pid: the process that did it.
    """

    losses: NDArray[np.float64]
    steps: NDArray[np.int64]
    failures: dict[int, str]
    seconds: float
    pid: int


@dataclass(frozen=True)
class SignJob:
    """Ask a block of clients for their signatures, or for their relations to all others.

    Attributes:
        clients: ids ``(B,)``.
        signature: what they compute.
        features: the fitted feature map Phi that the server sent to everybody.
        seed: the run's seed, for signatures that draw random numbers.
    """

    clients: NDArray[np.int64]
    signature: Signature
    features: Fitted
    seed: int


@dataclass(frozen=True)
class EvalItem:
    """One forward pass: a model over a slice of the test samples.

    Attributes:
        model: position of the model among the references.
        state: (position, row) of the client state that overlays it, or None.
        samples: ids of test samples, ``(n,)``.
    """

    model: int
    state: tuple[int, int] | None
    samples: NDArray[np.int32]


@dataclass(frozen=True)
class EvalJob:
    """A few forward passes for one actor."""

    items: tuple[EvalItem, ...]
    batch_size: int
    personal: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class EvalReport:
    """For every item in order, how many predictions of each sample were right (of one, or of one a word), and
    the sum of their cross-entropies (natural log)."""

    correct: list[NDArray[np.int64]] = field(default_factory=list)
    loss: list[NDArray[np.float32]] = field(default_factory=list)

"""The messages between the driver, the local parameter servers and the client actors: plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rayfl.backend import Key
from rayfl.clients.partial import PIECE
from rayfl.clients.state import StateLayout, StateRow
from rayfl.clustering.permutation import permute, restore
from rayfl.data.base import Part, TestedOn
from rayfl.errors import RayflError
from rayfl.evaluation import Score, Scores
from rayfl.local import LocalObjective
from rayfl.local.sgd import SGD
from rayfl.models import ModelSpec
from rayfl.ordering import Ordering
from rayfl.ordering.shuffled import Shuffled
from rayfl.signatures.base import Signature
from rayfl.signatures.features.base import Fitted
from rayfl.training import LocalWork
from rayfl.training.precision import Precision

Permutation = Callable[[NDArray[np.float32], int], NDArray[np.float32]]
"""Permutes the last axis, given a seed."""


@dataclass(frozen=True)
class HostSpec:
    """What a client actor needs to know once.

    Attributes:
        spec: the model's flat layout.
        seed: the run's seed.
        engine: name of the training engine.
        why: the reason for that engine, in one line.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU if the actor gets one.
        gpu_fraction: the share of the GPU's memory that the actor may use; 0 for no cap.
        permutes: whether clients permute all that they send, and unpermute what they receive.
        cuda_graphs: whether steps may be replayed as CUDA graphs, on a GPU.
        precision: of forward and backward passes in training.
        shards: maximum number of shards of a model at the servers, see
            :meth:`~rayfl.clients.ranges.Ranges.of`.
    """

    spec: ModelSpec
    seed: int
    engine: str
    why: str = ""
    device: str = "cpu"
    gpu_fraction: float = 0.0
    permutes: bool = False
    cuda_graphs: bool = True
    precision: Precision = "float32"
    shards: int = 1

    def permute(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Models ``(..., P)`` as the servers see them, permuted; running statistics stay after the
        parameters.
        """
        return self._permuted(permute, rows) if self.permutes else rows

    def unpermute(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """The inverse of :meth:`permute`; models ``(..., P)``."""
        return self._permuted(restore, rows) if self.permutes else rows

    def _permuted(self, permutation: Permutation, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        n = self.spec.n_parameters
        if n == self.spec.P:
            return permutation(rows, self.seed)
        return np.concatenate(
            [permutation(rows[..., :n], self.seed), permutation(rows[..., n:], self.seed)], axis=-1
        )


SIGNATURES: Key = ("signatures", 0)
"""The signatures of a block's clients, a list of arrays."""

RELATIONS: Key = ("relations", 0)
"""The relations of a block's clients to all others ``(B, N)``."""


@dataclass(frozen=True)
class BlockMixing:
    """A block's part of A.

    Attributes:
        rows: the output models that it contributes to ``(R,)``, ascending.
        weights: of the block's clients in each ``(R, B)``, not normalised.
        keep: the weight of the old models that the clients keep ``(R, B)``; None for none.
    """

    rows: NDArray[np.int64]
    weights: NDArray[np.float64]
    keep: NDArray[np.float64] | None

    def take(self, clients: slice) -> BlockMixing:
        """The part for some of the block's clients."""
        keep = None if self.keep is None else self.keep[:, clients]
        return BlockMixing(self.rows, self.weights[:, clients], keep)


@dataclass(frozen=True)
class Mixture:
    """A weighted sum of models, sent in place of a model and together with the models that it consists of.

    Attributes:
        models: their numbers ``(k,)``, ascending.
        weights: of the models, with sum 1 ``(k,)``.
    """

    models: tuple[int, ...]
    weights: tuple[float, ...]

    def of(self, models: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """The sum of these models ``(P,)``, each times its weight, in double precision and in their order."""
        mixed = np.empty(models[0].shape, np.float32)
        for start in range(0, len(mixed), PIECE):
            piece = slice(start, start + PIECE)
            total = np.zeros(len(mixed[piece]))
            for weight, model in zip(self.weights, models, strict=True):
                total += weight * model[piece].astype(np.float64)
            mixed[piece] = total
        return mixed


@dataclass(frozen=True)
class LocalTest:
    """How clients test the models that they have just trained, before these are averaged.

    Attributes:
        on: the data to test on.
        batch_size: samples in a forward pass.
        adaptation: what the clients do with a model before every test; None for nothing.
    """

    on: tuple[TestedOn, ...]
    batch_size: int
    adaptation: LocalWork | None = None


@dataclass(frozen=True)
class TrainJob:
    """Train a block of B clients and multiply its part of ``A W``.

    These objects are sent with it: the start models ``("model", k)``, each a vector or a :class:`Mixture` of
    others; the servers' vectors ``("vector", k)`` that belong to them, if the local objective has any;
    ``("report", name)`` for each requested report, and all K models if a report needs them; and the objects
    with client state ``("state", number)``.

    Attributes:
        round: 0-based.
        stage: which stage of the federation.
        clients: ids ``(B,)``.
        start: the model that each starts from ``(B,)``.
        states: where the state of each client is; empty for methods without client state.
        layout: of the states.
        work: the local work.
        local: the local objective.
        order: the order of samples.
        mixing: the block's part of A; None to send the trained rows themselves instead of their sums.
        reports: names of the reports that are asked for.
        models: K, if a report looks at all models, or 0.
        updates: whether the updates ``w_i - w`` are kept.
        sends_updates: whether the updates are sent instead of the models.
        test: how the clients test what they have trained, if they do.
    """

    round: int
    stage: int
    clients: NDArray[np.int64]
    start: NDArray[np.int64]
    states: tuple[StateRow, ...]
    layout: StateLayout
    work: LocalWork
    local: LocalObjective
    order: Ordering
    mixing: BlockMixing | None
    reports: tuple[str, ...] = ()
    models: int = 0
    updates: bool = False
    sends_updates: bool = False
    test: LocalTest | None = None

    @property
    def only_sums(self) -> bool:
        """Whether nothing of the size of the clients' models, except the sums, is sent or kept."""
        more_than_sums = self.reports or self.updates or self.layout.size or self.local.masks
        return self.mixing is not None and not more_than_sums

    def take(self, clients: slice) -> TrainJob:
        """The same job for some of its clients."""
        return replace(
            self,
            clients=self.clients[clients],
            start=self.start[clients],
            states=self.states[clients],
            mixing=None if self.mixing is None else self.mixing.take(clients),
        )


@dataclass(frozen=True)
class GroupJob:
    """Train several blocks, one after the other, and add up what they send for the same row of A.

    The objects that the blocks need are sent with it. In the answer, ``("sum", (k, shard))`` are the sums
    over the blocks; other results have the names of :func:`in_group`.
    """

    blocks: tuple[TrainJob, ...]

    @property
    def clients(self) -> NDArray[np.int64]:
        """The ids of the clients of all blocks."""
        return np.concatenate([block.clients for block in self.blocks])


def in_group(place: int, key: Key) -> Key:
    """The name of a block's object among those of its group; sums belong to the group and keep their name."""
    return key if key[0] == "sum" else (key[0], f"{place}:{key[1]}")


ROWS = "rows"
"""Trained rows ``(B, S)``, if they are sent themselves: ``("rows", shard)`` for each shard of the model.
Otherwise ``("sum", (k, shard))`` is a :class:`~rayfl.clients.partial.Partial` for each row k of A that the
block contributes to."""

UPDATES: Key = ("updates", 0)
"""``w_i - w`` of a block ``(B, P)``."""

STATES: Key = ("states", 0)
"""The new states of a block's clients ``(B, S)``."""


@dataclass(frozen=True)
class TrainReport:
    """What the driver learns about a trained block: never a model.

    Attributes:
        losses: mean local training loss of each client, ``(B,)``.
        steps: local steps of each client, ``(B,)``.
        reports: the small reports by name ``(B, ...)``; combined ones are objects ``("report", name)``.
        failures: client id -> traceback.
        unadapted: client id -> traceback, of clients that failed when they adapted their model before a test.
        seconds: time spent in the job.
        worker: host and id of the process that did it.
        bytes_up, bytes_down: what the clients sent and received.
        remarks: messages for the user -> ids of the clients concerned.
        scores: the tests of the models that the clients have trained ``(B,)``; zeros for those that failed.
        memory: bytes of the process.
    """

    losses: NDArray[np.float64]
    steps: NDArray[np.int64]
    reports: Mapping[str, NDArray[np.floating]]
    failures: dict[int, str]
    seconds: float
    worker: str
    bytes_up: int
    bytes_down: int
    remarks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    scores: Scores = field(default_factory=dict)
    memory: int = 0
    unadapted: dict[int, str] = field(default_factory=dict)

    @classmethod
    def joined(cls, reports: Sequence[TrainReport]) -> TrainReport:
        """Merge the reports of parts of a block, in the order of the block; without small reports."""
        remarks: dict[str, list[int]] = {}
        for report in reports:
            for text, clients in report.remarks.items():
                remarks.setdefault(text, []).extend(clients)
        return cls(
            losses=np.concatenate([report.losses for report in reports]),
            steps=np.concatenate([report.steps for report in reports]),
            reports={},
            failures={client: text for report in reports for client, text in report.failures.items()},
            seconds=sum(report.seconds for report in reports),
            worker=reports[0].worker,
            bytes_up=sum(report.bytes_up for report in reports),
            bytes_down=sum(report.bytes_down for report in reports),
            remarks=remarks,
            scores={on: Score.joined([r.scores[on] for r in reports]) for on in reports[0].scores},
            memory=max(report.memory for report in reports),
            unadapted={client: text for report in reports for client, text in report.unadapted.items()},
        )


@dataclass(frozen=True)
class GroupReport:
    """What the driver learns about the blocks of a :class:`GroupJob`."""

    blocks: tuple[TrainReport, ...]

    @property
    def seconds(self) -> float:
        """Time spent in the job."""
        return sum(block.seconds for block in self.blocks)

    @property
    def memory(self) -> int:
        """Bytes of the process after the last block."""
        return self.blocks[-1].memory


@dataclass(frozen=True)
class AdaptJob:
    """Fine-tune the models ``("model", k)`` of a block of clients, and test the result, or return it.

    Attributes that are not listed here are those of :class:`TrainJob`.

    Attributes:
        on: the data to test on.
        batch_size: samples in a forward pass.
        updates: whether the updates are asked for.
    """

    round: int
    stage: int
    clients: NDArray[np.int64]
    start: NDArray[np.int64]
    states: tuple[StateRow, ...]
    layout: StateLayout
    work: LocalWork
    local: LocalObjective
    order: Ordering
    on: tuple[TestedOn, ...]
    batch_size: int
    updates: bool = False


@dataclass(frozen=True)
class AdaptReport:
    """What the driver learns about a block of clients that adapted their models.

    Attributes:
        scores: the tests ``(B,)``; for clients that failed, tests of the model that they started from.
        failures: client id -> traceback.
    """

    scores: Scores
    failures: dict[int, str]


@dataclass(frozen=True)
class SignatureJob:
    """Ask a block of clients for their signatures, or for their relations to all others.

    Attributes:
        clients: ids ``(B,)``.
        signature: what they compute.
        features: the fitted feature map Phi that the server sent to all clients.
        seed: the run's seed, for signatures that draw random numbers.
        stages: the stage of the federation whose data each client's signature describes ``(B,)``.
        first: position of the block's first client among all whose signatures are compared.
        work: the local work of round 0, for signatures of trained models: the clients train first.
        order: the order of samples in that training.
    """

    clients: NDArray[np.int64]
    signature: Signature
    features: Fitted
    seed: int
    stages: NDArray[np.int64]
    first: int = 0
    work: LocalWork | None = None
    order: Ordering = Shuffled()  # noqa: RUF009 (frozen)


@dataclass(frozen=True)
class SignatureReport:
    """What the driver learns about a block's signatures.

    Attributes:
        floats: how many numbers each client sends ``(B,)``.
        failures: client id -> why it has no signature.
    """

    floats: NDArray[np.int64]
    failures: dict[int, RayflError]


@dataclass(frozen=True)
class ForwardPass:
    """A forward pass of a model over some samples.

    Attributes:
        model: the number of the model.
        state: where the state is that makes it a client's personal model; None for the server's model.
        samples: ids of samples, ``(n,)``.
    """

    model: int
    state: StateRow
    samples: NDArray[np.int32]


@dataclass(frozen=True)
class EvalJob:
    """A few forward passes for one actor, over test samples or training samples.

    The models ``("model", k)`` and the objects with client state ``("state", number)`` are sent with it.

    Attributes:
        passes: the model and the samples of each forward pass.
        batch_size: samples in a forward pass.
        layout: of the states.
        local: the local objective, which may replace a model by the client's own.
        part: whether the samples are training or test samples.
        only_losses: whether to compute only losses.
    """

    passes: tuple[ForwardPass, ...]
    batch_size: int
    layout: StateLayout = StateLayout()  # noqa: RUF009 (frozen)
    local: LocalObjective = SGD()  # noqa: RUF009
    part: Part = "test"
    only_losses: bool = False


@dataclass(frozen=True)
class EvalReport:
    """For every pass in order: how many predictions of each sample were right (one per sample, or one per
    word), the sum of their losses, and the other measures of the loss ``(n, S)``; if only losses are asked
    for, nothing but these.
    """

    correct: list[NDArray[np.int64]] = field(default_factory=list)
    loss: list[NDArray[np.float32]] = field(default_factory=list)
    sums: list[NDArray[np.float64]] = field(default_factory=list)

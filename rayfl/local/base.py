"""The contract of a local objective; its defaults are plain SGD.

An objective has a server side (settings of the local work, weights of the average, an additional vector for
every model) and a client side (the meaning of its state, the terms of its gradient, what it sends).
Both are pure functions of arrays, so any algorithm can use any objective.

Shapes: B clients of a block, P parameters of a model, S numbers of a client's state, Q of a server's vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rayfl.errors import ConfigError, returned, type_of
from rayfl.models import ModelSpec
from rayfl.settings import Section
from rayfl.training import NO_TERMS, LocalWork, Terms, TrainedBlock, Training

if TYPE_CHECKING:
    import torch

_CACHE_ELEMENTS = 1 << 15
"""Number of elements of which a core's cache holds a few arrays."""

Test: TypeAlias = "Callable[[torch.Tensor, int], float]"
"""Accuracy in [0, 1] of a model ``(P,)`` on the validation samples of the client at a row of the block; NaN
if it has none."""


@dataclass(frozen=True)
class Start:
    """What the clients of a block have when a round begins.

    Attributes:
        spec: the model's layout.
        work: the round's work.
        models: the models that they received, ``(B, P)``; not to be changed.
        server: the vectors that came with these models, ``(B, Q)``.
        state: the clients' states ``(B, S)``; zeros for a client that never took part.
            :meth:`LocalObjective.terms`, :meth:`LocalObjective.held`, :meth:`LocalObjective.begin` and
            :meth:`LocalObjective.finish` may change them in place.
        fresh: which clients never took part, ``(B,)``.
        sizes: numbers of training samples ``(B,)``.
        test: computes validation accuracies, for objectives that need them.
    """

    spec: ModelSpec
    work: LocalWork
    models: torch.Tensor
    server: torch.Tensor
    state: torch.Tensor
    fresh: NDArray[np.bool_]
    sizes: NDArray[np.int64]
    test: Test


class Train(Protocol):
    """Trains the clients of a block on their samples."""

    def __call__(self, work: LocalWork, models: torch.Tensor, terms: Terms = NO_TERMS) -> TrainedBlock:
        """Train each client from its row of ``models`` ``(B, P)``, which stays as it is.

        Args:
            work: what to do; ``replace(start.work, phase=1)`` for a second training in the round.
            models: to start from.
            terms: per-client terms; without ``visits`` samples come in the order of the run.
        """


@dataclass(frozen=True)
class Outcome:
    """What the clients of a block keep and send after training.

    Attributes:
        rows: the models that they send, ``(B, P)``.
        state: their new states, ``(B, S)``.
        server: what they add to the server's vector, ``(B, Q)``.
        kept: 1 where a client's parameter takes part in the average, 0 where not, ``(B, P)``; None for all
            ones.
        bytes_up, bytes_down: bytes sent and received by each client ``(B,)``; None for the whole model and
            ``Q`` numbers both ways.
        remarks: messages for the user -> rows of the block concerned.
    """

    rows: torch.Tensor
    state: torch.Tensor
    server: torch.Tensor
    kept: torch.Tensor | None = None
    bytes_up: NDArray[np.int64] | None = None
    bytes_down: NDArray[np.int64] | None = None
    remarks: Mapping[str, Sequence[int]] = field(default_factory=dict)


class LocalObjective(Section):
    """Base of the local objectives, chosen by name; one per file in ``rayfl/local``."""

    name: str = ""

    called_with: ClassVar[Mapping[str, str]] = {"client_model": "personal"}

    personal: ClassVar[bool] = False
    """Whether each client has its own model, made from the server's model and its state
    (:meth:`client_model`)."""

    masks: ClassVar[bool] = False
    """Whether clients leave parameters out of the average (``Outcome.kept``)."""

    facts: ClassVar[tuple[str, ...]] = ()
    """Names that :meth:`client_facts` may give. The summary has their means, such as ``pruned_weights_mean``,
    which studies can show and make claims about."""

    counts_absent: ClassVar[bool] = False
    """Whether clients that took part before, but not in this round, still count in the average: each with
    weight 1 and the server's current model."""

    def check(self, spec: ModelSpec, training: Training, validation: float) -> None:
        """Refuse settings that do not fit the model or the run, before anything starts.

        Args:
            spec: the model's layout.
            training: the config section.
            validation: share of the clients' samples that is held out for validation.

        Raises:
            ConfigError
        """

    def work(self, work: LocalWork) -> LocalWork:
        """The round's work with this objective's settings."""
        return work

    def weights(
        self, sizes: NDArray[np.int64], rows: NDArray[np.int64], training: Training
    ) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        """How much each client counts in its average.

        Args:
            sizes: n_i of the cohort, ``(M,)``.
            rows: the model that each contributes to, ``(M,)``.
            training: the config section.

        Returns:
            ``a (M,)``, and ``b (M,)`` or None: see :class:`~rayfl.algorithms.Mixing`.
        """
        return sizes.astype(np.float64), None

    def rescaled(self, weights: NDArray[np.float64], keep: NDArray[np.float64]) -> float:
        """If other clients of a model failed: the factor for the weights ``a`` of the clients that succeeded,
        at the same ``a + b``.

        Args:
            weights, keep: ``a`` and ``b`` of those that delivered ``(m,)``, as :meth:`weights` gave them.
        """
        return 1.0

    def state_size(self, spec: ModelSpec) -> int:
        """S: numbers that a client keeps between rounds."""
        return 0

    def server_size(self, spec: ModelSpec) -> int:
        """Q: numbers that a server keeps for each model, and sends with it. They start at zero; after a round
        the sum of what clients sent, divided by the number of the model's clients, is added.
        """
        return 0

    def held(self, state: torch.Tensor, fresh: NDArray[np.bool_], spec: ModelSpec) -> torch.Tensor | None:
        """The clients' masks ``(B, P)``: where they are 0, parameters are held at zero; None for no masks."""
        return None

    def begin(self, start: Start) -> torch.Tensor | None:
        """The models ``(B, P)`` that the clients train from; None for those that they received."""
        return None

    def terms(self, start: Start) -> Terms:
        """Per-client terms of the local work: offsets of the gradient, masks, visits, guides."""
        return Terms(mask=self.held(start.state, start.fresh, start.spec))

    def finish(self, start: Start, block: TrainedBlock) -> Outcome:
        """What the clients keep and send."""
        return Outcome(block.rows, start.state, start.server)

    def train(self, start: Start, train: Train) -> tuple[TrainedBlock, Outcome]:
        """Train the clients once. Override it for several phases (one part of the model after another, or two
        models), and call ``train`` for each.

        A client that fails in one phase counts as failed; its number of local steps is summed over phases.

        Returns:
            The training whose models and losses are reported, and what the clients keep and send.
        """
        terms, initial = returned(f"{self.name}.terms", self.terms(start), Terms), self.begin(start)
        try:
            terms.check(start.models)
            if not type(self).__module__.startswith(_RAYFL):
                terms.check_finite()
        except ValueError as error:
            raise ConfigError(f"{self.name}.terms", str(error)) from None
        if initial is not None:
            import torch

            fits = isinstance(initial, torch.Tensor) and initial.dtype == start.models.dtype
            if not fits or initial.shape != start.models.shape:
                expected = f"expected the models to train, a tensor of float32 {tuple(start.models.shape)}"
                raise ConfigError(f"{self.name}.begin", f"returned {type_of(initial)}", expected)
        block = train(start.work, start.models if initial is None else initial, terms)
        return block, returned(f"{self.name}.finish", self.finish(start, block), Outcome)

    def finetuning(self, work: LocalWork, spec: ModelSpec) -> LocalWork | None:
        """How a client fine-tunes its model (:meth:`client_model`) before it is tested again: one training of
        ``evaluation.finetune_epochs`` epochs.

        By default as in a round. Objectives that override :meth:`train` must override this, too. With None
        the setting is refused.

        Args:
            work: of the last round.
            spec: the model's layout.
        """
        return work if type(self).train is LocalObjective.train else None

    def client_model(self, model: torch.Tensor, state: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
        """The client's own model ``(P,)``, from the server's model and the client's state ``(S,)``."""
        return model

    def client_facts(self, states: NDArray[np.float32], spec: ModelSpec) -> dict[str, NDArray[np.float64]]:
        """Facts about clients, computed from their states ``(n, S)``: columns ``(n,)`` of ``clients.csv``, by
        the names in :attr:`facts`."""
        return {}


def work_of(local: LocalObjective, work: LocalWork) -> LocalWork:
    """The round's work with the objective's settings.

    Raises:
        ConfigError: if it returns something else.
    """
    return returned(f"{local.name}.work", local.work(work), LocalWork)


def client_model_of(
    local: LocalObjective, model: torch.Tensor, state: torch.Tensor, spec: ModelSpec
) -> torch.Tensor:
    """The client's own model ``(P,)``: :meth:`LocalObjective.client_model`.

    Raises:
        ConfigError: if it is no model.
    """
    own: object = local.client_model(model, state, spec)
    if not isinstance(own, type(model)) or own.shape != model.shape:
        expected = f"expected a model, a tensor {tuple(model.shape)}"
        raise ConfigError(f"{local.name}.client_model", f"returned {type_of(own)}", expected)
    return own


def weights_of(
    local: LocalObjective, sizes: NDArray[np.int64], rows: NDArray[np.int64], training: Training
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """How much each client counts: :meth:`LocalObjective.weights`.

    Raises:
        ConfigError: unless it returns two arrays ``(M,)``, of which the second may be None.
    """
    answer: object = local.weights(sizes, rows, training)
    fits = isinstance(answer, tuple) and len(answer) == 2 and np.shape(answer[0]) == sizes.shape
    if not fits or (answer[1] is not None and np.shape(answer[1]) != sizes.shape):  # type: ignore[index]
        expected = "expected weights (M,) of the M clients, and (M,) for the old model or None"
        raise ConfigError(f"{local.name}.weights", f"returned {type_of(answer)}", expected)
    if not all(np.isfinite(each).all() for each in answer if each is not None):  # type: ignore[attr-defined]
        raise ConfigError(f"{local.name}.weights", "returned weights that are not finite")
    return answer  # type: ignore[return-value]


def trained_by(local: LocalObjective, start: Start, train: Train) -> tuple[TrainedBlock, Outcome]:
    """The clients' round: :meth:`LocalObjective.train`.

    Raises:
        ConfigError: if it returns something else, or the clients send models of another shape.
    """
    own = type(local).train is not LocalObjective.train
    where, answer = f"{local.name}.{'train' if own else 'finish'}", local.train(start, train)
    kinds = tuple(map(type, answer)) if isinstance(answer, tuple) else ()
    if kinds != (TrainedBlock, Outcome):
        raise ConfigError(where, f"returned {type_of(answer)}", "expected (TrainedBlock, Outcome)")
    checked = [
        ("clients send", answer[1].rows, start.models, "models"),
        ("clients keep", answer[1].state, start.state, "states"),
        ("clients add to the server's vector", answer[1].server, start.server, "numbers"),
    ]
    if answer[1].kept is not None:
        checked.append(("kept is", answer[1].kept, start.models, "parameters, 0 or 1"))
    for what, values, fitting, name in checked:
        if not isinstance(values, type(fitting)) or values.shape != fitting.shape:
            expected = f"expected their {name}, a tensor {tuple(fitting.shape)}"
            raise ConfigError(where, f"{what} {type_of(values)}", expected)
    for name in ("bytes_up", "bytes_down"):
        counts = getattr(answer[1], name)
        if counts is not None and np.shape(counts) != (len(start.models),):
            expected = f"expected the bytes of each client, an array ({len(start.models)},)"
            raise ConfigError(where, f"{name} is {type_of(counts)}", expected)
    if not type(local).__module__.startswith(_RAYFL):  # what the engine has trained is finite
        _refuse_non_finite(where, answer[1].rows, answer[0].failures)
        _refuse_non_finite(where, answer[1].server, answer[0].failures)
    return answer


_RAYFL = f"{__name__.partition('.')[0]}."
"""How the names of rayfl's own modules begin."""


def _refuse_non_finite(where: str, rows: torch.Tensor, failures: Mapping[int, str]) -> None:
    """Refuse models that are not finite, of clients that have not failed.

    Args:
        where: the method that returned them.
        rows: the models ``(B, P)``.
        failures: of the clients, by row.

    Raises:
        ConfigError
    """
    sums = rows.sum(dim=1).isfinite().tolist()  # a sum is finite if all are; otherwise it may have overflowed
    if any(not (sums[row] or rows[row].isfinite().all()) for row in set(range(len(rows))) - set(failures)):
        raise ConfigError(where, "a client sends numbers that are not finite")


def cached(values: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Split ``(B, P)`` into parts, as rows and columns, of which a core's cache holds several at a time.

    Elementwise operations on several such tensors are memory-bound. Done part by part, they read each tensor
    from memory once, and intermediate results stay in the cache. On a GPU there is one part.
    """
    rows, columns = values.shape
    part_columns = max(1, columns if values.is_cuda else min(columns, _CACHE_ELEMENTS))
    part_rows = max(1, rows if values.is_cuda else _CACHE_ELEMENTS // part_columns)
    for first in range(0, rows, part_rows):
        for start in range(0, columns, part_columns):
            yield slice(first, first + part_rows), slice(start, start + part_columns)


def accumulated(
    steps: NDArray[np.int64], momentum: float, lr_alpha: float = 0.0, lr_power: float = 1.0
) -> NDArray[np.float64]:
    """How much gradients count in local updates: ``w - w_i = eta accumulated g`` for a constant gradient g.

    FedNova's ``|a_i|_1``: tau_i local steps, with momentum rho ``[tau - rho (1 - rho^tau) / (1 - rho)] /
    (1 - rho)``, and less if the learning rate decays within the round, ``eta (1 + lr_alpha t)^-lr_power``.

    Args:
        steps: tau_i ``(M,)``.
        momentum, lr_alpha, lr_power: as in :class:`~rayfl.training.LocalWork`.
    """
    if momentum == lr_alpha == 0:
        return steps.astype(np.float64)
    t = np.arange(steps.max(initial=0))
    # The velocity of step t holds the gradients of steps 0, ..., t with weights rho^t, ..., 1.
    counted = (1 + lr_alpha * t) ** -lr_power * (1 - momentum ** (t + 1)) / (1 - momentum)
    return np.asarray(np.concatenate([[0.0], np.cumsum(counted)])[steps], np.float64)

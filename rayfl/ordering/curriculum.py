"""Data curriculum: a client trains on its easy samples first.

Vahidian's thesis, chapter 2, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from typing_extensions import override

from rayfl.data import IGNORED
from rayfl.errors import ConfigError
from rayfl.losses import Loss
from rayfl.models import ModelSpec
from rayfl.ordering.base import Arrival, Ordering
from rayfl.random import uniforms
from rayfl.training import Visits, curriculum
from rayfl.training.curriculum import Family, Order, Pacing

if TYPE_CHECKING:
    import torch

Score = Literal[
    "global", "local", "both", "global_prediction", "local_prediction", "both_prediction", "expert"
]
Users: TypeAlias = "list[tuple[torch.Tensor, list[int]]]"
"""Models ``(P,)``, and the rows of the block whose clients use each."""


class Curriculum(Ordering):
    """Samples sorted by a score (higher = easier); step t trains on a batch of the first ``g(t)`` of them.

    - Scores: ``global`` s_G, the normalised inverse loss under the model received (the default); ``local``
      s_L, under the client's model of its last round; ``both`` s_LG, from the mean of both losses;
      ``*_prediction``: 1 where the model is right, for ``both_prediction`` where both models agree;
      ``expert`` s_E: under a model given as a file (``rayfl expert``). A client that has no model of its own
      yet is scored by the model received alone (s_G, or s_G^pred).
    - Orders: ``curriculum`` easy first, ``anti`` hard first, ``random`` regardless of the score, redrawn in
      every round. Vanilla training is the ordering ``shuffled``.
    - Pacing ``g(t)`` over the T local steps that the shuffled epochs would have: ``pacing``, ``a`` (the
      fraction of the steps after which all samples are used) and ``b`` (the fraction used in the first).

    Decisions: a loss that is not finite counts as the hardest of all (training then fails with a message); a
    text's loss is the mean over its words, and its prediction score is the share of words that are right.
    """

    name: Literal["curriculum"] = "curriculum"
    score: Score = Field("global", description="what makes a sample easy")
    order: Order = Field("curriculum", description="easy first, hard first (anti), or random")
    pacing: Family = Field("linear", description="how the number of samples in use grows (pacing)")
    a: float = Field(0.8, gt=0, le=1, description="fraction of the steps until all samples are used (a)")
    b: float = Field(0.2, gt=0, le=1, description="fraction of the samples used in the first step (b)")
    expert: Path | None = Field(
        None,
        description="for score 'expert': a model of the same architecture, a .safetensors file as runs write "
        "them, which all nodes can read",
    )

    @model_validator(mode="after")
    def _expert_for_its_score(self) -> Curriculum:
        if self.score == "expert" and self.expert is None:
            raise ValueError("score=expert needs the setting expert, a model's file")
        if self.score != "expert" and self.expert is not None:
            raise ValueError(f"score={self.score} does not use the setting expert; leave it out")
        return self

    @property
    def _uses_own_models(self) -> bool:
        return self.order != "random" and self.score.startswith(("local", "both"))

    @override
    def needs_classes(self) -> bool:
        return self.order != "random" and self.score.endswith("_prediction")

    def check(self, spec: ModelSpec) -> None:
        """Refuse an expert's file that is missing or of another architecture."""
        if self.expert is not None:
            _read_expert(self.expert, spec)

    def state_size(self, spec: ModelSpec) -> int:
        """P, for scores that use the client's own last model; otherwise 0."""
        return spec.P if self._uses_own_models else 0

    def keep(self, rows: torch.Tensor) -> torch.Tensor:
        """The model that the client has just trained."""
        return rows if self._uses_own_models else rows[:, :0]

    def visits(self, arrival: Arrival) -> Sequence[Visits] | NDArray[np.intp]:
        """Batches of the first ``g(t)`` samples in the order of their scores."""
        pacing, work, sizes = Pacing(self.pacing, self.a, self.b), arrival.work, arrival.sizes
        steps = work.epochs * work.steps_an_epoch(sizes) * work.batches_a_step
        paces = {
            (t, n): pacing.available(t, n, work.batch_size)
            for t, n in set(zip(steps.tolist(), sizes.tolist(), strict=True))
        }
        available = [paces[own] for own in zip(steps.tolist(), sizes.tolist(), strict=True)]
        # For each client n numbers for the order, then as many as its batches take.
        counts = sizes + steps * np.minimum(work.batch_size, sizes)
        draws = uniforms(arrival.seed, "curriculum", arrival.round, arrival.clients, counts, work.phase)
        ties = [own[:n] for n, own in zip(sizes.tolist(), draws, strict=True)]
        orders = curriculum.alike(
            lambda scores, own: curriculum.arrange(scores, self.order, own), self.scores(arrival), ties
        )
        batches = [own[n:] for n, own in zip(sizes.tolist(), draws, strict=True)]
        return curriculum.visits(orders, available, work.batch_size, batches)

    def scores(self, arrival: Arrival) -> list[NDArray[np.float64]]:
        """The score of each sample of each client, ``(n,)`` each."""
        if self.order == "random":
            return [np.zeros(n) for n in arrival.sizes.tolist()]
        users = _received_models(arrival)
        if self.score == "expert":
            assert self.expert is not None
            users = [(_read_expert(self.expert, arrival.spec), list(range(len(arrival.sizes))))]
        measure = _predictions if self.score.endswith("_prediction") else _sample_losses
        received = _evaluate(arrival, users, measure) if not self.score.startswith("local") else None
        own = _evaluate(arrival, _own_models(arrival), measure) if self._uses_own_models else received
        received = received or own
        assert received is not None
        assert own is not None
        if self.score.endswith("_prediction"):
            both = self.score == "both_prediction"
            return [
                agreement(a, b if both and not fresh else y, y)
                for a, b, y, fresh in zip(
                    received.values, own.values, received.targets, arrival.fresh.tolist(), strict=True
                )
            ]
        return curriculum.alike(_scores_by_loss, received.values, own.values)


@dataclass(frozen=True)
class Seen:
    """Losses or predictions of models on the samples of the clients that use them, with n samples each.

    Attributes:
        values: for each client the losses ``(n,)`` (of a text the mean over its words), or the predictions,
            classes ``(n,)`` or words ``(n, L)``.
        targets: for each client the targets ``(n,)`` or ``(n, L)``.
    """

    values: list[NDArray[Any]]
    targets: list[NDArray[np.int64]]


def agreement(
    predicted: NDArray[np.int64], reference: NDArray[np.int64], targets: NDArray[np.int64]
) -> NDArray[np.float64]:
    """1 for samples whose prediction equals the reference, 0 for others; for texts the share of such words.

    Args:
        predicted, reference: ``(n,)`` or ``(n, L)``.
        targets: of the same shape; positions with :data:`~rayfl.data.IGNORED` do not count.
    """
    return _mean_of_words(curriculum.prediction_scores(predicted, reference), targets)


def _mean_of_words(values: NDArray[np.float64], targets: NDArray[np.int64]) -> NDArray[np.float64]:
    if values.ndim == 1:
        return values
    counted = targets != IGNORED
    means: NDArray[np.float64] = (values * counted).sum(1) / np.maximum(1, counted.sum(1))
    return means


def _scores_by_loss(received: NDArray[np.float64], own: NDArray[np.float64]) -> NDArray[np.float64]:
    """The scores of samples ``(B, n)``, by their losses under two models (or twice under one)."""
    return curriculum.loss_scores(
        np.nan_to_num((received + own) / 2, nan=_HARDEST_LOSS, posinf=_HARDEST_LOSS)
    )


def _received_models(arrival: Arrival) -> Users:
    """The models that the clients received."""
    return [(arrival.models[rows[0]], rows) for rows in _rows_by_number(arrival.same)]


def _own_models(arrival: Arrival) -> Users:
    """The clients' own models; the received model for clients that have none."""
    shared = [
        rows for rows in _rows_by_number(np.where(arrival.fresh, arrival.same, -1)) if arrival.fresh[rows[0]]
    ]
    return [
        *((arrival.models[rows[0]], rows) for rows in shared),
        *((arrival.state[row], [row]) for row in np.flatnonzero(~arrival.fresh).tolist()),
    ]


def _rows_by_number(numbers: NDArray[np.int64]) -> list[list[int]]:
    """The rows with equal numbers, one list for each number in ascending order."""
    return [np.flatnonzero(numbers == number).tolist() for number in np.unique(numbers)]


def _evaluate(arrival: Arrival, users: Users, measure: Callable[..., NDArray[Any]]) -> Seen:
    """Losses or predictions of the models on the samples of the clients that use them, in block order.

    Args:
        arrival: of the block.
        users: the models, and the clients that use each.
        measure: computes losses or predictions from outputs ``(n, ...)`` and targets ``(n, ...)``:
            :func:`_sample_losses` or :func:`_predictions`.
    """
    order: list[int] = []
    values: list[NDArray[Any]] = []
    targets: list[NDArray[np.int64]] = []
    for model, rows in users:
        logits, y = arrival.logits(model, rows)
        labels, sizes = y.cpu().numpy(), arrival.sizes[rows].tolist()
        order += rows
        values += curriculum.cut(measure(arrival.spec.loss.for_tests(), logits, y), sizes)
        targets += curriculum.cut(labels, sizes)
    if len(users) == 1:  # one model for all clients, which are in block order already
        return Seen(values, targets)
    places = np.argsort(order).tolist()
    return Seen([values[place] for place in places], [targets[place] for place in places])


def _sample_losses(loss: Loss, logits: torch.Tensor, y: torch.Tensor) -> NDArray[np.float64]:
    """The loss of each sample ``(n,)``."""
    losses = loss.each(logits, y).double().cpu().numpy()
    return losses if losses.ndim == 1 else _mean_of_words(losses, y.cpu().numpy())


def _predictions(loss: Loss, logits: torch.Tensor, y: torch.Tensor) -> NDArray[np.int64]:
    """The predicted classes ``(n,)``, or words ``(n, L)``."""
    classes: NDArray[np.int64] = logits.argmax(1).cpu().numpy()
    return classes


_HARDEST_LOSS = 1e300
"""Stands for a loss that is not finite. Training then fails with a message for the client."""


def _read_expert(path: Path, spec: ModelSpec) -> torch.Tensor:
    """The expert's model ``(P,)``.

    Raises:
        ConfigError: if there is no such file, or it holds no model of this layout.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    where, remedy = "order.expert", "rayfl expert trains one on all data, with the model of a config"
    try:
        tensors = load_file(path)  # read every time: cheap compared with scoring
    except OSError:
        raise ConfigError(where, f"there is no file {path}", remedy) from None
    except SafetensorError as error:
        raise ConfigError(where, f"{path} is not a safetensors file ({error})", remedy) from None
    for name, shape in zip(spec.names, spec.shapes, strict=True):
        stored_shape = tuple(tensors[name].shape) if name in tensors else "missing"
        if stored_shape != shape:
            what = f"{path} is of another architecture, its {name} is {stored_shape} instead of {shape}"
            raise ConfigError(where, what, remedy)
    return torch.cat([tensors[name].reshape(-1).float() for name in spec.names])

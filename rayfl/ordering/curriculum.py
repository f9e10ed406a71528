"""Data curriculum: a client trains on its easy samples first.

Vahidian's thesis, chapter 2, Algorithm 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from safetensors.torch import load_file
from torch.nn import functional

from rayfl.errors import DataError
from rayfl.models import ModelSpec
from rayfl.ordering.base import Arrival, Ordering, Visits
from rayfl.random import generator
from rayfl.training import curriculum
from rayfl.training.curriculum import Family, Order, Pacing

Score = Literal[
    "global", "local", "both", "global_prediction", "local_prediction", "both_prediction", "expert"
]


class Curriculum(Ordering):
    """Samples sorted by a score (higher = easier), step t training on the first ``g(t)`` of them.

    - Scores: ``global`` s_G, the normalised inverse loss under the model received (the default); ``local``
      s_L, under the client's model of its last round (s_G until it has one); ``both`` s_LG, from the mean of
      both losses; ``*_prediction``: 1 where the model is right, for ``both_prediction`` where both models
      agree; ``expert`` s_E: under a model given as a file.
    - Orders: ``curriculum`` easy first, ``anti`` hard first, ``random`` whatever the score. Vanilla training
      is the ordering ``shuffled``.
    - Pacing ``g(t)`` over the T local steps that the shuffled epochs would have: ``pacing``, ``a`` (the
      fraction of the steps after which all samples are used) and ``b`` (the fraction used in the first).
    """

    name: Literal["curriculum"] = "curriculum"
    score: Score = Field("global", description="what makes a sample easy")
    order: Order = Field("curriculum", description="easy first, hard first (anti), or random")
    pacing: Family = Field("linear", description="how the part of the samples in use grows")
    a: float = Field(0.8, gt=0, le=1, description="fraction of the steps until all samples are used (a)")
    b: float = Field(0.2, gt=0, le=1, description="fraction of the samples used in the first step (b)")
    expert: Path | None = Field(
        None,
        description="for score 'expert': a model of the same architecture, a .safetensors file as runs write "
        "them, which all nodes can read",
    )

    @model_validator(mode="after")
    def _expert_is_there(self) -> Curriculum:
        if (self.score == "expert") != (self.expert is not None):
            raise ValueError("score 'expert' and the expert's file go together")
        if self.expert is not None and not self.expert.is_file():
            raise ValueError(f"expert {self.expert}: there is no such file")
        return self

    @property
    def _looks_back(self) -> bool:
        return self.order != "random" and self.score in (
            "local",
            "both",
            "local_prediction",
            "both_prediction",
        )

    def state_size(self, spec: ModelSpec) -> int:
        """The client's own last model, for scores that look at it."""
        return spec.P if self._looks_back else 0

    def keep(self, rows: torch.Tensor) -> torch.Tensor:
        """The model that the client has just trained."""
        return rows if self._looks_back else rows[:, :0]

    def visits(self, arrival: Arrival) -> Visits:
        """Batches of the first ``g(t)`` samples in the order of their scores."""
        pacing, work = Pacing(self.pacing, self.a, self.b), arrival.work
        found = []
        for row, (client, size) in enumerate(
            zip(arrival.clients.tolist(), arrival.sizes.tolist(), strict=True)
        ):
            rng = generator(arrival.seed, "curriculum", arrival.round, client)
            scores = np.zeros(size) if self.order == "random" else self._scores(arrival, row)
            order = curriculum.arrange(scores, self.order, rng)
            batches = work.epochs * work.steps_an_epoch(size) * work.batches_a_step
            available = pacing.available(batches, size, work.batch_size)
            found.append(curriculum.visits(order, available, work.batch_size, rng))
        return found

    def _scores(self, arrival: Arrival, row: int) -> NDArray[np.float64]:
        """The score of each of a client's samples, ``(n,)``."""
        received = arrival.models[row]
        own = received if arrival.fresh[row] or not self._looks_back else arrival.state[row]
        if self.score == "expert":
            assert self.expert is not None
            received = _read(self.expert, arrival.spec)
        first = own if self.score in ("local", "local_prediction") else received
        logits, y = arrival.logits(first, row)
        if self.score.endswith("_prediction"):
            reference = y if self.score != "both_prediction" else arrival.logits(own, row)[0].argmax(1)
            return curriculum.prediction_scores(logits.argmax(1).cpu().numpy(), reference.cpu().numpy())
        losses = functional.cross_entropy(logits, y, reduction="none")
        if self.score == "both":
            losses = (losses + functional.cross_entropy(arrival.logits(own, row)[0], y, reduction="none")) / 2
        return curriculum.loss_scores(losses.double().cpu().numpy())


_READ: dict[Path, torch.Tensor] = {}
"""Experts that this process has read."""


def _read(path: Path, spec: ModelSpec) -> torch.Tensor:
    """The expert's model ``(P,)``.

    Raises:
        DataError: if the file does not hold a model of this layout.
    """
    if path in _READ:
        return _READ[path]
    try:
        tensors = load_file(path)
        _READ[path] = torch.cat([tensors[name].reshape(-1) for name in spec.names])
        return _READ[path]
    except Exception as error:
        raise DataError(f"order.expert: {path} holds no model of this architecture ({error})") from None

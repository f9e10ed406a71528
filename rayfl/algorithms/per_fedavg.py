"""Per-FedAvg: a model from which every client gets to its own in a few steps.

Fallah, Mokhtari, Ozdaglar, NeurIPS 2020, in its first-order form (FO).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from rayfl.algorithms.base import Algorithm
from rayfl.algorithms.contract import ServerState, Setup
from rayfl.training import LocalWork


class PerFedAvg(Algorithm):
    """FedAvg with steps that look ahead: ``w' = w - alpha grad(w; b1)``, ``w <- w - beta grad(w'; b2)``.

    A client is tested after one epoch of plain SGD with alpha on its own data. The two batches of a step, b1
    and b2, are consecutive ones of an epoch, so an epoch has half as many steps as FedAvg's.

    ``beta`` stands in place of ``training.lr``, with its schedule. With alpha = 0 there is nothing to look
    ahead to, and no adaptation: plain FedAvg at rate beta, which then uses every batch for a step.
    """

    name: Literal["per_fedavg"] = "per_fedavg"
    alpha: float = Field(1e-2, ge=0, description="learning rate of the inner step and of the adaptation")
    beta: float = Field(1e-3, gt=0, description="learning rate of the outer step, in place of training.lr")

    objectives: ClassVar[tuple[str, ...] | None] = ("sgd", "fedprox")
    takes_momentum: ClassVar[bool] = False

    def work(self, setup: Setup, state: ServerState) -> LocalWork:
        """First-order MAML on the client's batches."""
        outer = setup.training.model_copy(update={"lr": self.beta})
        rate = outer.lr_at(state.round, setup.rounds)
        return replace(super().work(setup, state), lr=rate, inner_lr=self.alpha)

    def adaptation(self, setup: Setup, state: ServerState) -> LocalWork | None:
        """One epoch of SGD with alpha, before every test."""
        if not self.alpha:
            return None
        t = setup.training
        return LocalWork(epochs=1, batch_size=t.batch_size, lr=self.alpha, weight_decay=t.weight_decay)

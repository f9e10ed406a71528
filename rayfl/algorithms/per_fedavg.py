"""Per-FedAvg: a model that every client adapts to its own data in a few steps.

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
    """A common start from which every client reaches its own model in a few steps.

    FedAvg trains a model that is good as it is. Per-FedAvg trains one that is good after one more step on a
    client's own data: each local step first looks ahead, ``w' = w - alpha grad(w; b1)``, and then moves by
    the gradient there, ``w <- w - beta grad(w'; b2)``. This is the first-order form (FO).

    A client is tested after one epoch of plain SGD with rate alpha on its own data. The batches b1 and b2 of
    a step are consecutive ones of an epoch, so an epoch has half as many steps as FedAvg's. ``beta`` replaces
    ``training.lr``, with its schedule.

    Symbols:
        alpha: ``algorithm.alpha``
        beta: ``algorithm.beta``

    Cost:
        As FedAvg. Before each test every client trains for an epoch. No client state.

    Fails when:
        Clients have too few samples to adapt. With alpha = 0 there is no look-ahead and no adaptation: it is
        FedAvg at rate beta, which then uses every batch for a step.

    Shown by:
        - experiments/pacfl/README.md: its worst newcomer has 46 %, SOLO's 50 %, others' 66 % and more
        - tests/algorithms/test_personalized.py::test_looking_nowhere_is_fedavg_at_rate_beta
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
        training = setup.training
        return LocalWork(
            epochs=1, batch_size=training.batch_size, lr=self.alpha, weight_decay=training.weight_decay
        )

"""MTL: every client has a model of its own, pulled towards the mean of all. Smith et al., NeurIPS 2017.

The relationship of the tasks is the fixed one of Evgeniou and Pontil, KDD 2004.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rayfl.errors import ConfigError
from rayfl.local.base import LocalObjective, Outcome, Start, cached
from rayfl.models import ModelSpec
from rayfl.training import LocalWork, Terms, TrainedBlock, Training

if TYPE_CHECKING:
    import torch


class MTL(LocalObjective):
    """Mean-regularised multi-task learning: ``min sum_k l_k(w_k) + (lambda / 2) sum_k |w_k - w_mean|^2``.

    This is MOCHA's ``lambda_1 tr(W Omega W^T)`` with ``Omega = (I - 1 1^T / m)^2`` and ``lambda_1 = lambda /
    2``; its ``lambda_2 |W|^2`` is ``training.weight_decay = 2 lambda_2``. MOCHA solves convex tasks in their
    dual; here the local loss is that of any network, and clients take SGD steps on ``l_k(w) + (lambda / 2)
    |w - w_mean|^2`` from their own model, with ``w_mean`` as they received it. The first step of a round
    follows the gradient of the objective in ``w_k``.

    The server's model is the mean of the latest models of all clients that ever took part, even if only some
    take part in a round. A client downloads that mean and uploads its model. (What it sends here is the mean
    plus the change of its own model, ``w_mean + w_k+ - w_k``, so the server does not have to store what a
    client sent before.) Within clusters the mean is that of the cluster, which is the relationship of
    clustered multi-task learning; clusters that change later keep the means that they had.

    Decisions. All clients start from the common ``w_0``, so that ``lam: 0`` is SOLO. They are tested with
    their own model; a client that has not taken part yet has none and is tested with the mean. Relationships
    learned from ``W`` (MOCHA's ``Omega = (W^T W)^(1/2) / tr``) are not implemented: they need the models of
    all clients in one place in every round.

    Published code (that of LG-FedAvg) has a matrix of ones in place of ``I``, which pulls the *sum* of the
    models to zero, and uses the models of the first clients in place of the sampled clients' models.
    """

    name: Literal["mtl"] = "mtl"
    lam: float = Field(0.1, ge=0, description="lambda, the weight of the pull towards the mean")

    renamed: ClassVar[Mapping[str, str]] = {"strength": "lam", "lambda": "lam"}

    personal: ClassVar[bool] = True
    counts_absent: ClassVar[bool] = True

    def check(self, spec: ModelSpec, training: Training, validation: float) -> None:
        """Refuse a lambda of 2 (1 + momentum) / lr or more, with which SGD (heavy ball) diverges."""
        bound = 2 * (1 + training.momentum) / training.lr
        if self.lam >= bound:
            what = f"steps of training.lr {training.lr:g} with a pull of {self.lam:g} overshoot and diverge"
            raise ConfigError("local.lam", what, f"it must be below {bound:g}")

    def work(self, work: LocalWork) -> LocalWork:
        """The gradient gets ``lambda (w - w_k)``; :meth:`terms` adds the rest."""
        return replace(work, proximal=self.lam)

    def weights(
        self, sizes: NDArray[np.int64], rows: NDArray[np.int64], training: Training
    ) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        """Weight 1 for each client."""
        return np.ones(len(sizes)), None

    def state_size(self, spec: ModelSpec) -> int:
        """The client's own model w_k."""
        return spec.P

    def begin(self, start: Start) -> torch.Tensor:
        """w_k; for clients that never took part it is w_0, which is also written to their state."""
        import torch

        own_models = start.state
        if start.fresh.any():
            initial = torch.from_numpy(start.spec.initial()).to(own_models)
            own_models[torch.from_numpy(start.fresh).to(own_models.device)] = initial
        return own_models

    def terms(self, start: Start) -> Terms:
        """``lambda (w_k - w_mean)``: with the proximal term that makes ``lambda (w - w_mean)``."""
        if not self.lam:
            return Terms()
        import torch

        own_models, offset = self.begin(start), torch.empty_like(start.state)
        for part in cached(own_models):
            torch.sub(own_models[part], start.models[part], out=offset[part]).mul_(self.lam)
        return Terms(offset=offset)

    def finish(self, start: Start, block: TrainedBlock) -> Outcome:
        """Keep the trained model; send the mean plus its change."""
        import torch

        sent = torch.empty_like(block.rows)
        for part in cached(sent):
            # In double precision: a client whose model was the mean sends its trained model, bit for bit.
            sent[part] = block.rows[part].double().sub_(start.state[part]).add_(start.models[part])
        fresh = torch.from_numpy(start.fresh).to(sent.device)
        sent[fresh] = block.rows[fresh]
        return Outcome(sent, block.rows, start.server)

    def client_model(self, model: torch.Tensor, state: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
        """The client's own model."""
        return state

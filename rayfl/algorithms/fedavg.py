"""FedAvg: one global model. McMahan et al., AISTATS 2017, Algorithm 1."""

from __future__ import annotations

from typing import Literal

from rayfl.algorithms.base import Algorithm


class FedAvg(Algorithm):
    """Federated averaging: one global model, the mean of the sampled clients' models weighted by n_i.

    ``training.participation`` is the paper's C (rho), ``epochs`` E, ``batch_size`` B, ``lr`` eta. The
    algorithm's base class *is* FedAvg, so there is nothing to add.
    """

    name: Literal["fedavg"] = "fedavg"

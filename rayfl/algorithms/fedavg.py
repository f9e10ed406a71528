"""FedAvg: one global model. McMahan et al., AISTATS 2017, Algorithm 1."""

from __future__ import annotations

from typing import Literal

from rayfl.algorithms.base import Algorithm


class FedAvg(Algorithm):
    """Federated averaging: one model for all, the mean of the trained models weighted by samples.

    In each round the server sends the model to a cohort of clients. Each of them trains it on its own data
    for some epochs of SGD. The next model is the mean of the trained ones, weighted by the numbers of samples
    n_i.

    The base class :class:`Algorithm` *is* FedAvg, so this class adds nothing.

    Symbols:
        C (rho), share of the clients in a round: ``training.participation``
        E, local epochs: ``training.epochs``
        B, batch size: ``training.batch_size``
        eta, learning rate: ``training.lr``

    Cost:
        P parameters down and P up for each client of the cohort. No client state.

    Fails when:
        Clients need different models: one model cannot learn equal images under different labels, and it
        serves small groups of clients worse than large ones.

    Shown by:
        - experiments/cfl/README.md: 33 % with permuted labels
        - experiments/mt_hfl/digits.yaml: the mean accuracy with three tasks
    """

    name: Literal["fedavg"] = "fedavg"

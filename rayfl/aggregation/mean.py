"""The weighted mean, as FedAvg's. McMahan et al., AISTATS 2017."""

from __future__ import annotations

from typing import Literal

from rayfl.aggregation.base import Aggregation


class Mean(Aggregation):
    """The mean of the clients' models with the weights of the method: ``sum_j a_kj w_j / sum_j a_kj``.

    FedAvg's weights are ``a_kj = n_j``. Blocks of clients send sums of models, and no model of a single
    client reaches a server of the simulation. All other rules need the models themselves there.
    """

    name: Literal["mean"] = "mean"

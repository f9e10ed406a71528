"""A method: FedAvg in which a client counts by a power of its number of samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import scipy.sparse as sp
from pydantic import Field

from rayfl.algorithms import Algorithm, Mixing, Plan, ServerState, Setup
from rayfl.training.reports import Reports


class MyMethod(Algorithm):
    """FedAvg with weights ``n_i ** power``.

    ``rayfl run digits-demo --plugin my_method.py algorithm=my_method algorithm.power=0`` weights all clients
    equally.
    """

    name: Literal["my_method"] = "my_method"
    power: float = Field(0.5, ge=0, description="1: FedAvg; 0: all clients count the same")

    def mix(self, setup: Setup, state: ServerState, plan: Plan, reports: Reports) -> Mixing:
        """FedAvg's weights n_i times n_i ** (power - 1), which the servers normalise."""
        mixing = super().mix(setup, state, plan, reports)
        factors = setup.sizes[plan.cohort].astype(np.float64) ** (self.power - 1)  # (M,)
        return replace(mixing, weights=sp.csr_array(mixing.weights.multiply(factors)))

"""Krum and Multi-Krum. Blanchard, El Mhamdi, Guerraoui, Stainer, NeurIPS 2017, Section 4."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rayfl.aggregation.base import Aggregation, squared_distances
from rayfl.errors import ConfigError


class Krum(Aggregation):
    """The model that is closest to its neighbours, or with ``m`` above 1 the mean of the m closest models.

    The score of a client is the sum of the squared distances of its update to the ``n - f - 2`` updates
    closest to it (at least one), where n is the number of clients. The client with the least score is chosen
    (ties: the first); Multi-Krum chooses m, at most all, and takes their mean. As in the paper all clients
    have equal weight, regardless of their numbers of samples.

    To withstand f clients that send arbitrary models, ``n >= 2 f + 3`` is needed. Fewer clients are an error,
    even in a single cluster. With ``f: 0`` any number is allowed.
    """

    name: Literal["krum"] = "krum"
    f: int = Field(1, ge=0, description="clients of a model that may send anything (f)")
    m: int = Field(1, ge=1, description="clients whose mean is taken (m); 1: Krum, more: Multi-Krum")

    def check(self, clients: int) -> None:
        """Refuse too few clients: ``n >= 2 f + 3`` is needed."""
        needed = 2 * self.f + 3 if self.f else 1
        if clients < needed:
            what = f"{self.f} needs {needed} clients (2 f + 3), but {clients} contribute to a model"
            max_f = max(0, (clients - 3) // 2)
            raise ConfigError("aggregation.f", what, f"use at most {max_f}, or let more clients take part")

    def reweigh(
        self, gram: NDArray[np.float64], weights: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], float]:
        """1 for the chosen clients, 0 for the others."""
        n = len(gram)
        distances = np.sort(squared_distances(gram), axis=1)  # each row begins with the client itself
        scores = distances[:, 1 : 1 + max(1, n - self.f - 2)].sum(axis=1)  # s(i)
        chosen = np.zeros(n)
        chosen[np.argsort(scores, kind="stable")[: self.m]] = 1.0
        return chosen, 0.0

"""Dirichlet proportions inside super-clusters of classes."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from rayfl.data.partitions._dealing import Draws, Owners, dirichlet_owners
from rayfl.data.partitions._super_clusters import SuperClusterPartition


class ScDirichlet(SuperClusterPartition):
    """SC-Dir: every client belongs to one super-cluster of classes, divided in Dirichlet proportions.

    Vahidian, thesis 5.3.1: ``p_c ~ Dir(alpha)`` over the clients of the super-cluster of class c.
    """

    name: Literal["sc_dirichlet"] = "sc_dirichlet"
    alpha: float = Field(
        0.5, gt=0, le=1e6, description="concentration (alpha); small: few classes per client"
    )
    min_samples: int = Field(
        1, ge=1, description="minimum number of samples per client; draws with fewer are rejected"
    )
    attempts: int = Field(50, ge=1, le=10_000, description="maximum number of draws")
    capped: bool = Field(
        False,
        description="NIID-Bench's code: a client with its fair share n/N gets none of the remaining classes",
    )

    @override
    def deal(self, labels: NDArray[np.int64], clients: int, place: int, seed: int) -> Owners:
        draws = Draws(self.alpha, self.min_samples, self.attempts, self.capped)
        return dirichlet_owners(labels, clients, draws, seed, place)

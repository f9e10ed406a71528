"""MT-HFL: data similarity one-shot clustering for multi-task hierarchical federated learning.

Ali and Arafa, 2024, Algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rayfl.algorithms.one_shot import OneShotClustered


class MTHFL(OneShotClustered):
    """Users of the same task share a local parameter server; all tasks share the first layers.

    1. Users exchange the q leading eigenvectors of ``G_i = Phi(X_i)^T Phi(X_i) / n_i``
       (``clustering.signature.q``; ``clustering.features`` is Phi), estimate their relevance to each other
       (Eqs. 2-4), and the GPS clusters ``R = (r + r^T) / 2`` (Eq. 5) into T tasks
       (``clustering.n_clusters``).
    2. Each LPS runs FedAvg over its users for ``hierarchy.global_every`` local rounds, then the GPS averages
       the ``hierarchy.common_layers`` over the LPSs and broadcasts them; the other layers stay with the LPS.
       An LPS counts with the samples that took part since the last global round, or with all that its users
       hold (``hierarchy.weights: population``), as the paper, where all take part, has it.

    Special cases: ``common_layers: all`` is hierarchical FedAvg (client-edge-cloud), and with
    ``global_every: 1`` plain FedAvg; ``common_layers: none`` is plain clustered training.
    """

    name: Literal["mt_hfl"] = "mt_hfl"
    defaults: ClassVar[Mapping[str, Any]] = {
        "clustering": {
            "signature": {"name": "spectrum", "q": 5},
            "proximity": "relevance",
            "linkage": "average",
        },
        "hierarchy": {"common_layers": 1},
    }

"""PACFL: principal angles between client data subspaces, clustered once before training.

Vahidian et al., "Efficient distribution similarity identification in clustered federated learning via
principal angles between client data subspaces", AAAI 2023 (thesis chapter 3.4, Algorithm 7).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rayfl.algorithms.one_shot import OneShotClustered


class PACFL(OneShotClustered):
    """One-shot clustering by the principal angles between the clients' data subspaces.

    1. Each client sends the first ``clustering.signature.p`` (p = 3..5) left singular vectors U_i of its
       data, samples as columns (``per_class: true``: p vectors a class, as in the authors' code).
    2. The server forms the proximity matrix in degrees: ``clustering.proximity`` is ``principal_angle``
       (Eq. 3.1), ``vector_angle_sum`` (Eq. 3.2) or ``vector_angle_min`` (the authors' code).
    3. Agglomerative clustering with average linkage, cut at ``clustering.threshold`` (beta) or into
       ``clustering.n_clusters``. A huge beta gives one cluster, FedAvg; a tiny one gives SOLO's groups.
    4. FedAvg in each cluster, all starting from the same w_0.
    """

    name: Literal["pacfl"] = "pacfl"
    defaults: ClassVar[Mapping[str, Any]] = {
        "clustering": {
            "signature": {"name": "subspace", "p": 3},
            "proximity": "principal_angle",
            "linkage": "average",
        }
    }

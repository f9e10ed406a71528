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

    Clients whose data point in similar directions belong together. Before training, each client sends a few
    singular vectors of its data, and the server clusters the clients by the angles between them. Each cluster
    then trains a model with FedAvg.

    1. Each client sends the first p left singular vectors U_i of its data, samples as columns.
    2. The server computes the proximity matrix in degrees. ``clustering.proximity`` is ``principal_angle``
       (Eq. 3.1), ``vector_angle_sum`` (Eq. 3.2) or ``vector_angle_min`` (the authors' code).
    3. Agglomerative clustering with average linkage, cut at beta or into a given number of clusters. A large
       beta gives one cluster (FedAvg), a small one gives one cluster for each client (SOLO).
    4. FedAvg in each cluster, all starting from the same w_0.

    ``clustering.signature.per_class: true`` takes p vectors for each class, as the authors' code does.

    Symbols:
        p (3 to 5): ``clustering.signature.p``
        beta, in degrees: ``clustering.threshold``
        number of clusters: ``clustering.n_clusters``

    Cost:
        d p numbers up for each client, once, for samples of d features. Then as FedAvg. No client state.

    Fails when:
        Clients differ in labels but not in inputs (equal images under swapped labels), because signatures see
        inputs only; or clients have so few samples that the angles mostly show chance.

    Shown by:
        - experiments/clustered/README.md: swapped labels, and 12.5 samples per client
    """

    name: Literal["pacfl"] = "pacfl"
    defaults: ClassVar[Mapping[str, Any]] = {
        "clustering": {
            "signature": {"name": "subspace", "p": 3},
            "proximity": "principal_angle",
            "linkage": "average",
        }
    }

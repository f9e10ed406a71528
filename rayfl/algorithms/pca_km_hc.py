"""PCA+kM+HC: FLT's baseline with a linear map in the place of encoder and UMAP.

Jamali-Rad, Abdizadeh, Singh, "Federated learning with taskonomy for non-IID data", IEEE TNNLS 2022, section
IV (baselines).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rayfl.algorithms.one_shot import OneShotClustered


class PCAkMHC(OneShotClustered):
    """One-shot clustering by k-means centroids of principal components: FLT's linear baseline.

    Each client projects its samples on its own principal components and sends k centroids of the result. The
    server clusters the clients by the distance of their nearest centroids. Each cluster trains with FedAvg.

    1. The projection is fitted by each client on its own samples (``clustering.features: client_pca``), as
       the paper says ("at client-side") and the authors' code does.
    2. The distance of two clients is that of their nearest centroids. Hierarchical clustering makes
       ``clustering.n_clusters`` clusters, which the paper takes as given, or the number that the tree
       proposes.
    3. FedAvg in each cluster.

    ``clustering.features=pca`` is another method: one PCA, fitted on samples that the server holds out
    (``data.server_share``), gives all clients the same coordinates. It finds groups that the paper's method
    misses.

    Symbols:
        k: ``clustering.signature.k``
        number of clusters: ``clustering.n_clusters``

    Cost:
        k centroids up for each client, once. Then as FedAvg. No client state.

    Fails when:
        Almost always: coordinates that each client fits on its own cannot be compared (ARI 0.03 to 0.07 on
        letters). Use ``clustering.features=pca``.

    Shown by:
        - experiments/clustered/README.md: planted clusters, letters
    """

    name: Literal["pca_km_hc"] = "pca_km_hc"
    defaults: ClassVar[Mapping[str, Any]] = {
        "clustering": {
            "signature": {"name": "centroids", "k": 5},
            "features": {"name": "client_pca"},
            "proximity": "min_distance",
            "linkage": "ward",
        }
    }

"""PCA+kM+HC: FLT's baseline with a linear map in the place of encoder and UMAP.

Jamali-Rad, Abdizadeh, Singh, "Federated learning with taskonomy for non-IID data", IEEE TNNLS 2022, section
IV (baselines).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rayfl.algorithms.one_shot import OneShotClustered


class PCAkMHC(OneShotClustered):
    """One-shot clustering of k-means centroids of principal components.

    1. Every client projects its samples on the principal components of its own samples
       (``clustering.features``), as the paper has it ("at client-side") and the authors' code does, and sends
       the k centroids of the result (``clustering.signature``), in coordinates that no other client has.
    2. The distance of two clients is that of their nearest centroids; hierarchical clustering into
       ``clustering.n_clusters``, which has to be given, as in the paper, or is proposed by the tree.
    3. FedAvg in each cluster.

    ``clustering.features=pca`` is another method: one PCA, fitted on samples that the server holds out
    (``data.server_share``), gives all clients the same coordinates. It finds groups that the paper's does
    not (experiments/clustered).
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

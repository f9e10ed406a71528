"""FLIS (HC): clients clustered once by what their first models predict on the server's data.

Morafah, Vahidian, Wang, Lin, "FLIS: clustered federated learning via inference similarity for non-IID data
distribution", 2022; thesis section 3.3, Algorithm 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rayfl.algorithms.one_shot import OneShotClustered


class FLISHC(OneShotClustered):
    """One-shot clustering by inference similarity.

    1. All clients train from w_0 for a round's local work and send their models; the server lets each
       predict its own samples (``clustering.signature.data``).
    2. Hierarchical clustering on ``1 - A``, A being the cosine of the predictions, cut at
       ``clustering.threshold``: one minus the thesis' beta.
    3. FedAvg in each cluster from w_0; the clusters stay. Unseen clients train from w_0 too, by the work of
       round 0, and extend A as in PACFL.

    beta = 0 (threshold 1) is FedAvg, beta = 1 (threshold 0) SOLO's groups.
    """

    classes_only: ClassVar[bool] = True

    name: Literal["flis_hc"] = "flis_hc"
    defaults: ClassVar[Mapping[str, Any]] = {
        "clustering": {
            "signature": {"name": "predictions"},
            "proximity": "cosine",
            "linkage": "average",
        }
    }

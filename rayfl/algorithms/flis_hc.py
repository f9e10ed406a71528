"""FLIS (HC): clients clustered once by what their first models predict on the server's data.

Morafah, Vahidian, Wang, Lin, "FLIS: clustered federated learning via inference similarity for non-IID data
distribution", 2022; thesis section 3.3, Algorithm 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rayfl.algorithms.one_shot import OneShotClustered


class FLISHC(OneShotClustered):
    """One-shot clustering by what the clients' first models predict on the server's data.

    All clients train the same first model for one round and send it. The server applies each of these models
    to samples that it holds and clusters clients whose models predict alike. Each cluster trains with
    FedAvg; the clusters stay.

    1. All clients train from w_0 for the local work of a round.
    2. Hierarchical clustering on ``1 - A``, where A is the cosine of the predictions, cut at ``1 - beta``.
    3. FedAvg in each cluster from w_0. New clients also train from w_0, with the local work of round 0, and
       are added to A as in PACFL.

    beta = 0 (threshold 1) is FedAvg, beta = 1 (threshold 0) gives SOLO's groups.

    Symbols:
        1 - beta: ``clustering.threshold``
        the server's samples: ``clustering.signature.data``, ``data.server_share``

    Cost:
        P parameters down and P up for *each* client, once. Then as FedAvg. No client state.

    Fails when:
        The first models have learned little (ARI 0.3 to 0.6 on clients of four datasets), or the server's
        samples are noise or of another dataset.

    Shown by:
        - experiments/clustered/README.md: planted clusters, clients of four datasets
        - experiments/flis/README.md: noise and another dataset as the server's data
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

"""MT-HFL: data similarity one-shot clustering for multi-task hierarchical federated learning.

Ali and Arafa, 2024, Algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rayfl.algorithms.one_shot import OneShotClustered


class MTHFL(OneShotClustered):
    """Users with the same task share a local server; all tasks share the first layers.

    Users exchange a few eigenvectors of their data and measure how relevant they are to each other. The
    global server clusters them into tasks. Each task trains a model of its own, whose first layers are
    averaged over all tasks.

    1. User i computes ``G_i = Phi(X_i)^T Phi(X_i) / n_i`` and sends its q leading eigenvectors. From those of
       the others it estimates the mutual relevance r (Eqs. 2-4). The GPS clusters ``R = (r + r^T) / 2`` (Eq.
       5) into T tasks.
    2. Each LPS runs FedAvg over its users for kappa rounds. Then the GPS averages the common layers over the
       LPSs and sends them back; the other layers stay with the LPS. An LPS is weighted by the samples that
       took part since the last global round, or by all that its users hold (``hierarchy.weights:
       population``), as in the paper, where all users take part.

    Special cases: ``common_layers: all`` is hierarchical FedAvg (client-edge-cloud), and with ``global_every:
    1`` plain FedAvg. ``common_layers: none`` is plain clustered training.

    Symbols:
        q: ``clustering.signature.q``
        Phi: ``clustering.features``
        T: ``clustering.n_clusters``
        kappa: ``hierarchy.global_every``
        common layers: ``hierarchy.common_layers``

    Cost:
        q d + N numbers up for each of N users, once, and the eigenvectors of all others down. Then as FedAvg,
        and the common layers up and down for each LPS every kappa rounds. No client state.

    Fails when:
        Tasks differ in labels but not in inputs; or users have so few samples that their eigenvectors
        mostly show chance.

    Shown by:
        - experiments/clustered/README.md: swapped labels, and 12.5 samples per client
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

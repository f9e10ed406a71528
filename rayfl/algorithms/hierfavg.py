"""HierFAVG: client-edge-cloud hierarchical federated learning (Liu et al., 2020, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rayfl.algorithms.base import Algorithm


class HierFAVG(Algorithm):
    """One model for all, averaged at edge servers often and in the cloud seldom.

    1. A client makes kappa_1 local updates: ``training.epochs`` passes over its data.
    2. Each edge server l averages its clients' models by ``|D_i|``, once a round; ``hierarchy.edges`` says
       how many edges there are (L), or which client belongs to which.
    3. After kappa_2 rounds (``hierarchy.global_every``) the cloud averages the edges' models by ``|D_l|``,
       the samples that all of an edge's clients hold (``hierarchy.weights: population``).

    With one edge, or with kappa_2 = 1 and all clients taking part, this is FedAvg. Other methods take edges
    too: there every cluster has a model at each edge.
    """

    name: Literal["hierfavg"] = "hierfavg"
    takes: ClassVar[tuple[str, ...]] = ("hierarchy",)
    defaults: ClassVar[Mapping[str, Any]] = {
        "hierarchy": {"edges": 5, "global_every": 2, "weights": "population"},
    }

"""HierFAVG: client-edge-cloud hierarchical federated learning (Liu et al., 2020, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rayfl.algorithms.base import Algorithm


class HierFAVG(Algorithm):
    """One model for all, averaged often at edge servers and rarely in the cloud.

    Each edge server averages the models of its own clients in every round. Every kappa_2 rounds the cloud
    averages the models of the edges and sends the mean back. This saves traffic between edges and cloud.

    1. A client makes kappa_1 local updates: ``training.epochs`` passes over its data.
    2. Edge server l averages its clients' models by their numbers of samples, ``|D_i|``.
    3. The cloud averages the edges' models by ``|D_l|``, the samples that all clients of an edge hold
       (``hierarchy.weights: population``).

    Methods that cluster take edges, too: every cluster then has a model at each edge.

    Symbols:
        kappa_1: ``training.epochs``
        kappa_2: ``hierarchy.global_every``
        L, edges: ``hierarchy.edges``

    Cost:
        As FedAvg between clients and edges; P parameters up and down for each edge every kappa_2 rounds. No
        client state.

    Fails when:
        The clients of an edge are alike and those of other edges differ, and kappa_2 is large: the edges
        drift apart between global rounds. With one edge, or with kappa_2 = 1 and all clients taking part, it
        is FedAvg.

    Shown by:
        - tests/servers/test_hierarchy.py::test_one_edge_is_fedavg
        - tests/servers/test_hierarchy.py::test_a_cloud_that_averages_every_round_is_fedavg
        - experiments/servers/hierfavg.yaml: USPS, two shards a client, five cloud averages, five seeds:
          76.7 % with averages at the edges every epoch, 69.9 % without
        - the drift: reasoned, not measured
    """

    name: Literal["hierfavg"] = "hierfavg"
    takes: ClassVar[tuple[str, ...]] = ("hierarchy",)
    defaults: ClassVar[Mapping[str, Any]] = {
        "hierarchy": {"edges": 5, "global_every": 2, "weights": "population"},
    }

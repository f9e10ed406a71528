"""Random clustering: MT-HFL's baseline (Ali and Arafa, section III)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from rayfl.algorithms.contract import Clients, Regrouping, Setup
from rayfl.algorithms.mt_hfl import MTHFL
from rayfl.algorithms.one_shot import OneShotClustered, OneShotState
from rayfl.clustering.cluster import Clusters
from rayfl.clustering.grouping import shuffle_members
from rayfl.random import generator


class RandomClustering(OneShotClustered):
    """Clusters of the right sizes with random members; training as in MT-HFL.

    This is a baseline: the difference between it and MT-HFL is what clustering by data is worth. The clusters
    are found as specified by ``clustering``, and then their members are shuffled with the run's seed.

    Symbols:
        as MT-HFL: see :class:`rayfl.algorithms.mt_hfl.MTHFL`

    Cost:
        As MT-HFL.

    Fails when:
        Clients differ. It is a baseline and not a method to use.

    Shown by:
        - experiments/mt_hfl/README.md: accuracy per task
    """

    name: Literal["random_clustering"] = "random_clustering"
    shuffles: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = MTHFL.defaults

    def regroup(self, setup: Setup, state: OneShotState, clusters: Clusters) -> Regrouping[OneShotState]:
        """As MT-HFL, with shuffled members."""
        labels = clusters.labels.copy()
        labels[labels >= 0] = shuffle_members(labels[labels >= 0], setup.seed)
        return super().regroup(setup, state, replace(clusters, labels=labels))

    def find(
        self,
        setup: Setup,
        state: OneShotState,
        old: NDArray[np.int64],
        newcomers: NDArray[np.int64],
        clients: Clients,
    ) -> NDArray[np.int64]:
        """Newcomers send their signatures, but each joins the cluster of an old client drawn at random."""
        signed = super().find(setup, state, old, newcomers, clients) >= 0
        draws = [generator(setup.seed, "random newcomer", client).random() for client in newcomers.tolist()]
        drawn = state.assignment[old[(np.array(draws) * len(old)).astype(np.int64)]]
        return np.where(signed, drawn, -1)

"""Random clustering: MT-HFL's baseline (Ali and Arafa, section III)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from rayfl.algorithms.base import OneShotClustered, Regrouping, ServerState, Setup
from rayfl.algorithms.mt_hfl import MTHFL
from rayfl.clustering.grouping import shuffle_members


class RandomClustering(OneShotClustered):
    """The same cluster sizes as the data would give, members drawn at random; training as MT-HFL.

    What clustering by data is worth is the difference to this baseline: the clusters are found as
    ``clustering`` says, and then their members are shuffled (keyed by the seed).
    """

    name: Literal["random_clustering"] = "random_clustering"
    defaults: ClassVar[Mapping[str, Any]] = MTHFL.defaults

    def regroup(self, setup: Setup, state: ServerState, labels: NDArray[np.int64]) -> Regrouping:
        """As MT-HFL, with shuffled members."""
        return super().regroup(setup, state, shuffle_members(labels, setup.seed))

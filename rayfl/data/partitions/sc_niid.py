"""Every client has shards, or a few labels, of one super-cluster of classes."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from typing_extensions import override

from rayfl.data.partitions._dealing import Owners, label_skew_owners, only_with, shard_owners
from rayfl.data.partitions._super_clusters import SuperClusterPartition
from rayfl.random import generator


class ScNiid(SuperClusterPartition):
    """SC-NIID: every client has shards, or a few labels, of one super-cluster of classes only.

    Vahidian, thesis 5.2.2: the samples of each super-cluster are cut into shards, two per client ("SC-NIID
    (2)"). With ``rho`` (5.3.1, "SC-NIID (rho %)") a client has that fraction of its super-cluster's labels
    instead; each label is divided evenly among its owners.
    """

    name: Literal["sc_niid"] = "sc_niid"
    shards_per_client: int = Field(2, ge=1, description="number of shards per client")
    rho: float | None = Field(
        None,
        gt=0,
        le=1,
        description="fraction of its super-cluster's labels that a client has, in place of shards",
    )

    @model_validator(mode="after")
    def _shards_or_labels(self) -> ScNiid:
        only_with(self, "shards_per_client", self.rho is None, "with rho a client has labels, not shards")
        return self

    @override
    def deal(self, labels: NDArray[np.int64], clients: int, place: int, seed: int) -> Owners:
        rng = generator(seed, "partition super-cluster", place)
        if self.rho is None:
            return shard_owners(labels, clients, self.shards_per_client, rng)
        labels_per_client = max(1, round(self.rho * len(np.unique(labels))))
        return label_skew_owners(labels, clients, labels_per_client, rng)

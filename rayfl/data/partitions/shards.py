"""Sort by label, cut into shards, give a few to every client."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from rayfl.data.base import Assignment, Partition, Samples
from rayfl.data.partitions._dealing import by_owner, check_labels, shard_owners
from rayfl.random import generator


class Shards(Partition):
    """Shards: the samples, sorted by label, are cut into N x s equal shards, s for every client.

    McMahan et al. 2017, section 3 (there s = 2). All samples are used; if they cannot be cut evenly, the
    first shards have one sample more. With ``shard_size`` there are as many shards of that size as there can
    be, and those that no client gets are not used (Sub-FedAvg, Vahidian's thesis, section 4.4.1: of 250).
    """

    classes_only: ClassVar[bool] = True

    name: Literal["shards"] = "shards"
    shards_per_client: int = Field(2, ge=1, description="number of shards per client (s)")
    shard_size: int | None = Field(
        None, ge=1, description="number of samples per shard; default: all samples are used"
    )

    @override
    def assign(self, samples: Samples, seed: int) -> Assignment:
        labels = samples.y_train
        check_labels(labels, samples.classes, self.clients)
        rng = generator(seed, "partition")
        owners = shard_owners(labels, self.clients, self.shards_per_client, rng, self.shard_size)
        return Assignment(by_owner(owners, self.clients))

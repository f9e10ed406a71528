"""Every client draws from the same distribution."""

from __future__ import annotations

from typing import Literal

import numpy as np
from typing_extensions import override

from rayfl.data.base import Assignment, Samples
from rayfl.data.partitions._dealing import SizedPartition, by_owner, check_labels
from rayfl.random import generator


class Iid(SizedPartition):
    """IID: the samples are shuffled and divided, evenly or into unequal sizes."""

    name: Literal["iid"] = "iid"

    @override
    def assign(self, samples: Samples, seed: int) -> Assignment:
        labels = samples.y_train
        check_labels(labels, samples.classes, self.clients)
        rng = generator(seed, "partition")
        sizes = self.client_sizes(len(labels), self.clients, self.samples, rng, "partition")
        owners = np.full(len(labels), -1)
        owners[rng.permutation(len(labels))[: sizes.sum()]] = np.repeat(np.arange(self.clients), sizes)
        return Assignment(by_owner(owners, self.clients))

"""Every client has samples of a few labels only."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field
from typing_extensions import override

from rayfl.data.base import Assignment, Partition, Samples
from rayfl.data.partitions._dealing import by_owner, check_labels, label_skew_owners
from rayfl.random import generator


class LabelSkew(Partition):
    """Label skew: every client has a random fraction rho of the labels, each divided evenly among its owners.

    "Non-IID label skew (20 %)" of PACFL (Vahidian et al. 2023), quantity-based label imbalance "#C=k" of
    NIID-Bench (Li et al. 2022). A label that no client drew is not used; this happens only if there are more
    labels than clients times labels per client.
    """

    classes_only: ClassVar[bool] = True

    name: Literal["label_skew"] = "label_skew"
    rho: float = Field(0.2, gt=0, le=1, description="fraction of the labels that each client has")

    @override
    def assign(self, samples: Samples, seed: int) -> Assignment:
        labels = samples.y_train
        check_labels(labels, samples.classes, self.clients)
        labels_per_client = max(1, round(self.rho * len(np.unique(labels))))
        owners = label_skew_owners(labels, self.clients, labels_per_client, generator(seed, "partition"))
        return Assignment(by_owner(owners, self.clients))

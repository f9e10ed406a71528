"""Every client has samples of a few labels only."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from rayfl.data.base import Assignment, Partition, Samples
from rayfl.data.partitions._dealing import by_owner, check_labels
from rayfl.errors import DataError
from rayfl.random import generator


class LabelSkew(Partition):
    """Label skew: every client has a random fraction rho of the labels, each dealt evenly to its owners.

    "Non-IID label skew (20 %)" of PACFL (Vahidian et al. 2023), quantity-based label imbalance "#C=k" of
    NIID-Bench (Li et al. 2022). A label that no client drew stays unused; this happens only if there are
    more labels than clients times labels per client.
    """

    name: Literal["label_skew"] = "label_skew"
    rho: float = Field(0.2, gt=0, le=1, description="fraction of the labels that every client has")

    @override
    def assign(self, samples: Samples, seed: int) -> Assignment:
        labels, classes = samples.y_train, samples.classes
        check_labels(labels, classes, self.clients)
        present = np.unique(labels)
        each = min(max(1, round(self.rho * classes)), len(present))
        rng = generator(seed, "partition")
        has = draw_labels(self.clients, len(present), each, rng)
        owners = np.full(len(labels), -1)
        for place, label in enumerate(present):
            holders = np.flatnonzero(has[:, place])
            members = rng.permutation(np.flatnonzero(labels == label))
            if len(holders) > len(members):
                raise DataError(
                    f"partition: label {label} has {len(members)} samples for {len(holders)} clients; "
                    "use fewer clients or a smaller rho"
                )
            if len(holders):
                owners[members] = rng.permutation(holders)[np.arange(len(members)) % len(holders)]
        return Assignment(by_owner(owners, self.clients))


def draw_labels(clients: int, labels: int, each: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Which labels each client has, ``(clients, labels)``, ``each`` in every row.

    The draws are random, except that a few random clients share out a permutation of all labels, so
    that no label is left over if ``clients * each >= labels``.
    """
    chosen = np.argsort(rng.random((clients, labels)), axis=1)[:, :each]
    sharing = rng.permutation(clients)[: -(-labels // each)]
    shared = np.arange(len(sharing) * each).reshape(len(sharing), each) % labels
    chosen[sharing] = rng.permutation(labels)[shared]
    has = np.zeros((clients, labels), bool)
    np.put_along_axis(has, chosen, True, axis=1)
    return has

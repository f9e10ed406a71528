"""Easy clients and hard clients."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from typing_extensions import override

from rayfl.data.base import Assignment, Partition, Samples
from rayfl.data.partitions._dealing import Draws, Owners, by_owner, check_labels, dirichlet_owners, only_with
from rayfl.data.partitions._expert import Kind, expert_losses, given_losses
from rayfl.errors import DataError
from rayfl.random import generator


class Difficulty(Partition):
    """Difficulty: samples are assigned in order of difficulty, so that there are easy and hard clients.

    Algorithm 2 of the thesis (Vahidian 2023, section 2.6.3). The numbers of samples of each class and client
    come from a Dirichlet (or IID) division. The samples of each class are ranked by the loss of an expert
    model. Every client gets the fraction ``ordered`` (f_ord) of its samples of a class from consecutive ranks
    (the first client the easiest), and the rest at random.

    The thesis' expert has the topology of the global model and is trained on the whole dataset: ``rayfl
    expert`` trains it and writes the ``losses``. Without that file the expert is scikit-learn's, trained on
    half of the data (at most 10,000 samples) to score the other half.
    """

    classes_only: ClassVar[bool] = True

    name: Literal["difficulty"] = "difficulty"
    ordered: float = Field(
        1.0, ge=0, le=1, description="fraction f_ord of each client's samples that are assigned by difficulty"
    )
    labels: Literal["dirichlet", "iid"] = Field(
        "dirichlet", description="how the classes are divided among clients"
    )
    alpha: float = Field(0.5, gt=0, le=1e6, description="concentration of the Dirichlet distribution")
    min_samples: int = Field(
        1, ge=1, description="minimum number of samples per client; Dirichlet draws with fewer are rejected"
    )
    attempts: int = Field(50, ge=1, le=10_000, description="maximum number of Dirichlet draws")
    expert: Kind = Field("mlp", description="mlp: one hidden layer of 200 units; logistic: none")
    losses: Path | None = Field(
        None, description="a .npy file with the loss of every training sample, in place of an expert"
    )

    @model_validator(mode="after")
    def _refuse_unused_settings(self) -> Difficulty:
        for setting in ("alpha", "attempts"):
            only_with(self, setting, self.labels == "dirichlet", "it is used with labels=dirichlet")
        only_with(self, "expert", self.losses is None, "losses replaces the expert")
        only_with(self, "expert", self.ordered > 0, "with ordered=0 nothing is assigned by difficulty")
        return self

    @override
    def assign(self, samples: Samples, seed: int) -> Assignment:
        labels = samples.y_train
        check_labels(labels, samples.classes, self.clients)
        if samples.tokens and self.losses is None:
            raise DataError(
                "partition: difficulty has no expert for texts; give partition.losses, a .npy with one loss "
                "a training sample"
            )
        division = self._division(labels, seed)
        if self.losses is not None:
            losses = given_losses(self.losses, samples)
        else:
            losses = expert_losses(samples, self.expert)
        owners = np.empty(len(labels), np.int64)
        for label in np.unique(labels).tolist():
            members = np.flatnonzero(labels == label)
            counts = np.bincount(division[members], minlength=self.clients)
            ranked = members[np.argsort(losses[members], kind="stable")]
            rng = generator(seed, "partition difficulty", label)
            owners[ranked] = by_rank(counts, self.ordered, rng)
        return Assignment(by_owner(owners, self.clients))

    def _division(self, labels: NDArray[np.int64], seed: int) -> Owners:
        """The owners of a Dirichlet or IID division, of which only the class counts per client are used."""
        if self.labels == "dirichlet":
            draws = Draws(self.alpha, self.min_samples, self.attempts)
            return dirichlet_owners(labels, self.clients, draws, seed)
        if self.clients * self.min_samples > len(labels):
            raise DataError(
                f"partition.min_samples: {self.clients} clients with {self.min_samples} samples each need "
                f"{self.clients * self.min_samples}, there are {len(labels)}; use fewer clients"
            )
        owners = np.empty(len(labels), np.int64)
        owners[generator(seed, "partition").permutation(len(labels))] = np.arange(len(labels)) % self.clients
        return owners


def by_rank(counts: NDArray[np.int64], ordered: float, rng: np.random.Generator) -> Owners:
    """Assign the easiest, the second easiest, ... sample of a class to clients.

    Args:
        counts: number of samples of each client ``(N,)``.
        ordered: the fraction of them that is assigned by difficulty: those of client ``i`` start at rank
            ``counts[:i].sum()``, after the shares of the clients before it.
        rng: assigns the rest.

    Returns:
        The owner of each rank, ``(counts.sum(),)``.
    """
    starts = np.cumsum(counts) - counts
    rank = np.arange(int(counts.sum()))
    owners = np.repeat(np.arange(len(counts)), counts)
    in_order = rank - starts[owners] < np.rint(ordered * counts)[owners]
    owners[~in_order] = rng.permutation(owners[~in_order])
    return owners

"""Every class is divided in random proportions."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from rayfl.data.base import Assignment, Partition, Samples
from rayfl.data.partitions._dealing import Draws, by_owner, check_labels, dirichlet_owners


class Dirichlet(Partition):
    """Dirichlet: each class is divided among the clients in proportions drawn from Dir(alpha).

    Hsu, Qi, Brown 2019. All samples are used. ``capped`` follows the code of NIID-Bench (Li et al. 2022),
    which is another distribution: classes that are divided last go to the clients that still have few
    samples, so sizes are more equal, and these classes more skewed than alpha implies (alpha 5, 10 clients,
    10 classes: the shares of the last class have a variance of .0052 instead of .0018).
    """

    classes_only: ClassVar[bool] = True

    name: Literal["dirichlet"] = "dirichlet"
    alpha: float = Field(
        0.5, gt=0, le=1e6, description="concentration (alpha); small: few classes per client"
    )
    min_samples: int = Field(
        1, ge=1, description="minimum number of samples per client; draws with fewer are rejected"
    )
    attempts: int = Field(50, ge=1, le=10_000, description="maximum number of draws")
    capped: bool = Field(
        False,
        description="NIID-Bench's code: a client with its fair share n/N gets none of the remaining classes",
    )

    @override
    def assign(self, samples: Samples, seed: int) -> Assignment:
        labels = samples.y_train
        check_labels(labels, samples.classes, self.clients)
        draws = Draws(self.alpha, self.min_samples, self.attempts, self.capped)
        owners = dirichlet_owners(labels, self.clients, draws, seed)
        return Assignment(by_owner(owners, self.clients))

"""Gaussian classes from several sources: planted clusters of any number and size."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from typing_extensions import override

from rayfl.data.base import Dataset, Samples
from rayfl.data.scaling import Normalise
from rayfl.errors import DataError
from rayfl.memory import free_memory
from rayfl.random import generator


class Synthetic(Dataset):
    """Gaussian classes from several sources (domains) that differ in their means, their labels, or both.

    A sample of class ``c`` from source ``k`` is ``x = separation * u_kc + noise * z`` with ``u_kc`` a
    random direction of unit length and ``z`` standard normal, so two means lie about
    ``separation * sqrt(2)`` apart. ``shift`` selects what differs between the sources:

    - ``means``: every source has its own ``u_kc``;
    - ``labels``: all sources share ``u_c``, but in source ``k`` its label is ``(c + k) mod classes`` (the
      label swaps of clustered federated learning, Sattler et al. 2019);
    - ``both``.

    Classes and sources are equally frequent; with the partition ``domains`` each client has one source.
    """

    elsewhere: ClassVar[str] = "random numbers"

    name: Literal["synthetic"] = "synthetic"
    clusters: int = Field(3, ge=1, description="number of sources (domains)")
    classes: int = Field(4, ge=2, description="number of classes")
    features: int = Field(16, ge=1, description="length D of a sample")
    samples: int = Field(6_000, ge=1, description="number of training samples, all sources together")
    test_size: int = Field(1_200, ge=1, description="number of test samples, all sources together")
    separation: float = Field(3.0, ge=0, description="distance of the class means from the origin")
    noise: float = Field(1.0, ge=0, description="standard deviation within a class, per feature")
    shift: Literal["means", "labels", "both"] = Field("means", description="what differs between the sources")
    normalise: Normalise = Field("none", description="as for all data; default: features are left as drawn")
    seed: int = Field(0, description="seed of the data, apart from the run's seed")

    @model_validator(mode="after")
    def _labellings_differ(self) -> Synthetic:
        if self.shift != "means" and self.clusters > self.classes:
            raise ValueError(
                f"{self.classes} classes can be renamed in {self.classes} ways, not {self.clusters}"
            )
        return self

    @override
    def load(self, root: Path) -> Samples:
        self._check_size()
        x_train, y_train, domain_train = self._draw("train", self.samples)
        x_test, y_test, domain_test = self._draw("test", self.test_size)
        return Samples(self.name, x_train, y_train, x_test, y_test, self.classes, domain_train, domain_test)

    def _check_size(self) -> None:
        """Refuse what would not fit into memory.

        Raises:
            DataError
        """
        # While a part is drawn: values and means in single precision; place, source, kind, two labels.
        sample_bytes, free = 8 * self.features + 40, free_memory()
        needed = (
            sample_bytes * (self.samples + self.test_size) + 12 * self.clusters * self.classes * self.features
        )
        if needed > free:
            raise DataError(
                f"data: {self.samples:,} training and {self.test_size:,} test samples of {self.features:,} "
                f"features from {self.clusters:,} sources of {self.classes:,} classes need "
                f"{needed / 1e9:,.1f} GB, {free / 1e9:,.1f} GB are free; choose smaller sizes"
            )

    def _draw(
        self, part: str, count: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
        """``(n, D)`` samples, their labels and their sources, in random order."""
        sources = 1 if self.shift == "labels" else self.clusters
        means = generator(self.seed, "synthetic means").standard_normal(
            (sources, self.classes, self.features)
        )
        means *= self.separation / np.linalg.norm(means, axis=2, keepdims=True)

        rng = generator(self.seed, f"synthetic {part}")
        place = rng.permutation(count)
        domains, kinds = place % self.clusters, place // self.clusters % self.classes
        x = rng.standard_normal((count, self.features), dtype=np.float32)
        x *= np.float32(self.noise)
        x += means.astype(np.float32)[domains if sources > 1 else 0, kinds]
        labels = kinds if self.shift == "means" else (kinds + domains) % self.classes
        return x, labels.astype(np.int64), domains.astype(np.int64)

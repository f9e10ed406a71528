"""The server's samples, for methods that compare predictions of clients' models (FLIS)."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from rayfl.data import DATASETS, Samples, data_root
from rayfl.data.datasets._images import ImageDataset
from rayfl.errors import DataError, nearest
from rayfl.random import generator
from rayfl.settings import Section


class ServerData(Section):
    """The server's samples on which predictions of models are compared; labels are not used."""

    source: str = Field(
        "dataset",
        description="'dataset': samples of the run's dataset that the server holds out "
        "(data.server_share), 'noise', or the name of another dataset",
    )
    samples: int = Field(2500, ge=1, description="number of samples (2,500 in the thesis)")
    root: Path | None = Field(
        None, description="folder of another dataset; by default $RAYFL_DATA, else ~/.cache/rayfl"
    )
    one_hot: bool = Field(False, description="compare predicted classes instead of their probabilities")

    @field_validator("source")
    @classmethod
    def _known(cls, source: str) -> str:
        by_name = [name for name, part in DATASETS.items() if not part.needs_settings()]
        known = ["dataset", "noise", *by_name]
        if source not in known:
            raise ValueError(f"no server data {source!r}; {nearest(source, known)}")
        return source

    @property
    def public_samples(self) -> int:
        """Number of training samples to hold out for the server."""
        return self.samples if self.source == "dataset" else 0

    def draw(self, samples: Samples, seed: int) -> NDArray[np.generic]:
        """The inputs ``(s, ...)``, of the same shape and type as the run's own.

        Noise is uniform over the values of pixels (or the words of texts). For other inputs it is normal,
        with the mean and deviation of the run's scaling.

        Raises:
            DataError: if the server has no samples; or if the other dataset is missing, has samples of
                another shape, or is that of the run's clients.
        """
        rng = generator(seed, "server data")
        own = samples.x_test
        if self.source == "noise":
            size = (self.samples, *samples.shape)
            if np.issubdtype(own.dtype, np.integer):
                most = 255 if own.dtype == np.uint8 else int(own.max())
                return rng.integers(0, most, size, dtype=own.dtype, endpoint=True)
            normal, scaling = rng.standard_normal(size), samples.scaling
            return (normal if scaling is None else scaling.undo(normal)).astype(own.dtype)
        if self.source == "dataset":
            return samples.public(self.samples, rng)
        part = DATASETS[self.source]
        shape = {}
        if issubclass(part, ImageDataset) and len(samples.shape) == 3:
            shape = {"channels": samples.shape[0], "size": samples.shape[1]}
        other = part.model_validate(shape).load(self.root or data_root())
        if other.name in re.split(r"[+ ]", samples.name):
            raise DataError(
                f"server data {self.source}: its test images are the clients'; take source 'dataset', which "
                "holds some training images out"
            )
        chosen = np.sort(rng.choice(len(other.x_test), min(self.samples, len(other.x_test)), replace=False))
        found = other.x_test[chosen]
        if found.shape[1:] != samples.shape or found.dtype != own.dtype:
            raise DataError(
                f"server data {self.source}: samples {found.shape[1:]} {found.dtype} are not like the run's "
                f"{samples.shape} {own.dtype}; name images of at most that size"
            )
        return found

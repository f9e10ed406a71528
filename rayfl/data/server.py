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
    def _check_source(cls, source: str) -> str:
        by_name = [name for name, dataset_class in DATASETS.items() if not dataset_class.needs_settings()]
        sources = ["dataset", "noise", *by_name]
        if source not in sources:
            raise ValueError(f"no server data {source!r}; {nearest(source, sources)}")
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
        test_inputs = samples.x_test
        if self.source == "noise":
            size = (self.samples, *samples.shape)
            if np.issubdtype(test_inputs.dtype, np.integer):
                highest = 255 if test_inputs.dtype == np.uint8 else int(test_inputs.max())
                return rng.integers(0, highest, size, dtype=test_inputs.dtype, endpoint=True)
            normal, scaling = rng.standard_normal(size), samples.scaling
            return (normal if scaling is None else scaling.undo(normal)).astype(test_inputs.dtype)
        if self.source == "dataset":
            return samples.public(self.samples, rng)
        dataset_class = DATASETS[self.source]
        image_settings = {}
        if issubclass(dataset_class, ImageDataset) and len(samples.shape) == 3:
            image_settings = {"channels": samples.shape[0], "size": samples.shape[1]}
        other_samples = dataset_class.model_validate(image_settings).load(self.root or data_root())
        if _family(other_samples.name) in map(_family, re.split(r"[+ ]", samples.name)):
            raise DataError(
                f"server data {self.source}: its test images are the clients'; take source 'dataset', which "
                "holds some training images out"
            )
        chosen = np.sort(
            rng.choice(len(other_samples.x_test), min(self.samples, len(other_samples.x_test)), replace=False)
        )
        drawn = other_samples.x_test[chosen]
        if drawn.shape[1:] != samples.shape or drawn.dtype != test_inputs.dtype:
            raise DataError(
                f"server data {self.source}: samples {drawn.shape[1:]} {drawn.dtype} are not like the run's "
                f"{samples.shape} {test_inputs.dtype}; name images of at most that size"
            )
        return drawn


def _family(name: str) -> str:
    """The name of a dataset; the divisions of EMNIST share images."""
    return "emnist" if name.startswith("emnist_") else name

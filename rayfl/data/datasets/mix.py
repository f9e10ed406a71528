"""Several image datasets combined, each with separate classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, field_validator
from typing_extensions import override

from rayfl.data.base import Dataset, Samples
from rayfl.data.datasets._images import ImageDataset
from rayfl.data.datasets._torchvision import TorchvisionDataset
from rayfl.errors import nearest
from rayfl.settings import Registry

MIX_4 = ("cifar10", "svhn", "fashion_mnist", "usps")
"""The datasets of PACFL's mix."""


class Mix(Dataset):
    """Mix: several image datasets combined; each is a domain with separate classes.

    By default MIX-4 of PACFL (Vahidian et al. 2023): CIFAR-10, SVHN, Fashion-MNIST and USPS as 32x32x3
    images with 40 classes. With the partition ``domains`` each client has images of one dataset. If one
    dataset of MIX-4 is replaced or left out, its name in reports says which.
    """

    name: Literal["mix"] = "mix"
    sources: tuple[str, ...] = Field(
        MIX_4,
        min_length=1,
        description="names of image datasets, or of divisions of them (emnist_letters)",
    )
    size: int = Field(32, ge=1, le=1024, description="all images are padded to this height and width")
    channels: Literal[1, 3] = Field(3, description="all images are given this number of channels")

    @field_validator("sources")
    @classmethod
    def _check_sources(cls, sources: tuple[str, ...]) -> tuple[str, ...]:
        names = set(_image_datasets())
        for source in sources:
            if source not in names:
                raise ValueError(f"{source!r} is not an image dataset; {nearest(source, names)}")
        if len(set(sources)) < len(sources):
            raise ValueError("a dataset is named twice")
        return sources

    def parts(self) -> list[ImageDataset]:
        """The datasets, with settings for images of one shape."""
        datasets = _image_datasets()
        settings = {"size": self.size, "channels": self.channels}
        return [datasets[source].model_copy(update=settings) for source in self.sources]

    def title(self, names: Sequence[str]) -> str:
        """The names of the datasets, and which dataset of MIX-4 was replaced or left out, if just one was."""
        title = "+".join(names)
        missing = [source for source in MIX_4 if source not in self.sources]
        others = [source for source in self.sources if source not in MIX_4]
        if len(missing) != 1 or len(others) > 1:
            return title
        instead = f"with {missing[0]} replaced by {others[0]}" if others else f"without {missing[0]}"
        return f"{title} (MIX-4 {instead})"

    @override
    def available(self, root: Path) -> bool:
        return all(part.available(root) for part in self.parts())

    @override
    def prepare(self, root: Path) -> str:
        return "; ".join(part.prepare(root) for part in self.parts())

    @override
    def load(self, root: Path) -> Samples:
        parts = [part.load(root) for part in self.parts()]
        first_labels = np.cumsum([0, *(part.classes for part in parts)]).tolist()
        places = np.arange(len(parts))
        return Samples(
            self.title([part.name for part in parts]),
            np.concatenate([part.x_train for part in parts]),
            np.concatenate(
                [part.y_train + start for part, start in zip(parts, first_labels[:-1], strict=True)]
            ),
            np.concatenate([part.x_test for part in parts]),
            np.concatenate(
                [part.y_test + start for part, start in zip(parts, first_labels[:-1], strict=True)]
            ),
            classes=first_labels[-1],
            domain_train=np.repeat(places, [len(part.y_train) for part in parts]).astype(np.int64),
            domain_test=np.repeat(places, [len(part.y_test) for part in parts]).astype(np.int64),
            class_names=tuple(f"{part.name} {label}" for part in parts for label in part.class_names),
        )


def _image_datasets() -> dict[str, ImageDataset]:
    """The image datasets without required settings, and their variants, by name."""
    datasets: dict[str, ImageDataset] = {}
    for name, part in Registry("dataset", "rayfl.data.datasets", ImageDataset).items():
        if part.needs_settings():
            continue
        datasets[name] = dataset = part()
        if isinstance(dataset, TorchvisionDataset):
            datasets |= {variant.stem(): variant for variant in dataset.variants()}
    return datasets

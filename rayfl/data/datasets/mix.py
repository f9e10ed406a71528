"""Several image datasets side by side, each with classes of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, field_validator
from typing_extensions import override

from rayfl.data.base import Dataset, Samples
from rayfl.data.datasets._images import ImageDataset
from rayfl.errors import nearest
from rayfl.settings import discover


class Mix(Dataset):
    """Mix: several image datasets side by side, each a domain with classes of its own.

    By default MIX-4 of PACFL (Vahidian et al. 2023): CIFAR-10, SVHN, Fashion-MNIST and USPS as 32x32x3
    images with 40 classes. With the partition ``domains`` each client has images of one dataset.
    """

    name: Literal["mix"] = "mix"
    sources: tuple[str, ...] = Field(
        ("cifar10", "svhn", "fashion_mnist", "usps"), min_length=1, description="names of image datasets"
    )
    size: int = Field(32, ge=1, le=1024, description="all images are padded to this height and width")
    channels: Literal[1, 3] = Field(3, description="all images are given this number of channels")

    @field_validator("sources")
    @classmethod
    def _known_and_different(cls, sources: tuple[str, ...]) -> tuple[str, ...]:
        known = set(_image_datasets())
        for source in sources:
            if source not in known:
                raise ValueError(f"{source!r} is not an image dataset; {nearest(source, known)}")
        if len(set(sources)) < len(sources):
            raise ValueError("a dataset is named twice")
        return sources

    def parts(self) -> list[ImageDataset]:
        """The datasets, brought to one shape."""
        known = _image_datasets()
        return [known[source](size=self.size, channels=self.channels) for source in self.sources]

    @override
    def available(self, root: Path) -> bool:
        return all(part.available(root) for part in self.parts())

    @override
    def prepare(self, root: Path) -> str:
        return "; ".join(part.prepare(root) for part in self.parts())

    @override
    def load(self, root: Path) -> Samples:
        parts = [part.load(root) for part in self.parts()]
        first = np.cumsum([0, *(part.classes for part in parts)]).tolist()
        places = np.arange(len(parts))
        return Samples(
            "+".join(part.name for part in parts),
            np.concatenate([part.x_train for part in parts]),
            np.concatenate([part.y_train + start for part, start in zip(parts, first[:-1], strict=True)]),
            np.concatenate([part.x_test for part in parts]),
            np.concatenate([part.y_test + start for part, start in zip(parts, first[:-1], strict=True)]),
            classes=first[-1],
            domain_train=np.repeat(places, [len(part.y_train) for part in parts]).astype(np.int64),
            domain_test=np.repeat(places, [len(part.y_test) for part in parts]).astype(np.int64),
            class_names=tuple(f"{part.name} {label}" for part in parts for label in part.class_names),
        )


def _image_datasets() -> dict[str, type[ImageDataset]]:
    """The image datasets that need no setting."""
    found = discover("rayfl.data.datasets", ImageDataset)
    return {
        name: part
        for name, part in found.items()
        if not any(field.is_required() for field in part.model_fields.values())
    }

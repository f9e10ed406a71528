"""CIFAR-10 (Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images)."""

from __future__ import annotations

from typing import ClassVar, Literal

from typing_extensions import override

from rayfl.data.datasets._torchvision import TorchvisionDataset


class Cifar10(TorchvisionDataset):
    """CIFAR-10: animals and vehicles, 50,000 and 10,000 colour images of 32x32, 10 classes."""

    name: Literal["cifar10"] = "cifar10"
    torchvision_name: ClassVar[str] = "CIFAR10"
    names: ClassVar[tuple[str, ...]] = (
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    )

    @override
    def layout(self) -> tuple[str, ...]:
        files = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta")
        return tuple(f"cifar-10-batches-py/{file}" for file in files)

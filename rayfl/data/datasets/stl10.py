"""STL-10 (Coates, Lee, Ng 2011, An Analysis of Single-Layer Networks in Unsupervised Feature Learning)."""

from __future__ import annotations

from typing import ClassVar, Literal

from typing_extensions import override

from rayfl.data.datasets._torchvision import TorchvisionDataset


class Stl10(TorchvisionDataset):
    """STL-10: animals and vehicles, 5,000 and 8,000 colour images of 96x96, 10 classes."""

    name: Literal["stl10"] = "stl10"
    torchvision_name: ClassVar[str] = "STL10"
    names: ClassVar[tuple[str, ...]] = (
        "airplane",
        "bird",
        "car",
        "cat",
        "deer",
        "dog",
        "horse",
        "monkey",
        "ship",
        "truck",
    )

    @override
    def layout(self) -> tuple[str, ...]:
        files = ("train_X.bin", "train_y.bin", "unlabeled_X.bin", "test_X.bin", "test_y.bin")
        return tuple(f"stl10_binary/{file}" for file in files)

    @override
    def arguments(self, train: bool) -> dict[str, object]:
        return {"split": "train" if train else "test"}

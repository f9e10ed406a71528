"""SVHN (Netzer et al. 2011, Reading Digits in Natural Images with Unsupervised Feature Learning)."""

from __future__ import annotations

from typing import ClassVar, Literal

from typing_extensions import override

from rayfl.data.datasets._torchvision import TorchvisionDataset


class Svhn(TorchvisionDataset):
    """SVHN: digits of house numbers, 73,257 and 26,032 colour images of 32x32, 10 classes."""

    name: Literal["svhn"] = "svhn"
    torchvision_name: ClassVar[str] = "SVHN"
    names: ClassVar[tuple[str, ...]] = tuple("0123456789")

    @override
    def layout(self) -> tuple[str, ...]:
        return ("train_32x32.mat", "test_32x32.mat")

    @override
    def arguments(self, train: bool) -> dict[str, object]:
        return {"split": "train" if train else "test"}

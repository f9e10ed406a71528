"""SVHN (Netzer et al. 2011, Reading Digits in Natural Images with Unsupervised Feature Learning)."""

from __future__ import annotations

from typing import ClassVar, Literal

from rayfl.data.datasets._torchvision import TorchvisionDataset


class Svhn(TorchvisionDataset):
    """SVHN: digits of house numbers, 73,257 and 26,032 colour images of 32x32, 10 classes."""

    name: Literal["svhn"] = "svhn"
    torchvision_name: ClassVar[str] = "SVHN"
    names: ClassVar[tuple[str, ...]] = tuple("0123456789")

    def layout(self) -> tuple[str, ...]:  # noqa: D102
        return ("train_32x32.mat", "test_32x32.mat")

    def arguments(self, train: bool) -> dict[str, object]:  # noqa: D102
        return {"split": "train" if train else "test"}

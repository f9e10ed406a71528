"""MNIST (LeCun, Bottou, Bengio, Haffner 1998)."""

from __future__ import annotations

from typing import ClassVar, Literal

from rayfl.data.datasets._mnist import MnistLike


class Mnist(MnistLike):
    """MNIST: handwritten digits, 60,000 and 10,000 grey images of 28x28, 10 classes."""

    name: Literal["mnist"] = "mnist"
    torchvision_name: ClassVar[str] = "MNIST"
    names: ClassVar[tuple[str, ...]] = tuple("0123456789")

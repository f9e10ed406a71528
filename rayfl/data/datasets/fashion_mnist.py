"""Fashion-MNIST (Xiao, Rasul, Vollgraf 2017, arXiv:1708.07747)."""

from __future__ import annotations

from typing import ClassVar, Literal

from rayfl.data.datasets._mnist import MnistLike


class FashionMnist(MnistLike):
    """Fashion-MNIST: clothes, 60,000 and 10,000 grey images of 28x28, 10 classes."""

    name: Literal["fashion_mnist"] = "fashion_mnist"
    torchvision_name: ClassVar[str] = "FashionMNIST"
    names: ClassVar[tuple[str, ...]] = (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    )

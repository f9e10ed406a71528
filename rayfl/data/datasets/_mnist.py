"""Base of MNIST and the datasets with the same file layout."""

from __future__ import annotations

from typing_extensions import override

from rayfl.data.datasets._torchvision import TorchvisionDataset


class MnistLike(TorchvisionDataset):
    """28x28 grey images in four files in the format of MNIST (idx)."""

    @override
    def layout(self) -> tuple[str, ...]:
        return tuple(
            f"{self.torchvision_name}/raw/{part}-{content}-ubyte"
            for part in ("train", "t10k")
            for content in ("images-idx3", "labels-idx1")
        )

"""EMNIST (Cohen, Afshar, Tapson, van Schaik 2017, arXiv:1702.05373)."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from rayfl.data.datasets._torchvision import TorchvisionDataset

Split = Literal["balanced", "letters", "digits"]
_SPLITS: tuple[Split, ...] = ("balanced", "letters", "digits")


class Emnist(TorchvisionDataset):
    """EMNIST: handwritten digits and letters, upright grey images of 28x28, 47, 26 or 10 classes.

    ``balanced`` has 112,800 and 18,800 images of digits, capital letters, and the small letters that
    differ from their capitals; ``letters`` has 124,800 and 20,800 images of letters, case ignored;
    ``digits`` has 240,000 and 40,000 images of digits.
    """

    name: Literal["emnist"] = "emnist"
    torchvision_name: ClassVar[str] = "EMNIST"
    split: Split = Field("balanced", description="EMNIST's split")

    @override
    def stem(self) -> str:
        return f"emnist_{self.split}"

    @override
    def layout(self) -> tuple[str, ...]:
        return tuple(
            f"EMNIST/raw/emnist-{self.split}-{part}-{content}-ubyte"
            for part in ("train", "test")
            for content in ("images-idx3", "labels-idx1")
        )

    @override
    def arguments(self, train: bool) -> dict[str, object]:
        return {"train": train, "split": self.split}

    @override
    def adapt(
        self, x: NDArray[np.generic], y: NDArray[np.generic]
    ) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
        """The files have transposed images ``(n, W, H)``, and letters numbered from 1."""
        first = 1 if self.split == "letters" else 0
        return x.transpose(0, 2, 1), y.astype(np.int64) - first

    @override
    def class_names(self) -> tuple[str, ...]:
        if self.split == "letters":
            return tuple(string.ascii_lowercase)
        if self.split == "digits":
            return tuple(string.digits)
        return tuple(string.digits + string.ascii_uppercase + "abdefghnqrt")

    @override
    def variants(self) -> Sequence[Emnist]:
        """One download contains all splits."""
        return [self.model_copy(update={"split": split}) for split in _SPLITS]

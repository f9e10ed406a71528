"""The digits of scikit-learn: the dataset that needs no download (Alpaydin, Kaynak 1998)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rayfl.data.base import Samples
from rayfl.data.datasets._images import ImageDataset
from rayfl.random import generator

_TEST_FRACTION = 0.2


class Digits(ImageDataset):
    """Digits: 1,797 grey images of 8x8 that come with scikit-learn, 10 classes, no download.

    The grey levels 0..16 become 0..255. A fixed fifth of every class is the test set.
    """

    elsewhere: ClassVar[str] = "scikit-learn"

    name: Literal["digits"] = "digits"

    @override
    def load(self, root: Path) -> Samples:
        grey, targets = _read()
        images = np.rint(grey[:, None] * (255 / 16)).astype(np.uint8)
        labels = targets.astype(np.int64)
        test = np.zeros(len(labels), bool)
        for label in range(10):
            members = generator(0, "digits", label).permutation(np.flatnonzero(labels == label))
            test[members[: round(_TEST_FRACTION * len(members))]] = True
        return self.reshaped(
            Samples(
                self.name,
                images[~test],
                labels[~test],
                images[test],
                labels[test],
                classes=10,
                class_names=tuple("0123456789"),
            )
        )


@cache  # a process may make many runs
def _read() -> tuple[NDArray[np.float64], NDArray[np.integer]]:
    from sklearn.datasets import load_digits  # deferred: it takes half a second

    data = load_digits()
    return data.images, data.target

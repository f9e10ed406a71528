from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

Dataset = tuple[NDArray[np.uint8], NDArray[np.int64]]


def read(folder: Path, name: str) -> Dataset:
    """Training images as rows of bytes, and their labels."""
    with np.load(folder / f"{name}.npz") as arrays:
        x, y = arrays["x_train"], arrays["y_train"]
        return x.reshape(len(x), -1), y.astype(np.int64)


@pytest.fixture(scope="session")
def fashion(real_data: Callable[[str], Path]) -> Dataset:
    return read(real_data("fashion_mnist"), "fashion_mnist")


@pytest.fixture(scope="session")
def cifar10(real_data: Callable[[str], Path]) -> Dataset:
    return read(real_data("cifar10"), "cifar10")

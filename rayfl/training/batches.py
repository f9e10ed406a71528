"""From a federation's arrays to tensors on the device: pixels stay uint8 until here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rayfl.data import Samples


@dataclass(frozen=True)
class Scaling:
    """``x -> (x * factor - mean) / std`` per channel; images only (feature vectors are taken as they are)."""

    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, samples: Samples) -> Scaling:
        """Statistics of the training images in [0, 1], one mean and standard deviation a channel."""
        x = samples.x_train
        factor = 1 / 255 if x.dtype == np.uint8 else 1.0
        if x.ndim != 4:
            return cls(factor, (0.0,), (1.0,))
        stride = max(1, len(x) // 10_000)
        sample = x[::stride].astype(np.float64) * factor
        mean, std = sample.mean(axis=(0, 2, 3)), sample.std(axis=(0, 2, 3))
        return cls(factor, tuple(mean.tolist()), tuple(np.maximum(std, 1e-6).tolist()))


class Batches:
    """Gathers samples by index and turns them into tensors on a device: float32, or int64 for words."""

    def __init__(self, samples: Samples, device: torch.device, scaling: Scaling | None = None) -> None:
        self.samples, self.device = samples, device
        scaling = scaling or Scaling.of(samples)
        shape = (-1, 1, 1) if samples.x_train.ndim == 4 else (-1,)
        mean, std = (torch.tensor(v, dtype=torch.float64).reshape(shape) for v in (scaling.mean, scaling.std))
        self._slope = (scaling.factor / std).to(torch.float32).to(device)
        self._shift = (mean / std).to(torch.float32).to(device)

    def inputs(self, x: NDArray[np.generic]) -> torch.Tensor:
        """Samples as they are stored, as a model takes them: scaled, on the device."""
        tensor = torch.from_numpy(x).to(self.device)
        if self.samples.tokens:
            return tensor.to(torch.int64)
        return tensor.to(torch.float32).mul_(self._slope).sub_(self._shift)

    def train(self, indices: NDArray[np.integer]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs ``(n, ...)`` and targets (labels ``(n,)``, int64) of training samples, by their ids."""
        samples = self.samples
        return self.inputs(samples.inputs("train", indices)), self._labels(samples.targets("train", indices))

    def test(self, indices: NDArray[np.integer]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of test samples."""
        samples = self.samples
        return self.inputs(samples.inputs("test", indices)), self._labels(samples.targets("test", indices))

    def _labels(self, y: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(y).to(self.device)


def raw_features(x: NDArray[np.generic], words: int = 0) -> NDArray[np.float32]:
    """Samples as feature maps and signatures see them: float32, pixels in [0, 1], not centred.

    Args:
        x: samples; or texts ``(n, L)``, which become ``(n, words)``: 1 for each word that occurs.
        words: size of the vocabulary of texts, whose first word is padding; 0 for other data.
    """
    if words:
        occurs = np.zeros((len(x), words), np.float32)
        np.put_along_axis(occurs, x.astype(np.int64), np.float32(1), axis=1)
        occurs[:, 0] = 0
        return occurs
    values = x.astype(np.float32)
    return values / np.float32(255) if x.dtype == np.uint8 else values

"""From a federation's arrays to tensors on the device: pixels stay uint8 until here."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from rayfl.data import Samples
from rayfl.data.base import Part
from rayfl.data.scaling import Scaling

_NUMBERS = 1 << 17
"""Numbers in all inputs of a forward pass, if samples are small."""


class Batches:
    """Gathers samples by index and turns them into tensors on a device: float32, or int64 for words."""

    def __init__(self, samples: Samples, device: torch.device) -> None:
        self.samples, self.device = samples, device
        images = samples.x_train.ndim == 4
        scaling = samples.scaling or (Scaling.of if images else Scaling.none)(samples)
        shape = (-1, 1, 1) if images else (-1,)
        mean, std = (torch.tensor(v, dtype=torch.float64).reshape(shape) for v in (scaling.mean, scaling.std))
        self._slope = (scaling.factor / std).to(torch.float32).to(device)
        self._shift = (mean / std).to(torch.float32).to(device)

    def at_once(self, usual: int) -> int:
        """Samples in a forward pass: ``usual``, or more if they are so small that calls cost more than
        arithmetic.
        """
        if self.samples.tokens:  # each word of a text has an output for every word of the vocabulary
            return usual
        return max(usual, _NUMBERS // max(1, math.prod(self.samples.x_train.shape[1:])))

    def inputs(self, x: NDArray[np.generic]) -> torch.Tensor:
        """Stored samples ``(n, ...)`` as a model takes them: scaled, on the device, and a copy."""
        tensor = torch.from_numpy(x).to(self.device)
        if self.samples.tokens:
            return tensor.to(torch.int64)
        # Without the copy, floats on a CPU would be scaled in the stored array itself.
        scaled = tensor.to(torch.float32, copy=tensor.dtype == torch.float32)
        return scaled.mul_(self._slope).sub_(self._shift)

    def train(self, indices: NDArray[np.integer]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs ``(n, ...)`` and targets of training samples, by their ids: see :meth:`Samples.targets`."""
        return self._inputs_and_targets("train", indices)

    def test(self, indices: NDArray[np.integer]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs ``(n, ...)`` and targets of the test samples ``indices`` ``(n,)``."""
        return self._inputs_and_targets("test", indices)

    def _inputs_and_targets(
        self, part: Part, indices: NDArray[np.integer]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        targets = torch.from_numpy(self.samples.targets(part, indices)).to(self.device)
        return self.inputs(self.samples.inputs(part, indices)), targets


class KeptSamples:
    """Keeps samples that were read and scaled, for the next model that is tested on them.

    Args:
        most: the largest number of bytes to keep.
    """

    def __init__(self, most: int) -> None:
        self._bytes_left, self._cached = most, dict[bytes, tuple[torch.Tensor, torch.Tensor, int]]()

    def read(
        self,
        ids: NDArray[np.integer],
        read: Callable[[NDArray[np.integer]], tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs ``(n, ...)`` and targets of the samples ``ids`` ``(n,)``; read again if a network has
        changed them.
        """
        key = ids.tobytes()
        if key in self._cached:
            x, y, version = self._cached[key]
            if x._version == version:
                return x, y
        x, y = read(ids)
        size = x.nbytes + y.nbytes
        if size <= self._bytes_left and key not in self._cached:
            self._bytes_left -= size
            self._cached[key] = x, y, x._version
        return x, y


def raw_features(
    x: NDArray[np.generic], words: int = 0, scaling: Scaling | None = None
) -> NDArray[np.float32]:
    """Samples as feature maps and signatures see them: float32, pixels in [0, 1], not centred.

    Args:
        x: samples; or texts ``(n, L)``, which become ``(n, words)``: 1 for each word that occurs.
        words: size of the vocabulary of texts, whose first word is padding; 0 for other data.
        scaling: of the models' inputs, also applied to tables, whose features have different units.
    """
    if words:
        occurs = np.zeros((len(x), words), np.float32)
        np.put_along_axis(occurs, x.astype(np.int64), np.float32(1), axis=1)
        occurs[:, 0] = 0
        return occurs
    if scaling is not None and x.ndim == 2 and x.dtype != np.uint8:
        return scaling.apply(x)
    values = x.astype(np.float32)
    return values / np.float32(255) if x.dtype == np.uint8 else values

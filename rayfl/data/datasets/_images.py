"""The base of image datasets: padding, and conversion between grey and colour."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rayfl.data.base import Dataset, Samples
from rayfl.errors import DataError


class ImageDataset(Dataset):
    """Base of the datasets of images."""

    size: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="pad the images with zeros, evenly on all sides, to this height and width",
    )
    channels: Literal[1, 3] | None = Field(
        None, description="3: grey images are repeated; 1: colours become grey (luma of ITU-R BT.601)"
    )

    def reshaped(self, samples: Samples) -> Samples:
        """Apply ``size`` and ``channels``.

        Raises:
            DataError: if the samples are not images, or larger than ``size``.
        """
        if self.size is None and self.channels is None:
            return samples
        if samples.x_train.ndim != 4:
            raise DataError(f"data: size and channels are for images, the samples have shape {samples.shape}")
        x_train, x_test = samples.x_train, samples.x_test
        if self.channels is not None:
            x_train, x_test = to_channels(x_train, self.channels), to_channels(x_test, self.channels)
        if self.size is not None:
            x_train, x_test = pad(x_train, self.size), pad(x_test, self.size)
        return replace(samples, x_train=x_train, x_test=x_test)


def to_channels(images: NDArray[np.generic], channels: int) -> NDArray[np.generic]:
    """Images ``(n, C, H, W)`` with 1 or 3 channels, of the same type, contiguous."""
    if images.shape[1] == channels:
        return images
    if images.shape[1] == 1:
        return np.repeat(images, channels, axis=1)
    if images.shape[1] != 3 or channels != 1:
        raise DataError(
            f"data.channels: images with {images.shape[1]} channels cannot be converted to {channels}"
        )
    luma = np.zeros((len(images), *images.shape[2:]), np.float32)
    for channel, weight in enumerate((0.299, 0.587, 0.114)):
        luma += np.float32(weight) * images[:, channel].astype(np.float32)
    if images.dtype == np.uint8:
        luma = np.rint(luma)
    return luma[:, None].astype(images.dtype)


def pad(images: NDArray[np.generic], size: int) -> NDArray[np.generic]:
    """Images ``(n, C, size, size)``: ``(n, C, H, W)`` in a frame of zeros, contiguous."""
    height, width = images.shape[2:]
    if max(height, width) > size:
        raise DataError(f"data.size: images of {height}x{width} do not fit in {size}x{size}")
    if height == width == size:
        return images
    framed = np.zeros((*images.shape[:2], size, size), images.dtype)
    top, left = (size - height) // 2, (size - width) // 2
    framed[:, :, top : top + height, left : left + width] = images
    return framed

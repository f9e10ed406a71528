"""Images from files, of one size and number of channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from rayfl.errors import DataError, one_line
from rayfl.memory import free_memory
from rayfl.units import size as in_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

Opened = Callable[[], "Image"]
"""Opens an image, without reading its pixels yet."""

_GREY_MODES = ("1", "L", "LA", "La")
_COLOUR_MODES = ("P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "LAB", "HSV")


def read_pictures(
    pictures: Sequence[tuple[str, Opened]], size: int | None, channels: Literal[1, 3] | None
) -> NDArray[np.uint8]:
    """Read all images as ``(n, C, H, W)``.

    Args:
        pictures: for each image its place, for errors, and a function that opens it.
        size: height and width to which images are scaled (bilinear); None: all must have the same size.
        channels: 1: grey, 3: colours; None: colours if any image has colours.

    Raises:
        DataError: if one cannot be read, their sizes differ, or they do not fit in memory.
    """
    shape: tuple[int, int] | None = None if size is None else (size, size)
    colours = channels == 3
    for where, opener in pictures:
        with _open(where, opener) as image:
            if image.mode not in (*_GREY_MODES, *_COLOUR_MODES):
                raise DataError(f"{where}: has pixels of kind {image.mode!r}; expected 8 bits a channel")
            own_size = (image.height, image.width)
            shape = shape or own_size
            if size is None and shape != own_size:
                raise DataError(
                    f"{where}: is {own_size[0]}x{own_size[1]}, the first image is {shape[0]}x{shape[1]}; set "
                    "data.size to scale all"
                )
            colours |= channels is None and image.mode in _COLOUR_MODES
    assert shape is not None
    needed, free = len(pictures) * (3 if colours else 1) * shape[0] * shape[1], free_memory()
    if 2 * needed > free:
        raise DataError(
            f"{len(pictures):,} images of {shape[0]}x{shape[1]} need {in_bytes(2 * needed)}, "
            f"{in_bytes(free)} are free; set a smaller data.size"
        )
    images = np.empty((len(pictures), 3 if colours else 1, *shape), np.uint8)
    for i, (where, opener) in enumerate(pictures):
        with _open(where, opener) as image:
            try:
                pixels = image.convert("RGB" if colours else "L")
                if pixels.size != (shape[1], shape[0]):
                    pixels = pixels.resize((shape[1], shape[0]), 2)  # bilinear
                array = np.asarray(pixels)
            except Exception as error:  # truncated and damaged files make Pillow raise nearly anything
                raise _unreadable(where, error) from None
        images[i] = array.transpose(2, 0, 1) if colours else array
    return images


def _open(where: str, opener: Opened) -> Image:
    try:
        return opener()
    except Exception as error:
        raise _unreadable(where, error) from None


def _unreadable(where: str, error: Exception) -> DataError:
    return DataError(f"{where}: cannot be read as an image ({one_line(error)})")

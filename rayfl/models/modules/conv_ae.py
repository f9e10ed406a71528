"""FLT's convolutional autoencoder, which turns images into short codes.

Jamali-Rad, Abdizadeh, Singh, "Federated learning with taskonomy for non-IID data", 2022, Table 13.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from rayfl.errors import DataError
from rayfl.models.base import named
from rayfl.random import generator

Weights = dict[str, NDArray[np.float32]]

LATENT = 128
"""The dimension e of a code."""

TOGETHER = 64
"""Images encoded at a time: few enough that the output of a convolution stays in the cache."""


class ConvAE(nn.Module):
    """ConvAE of FLT's Table 13: 51,577 parameters for grey images of 28 x 28 pixels.

    Encoder: convolutions 3x3 with 16 and 4 channels, each with ReLU and pooling by two, and a linear map to
    the code, which is not rectified. Decoder: a linear map back, transposed convolutions 2x2 of stride two
    with 16 channels and ReLU, and with the image's channels and a sigmoid.

    Pooling comes before ReLU, which gives the same values at a quarter of the work.

    Args:
        shape: of an image ``(C, H, W)``; H and W are multiples of 4.
        latent: e.

    Raises:
        DataError: for other shapes.
    """

    def __init__(self, shape: tuple[int, ...], latent: int = LATENT) -> None:
        super().__init__()
        if len(shape) != 3 or shape[1] % 4 or shape[2] % 4 or min(shape) < 1:
            raise DataError(f"an autoencoder of images (C, H, W) needs sides divisible by 4, not {shape}")
        channels, height, width = shape
        self.latent = latent
        grid = (4, height // 4, width // 4)
        self.encoder = named(
            ("conv1", nn.Conv2d(channels, 16, 3, padding=1)),
            ("pool1", nn.MaxPool2d(2)),
            ("relu1", nn.ReLU()),
            ("conv2", nn.Conv2d(16, 4, 3, padding=1)),
            ("pool2", nn.MaxPool2d(2)),
            ("relu2", nn.ReLU()),
            ("flatten", nn.Flatten()),
            ("fc", nn.Linear(grid[0] * grid[1] * grid[2], latent)),
        )
        self.decoder = named(
            ("fc", nn.Linear(latent, grid[0] * grid[1] * grid[2])),
            ("unflatten", nn.Unflatten(1, grid)),
            ("deconv1", nn.ConvTranspose2d(4, 16, 2, stride=2)),
            ("relu1", nn.ReLU()),
            ("deconv2", nn.ConvTranspose2d(16, channels, 2, stride=2)),
            ("sigmoid", nn.Sigmoid()),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The reconstruction ``(n, C, H, W)`` in [0, 1] of images with pixels in [0, 1]."""
        return self.decoder(self.encoder(x))  # type: ignore[no-any-return]


def fresh(shape: tuple[int, int, int], latent: int, key: int) -> ConvAE:
    """An autoencoder whose weights depend on ``key`` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key)
        return _channels_last(ConvAE(shape, latent))


def restored(shape: tuple[int, int, int], latent: int, weights: Weights) -> ConvAE:
    """An autoencoder with these weights."""
    with torch.random.fork_rng(devices=[]):
        model = ConvAE(shape, latent)
    model.load_state_dict({name: torch.from_numpy(np.array(values)) for name, values in weights.items()})
    return _channels_last(model)


def weights_of(model: ConvAE) -> Weights:
    """The weights as NumPy arrays."""
    return {name: np.ascontiguousarray(values.numpy()) for name, values in model.state_dict().items()}


def reconstruct(
    model: ConvAE,
    x: NDArray[np.generic],
    shape: tuple[int, int, int],
    epochs: int,
    batch_size: int,
    lr: float,
    key: int,
) -> None:
    """Train an autoencoder to reconstruct images: mean squared error, Adam, one thread, a keyed order.

    Args:
        model: trained in place.
        x: images ``(n, C, h, w)``, bytes or pixels in [0, 1].
        shape: of the autoencoder's images ``(C, H, W)``, see :func:`framed`.
        epochs, batch_size, lr: as usual.
        key: determines the order of the images.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr)
    with one_thread():
        for epoch in range(epochs):
            order = generator(key, "autoencoder", epoch).permutation(len(x))
            for start in range(0, len(x), batch_size):
                batch = framed(x[order[start : start + batch_size]], shape)
                optimizer.zero_grad()
                functional.mse_loss(model(batch), batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()


def encode(model: ConvAE, x: NDArray[np.generic], shape: tuple[int, int, int]) -> NDArray[np.float32]:
    """The codes ``(n, e)`` of images; arguments as :func:`reconstruct`."""
    codes = np.empty((len(x), model.latent), np.float32)
    with one_thread(), torch.inference_mode():
        for start in range(0, len(x), TOGETHER):
            part = slice(start, start + TOGETHER)
            codes[part] = model.encoder(framed(x[part], shape)).numpy()
    return codes


def framed(x: NDArray[np.generic], shape: tuple[int, int, int]) -> torch.Tensor:
    """Images ``(n, C, h, w)`` as an autoencoder takes them: ``(n, C, H, W)`` float32 pixels in [0, 1].

    Images that fit into H x W get an even frame of zeros, others are resized (bilinear, antialiased).
    """
    height, width = shape[1:]
    images = torch.from_numpy(np.ascontiguousarray(x, np.float32))
    if x.dtype == np.uint8:
        images = images / 255
    extra_height, extra_width = height - images.shape[2], width - images.shape[3]
    if extra_height < 0 or extra_width < 0:
        images = functional.interpolate(images, (height, width), mode="bilinear", antialias=True)
    elif extra_height or extra_width:
        left, top = extra_width // 2, extra_height // 2
        images = functional.pad(images, (left, extra_width - left, top, extra_height - top))
    return images.contiguous(memory_format=torch.channels_last)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread: sums that are split among threads are rounded differently."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


def _channels_last(model: ConvAE) -> ConvAE:
    """The model in the memory layout that is fast for convolutions with few channels."""
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

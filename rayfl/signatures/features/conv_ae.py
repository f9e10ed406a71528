"""FLT's encoder: the codes of a convolutional autoencoder trained elsewhere, fine-tuned by each client."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from torch.nn import functional

from rayfl.data import DATASETS, Dataset, data_root, fingerprint
from rayfl.data.datasets._images import to_channels
from rayfl.errors import DataError
from rayfl.models.conv_ae import LATENT, ConvAE
from rayfl.random import generator
from rayfl.settings import Section, choice
from rayfl.signatures.features.base import FeatureMap

if TYPE_CHECKING:
    AnyDataset = Dataset
else:
    AnyDataset = choice(DATASETS)

Weights = dict[str, NDArray[np.float32]]

TOGETHER = 64
"""Images encoded at a time: what a convolution makes of them stays in the cache."""


class Pretraining(Section):
    """Where the encoder that the server sends comes from.

    FLT's *Enc1* is pretrained on a broad set that covers the clients' classes, *Enc2* on another one
    altogether (here by default) and then fine-tuned by each client.
    """

    dataset: AnyDataset = Field(
        default_factory=lambda: DATASETS["fashion_mnist"](), description="images on which it is trained"
    )
    epochs: int = Field(2, ge=1, description="epochs of training")
    samples: int | None = Field(None, ge=1, description="train on so many images, drawn at random; none: all")
    batch_size: int = Field(64, ge=1, description="images in a step")


class ConvAEFeatures(FeatureMap):
    """Codes of a convolutional autoencoder (FLT, Jamali-Rad et al. 2022, Table 13), for clustering.

    The server trains it on images of ``pretrain.dataset`` to reconstruct them (mean squared error, Adam as in
    the authors' code), once: the result is kept in the folder of the datasets under a hash of its data and
    settings. With ``fine_tune`` J > 0 every client goes on for J epochs on its own images before it encodes
    them. J is 5 in the paper; 0, its first use of FCR ("normal" mode), compares codes of one encoder.

    The autoencoder is built for the clients' images, framed by zeros where their sides are not multiples of
    4. The images it is trained on are brought to that size: colours become grey or grey is repeated, images
    that fit get an even frame of zeros, larger ones are resized (bilinear).
    """

    name: Literal["conv_ae"] = "conv_ae"
    pretrain: Pretraining = Field(Pretraining(), description="how the server trains it")
    latent: int = Field(LATENT, ge=1, description="numbers in a code (e)")
    fine_tune: int = Field(0, ge=0, description="epochs of fine-tuning by each client on its own images (J)")
    batch_size: int = Field(10, ge=1, description="images in a step of fine-tuning")
    lr: float = Field(1e-3, gt=0, description="learning rate of both trainings (Adam)")

    def fit(self, x: NDArray[np.floating], key: int = 0) -> Encoder:
        """Train the autoencoder, or read it from the cache; of ``x`` only the shape matters.

        Raises:
            DataError: if samples are not images, or the dataset for the training cannot be had.
        """
        if x.ndim != 4:
            raise DataError(f"conv_ae needs images (n, C, H, W), not samples {x.shape[1:]}; use features pca")
        shape = _padded(x.shape[1:])
        dataset = self.pretrain.dataset
        try:
            root = dataset.root or data_root()
            samples = dataset.load(root)
        except DataError as error:
            raise DataError(
                f"conv_ae is to be trained on {dataset.name}: {error}; or name another dataset in "
                "features.pretrain.dataset (digits needs no download), or use features pca"
            ) from error
        settings = {
            "data": fingerprint(samples),
            "shape": shape,
            "key": key,
            "torch": torch.__version__,
            **self.model_dump(mode="json", include={"latent", "lr"}),
            **self.pretrain.model_dump(mode="json", exclude={"dataset"}),
        }
        path = root / "encoders" / f"conv_ae-{_hash(settings)}.safetensors"
        weights = _read(path)
        if weights is None:
            weights = self._train(samples.x_train, shape, key)
            _write(path, weights)
        return Encoder(weights, x.shape[1:], self.latent, self.fine_tune, self.batch_size, self.lr)

    def _train(self, x: NDArray[np.generic], shape: tuple[int, int, int], key: int) -> Weights:
        """The weights after training on the images ``x`` ``(n, c, h, w)``."""
        if x.ndim != 4:
            raise DataError(
                f"features.pretrain.dataset: {self.pretrain.dataset.name} has no images, but {x.shape[1:]}"
            )
        if self.pretrain.samples is not None and self.pretrain.samples < len(x):
            drawn = generator(key, "pretraining sample").choice(len(x), self.pretrain.samples, replace=False)
            x = x[np.sort(drawn)]
        with _one_thread(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(key)
            model = _channels_last(ConvAE(shape, self.latent))
            _reconstruct(model, x, shape, self.pretrain.epochs, self.pretrain.batch_size, self.lr, key)
        return {name: values.numpy().copy() for name, values in model.state_dict().items()}


@dataclass(frozen=True)
class Encoder:
    """The autoencoder that the server sends to everybody; its weights travel as NumPy arrays.

    Attributes:
        weights: of :class:`rayfl.models.conv_ae.ConvAE`.
        shape: of the clients' images ``(C, H, W)``.
        latent, fine_tune, batch_size, lr: as set in :class:`ConvAEFeatures`.
    """

    weights: Weights
    shape: tuple[int, ...]
    latent: int
    fine_tune: int
    batch_size: int
    lr: float

    def apply(self, x: NDArray[np.floating], key: int = 0) -> NDArray[np.float32]:
        """Codes ``(n, e)`` of images ``(n, C, H, W)`` in [0, 1], after fine-tuning on them if so set.

        Args:
            x: the client's images.
            key: decides the order in which fine-tuning visits them.

        Raises:
            DataError: if the images have another shape than those that it was made for.
        """
        if x.shape[1:] != self.shape:
            raise DataError(f"conv_ae was made for images {self.shape}; these are {x.shape[1:]}")
        codes = np.empty((len(x), self.latent), np.float32)
        with _one_thread():
            model = self._model
            if self.fine_tune:
                model = self._fresh()
                _reconstruct(model, x, self.padded, self.fine_tune, self.batch_size, self.lr, key)
            with torch.inference_mode():
                for start in range(0, len(x), TOGETHER):
                    part = slice(start, start + TOGETHER)
                    codes[part] = model.encoder(fitted_to(x[part], self.padded)).numpy()
        return codes

    @property
    def padded(self) -> tuple[int, int, int]:
        """The shape of the autoencoder's images: sides that are multiples of 4."""
        return _padded(self.shape)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_model"}

    @functools.cached_property
    def _model(self) -> ConvAE:
        return self._fresh()

    def _fresh(self) -> ConvAE:
        with torch.random.fork_rng(devices=[]):
            model = ConvAE(self.padded, self.latent)
        model.load_state_dict({name: torch.from_numpy(np.array(w)) for name, w in self.weights.items()})
        return _channels_last(model)


def fitted_to(x: NDArray[np.generic], shape: tuple[int, int, int]) -> torch.Tensor:
    """Images ``(n, c, h, w)`` as the autoencoder takes them: ``(n, C, H, W)`` float32 pixels in [0, 1].

    Colours become grey (luma) or grey is repeated; images that fit into H x W get an even frame of zeros,
    others are resized (bilinear, antialiased).

    Raises:
        DataError: if they have neither 1, 3 nor C channels.
    """
    channels, height, width = shape
    images = torch.from_numpy(np.ascontiguousarray(to_channels(x, channels), np.float32))
    if x.dtype == np.uint8:
        images = images / 255
    below, beside = height - images.shape[2], width - images.shape[3]
    if below < 0 or beside < 0:
        images = functional.interpolate(images, (height, width), mode="bilinear", antialias=True)
    elif below or beside:
        left, top = beside // 2, below // 2
        images = functional.pad(images, (left, beside - left, top, below - top))
    return images.contiguous(memory_format=torch.channels_last)


def _reconstruct(
    model: ConvAE,
    x: NDArray[np.generic],
    shape: tuple[int, int, int],
    epochs: int,
    batch_size: int,
    lr: float,
    key: int,
) -> None:
    """Train an autoencoder to reconstruct images ``(n, c, h, w)``, in a keyed order."""
    optimizer = torch.optim.Adam(model.parameters(), lr)
    for epoch in range(epochs):
        order = generator(key, "autoencoder", epoch).permutation(len(x))
        for start in range(0, len(x), batch_size):
            batch = fitted_to(x[order[start : start + batch_size]], shape)
            optimizer.zero_grad()
            functional.mse_loss(model(batch), batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def _padded(shape: tuple[int, ...]) -> tuple[int, int, int]:
    channels, height, width = shape
    return channels, -(-height // 4) * 4, -(-width // 4) * 4


def _channels_last(model: ConvAE) -> ConvAE:
    """Laid out so that convolutions with few channels are fast."""
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


@contextmanager
def _one_thread() -> Iterator[None]:
    """One torch thread: sums that are split among threads are rounded otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _hash(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path) -> Weights | None:
    """The weights in a file; None if there is none that can be read."""
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError):
        return None


def _write(path: Path, weights: Weights) -> None:
    """Write weights so that the file appears complete or not at all; not at all in a read-only folder."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with suppress(OSError):  # then it is trained again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(save(weights))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

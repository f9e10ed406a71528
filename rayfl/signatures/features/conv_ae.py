"""FLT's encoder: the codes of a convolutional autoencoder trained elsewhere, and fine-tuned."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rayfl.data import DATASETS, Dataset, data_root, fingerprint
from rayfl.data.datasets._images import to_channels
from rayfl.errors import ConfigError, DataError
from rayfl.random import generator
from rayfl.settings import Section, choice
from rayfl.signatures.features.base import FeatureMap

if TYPE_CHECKING:
    from rayfl.models.modules.conv_ae import ConvAE

    AnyDataset = Dataset
else:
    AnyDataset = choice(DATASETS)

Weights = dict[str, NDArray[np.float32]]


class Pretraining(Section):
    """Where the encoder that the server sends comes from.

    FLT's *Enc1* is pretrained on a broad dataset that covers the clients' classes. *Enc2* is pretrained on
    another dataset (the default here) and then fine-tuned by each client.
    """

    dataset: AnyDataset = Field(
        default_factory=lambda: DATASETS["fashion_mnist"](), description="images on which it is trained"
    )
    epochs: int = Field(2, ge=1, description="epochs of training")
    samples: int | None = Field(
        None, ge=1, description="number of training images, drawn at random; null: all"
    )
    batch_size: int = Field(64, ge=1, description="images per step")


class ConvAEFeatures(FeatureMap):
    """Codes of a convolutional autoencoder (FLT, Jamali-Rad et al. 2022, Table 13).

    The server trains it once on images of ``pretrain.dataset`` to reconstruct them (mean squared error, Adam
    as in the authors' code). The weights are kept in the folder of the datasets under a hash of data and
    settings. With ``fine_tune`` J > 0 every client trains it for J more epochs on its own images before it
    encodes them. J is 5 in the paper; J = 0, its first use of FCR ("normal" mode), compares codes of one
    encoder. On letters of 300 clients J = 5 is worth 0.08, 0.05 and 0.02 of ARI with 12, 25 and 50 samples
    a client (experiments/flt/samples.yaml). For clustering again J may differ (``fine_tune_again``): the
    paper's Algorithm 3 has J > 0 then.

    The autoencoder is built for the clients' images, padded with zeros to sides that are multiples of 4.
    Training images are converted to that shape: colours become grey or grey is repeated, smaller images are
    padded evenly with zeros, larger ones are resized (bilinear).

    **Code differs** (github hjraad/FLT, ``src/optim/flt_pretrain.py``): one encoder is fine-tuned centrally
    for all, on the whole training set, which real clients would keep to themselves. Codes stay comparable.
    Here ``fine_tune_shared`` epochs do this on ``samples`` public images of the server before the encoder is
    sent; no client's data are used. The code trains for 25 epochs, then 5 epochs on the target set, with a
    learning rate that is halved every ten batches, so that little happens after the first hundred.
    """

    name: Literal["conv_ae"] = "conv_ae"
    pretrain: Pretraining = Field(Pretraining(), description="how the server trains it")
    latent: int = Field(128, ge=1, description="length of a code (e)")
    fine_tune: int = Field(0, ge=0, description="epochs of fine-tuning by each client on its own images (J)")
    fine_tune_again: int | None = Field(
        None,
        ge=0,
        description="the same, when clients are clustered again (FLT's fine-tune mode); null: as fine_tune",
    )
    fine_tune_shared: int = Field(
        0, ge=0, description="epochs of fine-tuning by the server, once for all clients, on public images"
    )
    samples: int = Field(2000, ge=1, description="public images for fine_tune_shared")
    batch_size: int = Field(10, ge=1, description="images per step when a client fine-tunes")
    lr: float = Field(1e-3, gt=0, description="learning rate (Adam) of all training of the encoder")

    @property
    def public_samples(self) -> int:
        """``samples``, if the server fine-tunes."""
        return self.samples if self.fine_tune_shared else 0

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuse samples that are not images."""
        if len(shape) != 3:
            raise ConfigError(
                "clustering.features",
                f"conv_ae needs images (C, H, W), not samples of shape {shape}",
                "use clustering.features=pca",
            )

    def remark(self, data: Dataset) -> str:
        """A warning if the encoder is trained on the clients' own dataset."""
        own = self.pretrain.dataset
        if own.name != data.name or getattr(own, "path", None) != getattr(data, "path", None):
            return ""
        return (
            f"features.pretrain.dataset: the encoder is trained on {own.name}, the clients' own images, that "
            "real clients would keep to themselves; use another dataset, or fine_tune_shared on public images"
        )

    def again(self) -> ConvAEFeatures:
        """The map with ``fine_tune_again`` as J."""
        if self.fine_tune_again is None:
            return self
        return self.model_copy(update={"fine_tune": self.fine_tune_again})

    def fit(self, x: NDArray[np.floating], key: int = 0) -> Encoder:
        """Train the autoencoder, or read it from the cache.

        Args:
            x: public images ``(s, C, H, W)`` for ``fine_tune_shared``; without it only their shape matters.
            key: determines the initial weights and the order of the images.

        Raises:
            DataError: if samples are not images, there are none to fine-tune on, or the training dataset is
                not available.
        """
        if x.ndim != 4:
            raise DataError(
                f"conv_ae needs images (n, C, H, W), not samples {x.shape[1:]}; use clustering.features=pca"
            )
        if self.fine_tune_shared and not len(x):
            raise DataError("conv_ae: there are no public images for fine_tune_shared; set it to 0")
        shape = _padded_shape(x.shape[1:])
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
            "torch": version("torch"),
            "source": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
            **self.model_dump(mode="json", include={"latent", "lr"}),
            **self.pretrain.model_dump(mode="json", exclude={"dataset"}),
        }
        weights = _cached_weights(root, settings, lambda: self._train(samples.x_train, shape, key))
        if self.fine_tune_shared:
            images = hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()
            settings |= {"fine_tune_shared": self.fine_tune_shared, "images": [images, *x.shape]}
            pretrained = weights
            weights = _cached_weights(root, settings, lambda: self._fine_tune(pretrained, x, shape, key))
        sends_decoder = max(self.fine_tune, self.fine_tune_again or 0) > 0
        return Encoder(
            weights, x.shape[1:], self.latent, self.fine_tune, self.batch_size, self.lr, sends_decoder
        )

    def _train(self, x: NDArray[np.generic], shape: tuple[int, int, int], key: int) -> Weights:
        """The weights after training on the images ``x`` ``(n, c, h, w)``."""
        if x.ndim != 4:
            raise DataError(
                f"features.pretrain.dataset: {self.pretrain.dataset.name} has no images, but samples of "
                f"shape {x.shape[1:]}; name a dataset of images"
            )
        if self.pretrain.samples is not None and self.pretrain.samples < len(x):
            drawn = generator(key, "pretraining sample").choice(len(x), self.pretrain.samples, replace=False)
            x = x[np.sort(drawn)]
        from rayfl.models.modules import conv_ae

        x = to_channels(x, shape[0])
        model = conv_ae.fresh(shape, self.latent, key)
        conv_ae.reconstruct(model, x, shape, self.pretrain.epochs, self.pretrain.batch_size, self.lr, key)
        return conv_ae.weights_of(model)

    def _fine_tune(
        self, weights: Weights, x: NDArray[np.floating], shape: tuple[int, int, int], key: int
    ) -> Weights:
        """The weights after ``fine_tune_shared`` more epochs on the images ``x`` ``(s, C, H, W)``."""
        from rayfl.models.modules import conv_ae

        model = conv_ae.restored(shape, self.latent, weights)
        conv_ae.reconstruct(model, x, shape, self.fine_tune_shared, self.pretrain.batch_size, self.lr, key)
        return conv_ae.weights_of(model)


@dataclass(frozen=True)
class Encoder:
    """The autoencoder that the server sends to all clients; its weights travel as NumPy arrays.

    Attributes:
        weights: of :class:`rayfl.models.modules.conv_ae.ConvAE`.
        shape: of the clients' images ``(C, H, W)``.
        latent, fine_tune, batch_size, lr: as set in :class:`ConvAEFeatures`.
        whole: whether clients also get the decoder, because they fine-tune now or later.
    """

    weights: Weights
    shape: tuple[int, ...]
    latent: int
    fine_tune: int
    batch_size: int
    lr: float
    whole: bool

    @property
    def floats(self) -> int:
        """The encoder's weights, and the decoder's if clients fine-tune."""
        sent = (w for name, w in self.weights.items() if self.whole or name.startswith("encoder"))
        return sum(int(np.size(w)) for w in sent)

    def apply(self, x: NDArray[np.floating], key: int = 0) -> NDArray[np.float32]:
        """Codes ``(n, e)`` of images ``(n, C, H, W)`` in [0, 1], after ``fine_tune`` epochs on them.

        Args:
            x: the client's images.
            key: determines the order in which fine-tuning visits them.

        Raises:
            DataError: if the images do not have the shape that the encoder was made for.
        """
        if x.shape[1:] != self.shape:
            raise DataError(f"conv_ae was made for images {self.shape}; these are {x.shape[1:]}")
        from rayfl.models.modules import conv_ae

        model = self._model
        if self.fine_tune:
            model = conv_ae.restored(self.padded, self.latent, self.weights)
            conv_ae.reconstruct(model, x, self.padded, self.fine_tune, self.batch_size, self.lr, key)
        return conv_ae.encode(model, x, self.padded)

    @property
    def padded(self) -> tuple[int, int, int]:
        """The shape of the autoencoder's images: sides that are multiples of 4."""
        return _padded_shape(self.shape)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_model"}

    @functools.cached_property
    def _model(self) -> ConvAE:
        from rayfl.models.modules import conv_ae

        return conv_ae.restored(self.padded, self.latent, self.weights)


def _padded_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    channels, height, width = shape
    return channels, -(-height // 4) * 4, -(-width // 4) * 4


def _cached_weights(root: Path, settings: dict[str, Any], train: Callable[[], Weights]) -> Weights:
    """The weights trained with these settings, from the cache in the folder of the datasets."""
    path = root / "encoders" / f"conv_ae-{_settings_hash(settings)}.safetensors"
    weights = _read_weights(path)
    if weights is None:
        weights = train()
        _write_weights(path, weights)
    return weights


def _settings_hash(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _read_weights(path: Path) -> Weights | None:
    """The weights in a file; None if it is missing or unreadable."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return dict(load_file(path))
    except (OSError, SafetensorError):
        return None


def _write_weights(path: Path, weights: Weights) -> None:
    """Write weights so that the file appears complete or not at all; errors such as a read-only folder are
    ignored."""
    from safetensors.numpy import save

    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with suppress(OSError):  # then it is trained again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(save(weights))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

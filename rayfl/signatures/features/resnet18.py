"""The features of a ResNet-18 trained on ImageNet: what MT-HFL uses on CIFAR."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rayfl.errors import ConfigError, DataError
from rayfl.signatures.features.base import FeatureMap

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Per channel, as the ImageNet weights expect."""
FEATURES = 512


class ResNetFeatures:
    """The 512 averaged outputs of the last convolution; the weights travel as NumPy arrays."""

    def __init__(self, weights: dict[str, NDArray[np.generic]], size: int, batch: int) -> None:
        self.weights, self.size, self.batch = weights, size, batch

    def __getstate__(self) -> dict[str, Any]:
        return {"weights": self.weights, "size": self.size, "batch": self.batch}

    @functools.cached_property
    def _model(self) -> Any:
        import torch

        from rayfl.torchvision_shim import torchvision_models

        model = torchvision_models().resnet18(weights=None)
        model.fc = torch.nn.Identity()
        model.load_state_dict({name: torch.from_numpy(np.array(w)) for name, w in self.weights.items()})
        return model.eval()

    @property
    def floats(self) -> int:
        """All weights."""
        return sum(np.size(w) for w in self.weights.values())

    def apply(self, x: NDArray[np.floating], key: int = 0) -> NDArray[np.float32]:
        """Features ``(n, 512)`` of images ``(n, C, H, W)`` in [0, 1]; grey ones are repeated to 3 channels.

        Raises:
            DataError: if the samples are not images of 1 or 3 channels.
        """
        import torch
        from torch.nn import functional

        if x.ndim != 4 or x.shape[1] not in (1, 3):
            what = f"resnet18 needs images (n, 1 or 3, H, W), not samples {x.shape[1:]}"
            raise DataError(f"{what}; use clustering.features=pca")
        mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
        features = np.empty((len(x), FEATURES), np.float32)
        with torch.no_grad():
            for start in range(0, len(x), self.batch):
                images = torch.from_numpy(np.ascontiguousarray(x[start : start + self.batch], np.float32))
                images = functional.interpolate(
                    images.expand(-1, 3, -1, -1), (self.size, self.size), mode="bilinear", antialias=True
                )
                features[start : start + self.batch] = self._model((images - mean) / std).numpy()
        return features


class ResNet18(FeatureMap):
    """ResNet-18 with ImageNet weights, without its last layer.

    The weights are torchvision's (downloaded once, by the server) or a state dict in the file ``weights``.
    """

    name: Literal["resnet18"] = "resnet18"
    weights: Path | None = Field(None, description="a .pth state dict; null: torchvision's ImageNet weights")
    size: int = Field(224, ge=32, description="images are resized to size x size")
    batch: int = Field(64, ge=1, description="images at a time")

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuse samples that are not images of 1 or 3 channels."""
        if len(shape) != 3 or shape[0] not in (1, 3):
            raise ConfigError(
                "clustering.features",
                f"resnet18 needs images (1 or 3, H, W), not samples of shape {shape}",
                "use clustering.features=pca",
            )

    def fit(self, x: NDArray[np.floating], key: int = 0) -> ResNetFeatures:
        """Load the weights; no data are used.

        Raises:
            DataError: if they are not available.
        """
        import torch

        from rayfl.torchvision_shim import torchvision_models

        source = str(self.weights) if self.weights else "torchvision's ImageNet weights"
        try:
            if self.weights:
                state = torch.load(self.weights, map_location="cpu", weights_only=True)
            else:
                models = torchvision_models()
                state = models.ResNet18_Weights.IMAGENET1K_V1.get_state_dict(progress=False, check_hash=True)
            fitted = ResNetFeatures(
                {name: w.numpy() for name, w in state.items() if not name.startswith("fc.")},
                self.size,
                self.batch,
            )
            _ = fitted._model
        except Exception as error:  # no network, a broken file, a foreign state dict: one remedy for all
            reason = str(error).strip().split("\n", 1)[0]
            raise DataError(
                f"resnet18: cannot load {source} ({type(error).__name__}: {reason}); "
                "give a state dict in features.weights, or use features 'pca' instead"
            ) from error
        return fitted

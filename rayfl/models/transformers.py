"""Image classifiers of Hugging Face's transformers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator
from typing_extensions import override

from rayfl.models._own import OwnNetwork, built, image_channels, library

if TYPE_CHECKING:
    from torch import nn


class TransformersNetwork(OwnNetwork):
    """transformers' image classifiers (``rayfl[hub]``), with random weights or those of a local file."""

    name: Literal["transformers"] = "transformers"
    arch: str = Field(description="type of the network, e.g. vit or convnext; or a folder with config.json")

    @field_validator("arch")
    @classmethod
    def _absolute(cls, arch: str) -> str:
        """Workers have another working directory."""
        return os.path.abspath(arch) if os.path.isdir(arch) else arch

    @override
    def prepare(self) -> None:
        library("transformers")

    @override
    def network(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """For images ``(C, H, W)``."""
        from rayfl.models.modules.logits import Logits

        transformers: Any = library("transformers")
        given = {"num_channels": image_channels(self.arch, shape), "image_size": shape[1], **self.kwargs}

        def make() -> nn.Module:
            if os.path.isdir(self.arch):
                read = transformers.AutoConfig.from_pretrained
                config = read(self.arch, num_labels=classes, local_files_only=True, **given)
            else:
                config = transformers.AutoConfig.for_model(self.arch, num_labels=classes, **given)
            return Logits(transformers.AutoModelForImageClassification.from_config(config))

        module: nn.Module = built(self.arch, make)
        return module

"""timm's networks for images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from typing_extensions import override

from rayfl.errors import ConfigError, nearest
from rayfl.models._own import OwnNetwork, built, image_channels, library

if TYPE_CHECKING:
    from torch import nn


class TimmNetwork(OwnNetwork):
    """timm's classifiers for images (``rayfl[hub]``), with random weights or those of a local file."""

    name: Literal["timm"] = "timm"
    arch: str = Field(description="as timm.create_model takes it, e.g. resnet18 or vit_tiny_patch16_224")

    @override
    def prepare(self) -> None:
        library("timm")

    @override
    def network(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """For images ``(C, H, W)``."""
        timm: Any = library("timm")
        arguments = {
            "pretrained": False,
            "num_classes": classes,
            "in_chans": image_channels(self.arch, shape),
        }
        if not timm.is_model(self.arch):
            raise ConfigError(
                "model.arch", f"timm has no network {self.arch!r}", nearest(self.arch, timm.list_models())
            )

        def make() -> Any:
            try:
                return timm.create_model(self.arch, **{"img_size": shape[1:], **arguments, **self.kwargs})
            except TypeError:  # convolutional networks have no img_size: they take images of any size
                return timm.create_model(self.arch, **{**arguments, **self.kwargs})

        module: nn.Module = built(self.arch, make)
        return module

"""torchvision's networks for images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from typing_extensions import override

from rayfl.errors import ConfigError, nearest
from rayfl.models._own import OwnNetwork, built, image_channels
from rayfl.torchvision_shim import torchvision_models

if TYPE_CHECKING:
    from torch import nn


class TorchvisionNetwork(OwnNetwork):
    """torchvision's classifiers for images (ResNets, VGG, MobileNet, EfficientNet, ConvNeXt, ViT, ...).

    The first convolution takes the channels of the data. ``stem: cifar`` is for images of about 32 pixels,
    which a network with ImageNet's stem would shrink to one: it keeps their size (ResNet: a 3x3 convolution
    with stride 1 and no pooling; MobileNet and EfficientNet: stride 1; ConvNeXt: patches of 2; ViT: patches
    of 4; VGG: one linear map as classifier).
    """

    name: Literal["torchvision"] = "torchvision"
    arch: str = Field("resnet18", description="as torchvision.models names it, e.g. resnet18, vit_b_16")
    stem: Literal["imagenet", "cifar"] = Field(
        "imagenet", description="cifar: suited to images of about 32 pixels"
    )

    @override
    def network(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """For images ``(C, H, W)``."""
        from rayfl.models.modules import stems

        channels = image_channels(self.arch, shape)
        models: Any = torchvision_models()
        names = models.list_models(module=models)
        if self.arch not in names:
            raise ConfigError(
                "model.arch", f"torchvision has no network {self.arch!r}", nearest(self.arch, names)
            )
        arguments = dict(self.kwargs)
        if self.arch.startswith("vit") and self.stem == "imagenet":
            arguments.setdefault("image_size", shape[1])
        module: nn.Module = built(
            self.arch,
            lambda: models.get_model(self.arch, weights=None, num_classes=classes, **arguments),
        )
        if self.stem == "cifar":
            stems.for_small_images(self.arch, module, shape, classes)
        stems.take_channels(module, channels)
        return module

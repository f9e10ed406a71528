"""The first layers of torchvision's networks, for small images and for any number of channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rayfl.errors import ConfigError


def for_small_images(arch: str, module: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    """Replace an ImageNet stem by one for images of about 32 pixels.

    Raises:
        ConfigError: if there is none for this network.
    """
    family = next((name for name in _STEMS if arch.removeprefix("wide_").startswith(name)), None)
    if family is None:
        raise ConfigError("model.stem", f"no cifar stem of {arch}", "use stem=imagenet")
    _STEMS[family](module, shape, classes)


def take_channels(module: nn.Module, channels: int) -> None:
    """Replace the first convolution by one for images that do not have three channels."""
    name, first = next((n, m) for n, m in module.named_modules() if isinstance(m, nn.Conv2d))
    if first.in_channels != channels:
        _replace(module, name, in_channels=channels)


def _replace(module: nn.Module, name: str, **changes: Any) -> None:
    """Replace a convolution by one with other settings."""
    old: Any = module.get_submodule(name)
    settings = {
        key: getattr(old, key)
        for key in ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
    }
    owner, _, key = name.rpartition(".")
    new = nn.Conv2d(**{**settings, "bias": old.bias is not None, **changes})
    setattr(module.get_submodule(owner), key, new)


def _resnet(module: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    _replace(module, "conv1", kernel_size=3, stride=1, padding=1)
    module.maxpool = nn.Identity()


def _first_stride(module: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    _replace(module, "features.0.0", stride=1)


def _convnext(module: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    _replace(module, "features.0.0", kernel_size=2, stride=2)


def _vgg(module: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    module.avgpool, module.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(512, classes)


def _vit(module: Any, shape: tuple[int, ...], classes: int) -> None:
    size, patch = shape[1], 4
    if size % patch or shape[1] != shape[2]:
        raise ConfigError("model.stem", f"images of shape {shape} do not divide into patches of {patch}")
    _replace(module, "conv_proj", kernel_size=patch, stride=patch)
    module.image_size, module.patch_size = size, patch
    module.seq_length = (size // patch) ** 2 + 1
    positions = torch.empty(1, module.seq_length, module.hidden_dim).normal_(std=0.02)
    module.encoder.pos_embedding = nn.Parameter(positions)


_STEMS: dict[str, Callable[[nn.Module, tuple[int, ...], int], None]] = {
    "resnet": _resnet,
    "resnext": _resnet,
    "mobilenet": _first_stride,
    "efficientnet": _first_stride,
    "convnext": _convnext,
    "vgg": _vgg,
    "vit": _vit,
}

"""Networks from outside of rayfl: any ``nn.Module`` that maps samples to logits."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator
from typing_extensions import override

from rayfl.errors import ConfigError, nearest
from rayfl.models.base import Model, one_line, random_texts, task_of
from rayfl.settings import Kwargs
from rayfl.torchvision_shim import torchvision_models

if TYPE_CHECKING:
    from torch import nn


TASK: Any = Field(
    "numbers",
    description="numbers: classify images and features; texts: classify texts, which are tokens (int64, "
    "(batch, L)); words: predict the next word after each word, logits (batch, vocabulary, L)",
)
"""The setting of networks that may also take texts."""


class OwnNetwork(Model):
    """A network from outside of rayfl; subclasses define how to build it.

    Every parameter is trained. Floating-point buffers that persist are averaged like parameters.
    """

    kwargs: Kwargs = Field(
        {}, description="keyword arguments of the class or function that builds the network"
    )
    norm: Literal["batch", "group"] = Field(
        "batch", description="group: a GroupNorm in place of each BatchNorm"
    )
    layers: dict[str, tuple[str, ...]] = Field(
        {},
        description="layer -> its submodules or parameters, in forward order; default: the network's "
        "children, each normalisation with the child before it",
    )
    weights: Path | None = Field(
        None,
        description="a state dict (.safetensors, .pth) to start from; a last layer of another shape "
        "stays random",
    )

    @field_validator("weights")
    @classmethod
    def _from_here(cls, path: Path | None) -> Path | None:
        """Make the path absolute: workers have another working directory."""
        return None if path is None else Path(os.path.abspath(path))

    def network(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The network as built, initialised from torch's global generator.

        Raises:
            ConfigError: if it cannot be built for samples of this shape.
        """
        raise NotImplementedError

    @override
    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """See :meth:`network`; with GroupNorm if ``norm`` asks for it."""
        from rayfl.models.modules import own

        module = self.network(shape, classes)
        if self.norm == "group":
            own.replace_batch_norm(module)
        return module

    @override
    def outline(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        try:
            return super().outline(shape, classes)
        except Exception:  # constructors that read values, which the meta device does not have
            import torch

            with torch.random.fork_rng(devices=[]):
                return self.build(shape, classes)

    @override
    def layers_of(self, module: nn.Module) -> Mapping[str, tuple[str, ...]]:
        from rayfl.models.modules import own

        if not self.layers:
            return own.derived_layers(module)
        names = {name for name, _ in (*module.named_modules(), *module.named_parameters()) if name}
        names |= {name for name, _ in module.named_buffers()}
        for layer, members in self.layers.items():
            for member in members:
                if member not in names:
                    where, what = f"model.layers.{layer}", f"the network has no {member!r}"
                    raise ConfigError(where, what, nearest(member, names))
        return self.layers

    @override
    def load_weights(self, module: nn.Module) -> None:
        from rayfl.models.modules import own

        if self.weights is not None:
            own.load_weights(module, self.weights, list(self.layers_of(module).values())[-1])

    @override
    def check(self, build: Callable[[], nn.Module], shape: tuple[int, ...], classes: int) -> None:
        """Run a few samples through the network on the CPU."""
        from rayfl.models.modules import own

        if self.weights is not None and not self.weights.is_file():
            raise ConfigError("model.weights", f"{self.weights}: no such file")
        own.check_network(build, shape, classes, task_of(self), self.load_weights)

    @override
    def example(
        self, shape: tuple[int, ...], classes: int, count: int, rng: np.random.Generator
    ) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
        task = task_of(self)
        if task == "numbers":
            return super().example(shape, classes, count, rng)
        # The vocabulary of a classifier of texts is not known here; it has at least two words.
        x, following = random_texts(shape, classes if task == "words" else 2, count, rng)
        return x, following if task == "words" else rng.integers(0, classes, count)


def built(what: str, make: Callable[[], Any], where: str = "model") -> Any:
    """Call third-party code that builds a network.

    Raises:
        ConfigError: if it raises.
    """
    try:
        return make()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(where, f"{what} cannot be built: {one_line(error)}") from error


def image_channels(what: str, shape: tuple[int, ...]) -> int:
    """The channels of images.

    Raises:
        ConfigError: if samples are not images.
    """
    if len(shape) != 3:
        raise ConfigError("model", f"{what} takes images, not samples of shape {shape}")
    return shape[0]


def library(name: str) -> Any:
    """A library of ``rayfl[hub]``.

    Raises:
        ConfigError: if it is not installed.
    """
    try:
        torchvision_models()  # the library imports torchvision, which may only work through this shim
        return importlib.import_module(name)
    except ImportError as error:
        what = f"{name} cannot be imported ({error})"
        raise ConfigError("model.name", what, "pip install 'rayfl[hub]'") from None

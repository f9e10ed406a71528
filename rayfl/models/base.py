"""The base of all models: a config section that builds a network and names its layers."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from rayfl.errors import ConfigError
from rayfl.losses.base import IGNORED, Task
from rayfl.settings import Section, part_name

if TYPE_CHECKING:
    from torch import nn


class Model(Section):
    """A network architecture, chosen by name; one per file in ``rayfl/models``.

    A subclass adds ``name: Literal["..."] = "..."`` and its settings. The module that :meth:`build`
    returns is a tree of standard layers, chained by ``nn.Sequential`` with named children wherever the
    network is a chain, so that training engines can be generated from it.
    """

    name: str = ""

    tokens: ClassVar[bool] = False
    """Whether the model predicts the word after each word of a text; see :func:`task_of` for other tasks."""

    @classmethod
    def name_of(cls) -> str:
        """The name by which users choose it, for messages."""
        return part_name(cls) or cls.__name__

    if TYPE_CHECKING:  # so that subclasses may declare it as a setting instead

        @property
        def layers(self) -> dict[str, tuple[str, ...]]:
            """The layers in forward order: name -> the submodules that hold its parameters and buffers.

            A layer in this sense is what the papers count ("the first 3 layers stay local"): one convolution
            or linear map with its normalisation. Every parameter belongs to exactly one layer.
            """
            raise NotImplementedError

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """A freshly initialised network on the CPU, from torch's global generator.

        Args:
            shape: shape of one sample, ``(C, H, W)``, ``(D,)`` or ``(L,)``.
            classes: number of outputs (logits, no softmax).

        Returns:
            A module that maps ``(batch, *shape)`` float32 to logits ``(batch, classes)``; if it predicts
            words, ``(batch, L)`` int64 to logits ``(batch, classes, L)``, one prediction per word.

        Raises:
            ConfigError: if the network does not suit samples of this shape.
        """
        raise NotImplementedError

    def prepare(self) -> None:
        """Import what the model needs from outside of rayfl, before anything starts.

        Raises:
            ConfigError: if a library is missing or the target cannot be imported.
        """

    def outline(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The module on the meta device: nothing is allocated, so it may be too large for this machine."""
        import torch

        with torch.device("meta"):
            return self.build(shape, classes)

    def layers_of(self, module: nn.Module) -> Mapping[str, tuple[str, ...]]:
        """The :attr:`layers` of a module from :meth:`build`; overridden if they depend on the module."""
        return self.layers

    def load_weights(self, module: nn.Module) -> None:
        """Replace random weights by trained ones, in place, for a model that starts from them.

        Raises:
            ConfigError: if they cannot be read, or do not fit.
        """

    def check(self, build: Callable[[], nn.Module], shape: tuple[int, ...], classes: int) -> None:
        """Refuse a network that could not be trained.

        Args:
            build: builds the module, with random weights; always the same.
            shape, classes: see :meth:`build`.

        Raises:
            ConfigError
        """

    def example(
        self, shape: tuple[int, ...], classes: int, count: int, rng: np.random.Generator
    ) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
        """Random samples ``(count, *shape)`` that fit the network, and random targets, for trials."""
        x = rng.standard_normal((count, *shape)).astype(np.float32)
        return x, rng.integers(0, classes, count)


def task_of(model: Model) -> Task:
    """The task of a model: its setting ``task``, if it has one."""
    task: Task = getattr(model, "task", "words" if model.tokens else "numbers")
    return task


def random_texts(
    shape: tuple[int, ...], vocabulary: int, count: int, rng: np.random.Generator
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Random texts ``(count, L)`` for trials, and the word after each word; some of these are ``IGNORED``."""
    words = rng.integers(0, vocabulary, (count, shape[0] + 1))
    targets = np.where(rng.random((count, shape[0])) < 0.2, IGNORED, words[:, 1:])
    targets[:, 0] = words[:, 1]  # a text has at least two words
    return words[:, :-1].astype(np.int32), targets


def fan_in(shape: tuple[int, ...]) -> int:
    """The number of features of a flattened sample.

    Raises:
        ConfigError: if a sample has no features.
    """
    features = math.prod(shape)
    if not shape or features < 1:
        raise ConfigError("model", f"samples of shape {shape} have no features", "at least one is needed")
    return features


def square_image(
    name: str, shape: tuple[int, ...], sides: Collection[int], channels: Collection[int] | None = None
) -> tuple[int, int]:
    """Check that samples are square images and return ``(channels, side)``.

    Args:
        name: the model's name, for the message.
        shape: shape of one sample.
        sides: the sides in pixels that the network takes.
        channels: the numbers of channels that it takes; None for any.

    Raises:
        ConfigError: if they are not.
    """
    remedy = f"it takes square images of {_in_words(sides)} pixels" + (
        f" with {_in_words(channels)} channels" if channels is not None else ""
    )
    fits = len(shape) == 3 and shape[1] == shape[2] and shape[1] in sides
    if not fits or shape[0] < 1 or (channels is not None and shape[0] not in channels):
        raise ConfigError("model.name", f"{name!r} does not suit samples of shape {shape}", remedy)
    return shape[0], shape[1]


def one_line(error: BaseException) -> str:
    """An exception of third-party code: its type and the first line of its message."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _in_words(values: Collection[int]) -> str:
    """``28 or 32`` for a collection, ``16 to 64`` for a range."""
    if isinstance(values, range) and len(values) > 2:
        return f"{values.start} to {values[-1]}"
    return " or ".join(str(value) for value in values)


def named(*children: tuple[str, nn.Module] | None) -> nn.Sequential:
    """A chain of named children; None is left out."""
    from torch import nn

    return nn.Sequential(OrderedDict(child for child in children if child is not None))

"""Scale stored inputs for training: ``x -> (x * factor - mean) / std``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, Protocol, Union

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationInfo, field_validator

from rayfl.errors import ConfigError
from rayfl.settings import Section

_LEAST_IMAGES = 10_000
"""Statistics of pixels use at least this many images, evenly spaced (all, if there are fewer than twice as
many)."""
_ROWS_AT_ONCE = 4096
"""Rows of a table that are converted to float64 at a time."""


class GivenScaling(Section):
    """Known mean and standard deviation: one number per channel or feature, or one for all."""

    mean: tuple[float, ...] = Field(
        min_length=1, description="mean of pixels in [0, 1], of features as they are"
    )
    std: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        min_length=1, description="standard deviation of pixels in [0, 1], of features as they are"
    )

    @field_validator("std")
    @classmethod
    def _check_lengths(cls, std: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        if len(info.data.get("mean", std)) != len(std):
            raise ValueError(
                f"mean has {len(info.data['mean'])} numbers, std {len(std)}; give as many of each"
            )
        return std


Normalise = Union[Literal["pooled", "server", "none"], GivenScaling]  # noqa: UP007
"""The samples whose mean and standard deviation are used to normalise inputs, or these numbers themselves."""


class Inputs(Protocol):
    """The fields of :class:`~rayfl.data.base.Samples` that scaling needs."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def x_train(self) -> NDArray[np.generic]: ...  # noqa: D102
    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def tokens(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True)
class Scaling:
    """``x -> (x * factor - mean) / std``, per channel of images and per feature of tables.

    Attributes:
        factor: 1/255 for uint8 inputs, which are pixels, of images or in rows; else 1.
        mean, std: one number a channel or feature, or one for all.
    """

    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def of_pixels(self) -> bool:
        """Whether the inputs are uint8."""
        return self.factor != 1

    @classmethod
    def of(cls, samples: Inputs, x: NDArray[np.generic] | None = None) -> Scaling:
        """Statistics of ``x``, by default of all training samples.

        Images have a mean and standard deviation per channel, tables of floats one per feature, and pixels in
        rows (uint8 ``(n, D)``) one for all. A constant channel or feature gets a deviation of 1. Words are
        not scaled.
        """
        x, plain = samples.x_train if x is None else x, cls.none(samples)
        if samples.tokens or not len(x):
            return plain
        if x.ndim == 2 and x.dtype != np.uint8:
            return cls(plain.factor, *_feature_statistics(x))
        images = x if x.ndim == 4 else x.reshape(len(x), 1, -1, 1)
        sample = images[:: max(1, len(x) // _LEAST_IMAGES)].astype(np.float64) * plain.factor
        mean, std = sample.mean(axis=(0, 2, 3)), sample.std(axis=(0, 2, 3))
        constant = sample.min(axis=(0, 2, 3)) == sample.max(axis=(0, 2, 3))
        std = np.where(constant, 1.0, np.maximum(std, 1e-6))
        return cls(plain.factor, tuple(mean.tolist()), tuple(std.tolist()))

    @classmethod
    def none(cls, samples: Inputs) -> Scaling:
        """No normalisation: pixels in [0, 1], floats as they are."""
        return cls(1 / 255 if samples.x_train.dtype == np.uint8 else 1.0, (0.0,), (1.0,))

    @classmethod
    def given(cls, samples: Inputs, given: GivenScaling) -> Scaling:
        """The scaling with the numbers given in the config.

        Raises:
            ConfigError: if their number is neither one nor that of channels or features, or the inputs are
                words.
        """
        wanted = samples.shape[0]
        if samples.tokens:
            raise ConfigError(
                "data.normalise", f"{samples.name} has words, which have no mean", "leave it out"
            )
        if len(given.mean) not in (1, wanted):
            kind = ("channel" if len(samples.shape) == 3 else "feature") + ("" if wanted == 1 else "s")
            raise ConfigError(
                "data.normalise",
                f"{len(given.mean)} means for {wanted} {kind}",
                "give one" if wanted == 1 else f"give {wanted} or one",
            )
        return cls(cls.none(samples).factor, given.mean, given.std)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Scaling:
        """The inverse of :meth:`to_dict`."""
        return cls(values["factor"], tuple(values["mean"]), tuple(values["std"]))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for ``normalisation.json``."""
        return asdict(self)

    def apply(self, x: NDArray[np.generic]) -> NDArray[np.float32]:
        """Scale stored inputs ``(n, C, H, W)`` or ``(n, D)`` for a model."""
        shape = (-1, 1, 1) if x.ndim == 4 else (-1,)
        mean, std = (np.reshape(values, shape) for values in (self.mean, self.std))
        slope, shift = (self.factor / std).astype(np.float32), (mean / std).astype(np.float32)
        scaled: NDArray[np.float32] = x.astype(np.float32) * slope - shift
        return scaled

    def undo(self, x: NDArray[np.floating]) -> NDArray[np.float64]:
        """The inverse of :meth:`apply` for inputs ``x`` ``(n, C, H, W)`` or ``(n, D)``."""
        shape = (-1, 1, 1) if x.ndim == 4 else (-1,)
        mean, std = (np.reshape(values, shape) for values in (self.mean, self.std))
        return np.asarray((x * std + mean) / self.factor, np.float64)


def _feature_statistics(x: NDArray[np.generic]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of every column of a table ``(n, D)``."""
    numbers: Any = x  # NumPy's types have no mean of what may be no numbers
    mean: NDArray[np.float64] = numbers.mean(axis=0, dtype=np.float64)
    square = np.zeros_like(mean)
    for start in range(0, len(x), _ROWS_AT_ONCE):
        square += ((x[start : start + _ROWS_AT_ONCE].astype(np.float64) - mean) ** 2).sum(axis=0)
    constant = x.min(axis=0) == x.max(axis=0)
    return tuple(mean.tolist()), tuple(np.where(constant, 1.0, np.sqrt(square / len(x))).tolist())

"""A model as one vector: the flat layout, its layers, and deterministic initialisation.

Outside of training a model is a float32 vector of ``P`` parameters and buffers. Parameters come first, in the
order of ``named_parameters``, then the floating-point buffers in the order of ``named_buffers``: the running
mean and variance of BatchNorm are part of the vector, so they are aggregated, sent, saved and evaluated like
weights. Other buffers are not: integers (BatchNorm's ``num_batches_tracked``, which is only used with a
momentum of None), and buffers registered with ``persistent=False`` (tables that the module computes). They
have their initial values at the start of every client's training.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from rayfl import random
from rayfl.errors import ConfigError, nearest
from rayfl.losses import CrossEntropy, Loss
from rayfl.models.base import Model, one_line
from rayfl.plugins import broken, is_own

if TYPE_CHECKING:
    from torch import Tensor, nn

Interval = tuple[int, int]
Vector: TypeAlias = "NDArray[np.float32] | Tensor"


@dataclass(frozen=True)
class ModelSpec:
    """The flat layout of a network, cheap to send: the config and the layout, never the module.

    Make it with :meth:`of`; any process that has it can :meth:`build` the same module.

    Attributes:
        model: the architecture.
        shape: shape of one sample, ``(C, H, W)``, ``(D,)`` or ``(L,)``.
        classes: number of outputs: of classes, or of words.
        seed: the run's seed, which fixes :meth:`initial`.
        names: every parameter, then every persistent floating-point buffer, by its dotted name.
        shapes: the shape of each.
        slices: where each lies in the flat vector, ``[start, stop)``.
        n_parameters: how many of the ``P`` entries are parameters; the rest are buffers.
        layers: layer name -> where its parameters and buffers lie, sorted, neighbours joined.
        loss: what the model is trained for.
    """

    model: Model
    shape: tuple[int, ...]
    classes: int
    seed: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    slices: tuple[slice, ...]
    n_parameters: int
    layers: Mapping[str, list[Interval]]
    loss: Loss = CrossEntropy()  # noqa: RUF009 (frozen)

    @classmethod
    def of(
        cls,
        model: Model,
        shape: tuple[int, ...],
        classes: int,
        seed: int,
        loss: Loss = CrossEntropy(),  # noqa: B008 (frozen)
    ) -> ModelSpec:
        """Lay out ``model`` for samples of ``shape``.

        Raises:
            ConfigError: if the model does not suit the shape, or no computer could hold it; if its layers do
                not divide its tensors, or a parameter is not float32.
        """
        import torch

        try:
            module = model.outline(tuple(shape), classes)
        except (RuntimeError, OverflowError, TypeError) as error:  # sizes beyond 64 bits
            raise ConfigError("model", f"{model.name_of()!r} cannot be built: {one_line(error)}") from error
        except Exception as error:
            if isinstance(error, ConfigError) or is_own(model):
                raise
            raise broken(error, type(model).__module__) from error
        parameters, tensors = dict(module.named_parameters()), dict(flat_tensors(module))
        for name, tensor in tensors.items():
            if torch.nn.parameter.is_lazy(tensor):
                what = f"{model.name_of()}: {name} has no shape before the first batch (a lazy module)"
                raise ConfigError("model", what, "say how many inputs it has, as nn.Linear does")
            if tensor.dtype != torch.float32:
                what = f"{model.name_of()}: {name} is {tensor.dtype}; only float32 is supported"
                raise ConfigError("model", what)
        stops = list(itertools.accumulate(tensor.numel() for tensor in tensors.values()))
        slices = tuple(slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False))
        return cls(
            model=model,
            shape=tuple(shape),
            classes=classes,
            seed=seed,
            names=tuple(tensors),
            shapes=tuple(tuple(tensor.shape) for tensor in tensors.values()),
            slices=slices,
            n_parameters=sum(parameter.numel() for parameter in parameters.values()),
            layers=_layer_intervals(model, model.layers_of(module), dict(zip(tensors, slices, strict=True))),
            loss=loss,
        )

    @property
    def P(self) -> int:
        """Length of the flat vector: parameters and floating-point buffers."""
        return self.slices[-1].stop if self.slices else 0

    @property
    def nbytes(self) -> int:
        """What one transfer of the whole model costs, in bytes (4 P)."""
        return 4 * self.P

    @property
    def sums(self) -> int:
        """How many numbers per sample the loss sums (S)."""
        return self.loss.width(self.classes)

    def build(self) -> nn.Module:
        """The module on the CPU, with random weights from the seed; does not touch torch's generators."""
        return _build_seeded(self.model, self.shape, self.classes, random.key(self.seed, "init", 0))

    def outline(self) -> nn.Module:
        """The module on the meta device, without numbers; does not touch torch's generators."""
        import torch

        with torch.random.fork_rng(devices=[]):
            return self.model.outline(self.shape, self.classes)

    def initial(self, seed: int | None = None, index: int = 0) -> NDArray[np.float32]:
        """The initial weights ``w_0``, ``(P,)``, equal in every process; trained ones if the model has any.

        Args:
            seed: the seed; the spec's own by default.
            index: number of the initialisation, for methods that start from several (IFCA).
        """
        key = random.key(self.seed if seed is None else seed, "init", index)
        module = _build_seeded(self.model, self.shape, self.classes, key)
        self.model.load_weights(module)
        return self.flatten(module)

    def flatten(self, module: nn.Module) -> NDArray[np.float32]:
        """A copy of the module's parameters and buffers, ``(P,)``, on the CPU."""
        vector = np.empty(self.P, np.float32)
        self.store(module, vector)
        return vector

    def store(self, module: nn.Module, out: Vector) -> None:
        """Copy the module's parameters and buffers into ``out`` ``(P,)``, which may be on another device.

        Raises:
            ValueError: if ``out`` or the module is not of this layout.
        """
        import torch

        with torch.no_grad():
            for part, tensor in self._tensor_pairs(module, out):
                part.copy_(tensor)

    def load(self, module: nn.Module, vector: Vector) -> None:
        """Copy ``vector`` ``(P,)`` into the module, in place; it may lie on another device.

        Raises:
            ValueError: if the vector or the module is not of this layout.
        """
        import torch

        with torch.no_grad():
            for part, tensor in self._tensor_pairs(module, vector):
                tensor.copy_(part)

    def to_state_dict(self, vector: Vector) -> dict[str, Tensor]:
        """The vector as named tensors, views of it where possible; for safetensors and inspection.

        Integer buffers are missing; ``load_state_dict`` accepts that.

        Raises:
            ValueError: if the vector is not of this layout.
        """
        tensor = self._as_checked_tensor(vector)
        return {
            name: tensor[place].view(shape)
            for name, shape, place in zip(self.names, self.shapes, self.slices, strict=True)
        }

    def segment(self, names: Iterable[str] | None = None, *, first: int | None = None) -> list[Interval]:
        """Where the given layers lie in the flat vector: sorted intervals ``(start, stop)``.

        Args:
            names: layer names; or
            first: the number of leading layers, as in "the first 2 layers are common".

        Raises:
            ConfigError: if a layer is unknown or there are fewer than ``first``.
            ValueError: unless exactly one of the two is given.
        """
        if (names is None) == (first is None):
            raise ValueError("give either names or first")
        if first is not None:
            if not 0 <= first <= len(self.layers):
                what = f"{self.model.name_of()} has {len(self.layers)} layers, not {first}"
                raise ConfigError("model", what, f"use at most {len(self.layers)}: {', '.join(self.layers)}")
            names = list(self.layers)[:first]
        chosen = list(names or ())
        for name in chosen:
            if name not in self.layers:
                what = f"{self.model.name_of()} has no layer {name!r}"
                raise ConfigError("model", what, nearest(name, self.layers))
        return _join_intervals(place for name in set(chosen) for place in self.layers[name])

    def frozen(self, segments: Iterable[Interval]) -> frozenset[str]:
        """Names of the parameters that lie in intervals of the flat vector.

        Raises:
            ValueError: if an interval contains a part of a parameter, or if they contain all parameters:
                nothing is left to train.
        """
        parts = list(segments)
        if not parts:
            return frozenset()
        inside = np.zeros(self.P, np.bool_)
        for start, stop in parts:
            inside[start:stop] = True
        names = []
        for name, place in zip(self.names, self.slices, strict=True):
            if place.start >= self.n_parameters:
                break
            if inside[place].any():
                if not inside[place].all():
                    raise ValueError(f"frozen: a part of {name}; whole tensors can be frozen")
                names.append(name)
        if inside[: self.n_parameters].all():
            raise ValueError("frozen: all parameters; nothing is left to train")
        return frozenset(names)

    def mask(self, names: Iterable[str] | None = None, *, first: int | None = None) -> NDArray[np.bool_]:
        """Mask of the parameters of the given layers, ``(P,)``; arguments as in :meth:`segment`."""
        mask = np.zeros(self.P, np.bool_)
        for start, stop in self.segment(names, first=first):
            mask[start:stop] = True
        return mask

    def _tensor_pairs(self, module: nn.Module, vector: Vector) -> Iterator[tuple[Tensor, Tensor]]:
        """Each part of the vector, reshaped, with the module's tensor of the same name."""
        flat = self._as_checked_tensor(vector)
        names, owners = _owners(module)
        if names != self.names:
            raise ValueError(f"the module is not a {self.model.name_of()}: its tensors are {names}")
        for place, shape, (owner, key) in zip(self.slices, self.shapes, owners, strict=True):
            tensor = owner[key]
            if tuple(tensor.shape) != shape:
                raise ValueError(f"the module holds a tensor of shape {tuple(tensor.shape)}, not {shape}")
            yield flat[place].view(shape), tensor

    def _as_checked_tensor(self, vector: Vector) -> Tensor:
        """The vector as a tensor that shares its memory."""
        import torch

        if tuple(vector.shape) != (self.P,):
            raise ValueError(f"a vector of shape ({self.P},) is needed, not {tuple(vector.shape)}")
        if isinstance(vector, torch.Tensor):
            if vector.dtype != torch.float32:
                raise ValueError(f"a float32 vector is needed, not {vector.dtype}")
            return vector
        if vector.dtype != np.float32:
            raise ValueError(f"a float32 vector is needed, not {vector.dtype}")
        return as_tensor(vector)


def as_tensor(array: NDArray[np.float32]) -> Tensor:
    """A tensor that shares the memory of an array ``(n, ...)``, which may be read-only: do not change it."""
    import torch

    if not array.flags.writeable:
        _silence_read_only_warning()
    return torch.from_numpy(array)


@cache
def _silence_read_only_warning() -> None:
    """Trigger PyTorch's warning about read-only arrays, which it gives once per process, and suppress it.

    Arrays from an object store are read-only, and suppressing a warning at each call would take longer than
    reading the array.
    """
    import torch

    array = np.zeros(1, np.float32)
    array.setflags(write=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        torch.from_numpy(array)


def _build_seeded(model: Model, shape: tuple[int, ...], classes: int, key: int) -> nn.Module:
    """A module initialised from ``key`` alone, without disturbing any global generator."""
    import torch

    with torch.random.fork_rng(devices=[]), random.python_and_numpy_seeded(key), torch.device("cpu"):
        torch.default_generator.manual_seed(key)
        return model.build(tuple(shape), classes)


def flat_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the flat vector in its order: parameters, then floating-point buffers that persist."""
    yield from module.named_parameters()
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        for name in part._non_persistent_buffers_set
    }
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and name not in transient:
            yield name, buffer


_OWNERS: WeakKeyDictionary[nn.Module, tuple[tuple[str, ...], list[tuple[dict[str, Any], str]]]]
_OWNERS = WeakKeyDictionary()


def _owners(module: nn.Module) -> tuple[tuple[str, ...], list[tuple[dict[str, Any], str]]]:
    """The names of :func:`flat_tensors`, and where the module stores each: a mapping, and its key.

    Looked up once per module, since models are loaded and stored for every client. Tensors may be replaced
    later, submodules may not.
    """
    if module not in _OWNERS:
        owner_of: dict[str, tuple[dict[str, Any], str]] = {}
        for prefix, part in module.named_modules():
            for owner in (part._parameters, part._buffers):
                owner_of.update({f"{prefix}.{key}" if prefix else key: (owner, key) for key in owner})
        names = tuple(name for name, _ in flat_tensors(module))
        _OWNERS[module] = names, [owner_of[name] for name in names]
    return _OWNERS[module]


def _layer_intervals(
    model: Model, layers: Mapping[str, Sequence[str]], places: dict[str, slice]
) -> dict[str, list[Interval]]:
    """Each layer's intervals; every tensor must belong to exactly one layer."""
    owner: dict[str, str] = {}
    for layer, submodules in layers.items():
        for name in places:
            if any((name + ".").startswith(submodule + ".") for submodule in submodules):
                if name in owner:
                    what = f"{name} belongs to two layers, {owner[name]} and {layer}"
                    raise ConfigError("model.layers", what)
                owner[name] = layer
    if homeless := [name for name in places if name not in owner]:
        what = f"{model.name_of()} has tensors in no layer: {', '.join(homeless)}"
        raise ConfigError("model.layers", what)
    return {
        layer: _join_intervals(
            (place.start, place.stop) for name, place in places.items() if owner[name] == layer
        )
        for layer in layers
    }


def _join_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted intervals with neighbours joined."""
    result: list[Interval] = []
    for start, stop in sorted(intervals):
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return result

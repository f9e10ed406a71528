"""Local losses that compare a client's network with others on the same batch: distillation, contrast.

Shapes: B clients of a block, P parameters and buffers of a model, n samples of a batch, K outputs,
D features, L words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from rayfl.errors import ConfigError, nearest, type_of

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Seen:
    """The outputs and features of a network for one batch.

    Attributes:
        outputs: ``(n, K)``; for texts ``(n, K, L)``.
        features: input of the layer :attr:`Guides.layer`, ``(n, D)``: the representation.
    """

    outputs: torch.Tensor
    features: torch.Tensor


Comparison: TypeAlias = "Callable[[Seen, Sequence[Seen], torch.Tensor], torch.Tensor]"
"""The term added to the loss of each sample, ``(n,)``: a function of what the client's network and the other
models compute for a batch, and of the targets. ``torch.func.vmap`` applies it to several clients at once,
unless a sample's term depends on the other samples of the batch.
"""


@dataclass(frozen=True)
class Guides:
    """Models that are not trained, and the loss term that compares the client's network with them.

    They see the same batches as the client's network, in evaluation mode: no dropout, and running statistics
    in BatchNorm.

    Attributes:
        models: one or more models for each client, ``(B, P)`` each.
        term: added to the loss of each sample. The losses that clients report do not include it.
        layer: name of the module whose input is the features; empty for the last module with parameters, in
            the order in which the network defines them.
    """

    models: tuple[torch.Tensor, ...]
    term: Comparison
    layer: str = ""

    def check(self, module: nn.Module) -> None:
        """Check that the network has the layer.

        Raises:
            ConfigError: if it does not.
        """
        _layer(module, self.layer)

    def compare(self, own: Seen, others: Sequence[Seen], targets: torch.Tensor) -> torch.Tensor:
        """The term for each sample ``(n,)``.

        Raises:
            ConfigError: if it has another shape.
        """
        values = self.term(own, others, targets)
        if getattr(values, "shape", None) != own.outputs.shape[:1]:
            raise ConfigError(
                "guides", f"the term is {type_of(values)}", "expected one number per sample (n,)"
            )
        return values

    def take(self, rows: torch.Tensor) -> Guides:
        """The guides of the clients at positions ``rows`` ``(C,)`` of the block."""
        return Guides(tuple(each.index_select(0, rows) for each in self.models), self.term, self.layer)

    def to(self, like: torch.Tensor) -> Guides:
        """The guides with their models on the device, and in the dtype, of the tensor ``like``."""
        return Guides(tuple(each.to(like) for each in self.models), self.term, self.layer)


@contextmanager
def watching(module: nn.Module, layer: str) -> Iterator[Callable[[torch.Tensor], Seen]]:
    """Yield a function that turns the outputs of the module's last call into a :class:`Seen`.

    Args:
        module: a network.
        layer: as in :class:`Guides`.

    Raises:
        ConfigError: if the network has no such layer.
    """
    inputs: list[torch.Tensor] = []

    def keep(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        inputs[:] = args[:1]

    def seen(outputs: torch.Tensor) -> Seen:
        if not inputs:
            raise ValueError(f"the network does not call its layer {layer!r}")
        return Seen(outputs, inputs.pop().flatten(1).to(outputs.dtype))

    handle = _layer(module, layer).register_forward_pre_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()


def _layer(module: nn.Module, name: str) -> nn.Module:
    parts: dict[str, nn.Module] = dict(module.named_modules())
    if not name:
        return [part for part in parts.values() if next(part.parameters(recurse=False), None) is not None][-1]
    if name not in parts:
        raise ConfigError("local", f"the network has no layer {name!r}", nearest(name, list(parts)))
    return parts[name]

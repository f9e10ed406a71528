"""Local losses that compare a client's network with others on the same batch: distillation, contrast.

Shapes: B clients of a block, P numbers of a model, n samples of a batch, K outputs, D features, L words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from rayfl.errors import ConfigError, nearest

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Seen:
    """What a network makes of a batch.

    Attributes:
        outputs: ``(n, K)``; of texts ``(n, K, L)``.
        features: what enters the layer that :attr:`Guides.layer` names, ``(n, D)``: the representation.
    """

    outputs: torch.Tensor
    features: torch.Tensor


Comparison: TypeAlias = "Callable[[Seen, Sequence[Seen], torch.Tensor], torch.Tensor]"
"""What is added to the loss of each sample ``(n,)``: a function of what the client's network and the others
make of a batch, and of its targets. It may be applied to several clients at once by ``torch.func.vmap``."""


@dataclass(frozen=True)
class Guides:
    """Models that stay as they are, and what the local loss makes of them.

    They see the same batches as the client's network, in evaluation mode: no dropout, and running statistics
    in BatchNorm.

    Attributes:
        models: one or more models for each client, ``(B, P)`` each.
        term: what is added to the loss. The losses that clients report are without it.
        layer: name of the module whose input are the features; empty for the last module with parameters, in
            the order in which the network defines them.
    """

    models: tuple[torch.Tensor, ...]
    term: Comparison
    layer: str = ""

    def check(self, module: nn.Module) -> None:
        """Refuse a layer that the network does not have.

        Raises:
            ConfigError
        """
        _layer(module, self.layer)

    def take(self, rows: torch.Tensor) -> Guides:
        """Those of the clients at ``rows`` ``(C,)`` of the block."""
        return Guides(tuple(each.index_select(0, rows) for each in self.models), self.term, self.layer)

    def to(self, like: torch.Tensor) -> Guides:
        """The same on the device of a tensor."""
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

    def keep(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        inputs[:] = given[:1]

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
    named: dict[str, nn.Module] = dict(module.named_modules())
    if not name:
        return [part for part in named.values() if next(part.parameters(recurse=False), None) is not None][-1]
    if name not in named:
        raise ConfigError("local", f"the network has no layer {name!r}", nearest(name, list(named)))
    return named[name]

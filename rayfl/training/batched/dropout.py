"""Dropout under ``torch.func``: every client draws what it would draw alone, before the forward pass.

``torch.func`` has one generator for all clients, whose draws would depend on who trains together. So a
rehearsal lists what a forward pass draws; before each step these numbers are drawn for each client from a
generator of its own, in the order of the plain loop; the forward pass finds them where it would have drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from rayfl.training.batched.layers import Step
from rayfl.training.batched.network import Unsupported

_WHOLE_CHANNELS = (functional.dropout1d, functional.dropout2d, functional.dropout3d)


class Draw(NamedTuple):
    """What one dropout draws.

    Attributes:
        shape: of a sample's numbers.
        p: probability that one is zero.
    """

    shape: tuple[int, ...]
    p: float


class Dropout(TorchFunctionMode):
    """While it is entered, dropout multiplies by factors that it is given.

    It knows the functions of ``torch.nn.functional`` for elements and whole channels, and the dropout of
    attention weights.

    Args:
        factors: of a dropout's shape (with samples) and p: zeros, and 1 / (1 - p).
    """

    def __init__(self, factors: Callable[[tuple[int, ...], float], torch.Tensor]) -> None:
        super().__init__()
        self._factors = factors

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is functional.dropout:
            return self._elements(*args, **given)
        if func in _WHOLE_CHANNELS:
            return self._channels(*args, **given)
        if func is functional.scaled_dot_product_attention and _probability(args, given):
            return self._attention(*args, **given)
        return func(*args, **given)

    def _elements(
        self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        return self._dropped(x, tuple(x.shape), p, inplace) if training and p else x

    def _channels(
        self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        shape = (*x.shape[:2], *[1] * (x.dim() - 2))
        return self._dropped(x, shape, p, inplace) if training and p else x

    def _dropped(self, x: torch.Tensor, shape: tuple[int, ...], p: float, inplace: bool) -> torch.Tensor:
        factors = self._factors(shape, p) if p < 1 else torch.zeros((), dtype=x.dtype, device=x.device)
        return x.mul_(factors) if inplace else x * factors

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **other: Any,
    ) -> torch.Tensor:
        """As PyTorch documents :func:`torch.nn.functional.scaled_dot_product_attention`."""
        scale = other.pop("scale", None)
        if any(other.values()):
            raise Unsupported(f"dropout of attention with {', '.join(other)}")
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights = torch.softmax(scores, -1)
        return self._dropped(weights, tuple(weights.shape), dropout_p, inplace=False) @ value


def _probability(args: Sequence[Any], given: dict[str, Any]) -> float:
    """The ``dropout_p`` of a call of ``scaled_dot_product_attention``."""
    return float(args[4] if len(args) > 4 else given.get("dropout_p", 0.0))


def rehearsed(samples: int, found: list[Draw]) -> Dropout:
    """A mode that drops nothing, and lists what would be drawn for a batch of ``samples``."""

    def factors(shape: tuple[int, ...], p: float) -> torch.Tensor:
        if not shape or shape[0] != samples:
            raise Unsupported("a dropout's batch is not the batch of samples")
        found.append(Draw(shape[1:], p))
        return torch.ones(shape)

    return Dropout(factors)


def given(factors: Iterable[torch.Tensor]) -> Dropout:
    """A mode that takes these, one after another."""
    left = iter(factors)
    return Dropout(lambda shape, p: next(left))


def drawn(
    draws: Sequence[Draw], clients: int, rows: int, step: Step, like: torch.Tensor
) -> list[torch.Tensor]:
    """The factors of a step, ``(C, B, *shape)`` each, of C clients and B rows; those of padding are zero."""
    factors = [torch.zeros((clients, rows, *shape), device=like.device) for shape, _ in draws]
    for client in range(clients):
        count = rows if step.lengths is None else step.lengths[client]
        for draw, tensor in zip(draws, factors, strict=True):
            own = tensor[client, :count]
            own.bernoulli_(1 - draw.p, generator=step.generators[client]).div_(1 - draw.p)
    return factors

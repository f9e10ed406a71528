"""Dropout for many clients: every client draws what it would draw alone, before the forward pass.

What a forward pass draws is listed once, for ``torch.func`` in a rehearsal. Before each step these numbers
are drawn for each client from its own generator, in the order of the plain loop, and the forward pass uses
them where it would have drawn: ``torch.func`` has one generator for all clients, whose draws would depend on
which clients train together, and recorded steps would draw what they drew when they were recorded.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from rayfl.training.batched.layers import Step
from rayfl.training.batched.reading import Unsupported

_MULTI_HEAD = inspect.signature(functional.multi_head_attention_forward)

_WHOLE_CHANNELS = (functional.dropout1d, functional.dropout2d, functional.dropout3d)


class Draw(NamedTuple):
    """What one dropout draws.

    Attributes:
        shape: of a sample's numbers.
        p: probability that one is zero.
        order: the dimensions ``(B, *shape)`` from outer to inner in memory, the order in which PyTorch draws.
    """

    shape: tuple[int, ...]
    p: float
    order: tuple[int, ...]


class Dropout(TorchFunctionMode):
    """While this mode is active, dropout multiplies by given factors.

    It covers the functions of ``torch.nn.functional`` for elements and whole channels, and the dropout of
    attention weights, also in ``nn.MultiheadAttention`` and PyTorch's transformers.

    Args:
        factors: function of a dropout's shape (with samples), p and order; returns zeros and 1 / (1 - p).
    """

    def __init__(self, factors: Callable[[tuple[int, ...], float, tuple[int, ...]], torch.Tensor]) -> None:
        super().__init__()
        self._factors = factors

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if func is functional.dropout:
            return self._elements(*args, **keywords)
        if func in _WHOLE_CHANNELS:
            return self._channels(*args, **keywords)
        if func is functional.scaled_dot_product_attention and _dropout_probability(args, keywords):
            return self._attention(*args, **keywords)
        if func is functional.multi_head_attention_forward:
            call = _MULTI_HEAD.bind(*args, **keywords)
            call.apply_defaults()
            if call.arguments["training"] and call.arguments["dropout_p"]:
                return self._multi_head(**call.arguments)
        return func(*args, **keywords)

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
        if p == 1:
            factors = torch.zeros((), dtype=x.dtype, device=x.device)
        else:
            order = sorted(range(x.dim()), key=x.stride, reverse=True) if shape == x.shape else range(x.dim())
            factors = self._factors(shape, p, tuple(order))
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
        weights = _attention_weights(query, key, attn_mask, is_causal, scale)
        return self._dropped(weights, tuple(weights.shape), dropout_p, inplace=False) @ value

    def _multi_head(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, num_heads: int, **other: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute what ``nn.MultiheadAttention`` does for ``(words, B, width)``; its own function calls the
        attention where a mode cannot intercept it.
        """
        rare = ("bias_k", "add_zero_attn", "static_k", "static_v", "use_separate_proj_weight")
        if query.dim() != 3 or any(other[name] is not None and other[name] is not False for name in rare):
            raise Unsupported("dropout of a MultiheadAttention with rare settings")
        weight, bias = other["in_proj_weight"].chunk(3), other["in_proj_bias"]
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        q, k, v = (
            functional.linear(x, *projection).view(*x.shape[:2], num_heads, -1).permute(1, 2, 0, 3)
            for x, *projection in zip((query, key, value), weight, biases, strict=True)
        )
        mask = _as_numbers(other["attn_mask"], q)
        if mask is not None and mask.dim() == 3:  # one for each sample and head
            mask = mask.view(-1, num_heads, *mask.shape[1:])
        padding = _as_numbers(other["key_padding_mask"], q)
        if padding is not None:
            padding = padding[:, None, None, :]
            mask = padding if mask is None else mask + padding
        weights = _attention_weights(q, k, mask)
        weights = self._dropped(weights, tuple(weights.shape), other["dropout_p"], inplace=False)
        y = functional.linear(
            (weights @ v).permute(2, 0, 1, 3).flatten(2), other["out_proj_weight"], other["out_proj_bias"]
        )
        if not other["need_weights"]:
            return y, None
        return y, weights.mean(1) if other["average_attn_weights"] else weights


def _attention_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of each query to each key: the softmax of their scaled products and the mask."""
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if causal:
        mask = ~torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(mask, -math.inf)
    elif mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    return torch.softmax(scores, -1)


def _as_numbers(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """A mask of ``nn.MultiheadAttention``, in which True excludes a key, as numbers to add to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)


def _dropout_probability(args: Sequence[Any], keywords: dict[str, Any]) -> float:
    """The ``dropout_p`` in a call of ``scaled_dot_product_attention``."""
    return float(args[4] if len(args) > 4 else keywords.get("dropout_p", 0.0))


def rehearsed(samples: int, draws: list[Draw]) -> Dropout:
    """A mode that drops nothing, and lists what would be drawn for a batch of ``samples``."""

    def factors(shape: tuple[int, ...], p: float, order: tuple[int, ...]) -> torch.Tensor:
        if not shape or shape[0] != samples:
            raise Unsupported("a dropout's batch is not the batch of samples")
        draws.append(Draw(shape[1:], p, order))
        return torch.ones(shape)

    return Dropout(factors)


def given(factors: Iterable[torch.Tensor]) -> Dropout:
    """A mode in which dropouts take these factors, one after another."""
    remaining = iter(factors)
    return Dropout(lambda shape, p, order: next(remaining))


def fill(factors: Sequence[torch.Tensor], draws: Sequence[Draw], step: Step) -> None:
    """Draw the factors of a step, ``(C, B, *shape)`` each, for C clients and B rows; 0 for padding."""
    for draw, tensor in zip(draws, factors, strict=True):
        if step.lengths is not None:
            tensor.zero_()
        for client, generator in enumerate(step.generators[: len(tensor)]):
            count = tensor.shape[1] if step.lengths is None else step.lengths[client]
            client_factors = tensor[client, :count].permute(draw.order)
            if client_factors.is_contiguous():
                client_factors.bernoulli_(1 - draw.p, generator=generator)
            else:  # drawn in the order of its own memory, not of this one
                own = torch.empty_like(client_factors, memory_format=torch.contiguous_format)
                client_factors.copy_(own.bernoulli_(1 - draw.p, generator=generator))
        tensor.div_(1 - draw.p)

"""What the mode that drops computes instead of PyTorch, where nothing is dropped and where all is known."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from rayfl.training.batched.dropout import Draw, Dropout, fill
from rayfl.training.batched.layers import Step

CAUSAL = nn.Transformer.generate_square_subsequent_mask(6)
MASKS = {"none": None, "numbers": CAUSAL, "hidden": CAUSAL.isinf(), "each": torch.randn(6, 6, 6)}
PADDING = {"none": None, "hidden": torch.arange(6).expand(3, 6) >= torch.tensor([[6], [5], [3]])}


def nothing(shape: tuple[int, ...], p: float, order: tuple[int, ...]) -> torch.Tensor:
    return torch.ones(shape)


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
@pytest.mark.parametrize("need", [True, False])
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("mask", MASKS)
def test_attention_is_that_of_pytorch(mask: str, padding: str, need: bool) -> None:
    torch.manual_seed(0)
    attention, x, y = (
        nn.MultiheadAttention(8, 2, batch_first=True),
        torch.randn(3, 6, 8),
        torch.randn(3, 6, 8),
    )
    given = {"attn_mask": MASKS[mask], "key_padding_mask": PADDING[padding], "need_weights": need}
    wanted, weights = attention(x, y, y, **given)
    attention.dropout = 0.5
    with Dropout(nothing):
        found, own = attention(x, y, y, **given)
    torch.testing.assert_close(found, wanted)
    assert (weights is None) == (own is None)
    if weights is not None:
        torch.testing.assert_close(own, weights)


@pytest.mark.parametrize("rows", [4, 3])
def test_draws_are_those_of_the_function(rows: int) -> None:
    """In the order of memory, one dropout after another, and padding stays zero."""
    x, z = torch.rand(5, rows, 2).transpose(0, 1) + 1, torch.rand(rows, 3) + 1
    torch.manual_seed(7)
    first, second = functional.dropout(x, 0.5), functional.dropout(z, 0.2)
    step = Step([torch.Generator().manual_seed(7)], None, [rows])
    draws = [Draw((5, 2), 0.5, (1, 0, 2)), Draw((3,), 0.2, (0, 1))]
    one, other = (torch.full((1, 4, *draw.shape), 9.0) for draw in draws)
    fill([one, other], draws, step)
    assert torch.equal(one[0, :rows] * x, first)
    assert torch.equal(other[0, :rows] * z, second)
    assert not one[0, rows:].any()
    assert 0 < int((first == 0).sum()) < first.numel()

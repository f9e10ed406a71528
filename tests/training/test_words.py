"""Networks of any kind that predict every word equal the plain loop, vectorised or one client at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from rayfl.models import Model, ModelSpec
from rayfl.models.lstm import Lstm
from rayfl.training import LocalWork
from rayfl.training.batched.engine import BatchedEngine
from rayfl.training.batched.vmap import VmapEngine, VmapNetwork
from rayfl.training.batches import Batches
from rayfl.training.engine import choose_engine
from rayfl.training.loop import LoopEngine
from tests.training.bounds import Truth
from tests.training.test_recurrent import PLAIN, SIZES, texts

LENGTH, WORDS = 6, 20


class Attention(nn.Module):
    """A causal layer of attention written out, with a skip connection and positions."""

    dropped = 0.0

    def __init__(self, length: int, words: int, width: int = 8) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.position = nn.Parameter(0.1 * torch.randn(length, width))
        self.queries, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout, self.last = nn.Dropout(self.dropped), nn.Linear(width, words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words) + self.position
        q, k, v = (t.unflatten(2, (2, -1)).transpose(1, 2) for t in self.queries(self.norm(x)).chunk(3, 2))
        p = self.dropped if self.training else 0.0
        heads = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.dropout(self.mixed(heads.transpose(1, 2).flatten(2)))
        return self.last(x).transpose(1, 2)


class Dropped(Attention):
    """With dropout of what the layer adds, and of the weights of attention."""

    dropped = 0.3


class Encoder(nn.Module):
    """A transformer of PyTorch's own layers."""

    mask: torch.Tensor
    dropped = 0.0

    def __init__(self, length: int, words: int, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=self.dropped, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(width, words)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.embedding(words), mask=self.mask, is_causal=True)
        return self.last(x).transpose(1, 2)


class DroppedEncoder(Encoder):
    """With PyTorch's own dropout."""

    dropped = 0.1


class Normed(nn.Module):
    """BatchNorm over words, whose running statistics are the client's."""

    def __init__(self, length: int, words: int) -> None:
        super().__init__()
        self.embedding, self.norm, self.last = nn.Embedding(words, 8), nn.BatchNorm1d(8), nn.Linear(8, words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(words).transpose(1, 2))
        return self.last(torch.tanh(x).transpose(1, 2)).transpose(1, 2)


class Words(Model):
    """A network of this file as a model."""

    name: str = "words"
    tokens: ClassVar[bool] = True
    module: Callable[..., nn.Module]
    settings: Mapping[str, Any] = MappingProxyType({})

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        module = self.build((LENGTH,), WORDS)
        return {"all": tuple(name for name, _ in (*module.named_parameters(), *module.named_buffers()))}

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return self.module(shape[0], classes, **self.settings)

    def example(self, shape: tuple[int, ...], classes: int, count: int, rng: np.random.Generator) -> Any:
        return Lstm().example(shape, classes, count, rng)


def spec_of(module: Callable[..., nn.Module], **settings: Any) -> ModelSpec:
    return ModelSpec.of(Words(module=module, settings=settings), (LENGTH,), WORDS, 0)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize("work", [PLAIN, LocalWork(2, 5, 0.2, momentum=0.5, weight_decay=0.01)], ids=str)
@pytest.mark.parametrize("module", [Attention, Dropped, Normed])
def test_ragged_clients_equal_the_loop(module: Any, work: LocalWork, together: int) -> None:
    """In padded batches too, and when clients are done before others."""
    spec, batches = spec_of(module), Batches(texts(LENGTH, WORDS), torch.device("cpu"))
    rng = np.random.default_rng(1)
    indices: list[NDArray[np.integer]] = [rng.choice(60, n, replace=False) for n in SIZES]
    start = torch.from_numpy(np.stack([spec.initial(index=i % 2) for i in range(len(SIZES))]))
    truth = Truth.of(spec, batches, 0, work, 1, range(10, 16), indices, start)
    assert (truth.moved > 0.01).all()
    engine = BatchedEngine(spec, batches, 0, VmapNetwork(spec), together)
    truth.check(engine.train(work, 1, range(10, 16), indices, start))


@pytest.mark.parametrize("module", [Attention, Dropped, Encoder, DroppedEncoder, Normed])
def test_they_train_in_the_vmap_engine(module: Any) -> None:
    name, why = choose_engine(spec_of(module))
    assert name == "vmap"
    assert why.startswith("a trial agrees with the plain loop; not batched: it ")


@pytest.mark.parametrize(("width", "together"), [(8, 256), (640, 1)])
def test_large_networks_train_one_client_at_a_time(width: int, together: int) -> None:
    """And no block is so small that it goes to the loop: it would be the slower one."""
    engine = VmapEngine(
        spec_of(Attention, width=width), Batches(texts(LENGTH, WORDS), torch.device("cpu")), 0
    )
    assert engine.clients_per_call == together
    assert engine.least == 1


@pytest.mark.parametrize("module", [Encoder, DroppedEncoder])
def test_a_client_alone_gets_what_it_gets_in_company(module: Any) -> None:
    """Up to rounding: alone nothing is vectorised, and attention may be fused."""
    spec, batches = spec_of(module), Batches(texts(LENGTH, WORDS), torch.device("cpu"))
    indices = [np.arange(5 * c, 5 * c + n) for c, n in enumerate((5, 3, 7))]
    start = torch.from_numpy(np.tile(spec.initial(), (3, 1)))
    work = LocalWork(2, 4, 0.1)
    together, alone, loop = (
        engine.train(work, 0, range(3), indices, start).rows
        for engine in (
            VmapEngine(spec, batches, 0, clients_per_call=3),
            VmapEngine(spec, batches, 0, clients_per_call=1),
            LoopEngine(spec, batches, 0),
        )
    )
    update = float((loop - start).norm())
    assert float((together - loop).norm()) < 1e-4 * update
    assert float((alone - loop).norm()) < 1e-4 * update

"""The recurrent network for texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from typing_extensions import override

from rayfl.models.base import Model, named, random_texts

if TYPE_CHECKING:
    from torch import nn


class Lstm(Model):
    """LSTM for predicting the next word: embedding, two layers of LSTM, a linear map to the vocabulary.

    As in Clustered Federated Learning (Sattler et al. 2019, section VI-C), which does not state the sizes.
    """

    name: Literal["lstm"] = "lstm"
    tokens: ClassVar[bool] = True
    embedding: int = Field(64, ge=1, description="size of a word's embedding")
    hidden: int = Field(64, ge=1, description="units of each LSTM layer")
    depth: int = Field(2, ge=1, le=16, description="number of LSTM layers")
    tied: bool = Field(
        False,
        description="tie the output weights to the embedding (needs embedding = hidden)",
    )

    @model_validator(mode="after")
    def _sizes_agree(self) -> Lstm:
        if self.tied and self.embedding != self.hidden:
            raise ValueError(f"tied needs embedding equal to hidden, not {self.embedding} and {self.hidden}")
        return self

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        """``embedding``, ``lstm`` (all its layers) and ``fc1``; tied weights belong to the embedding."""
        return {layer: (layer,) for layer in ("embedding", "lstm", "fc1")}

    @override
    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """For texts ``(L,)``: words ``(batch, L)`` int64 become logits ``(batch, classes, L)``."""
        from torch import nn

        from rayfl.models.modules.recurrent import ClassesSecond, States

        embedding, last = nn.Embedding(classes, self.embedding), nn.Linear(self.hidden, classes)
        if self.tied:
            last.weight = embedding.weight
        return named(
            ("embedding", embedding),
            ("lstm", States(self.embedding, self.hidden, self.depth, batch_first=True)),
            ("fc1", last),
            ("logits", ClassesSecond()),
        )

    @override
    def example(
        self, shape: tuple[int, ...], classes: int, count: int, rng: np.random.Generator
    ) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
        return random_texts(shape, classes, count, rng)

"""The ``training`` section: what every client does in a round, and who takes part."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from rayfl.settings import Section
from rayfl.training.precision import Precision
from rayfl.training.work import LocalWork


class Training(Section):
    """Local training: E epochs of mini-batch SGD at each of the sampled clients."""

    participation: float = Field(
        1.0, gt=0, le=1, description="fraction rho of the clients that take part in a round"
    )
    epochs: int = Field(5, ge=1, description="local epochs E")
    batch_size: int = Field(10, ge=1, description="batch size B; the last batch of an epoch may be shorter")
    lr: float = Field(0.01, gt=0, description="learning rate eta")
    momentum: float = Field(0.0, ge=0, lt=1, description="SGD momentum, restarted every round")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty added to the gradient, as torch.optim.SGD")
    schedule: Literal["constant", "exponential", "cosine", "inverse"] = Field(
        "constant", description="learning rate over rounds t = 0, 1, ..."
    )
    decay: float = Field(0.99, gt=0, description="exponential: eta * decay^t; inverse: eta / (1 + decay * t)")
    lr_alpha: float = Field(
        0.0,
        ge=0,
        description="alpha of the learning rate within a round, eta (1 + alpha i)^-b at local step i;"
        " 0: constant",
    )
    lr_power: float = Field(1.0, ge=0, description="b of the learning rate within a round")
    engine: Literal["auto", "batched", "vmap", "loop"] = Field(
        "auto",
        description="engine that trains a block of clients; auto: the fastest that supports the model"
        " (it is recorded)",
    )

    precision: Precision = Field(
        "float32",
        description="bf16: matrix products and convolutions of local training in bfloat16, as torch.autocast"
        " does it; parameters, gradients, losses, sums and tests stay float32",
    )
    cuda_graphs: Literal["auto", "off"] = Field(
        "auto",
        description="auto: on a GPU, repeated steps are replayed as CUDA graphs if a trial agrees",
    )

    @model_validator(mode="after")
    def _rates_fall(self) -> Training:
        if self.schedule == "exponential" and self.decay > 1:
            raise ValueError(f"decay {self.decay:g} would make the exponential schedule grow; at most 1")
        return self

    @model_validator(mode="after")
    def _engine_computes_so(self) -> Training:
        if self.engine == "batched" and self.precision != "float32":
            raise ValueError(
                f"engine batched computes in float32, not in {self.precision}; engine=auto takes another"
            )
        return self

    def cohort(self, clients: int) -> int:
        """Number of clients sampled a round: ``max(1, round(rho N))`` (McMahan et al. 2017, Alg. 1)."""
        return max(1, round(self.participation * clients))

    def work(self, round: int = 0, rounds: int = 1) -> LocalWork:
        """The local work of round ``round`` (0-based) of ``rounds``."""
        return LocalWork(
            epochs=self.epochs,
            batch_size=self.batch_size,
            lr=self.lr_at(round, rounds),
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            lr_alpha=self.lr_alpha,
            lr_power=self.lr_power,
        )

    def lr_at(self, round: int, rounds: int) -> float:
        """The learning rate of round ``round`` (0-based) of ``rounds``."""
        factor = {
            "constant": 1.0,
            "exponential": self.decay**round,
            "cosine": 0.5 * (1 + math.cos(math.pi * round / max(1, rounds))),
            "inverse": 1 / (1 + self.decay * round),
        }[self.schedule]
        return self.lr * factor

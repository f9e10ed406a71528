"""Compiles all kernels: ``python -m rayfl.training.batched.compile_all``, see :mod:`rayfl.training.ahead`."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import torch
from torch import nn

from rayfl.models import MODELS, Model, ModelSpec
from rayfl.training.ahead import stamp
from rayfl.training.batched import conv_kernels, linear_kernels, loss_kernel, lstm_kernel
from rayfl.training.batched.compiled import CompiledForward, CompiledTraining
from rayfl.training.batched.reading import read
from rayfl.training.batched.steps import StepPlan
from rayfl.training.batched.vectors import LANES
from rayfl.training.work import NO_TERMS, LocalWork

_TERMS = (
    (False, False, False),  # plain SGD
    (True, False, False),  # FedProx
    (False, True, False),  # SCAFFOLD
    (True, True, False),  # MTL
    (False, False, True),  # Sub-FedAvg
)
"""Whether a step has a target, an offset and a mask. Numba compiles each combination separately, which is a
fifth faster than one kernel that checks for them; others are compiled when a user's method needs them."""


def compile_all() -> None:
    """Compile each kernel for the arrays with which networks call it, or find it in the cache."""
    f32 = np.float32
    x, w, y = np.ones((1, 1, 2), f32), np.ones((1, 3, 2), f32), np.ones((1, 1, 3), f32)
    one = f32(1)
    geometry = conv_kernels.Geometry(1, 1, 1, 4, 4, 1, 3, 0)
    samples, kernel, bias, padded = np.ones(16, f32), np.ones(9, f32), np.ones(1, f32), np.ones(64, f32)
    pooled, winner = np.ones(1 + LANES, f32), np.zeros(1 + LANES, np.int32)

    linear_kernels.weighted_sum(np.ones(1), x[0], np.zeros(2))
    conv_kernels.forward(samples, kernel, bias, geometry, padded, pooled, winner)
    linear_kernels.forward(x, w, y[0], y)
    loss_kernel.cross_entropy(y, np.zeros((1, 1), np.int64), np.ones((1, 1), f32), np.ones(1, f32), y.copy())
    for target, offset, mask in _TERMS:
        linear_kernels.descend(
            w, y, x, one, one,
            w.copy() if target else None, one, w.copy() if offset else None,
            np.ones(w.shape, np.uint8) if mask else None,
        )  # fmt: skip
    conv_kernels.backward(
        pooled, winner, padded, kernel, geometry, kernel.copy(), bias.copy(), padded.copy(), True, True
    )
    gates, state = np.ones((1, 2, 1, 4), f32), np.ones((1, 2, 1, 1), f32)
    lstm_kernel.forward(gates, np.ones((1, 4, 1), f32), state, state.copy(), state.copy())
    lstm_kernel.backward(gates, state, state, state.copy(), np.ones((1, 1, 4), f32))
    _train_a_client()


def _train_a_client() -> None:
    """Compile the kernels for all training of a client and for forward passes: once for networks like LeNet-5
    and MLPs, and once for all other networks that these kernels support."""
    for model in MODELS["linear"](), _Tanh():
        spec = ModelSpec.of(model, (2,), 3, 0)
        training, work = CompiledTraining(spec, read(spec)), LocalWork(1, 1, 0.1)
        plan = StepPlan(0, 0, [0], np.ones(1, np.int64), work)
        start, labels = torch.from_numpy(spec.initial()), torch.zeros(1, dtype=torch.int64)
        training.train(plan, work, start[None].clone(), NO_TERMS, False, (torch.ones(1, 2), labels))
        CompiledForward(spec, read(spec, training=False)).outputs(start, torch.ones(1, 2))


class _Tanh(Model):
    """A network with a layer that LeNet-5 does not have."""

    name: Literal["tanh"] = "tanh"
    layers: ClassVar[dict[str, tuple[str, ...]]] = {"first": ("0",), "last": ("2",)}

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The network, for samples that are vectors."""
        return nn.Sequential(nn.Linear(shape[0], 2), nn.Tanh(), nn.Linear(2, classes))


if __name__ == "__main__":
    compile_all()
    stamp().touch()

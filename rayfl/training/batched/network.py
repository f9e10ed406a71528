"""From a module tree to batched layers: every supported ``nn.Module`` has a twin with clients in front."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rayfl.models import ModelSpec
from rayfl.models.resnet9 import Residual as ResidualModule
from rayfl.training.batched import layers
from rayfl.training.batched.layers import Chain, Layer, Residual, Step
from rayfl.training.batched.parameters import Parameter, Sgd

_TWINS: dict[type[nn.Module], Callable[[Any], Layer]] = {
    nn.Linear: layers.Linear,
    nn.Conv2d: layers.Conv2d,
    nn.ReLU: lambda module: layers.ReLU(),
    nn.MaxPool2d: layers.MaxPool2d,
    nn.AvgPool2d: layers.AvgPool2d,
    nn.Flatten: lambda module: layers.Flatten(),
    nn.Dropout: layers.Dropout,
    nn.GroupNorm: layers.GroupNorm,
    nn.BatchNorm1d: layers.BatchNorm,
    nn.BatchNorm2d: layers.BatchNorm,
}


class Unsupported(Exception):
    """The module tree holds something that has no batched twin: which."""


class BatchedNetwork:
    """A network for many clients at once, generated from the module of a :class:`ModelSpec`.

    Raises:
        Unsupported: if a module has no twin.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._leaves: dict[str, Layer] = {}
        self.root = self._twin(spec.build(), "")
        self._parameter_names = {name for name, _ in spec.build().named_parameters()}

    def _twin(self, module: nn.Module, name: str) -> Layer:
        if type(module) in (nn.Sequential, ResidualModule):
            prefix = name + "." if name else ""
            chain = Chain(_pool_first([self._twin(m, prefix + n) for n, m in module.named_children()]))
            return chain if type(module) is nn.Sequential else Residual(chain)
        _check(module, name)
        layer = _TWINS[type(module)](module)
        self._leaves[name] = layer
        return layer

    def load(self, rows: torch.Tensor, sgd: Sgd) -> None:
        """Take the models ``(C, P)`` of C clients; the copy is contiguous tensor by tensor."""
        self._values: dict[str, torch.Tensor] = {}
        self._parameters: list[Parameter] = []
        owned: dict[str, tuple[dict[str, Parameter], dict[str, torch.Tensor]]] = {
            name: ({}, {}) for name in self._leaves
        }
        for name, shape, place in zip(self.spec.names, self.spec.shapes, self.spec.slices, strict=True):
            value = rows[:, place].view(len(rows), *shape).clone(memory_format=torch.contiguous_format)
            self._values[name] = value
            layer, _, own = name.rpartition(".")
            if name in self._parameter_names:
                parameter = Parameter(value, sgd)
                self._parameters.append(parameter)
                owned[layer][0][own] = parameter
            else:
                owned[layer][1][own] = value
        for name, layer_ in self._leaves.items():
            layer_.bind(*owned[name])

    def narrow(self, clients: int) -> None:
        """Only the first ``clients`` still train."""
        for parameter in self._parameters:
            parameter.narrow(clients)

    def store(self, rows: torch.Tensor) -> None:
        """Put the models back into ``rows`` ``(C, P)``."""
        for name, place in zip(self.spec.names, self.spec.slices, strict=True):
            rows[:, place] = self._values[name].flatten(1)

    def step(self, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, step: Step) -> torch.Tensor:
        """One SGD step of every client.

        Args:
            x: samples ``(C, B, ...)``.
            y: labels ``(C, B)``.
            weights: weight of each sample in its client's loss ``(C, B)``: ``1 / b`` for the b samples of
                the batch, 0 for padding.
            step: what layers may know.

        Returns:
            The clients' losses before the step, ``(C,)``.
        """
        logits = self.root.forward(x, step)
        log_p = torch.log_softmax(logits, -1)
        labels = y.unsqueeze(-1)
        loss = -(log_p.gather(-1, labels).squeeze(-1) * weights).sum(1)
        delta = log_p.exp_()
        delta.scatter_add_(-1, labels, delta.new_full((), -1.0).expand(labels.shape))
        delta.mul_(weights.unsqueeze(-1))
        self.root.backward(delta, False)
        return loss


def _check(module: nn.Module, name: str) -> None:
    """Refuse modules and settings without a twin."""
    if type(module) not in _TWINS:
        raise Unsupported(f"{name or 'the model'} is a {type(module).__name__}")
    if isinstance(module, nn.Conv2d) and (module.padding_mode != "zeros" or isinstance(module.padding, str)):
        raise Unsupported(f"{name} has padding {module.padding!r} of mode {module.padding_mode!r}")
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and (
        not module.track_running_stats or module.momentum is None
    ):
        raise Unsupported(f"{name} keeps no running statistics with a momentum")
    if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) != (1, -1):
        raise Unsupported(f"{name} flattens dimensions {module.start_dim} to {module.end_dim}")
    if isinstance(module, nn.AvgPool2d) and module.divisor_override is not None:
        raise Unsupported(f"{name} has a divisor of its own")


def _pool_first(chain: list[Layer]) -> list[Layer]:
    """``pool(relu(x)) = relu(pool(x))`` for a maximum, and then ReLU has a quarter of the work."""
    result = list(chain)
    for k in range(len(result) - 1):
        if isinstance(result[k], layers.ReLU) and isinstance(result[k + 1], layers.MaxPool2d):
            result[k], result[k + 1] = result[k + 1], result[k]
    return result

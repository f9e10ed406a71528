"""Any module that ``torch.func`` can vectorise: the fallback for layers without a batched twin."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional
from typing_extensions import override

from rayfl.models import ModelSpec
from rayfl.training.batched.layers import Step
from rayfl.training.batched.network import Network, Unsupported

_RANDOM = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.RReLU)


class VmapNetwork(Network):
    """The network's own forward pass, with autograd, vectorised over clients.

    Modules that draw random numbers or change buffers are refused: the draws would not be the clients' own,
    and changes of buffers do not pass through ``vmap``.

    Raises:
        Unsupported: for such modules.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        module = spec.build()
        for name, part in module.named_modules():
            if isinstance(part, _RANDOM):
                raise Unsupported(f"{name} draws random numbers")
        if spec.model.tokens:
            raise Unsupported("it predicts every word")
        if any(True for _ in module.buffers()):
            raise Unsupported("the model has buffers")
        module.train()

        def loss(
            values: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor
        ) -> torch.Tensor:
            logits = functional_call(module, values, (x,))
            return (functional.cross_entropy(logits, y, reduction="none") * weights).sum()

        self._gradients: Any = vmap(grad_and_value(loss))

    @override
    def step(self, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, step: Step) -> torch.Tensor:
        values = {name: parameter.value for name, parameter in self.parameters.items()}
        gradients, losses = self._gradients(values, x, y, weights)
        for name, gradient in gradients.items():
            self.parameters[name].descend(gradient)
        assert isinstance(losses, torch.Tensor)
        return losses

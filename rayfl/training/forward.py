"""Forward passes of models as they are tested: one model at a time, on any samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rayfl.models import ModelSpec

if TYPE_CHECKING:
    from torch import nn

    from rayfl.training.batched.compiled import CompiledForward


class Forward:
    """The network in evaluation mode: :meth:`load` a model, then call it on samples.

    Args:
        spec: the model's layout.
        module: a module of that layout, into which models are loaded.
        compiled: computes the same faster for the networks that it knows; None for others.
    """

    def __init__(self, spec: ModelSpec, module: nn.Module, compiled: CompiledForward | None = None) -> None:
        self.spec, self.module, self._compiled = spec, module, compiled
        self._model: torch.Tensor | None = None
        self._in_module = False

    def load(self, model: torch.Tensor) -> None:
        """From now on compute with a model ``(P,)``, which must not be changed meanwhile."""
        self._model, self._in_module = model, False

    def module_changed(self) -> None:
        """Others have written to the module, such as an engine that trains it."""
        self._in_module = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The loaded model's outputs on samples ``(n, ...)``; of a classifier logits ``(n, classes)``."""
        assert self._model is not None, "no model is loaded"
        if self._compiled is not None and self._compiled.covers(x):
            return self._compiled.outputs(self._model, x)
        if not self._in_module:
            self.spec.load(self.module, self._model)
            self._in_module = True
        if self.module.training:  # looking is faster than telling all of its parts
            self.module.eval()
        with torch.inference_mode():
            outputs: torch.Tensor = self.module(x)
            return outputs.detach()  # a view of a parameter would still ask for its gradient

"""Forward passes in evaluation mode: one model at a time, on any samples."""

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
        compiled: a faster implementation for the networks that it supports; None for others.
    """

    def __init__(self, spec: ModelSpec, module: nn.Module, compiled: CompiledForward | None = None) -> None:
        self.spec, self.module, self._compiled = spec, module, compiled
        self._model: torch.Tensor | None = None
        self._in_module = False

    def load(self, model: torch.Tensor) -> None:
        """Use a model ``(P,)`` in the calls that follow; it must not be changed as long as it is used."""
        self._model, self._in_module = model, False

    def module_changed(self) -> None:
        """To be called when other code, such as an engine that trains, has changed the module."""
        self._in_module = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The loaded model's outputs on samples ``(n, ...)``; of a classifier logits ``(n, classes)``."""
        assert self._model is not None, "no model is loaded"
        if self._compiled is not None and self._compiled.covers(x):
            return self._compiled.outputs(self._model, x)
        if not self._in_module:
            self.spec.load(self.module, self._model)
            self._in_module = True
        if self.module.training:  # eval() visits all submodules, which takes longer than this check
            self.module.eval()
        # Not inference_mode: what a network keeps of its first batch, such as a mask, it also needs to train.
        with torch.no_grad():
            outputs: torch.Tensor = self.module(x)
            return outputs.detach()  # a view of a parameter would still require a gradient

"""SCAFFOLD: control variates against client drift. Karimireddy et al., ICML 2020, Algorithm 1, option II."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from rayfl.local.base import LocalObjective, Outcome, Start, accumulated
from rayfl.models import ModelSpec
from rayfl.training import Terms, TrainedBlock, Training


class Scaffold(LocalObjective):
    """Step ``y <- y - eta (g - c_i + c)``; then ``c_i+ = c_i - c + (x - y) / (K eta)``, K local steps.

    The server takes ``x <- x + mean(y_i - x)`` and ``c <- c + (|S| / N) mean(c_i+ - c_i)``; N are the clients
    of the model, so that within a cluster the method is SCAFFOLD among its members. ``c_i`` and ``c`` start
    at zero. Each message holds a model and a control variate.

    The paper has no momentum. Here it is that of SGD on the corrected gradient, and ``K eta`` becomes what
    gradients really count in ``x - y`` (:func:`rayfl.local.base.accumulated`), so that ``c_i`` is a mean
    gradient. Divided by ``K eta`` it would be ``1 / (1 - momentum)`` times as long, and from a momentum of
    0.5 on ``c_i`` and ``c`` would swing ever further.
    """

    name: Literal["scaffold"] = "scaffold"

    def weights(
        self, sizes: NDArray[np.int64], rows: NDArray[np.int64], training: Training
    ) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        """The mean of the clients, each counting the same."""
        return np.ones(len(sizes)), None

    def state_size(self, spec: ModelSpec) -> int:
        """c_i."""
        return spec.n_parameters

    def server_size(self, spec: ModelSpec) -> int:
        """c."""
        return spec.n_parameters

    def terms(self, start: Start) -> Terms:
        """``c - c_i`` is added to every gradient."""
        offset = start.server - start.state
        buffers = start.models.shape[1] - start.spec.n_parameters
        return Terms(offset=functional.pad(offset, (0, buffers)) if buffers else offset)

    def finish(self, start: Start, block: TrainedBlock) -> Outcome:
        """Option II of the client's control variate."""
        p = start.spec.n_parameters
        work, steps = start.work, np.maximum(block.steps, 1)
        counted = accumulated(steps, work.momentum, work.lr_alpha, work.lr_power)
        scale = torch.from_numpy(counted * work.lr).to(block.rows.device)
        # In place: each of these is a model a client, and touching memory is what they cost.
        change = (start.models[:, :p] - block.rows[:, :p]).div_(scale[:, None].to(block.rows.dtype))
        change.sub_(start.server)  # c_i+ - c_i
        return Outcome(block.rows, start.state.add_(change), change)

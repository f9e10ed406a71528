"""SCAFFOLD: control variates against client drift. Karimireddy et al., ICML 2020, Algorithm 1, option II."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rayfl.local.base import LocalObjective, Outcome, Start, accumulated, cached
from rayfl.models import ModelSpec
from rayfl.training import Terms, TrainedBlock, Training


class Scaffold(LocalObjective):
    """Step ``y <- y - eta (g - c_i + c)``; then ``c_i+ = c_i - c + (x - y) / (K eta)``, K local steps.

    The server takes ``x <- x + mean(y_i - x)`` and ``c <- c + (|S| / N) mean(c_i+ - c_i)``; N is the number
    of clients of the model, so within a cluster the method is SCAFFOLD among its members. ``c_i`` and ``c``
    start at zero. Each message contains a model and a control variate.

    ``c`` is the mean of the ``c_i`` as long as the clients of a model stay the same. If they change (events,
    new clusters) ``c`` is not rescaled: N becomes the new number, but the contributions of clients that left
    remain in ``c``, and newcomers, whose ``c_i`` is zero, do not shrink it.

    The paper has no momentum. Here momentum applies to the corrected gradient, and ``K eta`` is replaced by
    the total weight of the gradients in ``x - y`` (:func:`rayfl.local.base.accumulated`), so that ``c_i`` is
    a mean gradient. Divided by ``K eta`` it would be ``1 / (1 - momentum)`` times as long, and with a
    momentum of 0.5 or more ``c_i`` and ``c`` would oscillate with growing amplitude.
    """

    name: Literal["scaffold"] = "scaffold"

    def weights(
        self, sizes: NDArray[np.int64], rows: NDArray[np.int64], training: Training
    ) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        """Weight 1 for each client."""
        return np.ones(len(sizes)), None

    def state_size(self, spec: ModelSpec) -> int:
        """c_i."""
        return spec.n_parameters

    def server_size(self, spec: ModelSpec) -> int:
        """c."""
        return spec.n_parameters

    def terms(self, start: Start) -> Terms:
        """``c - c_i`` is added to every gradient; it overwrites ``c_i`` in the state."""
        import torch
        from torch.nn import functional

        p, size = start.spec.n_parameters, start.models.shape[1]
        offset = torch.sub(start.server, start.state, out=start.state)
        return Terms(offset=functional.pad(offset, (0, size - p)) if size > p else offset)

    def finish(self, start: Start, block: TrainedBlock) -> Outcome:
        """Option II of the client's control variate: ``c_i+ = (x - y) / (K eta) - (c - c_i)``."""
        import torch

        p = start.spec.n_parameters
        work, steps = start.work, np.maximum(block.steps, 1)
        counted = accumulated(steps, work.momentum, work.lr_alpha, work.lr_power)
        scale = torch.from_numpy(counted * work.lr).to(block.rows)[:, None]
        state = start.state  # holds c - c_i
        change = torch.empty_like(state)  # c_i+ - c_i
        models, rows = start.models[:, :p], block.rows[:, :p]
        for part in cached(state):
            torch.sub(models[part], rows[part], out=change[part]).div_(scale[part[0]])
            torch.sub(change[part], state[part], out=state[part])
            change[part].sub_(start.server[part])
        return Outcome(block.rows, state, change)

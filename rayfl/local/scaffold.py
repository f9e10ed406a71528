"""SCAFFOLD: control variates against client drift. Karimireddy et al., ICML 2020, Algorithm 1, option II."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rayfl.local.base import LocalObjective, Outcome, Start
from rayfl.models import ModelSpec
from rayfl.training import Terms, TrainedBlock, Training


class Scaffold(LocalObjective):
    """Step ``y <- y - eta (g - c_i + c)``; then ``c_i+ = c_i - c + (x - y) / (K eta)``, K local steps.

    The server takes ``x <- x + mean(y_i - x)`` and ``c <- c + (|S| / N) mean(c_i+ - c_i)``; N are the clients
    of the model, so that within a cluster the method is SCAFFOLD among its members. ``c_i`` and ``c`` start
    at zero. Each message holds a model and a control variate. With momentum the steps are those of SGD with
    momentum on the corrected gradient, which the paper does not treat.
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
        offset = torch.zeros_like(start.models)
        offset[:, : start.spec.n_parameters] = start.server - start.state
        return Terms(offset=offset)

    def finish(self, start: Start, block: TrainedBlock) -> Outcome:
        """Option II of the client's control variate."""
        p = start.spec.n_parameters
        scale = torch.from_numpy(np.maximum(block.steps, 1) * start.work.lr).to(block.rows.device)
        drift = (start.models[:, :p] - block.rows[:, :p]) / scale[:, None].to(block.rows.dtype)
        state = start.state - start.server + drift
        return Outcome(block.rows, state, state - start.state)

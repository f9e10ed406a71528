"""What clients report to the method beside it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayfl.training.reports import ClientReport, Trained


@dataclass(frozen=True)
class StartLosses(ClientReport):
    """The mean loss of the model that a client received."""

    floats = 1

    def compute(self, trained: Trained) -> NDArray[np.floating]:
        """A number a client."""
        return trained.mean_losses(trained.start)

"""Local training of a block of clients: the request, and the result.

This package imports no PyTorch. The code that trains is in its modules ``batches``, ``device``, ``engine``,
``loop`` and ``batched``.
"""

from rayfl.training.config import Training
from rayfl.training.guides import Guides, Seen
from rayfl.training.work import (
    NO_TERMS,
    LocalWork,
    Segments,
    Terms,
    TrainedBlock,
    Visits,
    complement,
    gather,
    length,
    scatter_,
)

__all__ = [
    "NO_TERMS",
    "Guides",
    "LocalWork",
    "Seen",
    "Segments",
    "Terms",
    "TrainedBlock",
    "Training",
    "Visits",
    "complement",
    "gather",
    "length",
    "scatter_",
]

"""Local training of a block of clients: what is asked and answered.

Here is what needs no PyTorch. What trains is imported from its own module: ``batches``,
``device``, ``engine``, ``loop``, ``batched``.
"""

from rayfl.training.config import Training
from rayfl.training.work import (
    NO_TERMS,
    LocalWork,
    Segments,
    Terms,
    TrainedBlock,
    complement,
    gather,
    length,
    scatter_,
)

__all__ = [
    "NO_TERMS",
    "LocalWork",
    "Segments",
    "Terms",
    "TrainedBlock",
    "Training",
    "complement",
    "gather",
    "length",
    "scatter_",
]

"""Local training of a block of clients."""

from rayfl.training.batches import Batches, raw_features
from rayfl.training.config import Training
from rayfl.training.device import open_device
from rayfl.training.engine import ENGINES, Engine, choose_engine, open_engine
from rayfl.training.loop import LoopEngine
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
    "ENGINES",
    "NO_TERMS",
    "Batches",
    "Engine",
    "LocalWork",
    "LoopEngine",
    "Segments",
    "Terms",
    "TrainedBlock",
    "Training",
    "choose_engine",
    "complement",
    "gather",
    "length",
    "open_device",
    "open_engine",
    "raw_features",
    "scatter_",
]

"""What a client optimises in a round: the local objective, composed with any algorithm."""

from rayfl.local.base import (
    LocalObjective,
    Outcome,
    Start,
    Train,
    client_model_of,
    trained_by,
    weights_of,
    work_of,
)
from rayfl.settings import Registry

OBJECTIVES = Registry("local objective", "rayfl.local", LocalObjective)

__all__ = [
    "OBJECTIVES",
    "LocalObjective",
    "Outcome",
    "Start",
    "Train",
    "client_model_of",
    "trained_by",
    "weights_of",
    "work_of",
]

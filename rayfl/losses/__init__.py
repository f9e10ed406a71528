"""What models minimise, by name."""

from rayfl.losses.base import Loss
from rayfl.losses.cross_entropy import CrossEntropy
from rayfl.settings import Registry

LOSSES = Registry("loss", "rayfl.losses", Loss)

__all__ = ["LOSSES", "CrossEntropy", "Loss"]

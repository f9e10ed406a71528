"""The papers' networks, by name, and the flat vector of numbers that a model is outside of training."""

from rayfl.models.base import Model
from rayfl.models.flat import ModelSpec

__all__ = ["Model", "ModelSpec"]

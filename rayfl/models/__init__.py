"""The papers' networks, by name, and models as flat vectors of parameters, their form outside of training."""

from rayfl.models.base import Model
from rayfl.models.flat import ModelSpec
from rayfl.models.module import settings_of
from rayfl.settings import Registry

MODELS = Registry("model", "rayfl.models", Model, settings_of)

__all__ = ["MODELS", "Model", "ModelSpec"]

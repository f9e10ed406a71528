"""Which clients take part in a round."""

from rayfl.sampling.base import Candidates, Sampling
from rayfl.settings import Registry

SAMPLINGS = Registry("sampling", "rayfl.sampling", Sampling)

__all__ = ["SAMPLINGS", "Candidates", "Sampling"]

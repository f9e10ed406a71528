"""In which order, and how often, a client visits its samples in a round."""

from rayfl.ordering.base import Arrival, Ordering
from rayfl.settings import Registry

ORDERINGS = Registry("order", "rayfl.ordering", Ordering)

__all__ = ["ORDERINGS", "Arrival", "Ordering"]

"""How a server turns the models that its clients have sent into one."""

from rayfl.aggregation.base import Aggregation, squared_distances
from rayfl.settings import Registry

AGGREGATIONS = Registry("aggregation rule", "rayfl.aggregation", Aggregation)

__all__ = ["AGGREGATIONS", "Aggregation", "squared_distances"]

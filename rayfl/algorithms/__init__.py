"""The methods: one file each, found by name."""

from rayfl.algorithms.base import (
    Algorithm,
    Hierarchy,
    Mixing,
    OneShotClustered,
    Plan,
    Regrouping,
    ServerState,
    Setup,
)
from rayfl.settings import discover

ALGORITHMS = discover("rayfl.algorithms", Algorithm)

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Hierarchy",
    "Mixing",
    "OneShotClustered",
    "Plan",
    "Regrouping",
    "ServerState",
    "Setup",
]

"""The methods: one file each, found by name."""

from rayfl.algorithms.base import Algorithm, average, choose_by_loss, sample_cohort
from rayfl.algorithms.contract import (
    Clients,
    GlobalStep,
    Hierarchy,
    Mixing,
    Plan,
    Regrouping,
    RoundReport,
    ServerState,
    Setup,
    Split,
)
from rayfl.algorithms.one_shot import OneShotClustered
from rayfl.settings import discover

ALGORITHMS = discover("rayfl.algorithms", Algorithm)

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Clients",
    "GlobalStep",
    "Hierarchy",
    "Mixing",
    "OneShotClustered",
    "Plan",
    "Regrouping",
    "RoundReport",
    "ServerState",
    "Setup",
    "Split",
    "average",
    "choose_by_loss",
    "sample_cohort",
]

"""rayfl: a Ray-distributed simulator of federated learning over clients whose data differ.

>>> import rayfl
>>> result = rayfl.run("digits-demo", ["rounds=5"])
>>> result.rounds, result.clients, result.clusters
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rayfl.errors import explain_by as _explain_by
from rayfl.version import __version__ as __version__

_HOME = {
    "Config": "rayfl.config",
    "load": "rayfl.config",
    "Comparison": "rayfl.report.compare",
    "compare": "rayfl.api",
    "ClusteringResult": "rayfl.report.clusterings",
    "cluster": "rayfl.commands.cluster",
    "PartitionView": "rayfl.report.partition",
    "partition": "rayfl.commands.partition",
    "Result": "rayfl.results",
    "run": "rayfl.api",
    "resume": "rayfl.api",
    "Study": "rayfl.study",
    "run_study": "rayfl.study",
    "Begun": "rayfl.events",
    "BlockDone": "rayfl.events",
    "CheckpointSaved": "rayfl.events",
    "Clustered": "rayfl.events",
    "Finished": "rayfl.events",
    "Note": "rayfl.events",
    "RoundDone": "rayfl.events",
    "RunEvent": "rayfl.events",
    "Stopped": "rayfl.events",
    "ClientError": "rayfl.errors",
    "ConfigError": "rayfl.errors",
    "DataError": "rayfl.errors",
    "Interrupted": "rayfl.errors",
    "RayflError": "rayfl.errors",
}

if TYPE_CHECKING:
    from rayfl.api import compare, resume, run
    from rayfl.commands.cluster import cluster
    from rayfl.commands.partition import partition
    from rayfl.config import Config, load
    from rayfl.errors import ClientError, ConfigError, DataError, Interrupted, RayflError
    from rayfl.events import (
        Begun,
        BlockDone,
        CheckpointSaved,
        Clustered,
        Finished,
        Note,
        RoundDone,
        RunEvent,
        Stopped,
    )
    from rayfl.report.clusterings import ClusteringResult
    from rayfl.report.compare import Comparison
    from rayfl.report.partition import PartitionView
    from rayfl.results import Result
    from rayfl.study import Study, run_study

__all__ = [
    "Begun",
    "BlockDone",
    "CheckpointSaved",
    "ClientError",
    "Clustered",
    "ClusteringResult",
    "Comparison",
    "Config",
    "ConfigError",
    "DataError",
    "Finished",
    "Interrupted",
    "Note",
    "PartitionView",
    "RayflError",
    "Result",
    "RoundDone",
    "RunEvent",
    "Stopped",
    "Study",
    "cluster",
    "compare",
    "load",
    "partition",
    "resume",
    "run",
    "run_study",
]


def _explain(error: Any, settings: Mapping[str, Any], section: type) -> Exception:
    """What is wrong with the settings of a section: ``rayfl.config``, which knows all parts, says it."""
    from rayfl.config.mistakes import explain

    return explain(error, settings, section)


_explain_by(_explain)


def __dir__() -> list[str]:
    """All public names, also those not imported yet, for completion in IPython and notebooks."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: torch and ray take seconds, ``rayfl --help`` should not."""
    if name not in _HOME:
        raise AttributeError(f"module 'rayfl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)

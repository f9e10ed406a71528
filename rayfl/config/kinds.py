"""All kinds of parts that are chosen by name: ``rayfl list`` shows them, and plug-ins may add to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rayfl import plugins
from rayfl.aggregation import AGGREGATIONS
from rayfl.algorithms import ALGORITHMS
from rayfl.clustering.config import EMBEDDINGS, FEATURES, SIGNATURES
from rayfl.data import DATASETS, PARTITIONS
from rayfl.data.heterogeneity.distances import MEASURES
from rayfl.local import OBJECTIVES
from rayfl.loggers import LOGGERS
from rayfl.losses import LOSSES
from rayfl.models import MODELS
from rayfl.ordering import ORDERINGS
from rayfl.sampling import SAMPLINGS
from rayfl.settings import Registry

KINDS: Mapping[str, Registry[Any]] = {
    "methods": ALGORITHMS,
    "local": OBJECTIVES,
    "order": ORDERINGS,
    "sampling": SAMPLINGS,
    "aggregation": AGGREGATIONS,
    "models": MODELS,
    "losses": LOSSES,
    "datasets": DATASETS,
    "partitions": PARTITIONS,
    "measures": MEASURES,
    "signatures": SIGNATURES,
    "features": FEATURES,
    "embeddings": EMBEDDINGS,
    "loggers": LOGGERS,
}
"""The registries by the title under which ``rayfl list`` shows them."""


def bring(named: Iterable[str] = ()) -> None:
    """Import plug-ins, first those of the environment and of installed packages, and register their parts.

    Raises:
        ConfigError: if a plug-in cannot be imported, or has a part under a name that is taken.
    """
    plugins.load_everywhere(KINDS.values())
    plugins.load(named, KINDS.values())

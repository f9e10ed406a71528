"""The server's samples: training samples that are held out before the rest is divided among clients.

They are used to fit feature maps, and FLIS compares models by their predictions for them. No client trains or
is tested on them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayfl.data.arrays import checked
from rayfl.data.base import Dataset, Numbering, Samples, ServerShare
from rayfl.data.scaling import Scaling
from rayfl.data.sharded import ShardedArray
from rayfl.errors import ConfigError, DataError, type_of
from rayfl.plugins import call_part, is_own
from rayfl.random import generator

_ONE_IN = 10
"""At most one in this many training samples is held out, unless a fraction is given."""


def read(dataset: Dataset, root: Path, public: int, seed: int, scaling: Scaling | None = None) -> Samples:
    """Read a dataset for a run: hold out the server's samples, and set the scaling of inputs.

    Args:
        dataset: the source.
        root: the folder of downloaded datasets.
        public: number of samples that the server needs.
        seed: the run's seed.
        scaling: that of a resumed run; default: as ``dataset.normalise`` specifies.

    Raises:
        ConfigError, DataError
    """
    loaded = call_part(dataset, "load", root)
    if not isinstance(loaded, Samples):
        what = f"data: {dataset.name}: load returned {type_of(loaded)}; expected rayfl.data.Samples"
        raise DataError(what)
    if not is_own(dataset):
        loaded = checked(loaded, f"data: {dataset.name}: load")
    samples = hold_out(loaded, dataset.server_share, public, seed)
    return dataset.normalised(samples) if scaling is None else replace(samples, scaling=scaling)


def hold_out(samples: Samples, share: ServerShare, public: int, seed: int) -> Samples:
    """Move random training samples to ``x_server``; every domain keeps at least one.

    Args:
        samples: the data.
        share: a fraction of the training samples; or a number, limited to a tenth of them; or ``auto``:
            ``public``, limited to a tenth.
        public: number of samples that the server needs.
        seed: the key of the draw.

    Raises:
        ConfigError: if the server needs samples and the share leaves it none, or if the clients keep their
            samples (``samples.stored``) and the server should get some.
    """
    total = len(samples.y_train)
    if isinstance(share, float):
        count = round(share * total)
    else:
        count = min(public if share == "auto" else share, total // _ONE_IN)
    if not count and not public:
        return samples
    if samples.stored is not None:
        raise ConfigError(
            "data.server_share",
            f"{share}: the samples of {samples.name} stay where they are stored, and the server gets none",
            "choose features and methods that need none of its own",
        )
    order = generator(seed, "server share").permutation(total)
    if samples.domain_train is not None:
        first_of_domain = np.unique(samples.domain_train[order], return_index=True)[1]
        order = np.delete(order, first_of_domain)
    held = np.zeros(total, np.bool_)
    held[order[: min(count, total - 1)]] = True
    if not held.any():
        if public:
            raise ConfigError(
                "data.server_share",
                f"{share} of {total} training samples leaves the server none, and it needs samples that no "
                "client has (clustering.features, FLIS's server data, data.normalise)",
                "raise it; 'auto' takes as many as are needed, at most a tenth",
            )
        return samples
    x: Any = samples.x_train  # an array, or a ShardedArray, whose rows stay in their files
    in_files = isinstance(x, ShardedArray)
    domains, targets = samples.domain_train, samples.targets_train
    kept, public_samples = np.flatnonzero(~held), np.flatnonzero(held)
    columns = {name: replace(c, train=c.train[~held]) for name, c in samples.columns.items()}
    return replace(
        samples,
        x_train=x.of_rows(kept) if in_files else x[kept],
        y_train=samples.y_train[~held],
        domain_train=None if domains is None else domains[~held],
        targets_train=None if targets is None else targets[~held],
        x_server=x.take_once(public_samples) if in_files else x[public_samples],
        columns=columns,
        numbering=_renumbered(samples.numbering, held),
    )


def _renumbered(numbering: Numbering | None, held: NDArray[np.bool_]) -> Numbering:
    """The numbering after the training samples ``held`` ``(n,)`` have been removed."""
    places = np.where(held, -1, np.cumsum(~held) - 1)
    if numbering is None:
        return Numbering(places)
    return replace(numbering, train=np.where(numbering.train < 0, -1, places[numbering.train]))

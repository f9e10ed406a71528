"""A dataset divided among clients: training, validation and test parts of every client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from rayfl.data.base import Federation, Partition, Ragged, Samples
from rayfl.errors import ConfigError, DataError
from rayfl.random import generator

if TYPE_CHECKING:
    import pandas as pd

_AUTO_TOTAL = 20_000_000
_AUTO_LEAST = 50


def build_federation(
    samples: Samples,
    partition: Partition,
    *,
    validation: float,
    test_samples: int | Literal["auto", "all"] | None,
    seed: int,
) -> Federation:
    """Divide a dataset among clients.

    Args:
        samples: the data.
        partition: who gets which training samples.
        validation: fraction of each client's training samples that is set aside, in [0, 1); at least one
            training sample stays.
        test_samples: most test samples of a client; ``"auto"``: ``max(50, 20_000_000 // N)``; ``"all"`` or
            None: as many as follow its label distribution.
        seed: key of all draws.

    Returns:
        The federation. Every list of indices is ascending. The test part of a client has the proportions
        of the labels (and domains) of all samples it was assigned, validation part included; a label that
        has no test sample is left out of them.

    Raises:
        ConfigError: if ``validation`` or ``test_samples`` is out of range.
        DataError: if the partition is impossible, or a client has no label with a test sample.
    """
    if not 0 <= validation < 1:
        raise ConfigError("validation", f"{validation} is not a fraction", "it must lie in [0, 1)")
    if isinstance(test_samples, int) and test_samples < 1:
        raise ConfigError(
            "test_samples", f"{test_samples} is too few", "it must be at least 1, 'auto' or 'all'"
        )
    if (samples.domain_train is None) != (samples.domain_test is None):
        raise DataError(
            f"dataset {samples.name} has only one of domain_train and domain_test; give both or none"
        )

    assignment = partition.assign(samples, seed)
    assigned = Ragged.of(assignment.clients)
    cap: int | None = None
    if test_samples == "auto":
        cap = max(_AUTO_LEAST, _AUTO_TOTAL // len(assigned))
    elif isinstance(test_samples, int):
        cap = test_samples
    train, held_out = _split(assigned, validation, seed)
    return Federation(samples, train, held_out, _test_parts(samples, assigned, cap, seed), assignment.groups)


def _split(assigned: Ragged, fraction: float, seed: int) -> tuple[Ragged, Ragged]:
    """Every client's samples in two lists; the second gets ``round(fraction * n)``, never all."""
    sizes = assigned.sizes
    held = np.minimum(np.rint(fraction * sizes).astype(np.int64), sizes - 1)
    client = np.repeat(np.arange(len(sizes)), sizes)
    draws = generator(seed, "validation").random(len(client))
    order = np.lexsort((draws, client))  # each client's samples in random order
    rank = np.arange(len(client)) - assigned.offsets[client]
    second = rank < held[client]
    values = assigned.values[order]
    return _sorted(values[~second], sizes - held), _sorted(values[second], held)


def _sorted(values: NDArray[np.int32], sizes: NDArray[np.int64]) -> Ragged:
    """Lists of the given sizes, each ascending."""
    lists = Ragged(values, np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]))
    for part in lists:
        part.sort()
    return lists


def _test_parts(samples: Samples, assigned: Ragged, cap: int | None, seed: int) -> Ragged:
    """The test samples of every client, in the proportions of its training samples.

    Strata ``c`` are the pairs of domain and label. With ``p_ic`` the share of stratum c among client i's
    samples and ``t_c`` its number of test samples, client i gets the largest ``m_i <= cap`` for which
    ``m_i p_ic <= t_c`` for all c, rounded by largest remainder; in each stratum the first of one fixed
    shuffle, so that clients share test samples.
    """
    strata_train, strata_test, strata = _strata(samples)
    available = np.bincount(strata_test, minlength=strata)

    # One entry for each pair (client, stratum) that occurs and has test samples, sorted by client.
    owner = np.repeat(np.arange(len(assigned)), assigned.sizes)
    pairs, counts = np.unique(owner * strata + strata_train[assigned.values], return_counts=True)
    testable = available[pairs % strata] > 0
    pairs, counts = pairs[testable], counts[testable]
    client, stratum = pairs // strata, pairs % strata
    size = np.bincount(client, weights=counts, minlength=len(assigned)).astype(np.int64)  # n_i
    without = np.flatnonzero(size == 0)
    if len(without):
        raise DataError(
            f"dataset {samples.name}: no test sample has a label of client {without[0]} "
            f"({len(without)} such clients); every label in the training data needs test samples"
        )

    most = available[stratum] * size[client] // counts  # m_i as far as this stratum allows
    starts = np.searchsorted(client, np.arange(len(assigned)))
    total = np.minimum.reduceat(most, starts)
    if cap is not None:
        total = np.minimum(total, cap)
    quota = total[client] * counts
    take, remainder = quota // size[client], quota % size[client]
    missing = total - np.add.reduceat(take, starts)
    by_remainder = np.lexsort((stratum, -remainder, client))
    rank = np.empty(len(client), np.int64)
    rank[by_remainder] = np.arange(len(client)) - starts[client]
    take += rank < missing[client]

    shuffled = generator(seed, "test").permutation(len(strata_test)).astype(np.int32)
    pool = shuffled[np.argsort(strata_test[shuffled], kind="stable")]
    pool_start = np.cumsum(available) - available
    place = np.arange(int(take.sum())) + np.repeat(pool_start[stratum] - (np.cumsum(take) - take), take)
    return _sorted(pool[place], total)


def _strata(samples: Samples) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """The stratum of every training and test sample, and the number of strata."""
    if samples.domain_train is None or samples.domain_test is None:
        return samples.y_train, samples.y_test, samples.classes
    domains = int(max(samples.domain_train.max(), samples.domain_test.max())) + 1
    return (
        samples.domain_train * samples.classes + samples.y_train,
        samples.domain_test * samples.classes + samples.y_test,
        domains * samples.classes,
    )


def describe(federation: Federation) -> pd.DataFrame:
    """One row a client: ``n``, ``validation``, ``test`` (numbers of samples), ``group``, ``class_0``, ...

    The class columns count training samples. ``group`` is missing (NA) if no groups were planted.
    """
    import pandas as pd  # deferred: workers do without it

    samples, train = federation.samples, federation.train
    owner = np.repeat(np.arange(len(train)), train.sizes)
    cells = owner * samples.classes + samples.y_train[train.values]
    counts = np.bincount(cells, minlength=len(train) * samples.classes).reshape(len(train), samples.classes)
    groups = [pd.NA] * len(train) if federation.groups is None else federation.groups
    columns = {
        "n": train.sizes,
        "validation": federation.validation.sizes,
        "test": federation.test.sizes,
        "group": pd.array(groups, dtype="Int64"),
    }
    columns |= {f"class_{label}": counts[:, label] for label in range(samples.classes)}
    return pd.DataFrame(columns, index=pd.RangeIndex(len(train), name="client"))

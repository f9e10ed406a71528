"""Random numbers keyed by their purpose, never by process or order.

Every draw is a pure function of ``(seed, purpose, *ids)``, so a run gives the same bits on any number of
workers, after a worker's death, and after a resume. Forms:

- :func:`generator`: a NumPy generator for one key (partitions, cohorts: a few per run or round);
- :func:`orders` and :func:`uniforms`: shuffled sample orders, or any number of uniform numbers per client,
  for many clients in one call. They use a counter-based hash (splitmix64), so no client needs a generator.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def key(seed: int, purpose: str, *ids: int) -> int:
    """A 64-bit key for ``(seed, purpose, *ids)``, well mixed and stable across platforms."""
    text = ":".join([str(seed), purpose, *(str(int(i)) for i in ids)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def moment(round: int, phase: int = 0) -> tuple[int, ...]:
    """The part of a key that identifies a training of clients: the round, and the phase unless it is 0."""
    return (round, phase) if phase else (round,)


def generator(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """A generator that depends on ``(seed, purpose, *ids)`` alone."""
    return np.random.Generator(np.random.Philox(key=key(seed, purpose, *ids)))


@contextlib.contextmanager
def python_and_numpy_seeded(key: int) -> Iterator[None]:
    """Seed the global generators of Python and NumPy, from which users' parts may draw; restore them on
    exit.
    """
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    random.seed(key)
    np.random.seed(key % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), elementwise, modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hashes(base: int, ids: NDArray[np.integer], count: int) -> NDArray[np.uint64]:
    """``count`` random 64-bit integers for each id: an array ``(len(ids), count)`` keyed by (base, id)."""
    with np.errstate(over="ignore"):
        start = _mix(np.asarray(ids, dtype=np.uint64) * _GOLDEN + np.uint64(base))
        steps = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        return _mix(start[:, None] + steps[None, :])


def uniforms(
    seed: int,
    purpose: str,
    round: int,
    clients: NDArray[np.integer],
    counts: NDArray[np.integer],
    phase: int = 0,
) -> list[NDArray[np.float64]]:
    """Numbers in [0, 1) for each client, as many as it needs.

    Args:
        seed: the run's seed.
        purpose: what they are for.
        round: the round.
        clients: client ids ``(B,)``.
        counts: how many numbers each client gets ``(B,)``.
        phase: see :class:`~rayfl.training.LocalWork`.

    Returns:
        For each client an array ``(count,)``, which depends on (seed, purpose, round, phase, client) alone; a
        smaller count gives a prefix of the same numbers.
    """
    if not len(clients):
        return []
    ends = np.cumsum(counts)
    places = np.arange(int(ends[-1])) - np.repeat(ends - counts, counts)
    with np.errstate(over="ignore"):
        start = _mix(
            np.asarray(clients, np.uint64) * _GOLDEN + np.uint64(key(seed, purpose, *moment(round, phase)))
        )
        drawn = _mix(np.repeat(start, counts) + (places + 1).astype(np.uint64) * _GOLDEN)
    values = np.asarray((drawn >> np.uint64(11)) * 2.0**-53, np.float64)
    stops = ends.tolist()
    return [values[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


def orders(
    seed: int,
    round: int,
    clients: Sequence[int] | NDArray[np.integer],
    sizes: Sequence[int],
    epochs: int,
    phase: int = 0,
) -> list[NDArray[np.intp]]:
    """The order in which each client visits its samples, one permutation an epoch.

    Args:
        seed: the run's seed.
        round: the round, so that each round shuffles differently.
        clients: client ids.
        sizes: each client's number of training samples ``n_i``.
        epochs: local epochs ``E``.
        phase: see :class:`~rayfl.training.LocalWork`.

    Returns:
        For each client an array ``(E, n_i)`` whose rows are permutations of ``range(n_i)``. It depends
        on (seed, round, phase, client, n_i) alone, not on which other clients are asked for.
    """
    ids, counts = np.asarray(clients), np.asarray(sizes)
    result: list[NDArray[np.intp]] = [np.empty((epochs, 0), np.intp)] * len(ids)
    for n in np.unique(counts[counts > 0]).tolist():
        where = np.flatnonzero(counts == n)
        for place, order in zip(
            where.tolist(), orders_of_size(seed, round, ids[where], n, epochs, phase), strict=True
        ):
            result[place] = order
    return result


def orders_of_size(
    seed: int, round: int, clients: NDArray[np.integer], size: int, epochs: int, phase: int = 0
) -> NDArray[np.intp]:
    """The orders of :func:`orders` for clients that all have ``size`` samples, as one array ``(B, E, n)``."""
    draws = hashes(key(seed, "sample order", *moment(round, phase)), clients, epochs * size)
    return np.argsort(draws.reshape(len(clients), epochs, size), axis=-1, kind="stable")

"""Divide a dataset among clients: training, validation and test parts of every client."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from rayfl.data.base import (
    Assignment,
    Federation,
    Names,
    Partition,
    Ragged,
    Ranges,
    Samples,
    TestSamples,
    called,
)
from rayfl.errors import ConfigError, DataError, type_of
from rayfl.memory import free_memory
from rayfl.plugins import call_part, is_own
from rayfl.random import generator
from rayfl.units import size as in_bytes

if TYPE_CHECKING:
    import pandas as pd

_AUTO_TOTAL = 20_000_000
_AUTO_LEAST = 50
_SAMPLES_AT_ONCE = 1 << 22
"""Number of samples that are processed together."""


def assigned_by(partition: Partition, samples: Samples, seed: int) -> Assignment:
    """The assignment that a partition makes; that of a user's partition is checked.

    Raises:
        DataError: if it is not a valid division of the samples.
    """
    assignment = call_part(partition, "assign", samples, seed)
    if is_own(partition):
        return cast("Assignment", assignment)
    where = f"partition: {partition.name}"
    if not isinstance(assignment, Assignment):
        raise DataError(f"{where}: assign returned {type_of(assignment)}; expected an Assignment")
    count = len(assignment.clients)
    for part, lists, total in (
        ("clients", assignment.clients, len(samples.y_train)),
        ("test", assignment.test, len(samples.y_test)),
    ):
        if lists is None:
            continue
        if len(lists) != count:
            raise DataError(f"{where}: {part} has {len(lists)} lists for {count} clients; give each one")
        _check_ids(lists, total, f"{where}: {part}")
    assigned = Ragged.of(assignment.clients)
    if not assigned.sizes.all():
        client = int(np.argmin(assigned.sizes))
        raise DataError(f"{where}: client {client} has no training sample")
    _check_of_clients(assignment, where)
    taken = assigned.values
    if len(np.unique(taken)) < len(taken):
        ids, counts = np.unique(taken, return_counts=True)
        raise DataError(f"{where}: training sample {ids[counts.argmax()]} is given out twice")
    if "clients" in partition.model_fields_set and partition.clients and count != partition.clients:
        note = f"{partition.name} has made {count:,} clients; partition.clients is {partition.clients:,}"
        assignment = replace(assignment, notes=(*assignment.notes, note))
    return assignment


def _check_ids(lists: list[NDArray[np.integer]] | Ragged, total: int, where: str) -> None:
    """Refuse lists of other things than ids of samples from 0 to ``total - 1``."""
    numbered: Iterable[tuple[int, NDArray[np.integer]]] = enumerate(lists)
    if isinstance(lists, Ragged):  # perhaps of millions of clients
        outside = np.flatnonzero((lists.values < 0) | (lists.values >= total))[:1]
        owners = np.searchsorted(lists.offsets, outside, side="right") - 1
        numbered = [(client, lists[client]) for client in owners.tolist()]
    for client, ids in numbered:
        values = np.asarray(ids)
        if values.ndim != 1 or (len(values) and values.dtype.kind not in "iu"):
            raise DataError(f"{where}: client {client} has {type_of(values)}; expected integers (n,)")
        if len(values) and not (values.min() >= 0 and values.max() < total):
            wrong = values.min() if values.min() < 0 else values.max()
            raise DataError(f"{where}: client {client} has sample {wrong} of 0 to {total - 1}")


def _check_of_clients(assignment: Assignment, where: str) -> None:
    """Refuse groups and names that are not one for each client."""
    count = len(assignment.clients)
    if not count:
        raise DataError(f"{where}: there are no clients")
    groups, names = assignment.groups, assignment.names
    if groups is not None and (
        not isinstance(groups, np.ndarray) or groups.shape != (count,) or groups.dtype.kind not in "iu"
    ):
        raise DataError(f"{where}: groups is {type_of(groups)}; expected integers ({count},)")
    if names is None:
        return
    if not isinstance(names, np.ndarray) or names.shape != (count,):
        what = f"names is {type_of(names)}; expected an array with one for each of the {count} clients"
        raise DataError(f"{where}: {what}")
    if names.dtype.kind != "U":
        raise DataError(f"{where}: names is {type_of(names)}; expected text, as by names.astype(str)")
    unique, counts = np.unique(names, return_counts=True)
    if not unique[0]:
        raise DataError(f"{where}: names: a client's is empty")
    if len(unique) < count:
        raise DataError(f"{where}: names: {unique[counts.argmax()]} is the name of several clients")


def build_federation(
    samples: Samples,
    partition: Partition,
    *,
    validation: float,
    test_samples: TestSamples | None,
    seed: int,
) -> Federation:
    """Divide a dataset among clients.

    Args:
        samples: the data.
        partition: decides which client gets which training samples.
        validation: fraction of each client's training samples that is set aside, in [0, 1); at least one
            training sample stays.
        test_samples: maximum number of test samples per client; ``"auto"``: ``max(50, 20_000_000 // N)``;
            ``"all"`` or None: as many as follow its label distribution; ``"whole_labels"``: all of every
            label that it has.
        seed: key of all draws.

    Returns:
        The federation. Every list of indices is ascending. If the partition assigns no test samples, the
        test part of a client has the labels (and domains) of its training and validation samples, in the same
        proportions; with ``"whole_labels"`` it has all test samples of these labels. Labels without test
        samples are left out. If the partition gives clients label maps, all three parts contain virtual ids
        (see :class:`Samples`).

    Raises:
        ConfigError: if ``validation`` or ``test_samples`` is out of range.
        DataError: if the partition is impossible, or a client would have no test sample.
    """
    check_settings(samples, validation, test_samples)
    assignment = assigned_by(partition, samples, seed)
    assigned = Ragged.of(assignment.clients)
    samples, maps = with_label_maps(without_partition_fields(samples), assignment)
    names = names_unless_numbers(assignment.names)
    train, held_out = split(assigned, validation, seed)
    rule = rule_of(test_samples, len(assigned))
    test = client_tests(samples, assigned, assignment.test, rule, seed, names)
    if maps is not None:
        train, held_out = (seen_through(lists, maps, len(samples.y_train)) for lists in (train, held_out))
        test = seen_through(test, maps, len(samples.y_test))
    return Federation(samples, train, held_out, test, assignment.groups, names, assignment.notes)


def without_partition_fields(samples: Samples) -> Samples:
    """The samples without the fields that only partitions use."""
    if not samples.columns and samples.numbering is None and samples.stored is None:
        return samples
    return replace(samples, columns={}, numbering=None, stored=None)


def names_unless_numbers(names: Names | None) -> Names | None:
    """The clients' names; None if they are just the numbers 0, 1, 2, ..."""
    if names is None or np.array_equal(names, np.arange(len(names)).astype(str)):
        return None
    return names


def check_settings(samples: Samples, validation: float, test_samples: TestSamples | None) -> None:
    """Refuse settings from which no federation can be built.

    Raises:
        ConfigError, DataError: as :func:`build_federation`.
    """
    if not 0 <= validation < 1:
        raise ConfigError("partition.validation", f"{validation} is not a fraction", "it must lie in [0, 1)")
    if isinstance(test_samples, int) and test_samples < 1:
        raise ConfigError(
            "partition.test_samples",
            f"{test_samples} is too few",
            "it must be at least 1, 'auto', 'all' or 'whole_labels'",
        )
    if (samples.domain_train is None) != (samples.domain_test is None):
        raise DataError(
            f"dataset {samples.name} has only one of domain_train and domain_test; give both or none"
        )


@dataclass(frozen=True)
class TestRule:
    """Which test samples a client gets if none are its own.

    Attributes:
        most: maximum number; None: no limit.
        whole_labels: all of every label that it has, instead of as many as have its label distribution.
    """

    most: int | None = None
    whole_labels: bool = False


def rule_of(test_samples: TestSamples | None, clients: int) -> TestRule:
    """The rule that ``partition.test_samples`` stands for, for this number of clients."""
    if test_samples == "auto":
        return TestRule(max(_AUTO_LEAST, _AUTO_TOTAL // clients))
    if isinstance(test_samples, int):
        return TestRule(test_samples)
    return TestRule(whole_labels=test_samples == "whole_labels")


def with_label_maps(samples: Samples, assignment: Assignment) -> tuple[Samples, NDArray[np.int64] | None]:
    """The samples with the partition's label maps, and the map of each client ``(N,)`` or None.

    Raises:
        DataError: if both the data and the partition have maps, or the partition's do not fit.
    """
    if assignment.label_map is None:
        return samples, None
    if assignment.label_maps is not None:
        if samples.label_maps is not None:
            raise DataError(f"dataset {samples.name} has label maps already; the partition's cannot be added")
        samples = replace(samples, label_maps=assignment.label_maps)
    maps = np.asarray(assignment.label_map, np.int64)
    rows = 0 if samples.label_maps is None else len(samples.label_maps)
    if maps.shape != (len(assignment.clients),) or maps.min() < 0 or maps.max() >= rows:
        raise DataError(
            f"partition: label_map names rows of {rows} label maps for {len(assignment.clients)} clients, "
            f"each in range({rows}); got shape {maps.shape}"
        )
    return samples, maps


def seen_through(lists: Ragged, maps: NDArray[np.int64], count: int) -> Ragged:
    """Convert indices to virtual ids.

    Args:
        lists: for each client, indices of samples.
        maps: the row of ``label_maps`` of each client ``(N,)``.
        count: number of samples in this part of the data.
    """
    shifted = lists.values + np.repeat(maps * count, lists.sizes)
    return Ragged(shifted.astype(np.int32), lists.offsets)


def split(assigned: Ragged, fraction: float, seed: int, *ids: int) -> tuple[Ragged, Ragged]:
    """Divide every client's samples into two lists; the second gets ``round(fraction * n)``, never all."""
    sizes = assigned.sizes
    if not fraction:
        if isinstance(assigned, Ranges):
            return assigned, Ragged.empty(len(sizes))
        return Ragged.ascending(assigned.values, sizes), Ragged.empty(len(sizes))
    counts = np.minimum(np.rint(fraction * sizes).astype(np.int64), sizes - 1)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    draws = generator(seed, "validation", *ids).random(len(owner))
    values = np.empty_like(assigned.values)
    for piece in assigned.pieces(_SAMPLES_AT_ONCE):
        part = slice(assigned.offsets[piece.start], assigned.offsets[piece.stop])
        order = np.lexsort((draws[part], owner[part]))  # each client's samples in random order
        values[part] = assigned.values[part][order]
    rank = np.arange(len(owner)) - assigned.offsets[owner]
    second = rank < counts[owner]
    return Ragged.ascending(values[~second], sizes - counts), Ragged.ascending(values[second], counts)


def client_tests(
    samples: Samples,
    assigned: Ragged,
    own_tests: list[NDArray[np.integer]] | Ragged | None,
    rule: TestRule,
    seed: int,
    names: Names | None = None,
) -> Ragged:
    """The test samples of every client ``(n_i,)``: at most ``rule.most`` of those in ``own_tests``, or if
    that is None, samples with the labels of its training samples, as the rule says.

    Raises:
        DataError: if a client would have none, or has its own where the rule asks for others.
    """
    if own_tests is None:
        return _tests_by_labels(samples, assigned, rule, seed, names)
    if rule.whole_labels:
        raise DataError(
            "partition.test_samples: whole_labels, but clients have test samples of their own; use a number "
            "or 'all', or partition.tests=labels where the partition has it"
        )
    cap, tests = rule.most, Ragged.of(own_tests)
    untested = np.flatnonzero(tests.sizes == 0)
    if len(untested):
        raise DataError(
            f"dataset {samples.name}: client {called(names, untested[0])} has no test sample "
            f"({len(untested)} such clients); every client needs one"
        )
    if cap is None or tests.sizes.max() <= cap:
        if isinstance(tests, Ranges):
            return tests
        return Ragged.ascending(tests.values, tests.sizes)
    lists = [
        part if len(part) <= cap else generator(seed, "own test", client).permutation(part)[:cap]
        for client, part in enumerate(tests)
    ]
    return Ragged.ascending(np.concatenate(lists), np.minimum(tests.sizes, cap))


def _tests_by_labels(
    samples: Samples, assigned: Ragged, rule: TestRule, seed: int, names: Names | None
) -> Ragged:
    """The test samples of every client: all of the labels that it has, or in the proportions of its training
    samples.

    Strata ``c`` are the pairs of domain and label. With ``p_ic`` the share of stratum c among client i's
    samples and ``t_c`` its number of test samples, client i gets the largest ``m_i <= rule.most`` for which
    ``m_i p_ic <= t_c`` for all c, rounded by largest remainder. In each stratum it gets the first samples of
    one fixed shuffle, so clients share test samples. Scarce strata (:func:`scarce_strata`) do not limit the
    ``m_i`` of a client that also has others: if a scarce stratum has fewer test samples than the client's
    share, the client gets all of them.
    """
    strata_train, strata_test, strata = strata_of(samples)
    available = np.bincount(strata_test, minlength=strata)
    scarce = np.zeros(strata, np.bool_)
    scarce[scarce_strata(samples)] = True

    shuffled = generator(seed, "test").permutation(len(strata_test)).astype(np.int32)
    pool = shuffled[np.argsort(strata_test[shuffled], kind="stable")]
    drawn = _Drawn(strata_train, available, scarce, pool, rule)
    if rule.whole_labels:
        _refuse_too_many(sum(drawn.most_of(assigned, piece) for piece in assigned.pieces(_SAMPLES_AT_ONCE)))
    parts: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
    sizes: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    untested: list[int] = []
    for piece in assigned.pieces(_SAMPLES_AT_ONCE):  # clients are independent of each other
        values, counts = drawn.of(assigned.take(np.arange(piece.start, piece.stop)))
        untested += (piece.start + np.flatnonzero(counts == 0)).tolist()
        parts.append(values)
        sizes.append(counts)
    if untested:
        raise DataError(
            f"dataset {samples.name}: no test sample has a label of client {called(names, untested[0])} "
            f"({len(untested)} such clients); every label in the training data needs test samples"
        )
    return Ragged.ascending(np.concatenate(parts), np.concatenate(sizes))


_BYTES_A_TEST = 32
"""Main memory per test sample of a client while they are drawn: three numbers of 8 bytes, two of 4."""


def _refuse_too_many(tests: int) -> None:
    """Refuse more test samples of all clients together than fit into memory.

    Raises:
        DataError
    """
    needed, free = tests * _BYTES_A_TEST, free_memory()
    if needed > free:
        raise DataError(
            f"partition.test_samples: whole_labels gives the clients {tests:,} test samples together; these "
            f"need {in_bytes(needed)} of memory, and {in_bytes(free)} are free; use a number or 'auto'"
        )


@dataclass(frozen=True)
class _Drawn:
    """Draws the test samples of clients: see :func:`_tests_by_labels`.

    Attributes:
        strata: the stratum of every training sample ``(n,)``.
        available: number of test samples in each stratum ``(S,)``.
        scarce: which strata are scarce ``(S,)``.
        pool: all test samples, sorted by stratum; within a stratum in the order in which they are assigned.
        rule: for all clients.
    """

    strata: NDArray[np.int64]
    available: NDArray[np.int64]
    scarce: NDArray[np.bool_]
    pool: NDArray[np.int32]
    rule: TestRule

    def of(self, assigned: Ragged) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The test samples of these clients, and their number per client ``(l,)``; if that is 0 for any
        client, no samples are drawn.
        """
        strata, available = len(self.available), self.available
        client, stratum, counts = self._pairs(assigned)
        size = np.bincount(client, weights=counts, minlength=len(assigned)).astype(np.int64)  # n_i
        if not size.all():
            return self.pool[:0], size

        starts = np.searchsorted(client, np.arange(len(assigned)))
        if self.rule.whole_labels:
            return self._first(stratum, available[stratum]), np.add.reduceat(available[stratum], starts)
        most = available[stratum] * size[client] // counts  # m_i as far as this stratum allows
        has_others = np.logical_or.reduceat(~self.scarce[stratum], starts)[client]
        total = np.minimum.reduceat(np.where(self.scarce[stratum] & has_others, _UNLIMITED, most), starts)
        if self.rule.most is not None:
            total = np.minimum(total, self.rule.most)
        quota = total[client] * counts
        take, remainder = quota // size[client], quota % size[client]
        missing = total - np.add.reduceat(take, starts)
        by_remainder = _by_remainder(client, remainder, stratum, strata)
        rank = np.empty(len(client), np.int64)
        rank[by_remainder] = np.arange(len(client)) - starts[client]
        take += rank < missing[client]
        take = np.minimum(take, available[stratum])
        return self._first(stratum, take), np.add.reduceat(take, starts)

    def most_of(self, assigned: Ragged, piece: slice) -> int:
        """The number of test samples of a piece of the clients if each has all of every label that it has."""
        _, stratum, _ = self._pairs(assigned.take(np.arange(piece.start, piece.stop)))
        return int(self.available[stratum].sum())

    def _pairs(self, assigned: Ragged) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The clients and strata of all pairs that occur and have test samples, sorted by client, and the
        number of training samples of each pair, all ``(P,)``.
        """
        strata = len(self.available)
        owner = np.repeat(np.arange(len(assigned)), assigned.sizes)
        pairs, counts = np.unique(owner * strata + self.strata[assigned.values], return_counts=True)
        testable = self.available[pairs % strata] > 0
        pairs, counts = pairs[testable], counts[testable]
        return pairs // strata, pairs % strata, counts

    def _first(self, stratum: NDArray[np.int64], take: NDArray[np.int64]) -> NDArray[np.int32]:
        """The first ``take`` ``(P,)`` samples of each stratum ``(P,)`` in the pool, one after another."""
        pool_start = np.cumsum(self.available) - self.available
        place = np.arange(int(take.sum())) + np.repeat(pool_start[stratum] - (np.cumsum(take) - take), take)
        first: NDArray[np.int32] = self.pool[place]
        return first


def _by_remainder(
    client: NDArray[np.int64], remainder: NDArray[np.int64], stratum: NDArray[np.int64], strata: int
) -> NDArray[np.intp]:
    """Indices sorted by client, falling remainder and stratum; by a single 64-bit key if it fits (faster)."""
    radix = int(remainder.max(initial=0)) + 1
    if (int(client.max(initial=0)) + 1) * radix * strata >= 1 << 63:
        return np.asarray(np.lexsort((stratum, -remainder, client)))
    order: NDArray[np.intp] = np.argsort((client * radix + (radix - 1 - remainder)) * strata + stratum)
    return order


_UNLIMITED = np.iinfo(np.int32).max
_SCARCE_FACTOR = 4
"""A stratum is scarce if its share of the test set is more than this many times smaller than its share of the
training data."""


def scarce_strata(samples: Samples) -> NDArray[np.int64]:
    """Strata that have test samples, but far fewer than their share of the training data suggests."""
    train, test, strata = strata_of(samples)
    trained, tested = np.bincount(train, minlength=strata), np.bincount(test, minlength=strata)
    scarce: NDArray[np.int64] = np.flatnonzero(
        (tested > 0) & (tested * len(train) * _SCARCE_FACTOR < trained * len(test))
    )
    return scarce


def strata_of(samples: Samples) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """The stratum of every training and test sample, and the number of strata."""
    if samples.domain_train is None or samples.domain_test is None:
        return samples.y_train, samples.y_test, samples.classes
    domains = int(max(samples.domain_train.max(), samples.domain_test.max())) + 1
    return (
        samples.domain_train * samples.classes + samples.y_train,
        samples.domain_test * samples.classes + samples.y_test,
        domains * samples.classes,
    )


def division(*federations: Federation) -> str:
    """16 hexadecimal digits (of a SHA-256) that identify the samples and the name of each client."""
    digest = hashlib.sha256()
    for federation in federations:
        for lists in (federation.train, federation.validation, federation.test):
            for array in lists.arrays:
                digest.update(np.ascontiguousarray(array).data)
    names = federations[0].names
    digest.update("\0".join([] if names is None else names.tolist()).encode())
    return digest.hexdigest()[:16]


def class_counts(federation: Federation, clients: slice) -> NDArray[np.int64]:
    """Training samples per class of a range of clients ``(n, classes)``, by the labels that a client sees."""
    samples = federation.samples
    lists = federation.train.take(np.arange(clients.start, clients.stop))
    owner = np.repeat(np.arange(len(lists)), lists.sizes)
    cells = owner * samples.classes + samples.labels("train", lists.values)
    counts = np.bincount(cells, minlength=len(lists) * samples.classes)
    return counts.reshape(len(lists), samples.classes)


def describe(federation: Federation) -> pd.DataFrame:
    """One row per client: ``n``, ``validation``, ``test`` (numbers of samples), ``group``, ``class_0``, ...

    The class columns count training samples, under the labels that the client sees. ``group`` is missing
    (NA) if no groups were planted. If clients have the user's ids, these come first, as ``name``.
    """
    import pandas as pd  # deferred: workers do without it

    samples, train = federation.samples, federation.train
    counts = class_counts(federation, slice(0, len(train)))
    groups = [pd.NA] * len(train) if federation.groups is None else federation.groups
    columns = {
        **({} if federation.names is None else {"name": federation.names}),
        "n": train.sizes,
        "validation": federation.validation.sizes,
        "test": federation.test.sizes,
        "group": pd.array(groups, dtype="Int64"),
    }
    if not samples.numeric:
        columns |= {f"class_{label}": counts[:, label] for label in range(samples.classes)}
    return pd.DataFrame(columns, index=pd.RangeIndex(len(train), name="client"))

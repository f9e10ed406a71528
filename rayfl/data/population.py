"""The state of all clients between two events: which are present, their data, and their groups.

The events of :mod:`rayfl.data.events` are methods here, from one population to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rayfl.data.base import Federation, Names, Ragged, Samples
from rayfl.data.federation import TestRule, client_tests, seen_through, split, strata_of
from rayfl.data.redeal import redeal

Ids = NDArray[np.int64]
_LAST_RESORT_WEIGHT = 1e-9
"""The weight of strata that are used only if all others are exhausted."""


@dataclass(frozen=True)
class Shares:
    """How a client's samples are split: the validation fraction, which test samples, and the seed."""

    validation: float
    tests: TestRule
    seed: int


@dataclass(frozen=True)
class Population:
    """The state of ``N`` clients between two events.

    Attributes:
        samples: the data; their label maps are not used.
        train, validation, test: plain indices of every client, present or absent.
        groups: planted groups ``(N,)`` or None.
        maps: the row of ``rows`` through which each client sees its labels ``(N,)``.
        rows: label maps; the first is the identity.
        active: which clients are present ``(N,)``.
        ever_active: which clients have ever been present ``(N,)``.
        group_keys: one key per group, those of the partition first: what the clients of the group have in
            common, that is the source of their samples and their row of ``rows`` (:func:`keys_of`).
        names: the user's ids of the clients ``(N,)`` or None.
    """

    samples: Samples
    train: Ragged
    validation: Ragged
    test: Ragged
    groups: Ids | None
    maps: Ids
    rows: tuple[tuple[int, ...], ...]
    active: NDArray[np.bool_]
    ever_active: NDArray[np.bool_]
    group_keys: tuple[tuple[object, ...], ...] = ()
    names: Names | None = None

    def everything(self, client: int) -> NDArray[np.int32]:
        """The training and validation samples of a client ``(n,)``."""
        return np.concatenate([self.train[client], self.validation[client]])

    def came(self, ids: Ids) -> Population:
        """The population after clients ``ids`` have come."""
        active, ever_active = self.active.copy(), self.ever_active.copy()
        active[ids] = ever_active[ids] = True
        return replace(self, active=active, ever_active=ever_active)

    def left(self, ids: Ids) -> Population:
        """The population after clients ``ids`` have left; they keep their samples."""
        active = self.active.copy()
        active[ids] = False
        return replace(self, active=active)

    def relabelled(self, ids: Ids, labels: Ids) -> Population:
        """The population after clients ``ids`` have renamed each label ``c`` to ``labels[c]``, in addition to
        earlier changes.
        """
        rows, maps = list(self.rows), self.maps.copy()
        for old_row in np.unique(self.maps[ids]).tolist():
            row = tuple(labels[list(self.rows[old_row])].tolist())
            if row not in rows:
                rows.append(row)
            maps[ids[self.maps[ids] == old_row]] = rows.index(row)
        return replace(self, rows=tuple(rows), maps=maps)

    def renamed(self, ids: Ids, labels: Ids) -> Population:
        """The population after clients ``ids`` have been :meth:`relabelled` and moved to the groups with the
        same source and label map, which may be new.
        """
        relabelled = self.relabelled(ids, labels)
        if self.groups is None:
            return relabelled
        sources = [self.group_keys[group][:-1] for group in self.groups[ids].tolist()]
        keys = [(*source, row) for source, row in zip(sources, relabelled.maps[ids].tolist(), strict=True)]
        return relabelled.regrouped(ids, keys)

    def regrouped(self, ids: Ids, keys: Sequence[tuple[object, ...]]) -> Population:
        """The population after clients ``ids`` have moved to the groups with these keys, one per client."""
        if self.groups is None:
            return self
        groups, group_keys = self.groups.copy(), list(self.group_keys)
        for client, key in zip(ids.tolist(), keys, strict=True):
            if key not in group_keys:
                group_keys.append(key)
            groups[client] = group_keys.index(key)
        return replace(self, groups=groups, group_keys=tuple(group_keys))

    def follows(self, ids: Ids, like: Ids, before: Population) -> Population:
        """The population after clients ``ids`` have moved to the groups ``like``; they see labels as most
        clients of their new group did in ``before``.
        """
        assert self.groups is not None
        assert before.groups is not None
        groups, maps = self.groups.copy(), self.maps.copy()
        groups[ids] = like
        for group in np.unique(like).tolist():
            members = before.active & (before.groups == group)
            maps[ids[like == group]] = np.bincount(before.maps[members]).argmax()
        return replace(self, groups=groups, maps=maps)

    def dealt(self, ids: Ids, lists: Sequence[NDArray[np.integer]], shares: Shares, event: int) -> Population:
        """The population in which ``ids`` ``(n,)`` have the samples ``lists``, each ``(n_i,)``, instead of
        their own.
        """
        new = Ragged.of(lists)
        train, validation = split(new, shares.validation, shares.seed, event)
        names = None if self.names is None else self.names[ids]
        test = client_tests(self.samples, new, None, shares.tests, shares.seed, names)
        return replace(
            self,
            train=_with_lists(self.train, ids, train),
            validation=_with_lists(self.validation, ids, validation),
            test=_with_lists(self.test, ids, test),
        )

    def federation(self, samples: Samples) -> Federation:
        """The federation of the present clients, with virtual ids of ``samples`` (with all label maps)."""
        maps = None if samples.label_maps is None else self.maps

        def visible(lists: Ragged, count: int) -> Ragged:
            return _without_absent(lists if maps is None else seen_through(lists, maps, count), self.active)

        return Federation(
            samples,
            visible(self.train, len(samples.y_train)),
            visible(self.validation, len(samples.y_train)),
            visible(self.test, len(samples.y_test)),
            self.groups,
            self.names,
        )


def keys_of(groups: Ids | None, maps: Ids) -> tuple[tuple[object, ...], ...]:
    """The key of each group of a partition: the source of its samples, and its label map.

    If each group has a different label map, the groups are assumed to differ in nothing else (CFL's swapped
    and permuted labels). Unused numbers below the largest group also get a key.
    """
    if groups is None:
        return ()
    count = int(groups.max()) + 1
    rows = [
        int(np.bincount(maps[groups == group]).argmax()) if (groups == group).any() else -1
        for group in range(count)
    ]
    used_rows = [row for row in rows if row >= 0]
    only_maps_differ = maps.any() and len(set(used_rows)) == len(used_rows)
    return tuple(
        ("planted", 0 if only_maps_differ and row >= 0 else group, row) for group, row in enumerate(rows)
    )


@dataclass(frozen=True)
class Wish:
    """The samples that drifting clients are to get.

    Attributes:
        ids: the clients ``(D,)``, ascending.
        classes: new classes for all of them; None: each client draws as many classes as it had, of those
            that it did not have.
        target_groups: for each client the group whose distribution it gets instead ``(D,)``, or None.
        reuse: whether samples of other clients may be used.
    """

    ids: Ids
    classes: tuple[int, ...] | None
    target_groups: Ids | None
    reuse: bool


def new_samples(
    population: Population, wishes: Sequence[Wish], rngs: Sequence[np.random.Generator]
) -> tuple[list[list[NDArray[np.int64]]], list[Ids]]:
    """Draw new samples for all clients that drift together.

    Args:
        population: before the drift.
        wishes: one per event.
        rngs: one per event.

    Returns:
        For each wish the new lists of its clients, and the number of samples that each of them lacks.
    """
    samples = population.samples
    strata, present, testable = _present_strata(samples)
    classes = present % samples.classes
    everyone = np.concatenate([wish.ids for wish in wishes])
    free = _unheld(population, everyone)
    supply = np.bincount(strata[free], minlength=len(present)) * testable
    totals = np.bincount(strata, minlength=len(present)) * testable
    current_lists = [population.everything(client) for client in everyone.tolist()]

    weights: list[NDArray[np.number]] = []
    group_counts: dict[int, NDArray[np.int64]] = {}
    for wish, rng in zip(wishes, rngs, strict=True):
        choices = totals if wish.reuse else supply
        for place, client in enumerate(wish.ids.tolist()):
            if wish.target_groups is not None:
                group = int(wish.target_groups[place])
                if group not in group_counts:
                    group_counts[group] = np.bincount(
                        strata[_holdings(population, group)], minlength=len(present)
                    )
                weights.append(group_counts[group] * testable)
            elif wish.classes is not None:
                weights.append(choices * np.isin(classes, wish.classes))
            else:
                old_classes = np.unique(samples.y_train[population.everything(client)])
                weights.append(
                    _weights_of_other_classes(
                        choices, classes, old_classes, 0.0 if wish.reuse else _LAST_RESORT_WEIGHT, rng
                    )
                )

    reuse = np.repeat([wish.reuse for wish in wishes], [len(wish.ids) for wish in wishes])
    lists, short = redeal(current_lists, np.array(weights, np.float64), strata, free, reuse, rngs[0])
    cuts = np.cumsum([len(wish.ids) for wish in wishes])[:-1]
    bounds = [0, *cuts.tolist(), len(lists)]
    return [lists[a:b] for a, b in pairwise(bounds)], np.split(short, cuts)


def _weights_of_other_classes(
    supply: NDArray[np.int64],
    classes: NDArray[np.int64],
    old_classes: NDArray[np.int64],
    rest_weight: float,
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    """Weights of the strata for a client with ``old_classes``: as many other classes, drawn by supply."""
    allowed = np.where(np.isin(classes, old_classes), 0, supply).astype(np.float64)
    by_class = np.bincount(classes, weights=allowed)
    available = np.flatnonzero(by_class)
    if not len(available):
        return allowed
    new_classes = rng.choice(
        available,
        min(len(old_classes), len(available)),
        replace=False,
        p=by_class[available] / by_class.sum(),
    )
    # Every new class gets an equal share, divided among its sources by supply.
    shares = np.divide(allowed, by_class[classes], out=np.zeros_like(allowed), where=allowed > 0)
    weights: NDArray[np.float64] = shares * np.where(np.isin(classes, new_classes), 1.0, rest_weight)
    return weights


def _present_strata(
    samples: Samples,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """The strata that occur in the training data, counted from 0: that of each sample ``(n,)``, the original
    numbers ``(S,)``, and which of them have test samples ``(S,)``.
    """
    train, test, count = strata_of(samples)
    present, strata = np.unique(train, return_inverse=True)
    return strata, present, np.bincount(test, minlength=count)[present] > 0


def _holdings(population: Population, group: int) -> NDArray[np.int32]:
    """The training and validation samples of all present clients of a group."""
    members = population.active & (population.groups == group)
    return np.concatenate(
        [lists.values[np.repeat(members, lists.sizes)] for lists in (population.train, population.validation)]
    )


def _unheld(population: Population, giving_back: Ids) -> NDArray[np.bool_]:
    """The training samples that no client has, or only a client that gives them back, as a mask ``(n,)``."""
    keeping = np.ones(len(population.active), bool)
    keeping[giving_back] = False
    free = np.ones(len(population.samples.y_train), bool)
    for lists in (population.train, population.validation):
        free[lists.values[np.repeat(keeping, lists.sizes)]] = False
    return free


def _with_lists(lists: Ragged, ids: Ids, new: Ragged) -> Ragged:
    """``lists`` with the lists of ``ids`` replaced."""
    parts = list(lists)
    for client, part in zip(ids.tolist(), new, strict=True):
        parts[client] = part
    return Ragged.of(parts)


def _without_absent(lists: Ragged, active: NDArray[np.bool_]) -> Ragged:
    """``lists``, with empty lists for clients that are not ``active``."""
    if active.all():
        return lists
    sizes = lists.sizes * active
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    return Ragged(lists.values[np.repeat(active, lists.sizes)], offsets)

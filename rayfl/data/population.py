"""All clients that ever exist, as they are at a time: who is there, with which data, in which group.

The steps of :mod:`rayfl.data.events` as functions from one population to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rayfl.data.base import Federation, Names, Ragged, Samples
from rayfl.data.federation import client_tests, seen_through, split, strata_of
from rayfl.data.redeal import redeal

Ids = NDArray[np.int64]
_LAST_RESORT = 1e-9
"""The weight of strata that are used only where the others are exhausted."""


@dataclass(frozen=True)
class Shares:
    """What becomes of a client's samples: the fraction for validation, the most test samples, the seed."""

    validation: float
    limit: int | None
    seed: int


@dataclass(frozen=True)
class Population:
    """``N`` clients at a time.

    Attributes:
        samples: the data, without label maps.
        train, validation, test: plain indices of every client, there or not.
        groups: planted groups ``(N,)`` or None.
        maps: the row of ``rows`` through which each client sees its labels ``(N,)``.
        rows: label maps; the first changes nothing.
        active: who is there ``(N,)``.
        known: who has ever been there ``(N,)``.
        founded: what the clients of each group have in common, one key a group, the partition's first: where
        their samples are from, and the row of ``rows`` (:func:`keys_of`).
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
    known: NDArray[np.bool_]
    founded: tuple[tuple[object, ...], ...] = ()
    names: Names | None = None

    def everything(self, client: int) -> NDArray[np.int32]:
        """All samples of a client but its test samples."""
        return np.concatenate([self.train[client], self.validation[client]])

    def came(self, ids: Ids) -> Population:
        """``ids`` are there."""
        active, known = self.active.copy(), self.known.copy()
        active[ids] = known[ids] = True
        return replace(self, active=active, known=known)

    def left(self, ids: Ids) -> Population:
        """``ids`` are no longer there; their samples stay theirs."""
        active = self.active.copy()
        active[ids] = False
        return replace(self, active=active)

    def relabelled(self, ids: Ids, labels: Ids) -> Population:
        """``ids`` call label ``c`` ``labels[c]`` from now on, on top of what they called it before."""
        rows, maps = list(self.rows), self.maps.copy()
        for old in np.unique(self.maps[ids]).tolist():
            row = tuple(labels[list(self.rows[old])].tolist())
            if row not in rows:
                rows.append(row)
            maps[ids[self.maps[ids] == old]] = rows.index(row)
        return replace(self, rows=tuple(rows), maps=maps)

    def renamed(self, ids: Ids, labels: Ids) -> Population:
        """``ids`` are :meth:`relabelled`, and belong to the groups that see the same samples so, if there are
        any, or to new ones.
        """
        found = self.relabelled(ids, labels)
        if self.groups is None:
            return found
        sources = [self.founded[group][:-1] for group in self.groups[ids].tolist()]
        keys = [(*source, row) for source, row in zip(sources, found.maps[ids].tolist(), strict=True)]
        return found.regrouped(ids, keys)

    def regrouped(self, ids: Ids, keys: Sequence[tuple[object, ...]]) -> Population:
        """``ids`` belong to the groups that ``keys`` stand for, one per client."""
        if self.groups is None:
            return self
        groups, founded = self.groups.copy(), list(self.founded)
        for client, key in zip(ids.tolist(), keys, strict=True):
            if key not in founded:
                founded.append(key)
            groups[client] = founded.index(key)
        return replace(self, groups=groups, founded=tuple(founded))

    def follows(self, ids: Ids, like: Ids, before: Population) -> Population:
        """``ids`` belong to the groups ``like`` and see labels as most of these did ``before``."""
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
        test = client_tests(self.samples, new, None, shares.limit, shares.seed, names)
        return replace(
            self,
            train=_with(self.train, ids, train),
            validation=_with(self.validation, ids, validation),
            test=_with(self.test, ids, test),
        )

    def federation(self, samples: Samples) -> Federation:
        """What is there of it, as virtual ids of ``samples`` (with the label maps of all times)."""
        maps = None if samples.label_maps is None else self.maps

        def seen(lists: Ragged, count: int) -> Ragged:
            return _only(lists if maps is None else seen_through(lists, maps, count), self.active)

        return Federation(
            samples,
            seen(self.train, len(samples.y_train)),
            seen(self.validation, len(samples.y_train)),
            seen(self.test, len(samples.y_test)),
            self.groups,
            self.names,
        )


def keys_of(groups: Ids | None, maps: Ids) -> tuple[tuple[object, ...], ...]:
    """What the clients of each of a partition's groups have in common: the source of the samples, the map.

    If each group sees its labels through another map, the groups differ in nothing else (CFL's swapped and
    permuted labels). A number between 0 and the largest group that no client has is a group of its own.
    """
    if groups is None:
        return ()
    count = int(groups.max()) + 1
    rows = [
        int(np.bincount(maps[groups == group]).argmax()) if (groups == group).any() else -1
        for group in range(count)
    ]
    there = [row for row in rows if row >= 0]
    alike = maps.any() and len(set(there)) == len(there)
    return tuple(("planted", 0 if alike and row >= 0 else group, row) for group, row in enumerate(rows))


@dataclass(frozen=True)
class Wish:
    """What samples clients are to get.

    Attributes:
        ids: the clients ``(D,)``, ascending.
        classes: new classes that all get; None: each draws as many as it had, of those it did not have.
        like: groups whose distribution each follows instead ``(D,)``, or None.
        reuse: whether samples that others hold will do.
    """

    ids: Ids
    classes: tuple[int, ...] | None
    like: Ids | None
    reuse: bool


def new_samples(
    population: Population, wishes: Sequence[Wish], rngs: Sequence[np.random.Generator]
) -> tuple[list[list[NDArray[np.int64]]], list[Ids]]:
    """New samples for all that drift together.

    Returns:
        For each wish the new lists of its clients, and how many samples each of them is short of.
    """
    samples = population.samples
    strata, present, testable = _present_strata(samples)
    classes = present % samples.classes
    everyone = np.concatenate([wish.ids for wish in wishes])
    free = _unheld(population, everyone)
    supply = np.bincount(strata[free], minlength=len(present)) * testable
    totals = np.bincount(strata, minlength=len(present)) * testable
    own = [population.everything(client) for client in everyone.tolist()]

    weights: list[NDArray[np.number]] = []
    held: dict[int, NDArray[np.int64]] = {}
    for wish, rng in zip(wishes, rngs, strict=True):
        choices = totals if wish.reuse else supply
        for place, client in enumerate(wish.ids.tolist()):
            if wish.like is not None:
                group = int(wish.like[place])
                if group not in held:
                    held[group] = np.bincount(strata[_holdings(population, group)], minlength=len(present))
                weights.append(held[group] * testable)
            elif wish.classes is not None:
                weights.append(choices * np.isin(classes, wish.classes))
            else:
                had = np.unique(samples.y_train[population.everything(client)])
                weights.append(
                    _other_classes(choices, classes, had, 0.0 if wish.reuse else _LAST_RESORT, rng)
                )

    reuse = np.repeat([wish.reuse for wish in wishes], [len(wish.ids) for wish in wishes])
    lists, short = redeal(own, np.array(weights, np.float64), strata, free, reuse, rngs[0])
    cuts = np.cumsum([len(wish.ids) for wish in wishes])[:-1]
    bounds = [0, *cuts.tolist(), len(lists)]
    return [lists[a:b] for a, b in pairwise(bounds)], np.split(short, cuts)


def _other_classes(
    supply: NDArray[np.int64],
    classes: NDArray[np.int64],
    had: NDArray[np.int64],
    rest: float,
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    """Weights of the strata for a client with the classes ``had``: as many others, drawn by their supply."""
    allowed = np.where(np.isin(classes, had), 0, supply).astype(np.float64)
    by_class = np.bincount(classes, weights=allowed)
    there = np.flatnonzero(by_class)
    if not len(there):
        return allowed
    drawn = rng.choice(there, min(len(had), len(there)), replace=False, p=by_class[there] / by_class.sum())
    # Every new class gets an equal share, divided among its sources by supply.
    shares = np.divide(allowed, by_class[classes], out=np.zeros_like(allowed), where=allowed > 0)
    weights: NDArray[np.float64] = shares * np.where(np.isin(classes, drawn), 1.0, rest)
    return weights


def _present_strata(
    samples: Samples,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Of the strata that occur: that of each training sample, their numbers, and which can be tested."""
    train, test, count = strata_of(samples)
    present, strata = np.unique(train, return_inverse=True)
    return strata, present, np.bincount(test, minlength=count)[present] > 0


def _holdings(population: Population, group: int) -> NDArray[np.int32]:
    """The samples of all clients of a group that are there."""
    members = population.active & (population.groups == group)
    return np.concatenate(
        [lists.values[np.repeat(members, lists.sizes)] for lists in (population.train, population.validation)]
    )


def _unheld(population: Population, giving_back: Ids) -> NDArray[np.bool_]:
    """The training samples that no client holds, apart from those who give theirs back ``(n,)``."""
    keeping = np.ones(len(population.active), bool)
    keeping[giving_back] = False
    free = np.ones(len(population.samples.y_train), bool)
    for lists in (population.train, population.validation):
        free[lists.values[np.repeat(keeping, lists.sizes)]] = False
    return free


def _with(lists: Ragged, ids: Ids, new: Ragged) -> Ragged:
    """``lists`` with the lists of ``ids`` replaced."""
    parts = list(lists)
    for client, part in zip(ids.tolist(), new, strict=True):
        parts[client] = part
    return Ragged.of(parts)


def _only(lists: Ragged, active: NDArray[np.bool_]) -> Ragged:
    """``lists``, empty where not ``active``."""
    if active.all():
        return lists
    sizes = lists.sizes * active
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    return Ragged(lists.values[np.repeat(active, lists.sizes)], offsets)

"""Clients that join, leave and change: events after given rounds, and the stages between them.

A run with events is a sequence of stages. Each stage is a federation of all ``N`` clients that ever exist, in
which absent clients have no samples. All stages share one object with the samples.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator
from typing_extensions import override

from rayfl.data.base import Assignment, Federation, Names, Partition, Ragged, Samples, TestSamples, called
from rayfl.data.federation import (
    assigned_by,
    check_settings,
    client_tests,
    names_unless_numbers,
    rule_of,
    split,
    with_label_maps,
    without_partition_fields,
)
from rayfl.data.population import Ids, Population, Shares, Wish, keys_of, new_samples
from rayfl.errors import ConfigError, DataError
from rayfl.random import generator
from rayfl.settings import Section, choice
from rayfl.units import counted


class BaseEvent(Section):
    """Base class of all events."""

    name: str = ""

    round: int = Field(ge=1, description="number of rounds after which it happens")


class ClientEvent(BaseEvent):
    """Base class of events of some clients.

    ``clients`` is a number of clients or their ids; ``group`` and ``fraction`` restrict the choice. With a
    number or a fraction, clients are drawn at random; a group alone means all of its clients.
    """

    clients: Annotated[int, Field(ge=1)] | tuple[Annotated[int, Field(ge=0)] | str, ...] | None = Field(
        None,
        description="a number of clients, drawn at random, or the ids of clients (your own ids with "
        "the partitions file, column and python)",
    )
    group: int | None = Field(None, ge=0, description="only clients of this planted group")

    @field_validator("clients")
    @classmethod
    def _check_ids(cls, clients: int | tuple[int | str, ...] | None) -> int | tuple[int | str, ...] | None:
        if isinstance(clients, tuple) and (not clients or len(set(map(str, clients))) < len(clients)):
            raise ValueError("name at least one client, and none twice")
        return clients

    @property
    def share(self) -> float | None:
        """The fraction of the present clients, if one was given."""
        return None

    @model_validator(mode="after")
    def _check_choice(self) -> ClientEvent:
        named = isinstance(self.clients, tuple)
        if named and (self.group is not None or self.share is not None):
            raise ValueError("clients are named, so leave group and fraction out")
        if self.clients is not None and self.share is not None:
            raise ValueError("give either a number of clients or a fraction")
        if self.clients is None and self.group is None and self.share is None and self._needs_choice():
            raise ValueError("concerns no clients; set clients (ids or a number), fraction or group")
        return self

    def _needs_choice(self) -> bool:
        return True


class Join(ClientEvent):
    """Join: clients that were absent at the start join, with the data that the partition gave them.

    The partition's number of clients includes the newcomers, and their share of the data is reserved for
    them. Newcomers that are not named get the last ids, in the order in which they join.

    Clients that join after the last round are tested with the models that they are given, before and after
    fine-tuning for ``evaluation.finetune_epochs``: see the ``newcomers_`` numbers of ``summary.json``.
    """

    name: Literal["join"] = "join"
    returning: bool = Field(
        False, description="clients that left return (by default all of them), in place of new clients"
    )

    def _needs_choice(self) -> bool:
        return not self.returning


class Leave(ClientEvent):
    """Leave: clients leave; their data are kept for their return."""

    name: Literal["leave"] = "leave"
    fraction: float | None = Field(None, gt=0, le=1, description="fraction of the present clients")

    @property
    def share(self) -> float | None:
        """``fraction``."""
        return self.fraction


class Drift(ClientEvent):
    """Drift: the data of clients change; their numbers of samples stay the same.

    - ``new_classes``: their samples are replaced by as many samples of classes that they did not have;
    - ``permuted_labels``: the same samples under other labels;
    - ``group``: samples (and labels) like those of another planted group. Named clients that are in the group
      ``to`` already keep their data.

    New samples are taken from those that no client has, or that clients drifting in the same round give
    back; with ``reuse`` also from those of other clients, which keep them. Planted groups change too: clients
    with the same new classes, or of the same group under the same new labels, form a new group.
    """

    @override
    def needs_classes(self) -> bool:
        return self.kind != "group"

    name: Literal["drift"] = "drift"
    fraction: float | None = Field(
        None, gt=0, le=1, description="fraction of the present clients; with to, of those in other groups"
    )
    kind: Literal["new_classes", "permuted_labels", "group"] = Field(description="what changes")
    classes: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None,
        min_length=1,
        description="new_classes: the classes; default: each client draws as many others as it had",
    )
    labels: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None, min_length=2, description="permuted_labels: what the labels 0, 1, ... become; default: drawn"
    )
    to: int | None = Field(None, ge=0, description="group: the new group; default: each client draws another")
    reuse: bool = Field(False, description="allow new samples that other clients hold, too")

    @property
    def share(self) -> float | None:
        """``fraction``."""
        return self.fraction

    @model_validator(mode="after")
    def _check_settings_of_kind(self) -> Drift:
        for setting, kind in (("classes", "new_classes"), ("labels", "permuted_labels"), ("to", "group")):
            if getattr(self, setting) is not None and self.kind != kind:
                raise ValueError(f"{setting} belongs to kind={kind}, not to {self.kind}")
        if self.labels is not None and sorted(self.labels) != list(range(len(self.labels))):
            raise ValueError("labels must be a permutation of 0, 1, 2, ...")
        if self.labels is not None and list(self.labels) == sorted(self.labels):
            raise ValueError("labels leaves every label as it is")
        if self.reuse and self.kind == "permuted_labels":
            raise ValueError("permuted_labels needs no new samples; leave reuse out")
        return self


class Outage(BaseEvent):
    """Outage: local servers miss global rounds. They keep training, which counts in the next global round."""

    name: Literal["outage"] = "outage"
    servers: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        min_length=1, description="numbers of the edges, or without edges of the clusters"
    )
    rounds: int = Field(1, ge=1, description="number of rounds")


if TYPE_CHECKING:
    Event = BaseEvent
else:
    Event = choice({"join": Join, "leave": Leave, "drift": Drift, "outage": Outage})


@dataclass(frozen=True)
class Stage:
    """The federation from one event to the next.

    Attributes:
        round: the first round of the stage, from 0.
        federation: all ``N`` clients; absent ones have empty lists.
        active: which clients are present ``(N,)``.
        joined, left, drifted: ids of the clients that did so at the start of the stage, ascending.
    """

    round: int
    federation: Federation
    active: NDArray[np.bool_]
    joined: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    left: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    drifted: Ids = field(default_factory=lambda: np.empty(0, np.int64))


def build_stages(
    samples: Samples,
    partition: Partition,
    events: Sequence[BaseEvent],
    *,
    validation: float,
    test_samples: TestSamples | None,
    seed: int,
    rounds: int,
) -> tuple[Stage, ...]:
    """The federations of a run with events.

    Args:
        samples, partition, validation, test_samples, seed: as for
            :func:`rayfl.data.federation.build_federation`; without events, its result is the only stage's.
            The partition's clients include all that join later.
        events: those of one round happen together: first clients leave and join in the order of the list,
            then clients drift. A client's lists change only when it drifts.
        rounds: length of the run.

    Returns:
        The stages by ascending round; the first begins with round 0. No sample is held by two clients
        (present or not), except where a drift allows ``reuse``.

    Raises:
        ConfigError: if an event concerns clients or groups that do not exist or are absent, comes after the
            last round, or would leave no client.
        DataError: as :func:`build_federation`, or if there are too few samples for a drift.
    """
    check_settings(samples, validation, test_samples)
    for place, event in enumerate(events):
        last_round = rounds if isinstance(event, Join) and not event.returning else rounds - 1
        if event.round > last_round:
            raise ConfigError(
                f"events.{place}.round",
                f"it would happen after {event.round} of {counted(rounds, 'round')}",
                f"it must lie in 1..{last_round}"
                if last_round
                else "a single round has no room for such events",
            )
    assignment = assigned_by(partition, samples, seed)
    newcomers = _newcomers(events, assignment.groups, len(assignment.clients), seed)
    assignment, newcomers = _reordered(assignment, newcomers)
    names = names_unless_numbers(assignment.names)
    events = numbered(events, names)
    newcomers = _with_named_newcomers(events, newcomers, names, len(assignment.clients))
    samples, maps = with_label_maps(without_partition_fields(samples), assignment)
    shares = Shares(validation, rule_of(test_samples, len(assignment.clients)), seed)
    population = _initial_population(samples, assignment, maps, newcomers, shares)

    initial = population
    steps: list[tuple[int, Population, tuple[Ids, Ids, Ids]]] = []
    for event_round in sorted({event.round for event in events if isinstance(event, ClientEvent)}):
        active_before, drifts = population.active, []
        for place, event in enumerate(events):
            if event.round != event_round:
                continue
            if isinstance(event, Drift):
                drifts.append((place, event))
            elif isinstance(event, Join):
                population = _join(population, event, place, newcomers.get(place), seed)
            elif isinstance(event, Leave):
                population = _leave(population, event, place, seed)
        population, drifted = _drift(population, drifts, shares)
        active_now = population.active
        changes = (
            np.flatnonzero(active_now & ~active_before),
            np.flatnonzero(active_before & ~active_now),
            drifted,
        )
        steps.append((event_round, population, changes))

    if samples.label_maps is not None or len(population.rows) > 1:
        samples = replace(samples, label_maps=np.array(population.rows, np.int64))
    return (
        Stage(0, replace(initial.federation(samples), notes=assignment.notes), initial.active),
        *(
            Stage(event_round, state.federation(samples), state.active, *changes)
            for event_round, state, changes in steps
        ),
    )


def _newcomers(events: Sequence[BaseEvent], groups: Ids | None, clients: int, seed: int) -> dict[int, Ids]:
    """The partition's clients that are reserved for each unnamed join, by the event's position."""
    waiting = np.zeros(clients, bool)
    drawn: dict[int, Ids] = {}
    for place, event in sorted(enumerate(events), key=lambda item: item[1].round):
        if isinstance(event, Join) and not event.returning and not isinstance(event.clients, tuple):
            rng = generator(seed, "event", place)
            drawn[place] = choose(event, place, ~waiting, groups, rng)
            waiting[drawn[place]] = True
            if waiting.all():
                raise ConfigError(
                    f"events.{place}.clients",
                    f"all {clients} clients of the partition would join later",
                    "partition.clients counts newcomers too; raise it",
                )
    return drawn


def _reordered(assignment: Assignment, newcomers: dict[int, Ids]) -> tuple[Assignment, dict[int, Ids]]:
    """Reorder the clients so that those that join later come last; also return the ids that these get."""
    if not newcomers:
        return assignment, {}
    joining = np.concatenate(list(newcomers.values()))
    clients = len(assignment.clients)
    order = np.concatenate([np.setdiff1d(np.arange(clients), joining), joining])
    ends = clients - len(joining) + np.cumsum([len(ids) for ids in newcomers.values()])
    ids = {
        place: np.arange(end - len(ids), end)
        for (place, ids), end in zip(newcomers.items(), ends.tolist(), strict=True)
    }
    reordered = replace(
        assignment,
        clients=[assignment.clients[i] for i in order],
        groups=None if assignment.groups is None else assignment.groups[order],
        label_map=None if assignment.label_map is None else np.asarray(assignment.label_map)[order],
        test=None if assignment.test is None else [assignment.test[i] for i in order],
        names=None if assignment.names is None else assignment.names[order],
    )
    return reordered, ids


def numbered(events: Sequence[BaseEvent], names: Names | None) -> list[BaseEvent]:
    """Replace clients' own ids in events by their numbers.

    Raises:
        ConfigError: if there is no client of that id.
    """
    numbers_by_id = {} if names is None else {name: i for i, name in enumerate(names.tolist())}
    return [
        event.model_copy(
            update={
                "clients": tuple(
                    client_number(c, numbers_by_id, f"events.{place}.clients") for c in event.clients
                )
            }
        )
        if isinstance(event, ClientEvent) and isinstance(event.clients, tuple)
        else event
        for place, event in enumerate(events)
    ]


def client_number(client: int | str, numbers_by_id: Mapping[str, int], where: str) -> int:
    """The number of a client.

    Args:
        client: its own id, or its number.
        numbers_by_id: the numbers of the clients' own ids; empty if they have none.
        where: the setting, for errors.

    Raises:
        ConfigError: if there is no client of that id.
    """
    if numbers_by_id:
        if str(client) not in numbers_by_id:
            matches = difflib.get_close_matches(str(client), numbers_by_id, n=1)
            examples = ", ".join(map(repr, itertools.islice(numbers_by_id, 3)))
            remedy = (
                f"did you mean {matches[0]!r}?"
                if matches
                else f"use the ids of the partition, such as {examples}"
            )
            raise ConfigError(where, f"there is no client {str(client)!r}", remedy)
        return numbers_by_id[str(client)]
    if not str(client).isdecimal():
        raise ConfigError(where, f"there is no client {client!r}", "clients have numbers here, from 0")
    return int(client)


def _with_named_newcomers(
    events: Sequence[BaseEvent], newcomers: dict[int, Ids], names: Names | None, clients: int
) -> dict[int, Ids]:
    """``newcomers``, and those that events name, by the event's position."""
    waiting = np.zeros(clients, bool)
    for ids in newcomers.values():
        waiting[ids] = True
    named = dict(newcomers)
    for place, event in enumerate(events):
        if not isinstance(event, Join) or event.returning or not isinstance(event.clients, tuple):
            continue
        ids = choose(event, place, np.ones(clients, bool), None, generator(0, "no draw"), names)
        if waiting[ids].any():
            raise ConfigError(
                f"events.{place}.clients",
                f"client {called(names, ids[waiting[ids]][0])} joins in another event already",
                "newcomers that are not named get the last ids; 'returning: true' is for clients that left",
            )
        waiting[ids] = True
        named[place] = ids
    if waiting.all():
        raise ConfigError("events", f"all {clients} clients would join later", "keep some from the start")
    return named


def _initial_population(
    samples: Samples,
    assignment: Assignment,
    maps: Ids | None,
    newcomers: dict[int, Ids],
    shares: Shares,
) -> Population:
    """The population at the start: all clients but the newcomers are present."""
    assigned, groups = Ragged.of(assignment.clients), assignment.groups
    train, held_out = split(assigned, shares.validation, shares.seed)
    names = names_unless_numbers(assignment.names)
    tests = client_tests(samples, assigned, assignment.test, shares.tests, shares.seed, names)
    active = np.ones(len(assigned), bool)
    for ids in newcomers.values():
        active[ids] = False
    rows = np.arange(samples.classes)[None] if samples.label_maps is None else samples.label_maps
    client_maps = np.zeros(len(assigned), np.int64) if maps is None else maps
    return Population(
        samples,
        train,
        held_out,
        tests,
        groups,
        client_maps,
        tuple(tuple(row) for row in rows.tolist()),
        active,
        ever_active=active,
        group_keys=keys_of(groups, client_maps),
        names=names,
    )


def _join(population: Population, event: Join, place: int, newcomers: Ids | None, seed: int) -> Population:
    if newcomers is None:
        absent = population.ever_active & ~population.active
        rng = generator(seed, "event", place)
        newcomers = choose(event, place, absent, population.groups, rng, population.names)
    return population.came(newcomers)


def _leave(population: Population, event: Leave, place: int, seed: int) -> Population:
    rng = generator(seed, "event", place)
    ids = choose(event, place, population.active, population.groups, rng, population.names)
    population = population.left(ids)
    if not population.active.any():
        what = f"no client would be left after {counted(event.round, 'round')}"
        raise ConfigError(f"events.{place}", what, "let fewer clients leave")
    return population


def _drift(
    population: Population, events: Sequence[tuple[int, Drift]], shares: Shares
) -> tuple[Population, Ids]:
    """Apply all drifts of a round together; also return the ids of the clients that drifted."""
    drifted = np.zeros(len(population.active), bool)
    moving: list[tuple[int, Drift, Wish]] = []
    renaming: list[tuple[int, Drift, Ids]] = []
    for place, event in events:
        rng = generator(shares.seed, "event", place)
        candidates = population.active & ~drifted
        named, groups = isinstance(event.clients, tuple), population.groups
        elsewhere = np.ones_like(candidates) if event.to is None or groups is None else groups != event.to
        if not named:
            candidates &= elsewhere
        ids = choose(event, place, candidates, groups, rng, population.names)
        ids = ids[elsewhere[ids]]  # named clients that are in the group already keep their data
        if named and not len(ids):
            what = f"all of these clients are in group {event.to} already"
            raise ConfigError(f"events.{place}.clients", what, "name clients of other groups")
        drifted[ids] = True
        if event.kind == "permuted_labels":
            renaming.append((place, event, ids))
        else:
            target_groups = (
                _target_groups(population, event, place, ids, rng) if event.kind == "group" else None
            )
            moving.append(
                (
                    place,
                    event,
                    Wish(ids, _checked_classes(population, event, place), target_groups, event.reuse),
                )
            )
    if moving:
        population = _deal_new_samples(population, moving, shares)
    for place, event, ids in renaming:
        classes = population.samples.classes
        labels = event.labels
        if labels is None:
            if classes < 2:
                raise ConfigError(f"events.{place}", "a single label cannot be permuted")
            labels = tuple(permutation(classes, generator(shares.seed, "event labels", place)).tolist())
        elif len(labels) != classes:
            raise ConfigError(
                f"events.{place}.labels", f"names {len(labels)} labels", f"the data have {classes}"
            )
        population = population.renamed(ids, np.array(labels, np.int64))
    return population, np.flatnonzero(drifted)


def _deal_new_samples(
    population: Population, moving: Sequence[tuple[int, Drift, Wish]], shares: Shares
) -> Population:
    """Give new samples to all clients that drift to other classes or groups in a round."""
    rngs = [generator(shares.seed, "event data", place) for place, _, _ in moving]
    original, y = population, population.samples.y_train
    lists_of, short_of = new_samples(population, [wish for _, _, wish in moving], rngs)
    for (place, event, wish), lists, short in zip(moving, lists_of, short_of, strict=True):
        lacking = np.flatnonzero(short)
        if len(lacking):
            client, needs = called(population.names, int(wish.ids[lacking[0]])), int(short[lacking[0]])
            raise DataError(
                f"events.{place}: client {client} would need {needs} more samples that fit and that no "
                f"client holds ({len(lacking)} such clients); "
                + (
                    "drift fewer clients, to labels that have test samples"
                    if event.reuse
                    else "set reuse: true, or lower partition.samples so that some are left"
                )
            )
        population = population.dealt(wish.ids, lists, shares, place)
        if wish.target_groups is None:
            maps = population.maps[wish.ids].tolist()
            keys = [
                ("classes", *np.unique(y[part]).tolist(), row) for part, row in zip(lists, maps, strict=True)
            ]
            population = population.regrouped(wish.ids, keys)
        else:
            population = population.follows(wish.ids, wish.target_groups, original)
    return population


def _target_groups(
    population: Population, event: Drift, place: int, ids: Ids, rng: np.random.Generator
) -> Ids:
    """The group that each client drifts to."""
    where = f"events.{place}.to"
    groups = population.groups
    if groups is None:
        raise ConfigError(where, "the partition plants no groups", "use tasks, domains or relabelled")
    present_groups = np.unique(groups[population.active])
    if event.to is not None:
        if event.to not in present_groups:
            raise ConfigError(
                where,
                f"no client is in group {event.to} after {counted(event.round, 'round')}",
                f"there are groups {', '.join(map(str, present_groups.tolist()))}",
            )
        return np.full(len(ids), event.to)
    if len(present_groups) < 2:
        raise ConfigError(where, "there is no other group", "clients of two groups must be present")
    return np.array(
        [rng.choice(present_groups[present_groups != groups[client]]) for client in ids.tolist()], np.int64
    )


def _checked_classes(population: Population, event: Drift, place: int) -> tuple[int, ...] | None:
    """The new classes that an event names."""
    for label in event.classes or ():
        if not (population.samples.y_train == label).any():
            raise ConfigError(f"events.{place}.classes", f"no training sample has class {label}")
    return event.classes


def permutation(count: int, rng: np.random.Generator) -> Ids:
    """A random permutation of ``count >= 2`` labels that is not the identity."""
    drawn = rng.permutation(count)
    return np.roll(drawn, 1) if (drawn == np.arange(count)).all() else drawn


_ABSENT_REMEDY = "clients named in a later join are absent until then, unless it has returning: true"


def choose(
    event: ClientEvent,
    place: int,
    candidates: NDArray[np.bool_],
    groups: Ids | None,
    rng: np.random.Generator,
    names: Names | None = None,
) -> Ids:
    """The clients that an event concerns, ids ascending.

    Args:
        event: the event, with clients by their numbers (:func:`numbered`).
        place: its position in the list, for errors.
        candidates: the clients to choose from ``(N,)``.
        groups: the planted groups ``(N,)``.
        rng: draws numbers and fractions.
        names: the user's ids of the clients, for errors.

    Raises:
        ConfigError: if there are no such clients.
    """
    where = f"events.{place}"
    if isinstance(event.clients, tuple):
        ids = np.array(sorted(map(int, event.clients)), np.int64)
        if ids[-1] >= len(candidates):
            raise ConfigError(
                f"{where}.clients",
                f"there is no client {ids[-1]}",
                f"ids run from 0 to {len(candidates) - 1}",
            )
        wrong = ids[~candidates[ids]]
        if len(wrong):
            state = {
                "join": "has not left",
                "leave": "is absent",
                "drift": "is absent, or drifts twice",
            }
            remedy = {
                "join": "leave returning out for clients that are new",
                "leave": _ABSENT_REMEDY,
                "drift": _ABSENT_REMEDY,
            }
            raise ConfigError(
                f"{where}.clients",
                f"client {called(names, wrong[0])} {state[event.name]} after {counted(event.round, 'round')}",
                remedy[event.name],
            )
        return ids
    pool = np.flatnonzero(candidates)
    if event.group is not None:
        if groups is None:
            raise ConfigError(
                f"{where}.group",
                "the partition plants no groups",
                "use one that does (tasks, domains, relabelled), or clients or fraction",
            )
        pool = pool[groups[pool] == event.group]
    if not len(pool):
        of_group = "" if event.group is None else f" of group {event.group}"
        lack = "has left" if isinstance(event, Join) and event.returning else "can be chosen"
        raise ConfigError(where, f"no client{of_group} {lack} after {counted(event.round, 'round')}")
    count = len(pool)
    if event.share is not None:
        count = max(1, round(event.share * len(pool)))
    elif isinstance(event.clients, int):
        count = event.clients
        if count > len(pool):
            raise ConfigError(
                f"{where}.clients",
                f"needs {count} clients after {counted(event.round, 'round')}, but there are {len(pool)}",
                f"use at most {len(pool)}",
            )
    return np.sort(rng.choice(pool, count, replace=False)).astype(np.int64)

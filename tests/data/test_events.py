"""Events: who is there, with which data, in which group; nothing is held twice, nobody else changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import event as note
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from rayfl.data import (
    PARTITIONS,
    Event,
    Federation,
    Partition,
    Samples,
    Stage,
    build_federation,
    build_stages,
)
from rayfl.errors import ConfigError, DataError, RayflError

EVENTS: TypeAdapter[tuple[Any, ...]] = TypeAdapter(tuple[Event, ...])
GROUPED = [
    {"labels": [0, 1], "clients": 4},
    {"labels": [2, 3], "clients": 3},
    {"labels": [4, 5], "clients": 3},
]


def samples_of(each: int = 40, classes: int = 6, tests: int = 10) -> Samples:
    """``each`` training samples of every class."""
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(classes), each))
    y_test = np.repeat(np.arange(classes), tests)
    x, x_test = (np.arange(len(labels), dtype=np.float32)[:, None] for labels in (y, y_test))
    return Samples("made", x, y, x_test, y_test, classes)


def make(name: str, **fields: Any) -> Partition:
    return PARTITIONS[name](**fields)


def tasks() -> Partition:
    return make("tasks", tasks=GROUPED)


def stages_of(
    events: list[dict[str, Any]],
    partition: Partition | None = None,
    samples: Samples | None = None,
    **fields: Any,
) -> tuple[Stage, ...]:
    given: dict[str, Any] = {"validation": 0.2, "test_samples": "all", "seed": 3, "rounds": 100, **fields}
    return build_stages(
        samples or samples_of(), partition or tasks(), EVENTS.validate_python(events), **given
    )


def refusal(events: list[dict[str, Any]], *args: Any, **fields: Any) -> str:
    with pytest.raises((ConfigError, DataError)) as caught:
        stages_of(events, *args, **fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def labels_of(federation: Federation, client: int, part: str = "train") -> list[int]:
    ids = np.concatenate([federation.train[client], federation.validation[client]])
    if part == "test":
        ids = federation.test[client]
    found: NDArray[np.int64] = federation.samples.labels("train" if part == "train" else "test", ids)
    return sorted(set(found.tolist()))


def held(federation: Federation) -> NDArray[np.int64]:
    """The plain training samples that are there, one entry a holder."""
    ids = np.concatenate([federation.train.values, federation.validation.values])
    return ids % len(federation.samples.y_train)


def same_client(a: Federation, b: Federation, client: int) -> bool:
    return all(
        np.array_equal(getattr(a, part)[client], getattr(b, part)[client])
        for part in ("train", "validation", "test")
    )


# --- without events, and what always holds ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["iid", "label_skew", "tasks"])
def test_without_events_it_is_the_federation(name: str) -> None:
    partition = tasks() if name == "tasks" else make(name, clients=7)
    samples = samples_of()
    (stage,) = stages_of([], partition, samples)
    plain = build_federation(samples, partition, validation=0.2, test_samples="all", seed=3)
    assert stage.federation.samples is samples
    for part in ("train", "validation", "test"):
        a, b = getattr(stage.federation, part), getattr(plain, part)
        np.testing.assert_array_equal(a.values, b.values)
        np.testing.assert_array_equal(a.offsets, b.offsets)
    assert stage.round == 0
    assert stage.active.all()
    assert not len(stage.joined) + len(stage.left) + len(stage.drifted)


@st.composite
def timelines(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Any events, possible or not."""
    events = []
    for _ in range(draw(st.integers(1, 6))):
        event: dict[str, Any] = {"name": draw(st.sampled_from(["join", "leave", "drift"]))}
        event["round"] = draw(st.integers(1, 9))
        who = draw(st.sampled_from(["count", "ids", "fraction", "group"]))
        if who == "fraction" and event["name"] != "join":
            event["fraction"] = draw(st.floats(0.01, 0.6))
        elif who == "ids":
            event["clients"] = draw(st.lists(st.integers(0, 9), min_size=1, max_size=2, unique=True))
        elif who == "group":
            event["group"] = draw(st.integers(0, 3))
        else:
            event["clients"] = draw(st.integers(1, 3))
        if event["name"] == "join":
            event["returning"] = draw(st.booleans())
        if event["name"] == "drift":
            event["kind"] = draw(st.sampled_from(["new_classes", "permuted_labels", "group"]))
            event["reuse"] = draw(st.booleans()) and event["kind"] != "permuted_labels"
        events.append(event)
    return events


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(events=timelines(), seed=st.integers(0, 1000), spare=st.booleans())
def test_every_timeline_is_kept_or_refused(events: list[dict[str, Any]], seed: int, spare: bool) -> None:
    partition = make("tasks", tasks=[{**task, "samples": 8} for task in GROUPED]) if spare else tasks()
    try:
        stages = stages_of(events, partition, seed=seed, rounds=10)
    except RayflError as error:
        note("refused")
        if "\n" in str(error):
            raise
        return
    note("kept")
    rounds = [0, *sorted({event["round"] for event in events})]
    assert [stage.round for stage in stages] == rounds
    reuse = False
    everything = stages[0].federation.samples
    last: Stage | None = None
    seen: dict[int, Federation] = {}  # when each client was last there
    for stage in stages:
        federation = stage.federation
        reuse |= any(event.get("reuse", False) for event in events if event["round"] == stage.round)
        assert federation.samples is everything
        assert federation.clients == 10
        sizes = federation.sizes
        assert ((sizes > 0) == stage.active).all()
        assert ((federation.test.sizes > 0) == stage.active).all()
        assert not federation.validation.sizes[~stage.active].any()
        if not reuse:
            assert len(np.unique(held(federation))) == len(held(federation))
        if last is not None:
            np.testing.assert_array_equal(stage.joined, np.flatnonzero(stage.active & ~last.active))
            np.testing.assert_array_equal(stage.left, np.flatnonzero(last.active & ~stage.active))
            assert last.federation.groups is not None
            assert federation.groups is not None
            moved = federation.groups != last.federation.groups
            assert set(np.flatnonzero(moved)) <= set(stage.drifted.tolist())
        for client in np.flatnonzero(stage.active).tolist():
            if client in seen and client not in stage.drifted:
                assert same_client(federation, seen[client], client)
            if client in seen:  # drifting changes neither how many samples, nor how many of them validate
                assert len(federation.train[client]) == len(seen[client].train[client])
            seen[client] = federation
            # A label with few samples in training may have none among few in the test.
            assert set(labels_of(federation, client, "test")) <= set(labels_of(federation, client))
        last = stage


def test_the_same_key_gives_the_same_stages() -> None:
    events = [
        {"name": "join", "round": 4, "clients": 2},
        {"name": "drift", "round": 5, "fraction": 0.5, "kind": "new_classes"},
    ]
    a, b, other = stages_of(events), stages_of(events), stages_of(events, seed=4)
    for x, y in zip(a, b, strict=True):
        assert all(same_client(x.federation, y.federation, client) for client in range(10))
        np.testing.assert_array_equal(x.active, y.active)
    assert not all(same_client(a[2].federation, other[2].federation, client) for client in range(10))


# --- join and leave ---------------------------------------------------------------------------------------


def test_joiners_come_last_in_order_and_keep_their_share() -> None:
    events = [
        {"name": "join", "round": 20, "clients": 2},
        {"name": "join", "round": 10, "group": 1},  # all three of it
    ]
    first, second, third = stages_of(events)
    assert [first.round, second.round, third.round] == [0, 10, 20]
    assert np.flatnonzero(~first.active).tolist() == [5, 6, 7, 8, 9]
    assert second.joined.tolist() == [5, 6, 7]
    assert third.joined.tolist() == [8, 9]
    groups = third.federation.groups
    assert groups is not None
    assert groups[5:8].tolist() == [1, 1, 1]
    assert 1 not in groups[:5]
    assert 1 not in groups[8:]
    plain = build_federation(samples_of(), tasks(), validation=0, test_samples="all", seed=3)
    parts = {tuple(part.tolist()) for part in plain.train}
    now = stages_of(events, validation=0.0)[2].federation
    assert {tuple(part.tolist()) for part in now.train} == parts  # the same ten clients, renumbered
    assert not len(first.federation.train[5])
    assert not len(first.federation.test[9])


def test_named_joiners_keep_their_ids() -> None:
    first, second = stages_of([{"name": "join", "round": 2, "clients": [0, 3]}])
    assert np.flatnonzero(~first.active).tolist() == [0, 3]
    assert second.joined.tolist() == [0, 3]
    plain = build_federation(samples_of(), tasks(), validation=0.2, test_samples="all", seed=3)
    assert all(same_client(second.federation, plain, client) for client in range(10))


def test_leaving_and_coming_back() -> None:
    stages = stages_of(
        [
            {"name": "leave", "round": 1, "clients": [2, 9]},
            {"name": "leave", "round": 2, "group": 0, "clients": 1},
            {"name": "join", "round": 3, "clients": [9], "returning": True},
            {"name": "join", "round": 4, "returning": True},
            {"name": "leave", "round": 5, "fraction": 0.5},
        ]
    )
    assert [int(stage.active.sum()) for stage in stages] == [10, 8, 7, 8, 10, 5]
    assert stages[1].left.tolist() == [2, 9]
    assert stages[2].left[0] in (0, 1, 3)
    assert stages[3].joined.tolist() == [9]
    assert len(stages[4].joined) == 2
    assert all(same_client(stages[4].federation, stages[0].federation, client) for client in range(10))


def test_events_of_a_round_are_one_stage() -> None:
    first, second = stages_of(
        [
            {"name": "leave", "round": 7, "clients": [0]},
            {"name": "join", "round": 7, "clients": 1},
            {"name": "drift", "round": 7, "clients": [1], "kind": "permuted_labels"},
        ]
    )
    assert first.active.sum() == second.active.sum() == 9
    assert (second.left.tolist(), second.joined.tolist(), second.drifted.tolist()) == ([0], [9], [1])


# --- drift ------------------------------------------------------------------------------------------------


def test_new_classes_out_of_what_nobody_holds() -> None:
    partition = make("tasks", tasks=[{**task, "samples": 10} for task in GROUPED])
    first, second = stages_of([{"name": "drift", "round": 5, "group": 0, "kind": "new_classes"}], partition)
    assert second.drifted.tolist() == [0, 1, 2, 3]
    for client in second.drifted.tolist():
        new = labels_of(second.federation, client)
        assert len(new) == 2  # as many as it had
        assert not {0, 1} & set(new)
        assert len(second.federation.train[client]) == len(first.federation.train[client]) == 8
        assert labels_of(second.federation, client, "test") == new
    groups = second.federation.groups
    assert groups is not None
    assert groups[4:].tolist() == [1, 1, 1, 2, 2, 2]
    for a in range(4):
        assert groups[a] >= 3
        for b in range(4):
            alike = labels_of(second.federation, a) == labels_of(second.federation, b)
            assert (groups[a] == groups[b]) == alike


def test_new_classes_that_are_named() -> None:
    partition = make("tasks", tasks=[{**task, "samples": 10} for task in GROUPED])
    event = {"name": "drift", "round": 5, "clients": [0, 4, 7], "kind": "new_classes", "classes": [1, 5]}
    _, second = stages_of([event], partition)
    assert [labels_of(second.federation, client) for client in (0, 4, 7)] == [[1, 5]] * 3
    assert second.federation.groups is not None
    assert second.federation.groups[[0, 4, 7]].tolist() == [3, 3, 3]


def test_new_classes_when_everything_is_dealt() -> None:
    # Only what drifting clients give back is free: one client alone has nothing to take.
    alone = {"name": "drift", "round": 5, "clients": [0], "kind": "new_classes"}
    message = refusal([alone])
    assert message.startswith(
        "events.0: client 0 would need 20 more samples that fit and that no client holds"
    )
    assert "set reuse: true" in message
    first, second = stages_of([{**alone, "reuse": True}])
    assert not set(labels_of(second.federation, 0)) & {0, 1}
    assert len(second.federation.train[0]) == len(first.federation.train[0])
    assert all(same_client(first.federation, second.federation, client) for client in range(1, 10))
    assert len(np.unique(second.federation.train[0])) == len(second.federation.train[0])

    # Two clients of two groups exchange what they have, whatever the order in which they choose.
    for seed in range(8):
        four = {"name": "drift", "round": 5, "clients": [4, 5, 7, 8], "kind": "new_classes"}
        first, second = stages_of([four], seed=seed)
        for client in (4, 5, 7, 8):
            before, after = labels_of(first.federation, client), labels_of(second.federation, client)
            assert not set(before) & set(after)
        assert sorted(held(first.federation)) == sorted(held(second.federation))


def test_permuted_labels_by_hand() -> None:
    swap = {"kind": "permuted_labels", "labels": [1, 0, 2, 3, 4, 5]}
    stages = stages_of(
        [
            {"name": "drift", "round": 1, "clients": [0, 1, 5], **swap},
            {
                "name": "drift",
                "round": 2,
                "clients": [0],
                "kind": "permuted_labels",
                "labels": [0, 2, 1, 3, 4, 5],
            },
            {"name": "drift", "round": 3, "clients": [1], **swap},
        ]
    )
    samples = stages[0].federation.samples
    n = len(samples.y_train)
    # 0 1 2 3 4 5; swapped; first swapped, then 1 and 2 exchanged: 0 -> 1 -> 2, 1 -> 0, 2 -> 1; back: row 0.
    assert samples.label_maps is not None
    assert samples.label_maps.tolist() == [[0, 1, 2, 3, 4, 5], [1, 0, 2, 3, 4, 5], [2, 0, 1, 3, 4, 5]]
    for stage, rows in zip(stages, ([0, 0, 0], [1, 1, 1], [2, 1, 1], [2, 0, 1]), strict=True):
        for client, row in zip((0, 1, 5), rows, strict=True):
            for part, count in (("train", n), ("validation", n), ("test", len(samples.y_test))):
                lists, plain = getattr(stage.federation, part), getattr(stages[0].federation, part)
                np.testing.assert_array_equal(lists[client], plain[client] + row * count)
    groups = [stage.federation.groups for stage in stages]
    assert all(found is not None for found in groups)
    # 0 and 1 of group 0, and 5 of group 1, are two new groups; 0 founds another, 1 returns to its own.
    assert [found[[0, 1, 2, 5]].tolist() for found in groups if found is not None] == [
        [0, 0, 0, 1],
        [3, 3, 0, 4],
        [5, 3, 0, 4],
        [5, 0, 0, 4],
    ]


def test_who_sees_the_same_samples_under_the_same_labels_is_of_one_group() -> None:
    """Whenever it came to that, and though the partition planted it (relabelled clients)."""
    swap = {"kind": "permuted_labels", "labels": [1, 0, 2, 3, 4, 5]}
    events = [{"name": "drift", "round": t, "clients": [c], **swap} for t, c in ((1, 0), (2, 1), (3, 0))]
    stages = stages_of(events)
    assert [stage.federation.groups[[0, 1]].tolist() for stage in stages] == [  # type: ignore[index]
        [0, 0], [3, 0], [3, 3], [0, 3],
    ]  # fmt: skip
    swaps = make("relabelled", clients=6, clusters=2, swaps=[[0, 1], [2, 3]])
    by = {"kind": "permuted_labels", "labels": [1, 0, 3, 2, 4, 5]}  # what one swapped, now the other's
    drift = {"name": "drift", "round": 1, "clients": [0], **by}
    first, second = stages_of([drift], swaps)
    assert first.federation.groups is not None
    assert second.federation.groups is not None
    assert first.federation.groups[[0, 5]].tolist() == [0, 1]
    assert second.federation.groups[0] == 1


def test_drawn_permutations_change_something_for_all_alike() -> None:
    for seed in range(20):
        _, second = stages_of(
            [{"name": "drift", "round": 1, "fraction": 0.4, "kind": "permuted_labels"}],
            make("iid", clients=10),
            samples_of(classes=2),
            seed=seed,
        )
        maps = second.federation.samples.label_maps
        assert maps is not None
        assert maps.tolist() == [[0, 1], [1, 0]]
        assert len(second.drifted) == 4
        assert second.federation.groups is None


def test_drift_to_another_group() -> None:
    partition = make("tasks", tasks=[{**task, "samples": 10} for task in GROUPED])
    first, second = stages_of(
        [{"name": "drift", "round": 5, "clients": 2, "kind": "group", "to": 2}], partition
    )
    assert first.federation.groups is not None
    assert second.federation.groups is not None
    assert (first.federation.groups[second.drifted] != 2).all()
    assert (second.federation.groups[second.drifted] == 2).all()
    for client in second.drifted.tolist():
        assert labels_of(second.federation, client) == [4, 5]
        counts = np.bincount(second.federation.samples.y_train[held_by(second.federation, client)])
        assert abs(int(counts[4]) - 5) <= 2  # as the others of group 2, who have 10 samples of two labels


def test_drifted_clients_are_tested_on_whole_labels() -> None:
    partition = make("tasks", tasks=[{**task, "samples": 10} for task in GROUPED])
    drift = {"name": "drift", "round": 5, "clients": 2, "kind": "group", "to": 2}
    stages = stages_of([drift], partition, test_samples="whole_labels")
    assert stages[1].drifted.size
    for federation in (stage.federation for stage in stages):
        for client, tests in enumerate(federation.test):
            own = np.isin(federation.samples.y_test, federation.samples.y_train[held_by(federation, client)])
            assert tests.tolist() == np.flatnonzero(own).tolist()


def test_named_clients_that_are_in_the_new_group_keep_their_data() -> None:
    partition = make("tasks", tasks=[{**task, "samples": 10} for task in GROUPED])
    drift = {"name": "drift", "round": 5, "kind": "group", "to": 2}
    first = stages_of([{**drift, "clients": 2}], partition)[0].federation
    assert first.groups is not None
    there, elsewhere = np.flatnonzero(first.groups == 2).tolist(), np.flatnonzero(first.groups != 2).tolist()
    second = stages_of([{**drift, "clients": [there[0], elsewhere[0]]}], partition)[1]
    assert second.drifted.tolist() == elsewhere[:1]
    np.testing.assert_array_equal(held_by(second.federation, there[0]), held_by(first, there[0]))
    with pytest.raises(ConfigError, match=r"events.0.clients: all of these clients are in group 2 already"):
        stages_of([{**drift, "clients": there}], partition)


def held_by(federation: Federation, client: int) -> NDArray[np.int32]:
    return np.concatenate([federation.train[client], federation.validation[client]])


def test_whole_groups_exchange_their_distributions() -> None:
    equal = [{"labels": [0, 1], "clients": 2}, {"labels": [2, 3], "clients": 2}]
    events = [
        {"name": "drift", "round": 5, "group": 0, "kind": "group", "to": 1},
        {"name": "drift", "round": 5, "group": 1, "kind": "group", "to": 0},
    ]
    first, second = stages_of(events, make("tasks", tasks=equal))
    assert second.federation.groups is not None
    assert second.federation.groups.tolist() == [1, 1, 0, 0]
    assert [labels_of(second.federation, client) for client in range(4)] == [[2, 3], [2, 3], [0, 1], [0, 1]]
    assert sorted(held(first.federation)) == sorted(held(second.federation))


def test_a_drawn_group_is_another() -> None:
    _, second = stages_of([{"name": "drift", "round": 5, "fraction": 1.0, "kind": "group", "reuse": True}])
    assert second.federation.groups is not None
    own = [label for client in range(10) for label in labels_of(second.federation, client)]
    assert set(own) == {0, 1, 2, 3, 4, 5}
    for client, (old, new) in enumerate(
        zip([0] * 4 + [1] * 3 + [2] * 3, second.federation.groups.tolist(), strict=True)
    ):
        assert new != old
        assert labels_of(second.federation, client) == [2 * new, 2 * new + 1]


def test_borrowed_samples_are_given_back() -> None:
    stages = stages_of(
        [
            {"name": "drift", "round": 5, "clients": [0], "kind": "group", "to": 1, "reuse": True},
            {"name": "drift", "round": 6, "clients": [0], "kind": "group", "to": 0},
        ]
    )
    assert labels_of(stages[1].federation, 0) == [2, 3]
    assert len(np.unique(held(stages[1].federation))) < len(held(stages[1].federation))
    assert labels_of(stages[2].federation, 0) == [0, 1]
    assert sorted(held(stages[2].federation)) == sorted(held(stages[0].federation))


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"name": "leave", "round": 0, "clients": 1}, "greater than or equal to 1"),
        ({"name": "leave", "round": 1}, "concerns no clients; set clients"),
        ({"name": "leave", "round": 1, "clients": []}, "name at least one client"),
        ({"name": "leave", "round": 1, "clients": [1, 1]}, "none twice"),
        (
            {"name": "leave", "round": 1, "clients": 2, "fraction": 0.5},
            "either a number of clients or a fraction",
        ),
        ({"name": "leave", "round": 1, "clients": [2], "group": 1}, "so leave group and fraction out"),
        ({"name": "join", "round": 1, "fraction": 0.5}, "Extra inputs"),
        ({"name": "arrive", "round": 1, "clients": 2}, "no part has this name"),
        ({"name": "drift", "round": 1, "clients": 2}, "kind"),
        (
            {"name": "drift", "round": 1, "clients": 2, "kind": "group", "classes": [1]},
            "belongs to kind=new_classes",
        ),
        (
            {"name": "drift", "round": 1, "clients": 2, "kind": "permuted_labels", "labels": [0, 0]},
            "a permutation of",
        ),
        (
            {"name": "drift", "round": 1, "clients": 2, "kind": "permuted_labels", "labels": [0, 1]},
            "as it is",
        ),
        (
            {"name": "drift", "round": 1, "clients": 2, "kind": "permuted_labels", "reuse": True},
            "leave reuse out",
        ),
    ],
)
def test_what_the_sections_refuse(event: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EVENTS.validate_python([event])


def test_what_does_not_fit_the_federation() -> None:
    late = {"name": "leave", "round": 10, "clients": 1}
    assert refusal([late], rounds=10) == (
        "events.0.round: it would happen after 10 of 10 rounds; it must lie in 1..9"
    )
    assert refusal([{**late, "clients": [10]}]) == (
        "events.0.clients: there is no client 10; ids run from 0 to 9"
    )
    twice = [late, {**late, "clients": 10}]
    assert "events.1.clients: needs 10 clients after 10 rounds, but there are 9" in refusal(twice)
    assert "no client would be left after 10 rounds" in refusal([{**late, "clients": 10}])
    assert "events.1.clients: client 3 is absent" in refusal(
        [{**late, "clients": [3]}, {**late, "round": 11, "clients": [3]}]
    )
    assert "no client of group 7" in refusal([{"name": "leave", "round": 1, "group": 7}])
    iid = make("iid", clients=10)
    assert "the partition plants no groups" in refusal([{"name": "leave", "round": 1, "group": 0}], iid)
    drift = {"name": "drift", "round": 1, "clients": 1}
    assert "the partition plants no groups" in refusal([{**drift, "kind": "group"}], iid)
    assert "no client is in group 9 after 1 round; there are groups 0, 1, 2" in refusal(
        [{**drift, "kind": "group", "to": 9}]
    )
    assert "no training sample has class 6" in refusal([{**drift, "kind": "new_classes", "classes": [6]}])
    assert "events.0.labels: names 2 labels; the data have 6" in refusal(
        [{**drift, "kind": "permuted_labels", "labels": [1, 0]}]
    )
    # A client that has every class finds no other, not even among what others hold.
    message = refusal([{**drift, "kind": "new_classes", "reuse": True}], iid)
    assert "more samples that fit" in message
    assert "drift fewer clients" in message


def test_joins_that_cannot_be() -> None:
    join = {"name": "join", "round": 1}
    assert "all 10 clients of the partition would join later" in refusal([{**join, "clients": 10}])
    assert "needs 11 clients" in refusal([{**join, "clients": 11}])
    assert "client 9 joins in another event already" in refusal(
        [{**join, "clients": 1}, {**join, "clients": [9]}]
    )
    assert "client 2 joins in another event already" in refusal(
        [{**join, "clients": [2]}, {**join, "round": 3, "clients": [2]}]
    )
    assert "all 10 clients would join later" in refusal([{**join, "clients": list(range(10))}])
    assert "client 2 has not left after 1 round" in refusal([{**join, "clients": [2], "returning": True}])
    assert "no client has left after 1 round" in refusal([{**join, "returning": True}])


def test_texts_cannot_be_relabelled() -> None:
    samples = samples_of()
    texts = replace(samples, targets_train=np.zeros((len(samples.y_train), 2), np.int64))
    assert "need data whose models predict labels" in refusal(
        [{"name": "drift", "round": 1, "clients": 1, "kind": "permuted_labels"}], samples=texts
    )


# --- scale ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_hundred_thousand_clients() -> None:
    halves = [{"labels": labels, "clients": 50_000, "samples": 4} for labels in (range(5), range(5, 10))]
    samples = samples_of(each=50_000, classes=10, tests=20)
    stages = stages_of(
        [
            {"name": "join", "round": 1, "clients": 10_000},
            {"name": "leave", "round": 2, "fraction": 0.1},
            {"name": "drift", "round": 3, "fraction": 0.05, "kind": "group"},
        ],
        make("tasks", tasks=halves),
        samples,
        test_samples=10,
    )
    assert [int(stage.active.sum()) for stage in stages] == [90_000, 100_000, 90_000, 90_000]
    assert len(stages[3].drifted) == 4500
    assert len(np.unique(held(stages[3].federation))) == len(held(stages[3].federation))

"""Dealing again: the numbers are exact, no sample has two owners, and no free sample is left out."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.data.redeal import max_flow_counts, redeal, spread


def test_spread_by_hand() -> None:
    # 3 of 10 in the first place, which holds 1: the 9 others go 1 : 2.
    assert spread(10, np.array([3.0, 2.0, 4.0]), np.array([1, 9, 9])).tolist() == [1, 3, 6]
    assert spread(10, np.array([1.0, 1.0, 0.0]), np.array([2, 3, 9])).tolist() == [2, 3, 0]  # no more allowed
    assert spread(6, np.array([1.0, 1.0, 1e-9]), np.array([9, 1, 9])).tolist() == [5, 1, 0]
    assert spread(6, np.array([1.0, 1.0, 1e-9]), np.array([3, 1, 9])).tolist() == [3, 1, 2]  # the last resort
    assert spread(0, np.array([1.0]), np.array([2])).tolist() == [0]


@given(
    total=st.integers(0, 300),
    places=st.lists(
        st.tuples(st.sampled_from([0, 1e-9, 0.3, 1, 50]), st.integers(0, 60)), min_size=1, max_size=9
    ),
)
def test_spread_deals_all_there_is_room_for(total: int, places: list[tuple[float, int]]) -> None:
    weights = np.array([weight for weight, _ in places], np.float64)
    limits = np.array([limit for _, limit in places])
    dealt = spread(total, weights, limits)
    assert (dealt <= limits).all()
    assert dealt.sum() == min(total, limits[weights > 0].sum())
    assert not dealt[weights == 0].any()


def test_most_by_hand() -> None:
    # Client 0 may have both strata, client 1 the first only: so client 0 must take the second.
    allowed = np.array([[True, True], [True, False]])
    assert max_flow_counts(np.array([3, 3]), allowed, np.array([3, 3])).tolist() == [[0, 3], [3, 0]]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_most_is_the_maximum(data: st.DataObject) -> None:
    clients, strata = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    numbers = st.integers(0, 9)
    sizes = np.array(data.draw(st.lists(numbers, min_size=clients, max_size=clients)))
    supply = np.array(data.draw(st.lists(numbers, min_size=strata, max_size=strata)))
    allowed = np.array(
        data.draw(
            st.lists(
                st.lists(st.booleans(), min_size=strata, max_size=strata), min_size=clients, max_size=clients
            )
        )
    )
    flow = max_flow_counts(sizes, allowed, supply)
    assert (flow >= 0).all()
    assert not flow[~allowed].any()
    assert (flow.sum(axis=1) <= sizes).all()
    assert (flow.sum(axis=0) <= supply).all()
    # Max-flow min-cut: some set of clients, with all strata it may have, is the bottleneck.
    cuts = []
    for chosen in product([False, True], repeat=clients):
        inside = np.array(chosen)
        reached = allowed[inside].any(axis=0)
        cuts.append(int(sizes[~inside].sum() + supply[reached].sum()))
    assert flow.sum() == min(cuts)


def test_redeal_when_choosing_one_after_another_fails() -> None:
    # Strata 0, 1, 2 with two samples each; three clients who want: anything but their own.
    strata = np.array([0, 0, 1, 1, 2, 2])
    own = [np.array([0, 1]), np.array([2, 3]), np.array([4, 5])]
    weights = 1.0 - np.eye(3)
    # Whoever takes the last foreign pair leaves a client its own: the flow resolves it in every order.
    for seed in range(20):
        lists, short = redeal(
            own, weights, strata, np.ones(6, bool), np.zeros(3, bool), np.random.default_rng(seed)
        )
        assert short.tolist() == [0, 0, 0]
        assert sorted(np.concatenate(lists).tolist()) == [0, 1, 2, 3, 4, 5]
        for client, part in enumerate(lists):
            assert client not in strata[part]


def test_redeal_keeps_what_fits_and_takes_nobody_elses() -> None:
    strata = np.array([0, 0, 0, 1, 1, 1])
    free = np.array([True, True, False, True, True, False])
    rng = np.random.default_rng(0)
    (mine,), short = redeal([np.array([0, 3])], np.array([[1.0, 1.0]]), strata, free, np.array([False]), rng)
    assert sorted(mine.tolist()) == [0, 3]
    assert short.tolist() == [0]
    (mine,), short = redeal(
        [np.array([0, 1, 3])], np.array([[0.0, 1.0]]), strata, free, np.array([False]), rng
    )
    assert sorted(mine.tolist()) == [3, 4]
    assert short.tolist() == [1]
    (mine,), short = redeal(
        [np.array([0, 1, 3])], np.array([[0.0, 1.0]]), strata, free, np.array([True]), rng
    )
    assert sorted(mine.tolist()) == [3, 4, 5]  # 5 is somebody's
    assert short.tolist() == [0]


def test_who_may_borrow_gets_the_strata_as_weighed():
    """Its own samples, which it gives back, are free and of a stratum of little weight: they must not fill up
    what the free samples of the others lack."""
    strata = np.repeat([0, 1], 50)
    free = strata == 1  # its own; the 50 others are held by somebody
    weights = np.array([[9.0, 1.0]])
    lists, short = redeal(
        [np.arange(50, 70)], weights, strata, free, np.array([True]), np.random.default_rng(0)
    )
    assert short.tolist() == [0]
    assert np.bincount(strata[lists[0]]).tolist() == [18, 2]
    assert len(set(lists[0].tolist())) == 20

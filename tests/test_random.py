"""Keyed randomness: a function of the key alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfl.random import generator, hashes, key, orders, uniforms


def test_keys_do_not_change_over_versions_and_platforms():
    assert key(0, "init", 0) == 0xE65A293208D3685D
    assert key(7, "train", 3, 12) == 0xAD4191FDCAD3ABD7
    assert key(0, "a", 1) != key(0, "a", 2) != key(1, "a", 2) != key(1, "b", 2)
    assert key(0, "a", np.int64(3)) == key(0, "a", 3)
    assert 0 <= key(2**70, "x", -1) < 2**64


def test_keys_of_different_meaning_differ():
    keys = {
        key(s, p, r, c) for s in range(5) for p in ("train", "cohort") for r in range(20) for c in range(50)
    }
    assert len(keys) == 5 * 2 * 20 * 50
    assert key(0, "a", 1, 23) != key(0, "a", 12, 3)


def test_generators_are_functions_of_their_key():
    a = generator(1, "x", 2).random(5)
    generator(9, "y").random(100)
    assert (generator(1, "x", 2).random(5) == a).all()
    assert (generator(1, "x", 3).random(5) != a).any()


def test_splitmix64_by_hand():
    """One value of each step in Python's integers, modulo 2^64."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    base = key(3, "anything")
    found = hashes(base, np.array([0, 7, 2**40]), 4)
    for row, i in enumerate([0, 7, 2**40]):
        start = mix((i * golden + base) & mask)
        assert found[row].tolist() == [mix((start + k * golden) & mask) for k in range(1, 5)]


@given(
    seed=st.integers(0, 2**32),
    round=st.integers(0, 1000),
    population=st.dictionaries(st.integers(0, 10**6), st.integers(0, 40), min_size=1, max_size=8),
    epochs=st.integers(1, 4),
)
def test_orders_are_permutations_of_each_client_alone(seed, round, population, epochs):
    clients, sizes = list(population), list(population.values())
    together = orders(seed, round, clients, sizes, epochs)
    for client, n, order in zip(clients, sizes, together, strict=True):
        assert order.shape == (epochs, n)
        assert (np.sort(order, axis=1) == np.arange(n)).all()
        assert (orders(seed, round, [client], [n], epochs)[0] == order).all()


def test_orders_differ_between_epochs_rounds_clients_and_seeds():
    def order(seed: int = 0, round: int = 0, client: int = 0, epoch: int = 0) -> list[int]:
        return orders(seed, round, [client], [30], 2)[0][epoch].tolist()

    assert len({tuple(o) for o in (order(), order(1), order(0, 1), order(0, 0, 1), order(epoch=1))}) == 5


def test_orders_are_uniform():
    """Over many clients every sample comes first equally often (chi-square, 9 degrees of freedom)."""
    first = np.array([o[0, 0] for o in orders(0, 0, range(20_000), [10] * 20_000, 1)])
    counts = np.bincount(first, minlength=10)
    assert ((counts - 2000) ** 2 / 2000).sum() < 27.9  # 0.1 % of fair draws exceed it


def test_more_epochs_keep_the_earlier_ones():
    short, long = orders(0, 3, [5], [13], 2)[0], orders(0, 3, [5], [13], 4)[0]
    assert (long[:2] == short).all()


@pytest.mark.parametrize("kind", [list, np.array])
def test_no_clients(kind):
    assert orders(0, 0, kind([]), kind([]), 2) == []


def test_uniforms_are_a_client_s_own():
    """They do not depend on the other clients; if fewer are drawn, they are the first ones."""
    clients, counts = np.array([4, 0, 9, 7]), np.array([3, 0, 5, 2])
    together = uniforms(1, "a", 2, clients, counts)
    assert [len(own) for own in together] == [3, 0, 5, 2]
    for client, own in zip(clients, together, strict=True):
        (alone,) = uniforms(1, "a", 2, np.array([client]), np.array([8]))
        assert (alone[: len(own)] == own).all()
    assert uniforms(1, "a", 2, clients[:0], counts[:0]) == []


def test_uniforms_by_hand_and_in_distribution():
    """The top 53 bits of the hashes, as fractions; their ten deciles are equally full."""
    base = key(1, "a", 2)
    expected = [(int(x) >> 11) / 2**53 for x in hashes(base, np.array([6]), 4)[0]]
    assert uniforms(1, "a", 2, np.array([6]), np.array([4]))[0].tolist() == expected
    many = np.concatenate(uniforms(0, "b", 0, np.arange(500), np.full(500, 200)))
    assert 0 <= many.min() < many.max() < 1
    assert abs(np.bincount((many * 10).astype(int)) - 10_000).max() < 5 * 95
    other = uniforms(0, "b", 1, np.arange(500), np.full(500, 200))
    assert abs(np.corrcoef(many, np.concatenate(other))[0, 1]) < 0.02

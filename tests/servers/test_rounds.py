"""One round in detail: blocks, partial products, failures of clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfl.algorithms import Mixing, Plan
from rayfl.api import run
from rayfl.clients.host import partial_product
from rayfl.clients.jobs import HostSpec
from rayfl.clients.partial import Partial
from rayfl.config import load
from rayfl.data import Federation
from rayfl.errors import ClientError
from rayfl.local import OBJECTIVES
from rayfl.runtime.inline import InlineBackend
from rayfl.servers.building import build
from rayfl.servers.lps import merge
from rayfl.servers.models import Blocks, Servers
from rayfl.servers.rounds import AskedReport, Round, cut_blocks, train
from rayfl.servers.states import ClientStates
from rayfl.training import LocalWork, Training
from rayfl.training.reports import UpdateLengths
from tests.servers.serving import reduce


@given(
    groups=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    size=st.integers(1, 9),
    pinned=st.one_of(st.none(), st.integers(1, 5)),
)
def test_blocks_cover_the_cohort_once_and_keep_groups_and_actors_apart(
    groups: list[int], size: int, pinned: int | None
) -> None:
    group = np.sort(np.array(groups))
    cohort = np.arange(len(group)) * 2
    blocks = cut_blocks(Plan(cohort, group, group), size, pinned)
    assert np.concatenate([cohort[b] for b in blocks]).tolist() == cohort.tolist()
    for block in blocks:
        assert 1 <= len(cohort[block]) <= size
        assert len(set(group[block])) == 1
        assert pinned is None or len(set(cohort[block] // pinned)) == 1


def test_partial_products_sum_to_the_row_of_a_w() -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((5, 7)).astype(np.float32)
    weights = np.array([3.0, 0.0, 5.0, 2.0, 10.0])
    parts = [
        Partial(*partial_product(weights[s], torch.from_numpy(w[s]))).cut()
        for s in (slice(0, 2), slice(2, 5))
    ]
    new, common = reduce(((0, 7),), ((1, 3), (5, 6)), np.zeros(7, np.float32), *parts)
    exact = weights @ w.astype(np.float64)
    np.testing.assert_array_equal(new, (exact / 20).astype(np.float32))
    np.testing.assert_allclose(common.common.total, exact[[1, 2, 5]], rtol=1e-15)
    assert common.common.weight == 20


def test_a_model_that_nobody_trained_is_kept() -> None:
    model = np.arange(4, dtype=np.float32)
    nothing = Partial(np.zeros(4), 0.0)
    new, common = reduce(((0, 4),), ((0, 2),), model, nothing)
    np.testing.assert_array_equal(new, model)
    assert merge([common.common], [0.0]) is None


def test_personal_numbers_are_not_averaged() -> None:
    model = np.array([9, 9, 9, 9], np.float32)
    new, _ = reduce(((0, 1), (3, 4)), (), model, Partial(np.array([2.0, 4.0]), 2.0))
    np.testing.assert_array_equal(new, [1, 9, 9, 2])


def test_the_gps_weighs_clusters_by_what_took_part() -> None:
    sums = [Partial(np.array([2.0]), 1.0), Partial(np.array([30.0]), 3.0)]
    np.testing.assert_array_equal(merge(sums, [1.0, 3.0]), [8.0])  # (1 * 2 + 3 * 10) / 4
    np.testing.assert_array_equal(merge(sums, [3.0, 3.0]), [6.0])  # since its last step the first had 3
    sums.append(Partial(np.array([20.0]), 0.0))  # trained nothing now: its model, and 4 before
    np.testing.assert_array_equal(merge(sums, [1.0, 3.0, 4.0]), [14.0])  # (2 + 30 + 80) / 8


def _servers(
    settings: dict[str, Any], backend: InlineBackend, **options: Any
) -> tuple[Servers, Federation, HostSpec]:
    stages, host = build(load(settings))
    federation = stages[0].federation
    backend.start((federation,), host)
    servers = Servers(backend, host.spec, federation, blocks=Blocks(lambda cohort: 2), **options)
    servers.models = [host.spec.initial()]
    return servers, federation, host


def test_a_round_is_the_weighted_mean_of_the_clients_models(settings: dict[str, Any]) -> None:
    backend = InlineBackend()
    try:
        servers, federation, host = _servers(settings, backend)
        cohort = np.array([1, 4, 6])
        plan = Plan(cohort, np.zeros(3, np.int64), np.zeros(3, np.int64))
        work = LocalWork(epochs=1, batch_size=10, lr=0.1)
        sizes = federation.sizes[cohort].astype(np.float64)
        mixing = Mixing(sp.csr_array(sizes[None, :]))
        alone = []
        for i, client in enumerate(cohort):
            servers.models = [host.spec.initial()]
            one = Plan(cohort[i : i + 1], plan.start[:1], plan.group[:1])
            train(servers, Round(0, one, work, Mixing(sp.csr_array(np.ones((1, 1))))))
            alone.append(servers.models[0].astype(np.float64))
            assert client == one.cohort[0]
        servers.models = [host.spec.initial()]
        train(servers, Round(0, plan, work, mixing))
        expected = (sizes @ np.stack(alone) / sizes.sum()).astype(np.float32)
        np.testing.assert_allclose(servers.models[0], expected, rtol=0, atol=1e-7)
    finally:
        backend.close()


def _break(backend: InlineBackend, clients: set[int]) -> None:
    """Let the training of some clients raise."""
    engine = backend._host.engine
    original = engine.train

    def train(work: Any, round: int, ids: Any, indices: Any, start: Any, terms: Any) -> Any:
        block = original(work, round, ids, indices, start, terms)
        failures = {row: "Traceback\nValueError: boom" for row, c in enumerate(ids) if c in clients}
        return replace(block, failures=failures)

    engine.train = train  # type: ignore[method-assign]


@pytest.mark.parametrize("updates", [False, True])
def test_the_lengths_of_updates_are_told_if_wanted(settings: dict[str, Any], updates: bool) -> None:
    backend = InlineBackend()
    try:
        servers, federation, host = _servers(settings, backend)
        cohort = np.array([0, 4, 7])
        mixing = Mixing(sp.csr_array(federation.sizes[cohort][None, :].astype(np.float64)))
        plan, work = Plan(cohort, cohort * 0, cohort * 0), LocalWork(1, 10, 0.1)
        quiet = train(servers, Round(0, plan, work, mixing))
        assert quiet.reports == {}
        servers.models = [host.spec.initial()]
        lengths = {"norms": AskedReport(UpdateLengths(), UpdateLengths())}
        told = train(servers, Round(0, plan, work, mixing, updates=updates, reports=lengths))
        for place, client in enumerate(cohort.tolist()):
            servers.models = [host.spec.initial()]
            alone = np.array([client])
            one = Mixing(sp.csr_array(np.ones((1, 1))))
            train(servers, Round(0, Plan(alone, alone * 0, alone * 0), work, one))
            moved = servers.models[0].astype(np.float64) - host.spec.initial()
            assert told.reports["norms"][place] == pytest.approx(np.linalg.norm(moved), rel=1e-5)
    finally:
        backend.close()


def test_a_failing_client_stops_the_round_and_is_named(settings: dict[str, Any]) -> None:
    backend = InlineBackend()
    try:
        servers, federation, host = _servers(settings, backend)
        _break(backend, {5})
        everyone = np.arange(federation.clients)
        plan = Plan(everyone, everyone * 0, everyone * 0)
        mixing = Mixing(sp.csr_array(federation.sizes[None, :].astype(np.float64)))
        with pytest.raises(ClientError, match="client 5 failed in round 8: ValueError: boom"):
            train(servers, Round(7, plan, LocalWork(1, 10, 0.1), mixing))
        np.testing.assert_array_equal(servers.models[0], host.spec.initial())
    finally:
        backend.close()


def test_a_tolerated_failure_is_left_out_of_the_average(settings: dict[str, Any]) -> None:
    settings["training"]["engine"] = "loop"  # no client's last bit depends on who shares its block
    backend = InlineBackend()
    try:
        servers, federation, host = _servers(settings, backend, tolerate=1)
        work = LocalWork(1, 10, 0.1)

        def trained(clients: list[int]) -> Any:
            cohort = np.array(clients)
            servers.models = [host.spec.initial()]
            mixing = Mixing(sp.csr_array(federation.sizes[cohort][None, :].astype(np.float64)))
            report = train(servers, Round(0, Plan(cohort, cohort * 0, cohort * 0), work, mixing))
            return servers.models[0], report

        without, _ = trained([0, 1, 3])
        _break(backend, {2})
        left_out, report = trained([0, 1, 2, 3])
        np.testing.assert_array_equal(left_out, without)
        assert list(report.failures) == [2]
        assert np.isnan(report.losses[2])
    finally:
        backend.close()


@pytest.mark.parametrize("models", [1, 3])
def test_fednova_leaves_a_failure_out_of_its_steps(settings: dict[str, Any], models: int) -> None:
    """As if the client had not been asked, of which the others' weights know through tau_eff; also where the
    trained rows travel, because blocks have more sums than clients."""
    tasks = [{"labels": [0, 1, 2], "clients": 2, "samples": n} for n in (15, 40, 65)]
    settings = {**settings, "partition": {"name": "tasks", "tasks": tasks}}
    backend, local = InlineBackend(), OBJECTIVES["fednova"]()
    try:
        servers, federation, host = _servers(settings, backend, tolerate=1)
        training = Training(epochs=2, batch_size=10)

        def trained(clients: list[int]) -> Any:
            cohort = np.array(clients)
            servers.models = [host.spec.initial()] * models
            weights, keep = local.weights(federation.sizes[cohort], cohort * 0, training)
            assert keep is not None
            a, b = (sp.csr_array(np.tile(x, (models, 1))) for x in (weights, keep))
            plan = Plan(cohort, cohort * 0, cohort * 0)
            report = train(servers, Round(0, plan, LocalWork(2, 10, 0.1), Mixing(a, keep=b), local=local))
            return servers.models[-1], report

        everybody, _ = trained([0, 1, 2, 4])
        without, _ = trained([0, 1, 2])
        _break(backend, {4})
        left_out, report = trained([0, 1, 2, 4])
        assert list(report.failures) == [4]
        np.testing.assert_allclose(left_out, without, rtol=0, atol=1e-7)
        assert np.abs(everybody - without).max() > 1e-3
    finally:
        backend.close()


def test_a_scaled_row_keeps_more_of_the_old_model_and_averages_running_statistics() -> None:
    """Weights 4 and 2 of n = 3 and 5, halved: 2 and 1, and 5 of 8 for the model; statistics by n."""
    rows = np.array([[1.0, 1.0], [4.0, 9.0]])
    a, n = np.array([4.0, 2.0]), np.array([3.0, 5.0])
    total = np.array([a @ rows[:, 0], n @ rows[:, 1]])
    part = Partial(total, 6.0, keep=2.0, statistics=1)
    scale = Partial(np.zeros(1), 0.0, scale=0.5)
    new, _ = reduce(((0, 2),), (), np.full(2, 10.0, np.float32), part, scale)
    np.testing.assert_allclose(new, [(2 * 1 + 1 * 4 + 5 * 10) / 8, (3 * 1 + 5 * 9) / 8], rtol=1e-6)


def test_a_diverging_client_is_an_error_that_helps(settings: dict[str, Any]) -> None:
    wild = {**settings, "training": {**settings["training"], "lr": 1e30}}
    with pytest.raises(ClientError, match=r"client \d+ failed in round 1: .*smaller training.lr"):
        run(wild)


def test_client_states_are_found_where_they_are_and_packed() -> None:
    backend = InlineBackend()
    try:
        states = ClientStates()
        for this_round in range(200):
            clients = [this_round % 7, 7 + this_round % 5, 300 + this_round]
            states.update(
                clients,
                np.array([[this_round, c] for c in clients], np.float32),
                [True, True, this_round < 100],
            )
            states.pack(backend)
        ids, rows = states.fetch(backend)
        assert ids.tolist() == [*range(12), *range(300, 400)]
        np.testing.assert_array_equal(rows[:, 1], ids)
        latest = {c: max(t for t in range(200) if t % 7 == c) for c in range(7)}
        np.testing.assert_array_equal(rows[:7, 0], [latest[c] for c in range(7)])
        assert sum(states._held.values()) <= 2 * len(states) + 256 + 3
        restored = ClientStates.restore(backend, ids, rows)
        np.testing.assert_array_equal(restored.fetch(backend)[1], rows)
        objects, places = restored.locate([399, 999, 3])
        assert places[1] is None
        assert places[0] is not None
        np.testing.assert_array_equal(objects["state", places[0][0]][places[0][1]], rows[-1])
    finally:
        backend.close()


def test_packing_copies_few_rows_and_bounds_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """400 clients, a fifth of them a round: no more is held than twice what is used, and one object."""
    rng, states, newest, copied = np.random.default_rng(0), ClientStates(), {}, 0
    backend = InlineBackend()
    call = backend.call

    def counted(function: Callable[..., Any], *args: Any) -> Any:
        nonlocal copied
        packed = call(function, *args)
        copied += len(packed)
        return packed

    monkeypatch.setattr(backend, "call", counted)
    rounds = 60
    for round in range(rounds):
        for block in rng.permutation(400)[:80].reshape(8, 10):
            rows = np.stack([block, np.full(10, round)], axis=1).astype(np.float32)
            states.update(block.tolist(), rows)
            newest.update(dict.fromkeys(block.tolist(), round))
        states.pack(backend)
        held = sum(len(rows) for rows in states._objects.values())
        assert held <= 2 * len(states) + 256
    backend.close()
    ids, rows = states.fetch(backend)
    assert ids.tolist() == sorted(newest)
    assert rows.tolist() == [[client, newest[client]] for client in ids]
    assert 0 < copied < 0.3 * 80 * rounds  # packing everything each time would copy 0.4 for each new row

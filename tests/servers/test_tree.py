"""Sums in a tree: of so many blocks at a time, by config and cohort alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import rayfl
from rayfl.algorithms import Plan
from rayfl.backend import Objects
from rayfl.clients.partial import Partial, added
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from rayfl.servers.lps import LocalServer, ReduceJob
from rayfl.servers.rounds import cut_blocks, cut_groups
from tests.runs import METHODS
from tests.servers.serving import reduce


def _run(settings: dict[str, Any], method: str, **execution: Any) -> NDArray[np.float32]:
    found = rayfl.run(
        {
            **settings,
            "algorithm": method,
            **METHODS[method],
            "execution": {"backend": "inline", "block_size": 1, **execution},
        }
    )
    return Checkpoint.load(checkpoints(found.path / "checkpoints")[-1]).models


@pytest.mark.parametrize(
    "method",
    ["fedavg", "mt_hfl, scaffold", "mt_hfl, fednova", "sub_fedavg", "mtl", "hierfavg", "cfl", "flis_dc"],
)
def test_the_models_are_those_of_all_sums_at_once(
    method: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the last bit; and no LPS gets more than two sums of a model."""
    flat, most = _run(settings, method), [0]
    reduce = LocalServer.reduce

    def watched(self: LocalServer, job: ReduceJob, objects: Objects) -> Any:
        most.append(sum(kind == "sum" for kind, _ in objects))
        return reduce(self, job, objects)

    monkeypatch.setattr(LocalServer, "reduce", watched)
    tree = _run(settings, method, fan_in=2)
    np.testing.assert_allclose(tree, flat, rtol=1e-5, atol=1e-7)
    assert max(most) <= 2


def test_the_parts_of_blocks_as_one_are_the_same_part() -> None:
    """Weights of each number, what is kept of the old model, running statistics, the server's vector."""
    rng = np.random.default_rng(0)
    parts = [
        Partial(rng.random(6), rng.random(6), keep=float(k), extra=rng.random(4), statistics=2)
        for k in range(5)
    ]
    old = rng.random(6).astype(np.float32)
    grouped = [added(parts[:2]), added(parts[2:4]), parts[4]]
    np.testing.assert_allclose(
        reduce(((0, 6),), (), old, *grouped)[0], reduce(((0, 6),), (), old, *parts)[0], rtol=1e-6
    )
    both = added(parts)
    assert both.extra is not None
    np.testing.assert_allclose(np.concatenate(both.extra), sum(p.extra for p in parts))


def test_the_order_of_a_tree_is_that_of_the_blocks() -> None:
    """Which blocks are added first is seen in the sum, so it must not depend on where they were trained."""
    one, many = Partial(np.ones(1), 1.0), Partial(np.full(1, 1e16), 1.0)
    minus = Partial(np.full(1, -1e16), 1.0)
    flat, tree = added([many, one, minus, one]), added([added([many, one]), added([minus, one])])
    assert (flat.total[0], tree.total[0]) == (1.0, 0.0)


def test_groups_are_of_one_cluster_and_one_actor() -> None:
    cohort = np.arange(20)
    plan = Plan(cohort, cohort // 10, cohort // 10)
    blocks = cut_blocks(plan, 2, None)
    found = cut_groups(plan, blocks, 3, None)
    assert [(g.start, g.stop) for g in found] == [(0, 3), (3, 5), (5, 8), (8, 10)]
    blocks = cut_blocks(plan, 2, 4)
    homes = [{int(plan.cohort[blocks[b]][0]) // 4 for b in range(g.start, g.stop)} for g in
             cut_groups(plan, blocks, 3, 4)]  # fmt: skip
    assert all(len(home) == 1 for home in homes)


def test_a_client_that_fails_is_named_in_a_group_too(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rayfl.training.loop import LoopEngine

    train = LoopEngine.train

    def broken(self: LoopEngine, work: Any, round: int, clients: list[int], *rest: Any) -> Any:
        if 4 in clients:
            raise RuntimeError("no such pixel")
        return train(self, work, round, clients, *rest)

    monkeypatch.setattr(LoopEngine, "train", broken)
    training = {**settings["training"], "engine": "loop", "participation": 1.0}
    with pytest.raises(Exception, match="no such pixel"):
        rayfl.run({**settings, "training": training, "execution": {**settings["execution"], "fan_in": 3}})

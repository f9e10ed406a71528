"""Client curriculum: who is eligible and who is drawn, by hand; whole runs; what it costs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from rayfl.algorithms import Plan, ServerState
from rayfl.algorithms.base import only_asked, sample_cohort
from rayfl.config import load
from rayfl.sampling import SAMPLINGS, Candidates
from rayfl.servers import testing
from rayfl.servers.building import build
from rayfl.servers.models import Servers
from rayfl.training.batches import Batches
from tests.algorithms.fakes import setup
from tests.runs import SMALL, Run

LOSSES = np.array([0.5, 3.0, 1.0, 0.1, 2.0, 0.9, 4.0, 0.2, 5.0, 0.8])
IDS = np.arange(100, 110)
P = 64 * 6 + 6 + 6 * 10 + 10


def candidates(
    round: int, count: int = 2, rounds: int = 10, seed: int = 0, losses: Any = LOSSES
) -> Candidates:
    def asked() -> np.ndarray:
        if losses is None:
            raise AssertionError("nobody needs to be asked")
        return losses

    def related() -> Any:
        raise AssertionError("nobody's relations matter")

    return Candidates(
        ids=IDS,
        count=count,
        sizes=np.full(10, 5),
        labels=np.zeros(10, np.int64),
        round=round,
        rounds=rounds,
        seed=seed,
        losses=asked,
        relatedness=related,
    )


def drawn(round: int, seeds: int = 300, **fields: Any) -> set[int]:
    """Everybody who takes part with some seed."""
    sampling = SAMPLINGS["curriculum"](cohorts="draw", **fields)
    found: set[int] = set()
    for seed in range(seeds):
        cohort = sampling.cohort(candidates(round, seed=seed))
        assert len(cohort) == 2
        assert (np.diff(cohort) > 0).all()
        found |= set(cohort.tolist())
    return found


def test_the_eligible_by_hand():
    """Ten clients, ten rounds, linear, a = 0.8, b = 0.2: 2, 3, 4, ... clients of the ranking."""
    ranking = [103, 107, 100, 109, 105, 102, 104, 101, 106, 108]
    for round, eligible in ((0, 2), (1, 3), (4, 6), (7, 9), (8, 10), (9, 10)):
        assert drawn(round) == set(ranking[:eligible])
        assert drawn(round, order="anti") == set(ranking[::-1][:eligible])


def test_all_eligible_are_equally_likely():
    """Of four clients, 2 of them 2000 times: 1000 each (standard deviation 22)."""
    sampling = SAMPLINGS["curriculum"](b=0.4, cohorts="draw")
    cohorts = [sampling.cohort(candidates(0, seed=seed)) for seed in range(2000)]
    counts = np.bincount(np.concatenate(cohorts) - 100, minlength=10)
    assert np.flatnonzero(counts).tolist() == [0, 3, 7, 9]
    assert abs(counts[[0, 3, 7, 9]] - 1000).max() < 5 * 23


def test_never_fewer_than_are_wanted():
    cohort = SAMPLINGS["curriculum"](b=0.01).cohort(candidates(0, count=5))
    assert sorted(cohort.tolist()) == [100, 103, 105, 107, 109]


@pytest.mark.parametrize("count", [1, 3, 10, 12])
def test_when_all_are_eligible_it_is_uniform(count: int):
    """The same cohorts, and nobody is asked for a loss."""
    uniform = SAMPLINGS["uniform"]()
    for round, b in ((0, 1.0), (3, 1.0), (8, 0.2), (9, 0.2)):
        for seed in range(20):
            open_to_all = candidates(round, count, seed=seed, losses=None)
            expected = uniform.cohort(open_to_all).tolist()
            assert SAMPLINGS["curriculum"](b=b, cohorts="draw").cohort(open_to_all).tolist() == expected


# --- sweeps --------------------------------------------------------------------------------------------


def swept(rounds: int, losses: Any = LOSSES, gone: dict[int, list[int]] | None = None, **fields: Any) -> list:
    """Round by round: those who take part, and whether all were asked for their loss."""
    config = load({"training": {"participation": 0.3}, "sampling": {"name": "curriculum", **fields}})
    state, found = ServerState(0, 1, np.zeros(10, np.int64)), []
    for round in range(rounds):
        sizes = np.full(10, 5)
        for client in (gone or {}).get(round, []):
            sizes[client] = 0
        here = setup("fedavg", sizes=sizes.tolist())
        here = dataclasses.replace(here, rounds=rounds, sampling=config.sampling, training=config.training)
        asked: list[bool] = []
        clients = Losses(losses, asked)
        state, cohort = sample_cohort(here, dataclasses.replace(state, round=round), clients)
        plan = Plan(cohort, np.zeros_like(cohort), np.zeros_like(cohort))
        assert only_asked(here, state, plan) == (len(here.present) - len(cohort) if asked else 0)
        found.append((cohort.tolist(), bool(asked)))
    return found


class Losses:
    """Clients that say what their losses are."""

    def __init__(self, losses: np.ndarray, asked: list[bool]) -> None:
        self.losses, self.asked = losses, asked

    def local_losses(self, clients: np.ndarray, models: np.ndarray) -> np.ndarray:
        self.asked.append(True)
        return self.losses[clients]


def test_a_sweep_takes_every_eligible_client_once():
    """Three of ten clients a round. K(t) is 6, 8, 10 where sweeps begin: cohorts of 3 and what is left."""
    ranking = [3, 7, 0, 9, 5, 2, 4, 1, 6, 8]
    found = swept(10, a=0.5, b=0.6)
    assert [len(cohort) for cohort, _ in found] == [3, 3, 3, 3, 2, 3, 3, 3, 1, 3]
    assert [asked for _, asked in found] == [True, False, True, False, False] + [False] * 5
    for begin, end, eligible in ((0, 2, 6), (2, 5, 8), (5, 9, 10)):
        took_part = [client for cohort, _ in found[begin:end] for client in cohort]
        assert sorted(took_part) == sorted(ranking[:eligible])
    hard = swept(2, a=0.5, b=0.6, order="anti")
    assert sorted(hard[0][0] + hard[1][0]) == sorted(ranking[-6:])


def test_who_left_waits_no_longer():
    """Of the first sweep's six, those of its second mini-batch leave: the next sweep begins earlier."""
    everyone = swept(4, a=1.0, b=0.6)
    first, second = everyone[0][0], everyone[1][0]
    found = swept(4, a=1.0, b=0.6, gone={1: second, 2: second, 3: second})
    assert found[0] == everyone[0]
    assert found[1][1]  # ranked again
    one_left = swept(4, a=1.0, b=0.6, gone={1: second[:1]})
    assert one_left[1] == (second[1:], False)
    assert set(first).isdisjoint(second)


def test_mini_batches_are_random():
    """Of six eligible clients each is in the first mini-batch half of the time (standard deviation 10)."""
    sampling, count = SAMPLINGS["curriculum"](b=0.6), np.zeros(10, int)
    for seed in range(400):
        queue = sampling.cohort(candidates(0, count=3, seed=seed))
        assert len(queue) == 6
        count[queue[:3] - 100] += 1
    assert abs(count[[3, 7, 0, 9, 5, 2]] - 200).max() < 50
    assert count.sum() == 1200


def test_who_is_asked():
    sampling = SAMPLINGS["curriculum"]()
    assert [sampling.asked(10, 2, round, 10) for round in range(10)] == [10] * 8 + [0, 0]
    assert sampling.asked(10, 10, 0, 10) == 0
    assert SAMPLINGS["uniform"]().asked(10, 2, 0, 10) == 0


# --- whole runs ----------------------------------------------------------------------------------------

PARTIAL = "training.participation=0.25"  # two of eight clients
SWEEP = {"name": "curriculum"}


def test_open_to_all_it_is_fedavg(run: Run):
    plain = run(PARTIAL)
    draw = {"name": "curriculum", "cohorts": "draw"}
    assert run(PARTIAL, sampling={**draw, "b": 1.0}).bits == plain.bits
    found = [
        run(PARTIAL, sampling={**how, "order": o}) for how in (draw, SWEEP) for o in ("curriculum", "anti")
    ]
    assert len({plain.bits, *(ran.bits for ran in found)}) == 5


def test_the_first_clients_are_those_of_least_loss(run: Run):
    """The pool of round 0 is as large as the cohort: the two clients whose data the initial model likes."""
    (stage, *_), host = build(load(SMALL))
    federation = stage.federation
    module, batches = host.spec.build().eval(), Batches(federation.samples, torch.device("cpu"))
    with torch.inference_mode():
        losses = [
            float(functional.cross_entropy(module(x), y)) for x, y in map(batches.train, federation.train)
        ]
    for order, wanted in (("curriculum", np.argsort(losses)[:2]), ("anti", np.argsort(losses)[-2:])):
        # Client states (both scores) tell who took part.
        ran = run(
            PARTIAL,
            "rounds=1",
            sampling={"name": "curriculum", "order": order, "b": 0.01},
            order={"name": "curriculum", "score": "both"},
        )
        assert ran.last.state_clients.tolist() == sorted(wanted.tolist())


def test_what_it_costs(run: Run):
    """Eight clients download the model while not all are eligible (a T = 2.4 of 3 rounds), then two."""
    draw = {"name": "curriculum", "cohorts": "draw"}
    found = run(PARTIAL, sampling=draw).result.communication
    down = found[(found["direction"] == "down") & (found["kind"] == "model")].set_index("round")["bytes"]
    up = found[(found["direction"] == "up") & (found["kind"] == "model")].set_index("round")["bytes"]
    assert down.tolist() == [4 * P * 8] * 3
    assert up.tolist() == [4 * P * 2] * 3
    short = run(PARTIAL, sampling={**draw, "a": 0.5}).result.communication
    down = short[(short["direction"] == "down") & (short["kind"] == "model")]["bytes"]
    assert down.tolist() == [4 * P * 8] * 2 + [4 * P * 2]


def test_layers_of_the_client_s_own_count(run: Run):
    """The hardest clients first: who has trained is none of them any more, though the server's model never
    changes where clients share nothing."""
    hard = {"name": "curriculum", "order": "anti", "b": 0.01, "a": 1.0, "cohorts": "draw"}
    for method in ({"name": "solo", "sampled": True}, {"name": "lg_fedavg", "local_layers": 2}):
        first, second = (
            run(PARTIAL, f"rounds={r}", "training.epochs=20", algorithm=method, sampling=hard) for r in (1, 2)
        )
        assert len(first.last.state_clients) == 2
        assert len(second.last.state_clients) == 4


@pytest.mark.parametrize("method", ["mtl", "sub_fedavg"])
def test_models_of_the_client_s_own_count(method: str, run: Run, monkeypatch: pytest.MonkeyPatch):
    """In every round all are asked: those who took part about their own model."""
    asked: list[np.ndarray] = []
    own = testing.local_losses

    def spy(self: Servers, clients: Any, models: Any, ids: Any, part: Any, *rest: Any) -> Any:
        found = own(self, clients, models, ids, part, *rest)
        of_servers = testing.losses(self, clients, ids, part)[:, 0]
        took_part = np.array([client in self.states for client in clients.tolist()])
        assert (~np.isclose(found, of_servers, rtol=1e-5)).tolist() == took_part.tolist()
        asked.append(took_part)
        return found

    monkeypatch.setattr(testing, "local_losses", spy)
    local = {"mtl": {"lam": 0.5}, "sub_fedavg": {"step": 0.3, "accuracy": 0.0}}[method]
    run(
        PARTIAL,
        "training.epochs=5",
        "partition.validation=0.2",
        algorithm=method,
        local=local,
        sampling={"name": "curriculum", "a": 1.0, "cohorts": "draw"},
    )
    assert [took_part.any() for took_part in asked] == [False, True, True]


def test_each_client_is_asked_about_one_model(run: Run, monkeypatch: pytest.MonkeyPatch):
    """Not about those of other clusters."""
    asked: list[tuple[list[int], list[int]]] = []
    own = testing.local_losses

    def spy(self: Servers, clients: Any, models: Any, *rest: Any) -> Any:
        asked.append((clients.tolist(), models.tolist()))
        found = own(self, clients, models, *rest)
        everything = testing.losses(self, clients, *rest[:2])
        np.testing.assert_allclose(found, everything[np.arange(len(clients)), models], rtol=1e-5)
        return found

    monkeypatch.setattr(testing, "local_losses", spy)
    ran = run(
        PARTIAL,
        "seed=5",
        algorithm="pacfl",
        clustering={"n_clusters": 3},
        sampling={"name": "curriculum", "cohorts": "draw"},
    )
    labels = ran.last.state.assignment.tolist()
    assert len(set(labels)) == 3
    assert asked == [(list(range(8)), labels)] * 3


def test_data_and_client_curricula_together(run: Run):
    both = {"order": {"name": "curriculum"}, "sampling": {"name": "curriculum"}}
    runs = [
        run(PARTIAL, **{k: v for k, v in both.items() if k in keys})
        for keys in ("", "order", "sampling", both)
    ]
    assert len({ran.bits for ran in runs}) == 4
    assert runs[2].result.rounds["clients"].tolist() == [2, 2, 2]


def test_a_sweep_costs_one_ranking(run: Run):
    """Five rounds: K = 6 of 8 clients, two a round: asked once for three rounds; then all are eligible."""
    ran = run(PARTIAL, "rounds=5", sampling={**SWEEP, "a": 0.5, "b": 0.75})
    found = ran.result.communication
    down = found[(found["direction"] == "down") & (found["kind"] == "model")].set_index("round")["bytes"]
    assert down.tolist() == [4 * P * clients for clients in (8, 2, 2, 2, 2)]
    assert ran.result.rounds["clients"].tolist() == [2] * 5
    assert len(ran.last.state.sweep.waiting) == 4  # of the second sweep's eight

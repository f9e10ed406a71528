"""MTL: by hand over several rounds, at its limits, and what a published implementation got wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import rayfl
from rayfl import cli
from rayfl.algorithms import Mixing, Plan
from rayfl.config import load, reload
from rayfl.errors import ConfigError
from rayfl.local.mtl import MTL
from rayfl.runtime.inline import InlineBackend
from rayfl.servers.building import build
from rayfl.servers.models import Blocks, Servers
from rayfl.servers.rounds import Round, train
from rayfl.training import LocalWork
from rayfl.training.loop import LoopEngine
from tests.algorithms.test_identities import GROUPS, N, P, Ran, Run, run, same, same_curves
from tests.local.conftest import CLASSES, ETA, FEATURES, ROUND, Problem
from tests.local.conftest import P as SMALL
from tests.local.conftest import Ran as Small
from tests.training.bounds import rounding

__all__ = ["run"]

HALF = "training.participation=0.4"


def mtl(lam: float) -> dict[str, Any]:
    return {"name": "mtl", "lam": lam}


def by_hand(
    problem: Problem, cohorts: list[list[int]], lam: float, momentum: float = 0.0
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """w_mean and the w_k: gradient steps on ``l_k(w) + (lambda / 2) |w - w_mean|^2``, in batches of 7."""
    start = problem.start()
    mean, own = start, dict[int, np.ndarray]()
    for t, cohort in enumerate(cohorts):
        for i in cohort:
            own[i] = problem.sgd(
                own.get(i, start),
                i,
                problem.batches(i, t, 2, 7),
                momentum=momentum,
                extra=lambda w, a=mean: lam * (w - a),
            )
        mean = np.mean(list(own.values()), axis=0)
    return mean, own


def assert_state(
    ran: Small, expected: tuple[np.ndarray, dict[int, np.ndarray]], atol: float = 6 * ROUND
) -> None:
    mean, own = expected
    np.testing.assert_allclose(ran.model, mean, rtol=0, atol=atol)
    assert ran.last.state_clients.tolist() == sorted(own)
    for i, w in own.items():
        np.testing.assert_allclose(ran.client_state(i), w, rtol=0, atol=atol)


# --- by hand -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("lam", [0.3, 3.0])
def test_two_clients_by_hand(problem: Problem, lam: float, momentum: float):
    overrides = "rounds=3", "training.batch_size=7", f"training.momentum={momentum}"
    ran = problem.run(*overrides, local=mtl(lam))
    expected = by_hand(problem, [[0, 1]] * 3, lam, momentum)
    assert_state(ran, expected)
    alone = by_hand(problem, [[0, 1]] * 3, 0.0, momentum)
    assert np.abs(expected[1][0] - alone[1][0]).max() > 1e-2


def test_one_of_two_clients_a_round_by_hand(problem: Problem):
    """The mean is of the clients that took part so far, with what each had when it last did."""
    settings = "training.participation=0.5", "training.batch_size=7"
    ran = {t: problem.run(f"rounds={t}", *settings, local=mtl(0.5)) for t in range(1, 7)}
    cohorts: list[list[int]] = []
    before: dict[int, np.ndarray] = {}
    for now in ran.values():
        after = {client: now.client_state(client) for client in now.last.state_clients.tolist()}
        changed = [i for i, w in after.items() if i not in before or not same(w, before[i])]
        before = after
        assert len(changed) == 1
        cohorts.append(changed)
        assert_state(now, by_hand(problem, cohorts, 0.5))
    assert {c for cohort in cohorts for c in cohort} == {0, 1}
    assert cohorts[0] == cohorts[1] or cohorts[-1] == cohorts[-2]  # somebody was absent, and counted


def test_the_optimum_is_that_of_the_objective(problem: Problem):
    """Where it comes to rest, the gradient of ``sum_k l_k + (lambda / 2) sum_k |w_k - w_mean|^2 + (0.2 / 2)
    |W|^2`` is zero in all models; here with one client of two in a round."""
    settings = "rounds=200", "training.participation=0.5", "training.weight_decay=0.2"
    ran = problem.run(*settings, local=mtl(1.0), evaluation={"every": 200})
    models = ran.last.state_rows.astype(np.float64)
    mean = models.mean(axis=0)
    for i in (0, 1):
        slope = problem.gradient(models[i], i) + 0.2 * models[i]
        np.testing.assert_allclose(slope + (models[i] - mean), 0, atol=1e-4)
        assert np.linalg.norm(slope) > 0.1  # not the optimum of SOLO
    np.testing.assert_allclose(ran.model, mean, atol=1e-5)


def test_who_has_not_taken_part_is_tested_with_the_mean(problem: Problem):
    """With one client of two trained the mean is its model, and the other is tested with that."""
    ran = problem.run("training.participation=0.5", "training.epochs=20", local=mtl(0.1))
    assert len(ran.last.state_clients) == 1
    samples = np.load(problem.file)
    weight = ran.model[: FEATURES * CLASSES].reshape(CLASSES, FEATURES)
    right = (samples["x_test"] @ weight.T + ran.model[FEATURES * CLASSES :]).argmax(1) == samples["y_test"]
    expected = [100 * right[np.isin(samples["y_test"], own)].mean() for own in ([0, 1], [2, 3])]
    assert ran.result.clients["accuracy_last"].tolist() == pytest.approx(expected)


def test_bytes_are_a_model_up_and_the_mean_down(problem: Problem):
    ran = problem.run("rounds=3", local=mtl(0.1))
    assert ran.bytes("up") == ran.bytes("down") == 3 * 2 * SMALL * 4
    ran = problem.run("rounds=3", "training.participation=0.5", local=mtl(0.1))
    assert ran.bytes("up") == ran.bytes("down") == 3 * SMALL * 4


# --- limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_no_pull_is_solo_bit_for_bit(run: Run, momentum: float):
    settings = f"training.momentum={momentum}", "evaluation.every=1"
    everybody, solo = run("mtl", *settings, local=mtl(0)), run("solo", *settings)
    assert same(everybody.states, solo.states)
    same_curves(everybody, solo)
    some = run("mtl", *settings, HALF, local=mtl(0))
    alone = run({"name": "solo", "sampled": True}, *settings, HALF)  # type: ignore[arg-type]
    assert some.last.state_clients.tolist() == alone.last.state_clients.tolist()
    assert 4 < len(some.states) < N
    assert same(some.states, alone.states)
    # Those who never took part are tested with the mean, not with w_0.
    known = some.last.state_clients
    for column in ("accuracy_last", "accuracy_best"):
        pd.testing.assert_series_equal(
            some.result.clients[column][known], alone.result.clients[column][known], check_exact=True
        )


def test_the_first_round_is_that_of_fedprox(run: Run):
    """Everybody is at the mean then; clusters of one client keep FedProx from averaging."""
    first = run("mtl", "rounds=1", local=mtl(0.7))
    prox = run("pacfl", "rounds=1", "clustering.threshold=0", local={"name": "fedprox", "mu": 0.7})
    assert same(first.states, prox.models)


def test_alone_in_its_cluster_nobody_is_pulled_anywhere_else(run: Run):
    """A model that is the mean is not pulled, whatever its size. (Published: it is pulled to zero.)"""
    alone = run("pacfl", "clustering.threshold=0", local=mtl(0.7))
    prox = run("pacfl", "clustering.threshold=0", local={"name": "fedprox", "mu": 0.7})
    assert same(alone.models, prox.models)
    assert same(alone.states, prox.models)


def spread(ran: Ran) -> float:
    """Root mean square distance of the clients' models from their mean."""
    models = ran.states.astype(np.float64)
    return float(np.sqrt(((models - models.mean(axis=0)) ** 2).sum(axis=1).mean()))


@pytest.mark.slow
def test_the_stronger_the_pull_the_nearer_are_the_models(run: Run):
    settings = "rounds=8", "training.momentum=0", "evaluation.every=8"
    spreads = [spread(run("mtl", *settings, local=mtl(s))) for s in (0.0, 0.1, 1.0, 9.0)]
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[1] > spreads[0] / 2
    assert spreads[3] < spreads[0] / 5


# --- the mean ----------------------------------------------------------------------------------------------


def assert_means(ran: Ran, atol: float = 1e-6) -> None:
    """Every model is the mean of the clients that use it and ever took part."""
    known = ran.last.state_clients
    for k, model in enumerate(ran.models):
        members = ran.states[ran.assignment[known] == k].astype(np.float64)
        np.testing.assert_allclose(model, members.mean(axis=0), rtol=0, atol=atol)


@pytest.mark.parametrize("rounds", [1, 2, 6])
def test_the_server_holds_the_mean_of_the_latest_models(run: Run, rounds: int):
    ran = run("mtl", f"rounds={rounds}", HALF, local=mtl(0.3))
    assert (len(ran.states) == 4) == (rounds == 1)
    assert_means(ran)


def test_clients_that_come_late_and_clients_that_went(run: Run):
    """Newcomers do not dilute the mean before they took part; those that left stay in it."""
    events = [{"name": "join", "round": 2, "clients": [1, 6]}, {"name": "leave", "round": 3, "clients": [0]}]
    ran = run("mtl", "rounds=5", "training.participation=0.6", local=mtl(0.3), events=events)
    assert 0 in ran.last.state_clients
    assert_means(ran)


def test_planted_groups_have_means_of_their_own(run: Run):
    ran = run("pacfl", "clustering.n_clusters=3", "training.participation=0.6", local=mtl(0.5))
    assert ran.summary["ari"] == 1.0
    assert ran.assignment.tolist() == GROUPS
    assert ran.models.shape == (3, P)
    assert_means(ran)
    flat = run("mtl", "training.participation=0.6", local=mtl(0.5))
    assert len({tuple(model[:5]) for model in (*ran.models, *flat.models)}) == 4


def test_clients_learn_from_each_other_and_most_from_their_like(run: Run):
    """Four groups of three that call the same digits differently, with 40 samples each."""
    planted: dict[str, Any] = {
        "partition": {"name": "relabelled", "clients": 12, "clusters": 4, "samples": 40},
        "rounds": 60,
        "evaluation": {"every": 60},
    }
    fast = "training.engine=batched"
    right = run("pacfl", fast, "clustering.grouping=planted", local=mtl(1.0), **planted)
    everybody = run("mtl", fast, local=mtl(1.0), **planted)
    alone = run("solo", fast, **planted)
    accuracy = [ran.summary["accuracy_mean"] for ran in (right, everybody, alone)]
    assert accuracy[0] > accuracy[1] + 1, accuracy
    assert accuracy[1] > accuracy[2] + 2, accuracy


def test_engines_agree(run: Run):
    """The batched engine adds the pull in another place than the loop."""
    loop = run("mtl", HALF, model="linear", local=mtl(0.5))  # without ReLUs, which may decide otherwise
    settings = loop.result.config.to_dict()
    settings["training"]["engine"] = "batched"
    batched = Ran(rayfl.run(settings))
    epochs = loop.result.config.training.epochs * loop.result.config.rounds
    steps = epochs * -(-int(loop.result.clients["n"].max()) // loop.result.config.training.batch_size)
    for one, other in ((batched.states, loop.states), (batched.models, loop.models)):
        np.testing.assert_allclose(one, other, rtol=0, atol=rounding(64, steps))


def test_a_client_that_failed_counts_with_what_it_had(run: Run, monkeypatch: pytest.MonkeyPatch):
    """Client 2 fails when it first takes part, client 5 later on."""
    original = LoopEngine.train

    def train(self: LoopEngine, work: Any, round: int, clients: Any, *args: Any) -> Any:
        block = original(self, work, round, clients, *args)
        failing = {0: 2, 2: 5}.get(round)
        failures = {row: "Traceback\nValueError: boom" for row, c in enumerate(clients) if c == failing}
        block.rows[list(failures)] = float("nan")
        return replace(block, failures=failures)

    before = run("mtl", "rounds=2", local=mtl(0.5))
    monkeypatch.setattr(LoopEngine, "train", train)
    execution = {"backend": "inline", "tolerate_failures": 1}
    one = run("mtl", "rounds=1", local=mtl(0.5), execution=execution)
    assert one.last.state_clients.tolist() == [c for c in range(N) if c != 2]
    assert_means(one)
    three = run("mtl", local=mtl(0.5), execution=execution)
    assert three.last.state_clients.tolist() == list(range(N))
    assert_means(three)
    two = run("mtl", "rounds=2", local=mtl(0.5), execution=execution)
    assert same(three.states[5], two.states[5])
    assert not same(two.models, before.models)


def test_the_absent_count_when_trained_rows_travel(tmp_path: Path):
    """One client for three models: more sums than clients, so its row is sent and multiplied there."""
    config = load({"local": mtl(0.5), "partition": {"name": "iid", "clients": 4}})
    stages, host = build(config)
    backend = InlineBackend()
    try:
        federation = stages[0].federation
        backend.start((federation,), host)
        servers = Servers(backend, host.spec, federation, blocks=Blocks(lambda cohort: 2))
        start = host.spec.initial()
        servers.models = [start] * 3
        work = config.local.work(LocalWork(1, 10, 0.1))

        def this_round(client: int, weights: list[float]) -> None:
            cohort = np.array([client])
            mixing = Mixing(sp.csr_array(np.array(weights)[:, None]))
            plan = Plan(cohort, cohort * 0, cohort * 0)
            assignment = np.zeros(4, np.int64)
            train(servers, Round(0, plan, work, mixing, local=config.local, assignment=assignment))

        this_round(0, [1, 1, 1])
        first = np.array(servers.models[0])
        assert all(same(model, first) for model in servers.models)
        this_round(1, [1, 0, 1])
        second = servers.states.fetch(backend)[1][1]
        # Client 0 is absent and uses model 0; nobody else has taken part.
        np.testing.assert_allclose(servers.models[0], (first.astype(np.float64) + second) / 2, rtol=1e-6)
        assert same(servers.models[1], first)
        np.testing.assert_allclose(servers.models[2], second, rtol=1e-6)
    finally:
        backend.close()


# --- refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["algorithm=solo", "local=mtl"], "local objective 'mtl' makes no sense with solo; valid: sgd"),
        (
            ["algorithm=cfl", "local=mtl"],
            "local objective 'mtl' makes no sense with cfl; valid: sgd, fedprox",
        ),
        (["algorithm=mtl", "local=fedprox"], "local objective 'fedprox' makes no sense with mtl; valid: mtl"),
        (["algorithm=mtl", "local.lam=-1"], "local.lam"),
        (["algorithm=mtl", "local.lamda=1"], "did you mean 'lam'?"),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """In one line, with exit code 2, before anything is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rayfl", "run", "digits-demo", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    printed = capsys.readouterr()
    assert caught.value.code == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_limit_of_the_pull_is_where_it_diverges(problem: Problem, momentum: float):
    """The pull alone, without data: SGD with momentum on ``(lambda / 2) |w|^2``."""
    most = 2 * (1 + momentum) / ETA

    def after(lam: float) -> float:
        w, v = 1.0, 0.0
        for _ in range(2000):
            v = momentum * v + lam * w
            w -= ETA * v
        return abs(w)

    assert after(0.98 * most) < 1e-3
    assert after(1.02 * most) > 1e3
    training = load(problem.settings(), [f"training.momentum={momentum}"]).training
    MTL(lam=0.99 * most).check(problem.spec, training, 0.0)
    message = rf"^local.lam: steps of training.lr 0.2 .* it must be below {most:g}$"
    with pytest.raises(ConfigError, match=message):
        MTL(lam=most).check(problem.spec, training, 0.0)


@pytest.mark.parametrize("name", ["lam", "lambda", "strength"])
def test_other_names_of_lambda_are_accepted(name: str, tmp_path: Path):
    """``strength`` was its name before version 0.2."""
    config = load("digits-demo", ["algorithm=mtl", f"local.{name}=0.3"])
    assert config.local == MTL(lam=0.3)
    path = tmp_path / "config.yaml"
    path.write_text(f"algorithm: mtl\nlocal: {{name: mtl, {name}: 0.2}}\n")
    assert reload(path).local == MTL(lam=0.2)
    assert load(path, ["local.lam=0.4"]).local == MTL(lam=0.4)

"""SCAFFOLD, option II: by hand over several rounds, and what public implementations got wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayfl
from rayfl import cli
from rayfl.clients import host
from rayfl.local import base
from tests.local.conftest import ETA, ROUND, SIZES, P, Problem, Ran


def by_hand(problem: Problem, rounds: int, epochs: int, batch: int, momentum: float = 0.0):
    """x, c, c_0, c_1 after so many rounds of Algorithm 1 with both clients; with momentum, K counts as what
    a constant gradient would be multiplied by."""
    x, c, own = problem.start(), np.zeros(P), [np.zeros(P), np.zeros(P)]
    for t in range(rounds):
        moves, changes = [], []
        for i in (0, 1):
            batches = problem.batches(i, t, epochs, batch)
            y = problem.sgd(x, i, batches, momentum=momentum, extra=lambda v, c=c, o=own[i]: c - o)
            k = sum(momentum ** (a - b) for a in range(len(batches)) for b in range(a + 1))
            new = own[i] - c + (x - y) / (k * ETA)
            moves.append(y - x)
            changes.append(new - own[i])
        own = [own[i] + changes[i] for i in (0, 1)]
        x = x + np.mean(moves, axis=0)
        c = c + np.mean(changes, axis=0)  # |S| / N = 1
    return x, c, own


def assert_state(ran: Ran, expected, atol: float = 3 * ROUND) -> None:
    x, c, own = expected
    np.testing.assert_allclose(ran.model, x, rtol=0, atol=atol)
    np.testing.assert_allclose(ran.vectors[0], c, rtol=0, atol=atol)
    for i in (0, 1):
        np.testing.assert_allclose(ran.client_state(i), own[i], rtol=0, atol=atol)


@pytest.mark.parametrize(("rounds", "epochs", "batch"), [(1, 1, 100), (2, 2, 100), (3, 2, 7)])
def test_two_clients_by_hand(problem: Problem, rounds: int, epochs: int, batch: int):
    """In batches of 7 they take 10 and 4 local steps, so K is not the number of epochs."""
    overrides = f"rounds={rounds}", f"training.epochs={epochs}", f"training.batch_size={batch}"
    assert_state(problem.run(*overrides, local="scaffold"), by_hand(problem, rounds, epochs, batch))


def test_with_momentum_by_hand(problem: Problem):
    ran = problem.run("rounds=3", "training.batch_size=7", "training.momentum=0.5", local="scaffold")
    assert_state(ran, by_hand(problem, 3, 2, 7, 0.5))


@pytest.mark.parametrize("algorithm", ["scaffold", "solo"])
def test_states_one_by_one_or_together_are_the_same(
    settings: dict[str, Any], algorithm: str, monkeypatch: pytest.MonkeyPatch
):
    """Small states and variates of several clients are moved in one call; bit for bit nothing changes, also
    where some clients take part for the first time."""
    settings |= {"rounds": 4, "algorithm": algorithm}
    settings["training"]["participation"] = 0.5
    settings["execution"]["block_size"] = 4

    def models() -> list[np.ndarray]:
        result = rayfl.run(settings)
        return [np.asarray(part) for c in (0, 4, 8) for part in result.client_model(c).values()]

    together = models()
    monkeypatch.setattr(host, "_SHORT_STATE", 0)
    monkeypatch.setattr(base, "_CACHE_ELEMENTS", 1)
    for one, other in zip(together, models(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_after_one_full_step_c_i_is_the_gradient(problem: Problem):
    """Option II with K = 1: c_i = g_i(x) exactly, and c their mean. In most public code c_i stays 0."""
    ran, x = problem.run("training.epochs=1", local="scaffold"), problem.start()
    gradients = [problem.gradient(x, i) for i in (0, 1)]
    for i in (0, 1):
        np.testing.assert_allclose(ran.client_state(i), gradients[i], rtol=0, atol=ROUND)
    np.testing.assert_allclose(ran.vectors[0], np.mean(gradients, axis=0), rtol=0, atol=ROUND)


def test_the_first_round_is_fedavg_of_equal_weights(problem: Problem):
    """c and c_i start at zero (not, as published, at the model), so nothing is corrected yet."""
    ran = problem.run("training.batch_size=7", local="scaffold")
    local = [problem.sgd(problem.start(), i, problem.batches(i, 0, 2, 7)) for i in (0, 1)]
    np.testing.assert_allclose(ran.model, np.mean(local, axis=0), rtol=0, atol=ROUND)
    assert np.abs(ran.model - np.average(local, axis=0, weights=SIZES)).max() > 1e-3


def test_variates_change_in_every_round(problem: Problem):
    ran = [problem.run(f"rounds={t}", local="scaffold") for t in (1, 2, 3)]
    for a, b in ((0, 1), (1, 2)):
        assert np.abs(ran[a].vectors[0] - ran[b].vectors[0]).max() > 1e-3
        for i in (0, 1):
            assert np.abs(ran[a].client_state(i) - ran[b].client_state(i)).max() > 1e-3


def test_c_moves_by_the_share_that_took_part(problem: Problem):
    """One of two clients: c <- c + (1/2) (c_i+ - c_i); the other has no variate yet."""
    ran = problem.run("training.participation=0.5", "training.epochs=1", local="scaffold")
    (client,) = ran.last.state_clients.tolist()
    np.testing.assert_allclose(ran.vectors[0], ran.client_state(client) / 2, rtol=1e-6)
    np.testing.assert_allclose(
        ran.client_state(client), problem.gradient(problem.start(), client), rtol=0, atol=ROUND
    )


def test_c_is_the_mean_of_all_variates_whoever_took_part(problem: Problem):
    """Invariant of Algorithm 1: c = (1/N) sum_i c_i, with c_i = 0 for those who never took part."""
    for rounds in (1, 2, 5):
        ran = problem.run(f"rounds={rounds}", "training.participation=0.5", local="scaffold")
        np.testing.assert_allclose(ran.vectors[0], ran.last.state_rows.sum(axis=0) / 2, atol=ROUND)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_drift_is_corrected(problem: Problem, momentum: float):
    """Many local steps of unequal clients: FedAvg stops beside the optimum of the mean loss, SCAFFOLD nears
    it, and its variates stay as large as gradients, with momentum too."""
    work = "training.epochs=10", "rounds=60", f"training.momentum={momentum}"
    rate = f"training.lr={ETA * (1 - momentum)}"

    def slope(ran: Ran) -> float:
        x = ran.model.astype(np.float64)
        return float(np.linalg.norm(problem.gradient(x, 0) + problem.gradient(x, 1)) / 2)

    corrected = problem.run(*work, rate, local="scaffold", evaluation={"every": 60})
    plain = problem.run(*work, rate, evaluation={"every": 60})
    assert slope(corrected) < slope(plain) / 3
    x = corrected.model.astype(np.float64)
    for i in (0, 1):
        np.testing.assert_allclose(corrected.client_state(i), problem.gradient(x, i), rtol=0, atol=0.02)


def test_bytes_are_a_model_and_a_variate(problem: Problem):
    ran = problem.run("rounds=3", local="scaffold")
    assert ran.bytes("up") == ran.bytes("down") == 3 * 2 * 2 * P * 4


@pytest.mark.parametrize("method", ["solo", "fedsem", "flis_dc", "ifca"])
def test_methods_without_a_fixed_model_for_c_refuse_it(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """In one line, with exit code 2, before anything is written."""
    monkeypatch.chdir(tmp_path)
    arguments = ["rayfl", "run", "digits-demo", f"algorithm={method}", "local=scaffold"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    printed = capsys.readouterr()
    assert caught.value.code == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert f"local objective 'scaffold' makes no sense with {method}; valid: sgd" in printed.err
    assert list(tmp_path.iterdir()) == []

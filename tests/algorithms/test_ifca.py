"""IFCA: who chooses what, on which data, what is averaged; its limits and planted clusters in whole runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.algorithms.fakes import SPEC, FakeClients, algorithm, report, setup
from tests.algorithms.test_identities import FC1, GROUPS, TASKS, N, P, Ran, Run, run, same, same_curves

__all__ = ["run"]

# Six clients and three models. On the training data clients 0 and 1 fit model 2, clients 2 to 4 model 0, and
# model 1 fits nobody. On the test data everybody would take model 1.
TRAIN = [[3, 4, 1], [3, 4, 1], [1, 4, 3], [1, 4, 3], [1, 4, 3], [2, 4, 2]]
TEST = [[5, 0, 5]] * 6


def fake() -> FakeClients:
    return FakeClients({"train": TRAIN, "test": TEST, "validation": TEST})


# --- by hand -------------------------------------------------------------------------------------------


def test_a_round_by_hand():
    s, method, clients = setup("ifca"), algorithm("ifca", clusters=3), fake()
    assert method.initial(s) == (0, 1, 2)  # independent initialisations
    state = method.begin(s)
    assert (state.models, state.clustered) == (3, True)
    state, cohort = method.cohort(s, state, clients)
    state = method.select(s, state, cohort, clients)
    assert state.assignment.tolist() == [2, 2, 0, 0, 0, 0]  # the tie of client 5 goes to the smaller number
    plan = method.plan(s, state, cohort)
    assert plan.cohort.tolist() == [2, 3, 4, 5, 0, 1]
    assert plan.start.tolist() == plan.group.tolist() == [0, 0, 0, 0, 2, 2]
    mixing = method.mix(s, state, plan, {})
    assert mixing.weights.toarray().tolist() == [
        [30, 40, 50, 60, 0, 0],
        [0, 0, 0, 0, 0, 0],  # nobody chose model 1: it stays
        [0, 0, 0, 0, 10, 20],
    ]
    assert method.downloads(s, state, plan) == 6 * 3
    assert method.end(s, state, plan, report(plan, 3)).assignment.tolist() == [2, 2, 0, 0, 0, 0]


def test_models_are_chosen_by_training_loss():
    """Published code chose them by the accuracy on test data. Here the two parts disagree."""
    clients = fake()
    s, method = setup("ifca"), algorithm("ifca", clusters=3)
    state = method.select(s, method.begin(s), np.arange(6), clients)
    assert clients.asked == ["train"]
    assert 1 not in state.assignment
    state = method.join(s, method.begin(s), np.array([4, 5]), clients)
    assert set(clients.asked) == {"train"}
    assert state.assignment.tolist() == [0] * 6


def test_only_those_who_take_part_choose():
    s, method = setup("ifca"), algorithm("ifca", clusters=3)
    state = method.select(s, method.begin(s), np.array([1, 3]), fake())
    assert state.assignment.tolist() == [0, 2, 0, 0, 0, 0]


def test_a_shared_representation_is_averaged_over_all_clusters():
    s = setup("ifca", hierarchy={"common_layers": 1, "global_every": 2})
    method = algorithm("ifca", clusters=3)
    due = []
    for t in range(4):
        state = method.select(s, method.begin(s), np.arange(6), fake())
        step = method.global_step(s, type(state)(t, state.models, state.assignment, True))
        assert step is not None
        assert step.layers[0][0] == ((0, 18),)
        due.append(step.due.tolist())
    assert due == [[False] * 3, [True] * 3, [False] * 3, [True] * 3]
    assert SPEC.P == 38


# --- whole runs ----------------------------------------------------------------------------------------


def test_one_cluster_is_fedavg(run: Run):
    for participation in (1.0, 0.4):
        overrides = [f"training.participation={participation}"]
        one, flat = run({"name": "ifca", "clusters": 1}, *overrides), run("fedavg", *overrides)
        assert same(one.models, flat.models)
        same_curves(one, flat)
        assert one.bytes() == flat.bytes()


def test_with_all_layers_common_from_one_start_all_models_are_fedavgs(run: Run, monkeypatch: Any):
    """Clusters that share everything and begin alike stay alike, whoever chose which."""
    from rayfl.algorithms.ifca import IFCA

    monkeypatch.setattr(IFCA, "initial", lambda self, setup: (0,) * self.clusters)
    shared = run({"name": "ifca", "clusters": 3}, "hierarchy.common_layers=all")
    flat = run("fedavg")
    for model in shared.models:
        assert same(model, flat.models[0])


@pytest.mark.parametrize("seed", [0, 2])
def test_planted_tasks_are_recovered(run: Run, seed: int):
    """Of more models than groups, which makes a good start likely; the rest are left alone."""
    ran = run({"name": "ifca", "clusters": 6}, "rounds=8", f"seed={seed}", "evaluation.every=8")
    assert ran.summary["ari"] > 0.9
    assert ran.summary["accuracy_mean"] > run("fedavg", "rounds=8", f"seed={seed}").summary["accuracy_mean"]


def test_data_on_which_training_and_test_loss_disagree(run: Run, tmp_path: Any):
    """The labels of the test samples are rotated: who looks at them chooses another model."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    np.savez(tmp_path / "a.npz", x_train=x[:1400], y_train=y[:1400], x_test=x[1400:], y_test=y[1400:])
    rotated = (y[1400:] + 5) % 10
    np.savez(tmp_path / "b.npz", x_train=x[:1400], y_train=y[:1400], x_test=x[1400:], y_test=rotated)

    def chosen(name: str) -> Ran:
        data = {"name": "npz", "path": str(tmp_path / f"{name}.npz")}
        return run({"name": "ifca", "clusters": 4}, "rounds=4", data=data, partition=TASKS)

    honest, wrong = chosen("a"), chosen("b")
    assert same(honest.models, wrong.models)
    assert honest.assignment.tolist() == wrong.assignment.tolist()
    assert honest.summary["accuracy_mean"] > wrong.summary["accuracy_mean"] + 20


def test_all_models_are_downloaded_and_one_is_sent(run: Run):
    """Paper of FLT: IFCA costs rho M W T (C + 1)."""
    ran = run({"name": "ifca", "clusters": 3}, "training.participation=0.4")
    assert ran.bytes(direction="up", tier="client_lps") == 3 * 4 * P * 4
    assert ran.bytes(direction="down", tier="client_lps") == 3 * 4 * 3 * P * 4
    ranked = run({"name": "ifca", "clusters": 3}, "training.participation=0.4", "sampling=curriculum")
    assert ranked.bytes(direction="down", tier="client_lps", round=0) == 3 * N * P * 4  # all are asked
    shared = run({"name": "ifca", "clusters": 3}, "hierarchy.common_layers=1")
    assert shared.bytes(tier="lps_gps", direction="down") == 3 * 3 * FC1 * 4


@pytest.mark.parametrize("sampling", ["uniform", "curriculum"])
@pytest.mark.parametrize("name", ["ifca", "fedsem"])
def test_how_often_clients_are_tested_changes_nothing(run: Run, name: str, sampling: str):
    """Before a test everybody chooses; what is trained must not depend on it. A sampling by losses ranks
    clients under the model that they would choose now.
    """
    given = {"name": name, "clusters": 3}
    often, seldom = (
        run(given, f"evaluation.every={n}", "training.participation=0.4", f"sampling={sampling}", "rounds=4")
        for n in (1, 4)
    )
    assert same(often.models, seldom.models)
    assert often.assignment.tolist() == seldom.assignment.tolist()
    assert len(often.assignment) == N == len(GROUPS)


@pytest.mark.parametrize(
    "name", [{"name": "ifca", "clusters": 3}, {"name": "fedsem", "clusters": 3}, "fedavg"]
)
def test_a_last_fine_tuning_goes_on_from_the_trained_models(run: Run, name: Any):
    """Published code fine-tuned the untrained initialisations. Here the last steps are too small to be felt:
    fine-tuned models are as good as the trained ones."""
    training = {"epochs": 5, "batch_size": 20, "lr": 0.1, "schedule": "exponential", "decay": 1e-5}
    ran = run(name, "evaluation.finetune_epochs=2", "rounds=3", training=training)
    clients = ran.result.clients
    assert clients["accuracy_finetuned"].tolist() == clients["accuracy_last"].tolist()
    chance = run(name, "rounds=1", training={**training, "lr": 1e-12}).summary["accuracy_mean"]
    assert ran.summary["finetuned_accuracy_mean"] > chance + 20

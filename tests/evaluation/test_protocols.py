"""The names of accuracies, and which round is the best."""

from __future__ import annotations

from typing import Any

from rayfl.evaluation import METRICS, protocols
from rayfl.evaluation.protocols import LOCAL_CLIENTS, best, columns, prefix
from rayfl.losses import LOSSES


def test_names() -> None:
    assert prefix() == ""
    assert prefix("validation", "local") == "validation_local_"
    assert prefix("test", "finetuned") == "finetuned_"
    assert columns(("test",), ("served",)) == []
    found = columns(("test", "common"), ("served", "local"))
    assert found[:2] == ["common_accuracy_mean", "common_accuracy_weighted"]
    assert len(found) == 3 * len(METRICS) + 1
    assert found[-1] == LOCAL_CLIENTS


def row(round: int, test: float, validation: float | None, **more: float) -> dict[str, Any]:
    others = {"accuracy_worst10": test - 50, "accuracy_var": 4.0}
    return {"round": round, "accuracy_mean": test, "validation_accuracy_mean": validation, **others, **more}


def test_validation_chooses_the_round_and_test_data_are_reported() -> None:
    found = best([row(2, 80, 70), row(5, 90, 75), row(8, 60, 75), row(11, 85, 60)])
    assert found == {
        "round_best_validation": 6,  # the first of two; in rounds.csv they count from 0
        "accuracy_mean_best_validation": 90,
        "accuracy_worst10_best_validation": 40,
        "accuracy_var_best_validation": 4,
        "round_best_test": 6,
        "accuracy_mean_best_test": 90,
        "accuracy_worst10_best_test": 40,
        "accuracy_var_best_test": 4,
    }
    assert best([row(2, 80, 76), row(5, 90, 75)])["accuracy_mean_best_validation"] == 80
    assert "round_best_validation" not in best([row(2, 80, None), row(5, 90, float("nan"))])
    assert best([]) == {}


def test_a_measure_that_is_undefined_does_not_hide_the_best_round() -> None:
    """R2 of clients with one test sample each is not defined; the loss decides."""
    losses = [{"round": 0, "loss_mean": 3.0, "rmse_mean": 2.0, "mae_mean": 2.0, "r2_mean": None},
              {"round": 1, "loss_mean": 1.0, "rmse_mean": 1.0, "mae_mean": 1.0, "r2_mean": None},
              {"round": 2, "loss_mean": 2.0, "rmse_mean": 1.5, "mae_mean": 1.2, "r2_mean": 0.5}]  # fmt: skip
    found = protocols.best(losses, LOSSES["mse"]())
    assert (found["round_best_test"], found["loss_mean_best_test"], found["rmse_mean_best_test"]) == (2, 1, 1)
    assert "r2_mean_best_test" not in found


def test_local_models_are_compared_over_equally_many_clients() -> None:
    """In the first round only the ten that took part have a model of their own."""
    begins = ("local_", "validation_local_")
    rounds = []
    for number, (mean, clients) in enumerate([(99, 10), (90, 20), (91, 20), (89, 20)]):
        metrics = {"accuracy_mean": mean, "accuracy_worst10": mean, "accuracy_var": 0}
        local = {f"{begin}{name}": value for begin in begins for name, value in metrics.items()}
        rounds.append(row(number, 50, 50, **local, local_clients=clients))
    found = best(rounds)
    assert found["local_round_best_test"] == found["local_round_best_validation"] == 3
    assert found["local_accuracy_mean_best_test"] == 91

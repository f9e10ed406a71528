"""Names of accuracies: which model was tested, on which data, and in which round.

Published accuracies differ in all three, often without saying so. Here the name states it::

    [newcomers_][data_][model_]metric[_best_choice]

===========  ==================  ======================================================================
part         value               meaning
===========  ==================  ======================================================================
clients      (none)              those that are present in the last round
             ``newcomers_``      those that join after it (an event ``join`` after the last round), with the
                                 models that they are given
data         (none)              each client's own test samples
             ``validation_``     each client's own validation samples
             ``common_``         all test samples, the same for every client
model        (none)              the model that the client would use: the server's or its cluster's, with
                                 the client's own layers; after adaptation, if the method adapts models
                                 before tests
             ``local_``          the model that the client itself had at the end of its last local
                                 training, before it was averaged; clients that have not trained yet are
                                 ignored
             ``finetuned_``      the model of the first row, fine-tuned for ``evaluation.finetune_epochs``;
                                 after the last round only
metric       ``accuracy_mean``   and the others of :data:`~rayfl.evaluation.metrics.METRICS`; ``rmse_mean``
                                 and the like, the mean over clients of what a loss measures
choice       (none)              after the last round
             ``validation``      after the round with the highest ``validation_[model_]accuracy_mean``
             ``test``            after the round with the highest ``[data_][model_]accuracy_mean``: chosen
                                 on the reported test data, so biased upwards. For losses without
                                 accuracy, both choose the lowest ``loss_mean``
===========  ==================  ======================================================================

So ``local_accuracy_worst10_best_validation`` is the mean accuracy of the worst 10 % of the clients, each on
its own test samples with the model that it trained itself, after the round in which these models were best on
the clients' validation samples; ``local_round_best_validation`` is that round, the first is 1.

The best round is chosen among the rounds after the last event in which all clients were tested; for
``local_`` among those in which as many clients had trained as at the end. Of equally good rounds the first is
taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rayfl.data.base import TestedOn
from rayfl.evaluation.metrics import METRICS
from rayfl.losses import CrossEntropy, Loss

Tested = Literal["served", "local", "finetuned"]
"""Which model is tested: see above."""

NEWCOMERS = "newcomers_"
"""The prefix of metrics of clients that join after the last round."""

LOCAL_CLIENTS = "local_clients"
"""The column with the number of clients that have trained so far; only they count in ``local_`` metrics."""

BEST = ("accuracy_mean", "accuracy_worst10", "accuracy_var")
"""The metrics of best rounds."""


def prefix(on: TestedOn = "test", model: Tested = "served") -> str:
    """The prefix of the names of metrics of this model on these data."""
    return ("" if on == "test" else f"{on}_") + ("" if model == "served" else f"{model}_")


def columns(
    on: Sequence[TestedOn],
    models: Sequence[Tested],
    loss: Loss = CrossEntropy(),  # noqa: B008 (frozen)
) -> list[str]:
    """The names of the metrics of these models on these data, without those that every run has."""
    prefixes = [prefix(data, model) for model in models for data in on]
    measures, common = measures_of(loss), METRICS if loss.accurate else ("loss_mean",)
    names = [f"{start}{metric}" for start in prefixes for metric in (*(common if start else ()), *measures)]
    return [*names, LOCAL_CLIENTS] if "local" in models else names


def measures_of(loss: Loss) -> list[str]:
    """The names of the metrics that a loss adds."""
    return [f"{name}_mean" for name in loss.measures]


def best(
    rounds: Sequence[Mapping[str, Any]],
    loss: Loss = CrossEntropy(),  # noqa: B008 (frozen)
) -> dict[str, float]:
    """The metrics of the best rounds, by name.

    Args:
        rounds: the rows of ``rounds.csv`` among which the best is chosen.
        loss: what models are trained for; if it has no accuracy, the round with the lowest loss is best.
    """
    metric, sign = ("accuracy_mean", 1) if loss.accurate else ("loss_mean", -1)
    metrics = (*(BEST if loss.accurate else (metric,)), *measures_of(loss))
    best_metrics: dict[str, float] = {}
    models: tuple[Tested, ...] = ("served", "local")
    tested_on: tuple[TestedOn, ...] = ("test", "common")
    for model, on in itertools.product(models, tested_on):
        test_prefix = prefix(on, model)
        judges = {"validation": prefix("validation", model), "test": test_prefix}
        for choice, judge in judges.items():
            candidates = _rounds_with_metrics(rounds, [f"{judge}{metric}", f"{test_prefix}{metric}"], model)
            if candidates:
                chosen = max(candidates, key=lambda row: sign * row[f"{judge}{metric}"])
                best_metrics[f"{test_prefix}round_best_{choice}"] = chosen["round"] + 1
                best_metrics |= {
                    f"{test_prefix}{m}_best_{choice}": chosen[f"{test_prefix}{m}"]
                    for m in metrics
                    if _is_known(chosen, f"{test_prefix}{m}")  # R2 of single samples is not defined
                }
    return best_metrics


def _rounds_with_metrics(
    rounds: Sequence[Mapping[str, Any]], metrics: Sequence[str], model: Tested
) -> list[Mapping[str, Any]]:
    """The rounds that have these metrics; for local models, those with as many clients as at the end."""
    complete = [row for row in rounds if all(_is_known(row, name) for name in metrics)]
    if model == "local":
        complete = [row for row in complete if row[LOCAL_CLIENTS] == complete[-1][LOCAL_CLIENTS]]
    return complete


def _is_known(row: Mapping[str, Any], name: str) -> bool:
    value = row.get(name)
    return value is not None and value == value

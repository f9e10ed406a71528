"""The shared evaluation gives every client what a loop over clients would."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.data.base import Ragged
from rayfl.evaluation import sharing
from rayfl.evaluation.sharing import EvaluationPlan


def ragged(*lists: list[int]) -> Ragged:
    return Ragged.of([np.array(part, np.int32) for part in lists])


def test_jobs_by_hand():
    plan = EvaluationPlan.of([7, 2, 7, 2], ragged([4, 1, 3], [0], [3, 5, 1], []), batch=2, batches=1)
    assert [(job.model, job.samples.tolist()) for job in plan.jobs] == [(2, [0]), (7, [1, 3]), (7, [4, 5])]
    correct = [np.array([True]), np.array([True, False]), np.array([True, True])]
    loss = [np.float32([8.0]), np.float32([1.0, 2.0]), np.float32([3.0, 4.0])]
    counts, sums, _ = plan.gather(correct, loss)
    assert counts.tolist() == [2, 1, 2, 0]
    assert sums.tolist() == [6.0, 8.0, 7.0, 0.0]
    more = [np.float64([[1, 2]]), np.float64([[3, 4], [5, 6]]), np.float64([[7, 8], [9, 10]])]
    assert plan.gather(correct, loss, more).sums.tolist() == [[15, 18], [1, 2], [17, 20], [0, 0]]


def test_each_pair_runs_once():
    plan = EvaluationPlan.of([0] * 50, ragged(*[[3, 1, 2]] * 50), batch=100)
    assert [job.samples.tolist() for job in plan.jobs] == [[1, 2, 3]]


def test_job_size_is_batch_times_batches():
    plan = EvaluationPlan.of([0], ragged(list(range(10))), batch=2, batches=2)
    assert [len(job.samples) for job in plan.jobs] == [4, 4, 2]


@pytest.mark.parametrize("table", [sharing._TABLE_CELLS, 1, 70])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_equal_to_the_loop_over_clients(table: int, data: st.DataObject):
    lists = data.draw(st.lists(st.lists(st.integers(0, 30), max_size=12), max_size=12))
    models = data.draw(st.lists(st.integers(0, 5), min_size=len(lists), max_size=len(lists)))
    batch, batches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    rng = np.random.default_rng(0)
    truth, losses = rng.random((6, 31)) < 0.5, rng.random((6, 31), dtype=np.float32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "_TABLE_CELLS", table)
        plan = EvaluationPlan.of(models, ragged(*lists), batch, batches)
    counts, sums, _ = plan.gather(
        [truth[job.model, job.samples] for job in plan.jobs],
        [losses[job.model, job.samples] for job in plan.jobs],
    )

    pairs = [(job.model, int(sample)) for job in plan.jobs for sample in job.samples]
    assert pairs == sorted({(model, i) for model, part in zip(models, lists, strict=True) for i in part})
    assert all(0 < len(job.samples) <= batch * batches for job in plan.jobs)
    for client, (model, part) in enumerate(zip(models, lists, strict=True)):
        assert counts[client] == sum(truth[model, i] for i in part)
        assert sums[client] == pytest.approx(sum(float(losses[model, i]) for i in part))


def test_many_clients_who_share_models():
    clients, each = 20_000, 100
    rng = np.random.default_rng(0)
    tests = Ragged(
        rng.integers(0, 5000, clients * each, dtype=np.int32), np.arange(0, clients * each + 1, each)
    )
    plan = EvaluationPlan.of(rng.integers(0, 10, clients), tests, batch=100, batches=10)
    assert len(plan.jobs) == 50
    counts, sums, _ = plan.gather(
        [np.ones(len(job.samples), np.bool_) for job in plan.jobs],
        [job.samples.astype(np.float32) for job in plan.jobs],
    )
    assert (counts == each).all()
    assert np.array_equal(sums, tests.values.reshape(clients, each).sum(axis=1))


def test_wrong_results_are_refused():
    plan = EvaluationPlan.of([0], ragged([1, 2]), batch=5)
    with pytest.raises(ValueError, match="each job"):
        plan.gather([np.array([True])], [np.zeros(2, np.float32)])
    with pytest.raises(ValueError, match="each job"):
        plan.gather([], [])


@pytest.mark.parametrize(
    ("models", "lists", "batch", "message"),
    [
        ([0, 1], [[1]], 1, "1 lists"),
        ([-1], [[1]], 1, "negative"),
        ([0], [[-1]], 1, "negative"),
        ([0], [[1]], 0, "at least 1"),
    ],
)
def test_bad_plans_are_refused(models: list[int], lists: list[list[int]], batch: int, message: str):
    with pytest.raises(ValueError, match=message):
        EvaluationPlan.of(models, ragged(*lists), batch)

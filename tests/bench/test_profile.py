"""Where the time of a round goes: the stopwatch, and that the profile is of the whole round."""

from __future__ import annotations

import dataclasses

import pytest

from rayfl.bench import profile
from rayfl.bench.profile import Stopwatch, by_process, by_stage, stages
from rayfl.bench.workloads import WORKLOADS
from rayfl.training.batched.layers import Linear, ReLU

TINY = dataclasses.replace(
    WORKLOADS["W1"],
    clients=12,
    samples=7,
    cohort=6,
    shape=(1, 4, 4),
    classes=3,
    model={"name": "mlp", "hidden": [4]},
)


def test_the_stopwatch_takes_off_what_others_are_charged_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outer works 1, calls inner (2), works 4, calls itself once more (8 without calls): in all 15."""
    now = [100.0]
    monkeypatch.setattr(profile.time, "perf_counter", lambda: now[0])
    watch = Stopwatch()

    def work(seconds: float) -> None:
        now[0] += seconds

    inner = watch.timed("inner", lambda: work(2))

    def outer_(again: bool) -> None:
        if not again:
            return work(8)
        work(1)
        inner()
        work(4)
        return outer(False)

    outer = watch.timed("outer", outer_)
    outer(True)
    assert watch.seconds == {"outer": 13.0, "inner": 2.0}
    work(50)  # nobody's
    inner()
    assert watch.seconds == {"outer": 13.0, "inner": 4.0}


def test_an_error_ends_a_stage_and_the_methods_are_restored() -> None:
    before = Linear.forward, ReLU.backward
    watch = Stopwatch()
    with watch.watching(stages()):
        assert Linear.forward is not before[0]
        with pytest.raises(AttributeError):
            Linear.forward(None, None, None)  # type: ignore[arg-type]
    assert (Linear.forward, ReLU.backward) == before
    assert watch.seconds["linear layers, forward"] > 0
    assert watch._stack == []


def test_every_stage_of_a_round_is_seen() -> None:
    large_batches = dataclasses.replace(TINY, samples=40, training={**TINY.training, "batch_size": 40})
    at_once, by_layer = by_stage(TINY, 2), by_stage(large_batches, 2)
    assert list(at_once) == list(by_layer) == list(stages())
    calls = "all steps of clients in one compiled call"
    assert [stage for stage, milliseconds in by_layer.items() if not milliseconds] == [calls]
    layers = [
        stage for stage in stages() if "layers" in stage or "loss" in stage or stage.startswith("models in")
    ]
    assert [stage for stage, milliseconds in at_once.items() if not milliseconds] == layers


@pytest.mark.ray
@pytest.mark.slow
def test_processes_on_ray(ray_cluster: None) -> None:
    found = by_process(TINY, 40)
    parts = ("driver", "client actors", "local parameter server", "Ray itself")
    assert found["all"] == pytest.approx(sum(found[part] for part in parts))
    assert found["driver"] > 0  # the system counts CPU time in hundredths of a second
    assert found["a round"] > 0

"""Models of tens of millions of parameters beside the plain loop."""

import pytest

from rayfl.bench import large
from rayfl.models import MODELS, ModelSpec


def test_the_plain_loop_trains_the_same_network() -> None:
    """All of its layers: it trained the first alone once, and was six times as fast."""
    task = large.workload((20, 30), 2)
    spec = ModelSpec.of(MODELS["mlp"](hidden=(20, 30)), task.shape, task.classes, 0)
    assert [tuple(p.shape) for p in task.network().parameters()] == list(spec.shapes)


@pytest.mark.slow
def test_both_are_measured() -> None:
    task = large.workload((5,), 2, "pacfl")
    row = large.measured(task, 1, {"backend": "inline"})
    assert row["ratio"] > 0
    assert row["bytes"]["client_lps_up"] == row["bytes"]["client_lps_down"] == 2 * 4 * row["parameters"]
    assert row["gb"]["driver"][0] > 0

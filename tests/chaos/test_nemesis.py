"""A short schedule of the nemesis; ``python -m tests.chaos.nemesis`` runs it for as long as one likes."""

from __future__ import annotations

import pytest

from tests.chaos.nemesis import Report, schedule
from tests.runs import METHODS

SAMPLE = ("mt_hfl, scaffold", "cfl", "flt", "sub_fedavg", "ifca")
"""Client state, a tree, a graph, masks, models that clients choose."""


@pytest.mark.parametrize(
    ("method", "seed"),
    [
        *((m, 1) if m in SAMPLE else pytest.param(m, 1, marks=pytest.mark.slow) for m in METHODS),
        ("mt_hfl, scaffold", 2),  # with even seeds what clients keep is in files
        ("cfl", 4),
    ],
)
def test_whatever_happens_to_a_run_its_results_are_the_same(method: str, seed: int) -> None:
    report = Report()
    schedule(method, "inline", seed, report)
    assert report.different == []
    assert report.faults.total() == 3


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("method", ["mt_hfl, scaffold", "cfl", "flis_dc", "solo"])
def test_whatever_happens_to_processes_results_are_the_same(method: str, ray_cluster: None) -> None:
    report = Report()
    schedule(method, "ray", 45, report)
    assert report.different == []
    assert report.faults.total() >= 2

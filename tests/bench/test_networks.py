"""Networks with BatchNorm: which engine they get, and that both are measured."""

from __future__ import annotations

from typing import Any

import pytest

from rayfl.bench import networks
from rayfl.models import MODELS, ModelSpec


@pytest.mark.parametrize("case", networks.CASES[:2], ids=lambda case: case.network)
def test_both_engines_are_measured(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "CLIENTS", 8)
    monkeypatch.setattr(networks, "SAMPLES", 2)
    lines: list[str] = []
    row = networks._measure(case, 1, lines.append)
    assert row["engine"] == "vmap"
    assert row["ratio"] > 0
    assert lines[0].startswith(f"{case.network} 1/1: loop ")


def test_the_networks_are_what_the_table_says() -> None:
    counts = {}
    for case in networks.CASES:
        settings = dict(case.model)
        spec = ModelSpec.of(MODELS[settings.pop("name")](**settings), case.shape, 10, 0)
        counts[case.network] = spec.n_parameters
    assert counts == {
        "skip": 5354,
        "skip, 8 x 8 grey": 5066,
        "resnet18": 11_181_642,
        "resnet18, cifar stem": 11_173_962,
    }

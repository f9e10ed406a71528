"""``rayfl bench methods``: every method is measured against FedAvg, turn by turn."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rayfl.algorithms import ALGORITHMS
from rayfl.bench import command, methods
from rayfl.bench.workloads import WORKLOADS
from tests.bench.test_parts import TINY


def test_methods_take_turns_with_the_first() -> None:
    lines: list[str] = []
    some = {name: methods.METHODS[name] for name in ("fedavg", "scaffold", "ifca")}
    rows = methods.run(2, [TINY], some, lines.append)
    assert [row["method"] for row in rows] == list(some)
    assert [line.split(":")[0] for line in lines] == ["tiny fedavg", "tiny scaffold", "tiny ifca"]
    for row in rows:
        assert row["tiny_ms"] > 0
        assert row["tiny_times"] > 0


def test_each_side_is_first_in_every_other_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    monkeypatch.setattr(methods, "_turn", lambda rayfl: order.append(rayfl) or len(order))
    found: Any = methods._in_turns("method", "base", 3)  # type: ignore[arg-type]
    assert order == ["method", "base", "base", "method", "method", "base"]
    assert found == ([1, 4, 5], [2, 3, 6])


def test_a_method_that_trains_everyone_is_compared_per_client_too() -> None:
    some = {name: methods.METHODS[name] for name in ("fedavg", "solo")}
    fedavg, solo = methods.run(1, [TINY], some)
    assert (fedavg["tiny_clients"], solo["tiny_clients"]) == (TINY.cohort, TINY.clients)
    share = TINY.cohort / TINY.clients
    assert share < 1
    assert solo["tiny_each"] == pytest.approx(share * solo["tiny_times"])
    assert fedavg["tiny_each"] == pytest.approx(fedavg["tiny_times"])


def test_what_was_measured_before_a_stop_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = {name: methods.METHODS[name] for name in ("fedavg", "fednova", "scaffold")}
    monkeypatch.setattr(methods.run, "__defaults__", (5, [TINY], some, lambda line: None, None))
    out, pairs = tmp_path / "figures.json", methods._paired_turns
    measured: list[str] = []

    def stopped_at(last: str) -> Any:
        def some_pairs(*args: Any) -> Iterator[Any]:
            for name, *times in pairs(*args):
                if name == last:
                    raise KeyboardInterrupt
                measured.append(name)
                yield name, *times

        return some_pairs

    monkeypatch.setattr(methods, "_paired_turns", stopped_at("scaffold"))
    with pytest.raises(KeyboardInterrupt):
        command.bench(["methods"], 1, out, Console(quiet=True))
    before = json.loads(out.read_text())
    assert [row["method"] for row in before["methods"] if "tiny_ms" in row] == ["fedavg", "fednova"]
    monkeypatch.setattr(methods, "_paired_turns", stopped_at("nothing"))
    result = command.bench(["methods"], 1, out, Console(quiet=True))
    assert measured == ["fedavg", "fednova", "scaffold"]
    assert result["methods"][:2] == before["methods"][:2]
    assert all("tiny_ms" in row for row in result["methods"])
    assert json.loads(out.read_text()) == result  # it is finished: the next process measures all anew
    command.bench(["methods"], 1, out, Console(quiet=True))
    assert len(measured) == 6


@pytest.mark.parametrize("name", methods.METHODS)
def test_every_method_has_a_config(name: str, tmp_path: Path) -> None:
    """On W1; W2's momentum is nothing for Per-FedAvg."""
    workload = dataclasses.replace(
        WORKLOADS["W1"], clients=20, samples=2, cohort=4, sections=methods.METHODS[name]
    )
    config = workload.config(tmp_path, backend="inline")
    assert config.algorithm.name == name or name not in ALGORITHMS


def test_what_a_workload_does_not_allow_has_no_figure() -> None:
    """Sub-FedAvg with one epoch is refused only where a run begins."""
    some = {name: methods.METHODS[name] for name in ("fedavg", "sub_fedavg")}
    rows = methods.run(1, [TINY], some)
    assert "tiny_ms" in rows[0]
    assert rows[1] == {"method": "sub_fedavg"}

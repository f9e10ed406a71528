"""What a round costs does not grow with the population: nothing is made for every client without need."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rayfl import files, rundir
from rayfl.bench.measure import Rayfl, running
from rayfl.bench.population import workload
from rayfl.evaluation import EvaluationPlan
from rayfl.kept import Kept
from rayfl.runtime.inline import InlineBackend
from rayfl.servers.states import ClientStates

CLIENTS = 400_000


@pytest.fixture
def rounds(tmp_path: Path) -> Iterator[Rayfl]:
    task = replace(workload(CLIENTS, 5), samples=1, sections={}, shape=(1, 1, 2))
    with running(task, tmp_path, {"backend": "inline"}) as found:
        found.round()
        yield found


def test_a_round_makes_nothing_for_every_client(rounds: Rayfl) -> None:
    """Not even a byte each: neither copies nor masks."""
    tracemalloc.start()
    try:
        rounds.driver.servers.snapshot()
        rounds.driver.records.snapshot()
        rounds.round()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < CLIENTS, "bytes: one for every client"


def test_the_table_of_all_clients_is_never_in_memory_as_a_whole(
    rounds: Rayfl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took 172 bytes for each client: 1.7 GB with ten million."""
    monkeypatch.setattr(rundir, "AT_ONCE", 20_000)
    rounds.driver.records.write_tables(rounds.state)
    tracemalloc.start()
    try:
        rounds.driver.records.write_tables(rounds.state)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * CLIENTS


def test_a_round_does_not_look_at_every_client(rounds: Rayfl) -> None:
    """No array over all clients is read but at the places of the cohort."""
    federation = rounds.driver.federation
    sizes = federation.train.sizes
    assert sizes is federation.train.sizes
    assert rounds.driver.setup.present is rounds.driver.setup.present


def test_tests_are_planned_once_while_clients_and_models_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, of = [], EvaluationPlan.of
    monkeypatch.setattr(EvaluationPlan, "of", lambda *a, **o: planned.append(1) or of(*a, **o))
    task = replace(workload(200, 10, every=1), samples=2)
    with running(task, tmp_path, {"backend": "inline"}) as found:
        for _ in range(3):
            found.round()
        assert len(planned) == 1
        moved = found.state.assignment.copy()
        found.state = replace(found.state, assignment=moved)  # another array, and so other models
        found.round()
        assert len(planned) == 2


def test_tables_are_written_a_few_clients_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same files, and never the text of all clients at once."""
    longest = [0]

    def watched(path: Path, data: str | bytes | Iterable[str]) -> None:
        pieces = [data] if isinstance(data, str | bytes) else list(data)
        if path.suffix == ".csv":
            longest.append(max(map(len, pieces)))
        write(path, data if isinstance(data, str | bytes) else pieces)

    write = files.write
    monkeypatch.setattr(files, "write", watched)
    task = replace(workload(300, 10, every=1), samples=2)
    with running(task, tmp_path, {"backend": "inline"}) as found:
        found.round()
        written = []
        for rows in (1000, 7):
            monkeypatch.setattr(rundir, "AT_ONCE", rows)
            longest.clear()
            found.driver.records.write_tables(found.state)
            folder = found.driver.run_dir.path
            written.append([(folder / name).read_text() for name in ("clients.csv", "labels.csv")])
    assert written[0] == written[1]
    assert written[0][0].count("\n") == 301
    assert max(longest) < 600


def test_what_is_kept_is_made_again_for_other_arrays() -> None:
    kept: Kept[int] = Kept()
    one, other, made = np.zeros(3), np.zeros(3), iter(range(9))
    assert [kept.of(lambda: next(made), *asked) for asked in [(one, 1), (one, 1), (other, 1)]] == [0, 0, 1]
    assert kept.of(lambda: next(made), other, 2) == 2
    assert kept.of(lambda: next(made), other, 2.0) == 3


def test_states_of_clients_are_where_they_were_last_kept() -> None:
    """Against a dictionary, with copies that later rounds leave alone."""
    rng, backend = np.random.default_rng(0), InlineBackend()
    try:
        states, known = ClientStates(), dict[int, float]()
        copies: list[tuple[ClientStates, dict[int, float]]] = []
        for turn in range(60):
            clients = np.sort(rng.choice(900, 20, replace=False))
            rows, valid = rng.random((20, 1)).astype(np.float32), rng.random(20) < 0.9
            if turn % 10 == 0:
                copies.append((states.copy(), dict(known)))
            states.update(clients, rows, valid)
            states.pack(backend)
            known |= dict(zip(clients[valid].tolist(), rows[valid, 0].tolist(), strict=True))
        for found, expected in [*copies, (states, known)]:
            who, values = found.fetch(backend)
            assert dict(zip(who.tolist(), values.ravel().tolist(), strict=True)) == expected
            assert len(found) == len(expected)
            assert [c in found for c in range(1000)] == [c in expected for c in range(1000)]
    finally:
        backend.close()

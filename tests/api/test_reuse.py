"""What a run or a result has kept is not used for anything else than what it was made from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import rayfl
from rayfl import given
from rayfl.algorithms.fedavg import FedAvg
from rayfl.events import Note


def write(folder: Path, scale: float, shift: float) -> str:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 200)
    x = scale * (2 * np.eye(3)[y] @ rng.normal(size=(3, 8)) + rng.normal(size=(200, 8))) + shift
    np.savez(folder / "d.npz", x=x.astype(np.float32), y=y)
    return str(folder / "d.npz")


@pytest.fixture
def numbers(settings: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A run on a file of the user's."""
    data = {"name": "npz", "path": write(tmp_path, 1, 0), "test_fraction": 0.2}
    return {**settings, "rounds": 2, "data": data, "partition": {"name": "iid", "clients": 4}}


def test_a_run_without_a_checkpoint_is_scaled_for_the_data_that_it_resumes_with(
    numbers: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, 100, 5000)  # by mistake
    begun = rayfl.run({**numbers, "rounds": 1})
    for name in ("checkpoints", "models"):
        shutil.rmtree(begun.path / name)
    (begun.path / "summary.json").unlink()
    write(tmp_path, 1, 0)
    resumed = rayfl.resume(begun.path)
    fresh = rayfl.run({**numbers, "rounds": 1})
    assert resumed.scaling.to_dict() == fresh.scaling.to_dict()
    assert resumed.summary["models_sha256"] == fresh.summary["models_sha256"]


def test_a_result_reads_what_has_changed(numbers: dict[str, Any]) -> None:
    result = rayfl.run({**numbers, "rounds": 1})
    before = result.rounds
    assert result.rounds is before
    rayfl.resume(result.path, ["rounds=3"])
    assert len(result.rounds) == 3
    assert result.summary["rounds"] == 3
    kept = result.clients
    shutil.rmtree(result.path)
    assert result.clients is kept


def test_what_was_made_of_fewer_rounds_goes_when_the_run_goes_on(numbers: dict[str, Any]) -> None:
    begun = rayfl.run({**numbers, "rounds": 1})
    (begun.path / "models" / "clients").mkdir()
    made = ["models/clients/client_0.safetensors", "newcomers.csv", "newcomers_communication.csv"]
    for name in made:
        (begun.path / name).write_text("of round 1")
    rayfl.resume(begun.path)  # nothing to do
    assert all((begun.path / name).is_file() for name in made)
    rayfl.resume(begun.path, ["rounds=2"])
    assert not any((begun.path / name).exists() for name in made)


def test_a_package_that_an_earlier_version_did_not_record_is_no_change(numbers: dict[str, Any]) -> None:
    begun = rayfl.run({**numbers, "rounds": 1})
    told = json.loads((begun.path / "environment.json").read_text())
    del told["versions"]["numba"]
    (begun.path / "environment.json").write_text(json.dumps(told))
    rayfl.resume(begun.path, ["rounds=2"])
    assert "resumed_with" not in json.loads((begun.path / "environment.json").read_text())


def test_another_version_is_noted_and_the_first_one_is_kept(numbers: dict[str, Any]) -> None:
    begun = rayfl.run({**numbers, "rounds": 1})
    told = json.loads((begun.path / "environment.json").read_text())
    first = {**told["versions"], "rayfl": "0.0.1"}
    (begun.path / "environment.json").write_text(json.dumps({**told, "versions": first}))
    notes: list[str] = []
    rayfl.resume(
        begun.path, ["rounds=2"], on_event=lambda e: notes.append(e.text) if isinstance(e, Note) else None
    )
    assert "the run began with rayfl 0.0.1, and continues with other versions" in notes
    now = json.loads((begun.path / "environment.json").read_text())
    assert (now["versions"], now["resumed_with"]) == (first, told["versions"])


class InPlace(FedAvg):
    name: Literal["in_place"] = "in_place"

    def end(self, setup: Any, state: Any, plan: Any, report: Any) -> Any:
        state.assignment[0] = 0
        return super().end(setup, state, plan, report)


def test_a_method_that_changes_its_state_in_place_is_stopped(
    numbers: dict[str, Any], forgotten_parts: None
) -> None:
    """Clients would be tested with the models of the round before."""
    with pytest.raises(ValueError, match="read-only"):
        rayfl.run(numbers, algorithm=InPlace())


def test_a_given_file_with_other_content_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path))
    path = Path(given.keep(b"content", ".npz"))
    path.write_bytes(b"con")  # cut off
    assert given.keep(b"content", ".npz") == str(path)
    assert path.read_bytes() == b"content"
    assert [each.name for each in path.parent.iterdir()] == [path.name]

"""What a run needs is found from any folder, wherever it was begun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayfl
from rayfl.config import load
from rayfl.errors import ConfigError
from rayfl.report import write_report

ROWS = [f"{i % 7 / 7},{i % 3 / 3},{i % 2},{i % 4}" for i in range(80)]
CODE = """
import numpy as np

def data():
    x, y = np.random.random((60, 3)), np.arange(60) % 2
    return x[:40], y[:40], x[40:], y[40:]

def deal(samples, rng):
    return [np.arange(15), np.arange(15, 40)]
"""
SOURCES: dict[str, dict[str, Any]] = {
    "a table and a file of owners": {
        "data": {"name": "table", "path": "t.csv", "test_path": "t.csv", "label": "y", "exclude": ["who"]},
        "partition": {"name": "file", "path": "owners.csv", "validation": 0},
    },
    "arrays": {"data": {"name": "npz", "path": "a.npz"}, "partition": {"name": "iid", "clients": 3}},
    "functions": {
        "data": {"name": "python", "target": "functions_of_mine.py:data"},
        "partition": {"name": "python", "target": "functions_of_mine.py:deal"},
    },
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "t.csv").write_text("\n".join(["a,b,y,who", *ROWS]) + "\n")
    owners = "\n".join(["sample,client", *(f"{i},c{i % 4}" for i in range(80))])
    (folder / "owners.csv").write_text(owners + "\n")
    x, y = np.random.default_rng(0).random((40, 3), np.float32), np.arange(40) % 2
    np.savez(folder / "a.npz", x_train=x, y_train=y, x_test=x[:10], y_test=y[:10])
    (folder / "functions_of_mine.py").write_text(CODE)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("kind", SOURCES)
def test_a_run_goes_on_in_another_folder(
    kind: str, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        **SOURCES[kind],
        "model": {"name": "mlp", "hidden": [4]},
        "execution": {"backend": "inline"},
        "output": {"root": "runs", "report": False, "tensorboard": False},
    }
    whole = rayfl.run(settings, ["rounds=3"])
    assert whole.path.parent == here / "runs"
    begun = rayfl.run(settings, ["rounds=2"])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    again = rayfl.resume(begun.path, ["rounds=3"])
    assert again.summary["models_sha256"] == whole.summary["models_sha256"]
    assert dict(rayfl.api.client_models(again.path))
    assert write_report(again.path).is_file()


def test_settings_hold_absolute_paths(here: Path) -> None:
    config = load({"data": {"name": "npz", "path": "sub/../a.npz"}, "output": {"root": "runs"}})
    assert config.to_dict()["data"]["path"] == f"{here}/sub/../a.npz"
    assert config.to_dict()["output"]["root"] == "runs"  # where a command is given
    for given, expected in {
        "{name: huggingface, path: mnist}": {"path": "mnist"},
        "{name: huggingface, path: csv, data_files: t.csv}": {"path": "csv", "data_files": f"{here}/t.csv"},
        "{name: huggingface, path: csv, data_files: {train: t.csv, test: 'https://a/b.csv'}}": {
            "data_files": {"train": f"{here}/t.csv", "test": "https://a/b.csv"}
        },
        "{name: huggingface, path: ../here}": {"path": f"{here}/../here"},
    }.items():
        found = load({}, [f"data={given}"]).to_dict()["data"]
        assert {key: found[key] for key in expected} == expected


def test_a_run_of_an_earlier_version_goes_on_where_it_was(here: Path) -> None:
    settings = {
        **SOURCES["arrays"],
        "model": {"name": "mlp", "hidden": [4]},
        "rounds": 1,
        "execution": {"backend": "inline"},
        "output": {"root": "runs", "report": False, "tensorboard": False},
    }
    path = rayfl.run(settings).path
    for file in (path / "config.yaml", *path.glob("checkpoints/*/manifest.json")):
        assert f"{here}/a.npz" in file.read_text()
        text = re.sub(r',\s*"sha256": "\w+"\s*\}\Z', "}", file.read_text())  # nor was there a hash of it
        file.write_text(text.replace(f"{here}/a.npz", "a.npz"))
    notes: list[Any] = []
    again = rayfl.resume(path, ["rounds=2"], notes.append)
    assert len(again.rounds) == 2
    assert any("resuming: 1 of 2" in note.text for note in notes if isinstance(note, rayfl.Note))


@pytest.mark.parametrize("thing", [None, 3, ["digits-demo"], object()])
def test_what_is_no_config_is_refused_in_a_line(thing: Any) -> None:
    with pytest.raises(ConfigError, match=r"^config: .* is not a config; expected a preset's name"):
        rayfl.run(thing)


def test_the_schema_is_all_that_is_on_standard_output(tmp_path: Path) -> None:
    plugin = tmp_path / "talks.py"
    plugin.write_text("print('hello')\n")
    command = [sys.executable, "-m", "rayfl", "--plugin", str(plugin), "list", "--schema"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.startswith("{")
    assert "hello" in found.stderr

"""The README: its examples run, what it names exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from rayfl import load
from rayfl.algorithms import ALGORITHMS
from rayfl.api import run
from rayfl.config import presets, variant
from rayfl.data import DATASETS
from rayfl.study import prepare, read

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()
INLINE = ["execution.backend=inline", "output.report=false", "output.tensorboard=false"]


def block(language: str, begins: str) -> str:
    """The code block of a language that begins so."""
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)
    (one,) = [text for text in found if text.startswith(begins)]
    return one


def test_the_method_of_the_readme_works_as_a_file_of_ones_own(tmp_path: Path) -> None:
    (place,) = re.findall(r"<!-- example: (\S+) -->", TEXT)
    (tmp_path / place).write_text(block("python", '"""Late clustering'))
    (line,) = re.findall(r"^rayfl (run digits-demo --plugin .*)$", TEXT, flags=re.MULTILINE)
    command = [sys.executable, "-m", "rayfl.cli", *line.replace("warmup=3", "warmup=2").split(), "rounds=4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, *INLINE], cwd=tmp_path, env=environment, check=True, capture_output=True)
    (rounds,) = (tmp_path / "runs").glob("digits-demo-late_clustering-*/rounds.csv")
    assert pd.read_csv(rounds).clusters.tolist() == [1, 1, 3, 3]


def test_the_config_of_the_readme_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(block("yaml", "# mine.yaml"))
    result = run(tmp_path / "mine.yaml", [*INLINE, "training.lr=0.02", f"output.root={tmp_path}"])
    assert result.summary["rounds"] == 5
    assert result.summary["clusters"] == 4


def test_the_study_of_the_readme_is_one(tmp_path: Path) -> None:
    (tmp_path / "who-profits.yaml").write_text(block("yaml", "# who-profits.yaml"))
    prepared = prepare(read(tmp_path / "who-profits.yaml"), check_data=False)
    assert len(prepared.runs) == 3 * 3 * 5
    assert len(prepared.candidates) == 3 * 3


def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = block("python", "import rayfl").replace('"rounds=5"', f'"rounds=5", *{INLINE}')
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    (rounds,) = tmp_path.glob("runs/*/rounds.csv")
    assert len(pd.read_csv(rounds)) == 8


def test_what_the_readme_names_exists() -> None:
    commands = re.findall(r"rayfl (?:run|prepare) ([a-z0-9_-]+)(?: |`|$)", TEXT, flags=re.MULTILINE)
    assert commands
    assert set(commands) <= set(presets()) | set(DATASETS)
    assert set(re.findall(r"^\| `([a-z_]+)` \|", TEXT, flags=re.MULTILINE)) <= set(ALGORITHMS)
    for path in re.findall(r"\]\((?!http)([^)]+)\)", TEXT):
        assert (ROOT / path).exists()
    for preset, overrides in re.findall(r"rayfl run ([a-z]+-\w+)((?: [a-z_.]+=[\w./]+)*)", TEXT):
        changes = overrides.split()
        if not any(method in overrides for method in ("late_clustering", "treshold")):
            load(preset, changes)


@pytest.mark.slow
def test_the_numbers_of_the_readme_are_what_a_run_prints(tmp_path: Path) -> None:
    rows = dict(re.findall(r"^│(\w+) *│.*?│ *[\d.–]+│ *([\d.]+)│", TEXT, flags=re.MULTILINE))
    assert set(rows) == {"mt_hfl", "fedavg", "solo"}
    for method, printed in rows.items():
        config = variant("digits-demo", [*INLINE, f"output.root={tmp_path}"], method)
        assert abs(run(config).summary["accuracy_mean"] - float(printed)) < 1.0

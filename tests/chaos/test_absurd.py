"""Absurd input ends in one line and exit code 2, or works: no traceback, no hang, no runaway memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _wrong(tmp_path: Path, *args: str) -> list[str]:
    """Cases that neither worked nor ended in one line; they run in a process that has used no threads."""
    out = tmp_path / "outcomes.jsonl"
    command = [sys.executable, "-m", "tests.chaos.absurd", "--out", str(out), *args]
    subprocess.run(command, cwd=ROOT, check=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows
    return [f"{r['what']}: {r['name']}: {r['text']}" for r in rows if r["what"] not in ("right", "line")]


def test_a_sample_of_absurd_input_is_refused_in_one_line(tmp_path):
    assert _wrong(tmp_path, "--sample", "2") == []


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ["settings", "yaml", "run directory", "npz", "idx"])
def test_absurd_input_is_refused_in_one_line(tmp_path, kind):
    """400 of the settings times values, and of the damages to run directories; all of the others."""
    assert _wrong(tmp_path, "--kinds", kind, "--sample", "400") == []

"""``rayfl init``: what it writes works as it stands, and nothing is overwritten."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayfl.commands.init import SKELETONS, init
from rayfl.errors import ConfigError
from rayfl.study import execute, prepare, read

ROOT = Path(__file__).parents[2]


def test_every_skeleton_passes_its_own_test(tmp_path: Path) -> None:
    """In one Python, as a user would run them in an own folder."""
    for kind in SKELETONS:
        written, tries = init(kind, "", tmp_path)
        assert [path.is_file() for path in written] == [True, True]
        assert tries[0] == f"python -m pytest {written[1]}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "14 passed" in found.stdout


@pytest.mark.parametrize(
    "kind", [k if k == "dataset" else pytest.param(k, marks=pytest.mark.slow) for k in SKELETONS]
)
def test_the_commands_of_a_skeleton_run(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are printed, and those in its docstring; up to the first round."""
    monkeypatch.chdir(tmp_path)
    written, tries = init(kind, "", Path())
    text = written[0].read_text().replace("\\\\\n", "")
    found = [*tries[1:], *re.findall("^    (rayfl .*)$", text, re.MULTILINE)]
    commands = {" ".join(command.split()) for command in found}
    for command in commands:
        dry = ["--dry-run"] if command.startswith("rayfl run") else []
        ran = subprocess.run(
            [sys.executable, "-m", *command.split(), *dry, "execution.backend=inline"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, (command, ran.stderr)


def test_ruff_accepts_the_skeletons_as_they_are(tmp_path: Path) -> None:
    """With its defaults, and sorted imports, in a folder where rayfl is a package like any other."""
    for kind in SKELETONS:
        init(kind, "", tmp_path)
    for command in (["check", "--extend-select", "I"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--isolated", "--no-cache", "."]
        found = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True)
        assert found.returncode == 0, found.stdout


@pytest.mark.slow
def test_the_study_runs_as_it_stands(tmp_path: Path) -> None:
    written, tries = init("study", "", tmp_path)
    assert tries[1] == f"rayfl study {written[0]}"
    prepared = prepare(read(written[0], "smoke", [f"output.root={tmp_path}"]))
    assert (prepared.study.name, len(prepared.runs)) == ("my_study", 3 * 2 * 2)
    named = init("study", "123", tmp_path)[0][0]  # not the number
    assert read(named).name == "123"
    study = execute(
        prepare(read(written[0], "smoke", [f"output.root={tmp_path}"], ["SOLO"], "0")), tmp_path, True
    )
    assert study.results.finished == 2


def test_names_are_filled_in(tmp_path: Path) -> None:
    written, tries = init("method", "two_words", tmp_path / "new")
    assert [path.name for path in written] == ["two_words.py", "test_two_words.py"]
    text = written[0].read_text()
    assert "class TwoWords(Algorithm):" in text
    assert 'name: Literal["two_words"] = "two_words"' in text
    assert not any(re.search("__[A-Z]+__", path.read_text()) for path in written)
    assert tries[1].endswith("two_words.py algorithm=two_words")


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("methd", "", "init: no skeleton for 'methd'; did you mean 'method'?"),
        ("method", "My-Method", "--name: 'My-Method' cannot be a module's name"),
        ("method", "class", "--name: 'class' cannot be a module's name"),
        ("method", "../x", "--name: '../x' cannot be a module's name"),
        ("method", "fedavg", "--name: there is a method named 'fedavg' already; choose another name"),
        ("model", "mlp", "--name: there is a model named 'mlp' already"),
        ("dataset", "numpy", "--name: there is a module named 'numpy' already"),
        ("study", "a b", "--name: 'a b' cannot be a study's name"),
        ("cluster", "mine", "--name: a cluster's files have fixed names; leave it out"),
    ],
)
def test_names_that_cannot_be_used_are_one_line(kind: str, name: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        init(kind, name, tmp_path)
    assert str(raised.value).startswith(text)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("there", ["my_method.py", "test_my_method.py"])
def test_nothing_is_overwritten(there: str, tmp_path: Path) -> None:
    (tmp_path / there).write_text("mine")
    with pytest.raises(
        ConfigError, match="exists already; nothing was written; choose another --name or --folder"
    ):
        init("method", "", tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(there, "mine")]


def test_files_of_a_cluster_that_are_there_ask_for_a_folder(tmp_path: Path) -> None:
    """They have fixed names, so that --name would be refused next."""
    (tmp_path / "rayjob.yaml").write_text("mine")
    with pytest.raises(ConfigError, match=r"nothing was written; choose another --folder$"):
        init("cluster", "", tmp_path, "kuberay")
    assert [path.name for path in tmp_path.iterdir()] == ["rayjob.yaml"]


def test_the_cluster_is_that_of_the_checkout_with_rayfl_from_pip(tmp_path: Path) -> None:
    """Only how the package gets there is different."""
    init("cluster", "", tmp_path)

    def read(path: Path) -> dict[str, Any]:
        found: dict[str, Any] = yaml.safe_load(path.read_text())
        return found

    ours, theirs = read(ROOT / "cluster.yaml"), read(tmp_path / "cluster.yaml")
    installing = {"file_mounts", "rsync_exclude", "setup_commands", "head_setup_commands"}
    assert {k: v for k, v in ours.items() if k not in installing} == {
        k: v for k, v in theirs.items() if k not in installing
    }
    assert any("pip install -q 'rayfl==" in command for command in theirs["setup_commands"])
    text, other = (path.read_text() for path in (tmp_path / "cluster.yaml", ROOT / "cluster.yaml"))
    own, checkout = (each.split("# -- on-premise\n")[1] for each in (text, other))
    assert own == checkout.replace("~/checkout/.venv", "~/environment")
    assert "checkout" not in text
    codes = [ast.parse(path.read_text()) for path in (tmp_path / "launch.py", ROOT / "experiments/launch.py")]
    assert len({ast.dump(ast.Module(code.body[1:], [])) for code in codes}) == 1


def test_the_command_line(tmp_path: Path) -> None:
    """``python -m rayfl`` is the command; a second time is one line, exit code 2."""
    command = [sys.executable, "-m", "rayfl", "init", "dataset"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    first, second = (
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        for _ in range(2)
    )
    assert first.stdout.splitlines()[:3] == [
        "written: my_data.py",
        "written: test_my_data.py",
        "continue with: python -m pytest test_my_data.py",
    ]
    assert (first.returncode, second.returncode) == (0, 2)
    remedy = "choose another --name or --folder"
    assert second.stderr == f"error: my_data.py: exists already; nothing was written; {remedy}\n"


def test_the_shell_completes_commands(tmp_path: Path) -> None:
    words = {"_RAYFL_COMPLETE": "complete_bash", "COMP_WORDS": "rayfl re", "COMP_CWORD": "1"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **words}
    command = [sys.executable, "-m", "rayfl"]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.stdout.split() == ["resume", "report"]

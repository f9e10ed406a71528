"""The commands on the pages in experiments/ can be given as they stand; they are read, not run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from rayfl import plugins
from rayfl.cli import app
from rayfl.config import load
from rayfl.study import prepare, read

FOLDER = Path(__file__).resolve().parents[2] / "experiments"
PAGES = sorted(FOLDER.glob("*/README.md"))  # the one above them is generated
_INLINE = re.compile(r"`((?:rayfl|python)\s[^`]+)`")
_BLOCK = re.compile(r"^ *((?:rayfl|python) [^\n`]+)$", re.MULTILINE)
_PROSE = re.compile(r"rayfl (was|takes|divides) ")


def commands(text: str) -> list[str]:
    """The commands on a page: in backticks, in fenced blocks and in indented ones."""
    joined = re.sub(r"\\\n\s*", "", text)
    found = [" ".join(each.split()) for each in (*_INLINE.findall(joined), *_BLOCK.findall(joined))]
    return [each for each in found if not _PROSE.match(each)]


def check(command: str) -> None:
    """Refuse a command that would not start.

    Raises:
        Exception: with what is wrong.
    """
    program, *words = shlex.split(command.replace("$O", "execution.backend=inline"), comments=True)
    if program == "python":
        _check_script(FOLDER.parent / words[0], words[1:])
        return
    tool: Any = typer.main.get_command(app)  # Typer has its own Click
    while words and (below := getattr(tool, "commands", None)):
        tool = below[words.pop(0)]
    if not words:  # the name of the command alone
        return
    given = tool.make_context(tool.name, words).params
    if tool.name == "study":
        parts = {name: given[name] for name in ("size", "only", "seeds")}
        prepare(read(given["file"], settings=given["overrides"], **parts), check_data=False)
    elif "config" in given:
        load(str(given["config"]), given["overrides"])


def _check_script(path: Path, words: list[str]) -> None:
    source = path.read_text()
    for word in words:
        if word.startswith("--"):
            shared = word in ("--seeds", "--out") and re.search(
                rf"frame\.main\(.*{word[2:]}=", source, re.DOTALL
            )
            assert shared or f'"{word}"' in source, f"{path.name} has no option {word}"
        elif word.startswith("experiments/"):
            assert (FOLDER.parent / word).exists(), f"no file {word}"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_the_commands_of_a_page_can_be_given(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parent)
    wrong = {}
    for command in commands(page.read_text(encoding="utf-8")):
        monkeypatch.setattr(plugins, "_loaded", {})  # those of a study are not those of the next one
        try:
            check(command)
        except Exception as error:
            wrong[command] = str(error)
    assert not wrong


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("rayfl study experiments/cfl/figure_8.yaml --size papers", "no size 'papers'"),
        ("rayfl study experiments/cfl/figure_88.yaml", "figure_88.yaml: cannot be read"),
        ("rayfl study experiments/cfl/figure_8.yaml --only nobody", "no method 'nobody'"),
        ("rayfl run cfl-label-swap rouns=2 $O", "rouns: no such setting"),
        ("rayfl run --fast cfl-label-swap", "No such option"),
        ("rayfl simulate", "simulate"),
        ("python experiments/cfl/none.py", "No such file"),
        ("python experiments/cfl/beside.py --clients 3", "beside.py has no option --clients"),
        ("python experiments/subfedavg/export.py RUN --seeds 3", "export.py has no option --seeds"),
        ("python experiments/scaling/scaling.py experiments/none.yaml", "no file experiments/none.yaml"),
    ],
)
def test_a_command_that_is_wrong_is_found(command: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parent)
    with pytest.raises(Exception, match=re.escape(words)):
        check(command)


def test_all_kinds_of_code_are_read() -> None:
    text = "`rayfl run\na` and\n\n    rayfl run b \\\n        c\n\n```\npython d.py\n```\n\nrayfl takes 3 s\n"
    assert commands(text) == ["rayfl run a", "rayfl run b c", "python d.py"]

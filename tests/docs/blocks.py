"""The code blocks of a Markdown page, and how they are run.

====================================  ==================================================================
block                                 what is done
====================================  ==================================================================
any with ``title="name"``             written to a file of this name, for what follows on the page
yaml                                  read as a config (or a study, if it has ``methods``)
python, without a title               executed; all of a page share their names
bash                                  each line ``rayfl ...`` is run by ``rayfl.cli.main`` in this process
console                               ``$ command``, and below it what the command prints
====================================  ==================================================================

Runs are made small (:data:`SMALL`). A run whose dataset has to be downloaded is only read and resolved.
``runs/NAME-...`` stands for a run directory of that name, which is made if the page has none yet. Commands of
other programs are not run, but the program must be one of :data:`OTHERS`, and targets of make must exist;
``python file.py`` is run if the page has the file. A block behind ``<!-- slow: reason -->`` is run by the
slow tests only, and one behind ``<!-- not run: reason -->`` not at all.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rayfl import cli, plugins
from rayfl.config import load
from rayfl.config.kinds import KINDS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

INLINE = ("execution.backend=inline", "output.report=false", "output.tensorboard=false")
"""Settings of runs in this process, without pages."""

SMALL = (*INLINE, "training.epochs=1", "rounds=1")
"""Settings of runs; those that a command gives itself count, but for the rounds."""

OTHERS = ("make", "pip", "ray", "kubectl", "helm", "sbatch", "ssh", "git", "docker", "python", "mlflow", "cd")
"""Programs whose commands are not run."""

_BLOCK = re.compile(
    r"(?:<!-- (?P<when>not run|slow): [^\n]+ -->\n+)?"
    r"^```(?P<language>\w+)(?P<rest>[^\n]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, in what language, under what name, the text, and when it is run."""

    line: int
    language: str
    title: str
    code: str
    when: str


def blocks(text: str) -> Iterator[Block]:
    """The code blocks of a page, in order."""
    for found in _BLOCK.finditer(text):
        title = re.search(r'title="([^"]+)"', found["rest"])
        yield Block(
            text.count("\n", 0, found.start("language")) + 1,
            found["language"],
            title[1] if title else "",
            found["code"],
            found["when"] or "always",
        )


@dataclass
class Page:
    """Runs the blocks of one page in the current folder.

    Attributes:
        text: of the page.
        slow: run the slow blocks, too.
        names: of its Python blocks.
        commands: that were run.
    """

    text: str
    slow: bool = False
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "page"})
    commands: list[str] = field(default_factory=list)

    def run(self) -> int:
        """Run all blocks; how many there were."""
        number = 0
        for block in blocks(self.text):
            if (
                block.language == "text"
                or block.when == "not run"
                or (block.when == "slow" and not self.slow)
            ):
                continue
            number += 1
            try:
                self._run(block)
            except BaseException as error:
                error.add_note(f"in the block at line {block.line}") if sys.version_info >= (3, 11) else None
                raise
        return number

    def _run(self, block: Block) -> None:
        if block.title:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.code, encoding="utf-8")
        if block.language == "yaml":
            self._config(block)
        elif block.language == "python" and not block.title:
            code = _small_calls(block.code)
            exec(compile(code, f"line {block.line}", "exec"), self.names)
        elif block.language == "bash":
            for line in block.code.replace("\\\n", " ").splitlines():
                self._command(line)
        elif block.language == "console":
            command, expected = block.code.strip().removeprefix("$ ").split("\n", 1)
            printed = self._command(command)
            missing = [line for line in expected.splitlines() if line != "..." and line not in printed]
            assert not missing, f"{command} did not print {missing}, but\n{printed}"

    def _config(self, block: Block) -> None:
        said = yaml.safe_load(block.code)
        if "methods" in said:
            from rayfl.study import prepare, read

            path = Path(block.title or "study.yaml")
            path.write_text(block.code, encoding="utf-8")
            prepare(read(path), check_data=False)
        elif "plugins" not in said:
            load(said)

    def _command(self, line: str) -> str:
        words = shlex.split(line.partition(" > ")[0], comments=True)
        if not words:
            return ""
        program, *arguments = words
        if program == "python" and arguments and Path(arguments[0]).is_file() and "launch" not in line:
            runpy.run_path(arguments[0], run_name="__main__")
            return ""
        if program != "rayfl":
            assert program in OTHERS, f"no such program: {program}"
            if program == "make":
                makefile = (ROOT / "Makefile").read_text()
                assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in arguments)
            if "launch.py" in line:
                rest = line.split("launch.py", 1)[1].split()
                self._resolved([word for word in rest if word != "--"])
            return ""
        self.commands.append(line)
        return self._rayfl([self._run_directory(word) for word in arguments])

    def _run_directory(self, word: str) -> str:
        """``runs/digits-demo-...`` as the directory of a run."""
        if not word.endswith("-..."):
            return word
        preset = Path(word.removesuffix("-...")).name
        if not list(Path("runs").glob(f"{preset}-*")):
            self._rayfl(["run", preset])
        return str(max(Path("runs").glob(f"{preset}-*/")))

    def _resolved(self, words: list[str]) -> Any:
        """The config of ``run CONFIG changes...``, with options left out."""
        command, config, *rest = words
        assert command == "run"
        options = [place for place, word in enumerate(rest) if word.startswith("--")]
        return load(config, rest[: options[0]] if options else rest)

    def _rayfl(self, arguments: list[str]) -> str:
        if arguments[:1] == ["run"] and "--plugin" not in arguments and not _has_plugins(arguments[1]):
            with contextlib.suppress(Exception):  # a mistake is shown by the command itself
                data = self._resolved(arguments).data
                if not data.available(data.root or Path("no-data")):
                    return ""
        if arguments[:1] == ["prepare"]:
            return ""
        if arguments[:1] == ["study"]:
            arguments = [*arguments, *([] if "--size" in arguments else ["--dry-run"]), "--inline"]
        if arguments[:1] == ["cluster"] and "--plugin" in arguments:  # which the tests' Ray lacks
            arguments = [*arguments, *INLINE]
        if arguments[:1] in (["run"], ["resume"]):
            given = {word.split("=")[0] for word in arguments}
            small = [s for s in SMALL if s.startswith("rounds") or s.split("=")[0] not in given]
            if arguments[0] == "resume":
                small = [s for s in small if s.startswith(("execution", "rounds"))]
            options = next((n for n, word in enumerate(arguments) if word.startswith("--")), len(arguments))
            rounds = "rounds" in given and "warmup" in str(arguments)
            small = [s for s in small if not (rounds and s.startswith("rounds"))]
            arguments = [*arguments[:options], *small, *arguments[options:]]
        return rayfl(arguments)


def _has_plugins(config: str) -> bool:
    return Path(config).is_file() and "plugins" in yaml.safe_load(Path(config).read_text())


def _small_calls(code: str) -> str:
    """Calls of ``rayfl.run`` inline, without pages."""
    extra = ", ".join(repr(s) for s in INLINE)
    return re.sub(r'(rayfl\.run\("[^"]+", )\[', rf"\1[{extra}, ", code)


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Forget what is imported from the current folder, and its parts: another page has other files.

    Nor does a page know the parts of tests in this process, whose names may be its own.
    """
    here, known = str(Path.cwd()), set(sys.modules)
    added = {kind: registry._added for kind, registry in KINDS.items()}
    for registry in KINDS.values():
        registry._added = {}
    try:
        yield
    finally:
        for name in set(sys.modules) - known:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(here):
                del sys.modules[name]
                plugins._loaded.pop(name, None)
        sys.path[:] = [path for path in sys.path if path != here]
        for kind, registry in KINDS.items():
            registry._added = added[kind]


def rayfl(arguments: list[str]) -> str:
    """What a command prints; an error unless it ends with 0, or with 2 after printing an error."""
    before, out, err = sys.argv, io.StringIO(), io.StringIO()
    sys.argv = ["rayfl", *arguments]
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.argv = before
    printed = out.getvalue() + err.getvalue()
    assert code == 0 or (code == 2 and "treshold" in str(arguments)), f"{arguments}: {printed}"
    return printed


def pages() -> list[Path]:
    """All pages that are files, and the READMEs."""
    return [
        ROOT / "README.md",
        ROOT / "examples" / "README.md",
        *sorted(p for p in DOCS.rglob("*.md") if os.sep + "generate" not in str(p)),
    ]

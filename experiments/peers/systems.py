"""The systems that are compared, and their virtual environments."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rayfl.errors import RayflError

HERE = Path(__file__).parent

IMAGES = frozenset({"W1", "W2", "W3", "pfl", "flute", "blazefl"})
TORCH = IMAGES | {"W4a", "W4b", "W5a", "W5b"}


@dataclass(frozen=True)
class System:
    """A system.

    Attributes:
        name: of its client script ``clients/run_<name>.py`` and its requirements.
        title: for tables.
        about: how it runs here.
        launch: arguments of the interpreter before the script.
        own: whether it has a separate environment; else it runs in this one.
        workloads: those that its client script can run.
        why_not: the reason why others are left out.
        environment: variables to set.
    """

    name: str
    title: str
    about: str
    launch: tuple[str, ...] = ()
    own: bool = True
    workloads: frozenset[str] = TORCH
    why_not: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def script(self) -> Path:
        """The client script."""
        return HERE / "clients" / f"run_{self.name}.py"

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return home() / self.name / "bin" / "python" if self.own else Path(sys.executable)

    @property
    def installed(self) -> bool:
        """Whether its environment exists."""
        return self.python.exists()

    def command(self) -> list[str]:
        """The command that runs the client script."""
        return [str(self.python), *self.launch, str(self.script)]

    def lines(self) -> int:
        """Lines of code that the user writes, without docstrings, comments, empty lines, and shared files."""
        return code_lines(self.script)


SYSTEMS: Mapping[str, System] = {
    s.name: s
    for s in (
        System("rayfl", "rayfl", "one actor per core, on Ray", own=False),
        System("plain", "plain PyTorch", "a loop in two processes of one thread", own=False),
        System("flwr", "Flower", "simulation engine on Ray, one CPU per client"),
        System(
            "pfl",
            "pfl",
            "torchrun, two processes of one thread",
            launch=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            environment={"OMP_NUM_THREADS": "1"},
        ),
        System(
            "fedjax",
            "FedJAX",
            "jit in one process; names that JAX has since removed are added again",
            workloads=IMAGES,
            why_not="its ResNets and text models are other networks",
        ),
        System("fluke", "fluke", "one process; all cores where convolutions are large"),
        System("cfla", "CFLA", "one process; a client with SGD in place of its own Adam"),
    )
}

SKIPPED: Mapping[str, str] = {
    "BlazeFL 3.0": "needs Python 3.14 (its version 2 needed 3.13); its benchmark is among the workloads",
    "FLUTE": "not on PyPI; its benchmark is among the workloads",
    "FL-bench, FedZoo-Bench, PFLlib": "repositories of scripts, not packages; see correctness",
}
"""Systems that are not run, and why."""


def home() -> Path:
    """The folder of the environments: ``PEERS_HOME``, or one below the user's cache."""
    return Path(os.environ.get("PEERS_HOME") or Path.home() / ".cache" / "rayfl" / "peers")


def install(system: System, say: Callable[[str], None]) -> None:
    """Create the environment of a system from its pinned requirements.

    Raises:
        RayflError: if pip fails.
    """
    if not system.own:
        say(f"{system.name}: runs in this environment")
        return
    folder = home() / system.name
    requirements = HERE / "requirements" / f"{system.name}.txt"
    torch = next(line for line in requirements.read_text().splitlines() if line.startswith("torch=="))
    pip = [str(system.python), "-m", "pip", "install", "--quiet"]
    steps = (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [*pip, torch],  # with the dependencies of its build for this platform
        [*pip, "--no-deps", "--requirement", str(requirements)],
    )
    for step in steps:
        if subprocess.run(step, check=False).returncode:
            shutil.rmtree(folder, ignore_errors=True)
            raise RayflError(f"{system.name} could not be installed: {' '.join(step)}")
    say(f"{system.name}: installed in {folder}")


def code_lines(path: Path) -> int:
    """Lines with code: neither empty, nor comments, nor docstrings."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    fresh = True  # at the start of a statement, where a string is a docstring
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in {*skipped, tokenize.ENCODING, tokenize.ENDMARKER}:
                fresh = fresh or token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.ENCODING)
            elif not (fresh and token.type == tokenize.STRING):
                lines.update(range(token.start[0], token.end[0] + 1))
                fresh = False
    return len(lines)

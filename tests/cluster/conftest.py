"""The cluster that the tests of this folder share: ``ray up`` with cluster.yaml's on-premise lines."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.cluster.machines import HOME, ROOT, Machine, lacking, until

NODE = "RAY_worker_niceness=0 ray start --num-cpus=1 --object-store-memory=150000000 --disable-usage-stats"
"""All machines are this one: each takes a part of it only."""

_ROUNDS = 40
RUN = (
    *("run", "digits-demo", f"rounds={_ROUNDS}", "training.epochs=20", "output.checkpoint_every=3"),
    *("output.report=false", "output.tensorboard=false"),
)
"""Long enough to do something in the middle."""

_ENVIRONMENT = """
test -x ~/checkout/.venv/bin/ray || (
{python} -m venv --without-pip ~/checkout/.venv
cd ~/checkout/.venv
printf '%s\\n' ~/checkout {packages} > lib/{version}/site-packages/test.pth
for each in ray:ray.scripts.scripts rayfl:rayfl.cli; do
printf '#!%s\\nfrom %s import main\\nmain()\\n' $PWD/bin/python ${{each#*:}} > bin/${{each%:*}}
chmod +x bin/${{each%:*}}
done)
"""
"""Stands in for ``pip install``: the packages of this environment, and the rayfl that was mounted."""


def on_premise(user: str, key: Path, kernels: Path) -> dict[str, Any]:
    """cluster.yaml as its last lines say, filled in: the user, the key, and no installation from the net.

    Args:
        user, key: who logs in, and how.
        kernels: where those that are compiled on one machine are found on the others.
    """
    text = (ROOT / "cluster.yaml").read_text()
    lines = text.split("# -- on-premise\n")[1].split("# -- end")[0]
    config: dict[str, Any] = yaml.safe_load(text)
    for gone in ("available_node_types", "head_node_type"):
        del config[gone]
    config |= yaml.safe_load(re.sub(r"^# ?", "", lines, flags=re.MULTILINE))
    config["auth"] = {"ssh_user": user, "ssh_private_key": str(key)}
    environment = _ENVIRONMENT.strip().format(
        python=sys.executable,
        packages=Path(yaml.__file__).parents[1],
        version=f"python{sys.version_info[0]}.{sys.version_info[1]}",
    )
    shared = f"grep -qs NUMBA ~/.bashrc || echo export NUMBA_CACHE_DIR={kernels} >> ~/.bashrc"
    config["setup_commands"] = [environment, shared, config["setup_commands"][-1]]
    config["head_setup_commands"] = []
    for when in ("head_start_ray_commands", "worker_start_ray_commands"):
        config[when] = [command.replace("ray start", NODE) for command in config[when]]
    return config


class Cluster:
    """Three machines under ``ray up``, a fourth beside them, and the desk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        key = folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        public = (folder / "key.pub").read_text()
        self.machines: list[Machine] = []

        def machine(name: str, number: int) -> Machine:
            self.machines.append(Machine(folder / name, name, number, public))
            return self.machines[-1]

        self.desk = machine("desk", 1)
        self.desk.make_bridge()
        self.head, self.first = machine("head", 10), machine("first", 11)
        self.second, self.late = machine("second", 12), machine("late", 13)
        for each in self.machines[1:]:
            each.join(self.desk)
        (self.desk.home / "cluster.yaml").write_text(
            yaml.safe_dump(on_premise("root", key, folder / "kernels"))
        )
        self._runs = 0

    @property
    def config(self) -> str:
        """Of ``ray up``, as it is found at the desk."""
        return f"{HOME}/cluster.yaml"

    def plug(self, machine: Machine, state: str) -> None:
        """Put a machine's link ``up`` or ``down``."""
        self.desk.in_network("ip", "link", "set", f"port{machine.number}", state)

    def start(self, machine: Machine) -> None:
        """Start Ray by hand on a machine that ``ray up`` does not know; its disk is a copy of the head's."""
        shutil.copytree(self.head.home / "checkout", machine.home / "checkout", symlinks=True)
        shutil.copy(self.head.home / ".bashrc", machine.home)
        machine.run("bash", "-c", f". ~/.bashrc; {NODE} --address={self.head.address}:6379")

    def at_desk(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command of Ray's, in the checkout."""
        return self.desk.run(*self._in_checkout(words))

    def _in_checkout(self, words: tuple[str, ...]) -> list[str]:
        ray = [str(Path(sys.executable).parent / "ray")]
        return ["env", "--chdir", str(ROOT), "PYTHONDONTWRITEBYTECODE=1", *ray, *words]

    def nodes(self) -> int:
        """How many nodes Ray holds to be alive."""
        code = (
            "import ray; ray.init('auto', log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"
        )
        found = self.on_head(f"python -c {code!r}", check=False)
        return int(found.stdout.split()[-1]) if found.returncode == 0 else 0

    def on_head(self, line: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A line of shell on the head, with the environment that ``ray up`` made there."""
        return self.head.run("bash", "-c", f". ~/.bashrc; {line}", check=check)

    @cached_property
    def inline(self) -> str:
        """The models of the run in one process, on the head."""
        self.on_head(f"rayfl {' '.join(RUN)} execution.backend=inline output.root=inline")
        (summary,) = self.head.home.glob("inline/*/summary.json")
        return str(json.loads(summary.read_text())["models_sha256"])

    def submit(self, *settings: str) -> Submitted:
        """``ray submit`` of a run; does not wait for it."""
        self._runs += 1
        root = f"runs/{self._runs}"
        run = ["submit", self.config, "experiments/launch.py"]
        words = self._in_checkout((*run, *RUN, *settings, f"output.root={root}"))
        return Submitted(self.desk.command(*words), self.head.home / root)

    def end(self) -> None:
        """Switch everything off; nothing is left."""
        for machine in reversed(self.machines):
            machine.end()
        shutil.rmtree(self.folder)
        folder = str(self.folder)
        left = [p for p in psutil.process_iter(["cmdline"]) if folder in " ".join(p.info["cmdline"] or ())]
        assert not left, left


class Submitted:
    """A run that was submitted.

    Attributes:
        folder: of its run directory, on the head's disk.
    """

    def __init__(self, command: list[str], folder: Path) -> None:
        self.folder = folder
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    @property
    def directory(self) -> Path:
        """The run directory."""
        (config,) = self.folder.glob("*/config.yaml")
        return config.parent

    @property
    def output(self) -> str:
        """What it has written so far."""
        self._log.seek(0)
        return self._log.read()

    def rounds(self) -> int:
        """How many are complete."""
        found = [path.read_text().count("\n") - 1 for path in self.folder.glob("*/rounds.csv")]
        return found[0] if found else 0

    def reached(self, rounds: int) -> None:
        """Wait for so many rounds."""

        def enough() -> bool:
            assert self._process.poll() is None or self.rounds() >= rounds, self.output
            return self.rounds() >= rounds

        until(enough, f"{rounds} rounds")

    def finished(self) -> str:
        """Wait for the end: the hash of the models."""
        until(lambda: self._process.poll() is not None, "the run ends")
        assert self._process.returncode == 0, self.output
        return str(json.loads((self.directory / "summary.json").read_text())["models_sha256"])


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    reason = lacking()
    if reason:
        pytest.skip(reason)
    # Not below /tmp, which is another one on each machine.
    made = Cluster(Path(tempfile.mkdtemp(prefix="rayfl-cluster-", dir="/var/tmp")))
    try:
        made.at_desk("up", "-y", "--no-config-cache", made.config)
        until(lambda: made.nodes() == 3, "ray up starts three nodes")
        yield made
    finally:
        made.end()

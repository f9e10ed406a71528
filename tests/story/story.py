"""The ten-minute story: a network, images, owners and a method of one's own in an empty folder.

Usage: python -m tests.story.story FOLDER [--rayfl PATH] [--only METHOD ...] [--no-ray] [--two-nodes]

Every method runs on them inline and on Ray, with the same results bit for bit; the last one is killed and
resumed there (inline with ``--no-ray``). With ``--two-nodes`` it also runs on two Ray nodes, of which the
second does not see the folder (this needs root, for a mount namespace). rayfl is started as a user would,
from within the folder.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

METHODS = {
    "FedAvg": ["algorithm=fedavg"],
    "SCAFFOLD": ["algorithm=fedavg", "local=scaffold"],
    "PACFL": ["algorithm=pacfl", "clustering.n_clusters=2"],
    "CFL": ["algorithm=cfl"],
    "MT-HFL": ["algorithm=mt_hfl", "clustering.n_clusters=2"],
    "my method": ["algorithm=catch_up"],
}

TOGETHER = {"PACFL": "pacfl", "FedAvg": "fedavg", "SCAFFOLD": "scaffold", "CFL": "cfl", "MT-HFL": "mt_hfl"}
"""Those that one command can run, ``algorithm=pacfl --beside fedavg,...``; the first one's settings hold for
the others as far as they use them."""

FILES = Path(__file__).parent / "files"


def prepare(folder: Path) -> None:
    """What the user has: ``mynet.py``, ``my_method.py``, ``images.npz``, ``owners.csv`` and a config."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in FILES.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) * 15).astype(np.uint8)
    parts = {"train": slice(0, 600), "test": slice(600, 900)}
    arrays = {f"x_{name}": images[part] for name, part in parts.items()}
    arrays |= {f"y_{name}": labels[part] for name, part in parts.items()}
    np.savez(folder / "images.npz", **arrays)
    with open(folder / "owners.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sample", "client"])
        for sample, label in enumerate(labels[parts["train"]].tolist()):
            writer.writerow([sample, f"{'low' if label < 5 else 'high'}-{sample % 4}"])


class Story:
    """Starts rayfl in a folder and compares what comes out."""

    def __init__(self, folder: Path, rayfl: Sequence[str]) -> None:
        self.folder, self.rayfl = folder, list(rayfl)
        # Nothing of the caller's environment may help.
        self.environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RAYFL_PLUGINS")}

    def rayfl_run(self, *arguments: str) -> Path:
        """The run directory of ``rayfl run story.yaml ...``."""
        [path] = self._wait(self.start("run", "story.yaml", *arguments))
        return path

    def together(self, *arguments: str) -> dict[str, Path]:
        """The run directories of the methods in :data:`TOGETHER`, from one process, which saves its start."""
        first, *others = TOGETHER
        beside = ",".join(TOGETHER[name] for name in others)
        command = ["run", "story.yaml", *METHODS[first], *arguments, "--beside", beside]
        return dict(zip(TOGETHER, self._wait(self.start(*command)), strict=True))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """rayfl, in the folder."""
        return subprocess.Popen(
            [*self.rayfl, *arguments],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _wait(self, process: subprocess.Popen[str]) -> list[Path]:
        text, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"{process.args} ended with {process.returncode}:\n{text}")
        lines = [line for line in text.splitlines() if line.startswith("run directory: ")]
        return [self.folder / line.removeprefix("run directory: ").strip() for line in lines]

    def killed_and_resumed(self, *arguments: str) -> Path:
        """A run whose processes are all killed after a round, and that is resumed."""
        before = set((self.folder / "runs").glob("*"))
        process = self.start("run", "story.yaml", *arguments)
        path = None
        while process.poll() is None:
            new = set((self.folder / "runs").glob("*")) - before
            path = next(iter(new), None)
            rounds = path / "rounds.csv" if path else None
            if rounds is not None and rounds.is_file() and len(rounds.read_text().splitlines()) > 1:
                break
            time.sleep(0.02)
        if path is None:
            raise SystemExit(f"nothing began: {process.communicate()[0]}")
        process.send_signal(signal.SIGKILL)
        process.communicate()
        [resumed] = self._wait(self.start("resume", str(path)))
        return resumed


def accuracy(path: Path) -> float:
    """Mean over clients, in percent."""
    return float(json.loads((path / "summary.json").read_text())["accuracy_mean"])


def outcome(path: Path) -> str:
    """The hash of a run's final models."""
    return str(json.loads((path / "summary.json").read_text())["models_sha256"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Tell the story; ends with an error where two results differ."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rayfl", default=str(Path(sys.executable).parent / "rayfl"), help="the command")
    parser.add_argument("--only", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--two-nodes", action="store_true")
    given = parser.parse_args(arguments)
    prepare(given.folder)
    story = Story(given.folder, [given.rayfl])
    # Without Ray the first run of each method has nothing to be compared with: one process does them all.
    alone = given.no_ray and given.only == list(METHODS)
    known = story.together("execution.backend=inline") if alone else {}
    where = "execution.backend=inline" if given.no_ray else "execution.actors=2"
    for method in given.only:
        settings = METHODS[method]
        first = known.get(method) or story.rayfl_run(*settings, "execution.backend=inline")
        found = {"inline": outcome(first)}
        if method == given.only[-1]:
            name = "killed" if given.no_ray else "killed on Ray"
            found[name] = outcome(story.killed_and_resumed(*settings, where))
            if given.two_nodes:
                from tests.story.two_nodes import two_nodes

                with two_nodes(given.rayfl, given.folder, story.environment) as environment:
                    story.environment = environment
                    path = story.rayfl_run(*settings, where)
                found["two nodes"] = outcome(path)
        elif not given.no_ray:
            found["Ray"] = outcome(story.rayfl_run(*settings, where))
        same = len(set(found.values())) == 1
        print(f"{method}: accuracy {accuracy(first):.1f} %; {', '.join(found)}: {'same' if same else found}")
        if not same:
            raise SystemExit(1)


if __name__ == "__main__":
    main()

"""``rayfl init``: a skeleton that works as it stands, with its test, in the user's own folder."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rayfl import files
from rayfl.config.kinds import KINDS
from rayfl.errors import ConfigError, nearest

_TEMPLATES = Path(__file__).parents[1] / "templates"


@dataclass(frozen=True)
class Skeleton:
    """What is written for one kind.

    Attributes:
        name: by default.
        tries: commands to go on with.
        registry: of parts that have their names to themselves; empty if users choose by file.
    """

    name: str
    tries: tuple[str, ...]
    registry: str = ""


SKELETONS = {
    "method": Skeleton(
        "my_method", ("rayfl run digits-demo --plugin __FILE__ algorithm=__NAME__",), "methods"
    ),
    "model": Skeleton("my_model", ("rayfl run digits-demo --plugin __FILE__ model=__NAME__",), "models"),
    "loss": Skeleton("my_loss", ("rayfl run digits-demo --plugin __FILE__ loss=__NAME__",), "losses"),
    "dataset": Skeleton(
        "my_data",
        ("rayfl run digits-demo data.name=python data.target=__FILE__:load data.test_fraction=0.2",),
    ),
    "partition": Skeleton(
        "my_partition",
        ("rayfl partition digits-demo partition.name=python partition.target=__FILE__:deal",),
    ),
}
"""By kind; ``study`` is one file of settings, ``cluster`` has files of its own."""

CHOICES = (*SKELETONS, "study", "cluster")


def init(kind: str, name: str, folder: Path) -> tuple[list[Path], list[str]]:
    """Write the files of a kind; nothing is overwritten.

    Args:
        kind: one of :data:`CHOICES`.
        name: of the module and the part; empty for the usual one.
        folder: to write to, created if need be.

    Returns:
        What was written, and commands to go on with.

    Raises:
        ConfigError: for a name that cannot be used, or files that exist.
        DiskError
    """
    if kind not in CHOICES:
        raise ConfigError("init", f"no skeleton of a {kind!r}", nearest(kind, CHOICES))
    if kind == "cluster":
        if name:
            raise ConfigError("--name", "a cluster's files have fixed names", "leave it out")
        texts = {
            "cluster.yaml": _filled("cluster.yaml", {"__REQUIREMENTS__": _requirements()}),
            "launch.py": _filled("launch.py", {}),
        }
        return _write(folder, texts), ["ray up cluster.yaml  (first look at the lines marked CHOOSE)"]
    if kind == "study":
        name = name or "my_study"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ConfigError(
                "--name", f"{name!r} cannot be a study's name", "use letters, digits, . _ and -"
            )
        found = _write(folder, {f"{name}.yaml": _filled("study.yaml", {"__NAME__": name})})
        return found, [f"rayfl study {found[0]} --dry-run", f"rayfl study {found[0]}"]
    skeleton = SKELETONS[kind]
    name = name or skeleton.name
    written = folder / f"{name}.py"
    _check_name(name, kind, skeleton, written)
    words = {
        "__NAME__": name,
        "__CLASS__": "".join(word.capitalize() for word in name.split("_")),
    }
    texts = {
        f"{name}.py": _filled(f"{kind}.py", words),
        f"test_{name}.py": _filled(f"test_{kind}.py", words),
    }
    found = _write(folder, texts)
    words["__FILE__"] = str(found[0])
    return found, [f"pytest {found[1]}", *(_replaced(line, words) for line in skeleton.tries)]


def _check_name(name: str, kind: str, skeleton: Skeleton, file: Path) -> None:
    if not (name.isascii() and name.isidentifier() and name.islower()) or keyword.iskeyword(name):
        raise ConfigError(
            "--name", f"{name!r} cannot be a module's name", f"use small letters and _, as in {skeleton.name}"
        )
    if skeleton.registry and name in KINDS[skeleton.registry]:
        raise ConfigError("--name", f"there is a {kind} named {name!r} already", "choose another name")
    with contextlib.suppress(ImportError, ValueError):
        known = importlib.util.find_spec(name)
        if known is not None and not file.exists():
            raise ConfigError("--name", f"there is a module named {name!r} already", "choose another name")


def _write(folder: Path, texts: dict[str, str]) -> list[Path]:
    paths = [folder / name for name in texts]
    for path in paths:
        if path.exists() or path.is_symlink():
            raise ConfigError(str(path), "exists, and is left as it is", "choose another --name or --folder")
    files.make(folder, parents=True)
    for path, text in zip(paths, texts.values(), strict=True):
        with files.boundary(path), path.open("x", encoding="utf-8") as file:
            file.write(text)
    return paths


def _filled(template: str, words: dict[str, str]) -> str:
    return _replaced((_TEMPLATES / f"{template}.txt").read_text(encoding="utf-8"), words)


def _replaced(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text


def _requirements(packages: Sequence[str] = ("rayfl", "ray[default]")) -> str:
    """Packages with the versions that are installed here."""
    versions = {name: importlib.metadata.version(name.partition("[")[0]) for name in packages}
    return " ".join(f"'{name}=={version}'" for name, version in versions.items())

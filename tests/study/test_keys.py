"""The keys of runs: what a run reads counts, so that no run is taken for one of other data or other code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import rayfl
from rayfl import plugins
from rayfl.config.kinds import KINDS
from rayfl.study.plan import key_of

NET = "from torch import nn\n\nclass Net(nn.Linear):\n    width = 1\n"

LOSS = (
    "from typing import Literal\n\nfrom {module} import {base}\n\n"
    "class {name}({base}):\n    '''A loss.'''\n\n"
    "    name: Literal['{name}'] = '{name}'\n    _scale = {scale}\n"
)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Forgets the modules that tests write, as a new process has none; they are gone after the test, too."""
    paths = list(sys.path)

    def forget() -> None:
        monkeypatch.setattr(plugins, "_loaded", {})
        for registry in KINDS.values():
            monkeypatch.setattr(registry, "_added", {})
        for name in [name for name in sys.modules if name.startswith("keyed")]:
            del sys.modules[name]

    forget()
    yield forget
    forget()
    sys.path[:] = paths


def write(path: Path, text: str | bytes) -> None:
    """Write a file, whose time is another one each time however coarse the clock of the disk is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    if before:
        os.utime(path, ns=(before + 1_000_000_000, before + 1_000_000_000))


def key(**settings: Any) -> str:
    return key_of(rayfl.load(settings))


def test_a_module_of_a_package_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: Callable[[], None]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    write(tmp_path / "keyedpkg/__init__.py", "")
    keys = []
    for width in (1, 2):
        write(tmp_path / "keyedpkg/nets.py", NET.replace("width = 1", f"width = {width + 10}" + " " * width))
        forgotten()
        keys.append(key(model={"name": "module", "target": "keyedpkg.nets:Net"}))
    assert keys[0] != keys[1]


def test_the_class_that_a_part_derives_from_counts(tmp_path: Path, forgotten: Callable[[], None]) -> None:
    named = [str(tmp_path / "a/keyed_a.py"), str(tmp_path / "b/keyed_b.py")]
    write(tmp_path / "b/keyed_b.py", LOSS.format(module="keyed_a", base="KeyedA", name="KeyedB", scale=1))
    keys = []
    for scale in (1, 200):
        source = LOSS.format(module="rayfl.losses", base="CrossEntropy", name="KeyedA", scale=scale)
        write(tmp_path / "a/keyed_a.py", source)
        forgotten()
        keys.append(key(plugins=named, loss="KeyedB"))
    assert keys[0] != keys[1]


def test_the_classes_of_a_network_that_was_given_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: Callable[[], None]
) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    write(tmp_path / "keyed_given.py", NET)
    import keyed_given  # type: ignore[import-not-found]

    settings = rayfl.load({}, model=nn.Sequential(keyed_given.Net(64, 10))).to_dict()
    keys = []
    for width in (1, 200):
        write(tmp_path / "keyed_given.py", NET.replace("width = 1", f"width = {width}"))
        forgotten()
        keys.append(key(**settings))
    assert keys[0] != keys[1]

"""The keys of runs: what a run reads counts, so that no run is taken for one of other data or other code."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import rayfl
from rayfl import inputs, plugins
from rayfl.config.kinds import KINDS
from rayfl.errors import RayflError
from rayfl.events import RoundDone
from rayfl.study import take
from rayfl.study.file import StudyFile
from rayfl.study.plan import PlannedRun, key_of
from rayfl.study.running import carry_out, directory_of, is_finished, job_of, run_inline
from rayfl.study.searching import SearchOutcome, remember, remembered

NET = "from torch import nn\n\nclass Net(nn.Linear):\n    width = 1\n"

LOSS = (
    "from typing import Literal\n\nfrom {module} import {base}\n\n"
    "class {name}({base}):\n    '''A loss.'''\n\n"
    "    name: Literal['{name}'] = '{name}'\n    _scale = {scale}\n"
)

SMALL: dict[str, Any] = {
    "data": "digits",
    "model": "linear",
    "partition": {"name": "iid", "clients": 2},
    "rounds": 2,
    "execution": {"backend": "inline"},
    "output": {"report": False, "tensorboard": False},
}


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


def shards(root: Path, value: int) -> dict[str, Any]:
    for part in ("train-0", "test-0"):
        write(root / f"{part}.npz", bytes([value]) * 100)
    return {"data": {"name": "sharded", "path": str(root)}, "partition": "stored"}


def leaf(root: Path, value: int) -> dict[str, Any]:
    write(root / "train/a.json", json.dumps({"y": value}))
    return {"data": {"name": "leaf", "folder": str(root)}}


def pictures(root: Path, value: int) -> dict[str, Any]:
    write(root / "train/cat/1.png", str(value))
    write(root / "train/dog/1.png", str(1 - value))
    return {"data": {"name": "image_folder", "root": str(root)}}


def linked(root: Path, value: int) -> dict[str, Any]:
    for number in range(value + 1):
        write(root / f"far/cat/{number}.png", "1")
    (root / "near").mkdir(exist_ok=True)
    if not (root / "near/cat").exists():
        (root / "near/cat").symlink_to(root / "far/cat")
        (root / "near/round").symlink_to(root / "near")  # a circle
    return {"data": {"name": "image_folder", "root": str(root / "near"), "test_fraction": 0.5}}


def deep(root: Path, value: int) -> dict[str, Any]:
    for number in range(value + 1):
        write(root / f"train/cat/far/below/{number}.png", "1")
    return {"data": {"name": "image_folder", "root": str(root)}}


def hub_folder(root: Path, value: int) -> dict[str, Any]:
    write(root / "train.csv", f"a,label\n{value},0\n")
    return {"data": {"name": "huggingface", "path": str(root), "test_fraction": 0.5}}


def hub_file(root: Path, value: int) -> dict[str, Any]:
    write(root / "t.csv", f"a,label\n{value},0\n")
    files = {"train": str(root / "t.csv")}
    return {"data": {"name": "huggingface", "path": "csv", "data_files": files, "test_fraction": 0.5}}


def hub_pattern(root: Path, value: int) -> dict[str, Any]:
    given = hub_file(root, value)
    return {"data": {**given["data"], "data_files": str(root / "*.csv")}}


def network(root: Path, value: int) -> dict[str, Any]:
    write(root / "arch/config.json", json.dumps({"hidden_size": value}))
    return {"model": {"name": "transformers", "arch": str(root / "arch")}}


def argument(root: Path, value: int) -> dict[str, Any]:
    """A function's argument names a file, by a path from here."""
    write(root / "keyed_data.py", "def load(path):\n    raise AssertionError\n")
    write(root / "given/k.txt", str(value))
    target, path = f"{root / 'keyed_data.py'}:load", os.path.relpath(root / "given")
    return {"data": {"name": "python", "target": target, "kwargs": {"path": path}, "test_fraction": 0.2}}


def articles(root: Path, value: int) -> dict[str, Any]:
    write(root / "train.csv", f"{value + 1},a,b\n")
    return {"data": {"name": "ag_news", "root": str(root)}}


Make = Callable[[Path, int], dict[str, Any]]

READ = [
    shards,
    leaf,
    pictures,
    linked,
    deep,
    hub_folder,
    hub_file,
    hub_pattern,
    network,
    argument,
    articles,
]


@pytest.mark.parametrize("make", READ)
def test_what_a_file_holds_counts(tmp_path: Path, make: Make) -> None:
    before = key(**make(tmp_path, 0))
    assert key(**make(tmp_path, 0)) == before  # the same contents again
    assert key(**make(tmp_path, 1)) != before


@pytest.mark.parametrize("make", READ)
def test_where_a_file_lies_does_not_count(
    tmp_path: Path, make: Make, forgotten: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []
    for folder in ("here", "there"):
        root = tmp_path / folder / "mine"
        root.mkdir(parents=True)
        with monkeypatch.context() as patch:
            patch.chdir(root.parent)  # relative paths begin there
            patch.setattr(sys, "path", list(sys.path))
            keys.append(key(**make(root, 0)))
        forgotten()
    assert keys[0] == keys[1]


def test_files_of_other_names_are_other_files(tmp_path: Path) -> None:
    """The name may matter: of two tables with equal contents, which is that of the test?"""
    for name in ("a.csv", "b.csv"):
        write(tmp_path / name, "x,label\n1,0\n")

    def of(train: str, test: str) -> str:
        files = {"train": str(tmp_path / train), "test": str(tmp_path / test)}
        return key(data={"name": "huggingface", "path": "csv", "data_files": files})

    assert len({of("a.csv", "b.csv"), of("b.csv", "a.csv"), of("a.csv", "a.csv")}) == 3


def test_where_downloads_lie_and_how_models_are_spread_do_not_count(tmp_path: Path) -> None:
    fashion = {"name": "fashion_mnist"}
    assert key(data={**fashion, "root": str(tmp_path / "downloads")}) == key(data=fashion)
    assert key(hierarchy={"lps_actors": 5}) == key()
    write(tmp_path / "keyed_rooted.py", "def load(root):\n    raise AssertionError\n")
    target = f"{tmp_path / 'keyed_rooted.py'}:load"
    functions = [
        key(data={"name": "python", "target": target, "kwargs": {"root": root}, "test_fraction": 0.2})
        for root in ("/nowhere/one", "/nowhere/two")  # an argument of one's own is no folder of downloads
    ]
    assert functions[0] != functions[1]
    data = shards(tmp_path, 0)
    assert key(**{**data, "data": {**data["data"], "cache_gb": 2}}) == key(**data)


def test_of_many_pictures_the_times_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_MOST_READ", 1)
    write(tmp_path / "cat/1.png", "ab")
    before, elsewhere = inputs.content_of(tmp_path), inputs.content_of(tmp_path, times=False)
    assert inputs.content_of(tmp_path) == before
    write(tmp_path / "cat/1.png", "cd")
    assert inputs.content_of(tmp_path) != before
    assert inputs.content_of(tmp_path, times=False) == elsewhere
    write(tmp_path / "cat/2.png", "cd")
    assert inputs.content_of(tmp_path, times=False) != elsewhere


def test_large_folders_are_listed_once_for_many_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_MANY_FILES", 1)
    now = [0.0]
    monkeypatch.setattr(inputs.time, "monotonic", lambda: now.__setitem__(0, now[0] + 1) or now[0])
    for name in "ab":
        write(tmp_path / name, "1")
    assert len(inputs.listed(tmp_path)) == 2
    write(tmp_path / "c", "1")
    assert len(inputs.listed(tmp_path)) == 2
    now[0] += 100
    assert len(inputs.listed(tmp_path)) == 3


def test_names_that_happen_to_be_those_of_folders_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key()
    monkeypatch.chdir(tmp_path)
    for name in ("digits", "mean", "fedavg", "runs"):
        write(tmp_path / name / "x", "1")
    assert key() == before
    write(tmp_path / "keyed_here.py", NET)
    settings = {"name": "module", "target": "keyed_here.py:Net", "kwargs": {"folder": "."}}
    before = key(model=settings)
    write(tmp_path / "studies/s/table.md", "a result")  # it is no input, though it lies in a folder that is
    assert key(model=settings) == before


def planned(root: Path, **changes: Any) -> PlannedRun:
    config = rayfl.load({**SMALL, "output": {**SMALL["output"], "root": str(root / "runs")}, **changes})
    return PlannedRun("FedAvg", {}, 0, config, {})


def test_a_file_that_changes_before_its_run_begins_is_noticed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def save(number: int) -> None:
        x = rng.normal(size=(40, 3)).astype(np.float32)
        np.savez(tmp_path / f"d{number}.npz", x=x, y=np.arange(40) % 2)

    save(0)
    data = {"name": "npz", "path": str(tmp_path / "d0.npz"), "test_fraction": 0.2}
    runs = [planned(tmp_path, data=data, seed=seed, rounds=1) for seed in (0, 1)]
    jobs = [job_of(run, tmp_path / "stop", {}) for run in runs if run.key]
    found = run_inline(jobs, lambda key, event: None)
    assert next(found)[1].state == "finished"
    shutil.copy(tmp_path / "d0.npz", tmp_path / "d1.npz")
    save(0)
    _, outcome = next(found)
    assert outcome.state == "failed"
    assert outcome.error == f"{tmp_path / 'd0.npz'}: has changed since the study began; run the study again"
    assert not directory_of(runs[1]).exists()
    shutil.copy(tmp_path / "d1.npz", tmp_path / "d0.npz")  # the same contents, at another time
    assert carry_out(jobs[1])["state"] == "finished"


def searched(root: Path) -> StudyFile:
    values = {
        "name": "s",
        "plugins": [str(root / "keyed_drawn.py")],
        "settings": SMALL,
        "methods": {"FedAvg": {"algorithm": "fedavg"}},
        "seeds": 0,
        "tune": {"loss.name": {"choice": ["cross_entropy", "KeyedDrawn"]}, "samples": 2, "seeds": [100]},
    }
    return take(values, root, settings=[f"output.root={root / 'runs'}"])


def test_what_only_drawn_values_name_counts_for_a_search(
    tmp_path: Path, forgotten: Callable[[], None]
) -> None:
    found = SearchOutcome(
        "FedAvg", ({"settings": {"loss.name": "KeyedDrawn"}, "score": 0.9, "state": "finished"},)
    )
    for scale in (1, 200):
        source = LOSS.format(module="rayfl.losses", base="CrossEntropy", name="KeyedDrawn", scale=scale)
        write(tmp_path / "keyed_drawn.py", source)
        forgotten()
        study = searched(tmp_path)
        assert remembered(study, "FedAvg") is None
        remember(study, found)
        assert remembered(study, "FedAvg") == found


def test_a_finished_run_that_goes_on_is_finished_no_more(tmp_path: Path) -> None:
    """Were it, a study would take the tables of all rounds with the summary of fewer."""
    run = planned(tmp_path, rounds=1)
    assert carry_out(job_of(run, tmp_path / "stop", {}))["state"] == "finished"
    folder = directory_of(run)
    assert is_finished(run)
    rayfl.resume(folder)  # there is nothing to do, and it stays as it is
    assert is_finished(run)

    def stop(event: Any) -> None:
        if isinstance(event, RoundDone):
            raise RayflError("enough")

    with pytest.raises(RayflError, match="enough"):
        rayfl.resume(folder, ["rounds=3"], stop)
    assert len((folder / "rounds.csv").read_text().splitlines()) > 2
    assert not is_finished(run)
    rayfl.resume(folder)
    assert is_finished(planned(tmp_path, rounds=3)) is False  # it has the name of another
    assert json.loads((folder / "summary.json").read_text())["rounds"] == 3

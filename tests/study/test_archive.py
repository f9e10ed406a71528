"""Archives of finished runs: nothing is run again on another machine, and what is damaged is not taken."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayfl
from rayfl.errors import ClientError, ConfigError, Damaged, RayflError
from rayfl.rundir import RunDirectory
from rayfl.study import Watch, archive, execute, prepare, take
from rayfl.study.estimate import estimate
from rayfl.study.plan import PlannedRun
from rayfl.study.running import (
    Allocation,
    directory_of,
    divergence_of,
    has_ended,
    is_finished,
    run_inline,
)

STUDY: dict[str, Any] = {
    "name": "archived",
    "settings": {
        "rounds": 2,
        "training.epochs": 1,
        "partition": {"name": "label_skew", "clients": 6},
        "output": {"report": False, "tensorboard": False},
    },
    "methods": {"FedAvg": {"algorithm": "fedavg"}, "SOLO": {"algorithm": "solo"}},
    "seeds": [0],
    "report": {"columns": ["accuracy_mean", {"rounds_to": 20}]},
    "claims": ["FedAvg.bytes_up > 0"],
}


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matplotlib takes seconds."""
    monkeypatch.setattr("rayfl.study.writing.write_figures", lambda results, folder: [])


def run(root: Path, folder: Path | None, **changes: Any) -> Any:
    """The study with its runs below ``root``, and the titles of the runs that were done."""
    prepared = prepare(take({**STUDY, **changes}, root, settings=[f"output.root={root / 'runs'}"]))
    began: list[str] = []
    watch = Watch(stage=lambda stage: began.extend(run.title for run in stage.runs))
    return execute(prepared, root / "out", inline=True, watch=watch, archive=folder), began


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rayfl.study.writing.write_figures", lambda results, folder: [])
        study, _ = run(root, root / "archive")
    return study, root


def without_paths(study: Any) -> Any:
    return study.runs.drop(columns=["path"])


def test_another_machine_runs_only_what_is_missing(first: Any, tmp_path: Path) -> None:
    study, root = first
    shutil.copytree(root / "archive", tmp_path / "archive")
    again, began = run(tmp_path, tmp_path / "archive")
    assert began == []
    assert without_paths(again).equals(without_paths(study))
    assert (tmp_path / "out" / "table.md").read_bytes() == (root / "out" / "table.md").read_bytes()
    runs = [*(root / "runs").iterdir(), *(tmp_path / "runs").iterdir()]
    engines = {RunDirectory(path).config.training.engine for path in runs}
    assert engines == {"batched"}  # so `rayfl compare` sees no difference
    more, began = run(tmp_path, tmp_path / "archive", seeds=[0, 1])
    assert sorted(began) == ["FedAvg, seed 1", "SOLO, seed 1"]
    assert more.results.finished == 4
    assert len(list((tmp_path / "archive").iterdir())) == 4  # each was added when it had finished


def test_an_archive_that_is_a_file_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "archive").touch()
    with pytest.raises(ConfigError, match="archive: is a file; name a folder"):
        run(tmp_path, tmp_path / "archive")
    assert not list((tmp_path / "runs").glob("*"))


def test_archived_runs_name_no_path_of_the_machine(first: Any) -> None:
    _, root = first
    paths = sorted((root / "archive").iterdir())
    assert len(paths) == 2
    for path in paths:
        with zipfile.ZipFile(path) as packed:
            assert not any(name.startswith(("checkpoints", "models", "log")) for name in packed.namelist())
            text = b"".join(packed.read(name) for name in packed.namelist())
        assert str(root).encode() not in text
        assert path.stat().st_size < 20_000


def own_data(root: Path) -> dict[str, Any]:
    """Settings of a study of the user's own samples, dealt as a file says."""
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    np.savez(root / "mine.npz", x=x, y=np.arange(60) % 2)
    rows = "".join(f"{sample},{sample % 3}\n" for sample in range(60))
    (root / "who.csv").write_text(f"sample,client\n{rows}")
    return {
        **STUDY["settings"],
        "data": {"name": "npz", "path": str(root / "mine.npz"), "test_fraction": 0.2},
        "partition": {"name": "file", "path": str(root / "who.csv")},
        "model": "linear",
    }


def test_own_files_may_lie_elsewhere_on_the_other_machine(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    _, began = run(here, tmp_path / "archive", settings=own_data(here / "data"))
    assert len(began) == 2
    for path in (tmp_path / "archive").iterdir():
        with zipfile.ZipFile(path) as packed:
            assert all(str(tmp_path).encode() not in packed.read(name) for name in packed.namelist())
    shutil.rmtree(here)
    again, began = run(there, tmp_path / "archive", settings=own_data(there / "mine"))
    assert began == []
    assert again.results.finished == 2
    settings = own_data(there / "mine")
    np.savez(there / "mine" / "mine.npz", x=np.zeros((60, 3), np.float32), y=np.arange(60) % 2)
    assert len(run(there, tmp_path / "archive", settings=settings)[1]) == 2


def test_the_same_run_gives_the_same_bytes(first: Any, tmp_path: Path) -> None:
    study, root = first
    made = archive.add(study.results.runs, tmp_path)
    assert [path.read_bytes() for path in made] == [
        (root / "archive" / path.name).read_bytes() for path in made
    ]
    assert archive.add(study.results.runs, tmp_path) == []  # they are there


def test_a_run_that_was_begun_is_replaced(first: Any, tmp_path: Path) -> None:
    _, root = first
    prepared = prepare(take(STUDY, tmp_path, settings=[f"output.root={tmp_path / 'runs'}"]))
    begun = prepared.runs[0]
    directory = RunDirectory.create_as(begun.config, f"earlier-name-{begun.key}")
    left = (
        "checkpoints/round-1/state.json",
        "models/0.safetensors",
        "plugins/a.py",
        "plugins.json",
        "report.html",
    )
    for name in left:
        (directory.path / name).parent.mkdir(parents=True, exist_ok=True)
        (directory.path / name).write_text("{}")
    assert not is_finished(begun)
    assert len(archive.restore(prepared.runs, root / "archive")) == 2
    assert is_finished(begun)
    assert (directory.path / "summary.json").is_file()
    assert not any((directory.path / name).exists() for name in left)  # they are not the archived run's
    training = begun.config.training.model_copy(update={"engine": "batched"})  # as the archived run
    assert directory.config == begun.config.model_copy(update={"training": training})


def test_a_run_that_was_resumed_with_more_rounds_is_not_replaced(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"methods": {"FedAvg": {"algorithm": "fedavg"}}, "report": {}}
    study, _ = run(tmp_path, tmp_path / "archive", **changes)
    longer = Path(study.runs["path"][0])
    rayfl.resume(longer, ["rounds=3"])
    before = sorted(longer.rglob("*"))
    assert archive.restore(study.results.runs, tmp_path / "archive") == []
    again, _ = run(tmp_path, tmp_path / "archive", **changes)
    assert "was resumed with 3 rounds, but this run has 2" in next(iter(again.failed.values()))
    assert sorted(longer.rglob("*")) == before


def test_on_another_processor_a_run_need_not_diverge(first: Any, tmp_path: Path) -> None:
    """A run that was begun there goes on, and once it is finished, it takes the place of the record."""

    def planned(root: Path) -> PlannedRun:
        return prepare(take({**STUDY, "seeds": [0]}, root, settings=[f"output.root={root / 'runs'}"])).runs[0]

    def copied(root: Path) -> PlannedRun:
        run = planned(root)
        shutil.copytree(directory_of(finished), directory_of(run))
        (directory_of(run) / "summary.json").unlink()
        return run

    finished, archived = planned(first[1]), tmp_path / "archive"
    diverged = copied(tmp_path / "diverged")
    error = ClientError(3, 1, "FloatingPointError: the training loss is nan")
    RunDirectory(directory_of(diverged)).write_divergence(2, error)
    assert len(archive.add([diverged], archived)) == 1
    assert archive.add([diverged], archived) == []

    begun, fresh = copied(tmp_path / "begun"), planned(tmp_path / "fresh")
    assert archive.restore([begun], archived) == []
    assert (directory_of(begun) / "rounds.csv").is_file()
    assert not has_ended(begun)
    assert archive.restore([fresh], archived) == [fresh]
    assert divergence_of(fresh) == str(error)

    assert len(archive.add([finished], archived)) == 1
    assert len(list(archived.iterdir())) == 1
    assert archive.restore([fresh], archived) == [fresh]
    assert is_finished(fresh)
    assert divergence_of(fresh) == ""


def test_a_run_of_another_process_is_left_alone(first: Any, tmp_path: Path) -> None:
    _, root = first
    prepared = prepare(take(STUDY, tmp_path, settings=[f"output.root={tmp_path / 'runs'}"]))
    held = prepared.runs[0]
    with RunDirectory.create_as(held.config, f"held-{held.key}").locked():
        assert archive.restore(prepared.runs, root / "archive") == [prepared.runs[1]]
    assert not is_finished(held)


def test_an_estimate_counts_them(first: Any, tmp_path: Path) -> None:
    _, root = first
    prepared = prepare(take(STUDY, tmp_path, settings=[f"output.root={tmp_path / 'runs'}"]))
    assert estimate(prepared.runs, 1, root / "archive").finished == 2


def test_damage_is_seen(first: Any, tmp_path: Path) -> None:
    _, root = first
    prepared = prepare(take(STUDY, tmp_path, settings=[f"output.root={tmp_path / 'runs'}"]))
    whole = sorted((root / "archive").iterdir())[0]
    data = whole.read_bytes()
    copy = tmp_path / whole.name
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    for broken in (b"", data[: len(data) // 2], bytes(flipped), b"no zip file at all"):
        copy.write_bytes(broken)
        with pytest.raises(Damaged, match=r"remove it, and the study repeats the run"):
            archive.restore(prepared.runs, tmp_path)
    assert not any(map(is_finished, prepared.runs))


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("config.yaml", "", "NoneType"),
        ("config.yaml", "[1]", "cannot convert"),
        ("config.yaml", "future: 3", "future: no such setting"),
        ("environment.json", "{", "Expecting"),
        ("environment.json", "[1]", "cannot convert"),
        ("rounds.csv", None, "its tables are not those of a finished run"),
        ("rounds.csv", "round\n0\n", "its tables are not those of a finished run"),
    ],
)
def test_an_archived_run_that_is_not_whole_is_refused(
    first: Any, tmp_path: Path, file: str, content: str | None, reason: str
) -> None:
    """Its key is left out, as in archives of earlier versions."""
    _, root = first
    prepared = prepare(take(STUDY, tmp_path, settings=[f"output.root={tmp_path / 'runs'}"]))
    whole = sorted((root / "archive").iterdir())[0]
    with zipfile.ZipFile(whole) as packed, zipfile.ZipFile(tmp_path / whole.name, "w") as other:
        for name in packed.namelist():
            data: str | bytes | None = packed.read(name) if name != file else content
            if data is not None:
                other.writestr(name, data)
    with pytest.raises(Damaged, match=rf"{whole.name}: cannot be read \(.*{reason}"):
        archive.restore(prepared.runs, tmp_path)
    assert not any(map(is_finished, prepared.runs))


def test_an_archive_that_has_all_runs_need_not_be_writable(
    first: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, root = first
    shutil.copytree(root / "archive", tmp_path / "archive")
    access = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "archive" and access(path, mode))
    assert run(tmp_path, tmp_path / "archive")[0].results.finished == 2
    with pytest.raises(ConfigError, match="archive: cannot be written to"):
        run(tmp_path, tmp_path / "archive", seeds=[0, 1])


def test_an_archive_that_has_all_runs_of_a_tuned_study_need_not_be_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has only the runs that choose is refused before the others begin."""
    tuned = {"tune": {"training.lr": [0.05, 0.1], "seeds": [7]}, "claims": []}
    study, began = run(tmp_path / "a", tmp_path / "archive", **tuned)
    assert study.results.finished == 2
    assert len(began) == 4 + 2
    access = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "archive" and access(path, mode))
    again, began = run(tmp_path / "b", tmp_path / "archive", **tuned)
    assert (again.results.finished, began) == (2, [])
    for each in prepare(study.results.study).runs, study.results.runs:
        for planned in each:
            for file in (tmp_path / "archive").glob(f"*{planned.key}.zip"):
                file.unlink()
    with pytest.raises(ConfigError, match="archive: cannot be written to"):
        run(tmp_path / "c", tmp_path / "archive", **tuned)
    assert len(list((tmp_path / "c/runs").iterdir())) == 4  # nothing of the study's own runs


def test_a_run_out_of_an_archive_has_no_models(first: Any, tmp_path: Path) -> None:
    study, _ = run(tmp_path, first[1] / "archive")
    result = rayfl.Result(study.runs["path"][0])
    for whose in ({"client": 0}, {"cluster": 0}):
        with pytest.raises(RayflError, match="has no checkpoint, and so no models, like runs from an arch"):
            result.model(**whose)


def test_a_file_under_another_name_is_refused(first: Any, tmp_path: Path) -> None:
    _, root = first
    prepared = prepare(take(STUDY, tmp_path, settings=[f"output.root={tmp_path / 'runs'}"]))
    one, other = sorted((root / "archive").iterdir())
    shutil.copy(one, tmp_path / other.name)
    with pytest.raises(ConfigError, match="holds another run than its file name says"):
        archive.restore(prepared.runs, tmp_path)


def test_a_study_that_is_lost_leaves_the_runs_that_had_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside each other runs are kept as each ends, not when all have."""

    def lost(jobs: Any, allocation: Any, lost: Any, ended: Any, stopping: Any) -> Iterator[Any]:
        assert [outcome.state for _, outcome in run_inline(jobs[:1], lambda *event: None)] == ["finished"]
        ended(jobs[0].key)
        raise RuntimeError("the machine is gone")
        yield

    monkeypatch.setattr("rayfl.study.study.on_ray", lost)
    monkeypatch.setattr("rayfl.study.study.Runner.allocate", lambda *given: Allocation(1, 0))
    prepared = prepare(take(STUDY, tmp_path, settings=[f"output.root={tmp_path / 'runs'}"]))
    with pytest.raises(RuntimeError, match="the machine is gone"):
        execute(prepared, tmp_path / "out", archive=tmp_path / "archive")
    assert len(list((tmp_path / "archive").iterdir())) == 1

"""Runs on object storage: published, gone on with elsewhere, compared, and what a crash leaves behind."""

from __future__ import annotations

import errno
import hashlib
import http.server
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from typer.testing import CliRunner

import rayfl
from rayfl import cli, files, remote
from rayfl.errors import ConfigError, DiskError, Held, RayflError
from rayfl.events import CheckpointSaved, Note, RoundDone, RunEvent
from rayfl.machine import machine_id, process_start
from rayfl.monitor import newest_running, runs_below, view
from rayfl.monitor.looking import is_root
from rayfl.monitor.status import Status
from rayfl.remote import Entry, Remote, split, staging
from rayfl.rundir import RunDirectory
from rayfl.servers.checkpoint import Checkpoint
from tests.runs import assert_same
from tests.runtime.test_cluster import free_ports


@pytest.fixture(autouse=True)
def staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine's staging folder; to remove it is to be on another machine."""
    monkeypatch.setenv("RAYFL_STAGING", str(tmp_path / "staging"))
    return tmp_path / "staging"


def wait_until_up(process: subprocess.Popen[bytes], url: str) -> None:
    """Wait until a server that was started answers."""
    answer = "nothing"
    for _ in range(600):
        assert process.poll() is None, f"{process.args} ended with {process.returncode}"
        try:
            urllib.request.urlopen(url).close()
            return
        except OSError as error:
            answer = str(error)
            time.sleep(0.2)
    pytest.fail(f"{url}: {answer}")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bucket of a server on this machine."""
    server = shutil.which("moto_server")
    if server is None:
        pytest.skip("no moto_server; its packages conflict with Matplotlib's: pipx install 'moto[server]'")
    from pyarrow import fs

    (port,) = free_ports(1)
    log = (tmp_path_factory.mktemp("s3") / "log").open("w")
    process = subprocess.Popen([server, "-p", str(port)], stdout=log, stderr=log)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "x")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        try:
            wait_until_up(process, f"http://127.0.0.1:{port}/moto-api/")
            address = f"127.0.0.1:{port}"
            server_at = fs.S3FileSystem(endpoint_override=address, scheme="http", allow_bucket_creation=True)
            server_at.create_dir("bucket")
            yield "s3://bucket/runs"
        finally:
            process.terminate()
            process.wait()


@pytest.fixture(scope="session")
def gs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bucket of an emulator of Google's storage."""
    emulator = shutil.which("gcp-storage-emulator")
    if emulator is None:
        pytest.skip("no gcp-storage-emulator: pipx install gcp-storage-emulator")
    (port,) = free_ports(1)
    log = (tmp_path_factory.mktemp("gs") / "log").open("w")
    command = [
        emulator,
        "start",
        "--host=127.0.0.1",
        f"--port={port}",
        "--in-memory",
        "--default-bucket=bucket",
    ]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until_up(process, f"http://127.0.0.1:{port}/storage/v1/b/bucket")
        yield f"gs://anonymous@bucket/runs?scheme=http&endpoint_override=127.0.0.1%3A{port}"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(params=["file", "s3", "gs"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder of a file system, and buckets."""
    if request.param == "file":
        return f"file://{tmp_path}/there"
    return str(request.getfixturevalue(request.param))


def below(root: str, name: str) -> str:
    """The URL of a run; that of all runs may have options."""
    return Remote(root, name).url


def elsewhere(settings: dict[str, Any], root: str, **more: Any) -> dict[str, Any]:
    return {**settings, **more, "output": {**settings["output"], "root": root}}


class Stop:
    """Stops a run after its first round."""

    def __call__(self, event: RunEvent) -> None:
        if isinstance(event, CheckpointSaved):
            raise KeyError("stop")


def test_each_endpoint_has_its_own_staging_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    plain = staging("s3://bucket/runs")
    first, second = (staging(f"s3://bucket/runs?endpoint_override=host{i}:9000&scheme=http") for i in (1, 2))
    assert len({plain, first, second}) == 3
    assert staging("s3://bucket/runs/?region=eu") == plain
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://host3:9000")
    assert staging("s3://bucket/runs") not in (plain, first, second)
    assert staging("s3://bucket/runs?endpoint_override=host1:9000") == first
    assert staging("gs://bucket/runs").parent != plain.parent


def test_a_run_is_published_resumed_on_another_machine_and_compared(
    settings: dict[str, Any], root: str, staged: Path, tmp_path: Path
) -> None:
    whole = rayfl.run({**settings, "seed": 5})
    with pytest.raises(KeyError):
        rayfl.run(elsewhere(settings, root, seed=5), on_event=Stop())
    (name,) = (path.name for path in staging(root).iterdir())
    url = below(root, name)
    there = Remote(root, name).files()
    assert {"config.yaml", "rounds.csv"} <= set(there)
    assert "summary.json" not in there
    shutil.rmtree(staged)
    assert CliRunner().invoke(cli.app, ["resume", "--latest", root, "rounds=2"]).exit_code == 0
    shutil.rmtree(staged)
    result = rayfl.resume(url, ["rounds=3"])
    assert result.summary["models_sha256"] == whole.summary["models_sha256"]
    assert RunDirectory(result.path).place == url.partition("?")[0]
    there = Remote(root, name).files()
    assert {"summary.json", "clients.csv", "checkpoints/round-00003/manifest.json"} <= set(there)
    assert sum("manifest.json" in each for each in there) == 2  # those that are kept
    other = rayfl.run(elsewhere(settings, root, seed=6))
    shutil.rmtree(staged)
    assert {run.path for run in runs_below(root)} == {url, below(root, other.path.name)}
    assert {run.status.state for run in runs_below(root)} == {"finished"}
    page = tmp_path / "comparison.html"
    urls = [url, below(root, other.path.name)]
    done = CliRunner().invoke(cli.app, ["compare", *urls, "--out", str(page)])
    assert done.exit_code == 0, done.output
    assert page.is_file()
    done = CliRunner().invoke(cli.app, ["report", url])
    assert done.exit_code == 0, done.output
    assert "report.html" in Remote(root, name).files()
    done = CliRunner().invoke(cli.app, ["models", url, "0", "3"])
    assert done.exit_code == 0, done.output
    samples = result._built[0][0].federation.samples
    arrays = {"x_train": samples.x_train[:6], "y_train": samples.y_train[:6]}
    np.savez(tmp_path / "new.npz", **arrays, x_test=samples.x_test[:6], y_test=samples.y_test[:6])
    done = CliRunner().invoke(cli.app, ["newcomers", url, str(tmp_path / "new.npz"), "--epochs", "0"])
    assert done.exit_code == 0, done.output
    published = {"newcomers.csv", "newcomers_communication.csv", "models/clients/client_3.safetensors"}
    assert published <= set(Remote(root, name).files())
    assert not [path for path in Path.cwd().iterdir() if path.name.startswith(("s3:", "file:"))]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("survivors", range(0, 20, 3))
def test_whenever_publishing_ends_there_is_a_sound_run(
    survivors: int, settings: dict[str, Any], staged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = f"file://{tmp_path}/there"
    with pytest.raises(KeyError):
        rayfl.run(elsewhere(settings, root), on_event=Stop())
    (name,) = (path.name for path in staging(root).iterdir())
    left = [survivors]
    copy, remove = Remote._copy, Remote._remove

    def until_the_plug_is_pulled(do: Any) -> Any:
        def change(self: Remote, *arguments: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError("unplugged")
            do(self, *arguments)

        return change

    notes: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(Remote, "_copy", until_the_plug_is_pulled(copy))
        patch.setattr(Remote, "_remove", until_the_plug_is_pulled(remove))
        with pytest.raises(RayflError, match=r"unplugged; the run lies in .*; publish it with: rayfl resume"):
            rayfl.resume(
                below(root, name), [], lambda e: notes.append(e.text) if isinstance(e, Note) else None
            )
    assert any("it is tried again after the next checkpoint" in note for note in notes) or survivors > 10
    shutil.rmtree(staged)
    run = RunDirectory.open(below(root, name))
    found, wrong = Checkpoint.newest(run.path / "checkpoints")
    assert (found is not None, wrong) == (True, [])
    assert rayfl.resume(run.place).summary["models_sha256"] == rayfl.run(settings).summary["models_sha256"]


def written(folder: Path, round: int, files: dict[str, bytes]) -> Path:
    """A checkpoint as far as publishing looks at it."""
    checkpoint = folder / "checkpoints" / f"round-{round:05d}"
    checkpoint.mkdir(parents=True)
    for name, content in files.items():
        (checkpoint / name).write_bytes(content)
    told = {name: {"sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()}
    (checkpoint / "manifest.json").write_text(json.dumps({"round": round, "files": told}))
    return checkpoint


def test_only_what_has_changed_is_uploaded(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what is there under the name of an earlier checkpoint, which goes with this upload."""
    there, folder, uploads = Remote(root, f"r-{tmp_path.name}"), tmp_path / "here", list[str]()
    write = Remote._write
    monkeypatch.setattr(
        Remote, "_write", lambda self, file, name: (uploads.append(name), write(self, file, name))
    )
    folder.mkdir()
    (folder / "config.yaml").write_text("a: 1")
    for round in range(3):
        before = folder / "checkpoints" / f"round-{round - 1:05d}"
        if before.is_dir():
            shutil.rmtree(before)
        written(folder, round, {"models.npy": b"%d" % round * 99, "states.npy": b"s" * 99})
        uploads.clear()
        there.publish(folder)
        new = [f"checkpoints/round-{round:05d}/{name}" for name in ("models.npy", "states.npy")]
        manifest = f"checkpoints/round-{round:05d}/manifest.json"
        assert set(uploads) == ({new[0], manifest} if round else {"config.yaml", *new, manifest})
        assert uploads[-1] == manifest
        assert set(there.files()) == {"config.yaml", *new, manifest}
    uploads.clear()
    there.publish(folder)
    assert uploads == []
    monkeypatch.setenv("RAYFL_STAGING", str(tmp_path / "elsewhere"))
    there.fetch(tmp_path / "again")
    for name in ("models.npy", "states.npy", "manifest.json"):
        place = f"checkpoints/round-00002/{name}"
        assert (tmp_path / "again" / place).read_bytes() == (folder / place).read_bytes()


def test_a_record_is_not_believed_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file was overwritten there, publishing ended, and its contents of before are wanted again."""
    there, folder = Remote(f"file://{tmp_path}/there", "r"), tmp_path / "here"
    old = written(folder, 1, {"models.npy": b"a" * 99})
    (folder / "config.yaml").write_text("a: 1")
    there.publish(folder)
    shutil.rmtree(old)
    written(folder, 1, {"models.npy": b"b" * 99})
    with monkeypatch.context() as patch:
        copy = Remote._copy

        def last(self: Remote, source: Path, name: str) -> None:
            copy(self, source, name)
            raise OSError("unplugged")

        patch.setattr(Remote, "_copy", last)
        with pytest.raises(DiskError, match="unplugged"):
            there.publish(folder)
    shutil.rmtree(folder / "checkpoints" / "round-00001")
    again = written(folder, 2, {"models.npy": b"a" * 99})
    there.publish(folder)
    there.fetch(tmp_path / "again")
    place = again.relative_to(folder) / "models.npy"
    assert (tmp_path / "again" / place).read_bytes() == b"a" * 99


def test_what_got_further_here_is_not_replaced_by_what_is_there(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    root = f"file://{tmp_path}/there"
    result = rayfl.run(elsewhere(settings, root))
    shutil.rmtree(tmp_path / "there" / result.path.name / "checkpoints")
    (tmp_path / "there" / result.path.name / "summary.json").unlink()
    rayfl.resume(below(root, result.path.name))
    assert "summary.json" in Remote(root, result.path.name).files()


def test_who_reads_a_run_does_not_replace_the_folder_of_who_runs_it(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """A finished run that goes on has no summary here, and one there, until its next checkpoint."""
    root = f"file://{tmp_path}/there"
    result = rayfl.run(elsewhere(settings, root))
    url, opened = below(root, result.path.name), []

    def read(event: RunEvent) -> None:
        if isinstance(event, RoundDone) and event.round == 4:
            opened.append(RunDirectory.open(url).path)

    again = rayfl.resume(url, ["rounds=6", "output.checkpoint_every=0"], on_event=read)
    assert opened == [result.path]
    assert again.rounds["round"].tolist() == [*range(6)]
    assert_same(rayfl.run({**settings, "rounds": 6}), again)


def test_who_fetches_a_run_waits_for_who_fetches_it(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = f"file://{tmp_path}/there"
    name = rayfl.run(elsewhere(settings, root)).path.name
    folder = tmp_path / "fetched" / name
    folder.mkdir(parents=True)
    monkeypatch.setattr(remote, "_CHECK_INTERVAL", 0.01)
    with FileLock(folder / ".lock"):
        monkeypatch.setattr(remote, "_PATIENCE", 3)
        with pytest.raises(Held, match="another process is fetching this run"):
            Remote(root, name).fetch(folder)
        monkeypatch.setattr(remote, "_PATIENCE", 100_000)
        other = threading.Thread(target=Remote(root, name).fetch, args=(folder,))
        other.start()
        assert other.is_alive()
        assert {path.name for path in folder.iterdir()} == {".lock"}
    other.join()
    assert (folder / "summary.json").is_file()


@pytest.mark.parametrize("at", [0, 1])
def test_a_full_staging_disk_is_told_and_publishing_tried_again(
    at: int, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the record of what is published is written before the first change, and after the last."""
    full, opened, notes = [False], [], []
    usual = Path.open

    def open_if_there_is_room(path: Path, mode: str = "r", *given: Any, **named: Any) -> Any:
        if ".published.json" in path.name and "w" in mode:
            opened.append(path)
            if full[0] and len(opened) == at + 1:
                raise OSError(errno.ENOSPC, "No space left on device")
        return usual(path, mode, *given, **named)

    def note(event: RunEvent) -> None:
        if isinstance(event, RoundDone):
            full[0] = event.round < 2
        if isinstance(event, CheckpointSaved):  # publishing begins
            opened.clear()
        if isinstance(event, Note) and "No space" in event.text:
            notes.append(event.text)

    monkeypatch.setattr(Path, "open", open_if_there_is_room)
    result = rayfl.run(elsewhere(settings, f"file://{tmp_path}/there"), on_event=note)
    assert len(notes) == 2
    assert all(text.endswith("it is tried again after the next checkpoint") for text in notes)
    assert "summary.json" in Remote(f"file://{tmp_path}/there", result.path.name).files()


def test_where_nothing_answers_nothing_begins(settings: dict[str, Any], tmp_path: Path, staged: Path) -> None:
    (tmp_path / "there").write_text("a file")
    with pytest.raises(ConfigError, match=r"output\.root: file:///.*there"):
        rayfl.run(elsewhere(settings, f"file://{tmp_path}/there/runs"))
    assert not [path for path in staged.rglob("*") if path.is_file()]
    with pytest.raises(ConfigError, match="not a run directory"):
        rayfl.resume(f"file://{tmp_path}/elsewhere/run")


def test_a_bucket_is_a_root_and_no_run(settings: dict[str, Any], s3: str) -> None:
    bucket = s3.removesuffix("/runs")
    run = rayfl.run(elsewhere(settings, bucket)).path.name
    assert is_root(bucket)
    assert is_root(f"{bucket}/")
    assert not is_root(f"{bucket}/{run}")
    assert f"s3://bucket/{run}" in {found.path for found in runs_below(bucket)}
    with pytest.raises(ConfigError, match="s3://bucket: no run is running there"):
        newest_running(Path(bucket))
    with pytest.raises(ConfigError, match="s3://bucket: not a run directory"):
        rayfl.resume(bucket)


def test_who_only_looks_is_not_told_of_writing() -> None:
    with pytest.raises(DiskError, match="s3://buck et/runs/ cannot be read or written: "):
        runs_below("s3://buck et/runs")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/runs/x", ("s3://bucket/runs", "x")),
        ("s3:/bucket/runs/x/", ("s3://bucket/runs", "x")),  # a path has collapsed the slashes
        ("s3://bucket/runs/x?scheme=http", ("s3://bucket/runs?scheme=http", "x")),
        ("file:///nfs/runs/x", ("file:///nfs/runs", "x")),
    ],
)
def test_the_name_of_a_run_is_the_last_of_its_url(url: str, expected: tuple[str, str]) -> None:
    assert split(url) == expected


def test_an_object_cannot_be_fetched_to_outside_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {name: Entry(1, 0.0) for name in ("config.yaml", "../../other")}
    monkeypatch.setattr(Remote, "_run_entries", lambda self: found)
    (tmp_path / "there" / "run").mkdir(parents=True)
    (tmp_path / "there" / "run" / "config.yaml").write_text("{}")
    with pytest.raises(DiskError, match="outside of the run directory"):
        Remote(f"file://{tmp_path / 'there'}", "run").fetch(tmp_path / "staging" / "run")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("what", ["config.yaml", "rounds.csv", "checkpoints/round-00001/manifest.json"])
def test_a_run_that_is_published_while_it_is_fetched_arrives_whole(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are replaced by longer ones, and its checkpoint by the next, at the moment one is read."""
    there, here = Remote(f"file://{tmp_path}/there", "run"), tmp_path / "here"

    def write(rounds: int) -> None:
        shutil.rmtree(here, ignore_errors=True)
        (checkpoint := here / f"checkpoints/round-{rounds:05}").mkdir(parents=True)
        for name in ("manifest.json", "models.npy"):
            (checkpoint / name).write_text(f"{name} {rounds}" * rounds)
        for name in ("config.yaml", "rounds.csv"):
            (here / name).write_text(f"{name} {rounds}" * rounds)
        there.publish(here)

    write(1)
    download = Remote._download

    def meanwhile(self: Remote, name: str, folder: Path) -> bool:
        exists = download(self, name, folder)
        if name == what and left:
            write(left.pop())
            os.truncate(folder / name, 3)
        return exists

    left = [3, 2]
    monkeypatch.setattr(Remote, "_download", meanwhile)
    there.fetch(tmp_path / "back")
    assert left == ([] if "checkpoints" not in what else [3])
    found, wanted = (
        {
            p.relative_to(folder): p.read_text()
            for p in folder.rglob("*")
            if p.is_file() and not p.name.startswith(".")
        }
        for folder in (tmp_path / "back", here)
    )
    assert found == wanted


def probe_parts(root: str) -> None:
    """Skip where the server itself cannot do it: pyarrow does not take what moto 5.2.1 answers."""
    from pyarrow import fs

    system, path = fs.FileSystem.from_uri(root)
    try:
        with system.open_output_stream(f"{path}/probe") as out:
            out.write(bytes(12_000_000))
    except OSError as error:
        if "CompleteMultipartUpload" in str(error):
            pytest.skip("this moto_server does not complete uploads in parts; that of moto 5.2.5 does")
        raise
    system.delete_file(f"{path}/probe")


@pytest.mark.slow
def test_an_object_of_many_parts_comes_back_as_it_was(root: str, tmp_path: Path) -> None:
    """S3 takes objects of more than 10 MB in parts."""
    if root.startswith("s3"):
        probe_parts(root)
    here, back = tmp_path / "here", tmp_path / "back"
    here.mkdir()
    (here / "config.yaml").write_text("{}")
    (here / "model.safetensors").write_bytes(os.urandom(25_000_001))
    there = Remote(root, "parts")
    there.publish(here)
    assert there.files()["model.safetensors"] == 25_000_001
    there.fetch(back)
    assert (back / "model.safetensors").read_bytes() == (here / "model.safetensors").read_bytes()
    there.remove()
    assert not there.files()


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_on_ray_is_published_by_its_driver(
    settings: dict[str, Any], root: str, staged: Path, ray_cluster: None
) -> None:
    """Credentials reach the driver's process, and the run goes on elsewhere."""
    execution = {**settings["execution"], "backend": "ray", "actors": 2, "cpus_per_actor": 0.5}
    with pytest.raises(KeyError):
        rayfl.run(elsewhere(settings, root, execution=execution, seed=7), on_event=Stop())
    (name,) = (path.name for path in staging(root).iterdir())
    shutil.rmtree(staged)
    result = rayfl.resume(below(root, name))
    assert result.summary["models_sha256"] == rayfl.run({**settings, "seed": 7}).summary["models_sha256"]
    assert "summary.json" in Remote(root, name).files()


# -- one process at a time ---------------------------------------------------------------------------------


def sign(there: Remote, name: str, **says: Any) -> None:
    """The lease of a process on another machine."""
    (folder := staging(there.root) / f"not-{there.name}").mkdir(parents=True, exist_ok=True)
    there._write_lease(f".lease/{name}", folder)
    system, path = there._location
    with system.open_output_stream(f"{path}/.lease/{name}") as out:
        out.write(json.dumps({"machine": "elsewhere/1/2", "pid": 7, "born": 1.0, **says}).encode())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_LEASE_INTERVAL", 0.2), ("_DEAD_AFTER", 4.0), ("_CHECK_INTERVAL", 0.1)):
        monkeypatch.setattr(remote, name, seconds)


def test_what_is_being_replaced_is_no_staging_folder(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second process that fetches it waits, however long the old files take to go."""
    root = f"file://{tmp_path}/there"
    name = rayfl.run(elsewhere(settings, root)).path.name
    folder = tmp_path / "behind" / name
    Remote(root, name).fetch(folder)
    (folder / "summary.json").unlink()
    removed = []
    remove, listed = files.remove, Path.iterdir
    monkeypatch.setattr(files, "remove", lambda path: removed.append(path.name) or remove(path))
    monkeypatch.setattr(
        Path, "iterdir", lambda path: iter(sorted(listed(path), key=lambda each: each.name == ".remote"))
    )
    Remote(root, name).fetch(folder)
    assert removed[0] == ".remote"
    assert (folder / "summary.json").is_file()


@pytest.mark.usefixtures("quick")
def test_a_second_process_gives_way(
    settings: dict[str, Any], root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this machine at once; from another, with a staging folder of its own, when the first shows life."""
    said: list[str] = []

    def again(event: RunEvent) -> None:
        if isinstance(event, CheckpointSaved) and not said:
            (name,) = (path.name for path in staging(root).glob("t-*"))
            for machine in (machine_id(), "elsewhere/1/2"):
                with monkeypatch.context() as patch:
                    patch.setenv("RAYFL_STAGING", str(tmp_path / "other machine"))
                    patch.setattr(remote, "machine_id", lambda machine=machine: machine)
                    with pytest.raises(Held) as raised:
                        rayfl.resume(below(root, name))
                    said.append(str(raised.value))

    whole = rayfl.run({**settings, "seed": 8})
    result = rayfl.run(elsewhere(settings, root, seed=8), on_event=again)
    assert all(f"process {os.getpid()} on " in text and "is running this run" in text for text in said)
    assert len(said) == 2
    assert result.summary["models_sha256"] == whole.summary["models_sha256"]
    there = Remote(root, result.path.name)
    assert "summary.json" in there.files()
    assert not there._entries(".lease")
    assert not (result.path / ".lease").exists()


@pytest.mark.usefixtures("quick")
def test_the_lease_of_a_dead_process_is_taken(root: str, tmp_path: Path) -> None:
    there, said = Remote(root, "dead"), list[str]()
    for name, says, lines in (
        ("here", {"machine": machine_id()}, 0),  # its process id is another's, or nobody's
        ("elsewhere", {}, 1),
    ):
        sign(there, name, **says)
        with there.leased(tmp_path, said.append):
            assert [*remote._leases(there._entries(".lease"))] == [(tmp_path / ".lease").read_text()]
        assert len(said) == lines
    assert "waiting to see whether process 7 on elsewhere still runs this run" in said[0]


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells when a process started without the clock"
)
@pytest.mark.usefixtures("quick")
def test_the_lease_of_a_live_process_stays_when_the_clock_is_adjusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This moves the time of the boot, and with it the time at which, for psutil, a process started."""
    there, parent = Remote(f"file://{tmp_path}/there", "live"), os.getppid()
    sign(there, "other", machine=machine_id(), pid=parent, born=process_start(parent))
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: time.time() - 1)
    with pytest.raises(Held, match=f"process {parent} on "), there.leased(tmp_path, print):
        pass


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("again", [False, True])
def test_a_process_that_has_lost_its_lease_stops(settings: dict[str, Any], root: str, again: bool) -> None:
    """It was suspended, and another has taken the run; the first may even write its lease again."""

    def lose(event: RunEvent) -> None:
        if isinstance(event, CheckpointSaved) and not lost:
            (path,) = staging(root).glob("t-*")
            there = Remote(root, path.name)
            lease = (path / ".lease").read_text()
            there._take(lease)
            sign(there, "other")
            if again:  # it had looked just before
                there._write_lease(lease, path)
            lost.append(there)

    lost: list[Remote] = []
    with pytest.raises(Held, match="another process has resumed this run"):
        rayfl.run(elsewhere(settings, root, seed=9), on_event=lose)
    assert "config.yaml" in lost[0].files()
    assert [*remote._leases(lost[0]._entries(".lease"))] == [".lease/other"]
    lost[0].remove()


def test_who_is_behind_what_is_there_does_not_begin(settings: dict[str, Any], tmp_path: Path) -> None:
    root = f"file://{tmp_path}/there"
    path = rayfl.run(elsewhere(settings, root)).path
    (path / "summary.json").unlink()
    with (
        pytest.raises(Held, match="has continued on another machine in the meantime"),
        RunDirectory(path).locked(),
    ):
        pass


# -- watching ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_a_run_is_watched_from_another_machine(settings: dict[str, Any], root: str) -> None:
    """What it does lies in its lease, so one sees more than the last checkpoint."""
    seen = []

    def watch(event: RunEvent) -> None:
        if isinstance(event, CheckpointSaved) and not seen:
            until = time.monotonic() + 120
            while not (running := [run for run in runs_below(root) if run.status.active]):
                assert time.monotonic() < until
                time.sleep(0.2)
            seen.append((running[0], newest_running(root), view(str(running[0].path))))
            for command in (["runs", root, "--json"], ["top", root, "--json"], ["top", root, "--once"]):
                done = CliRunner().invoke(cli.app, command)
                assert done.exit_code == 0, done.output
                assert running[0].status.run in done.output.replace("\n", "")

    path = rayfl.run(elsewhere(settings, root, seed=10), on_event=watch).path
    assert {run.path for run in seen[0]} == {below(root, path.name)}
    done = CliRunner().invoke(cli.app, ["top", below(root, path.name)])
    assert "finished  round 3/3" in done.output
    with pytest.raises(ConfigError, match="no run is running there"):
        newest_running(root)
    with pytest.raises(ConfigError, match="not a run directory"):
        view(f"{root}/nothing")


class Cut:
    """A storage in which the first reads of leases are cut, as if longer ones had replaced them, or fail."""

    def __init__(self, system: Any, times: int, error: Exception | None = None) -> None:
        self._system, self.times, self._error = system, times, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._system, name)

    def open_input_stream(self, path: str) -> io.BytesIO:
        with self._system.open_input_stream(path) as file:
            contents = file.read()
        if "/.lease/" in path and self.times:
            self.times -= 1
            if self._error is not None:
                raise self._error
            contents = contents[:-5]
        return io.BytesIO(contents)


def test_a_lease_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 is asked for the size first, so a longer status is cut: the run would seem to have stopped."""
    there = Remote(f"file://{tmp_path}/there", "t-run")
    (folder := tmp_path / "t-run").mkdir()
    (folder / "config.yaml").write_text("rounds: 5\n")
    there.publish(folder)
    Status(run="t-run", state="running", updated=time.time()).write(folder)
    there._write_lease(".lease/x", folder)
    assert newest_running(there.root).status.run == "t-run"
    system = Remote(there.root, "t-run")._location[0]
    for times, found in ((2, ["t-run"]), (99, [])):
        with monkeypatch.context() as patch:
            cut = Cut(system, times)
            patch.setattr(
                Remote, "_location", property(lambda r, cut=cut: (cut, f"{tmp_path}/there/{r.name}"))
            )
            assert [run.status.run for run in runs_below(there.root) if run.status.active] == found
    with monkeypatch.context() as patch:
        cut = Cut(system, 1, OSError("busy"))
        patch.setattr(Remote, "_location", property(lambda r: (cut, f"{tmp_path}/there/{r.name}")))
        with pytest.raises(DiskError, match="busy"):
            runs_below(there.root)


def test_a_run_that_has_just_begun_is_seen_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only when its lease is written again; a status of an earlier process does not count."""
    monkeypatch.setattr(remote, "_CHECK_INTERVAL", 0.05)
    monkeypatch.setattr(remote, "_LEASE_INTERVAL", 1e6)
    there = Remote(f"file://{tmp_path}/there", "t-run")
    Status(run="t-run", state="stopped", pid=1).write(tmp_path)
    with there.leased(tmp_path, print):
        Status(run="t-run", state="running").write(tmp_path)
        until = time.monotonic() + 120
        while there._read_json((tmp_path / ".lease").read_text())["status"]["state"] != "running":
            assert time.monotonic() < until
            time.sleep(0.05)


# -- buckets that are missing, forbidden or out of reach ---------------------------------------------------

_REFUSALS = {
    404: ("NoSuchBucket", "The specified bucket does not exist.", "notFound"),
    403: ("AccessDenied", "Access Denied", "forbidden"),
}


class Refuses(http.server.BaseHTTPRequestHandler):
    """Answers every request as S3 or GCS does where the bucket is missing (404) or forbidden (403)."""

    code = 404

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        name, text, reason = _REFUSALS[self.code]
        if self.path.startswith(("/storage/", "/upload/")):
            details = {"message": text, "domain": "global", "reason": reason}
            body = json.dumps({"error": {"code": self.code, "message": text, "errors": [details]}})
        else:
            body = f"<?xml version='1.0'?><Error><Code>{name}</Code><Message>{text}</Message></Error>"
        self.send_response(self.code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body.encode())

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer

    def log_message(self, *about: object) -> None:
        """Quiet."""


@pytest.fixture
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """Where all requests get this answer; None: where nothing listens."""
    if request.param is None:
        yield free_ports(1)[0]
        return
    handler = type("Handler", (Refuses,), {"code": request.param})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def bucket_at(scheme: str, port: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a root in a bucket of this server."""
    if scheme == "gs":
        options = f"scheme=http&endpoint_override=127.0.0.1%3A{port}&retry_limit_seconds=1"
        return f"gs://anonymous@lost/runs?{options}"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    return "s3://lost/runs"


@pytest.mark.one_in(5)
@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize(
    ("port", "said"),
    [
        (404, "there is no bucket 'lost'"),
        (403, "these credentials have no permission for it in bucket 'lost'"),
    ],
    indirect=["port"],
)
def test_a_root_out_of_reach_is_a_line_and_not_an_empty_list(
    port: int, said: str, scheme: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = bucket_at(scheme, port, monkeypatch)
    for look in (
        lambda: runs_below(root),
        lambda: is_root(f"{root}/run"),
        lambda: RunDirectory.latest(root),
        lambda: RunDirectory.open(below(root, "run")),
        lambda: rayfl.run(elsewhere(settings, root)),
    ):
        with pytest.raises(RayflError, match=said) as error:
            look()
        assert "\n" not in str(error.value)
    done = subprocess.run([sys.executable, "-m", "rayfl", "runs", root], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


@pytest.mark.slow  # pyarrow tries again for seconds
@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize("port", [None], indirect=True)
def test_an_endpoint_that_does_not_answer_is_named(
    port: int, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DiskError, match="/runs/ cannot be read or written: the endpoint does not answer"):
        runs_below(bucket_at(scheme, port, monkeypatch))


def test_a_folder_that_is_not_there_yet_has_no_runs(s3: str, tmp_path: Path) -> None:
    for root in (f"file://{tmp_path}/later", s3.replace("runs", "later")):
        assert runs_below(root) == []

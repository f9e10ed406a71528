"""The head restarts: its state lies in a Redis of the test's own; runs end in a line, and jobs go on."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rayfl.api import Result
from tests.runtime.test_cluster import (
    BIN,
    Head,
    closing_tree,
    demo,
    free_ports,
    inline_sha256,
    short_path,
    started,
    wait_for_rounds,
)

__all__ = ["inline_sha256", "short_path"]  # fixtures

SECRET = "a-secret-of-this-test"
ROUNDS = 150


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[int]:
    """The port of a Redis."""
    server = shutil.which("redis-server")
    if server is None:
        pytest.skip("there is no redis-server here: apt install redis-server")
    (port,) = free_ports(1)
    command = [server, "--port", str(port), "--bind", "127.0.0.1", "--requirepass", SECRET]
    with (tmp_path / "redis.log").open("w") as log:
        process = subprocess.Popen([*command, "--save", "", "--dir", tmp_path], stdout=log, stderr=log)
    try:
        until = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < until, (tmp_path / "redis.log").read_text()
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait(30)


def power_cut(head: Head) -> None:
    """All processes of the head node end at once."""
    with closing_tree(head.process.pid) as tree:
        for process in tree:
            process.send_signal(signal.SIGKILL)
        psutil.wait_procs(tree, timeout=10)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_a_head_that_is_started_again_knows_its_jobs_and_runs_go_on(
    redis: int, short_path: Path, tmp_path: Path, inline_sha256: Callable[[int], str]
) -> None:
    """A job that is submitted again with the same command, and a run that another process had started."""
    (port,) = free_ports(1)
    kept = {"RAY_REDIS_ADDRESS": f"127.0.0.1:{redis}", "RAY_external_storage_namespace": "mine"}
    options = ("--num-cpus=4", "--redis-password", SECRET)
    command = [str(BIN / "rayfl"), *demo(tmp_path / "jobs", ROUNDS, "--resume", "output.checkpoint_every=5")]
    command += ["execution.actors=2"]

    def head(name: str) -> Head:
        (short_path / name).mkdir()
        return Head(short_path / name, *options, port=port, dashboard=True, **kept)

    def submitted(there: Head, *more: str) -> subprocess.CompletedProcess[str]:
        job = [str(BIN / "ray"), "job", "submit", "--address", there.dashboard]
        return there.run(*job, *more, "--", *command, timeout=600)

    with started(head("a")) as first:
        assert submitted(first, "--no-wait", "--submission-id=first").returncode == 0
        here = [str(BIN / "rayfl"), *demo(tmp_path / "here", ROUNDS, "execution.actors=2")]
        environment = {**first.environment, "RAY_ADDRESS": first.address}
        with (tmp_path / "here.out").open("w") as out, (tmp_path / "here.err").open("w") as err:
            watching = subprocess.Popen(here, env=environment, stdout=out, stderr=err)
        try:
            wait_for_rounds(tmp_path / "jobs", 7, timeout=400)  # behind its first checkpoint
            wait_for_rounds(tmp_path / "here", 3, timeout=400)
            power_cut(first)
            with started(head("b")) as second:
                # The dashboard's old address is in the Redis, so nothing has waited for the new one.
                listing = [str(BIN / "ray"), "job", "list", "--address", second.dashboard]
                until = time.monotonic() + 200
                while "first" not in (listed := second.run(*listing, timeout=200)).stdout:
                    assert time.monotonic() < until, listed.stdout + listed.stderr[-2000:]
                again = submitted(second, "--submission-id=second")
                assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
                assert "resuming: " in again.stdout
                assert watching.wait(200) == 2
        finally:
            if watching.poll() is None:
                watching.kill()
    (job,), (other,) = (list((tmp_path / name).glob("*/")) for name in ("jobs", "here"))
    expected = inline_sha256(ROUNDS)
    assert Result(job).summary["models_sha256"] == expected
    last = (tmp_path / "here.err").read_text().strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert f"rayfl resume {other}" in last
    latest = [str(BIN / "rayfl"), "resume", "--latest", str(tmp_path / "here"), "execution.backend=inline"]
    subprocess.run(latest, env=dict(os.environ), check=True, capture_output=True)
    assert Result(other).summary["models_sha256"] == expected

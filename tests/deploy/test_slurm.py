"""rayfl.sbatch on a real Slurm of two nodes, both on this machine; skipped where that cannot be had."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rayfl

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "deploy" / "slurm" / "rayfl.sbatch"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
PATIENCE = 400.0


def test_the_shell_takes_it() -> None:
    subprocess.run(["bash", "-n", SBATCH], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--severity=warning", SBATCH], check=True)


@pytest.mark.parametrize(
    ("given", "called"),
    [
        (
            ["digits-demo", "--beside", "solo"],
            "run digits-demo --beside solo --resume execution.actors=4 execution.wait=900 output.root={root}",
        ),
        (["study", "mine.yaml"], "study mine.yaml output.root={root} --out {root}/study"),
        (
            ["digits-demo", "execution.actors=2-4", "output.root=/data", "execution.wait=5"],
            "run digits-demo execution.actors=2-4 output.root=/data execution.wait=5 --resume "
            "execution.actors=2-4 execution.wait=5 output.root=/data",
        ),
    ],
)
def test_what_it_calls(tmp_path: Path, given: list[str], called: str) -> None:
    """The last of two settings counts, so the script must not set what the job's arguments set."""
    done = _script(tmp_path, given, f'echo "$@" > {tmp_path}/called')
    assert done.returncode == 0, done.stderr
    root = tmp_path / "runs" / "slurm-7"
    assert (tmp_path / "called").read_text().strip() == called.format(root=root)


def test_who_cancels_before_the_run_begins_is_heard(tmp_path: Path) -> None:
    """While Ray starts there is no run yet that could be told."""
    (tmp_path / "ray").write_text("#!/bin/bash\nkill -TERM $(cat pid); exec sleep 1\n")
    (tmp_path / "ray").chmod(0o755)
    done = _script(tmp_path, ["digits-demo"], "echo $$ > begun; sleep 5; echo > ended", "exec ray")
    assert done.returncode == 128 + 15, done.stderr
    assert not (tmp_path / "ended").exists()


@pytest.mark.parametrize(
    ("limit", "given"),
    [
        ({"SLURM_MEM_PER_NODE": "2000"}, "--memory=1400000000 --object-store-memory=500000000"),
        ({"SLURM_MEM_PER_CPU": "500"}, "--memory=1400000000 --object-store-memory=500000000"),
        ({"SLURM_MEM_PER_NODE": "0"}, ""),
        ({}, ""),
    ],
    ids=["--mem", "--mem-per-cpu", "all", "unlimited"],
)
def test_ray_is_told_the_memory(tmp_path: Path, limit: dict[str, str], given: str) -> None:
    """Of four CPUs; in MB."""
    done = _script(tmp_path, ["digits-demo"], "", f'echo "$@" > {tmp_path}/ray-called', limit)
    assert done.returncode == 0, done.stderr
    told = (tmp_path / "ray-called").read_text().split()
    assert " ".join(each for each in told if "memory=" in each) == given


def _script(
    folder: Path, given: list[str], rayfl: str, ray: str = "", limits: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the script with programs that only pretend.

    Args:
        folder: for everything.
        given: the arguments of the job.
        rayfl: what the command rayfl does, in bash.
        ray: what srun does with the command ray.
        limits: further environment variables of the job.
    """
    fakes = {
        "scontrol": "echo here",
        "srun": f'case "$*" in *hostname*) echo 127.0.0.1;; *"ray start"*) {ray or ":"};; esac',
        "rayfl": rayfl,
    }
    for name, text in fakes.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_PER_TASK": "4"}
    job |= {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NODELIST": "here", **(limits or {})}
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    command = f"echo $$ > pid; exec bash {SBATCH} {shlex.join(given)}"
    return subprocess.run(
        ["bash", "-c", command], env={**os.environ, **job, **path}, cwd=folder, capture_output=True, text=True
    )


def test_what_slurm_is_told() -> None:
    told = {
        line.split()[1].partition("=")[0]: line.split()[1].partition("=")[2]
        for line in SBATCH.read_text().splitlines()
        if line.startswith("#SBATCH ")
    }
    assert told["--signal"].startswith("B:USR1@")
    assert {"--requeue", "--nodes", "--ntasks-per-node", "--cpus-per-task", "--time"} <= told.keys()
    assert told["--open-mode"] == "append"


CONFIG = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=30
JobRequeue=1
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=main Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Slurm of its own, in a short folder: munge's socket lies there."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"there is no Slurm here ({', '.join(missing)}): apt install munge slurmctld slurmd")
    if os.getuid():
        pytest.skip("slurmd starts jobs as root only")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    folder.chmod(0o755)
    private = folder / "munge"
    private.mkdir(mode=0o700)
    (folder / "state").mkdir()
    (private / "key").write_bytes(os.urandom(1024))
    (private / "key").chmod(0o400)
    config = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    config.write_text(CONFIG.format(host=host, ports=free_ports(3), folder=folder, user="root"))
    munge = [
        "munged",
        "--foreground",
        "--force",
        "--key-file",
        private / "key",
        "--socket",
        folder / "munge.socket",
    ]
    munge += ["--pid-file", private / "pid", "--log-file", private / "log", "--seed-file", private / "seed"]
    commands = [munge, ["slurmctld", "-D", "-f", config]]
    commands += [["slurmd", "-D", "-f", config, "-N", node] for node in ("node1", "node2")]
    monkeypatch.setenv("SLURM_CONF", str(config))
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (folder / "daemons.log").open("a") as log:
                started.append(subprocess.Popen(command, stdout=log, stderr=log))
            time.sleep(1)
        until = time.monotonic() + 240
        while _said("sinfo", "-h", "-o", "%D %t") != "2 idle":
            if time.monotonic() > until:
                pytest.skip(f"Slurm does not start here: {(folder / 'daemons.log').read_text()[-500:]}")
            time.sleep(0.5)
        yield folder
    finally:
        _said("scancel", "--user", "root")
        until = time.monotonic() + 60
        while _said("squeue", "-h") and time.monotonic() < until:
            time.sleep(0.5)
        for process in reversed(started):
            process.terminate()
            process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def _until(holds: Callable[[], bool], what: Path) -> None:
    until = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < until, what.read_text() if what.is_file() else "nothing was written"
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1500)
def test_a_job_on_two_nodes_is_queued_again_before_its_end_and_goes_on(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal that Slurm sends near the time limit, from the test; the same bits as inline in the end."""
    settings = ["digits-demo", "rounds=40", "output.report=false", "output.tensorboard=false"]
    expected = rayfl.run(
        "digits-demo", [*settings[1:], "execution.backend=inline", f"output.root={tmp_path}"]
    )
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("RAYFL_ROOT", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    options = ["--cpus-per-task=1", "--mem=0", "--time=30"]
    tried = subprocess.run(["sbatch", "--test-only", *options, SBATCH], capture_output=True, text=True)
    assert "on nodes node[1-2]" in tried.stderr
    job = _said("sbatch", "--parsable", *options, str(SBATCH), *settings)
    log = tmp_path / f"rayfl-{job}.log"
    runs = tmp_path / "runs" / f"slurm-{job}"

    def rounds() -> int:
        return sum(len(path.read_text().splitlines()) - 1 for path in runs.glob("*/rounds.csv"))

    _until(lambda: rounds() >= 3, log)
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], check=True)
    _until(lambda: _said("squeue", "-h", "-o", "%T", "-j", job) == "PENDING", log)
    assert 3 <= rounds() < 40
    assert not Path(f"/tmp/rayfl-{job}").exists()
    subprocess.run(["scontrol", "update", f"jobid={job}", "StartTime=now"], check=True)
    _until(lambda: any(runs.glob("*/summary.json")), log)
    _until(lambda: _said("squeue", "-h", "-j", job) == "", log)
    text = log.read_text()
    assert "2 nodes, 2 actors" in text
    assert "the time limit is near" in text
    assert "resuming: " in text
    assert not Path(f"/tmp/rayfl-{job}").exists()
    (run,) = runs.iterdir()
    assert rayfl.Result(run).summary["models_sha256"] == expected.summary["models_sha256"]

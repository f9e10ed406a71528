"""Machines for the tests of the cluster: Linux namespaces joined by a bridge, each with an sshd.

A machine has network, processes, host name, ``/tmp``, ``/dev/shm`` and home of its own; programs and
libraries are those of the machine that runs the tests. So ``ray stop`` there ends nobody else's Ray, and
addresses mean nothing outside. The first machine holds the bridge: it is the desk from which the others are
worked with. When the process that started a machine ends, however it ends, the kernel ends the machine and
all that runs there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "192.168.0."
"""The addresses of cluster.yaml's on-premise lines."""

HOME = "/run/home"
"""Where the user's home is on every machine."""

PATIENCE = 240.0
"""Seconds for what should take a few: the machine may be very busy."""

_ETC = ("group", "nsswitch.conf", "profile", "bash.bashrc", "ld.so.cache", "localtime", "ssl", "alternatives")
"""What programs there read of this machine's ``/etc``: not all of it, which others may be changing."""

_INIT = """
set -e
folder=$1; name=$2; shift 2
mount --make-rprivate /
hostname "$name"
mount --bind "$folder/etc" /etc
for shared in "$@"; do mkdir -p "$folder$shared"; mount --bind "$shared" "$folder$shared"; done
mount --rbind "$folder/tmp" /tmp
mount -t tmpfs -o size=400m tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/sshd /run/home
mount --bind "$folder/home" /run/home
ip link set lo up
touch "$folder/ready"
while true; do sleep 1000; done  # bash as the first process: it takes leave of processes without parents
"""

_SSHD = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
UseDNS no
PidFile none
MaxStartups 100
"""


def lacking() -> str | None:
    """What this machine lacks for such machines, in words; None if it lacks nothing."""
    programs = (
        "ip",
        "nsenter",
        "unshare",
        "setpriv",
        "rsync",
        "ssh",
        "ssh-keygen",
        "pgrep",
        "/usr/sbin/sshd",
    )
    gone = [name for name in programs if shutil.which(name) is None]
    if gone:
        return f"no {gone[0]} (apt: iproute2, util-linux, procps, openssh-server, rsync)"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    made = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "ip", "link", "add", "bridge0", "type", "bridge"],
        capture_output=True,
        text=True,
    )
    return None if made.returncode == 0 else f"no network namespaces here: {made.stderr.strip()}"


def until(true: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Wait for something."""
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < patience, f"still not after {patience:.0f} s: {what}"
        time.sleep(0.2)


def _own_etc(folder: Path, name: str) -> None:
    """An ``/etc`` in which root's home is another."""
    for part in _ETC:
        source, copy = Path("/etc") / part, folder / "etc" / part
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, symlinks=True)
        elif source.exists():
            shutil.copy(source, copy)
    passwd = [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith("root:")]
    root = f"root:x:0:0:root:{HOME}:/bin/bash"
    (folder / "etc" / "passwd").write_text("\n".join([root, *passwd]) + "\n")
    (folder / "etc" / "shadow").write_text("root:*:20000:0:99999:7:::\n")
    (folder / "etc" / "hosts").write_text(f"127.0.0.1 localhost {name}\n")


class Machine:
    """One of them.

    Args:
        folder: for its files; not below ``/tmp``, which is another one there.
        name: its host name.
        number: the last part of its address.
        key: the public key with which others log in.
    """

    def __init__(self, folder: Path, name: str, number: int, key: str) -> None:
        self.folder, self.name, self.number, self.address = folder, name, number, f"{PREFIX}{number}"
        self.home = folder / "home"  # as it is seen from outside
        self.home.mkdir(parents=True)
        (folder / "tmp").mkdir()
        (folder / "tmp").chmod(0o1777)
        _own_etc(folder, name)
        (folder / "authorized_keys").write_text(key)
        (folder / "sshd_config").write_text(_SSHD.format(folder=folder))
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "host_key")]
        subprocess.run(keygen, check=True)
        needed = {str(ROOT), sys.prefix, sys.base_prefix}
        shared = [path for path in sorted(needed) if path.startswith("/tmp/")]
        alone = ["setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--kill-child", "--mount-proc"]
        alone += ["--net", "--mount", "--pid", "--uts", "--ipc"]
        self._process = subprocess.Popen(
            [*alone, "bash", "-c", _INIT, "init", str(folder), name, *shared],
            env={"PATH": os.environ["PATH"]},
            start_new_session=True,
        )
        until((folder / "ready").exists, f"{name} starts")
        (self.pid,) = [child.pid for child in psutil.Process(self._process.pid).children()]

    def command(self, *words: str, **environment: str) -> list[str]:
        """The command line that runs something there, from outside."""
        enter = ["nsenter", "-t", str(self.pid), "--net", "--mount", "--pid", "--uts", "--ipc"]
        given = {"HOME": HOME, "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TERM": "dumb", **environment}
        return [*enter, "env", "-i", f"--chdir={HOME}", *(f"{k}={v}" for k, v in given.items()), *words]

    def run(self, *words: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run something there."""
        command = self.command(*words, **environment)
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE)
        assert done.returncode == 0 or not check, (
            f"{' '.join(words)}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        )
        return done

    def join(self, desk: Machine) -> None:
        """Plug it into the bridge of the desk, and let others log in."""
        link = ["ip", "link", "add", f"port{self.number}", "type", "veth", "peer", "name", "eth0"]
        # By the process id as it is outside: only the network is entered.
        desk.in_network(*link, "netns", str(self.pid))
        desk.in_network("ip", "link", "set", f"port{self.number}", "master", "bridge", "up")
        self.in_network("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.in_network("ip", "link", "set", "eth0", "up")
        # Nothing is routed, but Ray asks which address one would go out from.
        self.in_network("ip", "route", "add", "default", "via", desk.address)
        self.run("/usr/sbin/sshd", "-f", str(self.folder / "sshd_config"))

    def make_bridge(self) -> None:
        """Be the desk."""
        self.in_network("ip", "link", "add", "bridge", "type", "bridge")
        self.in_network("ip", "address", "add", f"{self.address}/24", "dev", "bridge")
        self.in_network("ip", "link", "set", "bridge", "up")

    def in_network(self, *words: str) -> None:
        """Run something in its network only."""
        subprocess.run(["nsenter", "-t", str(self.pid), "--net", *words], check=True, capture_output=True)

    def processes(self, name: str) -> list[int]:
        """The processes there with this name, by their numbers there."""
        found = self.run("pgrep", "-x", name, check=False).stdout
        return [int(line) for line in found.split()]

    def end(self) -> None:
        """Switch it off."""
        self._process.kill()
        self._process.wait()
        psutil.wait_procs([psutil.Process(self.pid)] if psutil.pid_exists(self.pid) else [], timeout=PATIENCE)

"""This machine and its processes, as another process recognises them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil


def machine_id() -> str:
    """An id of this machine until its next boot, and of this container: the scope of process ids."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
    booted = boot.read_text().strip() if boot.is_file() else f"{psutil.boot_time():.0f}"
    return f"{socket.gethostname()}/{booted}/{os.readlink(space) if os.path.islink(space) else ''}"


def process_start(pid: object) -> float | None:
    """When a process started; None if no process has this id.

    On Linux in clock ticks since the boot, which stay the same when the clock is adjusted; elsewhere in
    seconds since 1970.
    """
    if not isinstance(pid, int):
        return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return float(stat.rpartition(")")[2].split()[19])  # after the name, which may contain anything
    except (OSError, IndexError, ValueError):
        pass
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


@contextlib.contextmanager
def handling_stops(handle: Callable[[int, object], None]) -> Iterator[None]:
    """Context manager for the main thread: a function handles SIGINT, SIGTERM and SIGHUP.

    SIGHUP stays ignored in a process that was started so, as by ``nohup``: it is to outlive its terminal.
    """
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    previous = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

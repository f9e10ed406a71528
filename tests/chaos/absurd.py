"""Absurd input for the command line: settings, YAML files, run directories and datasets, from a seed.

``python -m tests.chaos.absurd --seed 0 --sample 0`` tries every case and prints the counts. Each case runs
in a fork of this process with little memory and little CPU time, so that neither an endless loop nor a
huge allocation does harm; it is right if it works, or ends with one line and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import psutil
from pydantic import BaseModel
from pydantic.fields import FieldInfo

CPU_SECONDS = 10
"""After so much CPU time, a case hangs; those that are right take about one."""
SILENT_SECONDS = 120
"""A case that waits for so long, hangs: one that gets no CPU time on a busy machine does not wait."""
_TRACE = 0.1
"""Seconds of CPU time, no more than what a process needs that waits."""
MEMORY = 3 << 30
"""Bytes that a case may allocate beyond what the parent has mapped."""


@dataclass(frozen=True)
class Case:
    """One call of the command line.

    Attributes:
        kind: settings, yaml, run directory, npz, or idx.
        name: what is wrong.
        args: of the command line.
        prepare: what damages the files, called in the folder of the case.
    """

    kind: str
    name: str
    args: tuple[str, ...]
    prepare: Callable[[Path], None] = lambda folder: None


@dataclass(frozen=True)
class Outcome:
    """What came of a case: ``right`` (it works), ``line``, ``traceback``, ``hang``, or ``lines``."""

    case: Case
    what: str
    text: str


# --- settings ------------------------------------------------------------------------------------------

NUMBERS = (
    "10000000000000000000000000", "-1", "0", "1", "2147483648", "9223372036854775808", "1000000000",
    "100000", "2147483647",
    "-10000000000000000000000000", "1" * 5000, "1e38", "1e308", "1e-320", "-1e38", ".nan", ".inf",
    "-.inf", "0.5", "-0.0",
)  # fmt: skip
OTHERS = (
    "true", "null", "''", '"\\0"', '"a\\nb"', "x" * 100_000, "[]", "{}", "[1, 2]", "{a: 1}", "[[[[1]]]]", "~",
    "2026-11-22", "!!binary aGFsbG8=", "!!set {a, b}", "'%s{}'", '"\\ud800"', "auto", "/dev/null/x", "'~'",
)  # fmt: skip
LISTS = (*(f"[{v}]" for v in (*NUMBERS, "x", "null", '"\\0"')), f"[{'1, ' * 3000}1]", "[[1]]", "[{}]")
OF_LONG_RUNS = ("rounds", "epochs", "wait")
"""Settings that may ask for days of work: a large value is no mistake, so nothing is started with them."""


DATA = ("digits", "npz", "synthetic", "leaf", "mnist")
"""Datasets whose settings are tried; those of others are alike, and they are not there."""
USERS = {"clustering": "algorithm=pacfl", "hierarchy": "algorithm=mt_hfl"}
"""Methods that use a section."""


def leaves() -> Iterator[tuple[tuple[str, ...], str, FieldInfo]]:
    """Every setting: the choices that it needs (``algorithm=ifca``), its dotted path, its field."""
    from rayfl.config import Config

    yield from _leaves(Config, (), "")


def _leaves(
    section: type[BaseModel], needs: tuple[str, ...], path: str
) -> Iterator[tuple[tuple[str, ...], str, FieldInfo]]:
    from rayfl.settings import Section, part_name

    for key, field in section.model_fields.items():
        dotted = f"{path}.{key}".lstrip(".")
        parts = [p for p in _classes(field.annotation) if issubclass(p, Section)]
        if not parts or key in ("events", "loggers"):
            if key != "name" or not path:
                yield needs, dotted, field
            continue
        for part in parts:
            name = part_name(part)
            if "pretrain" in dotted or (key == "data" and name not in DATA):
                continue
            yield from _leaves(part, (*needs, f"{dotted}={name}") if name else needs, dotted)


def _classes(annotation: Any) -> list[type]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for inner in get_args(annotation) for found in _classes(inner)]


def settings() -> Iterator[Case]:
    """Every setting with every absurd value."""
    for needs, path, field in leaves():
        many = any(
            getattr(a, "__origin__", a) is tuple for a in (field.annotation, *get_args(field.annotation))
        )
        long = any(word in path for word in OF_LONG_RUNS)
        for value in (*NUMBERS, *OTHERS, *(LISTS if many else ())):
            shown = value if len(value) < 40 else f"{value[:30]}... ({len(value)} characters)"
            # Images suit most models; the first few rows of a table the rest.
            table = any(need in needs for need in ("model=linear", "model=mthfl_mlp"))
            user = [USERS[path.split(".")[0]]] if path.split(".")[0] in USERS else []
            args = ("run", "table.yaml" if table else "images.yaml", *user, *needs, f"{path}={value}")
            args += ("--dry-run",) if long else ()
            yield Case("settings", f"{' '.join((*needs, path))}={shown}", args)


# --- YAML files ----------------------------------------------------------------------------------------


def _bomb(levels: int, width: int = 10, kind: str = "list") -> str:
    """Nested anchors: each level has the one before ``width`` times."""
    lines = ["a0: &a0 x" if kind == "list" else "a0: &a0 {x: 1}"]
    for level in range(1, levels):
        inner = [f"*a{level - 1}"] * width
        if kind == "list":
            lines.append(f"a{level}: &a{level} [{', '.join(inner)}]")
        else:
            keys = ", ".join(f"k{i}: {one}" for i, one in enumerate(inner))
            lines.append(f"a{level}: &a{level} {{{keys}}}")
    return "\n".join(lines) + "\n"


def yaml_files() -> Iterator[Case]:
    """Files that are no config, or that grow when they are read."""
    texts: dict[str, str | bytes] = {
        "empty": "",
        "bomb of lists": _bomb(12),
        "bomb of maps": _bomb(12, kind="map"),
        "deep bomb": _bomb(60, 2),
        "bomb in a setting": _bomb(12) + "partition: {name: iid, clients: *a11}\n",
        "bomb in a part": _bomb(12, kind="map") + "training: *a11\n",
        "bomb of keys": "? &k [1, 2]\n: 1\n? [*k, *k]\n: 2\n",
        "merge bomb": "a0: &a0 {x: 1}\n"
        + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 12)),
        "wide merges": "a: &a {"
        + ", ".join(f"k{i}: 1" for i in range(2000))
        + "}\nb: {<<: ["
        + ", ".join(["*a"] * 5000)
        + "]}\n",
        "itself": "&a\ntraining: *a\n",
        "itself in a list": "model: {name: mlp, hidden: &a [*a]}\n",
        "itself merged": "training: &a {<<: *a}\n",
        "unknown alias": "training: *nobody\n",
        "deep list": "name: " + "[" * 20000 + "]" * 20000,
        "deep map": "".join(f"{' ' * i}a:\n" for i in range(3000)),
        "open list": "name: [",
        "python object": "name: !!python/object/apply:os.system ['true']\n",
        "unknown tag": "name: !x y\n",
        "tab": "training:\n\tlr: 1\n",
        "twice": "seed: 1\nseed: 2\n",
        "two documents": "seed: 1\n---\nseed: 2\n",
        "list": "[1, 2]",
        "text": "hello",
        "number": "1" * 6000,
        "long key": "k" * 200_000 + ": 1\n",
        "long text": "name: " + "x" * 3_000_000,
        "many keys": "".join(f"k{i}: 1\n" for i in range(20_000)),
        "null key": "null: 1\n",
        "number key": "1: 1\n1.5: 2\ntrue: 3\n",
        "list key": "[1, 2]: 3\n",
        "map key": "{a: 1}: 3\n",
        "date": "seed: 2026-99-99\n",
        "sexagesimal": "seed: 1:2:3:4:5:6:7:8:9\n" + "rounds: " + "1:" * 3000 + "1\n",
        "hexadecimal": "seed: 0x" + "f" * 100_000 + "\n",
        "binary tag": "name: !!binary '%%%'\n",
        "directive": "%YAML 9.9\n---\nseed: 1\n",
        "utf-16": "seed: 1\n".encode("utf-16"),
        "latin-1": "name: \xe9\n".encode("latin-1"),
        "null byte": b"name: a\0b\n",
        "bytes": bytes(range(256)) * 40,
        "zip": b"PK\x03\x04" + bytes(1000),
        "surrogate": b'name: "\\ud800"\n',
        "events": "events: [" + ", ".join(["{name: leave, round: 1, clients: [0]}"] * 3000) + "]\n",
        "paper": "paper: 1\nseed: 1\n",
        "omap": "training: !!omap [a: 1, b: 2]\n",
        "set": "training: !!set {lr, epochs}\n",
        "pairs": "training: !!pairs [lr: 1, lr: 2]\n",
    }
    for name, text in texts.items():

        def write(folder: Path, text: str | bytes = text) -> None:
            (folder / "bad.yaml").write_bytes(text.encode() if isinstance(text, str) else text)

        for more in ((), ("rounds=1",)):
            yield Case("yaml", f"{name} {' '.join(more)}", ("run", "bad.yaml", *more, "--dry-run"), write)
    for name, value in (
        ("bomb", "[&a [1,1], " + "*a, " * 9 + "]"),
        ("itself", "&a [*a]"),
        ("deep", "[" * 9999),
    ):
        yield Case("yaml", f"{name} in an override", ("run", "table.yaml", f"model.hidden={value}"))
    for path in (".", "/dev/zero", "/dev/null", "pipe", "loop", "x" * 5000, "~", "", " ", "-", "\n"):

        def special(folder: Path) -> None:
            os.mkfifo(folder / "pipe")
            (folder / "loop").symlink_to("loop")

        yield Case("yaml", f"config {path[:20]!r}", ("run", path, "--dry-run"), special)


# --- run directories -----------------------------------------------------------------------------------

GARBAGE = bytes(random.Random(0).randrange(256) for _ in range(2000))


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[len(data) // 2] ^= 0x41
    path.write_bytes(data)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _of_another(path: Path) -> None:
    run = next(p for p in path.parents if (p / "config.yaml").exists())
    other = run.parent / "other"
    same = other / path.relative_to(run)
    path.write_bytes(same.read_bytes() if same.is_file() else b"")


def _other_json(path: Path) -> None:
    path.write_text("[]" if path.suffix == ".json" else "a,b\n1\n" if path.suffix == ".csv" else "a: 1\n")


def _nulls(path: Path) -> None:
    """As a journal leaves a file whose blocks never reached the disk."""
    path.write_bytes(bytes(path.stat().st_size))


DAMAGES: Mapping[str, Callable[[Path], None]] = {
    "deleted": Path.unlink,
    "empty": lambda path: path.write_bytes(b"") and None,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "garbage": lambda path: path.write_bytes(GARBAGE) and None,
    "a bit flipped": _flipped,
    "a folder": _folder,
    "a pipe": _pipe,
    "a link to itself": _loop,
    "of another run": _of_another,
    "of another kind": _other_json,
    "zeros": _nulls,
}


def run_directories(there: Path) -> Iterator[Case]:
    """Each file of a stopped run damaged in each way, for each command that reads it."""
    run = there / "stopped"
    for path in sorted(p for p in run.rglob("*") if p.is_file() and p.name != ".lock"):
        inner = path.relative_to(run)
        for damage, do in DAMAGES.items():

            def harm(folder: Path, inner: Path = inner, do: Callable[[Path], None] = do) -> None:
                do(folder / "stopped" / inner)

            for args in (
                ("resume", "stopped", "rounds=3"),
                ("report", "stopped"),
                ("compare", "stopped", "other", "--out", "page.html"),
                ("newcomers", "stopped", "images.npz", "--epochs", "0"),
                ("models", "stopped", "0"),
            ):
                yield Case("run directory", f"{args[0]}: {inner} {damage}", args, harm)
    for setting in (
        "output.root=elsewhere",
        "seed=3",
        "rounds=1",
        "rounds=0",
        "x=1",
        "execution=1",
        "output=",
    ):
        yield Case("run directory", f"resume {setting}", ("resume", "stopped", setting))
    for command in ("resume", "report", "compare", "models", "newcomers"):
        for place in (".", "x" * 5000, "images.npz", "stopped/config.yaml", "/dev/null", "~"):
            more = ("images.npz",) if command == "newcomers" else ("other",) if command == "compare" else ()
            yield Case("run directory", f"{command} {place[:20]!r}", (command, place, *more))


# --- datasets ------------------------------------------------------------------------------------------


def _arrays(images: bool = False, samples: int = 60) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shape = (28, 28) if images else (4,)
    found: dict[str, Any] = {}
    for part, count in (("train", samples), ("test", samples // 2)):
        y = np.arange(count) % 4
        x = rng.normal(y.reshape(-1, *[1] * len(shape)), 1, (count, *shape))
        found[f"x_{part}"] = np.uint8(np.clip(40 * x + 100, 0, 255)) if images else x.astype(np.float32)
        found[f"y_{part}"] = y
    return found


def npz_files() -> Iterator[Case]:
    """Files that are no dataset, read as data, and as newcomers."""
    good = _arrays(images=True)
    n, m = len(good["y_train"]), len(good["y_test"])
    changes: dict[str, dict[str, Any]] = {}
    for key in good:
        part = good[key]
        for name, value in {
            "missing": None,
            "of objects": np.array([{}, 1, "x"], dtype=object),
            "of texts": np.array(["a"] * len(part)),
            "of dates": np.array(["2026-01-01"] * len(part), dtype="datetime64[D]"),
            "complex": part.astype(complex),
            "empty": part[:0],
            "a number": np.array(3),
            "shorter": part[:-1],
            "transposed": part.T,
            "flat": part.reshape(-1),
            "huge": part.astype(np.int64) * 10**17,
            "uint64": np.full_like(part, 2**64 - 1, dtype=np.uint64),
            "negative": -part.astype(np.int64) - 1,
            "NaN": np.full(part.shape, np.nan),
            "infinite": np.full(part.shape, np.inf),
            "half floats": part.astype(np.float16),
            "long doubles": part.astype(np.longdouble) * np.longdouble(10) ** 400,
            "booleans": part > 0,
            "records": np.zeros(len(part), dtype=[("a", int), ("b", float)]),
            "five axes": part.reshape(*part.shape, *[1] * (5 - part.ndim)),
            "without width": np.empty((len(part), 0)),
            "void": np.zeros(len(part), dtype="V8"),
            "big endian": part.astype(">i4"),
        }.items():
            changes[f"{key} {name}"] = {key: value}
    for key, length in (("domain_train", n), ("domain_test", m), ("client_train", n), ("client_test", m)):
        other = key.replace("train", "test") if "train" in key else key.replace("test", "train")
        for name, value in {
            "alone": np.zeros(length, int),
            "NaN": np.full(length, np.nan),
            "huge": np.full(length, 2**62),
            "negative": np.full(length, -1),
            "text": np.array(["x"] * length),
            "objects": np.array([{}] * length),
            "short": np.zeros(1, int),
            "uint64": np.full(length, 2**64 - 1, np.uint64),
        }.items():
            whole = {} if name == "alone" else {other: np.zeros(m if length == n else n, int)}
            changes[f"{key} {name}"] = {key: value, **whole}
    changes["class_names objects"] = {"class_names": np.array([{}, {}], dtype=object)}
    changes["class_names few"] = {"class_names": np.array(["a"])}
    changes["class_names numbers"] = {"class_names": np.arange(100000)}
    changes["class_names with breaks"] = {"class_names": np.array(["a\nb", "\0", "\ud7ff", "[bold]"])}

    def save(path: Path, change: Mapping[str, Any]) -> None:
        arrays = {k: v for k, v in {**good, **change}.items() if v is not None}
        np.savez(path, **arrays)

    def spoil(path: Path, how: str) -> None:
        save(path, {})
        data = path.read_bytes()
        header = data.index(b"'shape'")
        spoiled = {
            "cut at a half": data[: len(data) // 2],
            "cut by a byte": data[:-1],
            "a byte": b"x",
            "nothing": b"",
            "garbage": GARBAGE,
            "zip of nothing": b"PK\x05\x06" + bytes(18),
            "pickle": b"\x80\x04\x95" + bytes(20),
            "shape of 10^15": data.replace(b"(60, 28, 28)", b"(9" + b"9" * 4 + b", 28)"),
            "header garbage": data[:header] + b"?" * 30 + data[header + 30 :],
            "appended": data + GARBAGE,
            "prepended": GARBAGE + data,
            "npy": data[data.index(b"\x93NUMPY") :],
        }
        path.write_bytes(spoiled[how])

    writers: dict[str, Callable[[Path], None]] = {
        name: lambda path, change=change: save(path, change) for name, change in changes.items()
    }
    for how in (
        "cut at a half", "cut by a byte", "a byte", "nothing", "garbage", "zip of nothing", "pickle",
        "shape of 10^15", "header garbage", "appended", "prepended", "npy",
    ):  # fmt: skip
        writers[how] = lambda path, how=how: spoil(path, how)
    writers["a folder"] = lambda path: path.mkdir()
    writers["a pipe"] = os.mkfifo
    for name, writer in writers.items():

        def write(folder: Path, writer: Callable[[Path], None] = writer) -> None:
            writer(folder / "bad.npz")

        yield Case("npz", f"run: {name}", ("run", "images.yaml", "data.path=bad.npz"), write)
        yield Case("npz", f"newcomers: {name}", ("newcomers", "stopped", "bad.npz", "--epochs", "1"), write)
        if "_" not in name:

            def stored(folder: Path, writer: Callable[[Path], None] = writer) -> None:
                (folder / "data").mkdir()
                writer(folder / "data" / "mnist.npz")

            for args in (("prepare", "mnist"), ("run", "images.yaml", "data=mnist", "--dry-run")):
                yield Case("npz", f"{args[0]} mnist: {name}", args, stored)


IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def idx_files() -> Iterator[Case]:
    """torchvision's files of MNIST, garbled; a table of one kind each."""
    contents: dict[str, bytes] = {
        "nothing": b"",
        "a byte": b"x",
        "garbage": GARBAGE,
        "zeros": bytes(5000),
        "header alone": bytes([0, 0, 8, 3, 0, 0, 0, 9, 0, 0, 0, 28, 0, 0, 0, 28]),
        "huge": bytes([0, 0, 8, 3]) + b"\xff" * 12,
        "unknown type": bytes([0, 0, 99, 3]) + bytes(12),
        "no axes": bytes([0, 0, 8, 0]),
        "text": b"<html>404</html>\n" * 50,
    }
    for name, content in contents.items():

        def write(folder: Path, content: bytes = content) -> None:
            raw = folder / "data" / "MNIST" / "raw"
            raw.mkdir(parents=True)
            for file in IDX:
                (raw / file).write_bytes(content)

        for args in (("prepare", "mnist"), ("run", "images.yaml", "data=mnist", "--dry-run")):
            yield Case("idx", f"{args[0]}: {name}", args, write)


# --- trying them ---------------------------------------------------------------------------------------

COMMON = {
    "seed": 1,
    "rounds": 1,
    "partition": {"name": "iid", "clients": 4},
    "training": {"epochs": 1},
    "execution": {"backend": "inline"},
    "output": {"report": False, "tensorboard": False, "checkpoint_every": 1},
}


def lay_out(folder: Path) -> None:
    """The files that cases damage: two datasets, a config for each, a stopped and a finished run."""
    import rayfl

    for name in ("table", "images"):
        np.savez(folder / f"{name}.npz", **_arrays(name == "images"))
        config = {**COMMON, "data": {"name": "npz", "path": f"{name}.npz"}}
        (folder / f"{name}.yaml").write_text(json.dumps(config))
    here = Path.cwd()
    os.chdir(folder)
    try:
        for name, seed, algorithm in (("stopped", 1, "pacfl"), ("other", 2, "ifca")):
            overrides = [f"seed={seed}", f"algorithm={algorithm}", "rounds=2", "output.root=made"]
            overrides += ["output.report=true", "output.tensorboard=true"]
            rayfl.run("images.yaml", overrides).path.rename(folder / name)
    finally:
        os.chdir(here)


def outcome(case: Case, there: Path) -> Outcome:
    """Try a case in a fork, in a copy of the files."""
    folder = Path(tempfile.mkdtemp(prefix="case-", dir=there.parent))
    shutil.copytree(there, folder, dirs_exist_ok=True)
    out, err = folder / ".stdout", folder / ".stderr"
    child = os.fork()
    if child == 0:
        _in_child(case, folder, out, err)
    status = _wait(child)
    try:
        text = err.read_text(errors="replace") if err.exists() else ""
        said = out.read_text(errors="replace") if out.exists() else ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(case, _what(status, said, text), text)


def _what(status: int | None, said: str, text: str) -> str:
    if status is None or os.WIFSIGNALED(status):
        return "hang" if status is None or os.WTERMSIG(status) == signal.SIGXCPU else "killed"
    if "Traceback" in said + text:
        return "traceback"
    code = os.WEXITSTATUS(status)
    if code == 0:
        return "right"
    lines = text.strip("\n").splitlines()
    expected = {1: "error: client ", 2: "error: "}.get(code)  # 1: a client's training diverged
    return "line" if expected and len(lines) == 1 and lines[0].startswith(expected) else f"exit code {code}"


def _in_child(case: Case, folder: Path, out: Path, err: Path) -> None:
    """Run the command line, and leave without any of the parent's clean-up."""
    code = 99
    try:
        os.chdir(folder)
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        sys.stdout = os.fdopen(1, "w", buffering=1, errors="backslashreplace")
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
        os.environ.update(RAYFL_DATA=str(folder / "data"), HOME=str(folder), COLUMNS="200")
        for proxy in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            os.environ[proxy] = "http://127.0.0.1:9"  # nobody listens there: nothing is downloaded
        case.prepare(folder)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        limit = int(used) + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        sys.argv = ["rayfl", *case.args]
        from rayfl import cli

        there = psutil.virtual_memory()._replace(total=MEMORY, available=MEMORY)
        psutil.virtual_memory = lambda: there
        cli.out.__init__()  # type: ignore[misc]  # it looks for the terminal anew
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int) -> int | None:
    """The status of a child; None if it had to be killed for its silence."""
    watched = os.pidfd_open(child)
    try:
        worked = -1.0
        while not select.select([watched], [], [], SILENT_SECONDS)[0]:
            times = psutil.Process(child).cpu_times()
            before, worked = worked, times.user + times.system
            if worked <= before + _TRACE:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return None
        return os.waitpid(child, 0)[1]
    finally:
        os.close(watched)


def cases(there: Path, kinds: Sequence[str] = ()) -> list[Case]:
    """All cases, of some kinds or of all."""
    found = [*settings(), *yaml_files(), *run_directories(there), *npz_files(), *idx_files()]
    return [case for case in found if not kinds or case.kind in kinds]


def main() -> None:
    """Try cases, print the counts, and those that are wrong as JSON lines into a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=0, help="cases of each kind; 0: all")
    parser.add_argument("--kinds", default="", help="settings,yaml,run directory,npz,idx")
    parser.add_argument("--grep", default="", help="only cases whose names hold this")
    parser.add_argument("--out", type=Path, help="a file for the outcomes, a JSON object a line")
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="absurd-") as scratch:
        there = Path(scratch) / "there"
        there.mkdir()
        lay_out(there)
        chosen = [c for c in cases(there, [k for k in given.kinds.split(",") if k]) if given.grep in c.name]
        if given.sample:
            groups: dict[str, list[Case]] = {}
            for case in chosen:
                groups.setdefault(case.kind, []).append(case)
            chosen = [c for g in groups.values() for c in rng.sample(g, min(given.sample, len(g)))]
        counts: dict[str, Counter[str]] = {}
        lines = given.out.open("w", buffering=1) if given.out else sys.stdout
        for case in chosen:
            begun = time.perf_counter()
            found = outcome(case, there)
            counts.setdefault(case.kind, Counter())[found.what] += 1
            seconds = round(time.perf_counter() - begun, 2)
            if given.out or found.what not in ("right", "line"):
                row = {"what": found.what, "kind": case.kind, "name": case.name, "seconds": seconds}
                print(json.dumps({**row, "text": found.text[-3000:]}), file=lines)
    for kind, counted in counts.items():
        print(f"{kind}: {sum(counted.values())} tried, {dict(counted)}", file=sys.stderr)


if __name__ == "__main__":
    main()

"""What needs no computing imports nothing that computes: settings, lists and mistakes answer at once."""

import json
import subprocess
import sys

HEAVY = (
    "matplotlib", "numba", "pandas", "ray", "safetensors", "scipy.cluster", "scipy.linalg", "scipy.optimize",
    "scipy.sparse", "scipy.spatial", "sklearn", "tensorboard", "torch", "torchvision", "umap",
)  # fmt: skip

COMMANDS = """
import contextlib, io, json, sys
from rayfl import cli

found = {}
for line in ("--version", "--help", "list", "run digits-demo training.lrr=1", "run digits"):
    sys.argv = ["rayfl", *line.split()]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = cli.main()
        except SystemExit as end:
            code = end.code
    assert said.getvalue()
    found[line] = [code or 0, [name for name in HEAVY if name in sys.modules]]
print(json.dumps(found))
"""

HELP = """
import contextlib, io, json, sys
from rayfl import cli

found = {}
for line in ("--version", "--help", "run --help"):
    sys.argv = ["rayfl", *line.split()]
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            cli.main()
        except SystemExit as end:
            assert not end.code
    found[line] = [name for name in ("numpy", "yaml", "rayfl.config") if name in sys.modules]
print(json.dumps(found))
"""

PARTS = """
import json, sys
from rayfl import config
from rayfl.config import kinds

parts = sum(len(registry) for registry in kinds.KINDS.values())
config.load("pacfl-fmnist", ["training.lr=0.1"])
try:
    config.load("digits-demo", ["model=resnet"])
except config.reading.ConfigError as error:
    print(json.dumps([parts, str(error), [name for name in HEAVY if name in sys.modules]]))
"""


def answer(program: str):
    """What a program prints that runs in a Python of its own."""
    command = [sys.executable, "-c", f"HEAVY = {HEAVY!r}\n{program}"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_lists_help_and_mistakes_import_nothing_that_computes():
    assert answer(COMMANDS) == {
        "--version": [0, []],
        "--help": [0, []],
        "list": [0, []],
        "run digits-demo training.lrr=1": [2, []],
        "run digits": [2, []],
    }


def test_help_reads_no_configs():
    assert answer(HELP) == {"--version": [], "--help": [], "run --help": []}


ALONE = """
import json
from rayfl.data.partitions.iid import Iid

try:
    Iid(spraed=2)
except Exception as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


def test_a_part_is_refused_in_one_line_before_anything_else_is_used():
    assert answer(ALONE) == ["ConfigError", "spraed: no such setting; did you mean 'spread'?"]


UNUSED = """
import json
from rayfl import config
from rayfl.config import kinds

config.load("digits-demo")
parts = [part for registry in kinds.KINDS.values() for part in registry.values()]
print(json.dumps([len(parts), sum(part.__pydantic_complete__ for part in parts)]))
"""


def test_parts_that_are_not_used_are_not_completed():
    parts, complete = answer(UNUSED)
    assert parts > 80
    assert complete < 20


def test_configs_and_parts_import_nothing_that_computes():
    parts, refused, heavy = answer(PARTS)
    assert parts > 80
    assert refused == "model: no model named 'resnet'; did you mean 'resnet9'?"
    assert heavy == []


RUN = """
import json, sys
import rayfl.api

print(json.dumps([name for name in HEAVY if name in sys.modules]))
"""


def test_who_watches_a_run_on_ray_trains_nothing():
    """The process of the command: the driver, in an actor of its own, and the workers import PyTorch."""
    assert not {"torch", "numba", "pandas", "safetensors", "sklearn"} & set(answer(RUN))


FROZEN = """
import contextlib, gc, io, json, sys
from rayfl import cli

counts = []
for line in ("list losses", "list models"):
    sys.argv = ["rayfl", *line.split()]
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            cli.main()
        except SystemExit as end:
            assert not end.code
    counts.append(gc.get_freeze_count())
print(json.dumps([gc.isenabled(), counts]))
"""


def test_what_stays_is_not_collected():
    """The first command leaves its parts out of garbage collection; a later one of the same process none."""
    collects, (first, second) = answer(FROZEN)
    assert collects
    assert first > 10_000
    assert second <= first

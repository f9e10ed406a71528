"""The packages: what may import what, what may draw random numbers, how many arguments there are."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "rayfl"

FLOORS = (
    "angles backend errors events kept linalg machine memory random server_step torchvision_shim units "
    "version",
    "settings",
    "aggregation files given losses plugins statistics",
    "data models paper remote",
    "evaluation loggers training",
    "coresets local ordering signatures",
    "clustering sampling",
    "algorithms",
    "config",
    "inputs",
    "clients rundir",
    "monitor report",
    "servers",
    "runtime",
    "notebook results",
    "api",
    "study",
    "commands display doctor overview",
    "bench",
    "cli",
    "__main__",
    "rayfl",
)
"""From the ground up. A room imports rooms of lower floors only, not those beside it."""

DRAWS = {"bench", "cli", "display", "overview", "report", "study"}
"""The rooms that may import what draws and prints."""

MOST = 7
"""Parameters of a function, ``self`` and ``cls`` aside."""


def name_of(path: Path, root: Path = ROOT) -> str:
    """``rayfl.data.base`` of ``rayfl/data/base.py``; a package's ``__init__.py`` has the package's name."""
    parts = [root.name, *path.relative_to(root).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules(root: Path = ROOT) -> Mapping[str, ast.Module]:
    return {name_of(path, root): ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}


def imports(module: ast.Module, name: str) -> Iterator[str]:
    """The dotted names that a module imports, wherever in it: at once, deferred, or for types only.

    ``from a import b`` is ``a.b``. A registry of parts imports all modules of its package.
    """
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func).split(".")[-1]
            if called == "Registry":
                yield f"{ast.literal_eval(node.args[1])}.*"
            elif called == "import_module" and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value)


@cache
def graph(root: Path = ROOT) -> dict[str, set[str]]:
    """By module the modules of the package that it imports."""
    known = modules(root)
    found: dict[str, set[str]] = {}
    for name, module in known.items():
        targets = found[name] = set()
        for target in imports(module, name):
            package = target.rpartition(".")[0]
            if target.endswith(".*"):
                inside = {other for other in known if other.rpartition(".")[0] == package}
                targets |= inside
            elif target in known:
                targets.add(target)
            elif package in known:
                targets.add(package)
            else:
                assert target.split(".")[0] != root.name, f"{name} imports {target}, which does not exist"
        targets.discard(name)
    return found


def room(name: str) -> str:
    """``data`` of ``rayfl.data.base``."""
    return name.split(".")[1] if "." in name else name


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of nodes from each of which one gets to all others (Tarjan 1972)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        for other in sorted(edges.get(node, ())):
            if other not in number:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == number[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(edges):
        if node not in number:
            visit(node)
    return found


def upwards(edges: Mapping[str, set[str]]) -> list[str]:
    """The imports that do not run downwards."""
    floor = {name: height for height, rooms in enumerate(FLOORS) for name in rooms.split()}
    return [
        f"{name} imports {target}"
        for name, targets in edges.items()
        for target in sorted(targets)
        if room(name) != room(target) and floor[room(name)] <= floor[room(target)]
    ]


def test_every_module_lies_in_a_room() -> None:
    rooms = " ".join(FLOORS).split()
    assert len(rooms) == len(set(rooms))
    assert {room(name) for name in modules()} == set(rooms)


def test_imports_run_downwards() -> None:
    """Between rooms; deferred imports and those for types too."""
    assert upwards(graph()) == []


def test_there_are_no_circles() -> None:
    """Neither between rooms nor between the modules in one."""
    assert circles(graph()) == []


@pytest.mark.parametrize(
    ("libraries", "rooms"),
    [({"ray"}, {"runtime"}), ({"jinja2", "markupsafe", "matplotlib", "rich", "typer"}, DRAWS)],
)
def test_libraries_that_stay_in_their_room(libraries: set[str], rooms: set[str]) -> None:
    """Only the runtime knows Ray; what trains draws nothing."""
    wrong = [
        f"{name} imports {target}"
        for name, module in modules().items()
        for target in imports(module, name)
        if target.split(".")[0] in libraries and room(name) not in rooms
    ]
    assert wrong == []


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    a = function.args
    every = [*a.posonlyargs, *a.args, *a.kwonlyargs, *(x for x in (a.vararg, a.kwarg) if x is not None)]
    return [x.arg for x in every if x.arg not in ("self", "cls")]


def compiled(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is a kernel: Numba knows no objects that could hold the arguments together."""
    return bool(marks(function) & {"jit", "_operation"})


def command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is a command of the command line: its parameters are the options, read by name."""
    return "app.command" in marks(function)


def mirrors(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether its parameters are those of a function of PyTorch, read by name."""
    return "_rule" in marks(function)


def marks(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {ast.unparse(mark).split("(")[0] for mark in function.decorator_list}


def test_no_function_takes_more_than_seven_arguments() -> None:
    found = {
        f"{name}.{node.name}": len(parameters(node))
        for name, module in modules().items()
        for node in ast.walk(module)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and not (compiled(node) or command(node) or mirrors(node))
    }
    assert not {name for name, count in found.items() if count > MOST}


def test_what_the_tests_above_would_find(tmp_path: Path) -> None:
    """Deferred imports, imports for types, registries and circles through them."""
    root = tmp_path / "rayfl"
    for path, text in {
        "__init__.py": "",
        "errors.py": "def late():\n    from rayfl.config import load\n",
        "config.py": "if TYPE_CHECKING:\n    import rayfl.cli\n",
        "cli.py": "",
        "local/__init__.py": "PARTS = Registry('objective', 'rayfl.local', Base)\n",
        "local/sgd.py": "from rayfl.local import PARTS\n",
        "local/base.py": "from rayfl.local.other import x\n",
        "local/other.py": "def f():\n    from rayfl.local import base\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    found = graph(root)
    assert upwards(found) == ["rayfl.config imports rayfl.cli", "rayfl.errors imports rayfl.config"]
    assert circles(found) == [["rayfl.local.base", "rayfl.local.other"], ["rayfl.local", "rayfl.local.sgd"]]
    function = ast.parse("def f(self, a, /, b, *c, d=1, **e): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert parameters(function) == ["a", "b", "d", "c", "e"]

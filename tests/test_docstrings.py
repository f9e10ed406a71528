"""Docstrings: public functions state the shapes of their arrays, in the letters of one legend."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

import pytest

from tests.test_house import ROOT, modules

LEGEND = ROOT.parent / "docs" / "design.md"
ARRAYS = re.compile(r"\b(NDArray|ArrayLike|ndarray|Tensor|csr_array|Array|Matrix)\b(?!\])|\bNDArray\[")
SHAPE = re.compile(r"``[^`]*\([^`]*,[^`]*\)``|any shape")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def public(tree: ast.Module) -> Iterator[tuple[str, Function, ast.ClassDef | None]]:
    """The public functions of a module and of its public classes, by name."""
    for node in tree.body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield node.name, node, None
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for each in node.body:
                if isinstance(each, Function) and not each.name.startswith("_"):
                    yield f"{node.name}.{each.name}", each, node


def takes_arrays(function: Function) -> bool:
    """Whether an argument is an array, or a sequence or mapping of arrays."""
    arguments = function.args
    return any(
        argument.annotation is not None
        and not ast.unparse(argument.annotation).startswith("Callable")
        and ARRAYS.search(ast.unparse(argument.annotation))
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    )


def inherited(owner: ast.ClassDef | None, classes: Mapping[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    """The classes of rayfl from which a class derives, directly or not."""
    for base in owner.bases if owner else ():
        called = base.value if isinstance(base, ast.Subscript) else base
        found = classes.get(ast.unparse(called).rpartition(".")[2])
        if found is not None and found is not owner:
            yield from (found, *inherited(found, classes))


def without_shape(trees: Mapping[str, ast.Module]) -> list[str]:
    """Public functions that take arrays and whose docstring, or that of what they override, has no shape."""
    classes = {
        node.name: node for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)
    }
    found = []
    for module, tree in trees.items():
        if any(part.startswith("_") for part in module.split(".")):
            continue
        for name, function, owner in public(tree):
            overridden = (
                each
                for base in inherited(owner, classes)
                for each in base.body
                if isinstance(each, Function) and each.name == function.name
            )
            said = (owner, function, *overridden) if owner else (function,)
            texts = (" ".join((ast.get_docstring(each) or "").split()) for each in said)
            if takes_arrays(function) and not any(map(SHAPE.search, texts)):
                found.append(f"{module}.{name}")
    return found


def test_public_functions_that_take_arrays_state_shapes() -> None:
    assert without_shape(modules()) == []


SECTION = re.compile(r"^(Args|Attributes):\n((?:(?: .*)?\n)+)", re.MULTILINE)


def not_names(tree: ast.Module) -> list[str]:
    """Lines that begin an entry of Args or Attributes, but are not ``name: text``: the reference would list
    them as arguments. Continuation lines are indented.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef):
            for _, body in SECTION.findall((ast.get_docstring(node) or "") + "\n"):
                entries = re.findall(r"^    (?=\S).*", body, re.MULTILINE)
                known = r"\w+" if isinstance(node, ast.ClassDef) else "|".join(arguments_of(node))
                entry = re.compile(rf"\*{{0,2}}({known})(, \*{{0,2}}({known}))*:")
                found += [f"{node.name}: {line.strip()}" for line in entries if not entry.match(line.strip())]
    return found


def arguments_of(function: Function) -> list[str]:
    """The names of a function's arguments."""
    own = function.args
    rest = [each for each in (own.vararg, own.kwarg) if each]
    return [each.arg for each in (*own.posonlyargs, *own.args, *own.kwonlyargs, *rest)]


def test_arguments_and_attributes_are_listed_by_name() -> None:
    assert [line for tree in modules().values() for line in not_names(tree)] == []


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ("x: a number.", 0),
        ("x, y: two\n            numbers.", 0),
        ("x: a\n        number.", 1),
        ("z: another.", 1),
    ],
)
def test_entries_that_are_no_arguments_are_found(entry: str, found: int) -> None:
    code = f'def f(x, y):\n    """Add.\n\n    Args:\n        {entry}\n\n    Returns:\n        It.\n    """'
    assert len(not_names(ast.parse(code))) == found


def letters(tree: ast.Module) -> set[str]:
    """The single capital letters in the shapes of a module's docstrings."""
    texts = (
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
    shapes = (shape for text in texts for shape in re.findall(r"``\(([^`()=\"]*,[^`()=\"]*)\)``", text))
    return {letter for shape in shapes for letter in re.findall(r"(?<![\w|])[A-Z](?![\w'|])", shape)}


def test_the_legend_has_every_letter() -> None:
    text = LEGEND.read_text(encoding="utf-8").partition("## Symbols")[2].partition("\n## ")[0]
    known = {letter for row in text.split("\n| ") for letter in re.findall("`([A-Z])`", row.split(" |")[0])}
    used = {letter: module for module, tree in modules().items() for letter in letters(tree)}
    assert {letter: module for letter, module in used.items() if letter not in known} == {}
    assert known <= set(used), "letters that no docstring uses"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('def f(x: NDArray[np.int64]) -> None:\n    """Ids."""', ["m.f"]),
        ('def f(x: NDArray[np.int64]) -> None:\n    """Ids ``(n,)``."""', []),
        ('def _f(x: NDArray[np.int64]) -> None:\n    """Ids."""', []),
        ('def f(x: list[int]) -> None:\n    """Ids."""', []),
        ('class A:\n  def f(self, x: torch.Tensor) -> None:\n    """Of any shape."""', []),
        (
            'class A:\n  def f(self, x: Tensor) -> None:\n    """``(B, D)``."""\n'
            'class C(A):\n  def f(self, x: Tensor) -> None:\n    """Other."""',
            [],
        ),
    ],
)
def test_what_is_found(code: str, found: list[str]) -> None:
    assert without_shape({"m": ast.parse(code)}) == found

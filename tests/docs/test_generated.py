"""The generated pages: complete, and what docstrings name exists."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any, get_origin

import pytest

from rayfl.algorithms import ALGORITHMS
from rayfl.config import Config
from rayfl.config.kinds import KINDS
from tests.docs.blocks import DOCS, ROOT


@pytest.fixture(autouse=True)
def generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts that make the pages can be imported."""
    monkeypatch.setattr(sys, "path", [str(DOCS / "generate"), *sys.path])


@cache
def _documented() -> frozenset[str]:
    """All settings that the reference and the pages of methods list."""
    import method_pages
    import reference

    pages = [reference.settings(), reference.parts(), *(text for _, text in method_pages.pages())]
    rows = re.compile(r"^\| `([a-z_0-9.]+)` \|", flags=re.MULTILINE)
    return frozenset(name for page in pages for name in rows.findall(page))


def _settings(section: Any, prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = field.annotation
        if name != "name" and hasattr(inner, "model_fields") and "name" not in inner.model_fields:
            yield from _settings(inner, f"{prefix}{name}.")
        elif name != "name" or not prefix:
            yield f"{prefix}{name}"


def test_the_reference_lists_every_setting() -> None:
    sections = {
        f"{name}." for name, field in Config.model_fields.items() if hasattr(field.annotation, "name")
    }
    known = _documented()
    assert set(_settings(Config)) - known - {"hierarchy", *sections} == set()
    for kind, prefix in {"models": "model.", "datasets": "data.", "partitions": "partition."}.items():
        for part in KINDS[kind].own.values():
            assert set(_settings(part, prefix)) <= known


@pytest.mark.parametrize("name", ALGORITHMS.own)
def test_the_docstring_of_a_method_has_all_that_its_page_shows(name: str) -> None:
    from docstrings import Docstring, entries

    found = Docstring.of(ALGORITHMS[name])
    assert {"Symbols", "Cost", "Fails when", "Shown by"} <= set(found.sections)
    for path, test in re.findall(
        r"\b((?:tests|experiments)/[\w/]+\.\w+)(?:::(\w+))?", found.sections["Shown by"]
    ):
        assert (ROOT / path).is_file(), path
        assert not test or f"def {test}(" in (ROOT / path).read_text(), test
    for symbol, text in entries(found.sections["Symbols"]):
        assert symbol, f"no symbol in {text!r}"
        for setting in re.findall(r"`([a-z_]+\.[a-z_0-9.]+)[`=]", text):
            known = (each for each in _documented() if f"{each}.".startswith(f"{setting}."))
            assert setting.startswith("rayfl.") or any(known), f"{symbol}: there is no setting {setting}"


def test_the_command_line_page_has_every_command_and_option() -> None:
    import reference
    import typer

    from rayfl.cli import app

    page = reference.cli()
    for command, about in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        assert f"## rayfl {command} " in page
        assert all(option in page for parameter in about.params for option in getattr(parameter, "opts", ()))


def test_the_classes_for_own_parts_are_listed_with_all_their_fields() -> None:
    """Those that the page about own methods says how to import."""
    import reference

    page = reference.contract()
    table = (DOCS / "your/method.md").read_text().split("| import | from |")[1].split("\n\n")[0]
    for names, module in re.findall(r"^\| (`.+`) \| `([\w.]+)` \|$", table, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            thing = getattr(importlib.import_module(module), name)
            if not inspect.isclass(thing) or get_origin(thing):  # Python 3.10: an alias is a class
                continue
            assert f"## {name}\n\n`from {module} import {name}`" in page
            described = page.split(f"## {name}\n")[1].split("\n##")[0]
            for field in dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ():
                assert re.search(rf"^- `[^`]*\b{field.name}\b[^`]*`: ", described, re.MULTILINE), (
                    name,
                    field.name,
                )


def test_a_docstring_becomes_markdown() -> None:
    from docstrings import Docstring, entries

    def example() -> ModuleType:
        """Takes :class:`~rayfl.Config` and ``x``.

        A formula::

            y = x

        Args:
            x: first,
                then more.
            y: second.
        """
        raise NotImplementedError

    found = Docstring.of(example)
    assert found.first == "Takes `Config` and `x`."
    assert "```text\ny = x\n```" in found.text
    assert list(entries(found.sections["Args"])) == [("x", "first, then more."), ("y", "second.")]


def test_the_tables_of_speed_are_those_measured() -> None:
    import speed

    page = speed.PAGE.read_text()
    figures = json.loads(speed.FIGURES.read_text()) if speed.FIGURES.exists() else {}
    assert speed.written(page, figures) == page


def test_measured_figures_become_tables() -> None:
    """A method without a figure for a workload has a dash; what was there before is gone."""
    import speed

    machine = {"processor": "P", "cores": 2, "python": "3.11"}
    rows = [{"method": "solo", "W1_ms": 12.34, "W1_times": 5.0, "W1_each": 1.0,
             "W2_ms": 5.0, "W2_times": 2.5, "W2_each": 0.5}]  # fmt: skip
    network = {"network": "skip", "engine": "vmap", "loop_seconds": 1.0, "seconds": 0.5, "ratio": 2.0,
               "floor_seconds": 0.25, "times_floor": 2.0}  # fmt: skip
    figures = {
        "methods": rows,
        "methods_machine": machine,
        "networks": [network],
        "networks_machine": machine,
        "bf16": [{**network, "reduced_engine": "loop", "reduced_seconds": 0.4, "reduced_ratio": 1.25}],
        "bf16_machine": machine,
    }
    page = speed.written(speed.PAGE.read_text(), figures)
    assert "| `solo` | 12.3 | 5.00 | 1.00 | 5 | 2.50 | 0.50 | – | – | – |" in page
    assert "| skip | `vmap` | 1 | 0.5 | 2 | 0.25 | 2 |" in page
    assert "| skip | `vmap` | 0.5 | `loop` | 0.4 | 1.25 |" in page
    assert page.count("Measured on P, 2 cores, Python 3.11.") == 3
    assert speed.written(page, figures) == page


@pytest.mark.parametrize("name", ALGORITHMS.own)
def test_results_on_the_page_of_a_method_are_its_own_and_of_the_largest_sizes(name: str) -> None:
    import method_pages

    for study in method_pages.studies(name):
        rows = [f"| {label} |" for label in study.labels]
        assert all(any(row in result["table"] for row in rows) for result in study.results)
        if "smoke" in {result["size"] for result in study.results}:
            others = [
                each
                for each in method_pages.kept()
                if each["study"] == study.name and each["size"] != "smoke"
            ]
            assert not any(row in each["table"] for row in rows for each in others)


@pytest.mark.parametrize(
    ("claim", "named"),
    [
        ("A.ari > 0.9", True),
        ("B.ari - A.ari > 0", True),
        ("A[alpha=0.1].ari > 0", True),
        ('"A".ari > 0', True),
        ('"A, 2 clusters".ari > 0', True),
        ("A, flags.ari > 0", False),
        ("BA.ari > 0", False),
    ],
)
def test_claims_about_a_method_name_it(claim: str, named: bool) -> None:
    import method_pages

    assert method_pages.Study("", "", "", ["A", "A, 2 clusters"], [], []).names_method(claim) == named

"""A page for each method, made of its docstring, its settings, and the results in ``experiments/results``."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent), str(ROOT / "experiments")]
from docstrings import Docstring, entries, markdown  # noqa: E402
from readme import claims_table  # noqa: E402
from reference import cell, settings_table  # noqa: E402

from rayfl.algorithms import ALGORITHMS, Algorithm  # noqa: E402
from rayfl.config import presets  # noqa: E402
from rayfl.local import OBJECTIVES  # noqa: E402
from rayfl.settings import first_sentence  # noqa: E402

GROUPS = {
    "Clusters found once, from what clients reveal of their data": (
        "pacfl",
        "mt_hfl",
        "flt",
        "pca_km_hc",
        "flis_hc",
        "random_clustering",
    ),
    "Clusters found while training": ("cfl", "ifca", "fedsem", "fedsoft", "flis_dc"),
    "One model for all clients": (
        "fedavg",
        "fedprox",
        "fednova",
        "scaffold",
        "fedavgm",
        "fedadam",
        "qfedavg",
        "hierfavg",
    ),
    "One model for each client": ("lg_fedavg", "per_fedavg", "mtl", "sub_fedavg", "solo"),
}
"""In the order of the overview."""

RESULTS = ROOT / "experiments" / "results"


def pages() -> Iterator[tuple[str, str]]:
    """The overview and the pages, by their path in ``docs``."""
    yield "methods/index.md", index()
    for name, part in ALGORITHMS.own.items():
        yield f"methods/{name}.md", page(name, part)


def groups() -> dict[str, tuple[str, ...]]:
    """The methods by group; those that no group names come last."""
    known = {name for group in GROUPS.values() for name in group}
    others = tuple(sorted(set(ALGORITHMS.own) - known))
    return {**GROUPS, "Others": others} if others else GROUPS


def source(part: type[Algorithm[Any]]) -> str:
    """The paper: the module's docstring without what the class says better."""
    module = inspect.getdoc(sys.modules[part.__module__]) or ""
    return " ".join(module.split())


def index() -> str:
    """The overview of all methods."""
    lines = [
        "# Methods",
        "",
        "Each method is one file in [rayfl/algorithms](repo:rayfl/algorithms) that reads like its paper.",
        "Methods, [local objectives](../reference/parts.md#local), [orders of",
        "samples](../reference/parts.md#order), [samplings of clients](../reference/parts.md#sampling) and",
        "[aggregation rules](../reference/parts.md#aggregation) combine freely: see",
        "[Running](../running.md#combine-parts).",
        "",
    ]
    for title, names in groups().items():
        lines += [f"## {title}", "", "| name | idea |", "| --- | --- |"]
        for name in names:
            idea = markdown(first_sentence(inspect.getdoc(ALGORITHMS[name]) or ""))
            lines += [f"| [`{name}`]({name}.md) | {cell(idea)} |"]
        lines += [""]
    return "\n".join(lines) + "\n"


def page(name: str, part: type[Algorithm[Any]]) -> str:
    """One method: what its docstring says in a line, in a paragraph, in detail, and in its sections."""
    found = Docstring.of(part)
    file = Path(inspect.getfile(part)).relative_to(ROOT).as_posix()
    line, idea, *detail = found.text.split("\n\n", 2)
    lines = [f"# {name}", "", source(part), "", "## Idea", "", line, "", idea, ""]
    if detail:
        lines += ["## How it works", "", *detail, ""]
    for title, body in found.sections.items():
        lines += [f"## {title}", ""]
        if title == "Symbols":
            lines += ["| symbol | setting |", "| --- | --- |"]
            lines += [f"| {cell(symbol)} | {cell(text)} |" for symbol, text in entries(body)] + [""]
        elif title == "Shown by":
            lines += [_FILE.sub(_linked, markdown(body)), ""]
        else:
            lines += [markdown(body), ""]
    objective = _plain(part.defaults).get("local", {}).get("name")
    if objective:
        local = OBJECTIVES[objective]
        lines += [f"## The local objective `{objective}`", "", Docstring.of(local).text, ""]
        if len(local.model_fields) > 1:
            lines += [*settings_table(local, "local."), ""]
    lines += ["## Settings of the method", "", *settings_table(part, "algorithm."), ""]
    if part.defaults:
        text = yaml.safe_dump(_plain(part.defaults), sort_keys=False, default_flow_style=None)
        lines += [
            f"`algorithm: {name}` also sets, unless you say otherwise:",
            "",
            "```yaml",
            text.rstrip(),
            "```",
            "",
        ]
    named = [preset for preset, path in presets().items() if _method_of(path) == name]
    if named:
        lines += ["Presets: " + ", ".join(f"`{preset}`" for preset in named) + ".", ""]
    lines += list(results(name))
    lines += [f"Code: [{file}](repo:{file}).", ""]
    return "\n".join(lines) + "\n"


_FILE = re.compile(r"\b(?:tests|experiments)/[\w/]+\.\w+(?:::(\w+))?")
"""A file of the repository, or a test in it, in the section that says where a failure is shown."""


def _linked(found: re.Match[str]) -> str:
    path = found[0].partition("::")[0]
    return f"[{found[1] or path}](repo:{path})"


def _plain(value: Any) -> Any:
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, Mapping) else value


@cache
def _yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _method_of(preset: Path) -> str:
    said = _yaml(preset).get("algorithm", "fedavg")
    return str(said if isinstance(said, str) else said["name"])


def results(name: str) -> Iterator[str]:
    """Our figures with the verdicts of claims, and the published ones, study by study."""
    found = list(studies(name))
    if not found:
        return
    yield from ("## Results compared with the paper's", "")
    yield "Each table is made by a study, which anybody can run again. Sizes named `smoke` have few rounds"
    yield "and often a smaller network: they show that everything works, and neither confirm nor refute a"
    yield "paper. They are here only where no larger size has been run. All studies are in"
    yield from ("[experiments](repo:experiments/README.md).", "")
    for study in found:
        yield from (f"### {study.title}", "")
        if not study.results:
            yield from (f"`rayfl study {study.path}`", "")
        for result in study.results:
            size = f" --size {result['size']}" if result["size"] else ""
            yield from (f"`rayfl study {study.path}{size}`", "", result["table"], "", result["caption"], "")
            claims = [claim for claim in result["claims"] if study.names_method(claim["claim"])]
            if claims:
                yield from (*claims_table(claims), "")
        if study.published:
            yield from (
                "| published | figure | protocol | source |",
                "| --- | --: | --- | --- |",
                *study.published,
                "",
            )


@dataclass(frozen=True)
class Study:
    """A study with a method.

    Attributes:
        name, title: of the study.
        path: of its file.
        labels: what the study calls the method; several if it runs with several settings.
        results: those with a row of the method: at all sizes but ``smoke``, else at that.
        published: rows of published figures.
    """

    name: str
    title: str
    path: str
    labels: list[str]
    results: list[Mapping[str, Any]]
    published: list[str]

    def names_method(self, claim: str) -> bool:
        """Whether a claim names the method by a label, perhaps in quotes, or with a point in brackets."""
        labels = "|".join(map(re.escape, self.labels))
        return (
            re.search(rf"""(^|[-+*/(<>~] ?)(?P<q>["']?)({labels})(?P=q)(\[[^]]*\])?\.""", claim) is not None
        )


@cache
def kept() -> Sequence[Mapping[str, Any]]:
    """The results of studies at all sizes."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]


def studies(name: str) -> Iterator[Study]:
    """The studies with this method that have results or published figures."""
    for path in sorted((ROOT / "experiments").glob("*/*.yaml")):
        said = _yaml(path)
        labels = [label for label, changes in said.get("methods", {}).items() if _runs(changes, name)]
        rows = tuple(f"| {label} |" for label in labels)
        found = [
            each
            for each in kept()
            if each["study"] == said.get("name") and any(row in each["table"] for row in rows)
        ]
        longer = [each for each in found if each["size"] != "smoke"]
        published = list(_published(said, labels))
        if labels and (found or published):
            file = path.relative_to(ROOT).as_posix()
            title = said.get("title", said["name"])
            yield Study(said["name"], title, file, labels, longer or found, published)


def _runs(changes: Any, name: str) -> bool:
    said = (changes or {}).get("algorithm", "")
    return name == (said if isinstance(said, str) else said.get("name"))


def _published(study: Mapping[str, Any], labels: list[str]) -> Iterator[str]:
    for group in study.get("expected", []):
        for label in labels:
            figures = group["figures"].get(label)
            points = figures if isinstance(figures, Mapping) else {"": figures}
            for point, figure in points.items():
                if figure is not None:
                    what = f"{label}, {group['column']}" + (f", at {point}" if point else "")
                    texts = (what, str(figure), str(group.get("protocol", "")), str(group.get("source", "")))
                    yield "| " + " | ".join(map(cell, texts)) + " |"

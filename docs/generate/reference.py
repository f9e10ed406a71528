"""Pages of the reference, made of the code: settings of the schema, commands of typer, the Python API."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import typer
from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
from docstrings import Docstring, entries, markdown, signature  # noqa: E402

import rayfl  # noqa: E402
from rayfl import events  # noqa: E402
from rayfl.cli import app  # noqa: E402
from rayfl.config import Config  # noqa: E402
from rayfl.config.kinds import KINDS  # noqa: E402
from rayfl.settings import Choice, Section, summary  # noqa: E402

CHOSEN = {
    "data": ("datasets", "Datasets", "`data:` names the dataset."),
    "partition": ("partitions", "Partitions", "`partition:` says how the samples are divided among clients."),
    "model": ("models", "Models", "`model:` names the network."),
    "algorithm": ("methods", "Methods", "`algorithm:` names the method."),
    "local": ("local", "Local objectives", "`local:` says what a client minimises in a round."),
    "order": ("order", "Orders of samples", "`order:` says in which order a client visits its samples."),
    "sampling": ("sampling", "Sampling of clients", "`sampling:` says who takes part in a round."),
    "aggregation": (
        "aggregation",
        "Aggregation rules",
        "`aggregation:` says how a server turns its clients' models into one.",
    ),
    "loss": ("losses", "Losses", "`loss:` says what models are trained for."),
    "clustering.signature": ("signatures", "Signatures", "`clustering.signature:` says what clients reveal."),
    "clustering.features": ("features", "Features", "`clustering.features:` comes before the signature."),
    "clustering.embedding": ("embeddings", "Embeddings", "`clustering.embedding:` embeds signatures."),
    "output.loggers": ("loggers", "Loggers", "`output.loggers:` names trackers."),
}
"""Settings that choose a part: the kind of ``rayfl list``, a title, a sentence."""


def cell(text: str) -> str:
    """Text that fits a cell of a table."""
    return " ".join(text.replace("|", "\\|").split())


def _type(annotation: Any) -> str:
    """A type as users write values of it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        limits = _range(arguments[1:])
        return f"{_type(arguments[0])} {limits}".strip()
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(each) for each in arguments)
    if origin is tuple or origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is not None and issubclass(origin, Mapping):
        return f"mapping of {_type(arguments[0])} to {_type(arguments[1])}"
    if annotation is type(None):
        return "none"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"`{{{', '.join(annotation.model_fields)}}}`"
    named = {
        int: "integer",
        float: "number",
        str: "text",
        bool: "`true`, `false`",
        Path: "path",
        Any: "anything",
    }
    return named.get(annotation, getattr(annotation, "__name__", str(annotation)).lower())


def _range(metadata: Any) -> str:
    """Bounds as an interval: ``[0, 1)``."""
    low, high = "", ""
    for bound in metadata:
        for inner in getattr(bound, "metadata", (bound,)):
            low = (
                f"[{inner.ge}" if isinstance(inner, Ge) else f"({inner.gt}" if isinstance(inner, Gt) else low
            )
            high = (
                f"{inner.le}]" if isinstance(inner, Le) else f"{inner.lt})" if isinstance(inner, Lt) else high
            )
    if not low and not high:
        return ""
    return f"in {low or '(-∞'}, {high or '∞)'}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Section):
        return f"`{getattr(value, 'name', '...')}`"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def settings_table(section: type[Section], prefix: str = "", without: Container[str] = ()) -> Iterator[str]:
    """One row per setting: name, values, default, meaning; inner sections with dotted names."""
    rows = [
        row
        for name, field in section.model_fields.items()
        if name != "name" and name not in without
        for row in _rows(name, field, prefix)
    ]
    if rows:
        yield "| setting | values | default | meaning |"
        yield "| --- | --- | --- | --- |"
        yield from rows
    else:
        yield "No settings."


def _rows(name: str, field: FieldInfo, prefix: str) -> Iterator[str]:
    chosen = CHOSEN.get(f"{prefix}{name}")
    inner = field.annotation
    if (
        inspect.isclass(inner)
        and issubclass(inner, Section)
        and not chosen
        and "name" not in inner.model_fields
    ):
        for each, below in inner.model_fields.items():
            yield from _rows(f"{name}.{each}", below, prefix)
        return
    if chosen:
        values = f"[one of {len(KINDS[chosen[0]])}](parts.md#{chosen[0]})"
    elif any(isinstance(m, Choice) for m in field.metadata):
        values = "a name"
    else:
        values = " ".join(filter(None, (_type(inner), _range(field.metadata))))
    texts = (f"`{prefix}{name}`", values, _default(field), markdown(field.description or ""))
    yield "| " + " | ".join(map(cell, texts)) + " |"


def settings() -> str:
    """The sections of a config."""
    lines = [
        "# Settings",
        "",
        "Every setting has a dotted name, for the command line (`training.lr=0.05`); in YAML files settings",
        "are nested. Sections that are chosen by name, such as `data` or `algorithm`, have settings of their",
        "own: see [Parts](parts.md). `rayfl run CONFIG --dry-run` prints all settings of a run, and",
        "`rayfl list --schema > rayfl.schema.json` writes a JSON schema with which editors complete and",
        "check config files.",
        "An integer without a bound is at most 2,147,483,647.",
        "",
    ]
    plain = [name for name in Config.model_fields if not _section_of(name)]
    lines += ["## Top level", "", "| setting | values | default | meaning |", "| --- | --- | --- | --- |"]
    for name in plain:
        lines += _rows(name, Config.model_fields[name], "")
    for name in Config.model_fields:
        section = _section_of(name)
        if section is None:
            continue
        lines += ["", f"## {name}", "", Docstring.of(section).text, "", *settings_table(section, f"{name}.")]
    lines += ["", "## events", "", "A list; see [Clients that join, leave or drift](../events.md).", ""]
    for event in _event_types():
        lines += [
            f"### {event.model_fields['name'].default}",
            "",
            Docstring.of(event).text,
            "",
            *settings_table(event),
            "",
        ]
    return "\n".join(lines) + "\n"


def _section_of(name: str) -> type[Section] | None:
    inner = Config.model_fields[name].annotation
    if name in CHOSEN or not (inspect.isclass(inner) and issubclass(inner, Section)):
        return None
    return inner


def _event_types() -> list[type[Section]]:
    from rayfl.data import events as module

    return [
        cls
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, Section)
        and cls.__module__ == module.__name__
        and "name" in cls.model_fields
        and isinstance(cls.model_fields["name"].default, str)
    ]


def parts() -> str:
    """All parts that are chosen by name, with their settings."""
    lines = [
        "# Parts",
        "",
        "Everything that is chosen by name. `rayfl list KIND` prints the same names, and those of your own",
        "[plug-ins](../your/index.md). The methods have [pages of their own](../methods/index.md).",
        "",
    ]
    for setting, (kind, title, sentence) in CHOSEN.items():
        lines += [f"## {title} {{#{kind}}}", "", sentence, ""]
        prefix = "" if kind == "loggers" else f"{setting}."
        shared = [name for name in KINDS[kind].base.model_fields if name != "name"]
        if shared and kind != "methods":
            lines += ["Settings of all of them:", "", *settings_table(KINDS[kind].base, prefix), ""]
        for name, part in KINDS[kind].own.items():
            if kind == "methods":
                lines += [f"- [`{name}`](../methods/{name}.md): {markdown(summary(part))}"]
                continue
            lines += [f"### {name} {{#{kind}-{name}}}", "", Docstring.of(part).text, ""]
            lines += [*settings_table(part, prefix, shared), ""]
        lines += [""]
    lines += [
        "## Measures {#measures}",
        "",
        "Distances between clients' data that `rayfl partition` measures.",
        "",
    ]
    lines += [f"- `{name}`: {markdown(summary(part))}" for name, part in KINDS["measures"].own.items()]
    return "\n".join(lines) + "\n"


def cli() -> str:
    """The commands, as typer knows them."""
    commands: Mapping[str, Any] = getattr(typer.main.get_command(app), "commands")  # noqa: B009 (a typer.Group)
    lines = [
        "# Command line",
        "",
        "`rayfl COMMAND --help` prints the same. `--plugin MODULE`, before or after a command, imports parts",
        "of your own. `python -m rayfl` is the same program; `rayfl --install-completion` lets your shell",
        "complete commands and options.",
        "",
        "| exit code | meaning |",
        "| --- | --- |",
        "| 0 | all went well |",
        "| 1 | a client raised an error, or a claim of a study failed |",
        "| 2 | refused: a mistake in settings or data, named in one line |",
        "| 3 | `rayfl study --check`: a claim is undecided |",
        "| 130 | stopped by Ctrl-C or a signal; a checkpoint was written |",
        "",
    ]
    for name, command in commands.items():
        context = click.Context(command, info_name=f"rayfl {name}")
        usage = " ".join(["rayfl", name, *(piece for piece in command.collect_usage_pieces(context))])
        lines += [f"## rayfl {name} {{#{name}}}", "", markdown(inspect.cleandoc(command.help or "")), ""]
        lines += ["```text", usage, "```", ""]
        rows = []
        for parameter in command.params:
            if parameter.name in ("help",):
                continue
            shown = (
                f"`{(parameter.metavar or parameter.name or '').upper()}`"
                if parameter.param_type_name == "argument"
                else ", ".join(f"`{each}`" for each in parameter.opts)
            )
            default = parameter.default
            given = "" if default in (None, "", False, ()) or callable(default) else f" (default `{default}`)"
            rows.append(f"| {cell(shown)} | {cell(getattr(parameter, 'help', '') or '')}{given} |")
        if rows:
            lines += ["| argument or option | meaning |", "| --- | --- |", *rows, ""]
    return "\n".join(lines) + "\n"


def python() -> str:
    """The public names of :mod:`rayfl`."""
    lines = [
        "# Python API",
        "",
        "`import rayfl` gives the names below; the rest of the package may change between versions.",
        "",
    ]
    for name in ("run", "resume", "compare", "partition", "cluster", "load", "run_study"):
        lines += [*_function(f"rayfl.{name}", getattr(rayfl, name), "##"), ""]
    for name in ("Result", "Comparison", "PartitionView", "ClusteringResult", "Study", "Config"):
        thing = getattr(rayfl, name)
        lines += [f"## rayfl.{name}", "", *_docstring(thing), ""]
        for member, value in vars(thing).items():
            if member.startswith("_") or member.startswith("model_") or not inspect.getdoc(value):
                continue
            function = getattr(value, "__func__", value)
            if inspect.isfunction(function):
                lines += [*_function(f"{name}.{member}", function, "###"), ""]
            elif isinstance(value, property) or hasattr(value, "attrname"):
                lines += [f"### {name}.{member} {{#{name.lower()}-{member}}}", "", *_docstring(value), ""]
    lines += ["## Events {#events}", "", "What `on_event` is called with; all are frozen dataclasses.", ""]
    for name in sorted(rayfl.__all__):
        thing = getattr(rayfl, name)
        if inspect.isclass(thing) and thing.__module__ == events.__name__:
            fields = (
                ", ".join(f"`{f.name}`" for f in dataclasses.fields(thing))
                if dataclasses.is_dataclass(thing)
                else ""
            )
            lines += [
                f"### rayfl.{name} {{#event-{name}}}",
                "",
                *([f"Fields: {fields}.", ""] if fields else []),
                *_docstring(thing),
                "",
            ]
    lines += ["## Errors {#errors}", ""]
    for name in ("RayflError", "ConfigError", "DataError"):
        lines += [f"### rayfl.{name} {{#error-{name}}}", "", *_docstring(getattr(rayfl, name)), ""]
    return "\n".join(lines) + "\n"


CONTRACT = {
    "rayfl.algorithms": (
        "Algorithm",
        "Setup",
        "ServerState",
        "Clients",
        "Plan",
        "Mixing",
        "RoundReport",
        "Regrouping",
        "GlobalStep",
    ),
    "rayfl.training": ("LocalWork", "Terms", "Guides", "Seen", "TrainedBlock"),
    "rayfl.local": ("LocalObjective", "Start", "Train", "Outcome"),
    "rayfl.training.reports": ("ClientReport", "Trained"),
    "rayfl.server_step": ("ServerStep", "Averaged"),
    "rayfl.training.server": ("ServerTraining", "AtServer"),
    "rayfl.aggregation": ("Aggregation",),
    "rayfl.sampling": ("Sampling", "Candidates"),
}
"""The classes that your own methods, objectives and samplings extend and receive, by module."""


def contract() -> str:
    """The classes with which parts of your own are written."""
    lines = [
        "# Classes for your own parts",
        "",
        "What [a method](../your/method.md), a local objective, an aggregation rule or a sampling of your",
        "own extends, receives and returns. Shapes are in parentheses: N clients, M of them in the cohort,",
        "K models, P parameters, B clients in a block.",
        "",
    ]
    for module, names in CONTRACT.items():
        for name in names:
            thing = getattr(importlib.import_module(module), name)
            lines += [f"## {name}", "", f"`from {module} import {name}`", "", *_docstring(thing), ""]
            for member, value in dict(vars(thing)).items():
                function = getattr(value, "__func__", value)
                if member.startswith(("_", "model_")) or not inspect.getdoc(value):
                    continue
                if inspect.isfunction(function):
                    lines += [*_function(f"{name}.{member}", function, "###"), ""]
                elif isinstance(value, property | functools.cached_property):
                    lines += [f"### {name}.{member} {{#{name.lower()}-{member}}}", "", *_docstring(value), ""]
    return "\n".join(lines) + "\n"


def _function(name: str, function: Any, level: str) -> Iterator[str]:
    yield f"{level} {name} {{#{name.replace('.', '-').lower()}}}"
    yield from ("", "```text", f"{name}{signature(function)}", "```", "")
    yield from _docstring(function)


def _docstring(thing: object) -> Iterator[str]:
    found = Docstring.of(thing)
    yield found.text
    for title, body in found.sections.items():
        yield from ("", f"**{title}**", "")
        for name, text in entries(body):
            yield f"- `{name}`: {text}" if name else f"- {text}"

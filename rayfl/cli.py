"""The command line, ``rayfl run | resume | models | expert | partition | prepare | list | report | ...``."""

from __future__ import annotations

import ast
import gc
import inspect
import json
import os
import signal
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from rayfl import files
from rayfl.commands import places
from rayfl.display import Output, short
from rayfl.errors import ArgumentError, ClientError, ConfigError, DataError, RayflError, nearest
from rayfl.units import UNKNOWN, counted, size

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from rayfl.config import Config


class _Raised(Exception):
    """Carries an error past typer, which takes EOFError and a broken pipe, even those of users' code, for the
    end of the terminal.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class _Commands(typer.core.TyperGroup):
    """The commands; an interrupt is an ``Abort``, which typer would turn into a silent exit."""

    @override
    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except (EOFError, BrokenPipeError) as error:
            raise _Raised(error) from error
        except KeyboardInterrupt:
            raise typer.Abort from None


app = typer.Typer(
    cls=_Commands,
    help="Simulate federated learning over clients whose data differ, on a laptop or a Ray cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
out = Output()


def _say(text: str) -> None:
    """Print a line of plain text; brackets in it are not markup."""
    out.print(text, soft_wrap=True, highlight=False, markup=False)


Overrides = Annotated[
    list[str] | None, typer.Argument(help="settings such as rounds=50 training.lr=0.05", show_default=False)
]


@contextmanager
def _importing_parts() -> Iterator[None]:
    """Context manager for the first import of the parts, without garbage collection.

    The import makes thousands of objects that live until the process ends. Searching them for garbage, now
    and at exit, takes a fifth of the time of ``rayfl list``.
    """
    if "rayfl.config" in sys.modules:  # objects made by other code may be garbage, so do not freeze them
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        _say(f"rayfl {version('rayfl')}")
        raise typer.Exit


@app.callback()
def begin(
    plugin: Annotated[
        list[str] | None,
        typer.Option(help="a module or file with your own parts; can be repeated", metavar="MODULE"),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="print rayfl's version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Import the plug-ins named on the command line."""
    if plugin:
        from rayfl.config import kinds

        kinds.bring(plugin)


@app.command()
def run(
    config: Annotated[str, typer.Argument(help="a preset (see 'rayfl list presets') or a YAML file")],
    overrides: Overrides = None,
    beside: Annotated[
        str, typer.Option(help="other algorithms to compare with on the same clients, separated by commas")
    ] = "",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="print the resolved config and the resources that it needs; run nothing"
        ),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="resume the run of these settings that the same command started before, if there is one: "
            "for jobs that may be started again",
        ),
    ] = False,
) -> None:
    """Run a preset or a config file."""
    settings = overrides or []
    with _importing_parts():
        from rayfl.config import changes, load, on_the_same_data, variant

        first = load(config, settings)
    configs = [first]
    for name in filter(None, map(str.strip, beside.split(","))):
        try:
            configs.append(variant(config, settings, name))
        except ConfigError as error:
            raise ConfigError(f"--beside {name}: {error.where}", error.what, error.remedy) from None
    configs = on_the_same_data(configs)
    if dry_run:
        for each in configs:
            _show_plan(each)
        return
    _run_all(configs, [changes(each, config, settings) for each in configs], resume)


def _run_all(configs: list[Config], changed: list[tuple[str, ...]], resume: bool) -> None:
    from rayfl import api
    from rayfl.display import Display, closing
    from rayfl.report.compare import Comparison
    from rayfl.rundir import RunDirectory, name_of
    from rayfl.servers import building
    from rayfl.study.plan import key_of

    for config in configs:
        building.check(config)
    results = []
    for config, settings in zip(configs, changed, strict=True):
        with Display(out, _title(config)) as display:
            if resume:
                name = name_of(config, settings, key_of(config))
                results.append(api.run_once(config, name, display))
            else:
                results.append(api.run(config, on_event=display, changed=settings))
    out.print(closing([result.summary for result in results], out.width))
    for result in results:
        _say(f"run directory: {_shown_place(result.path)}")
    if len(results) > 1:
        folder = results[0].path.parent if RunDirectory(results[0].path).remote is None else Path()
        page = folder / f"{configs[0].name}-comparison.html"  # runs on object storage are staged elsewhere
        Comparison.of([result.path for result in results]).write(page)
        _say(f"comparison: {short(page)}")
    elif (results[0].path / "report.html").is_file():
        _say(f"report: {short(results[0].path / 'report.html')}")


def _shown_place(path: Path) -> str:
    """Where a run is found: its URL, or its folder relative to the current one."""
    from rayfl.rundir import RunDirectory

    run = RunDirectory(path)
    return str(short(path)) if run.remote is None else run.place


def _title(config: Config) -> str:
    data, model = config.data, config.model
    return (
        f"{config.algorithm.name} on {data.name}, {config.partition.name} partition, "
        f"{model.name}, seed {config.seed}"
    )


def _show_plan(config: Config) -> None:
    from rayfl.data.remarks import remarks
    from rayfl.runtime import driving
    from rayfl.runtime.connection import prospect
    from rayfl.servers import building
    from rayfl.training import precision

    building.check(config)
    stages, host = building.build(config)
    resources = prospect(config)
    plan = driving.arithmetic(config, stages[0].federation, host, resources)
    _say(config.to_yaml().rstrip())
    about_precision = precision.remarks(host.precision, host.device)
    assumed = [resources.assumed] if resources.assumed else []
    for line in (*plan.lines(), *assumed, *about_precision, *remarks(stages[0].federation)):
        _say(f"# {line}")


@app.command()
def resume(
    path: Annotated[Path, typer.Argument(help="the run directory of a stopped run")],
    overrides: Overrides = None,
    changed_plugins: Annotated[
        bool,
        typer.Option("--changed-plugins", help="resume although plug-ins have changed since the run started"),
    ] = False,
    latest: Annotated[
        bool,
        typer.Option("--latest", help="PATH is the folder of the runs: resume the one that ran last"),
    ] = False,
) -> None:
    """Resume a stopped run; the result has the same bits as a run without a stop."""
    from rayfl import api
    from rayfl.display import Display, closing
    from rayfl.rundir import RunDirectory

    if latest:
        path = RunDirectory.latest(path).path
    with Display(out, f"resuming {short(path)}") as display:
        result = api.resume(path, overrides or [], display, changed_plugins)
    out.print(closing([result.summary], out.width))
    _say(f"run directory: {_shown_place(result.path)}")


@app.command()
def study(
    file: Annotated[Path, typer.Argument(help="a study file, see 'rayfl init study'")],
    overrides: Overrides = None,
    size: Annotated[str, typer.Option(help="a size that the file defines, such as smoke")] = "",
    only: Annotated[
        list[str] | None,
        typer.Option(help="run only the method with this label; can be repeated", metavar="LABEL"),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="seeds to run in place of the file's, such as 0-9 or 0,3")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="number of parallel runs; default: as many as fit")
    ] = None,
    inline: Annotated[
        bool,
        typer.Option("--inline", help="run everything in this process, one run after another, without Ray"),
    ] = False,
    out_folder: Annotated[
        Path | None,
        typer.Option("--out", help="folder of the results; default: ./studies/<name>, or <name>-<part>"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the number of runs, hours and gigabytes; run nothing")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="exit code 0 if all claims hold, 1 if one fails, 3 if one is undecided"),
    ] = False,
    archive: Annotated[
        Path | None,
        typer.Option(help="folder of finished runs, a zip file each: reuse them, and add new ones"),
    ] = None,
) -> None:
    """Run methods x settings x seeds on the same clients, and check the claims.

    Finished runs below output.root are used again, also those of other studies. The same command continues a
    study that was stopped.
    """
    from rayfl.display import text_tables
    from rayfl.study import (
        check_folder,
        check_parallel,
        check_places,
        execute,
        folder_of,
        prepare,
        read,
        tables,
    )
    from rayfl.study import claims as claim_rules

    for folder, option in ((out_folder, "--out"), (archive, "--archive")):
        if folder is not None:
            places.local(folder, option)
    from rayfl.study.progress import StudyDisplay, Terminal

    check_parallel(inline, jobs)
    if dry_run and check:
        raise ConfigError("--check", "nothing is checked with --dry-run", "leave one of them out")
    prepared = prepare(read(file, size, overrides or [], only or [], seeds))
    if check and not prepared.statements:
        what, remedy = "the study has no claims to check", "add claims, or expected figures with a tolerance"
        if prepared.study.claims_left_out:
            what, remedy = (
                "no claim is about these methods alone",
                "run the methods that the claims name, too",
            )
        raise ConfigError("--check", what, remedy)
    folder = out_folder or folder_of(prepared.study)
    check_folder(folder, prepared.study)
    check_places(prepared, folder, inline, archive)
    if dry_run:
        _say(prepared.study.extent)
        _say_held_out(prepared)
        _show_estimate(prepared, 1 if inline else jobs, archive)
        return
    _say(f"{prepared.study.title or prepared.study.name}: {prepared.study.extent}")
    _say_held_out(prepared)
    try:
        with StudyDisplay(Terminal(out)) as display:
            outcome = execute(prepared, folder, inline, jobs, display.watch, archive)
    except KeyboardInterrupt:  # between the stages, or the second one
        print("interrupted; the same command resumes the study", file=sys.stderr)
        raise typer.Exit(130) from None
    if outcome.stopped and not outcome.results.runs:
        print("stopped while settings were chosen; the same command resumes the study", file=sys.stderr)
        raise typer.Exit(130)
    _say("")
    tune = outcome.results.study.tune
    chosen = None if tune is None else tables.choice_table(outcome.tuned, tune)
    for table in (chosen, tables.main_table(outcome.results, tall=True)):
        if table is not None:
            out.print(text_tables(table.header, table.rows, table.left, table.caption, out.width))
    for line in tables.claim_lines(outcome.judgements):
        _say(line)
    for claim in prepared.study.claims_left_out:
        _say(f"not checked: {claim}, which names methods that were not run")
    page, figures = ("", "") if outcome.stopped else ("study.html, ", ", figures")
    _say(f"results: {short(outcome.folder)}/ with {page}table.md, runs.csv, claims.json{figures}")
    if outcome.stopped and (outcome.folder / "study.html").exists():
        _say("study.html and figures/ show the study as it was before, until it has ended")
    for title, error in outcome.failed.items():
        print(f"error: {title}: {error}", file=sys.stderr)
    if outcome.stopped:
        print("stopped; the same command resumes the study", file=sys.stderr)
        raise typer.Exit(130)
    if outcome.failed:
        raise typer.Exit(1)
    if check:
        raise typer.Exit(claim_rules.EXIT_CODES[outcome.verdict or "undecided"])


def _say_held_out(prepared: Any) -> None:
    if prepared.held_out:
        _say(prepared.held_out)


def _show_estimate(prepared: Any, jobs: int | None, archive: Path | None) -> None:
    from rayfl.study.estimate import estimate, estimate_search
    from rayfl.study.preparation import as_chosen, check_clients, check_groups

    check_groups(prepared)
    with out.status("looking at searches") as status:
        searches = estimate_search(prepared.study, jobs, status.update)
    if searches:
        _say("searching settings:")
        for line in searches:
            _say(f"  {line}")
    tried = [run for candidate in prepared.candidates for run in candidate.runs]
    for title, runs in (("choosing settings", tried), ("runs", as_chosen(prepared))):
        if runs:
            check_clients(runs)
            _say(f"{title}:")
            with out.status("looking at existing runs") as status:  # on terminals only
                lines = estimate(runs, jobs, archive, status.update).lines()
            for line in lines:
                _say(f"  {line}")


@app.command()
def partition(
    config: Annotated[str, typer.Argument(help="a preset (see 'rayfl list presets') or a YAML file")],
    overrides: Overrides = None,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="folder for pictures and tables; default: ./partition-<name>")
    ] = None,
    measures: Annotated[
        str, typer.Option(help="measures to compute, separated by commas; default: all")
    ] = "",
    compare_clients: Annotated[
        int,
        typer.Option(
            "--compare", help="maximum number of clients to compare; of more, this many are drawn at random"
        ),
    ] = 100,
) -> None:
    """Show how a config divides its data among clients, and how different they are; train nothing.

    With events, also show what each of them changes.
    """
    from rayfl.config import load
    from rayfl.report import partition as report_partition

    loaded = load(config, overrides or [])
    names = [name for name in map(str.strip, measures.split(",")) if name]
    with places.folder(out_folder or Path(f"partition-{loaded.name}")) as folder:
        for division in report_partition.views(loaded, names, compare_clients):
            report_partition.show(division, out)
            for path in report_partition.write(division, folder / division.folder):
                _say(f"written: {short(path)}")


@app.command()
def cluster(
    config: Annotated[str, typer.Argument(help="a preset (see 'rayfl list presets') or a YAML file")],
    overrides: Overrides = None,
    beside: Annotated[
        str, typer.Option(help="other one-shot methods, separated by commas, or 'all' of them")
    ] = "",
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="folder for pictures and JSON; default: ./cluster-<name>")
    ] = None,
) -> None:
    """Cluster the clients of a config by their signatures, without training."""
    from rayfl.algorithms import ALGORITHMS, OneShotClustered
    from rayfl.commands import cluster as clustering
    from rayfl.config import load, on_the_same_data, variant
    from rayfl.report.clusterings import show

    changes = overrides or []
    one_shot = {name: part for name, part in ALGORITHMS.items() if issubclass(part, OneShotClustered)}
    requested = [name for name in map(str.strip, beside.split(",")) if name]
    all_names = [name for name in one_shot if not one_shot[name].shuffles]
    names = all_names if requested == ["all"] else requested
    try:
        first = load(config, changes)
    except ConfigError:  # the config's own algorithm may not accept settings of a clustering
        if not names:
            raise
        first = variant(config, changes, names[0])
    own_configs = [first] if first.algorithm.name in one_shot or not names else []
    other_configs, unfit = [], []
    for name in names:
        try:
            other_configs += [variant(config, changes, name)] if name != first.algorithm.name else []
        except ConfigError as error:
            if requested != ["all"]:
                raise ConfigError(f"--beside {name}: {error.where}", error.what, error.remedy) from None
            unfit.append(f"{name}: {error}")
    configs = on_the_same_data([*own_configs, *other_configs])
    with places.folder(out_folder or Path(f"cluster-{first.name}")) as folder:
        clusterings, refused = clustering.cluster_without_training(configs)
        show(clusterings, out)
        for line in [*unfit, *refused]:
            _say(f"left out: {line}")
        for path in clustering.write(clusterings, folder, clustering.title_of(first)):
            _say(f"written: {short(path)}")


@app.command()
def expert(
    config: Annotated[str, typer.Argument(help="a preset (see 'rayfl list presets') or a YAML file")],
    overrides: Overrides = None,
    epochs: Annotated[int, typer.Option(min=1, help="number of epochs over all training samples")] = 10,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="folder to write to; default: ./expert-<name>")
    ] = None,
) -> None:
    """Train a config's model on all data: an expert for order.expert, losses for partition.losses."""
    from rayfl.commands.expert import train_expert
    from rayfl.config import load
    from rayfl.errors import Interrupted
    from rayfl.events import RoundDone, RunEvent

    loaded = load(config, overrides or [])
    with (
        places.folder(out_folder or Path(f"expert-{loaded.name}")) as folder,
        out.status(f"epoch 1 of {epochs}") as status,  # on terminals only
    ):

        def show(event: RunEvent) -> None:
            if isinstance(event, RoundDone):
                status.update(f"epoch {min(event.round + 2, epochs)} of {epochs}")

        if (folder / "expert.safetensors").exists():
            _say(f"{short(folder / 'expert.safetensors')} is going to be replaced, and its losses")
        try:
            model, losses = train_expert(loaded, epochs, folder, show)
        except Interrupted:
            _say("interrupted; nothing was written")
            raise
        except ClientError as error:
            if not error.diverged:
                raise
            where = f"the expert diverged in epoch {error.round + 1}"
            print(f"error: {where}; a smaller training.lr may help", file=sys.stderr)
            raise typer.Exit(1) from None
    _say(f"written: {short(model)}; use it with order.score=expert order.expert={model}")
    _say(f"written: {short(losses)}; use it with partition.name=difficulty partition.losses={losses}")


@app.command()
def prepare(
    dataset: Annotated[str, typer.Argument(help="a dataset's name (see 'rayfl list datasets')")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="its settings, e.g. split=letters", show_default=False)
    ] = None,
) -> None:
    """Download a dataset, once."""
    from rayfl.config import load
    from rayfl.servers.building import data_root

    changes = [change if change.startswith("data.") else f"data.{change}" for change in overrides or []]
    config = load({"data": {"name": dataset}}, changes)
    root = data_root(config)
    if config.data.available(root):
        try:
            config.data.load(root)
        except DataError as error:
            raise DataError(
                f"{error}; delete what is damaged and run 'rayfl prepare {dataset}' again"
            ) from None
        _say(f"{dataset} is already in {root}")
    else:
        _say(config.data.prepare(root))


KINDS = (
    "methods",
    "local",
    "order",
    "sampling",
    "aggregation",
    "models",
    "losses",
    "datasets",
    "partitions",
    "measures",
    "signatures",
    "features",
    "embeddings",
    "loggers",
    "coresets",
    "presets",
)
"""What ``rayfl list`` shows."""


def _kind_remedy(name: str) -> str:
    """What to write in place of an unknown kind of parts; many users write the name of a part."""
    with _importing_parts():
        from rayfl.config import kinds

        matching = [kind for kind, registry in kinds.KINDS.items() if name in registry]
    return f"rayfl list {matching[0]} {name} shows the part" if matching else nearest(name, KINDS)


@app.command("list")
def list_parts(
    kind: Annotated[str, typer.Argument(help=f"one of {', '.join(KINDS)}; all if left out")] = "",
    name: Annotated[
        str, typer.Argument(help="one part: its docstring and settings; of a preset, what its paper says")
    ] = "",
    schema: Annotated[
        bool, typer.Option("--schema", help="print the JSON schema of config files, for editors")
    ] = False,
) -> None:
    """List methods, all other parts and presets, one line each; or show one of them in full."""
    if kind and kind not in KINDS:
        raise ConfigError("list", f"no such kind {kind!r}", _kind_remedy(kind))
    with _importing_parts():
        from rayfl import config
        from rayfl.config import kinds

        kinds.bring()
        if schema:
            print(json.dumps(config.json_schema(), indent=1))
        elif name and kind == "presets":
            _show_preset(name)
        elif name:
            _show_part(kind, name)
        else:
            for title in (kind,) if kind else KINDS:
                _show_kind(title)


def _show_kind(kind: str) -> None:
    """Print the names of all parts of a kind, each with its first sentence."""
    from rayfl import config
    from rayfl.config import kinds
    from rayfl.settings import first_sentence, summary

    if kind == "presets":
        entries = {name: _preset_line(path) for name, path in config.presets().items()}
    elif kind == "coresets":
        entries = {name: first_sentence(text) for name, text in _coreset_docstrings().items()}
    else:
        entries = {name: summary(part) for name, part in kinds.KINDS[kind].items()}
    heading = f"{kind} (from Python: rayfl.coresets.<name>.select)" if kind == "coresets" else kind
    text = Text(heading, style="italic")
    column = max(map(len, entries), default=0) + 6
    for name, line in entries.items():
        lines = textwrap.wrap(line.replace("``", ""), max(20, out.width - column - 2), break_on_hyphens=False)
        text.append(f"\n  {name:{column - 2}}", "not italic bold")
        text.append(f"\n{'':{column}}".join(lines), "not italic")
    out.print(text, soft_wrap=True, highlight=False)


def _show_part(kind: str, name: str) -> None:
    """Print a part's docstring, and its settings with their defaults."""
    from rayfl.config import kinds

    if kind == "coresets":
        coresets = _coreset_docstrings()
        if name not in coresets:
            raise ConfigError(name, f"no such part among {kind}", nearest(name, coresets))
        _say(inspect.cleandoc(coresets[name]).replace("``", ""))
        return
    parts = kinds.KINDS[kind]
    if name not in parts:
        raise ConfigError(name, f"no such part among {kind}", nearest(name, parts))
    part = parts[name]
    _say(inspect.cleandoc(part.__doc__ or "").replace("``", ""))
    table = Table(title="settings", title_justify="left")
    for column in ("setting", "default", "meaning"):
        table.add_column(column, overflow="fold")
    for setting, field in part.model_fields.items():
        if setting != "name":
            default = "required" if field.is_required() else _default_text(field)
            table.add_row(setting, escape(default), escape(field.description or ""))
    if table.row_count:
        _say("")
        out.print(table)


def _default_text(field: FieldInfo) -> str:
    """The default of a setting as text; a section takes one line per setting."""
    from pydantic import BaseModel

    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        values = value.model_dump(mode="json")
        values = {"name": values.pop("name"), **values} if "name" in values else values
        return "\n".join(f"{setting}: {each}" for setting, each in values.items())
    return str(value)


def _preset_line(path: Path) -> str:
    """The description of a preset, and the number of settings that differ from its paper."""
    from rayfl import config
    from rayfl.paper import deviations

    paper, settings = config.with_paper(path)
    count = len(deviations(paper, settings.to_dict())) if paper else 0
    remark = f"; {counted(count, 'setting')} not the paper's" if count else ""
    return f"{config.describe_preset(path)}{remark}"


def _show_preset(name: str) -> None:
    """Print how a preset differs from its paper and why, and what the paper leaves open."""
    from rayfl import config
    from rayfl.paper import deviations, value

    path = config.presets().get(name)
    if path is None:
        raise ConfigError(name, "no such preset", nearest(name, config.presets()))
    paper, preset = config.with_paper(path)
    settings = preset.to_dict()
    _say(f"{name}: {config.describe_preset(path)}")
    if paper is None:
        _say("names no paper")
        return
    _say(f"paper: {paper.source}")
    differing = deviations(paper, settings)
    table = Table(title="not as in the paper", title_justify="left")
    for column in ("setting", "paper", "here", "why"):
        table.add_column(column, overflow="fold")
    for deviation in differing:
        here = str(deviation.here)
        here = here if len(here) < 60 else f"see {path.name}"
        table.add_row(deviation.setting, escape(str(deviation.paper)), escape(here), escape(deviation.why))
    if differing:
        out.print(table)
    as_stated = [
        setting for setting in paper.settings if setting not in {deviation.setting for deviation in differing}
    ]
    if as_stated:
        _say(f"as in the paper: {', '.join(f'{key} {value(settings, key)}' for key in as_stated)}")
    for setting, note in paper.open.items():
        _say(f"left open by the paper: {setting}: {note}")


def _coreset_docstrings() -> dict[str, str]:
    """Methods that choose vertices of a graph, and their docstrings; parsed, as importing takes seconds."""
    folder = Path(__file__).parent / "coresets"
    sources = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}
    return {
        name: ast.get_docstring(ast.parse(source)) or ""
        for name, source in sources.items()
        if "\ndef select(" in source
    }


@app.command()
def newcomers(
    path: Annotated[Path, typer.Argument(help="the directory of a finished run")],
    data: Annotated[
        Path,
        typer.Argument(
            help=".npz with x_train, y_train, x_test, y_test, client_train, client_test; or a table or "
            "folder of images like the run's"
        ),
    ],
    epochs: Annotated[int, typer.Option(min=0, help="epochs of fine-tuning")] = 5,
    local_epochs: Annotated[
        int | None,
        typer.Option(
            min=0, help="epochs of training alone; default: as many as a client of the run has trained"
        ),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(
            help="of a table or folder: the column that names each sample's newcomer; default: the run's "
            "partition.column; without it all samples belong to one newcomer"
        ),
    ] = None,
    test_fraction: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=0.99,
            help="share of each newcomer's samples for tests, if a table or folder has no test part",
        ),
    ] = 0.25,
) -> None:
    """Assign clients that come after a run to clusters, fine-tune their models, and test them."""
    import pandas as pd

    from rayfl.commands.newcomers import PLACED, Owners, assign_newcomers
    from rayfl.display import fitted
    from rayfl.rundir import RunDirectory

    folder = RunDirectory.open(path).path
    of_whom = Owners(column, test_fraction)
    frame = assign_newcomers(
        folder, data, epochs, local_epochs, of_whom, lambda text: _say(f"warning: {text}")
    )
    lines = [[name.replace("_", " ") for name in frame.columns]]
    for row in frame.head(20).itertuples(index=False):
        texts = [f"{v:.3g}" if isinstance(v, float) else escape(str(v)) for v in row]
        lines.append([UNKNOWN if text == "nan" else text for text in texts])
    out.print(fitted(Table(title="newcomers", padding=(0, 0)), lines, out.width))
    if len(frame) > 20:
        _say(f"the first 20 of {len(frame):,} newcomers; newcomers.csv has all")
    for row in frame[frame["far"]].itertuples() if "far" in frame else ():
        _say(
            f"warning: newcomer {getattr(row, 'name', row.client)} lies {row.distance:.3g} from cluster "
            f"{row.cluster}, whose members lie within {row.usual:.3g} ({row.measure}): the run has seen no "
            "data like it"
        )
    means = ", ".join(
        f"{name.replace('_', ' ')} "
        + (f"{frame[name].mean():.1f} %" if name.startswith("accuracy") else f"{frame[name].mean():.3g}")
        for name in frame.columns
        if name not in PLACED
    )
    _say(f"{len(frame)} newcomers: mean {means}")
    own = "; local: trained alone from w_0" if local_epochs else ""
    _say(f"global: the average of all clusters' models, weighted by samples{own}")
    sent = pd.read_csv(folder / "newcomers_communication.csv").groupby("direction")["bytes"].sum()
    _say(f"sent: {size(int(sent.get('up', 0)))} up, {size(int(sent.get('down', 0)))} down")
    _say(f"written: {short(folder / 'newcomers.csv')}")


@app.command()
def models(
    path: Annotated[Path, typer.Argument(help="a run directory")],
    clients: Annotated[
        list[str] | None, typer.Argument(help="ids of clients; default: all", show_default=False)
    ] = None,
    finetuned: Annotated[
        bool, typer.Option("--finetuned", help="write the models after evaluation.finetune_epochs")
    ] = False,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="folder to write to; default: models/clients of the run")
    ] = None,
) -> None:
    """Write the models with which clients were last tested, one .safetensors file each."""
    from urllib.parse import quote

    from safetensors.torch import save

    from rayfl.results import client_models
    from rayfl.rundir import RunDirectory

    if out_folder is not None:
        places.local(out_folder)
    run, number = RunDirectory.open(path), 0
    inside = run.path / "models" / "clients"
    with places.folder(out_folder or inside, str(run.path) if out_folder is None else "--out") as folder:
        for number, (client, tensors) in enumerate(client_models(run.path, clients, finetuned), 1):
            if number == 1:
                _say(f"{size(sum(t.numel() * t.element_size() for t in tensors.values()))} a client")
            files.write(folder / f"client_{quote(str(client), safe=' ')}.safetensors", save(tensors))
    _say(f"written: {counted(number, 'model')} to {short(folder)}")
    if out_folder is None:
        run.republish()


@app.command()
def report(path: Annotated[Path, typer.Argument(help="a run directory")]) -> None:
    """Write report.html of a run again."""
    from rayfl.report import write_report
    from rayfl.rundir import RunDirectory

    run = RunDirectory.open(path)
    _say(f"report: {short(write_report(run.path))}")
    run.republish()


@app.command()
def runs(
    folder: Annotated[
        Path, typer.Argument(help="the folder of the runs, output.root, which may be a URL")
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON list instead of a table")] = False,
) -> None:
    """List the runs of a folder: running, stopped, failed and why, or finished; newest first."""
    from rayfl.monitor import runs_below
    from rayfl.overview import runs_table
    from rayfl.remote import plain

    run_views = runs_below(folder)
    if as_json:
        print(json.dumps([run.to_dict() for run in run_views], indent=1))
    elif run_views:
        out.print(runs_table(run_views, folder), soft_wrap=True, highlight=False)
    else:
        _say(f"no runs in {plain(folder)}")


@app.command()
def top(
    run: Annotated[
        Path,
        typer.Argument(help="a run, or a folder: the newest run in it that is running; or a URL of either"),
    ] = Path("runs"),
    once: Annotated[bool, typer.Option("--once", help="show it once, for scripts")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print its status once, as JSON")] = False,
) -> None:
    """Follow a run from another terminal, or another machine that sees its directory."""
    from dataclasses import asdict

    from rayfl.monitor import newest_running, view
    from rayfl.monitor.looking import is_root
    from rayfl.overview import follow, screen

    run_view = newest_running(run) if is_root(run) else view(run)
    if as_json:
        print(json.dumps({"path": str(run_view.path), **asdict(run_view.status)}, indent=1))
    elif once:
        out.print(screen(run_view))
    else:
        follow(run_view.path, out)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="two or more run directories")],
    page: Annotated[Path, typer.Option("--out", help="the HTML page to write")] = Path("comparison.html"),
) -> None:
    """Compare finished runs: a table, and a page with their curves.

    Only the settings that differ are shown. Runs that differ only in the seed are one row, with the mean and
    its 95 % interval.
    """
    from rayfl import api
    from rayfl.display import comparison_table, group_table

    places.file(page)
    comparison = api.compare(runs)
    page = comparison.write(page)
    if comparison.differences:
        _say("not ranked: these runs do not have the same clients with the same data; they differ in")
        for line in comparison.differences:
            _say(f"  {line}")
    out.print(
        comparison_table(comparison.shown().texts(), comparison.caption(), out.width, comparison.naming)
    )
    if not comparison.differences and not comparison.seeds:
        summaries = [
            {**run.summary, "algorithm": group.name}
            for run, group in zip(comparison.files, comparison.groups, strict=True)
        ]
        for table in (group_table(summaries, kind, out.width) for kind in ("group", "cluster")):
            if table is not None:
                out.print(table)
    _say(f"comparison: {short(page)}")


@app.command()
def bench(
    tasks: Annotated[
        list[str] | None,
        typer.Argument(
            help="W1, W2, W3 (the default), startup, cluster, population, local, methods, networks, profile; "
            "or a preset or YAML file and settings such as training.lr=0.1"
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="number of measured rounds of each workload")] = 7,
    json_file: Annotated[Path | None, typer.Option("--json", help="write all figures to this file")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda: for W1 to W3, networks and configs")] = "cpu",
    precision: Annotated[str, typer.Option(help="float32 or bf16: for networks")] = "float32",
) -> None:
    """Measure rayfl against a plain PyTorch loop in the same run: medians and ratios.

    With a config: seconds a round, start-up and memory of that config, and of FedAvg with the same clients,
    model and local SGD in a plain loop of two processes.
    """
    from rayfl.bench.command import bench as run_bench

    if json_file is not None:
        places.file(json_file, "--json")
    run_bench(tasks or [], rounds, json_file, out, device, precision)


@app.command()
def init(
    kind: Annotated[str, typer.Argument(help="method, model, dataset, partition, loss, study or cluster")],
    name: Annotated[str, typer.Option(help="name of the file and the part, such as my_method")] = "",
    folder: Annotated[Path, typer.Option(help="folder to write to")] = Path(),
    cluster: Annotated[
        str, typer.Option("--kind", help="of a cluster: aws, onprem, kuberay, slurm, docker or monitoring")
    ] = "",
) -> None:
    """Write a commented skeleton with its test, a study file, or the files for a cluster to a folder."""
    from rayfl.commands.init import init as write

    written, tries = write(kind, name, folder, cluster)
    for path in written:
        _say(f"written: {short(path)}")
    for line in tries:
        _say(f"continue with: {line}")


@app.command()
def doctor() -> None:
    """Check what rayfl would run on: versions, memory, disks, GPUs, Ray, datasets."""
    from rayfl.data import DATASETS, data_root
    from rayfl.doctor import checks
    from rayfl.runtime.connection import ray_status
    from rayfl.runtime.environment import machine, versions

    table = Table(box=None, show_header=False, padding=(0, 2))
    facts: dict[str, Any] = {**machine(), **versions()}
    facts["gpus"] = ", ".join(facts["gpus"]) or "none (the CPU is used)"
    for name, value in facts.items():
        table.add_row(f"[bold]{name}[/bold]", escape(str(value)))
    table.add_row("[bold]ray cluster[/bold]", escape(ray_status()))
    for check in checks():
        remedy = f" [red]{escape(check.remedy)}[/red]" if check.remedy else ""
        table.add_row(f"[bold]{check.name}[/bold]", f"{escape(check.found)}{remedy}")
    root = data_root()
    for name, dataset in DATASETS.items():
        try:
            data = dataset()
            available, remedy = data.available(data.root or root), data.remedy(data.root or root)
        except ConfigError:  # settings without a default, such as a path
            continue
        table.add_row(
            f"[bold]data: {name}[/bold]",
            "available" if available else escape(f"not in {root}: {remedy}"),
        )
    out.print(table)


def _expand_home(arguments: Sequence[str]) -> list[str]:
    """Expand ``~`` where shells do not: in quotes, and in ``--out=~/folder``. Settings do it themselves."""
    expanded = []
    for argument in arguments:
        name, is_option, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        expanded.append(name + is_option + (os.path.expanduser(value) if value.startswith("~") else value))
    return expanded


def _plugins_first(arguments: Sequence[str]) -> list[str]:
    """Accept ``--plugin x`` after the command, too."""
    plugins: list[str] = []
    others: list[str] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if argument == "--plugin" and remaining:
            plugins += [argument, remaining.pop(0)]
        else:
            (plugins if argument.startswith("--plugin=") else others).append(argument)
    return [*plugins, *others]


_HANDLED_FAILURES = (
    "^A worker died or was killed while executing a task|^The node with node id: .* has been marked dead"
    "|^Raylet is terminated"
)
"""Log lines of Ray about failures that rayfl reports and repairs itself; not those about processes that Ray
killed for lack of memory."""


def main() -> None:
    """The entry point: mistakes of the user are one line and exit code 2, an interrupt is 130."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", _HANDLED_FAILURES)  # Ray reads it when it is imported
    try:
        arguments = _plugins_first(_expand_home(sys.argv[1:]))
        sys.exit(app(arguments or ["--help"], prog_name="rayfl", standalone_mode=False))
    except ClientError as error:
        if error.diverged or not _print_user_fault(error, error.cause, f"{error.where}: "):
            traceback = "" if error.diverged else f"{error.cause.rstrip()}\n"
            print(f"{traceback}error: {error}", file=sys.stderr)
        sys.exit(1)
    except RayflError as error:
        text = error.as_option if isinstance(error, ArgumentError) else error
        print(f"error: {text}", file=sys.stderr)
        sys.exit(2)
    except _Raised as raised:
        if _print_user_fault(raised.error):
            sys.exit(1)
        if not isinstance(raised.error, BrokenPipeError):
            raise raised.error from None
        # rayfl list | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
        sys.exit(128 + signal.SIGPIPE)
    except MemoryError as error:
        line = " ".join(str(error).split())
        print(f"error: out of memory{f': {line}' if line else ''}; choose smaller sizes", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        if type(error).__name__ in ("Interrupted", "Abort"):
            if type(error).__name__ == "Abort":
                print("interrupted", file=sys.stderr)
            sys.exit(130)
        if hasattr(error, "format_message"):  # typer has several classes of usage errors
            command = getattr(getattr(error, "ctx", None), "command_path", "rayfl")
            setting = getattr(error, "option_name", "").lstrip("-")
            meant = f"settings are written {setting}=...; " if setting in _SETTINGS_NOT_OPTIONS else ""
            line = f"{error.format_message().rstrip('.')}; {meant}see {command} --help"
            print(f"error: {line}", file=sys.stderr)
            sys.exit(2)
        if not _print_user_fault(error):
            raise
        sys.exit(1)


def _print_user_fault(error: Exception, text: str = "", who: str = "") -> bool:
    """Print an error that the user's own code has raised as one line, after the user's lines that led to it.

    Returns:
        Whether it was such an error; any other error is one of rayfl, and its traceback is needed.
    """
    from rayfl import plugins

    fault = plugins.fault_of(error, text)
    if fault is not None:
        for frame in fault.frames:
            print(f"  {frame}", file=sys.stderr)
        print(f"error: {who}{fault.line}", file=sys.stderr)
    return fault is not None


_SETTINGS_NOT_OPTIONS = ("rounds", "seed", "algorithm", "data", "model", "partition", "loss", "local")
"""Settings that users mistake for command-line options."""


if __name__ == "__main__":
    main()

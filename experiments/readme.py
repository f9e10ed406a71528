"""Write ``experiments/README.md`` from the study files and the results in ``experiments/results``.

::

    python experiments/readme.py                          # write README.md again
    python experiments/readme.py studies/digits-smoke     # keep the results of a study first
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import frame

from rayfl.config.text import parse
from rayfl.errors import ConfigError
from rayfl.study.file import paths_of, ranges, read, seeds_of
from rayfl.study.preparation import prepare
from rayfl.study.tables import amount, amounts
from rayfl.units import UNKNOWN, duration

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
ABOUT = """# Experiments

Each table or figure of a paper that consists of runs is a study file here. It has methods, grid, seeds,
published figures, and claims that `rayfl study` checks. Download the datasets first, for example with `rayfl
prepare fashion_mnist`. `--size smoke` takes seconds to half an hour (FLT's Table 4 with its CNN more).
Without `--size`, a study has the settings at the top of its file.

`python experiments/readme.py` writes this page from the study files and from `results/`. The following
commands run a study and keep its table and verdicts:

    rayfl study experiments/mt_hfl/digits.yaml --size smoke
    python experiments/readme.py studies/digits-smoke

`results/runs` has runs of long studies, above all of PACFL's tables, also of columns that are not complete.
With `--archive experiments/results/runs` a study reuses them, and makes only the missing runs; `--dry-run`
says how many these are.

[papers.md](papers.md) says where each table and figure of the papers is, and which are not here.

A claim *holds* if its whole 95 % interval over seeds satisfies it, *fails* if no part of the interval does,
and is *undecided* otherwise. Claims come from the papers, or from longer runs of rayfl. The smoke size has
few rounds, fewer methods, and often other data and a smaller network (each result says so). So its verdicts
neither confirm nor refute a paper. Times are sums over the runs, on a machine that also did other work.
"""


@dataclass(frozen=True)
class File:
    """A study file.

    Attributes:
        path: relative to this folder.
        name, title: as in the file.
        sizes: further sizes in the file: name -> what they change.
        seeds: of the study as it stands.
    """

    path: str
    name: str
    title: str
    sizes: Mapping[str, Mapping[str, Any]]
    seeds: tuple[int, ...]

    def seeds_at(self, size: str) -> tuple[int, ...]:
        """The seeds of a size; empty: of the study as it stands."""
        given = self.sizes.get(size, {}).get("seeds")
        return self.seeds if given is None else seeds_of(given)


def studies() -> list[File]:
    """All study files, that is YAML files with methods."""
    files = []
    for path in sorted(HERE.glob("*/*.yaml")):
        study = parse(path.read_text(encoding="utf-8"), trusted=True)
        if "methods" in study:
            title = study.get("title", study["name"])
            sizes = {name: size or {} for name, size in study.get("sizes", {}).items()}
            seeds = seeds_of(study.get("seeds", "0-2"))
            files.append(File(path.relative_to(HERE).as_posix(), study["name"], title, sizes, seeds))
    return files


def keep(folder: Path) -> Path:
    """Keep a study's table and verdicts in ``results``.

    Args:
        folder: ``studies/<name>`` or ``studies/<name>-<size>``, as ``rayfl study`` writes it.

    Raises:
        ConfigError: if there are no results, if they belong to no study here, or if they are incomplete.
    """
    try:
        study = parse((folder / "study.yaml").read_text(encoding="utf-8"), trusted=True)
        claims = json.loads((folder / "claims.json").read_text(encoding="utf-8"))
        parts = (folder / "table.md").read_text(encoding="utf-8").split("\n\n")
        with (folder / "runs.csv").open(encoding="utf-8", newline="") as file:
            rows = [run for run in csv.DictReader(file) if run.get("state") != "missing"]
    except OSError as error:
        raise ConfigError(str(folder), "holds no results of a study", "name a folder in studies/") from error
    runs = {run["key"]: run for run in rows}  # methods may share runs
    by_name = {each.name: each for each in studies()}
    size = folder.resolve().name.removeprefix(study["name"]).removeprefix("-")
    if study["name"] not in by_name or (size and size not in by_name[study["name"]].sizes):
        raise ConfigError(str(folder), "is of no study here", "name it as rayfl study does: <name>-<size>")
    checked = {claim["claim"] for claim in claims["claims"]}
    expected = prepare(read(HERE / by_name[study["name"]].path, size), check_data=False)
    lacking = [claim.text for _, claim in expected.statements if claim.text not in checked]
    if lacking:
        what = f"does not check {', '.join(map(repr, lacking))}"
        raise ConfigError(str(folder), what, "run the whole study, without --only")
    sized = by_name[study["name"]].sizes.get(size, {})
    result = {
        "study": study["name"],
        "size": size,
        "changed": _changed(study, sized),
        "seeds": sorted({int(run["seed"]) for run in runs.values()}),
        "runs": len(runs),
        "seconds": round(sum(float(run.get("seconds") or 0) for run in runs.values())),
        "table": parts[1].strip(),
        "caption": parts[2].strip(),
        **claims,
    }
    path = RESULTS / f"{folder.resolve().name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def _changed(study: Mapping[str, Any], size: Mapping[str, Any]) -> dict[str, Any]:
    """What a size changes, as it was run: settings of all methods, and of some (``FedAvg: training.lr``).

    Args:
        study: as it was run, with its settings by their dotted paths.
        size: of the study file.
    """
    changed = _named(study.get("settings", {}), size.get("settings", {}))
    for label, settings in size.get("methods", {}).items():
        own = _named(study["methods"][label], settings)
        changed |= {f"{label}: {path}": value for path, value in own.items()}
    return changed


def _named(settings: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings, by their dotted paths, that are named, in whatever way."""
    paths = paths_of(named)
    return {path: value for path, value in settings.items() if path.removesuffix(".name") in paths}


def generate() -> str:
    """Generate the text of README.md."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    return "\n".join([ABOUT, *_overview(results), *_analyses(), *_details(results)]).rstrip() + "\n"


def _overview(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "## Studies\n"
    yield "| study | what it shows | size that was run | claims | command |"
    yield "| --- | --- | --- | --- | --- |"
    for file in studies():
        file_results = [result for result in results if result["study"] == file.name]
        sizes = [result["size"] for result in file_results] or ["smoke"]
        entries: list[Mapping[str, Any] | None] = [*file_results] or [None]
        for size, result in zip(sizes, entries, strict=True):
            option = f" --size {size}" if size else ""
            ran = "not run yet"
            if result is not None:
                seeds = result.get("seeds", file.seeds_at(size))
                if set(seeds) < set(file.seeds_at(size)):  # as far as they have been run
                    option += f" --seeds {ranges(seeds).replace(' ', '')}"
                of = "" if len(seeds) > 1 else " of one seed"
                runs = f"{result['runs']} runs{of}, {duration(result['seconds'])}"
                ran = f"[{size or 'default'}](#{_anchor(file, size)}): {runs}"
            claims = "" if result is None else _verdicts(result["claims"])
            command = f"`rayfl study experiments/{file.path}{option}`"
            yield f"| [{file.path}]({file.path}) | {file.title} | {ran} | {claims} | {command} |"
    noted = [path.parent.name for path in sorted(HERE.glob("*/README.md"))]
    links = ", ".join(f"[{name}]({name}/README.md)" for name in noted)
    yield f"\nNotes on longer runs and their results: {links}.\n"


def _verdicts(claims: Sequence[Mapping[str, Any]]) -> str:
    counts = Counter(claim["verdict"] for claim in claims)
    words = {"holds": ("holds", "hold"), "fails": ("fails", "fail"), "undecided": ("undecided",) * 2}
    return ", ".join(
        f"{counts[v]} {one if counts[v] == 1 else more}" for v, (one, more) in words.items() if counts[v]
    )


def _anchor(file: File, size: str) -> str:
    return "-".join(filter(None, (file.name, size))).lower().replace(".", "")


def _analyses() -> Iterator[str]:
    yield "## Analyses\n"
    yield "Many scripts take `--seeds 0-4`, `--out folder`, or settings such as `rounds=5`; see `--help`.\n"
    yield "| script | what it does |"
    yield "| --- | --- |"
    for path in sorted(HERE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        command = 'if __name__ == "__main__"' in text and path.parent.name not in ("clients", "methods")
        if not command or path.name in ("frame.py", "readme.py"):
            continue
        summary = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
        name = path.relative_to(HERE).as_posix()
        yield f"| [{name}]({name}) | {' '.join(summary.split()).rstrip(':')} |"
    yield ""


def _details(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    files = {file.name: file for file in studies()}
    yield "## Results\n"
    for result in results:
        if result["study"] not in files:
            continue
        file, size = files[result["study"]], result["size"]
        yield f"### {'-'.join(filter(None, (file.name, size)))}\n"
        yield f"{file.title}; [{file.path}]({file.path}){f', size {size}' if size else ''}.\n"
        if result.get("changed"):  # as it ran: the file may say something else today
            changes = json.dumps(result["changed"], ensure_ascii=False).replace('"', "")
            yield f"Changed at this size: `{changes}`\n"
        yield f"{result['table']}\n\n{result['caption']}\n"
        yield from claims_table(result["claims"])
        yield ""


def claims_table(claims: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The lines of a table of claims with their verdicts."""
    yield "| claim | verdict | value | 95 % interval | source |"
    yield "| --- | --- | --: | --: | --- |"
    for claim in claims:
        at = ", ".join(claim.get("at", {}).values())
        text = f"{claim['claim']}{f' ({at})' if at else ''}".replace("|", "/")
        unit, low = claim.get("unit", ""), claim.get("low")
        value = UNKNOWN if claim.get("value") is None else amount(claim["value"], unit)
        verdict = claim["verdict"] if claim["verdict"] == "holds" else f"**{claim['verdict']}**"
        if claim.get("why"):
            verdict += f": {claim['why']}"
        interval = UNKNOWN if low is None else amounts(low, claim["high"], unit)
        origin = "; ".join(filter(None, (claim.get("source", ""), claim.get("protocol", ""))))
        yield f"| {text} | {verdict} | {value} | {interval} | {origin} |"


def work(options: argparse.Namespace) -> None:
    """Keep results, and write README.md."""
    for folder in options.folders:
        print(keep(folder))
    (HERE / "README.md").write_text(generate(), encoding="utf-8")
    print(HERE / "README.md")


if __name__ == "__main__":
    FOLDERS = frame.option("folders", nargs="*", type=Path, help="studies/<name>-<size>: results to keep")
    sys.exit(frame.main(__doc__, work, FOLDERS))

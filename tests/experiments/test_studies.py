"""The study files in experiments/: each can be run at every size, and README.md tells what they gave."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments import frame, readme
from rayfl import plugins
from rayfl.config.text import dump, parse
from rayfl.errors import ConfigError
from rayfl.study import execute, prepare, read, take
from rayfl.study.preparation import Prepared

FOLDER = Path(__file__).resolve().parents[2] / "experiments"
SIZED = [(file.path, size) for file in readme.studies() for size in ("", *file.sizes)]
ON_DIGITS = ["mt_hfl/digits.yaml", pytest.param("clustered/planted_label_swap.yaml", marks=pytest.mark.slow)]
COMPARISONS = ("agree", "clusterings", "positions")
"""Scripts of peers/ that run in one process."""
TINY = ["rounds=1", "training.epochs=1", "evaluation.every=1", "execution.backend=inline"]


@pytest.fixture(autouse=True)
def _no_plugins_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a study are not those of the next one."""
    monkeypatch.setattr(plugins, "_loaded", {})


@cache
def _prepared(file: str, size: str) -> Prepared:
    return prepare(read(FOLDER / file, size), check_data=False)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("file", "size"), SIZED)
def test_a_study_can_be_run_as_it_stands(file: str, size: str) -> None:
    prepared = _prepared(file, size)
    assert prepared.statements
    assert len(prepared.study.seeds) > 1  # one seed decides no claim


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("file", "size"),
    [
        pytest.param(file, size, marks=[] if size == "smoke" else pytest.mark.slow, id=f"{file}-{size}")
        for file, size in SIZED
    ],
)
def test_the_copy_with_the_results_is_the_same_study(file: str, size: str) -> None:
    prepared = _prepared(file, size)
    again = prepare(take(parse(dump(prepared.study.content())), FOLDER), check_data=False)
    assert [run.config for run in again.runs] == [run.config for run in prepared.runs]
    assert again.statements == prepared.statements
    assert again.columns == prepared.columns


@pytest.mark.slow
def test_archived_runs_are_those_of_the_studies(monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit of a study, or of the file of its own parts, would leave them behind without notice."""
    planned = set()
    for file, size in SIZED:
        monkeypatch.setattr(plugins, "_loaded", {})
        planned |= {run.key for run in _prepared(file, size).runs}
    archived = {path.stem.rpartition("-")[2] for path in (FOLDER / "results/runs").glob("*.zip")}
    assert len(archived) > 200
    assert not archived - planned


def test_names_are_those_of_one_study_each() -> None:
    names = [file.name for file in readme.studies()]
    assert len(set(names)) == len(names) > 20
    assert all("smoke" in file.sizes for file in readme.studies())


@pytest.mark.parametrize("file", ON_DIGITS)
def test_smoke_sizes_run(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [*TINY, f"output.root={tmp_path / 'runs'}"]
    study = read(FOLDER / file, "smoke", settings, seeds="0-1")
    folder = tmp_path / f"{study.name}-smoke"
    found = execute(prepare(study), folder, inline=True)
    assert not found.failed
    assert {claim["verdict"] for claim in found.claims} <= {"holds", "fails", "undecided"}

    monkeypatch.setattr(readme, "RESULTS", tmp_path / "results")
    kept = json.loads(readme.keep(folder).read_text())
    assert (kept["study"], kept["size"]) == (study.name, "smoke")
    assert kept["runs"] == 2 * len(study.methods)
    assert all(label in kept["table"] for label in study.methods)
    assert kept["claims"] == json.loads((folder / "claims.json").read_text())["claims"]
    assert kept["changed"].keys() == _smoke_settings(file).keys()
    text = readme.generate()
    assert kept["table"] in text
    assert "--size smoke` |" in text


def _smoke_settings(file: str) -> dict[str, Any]:
    (found,) = (each for each in readme.studies() if each.path == file)
    return dict(found.sizes["smoke"].get("settings", {}))


def test_a_kept_result_says_what_ran_whatever_the_file_says_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    kept = {
        "study": "digits", "size": "smoke", "changed": {"rounds": 77}, "runs": 1, "seconds": 1,
        "table": "table", "caption": "caption", "claims": [],
    }  # fmt: skip
    (tmp_path / "digits-smoke.json").write_text(json.dumps(kept))
    assert "Changed at this size: `{rounds: 77}`" in readme.generate()


def test_what_a_size_changes_is_kept_with_all_its_settings() -> None:
    study = {
        "settings": {
            "rounds": 2,
            "model.name": "mlp",
            "model.hidden": [4],
            "modelling": 3,
            "training.lr": 0.1,
        },
        "methods": {"A": {"algorithm": "fedavg", "training.lr": 0.3}, "B": {"algorithm": "solo"}},
    }
    size = {
        "settings": {"rounds": 2, "model": {"name": "mlp", "hidden": [4]}},
        "methods": {"A": {"training": {"lr": 0.3}}},
    }
    expected = {"rounds": 2, "model.name": "mlp", "model.hidden": [4], "A: training.lr": 0.3}
    assert readme._changed(study, size) == expected


def test_runs_that_methods_share_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "RESULTS", tmp_path / "results")
    folder = _folder(tmp_path, claims=_claims())
    kept = json.loads(readme.keep(folder).read_text(encoding="utf-8"))
    assert (kept["runs"], kept["seconds"]) == (2, 8)
    assert kept["seeds"] == [0, 2]
    assert "| [smoke](#digits-smoke): 2 runs, 8.0 s |" in readme.generate()
    assert "--size smoke --seeds 0,2` |" in readme.generate()


def test_results_of_a_part_of_a_study_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--only`` leaves claims unchecked, which a reader of the page would not notice."""
    monkeypatch.setattr(readme, "RESULTS", tmp_path / "results")
    *most, last = _claims()
    with pytest.raises(ConfigError, match="does not check .*" + re.escape(last["claim"])):
        readme.keep(_folder(tmp_path, claims=most))
    assert not readme.RESULTS.exists()


def _claims() -> list[dict[str, str]]:
    """Those of ``digits --size smoke``."""
    (path,) = (file.path for file in readme.studies() if file.name == "digits")
    prepared = prepare(read(FOLDER / path, "smoke"), check_data=False)
    return [{"claim": statement.text, "verdict": "holds"} for _, statement in prepared.statements]


def _folder(below: Path, claims: list[dict[str, str]]) -> Path:
    folder = below / "digits-smoke"
    folder.mkdir()
    for name, text in {
        "study.yaml": "name: digits",
        "claims.json": json.dumps({"verdict": "holds", "claims": claims}),
        "table.md": "title\n\ntable\n\ncaption",
        "runs.csv": "key,method,seed,seconds\na,one,0,5\na,two,0,5\nb,two,2,3\n",
    }.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_folders_without_results_of_a_study_here_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no results"):
        readme.keep(tmp_path)


def test_the_page_of_the_papers_names_every_table_and_figure() -> None:
    linked = re.findall(r"\]\(([^)]+)\)", (FOLDER / "papers.md").read_text(encoding="utf-8"))
    assert [link for link in linked if not (FOLDER / link).is_file()] == []
    named = [file.path for file in readme.studies() if re.search(r"/(table|figure)", file.path)]
    assert len(named) > 30
    assert set(named) - set(linked) == set()


def test_the_readme_is_what_the_script_writes() -> None:
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == readme.generate()


def test_kept_results_are_of_studies_and_claims_that_are_there() -> None:
    """Who changes a claim runs the study again, or takes its result away; sources can be corrected."""
    files = {file.name: file for file in readme.studies()}
    for path in sorted(readme.RESULTS.glob("*.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        prepared = _prepared(files[kept["study"]].path, kept["size"])
        claimed = {(claim["claim"], claim.get("source", "")) for claim in kept["claims"]}
        assert claimed == {(s.text, c.source) for c, s in prepared.statements}, path
        rows = {line.split(" | ")[0].removeprefix("| ") for line in kept["table"].split("\n")}
        assert set(prepared.study.methods) <= rows, path
        if any(column.startswith("accuracy_") for column in prepared.study.report.names):
            assert "accuracies are those of the served models" in kept["caption"], path


def test_settings_files_are_no_studies() -> None:
    others = {path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("*/*.yaml")} - {
        file.path for file in readme.studies()
    }
    assert others == {"flis/fmnist.yaml", "scaling/actors.yaml", "scaling/clients.yaml", "scaling/nodes.yaml"}
    assert not any("claims" in yaml.safe_load((FOLDER / name).read_text()) for name in others)


def _fail(_: Any) -> None:
    raise ConfigError("--what", "is wrong", "do it right")


def _stop(_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("work", "arguments", "code", "words"),
    [
        (_fail, [], 2, "error: --what"),
        (_stop, [], 130, "stopped"),
        (print, ["--seeds", "1-x"], 2, "error: --seeds: '1-x' is not a seed"),
    ],
)
def test_analyses_end_in_one_line(
    work: Any, arguments: list[str], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert frame.main("what", work, seeds="0", out=out, arguments=arguments) == code
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_analyses_share_seeds_folder_and_settings(tmp_path: Path) -> None:
    seen: list[Any] = []
    options = (frame.option("--rounds", type=int, default=3),)
    arguments = ["rounds=5", "--seeds", "0-2", "--out", str(tmp_path / "new"), "a.b=1"]
    done = frame.main("", seen.append, *options, seeds="0", out="x", overrides=True, arguments=arguments)
    assert done == 0
    assert seen[0].seeds == (0, 1, 2)
    assert seen[0].out.is_dir()
    assert seen[0].overrides == ["rounds=5", "a.b=1"]
    assert seen[0].rounds == 3


def test_a_closed_pipe_ends_an_analysis_in_silence() -> None:
    """As in ``script | head``."""
    work = "lambda options: [print('a', flush=True) for _ in iter(int, 1)]"  # for ever
    code = f"import sys; import frame; sys.exit(frame.main('', {work}))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=FOLDER
    ) as script:
        assert script.stdout
        assert script.stderr
        assert script.stdout.readline() == "a\n"
        script.stdout.close()
        assert script.stderr.read() == ""
    assert script.returncode == 128 + signal.SIGPIPE


def test_scripts_take_their_options_from_the_frame() -> None:
    """But the launcher, and scaling/ and most of peers/, whose parts are separate processes, some without
    rayfl; and what studies import, which is no script."""
    studies = [FOLDER / file.path for file in readme.studies()]
    imported = {Path(name) for path in studies for name in read(path).plugins}
    for path in FOLDER.glob("*/*.py"):
        in_processes = path.parent.name in ("scaling", "peers") and path.stem not in COMPARISONS
        if not in_processes and path not in imported:
            assert "frame.main(" in path.read_text(), path
            assert "ArgumentParser" not in path.read_text(), path
    assert "frame" in sys.modules

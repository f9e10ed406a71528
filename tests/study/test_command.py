"""``rayfl study`` as people type it: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayfl import cli
from rayfl.errors import ConfigError, Interrupted
from rayfl.servers.driver import Driver
from rayfl.study import folder_of, read, run_study, take
from rayfl.study.estimate import _Cost

STUDY = """
name: typed
settings:
  rounds: 1
  training.epochs: 1
  partition: {name: label_skew, clients: 6}
  output: {report: false, tensorboard: false}
methods:
  FedAvg: {algorithm: fedavg}
  SOLO: {algorithm: solo}
seeds: 0-1
claims: [FedAvg.bytes_up > SOLO.bytes_up]
"""


def rayfl(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["rayfl", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rayfl.study.writing.write_figures", lambda results, folder: [])
    (tmp_path / "typed.yaml").write_text(STUDY)
    return tmp_path


def test_an_interrupt_ends_an_estimate(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def stop(driver: Driver) -> None:
        tried.append(driver)
        raise Interrupted

    monkeypatch.setattr(Driver, "_check_stop", stop)
    code, _, err = rayfl(capsys, "study", "typed.yaml", "--dry-run")
    assert (code, err.count("\n") < 2) == (130, True)
    assert len(tried) == 1


def test_a_study_is_estimated_run_and_checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = rayfl(capsys, "study", "typed.yaml", "--dry-run", "--inline")
    assert code == 0
    assert "with 1 at a time" in out
    assert out.splitlines()[0] == "2 methods x 2 seeds (0-1)"
    assert "4 runs: 0 finished, 0 to resume, 4 new; 4 rounds" in out
    assert "a round of each method was timed" in out
    assert not (folder / "runs").exists()

    code, out, _ = rayfl(capsys, "study", "typed.yaml", "--inline", "--check")
    assert code == 0
    assert out.startswith("typed: 2 methods x 2 seeds (0-1)\n  runs: 4 to do")
    assert "4/4  SOLO, seed 1: accuracy" in out
    assert "holds      FedAvg.bytes_up > SOLO.bytes_up: " in out
    assert "results: studies/typed/" in out
    assert json.loads((folder / "studies/typed/claims.json").read_text())["verdict"] == "holds"

    _, out, _ = rayfl(capsys, "study", "typed.yaml", "--dry-run")
    assert "4 runs: 4 finished" in out

    wrong = STUDY.replace("FedAvg.bytes_up > SOLO", "SOLO.bytes_up > FedAvg")
    (folder / "typed.yaml").write_text(wrong)
    assert rayfl(capsys, "study", "typed.yaml", "--inline", "--check")[0] == 1
    code, out, _ = rayfl(capsys, "study", "typed.yaml", "--inline", "--check", "--seeds", "0")
    assert code == 3
    assert "one seed has no interval" in out
    assert "results: studies/typed-seeds0/" in out  # beside the results of the whole, not in their place
    assert json.loads((folder / "studies/typed/claims.json").read_text())["verdict"] == "fails"
    assert rayfl(capsys, "study", "typed.yaml", "--inline", "--seeds", "0")[0] == 0  # nobody asked


def test_what_is_wrong_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, number in (
        ("impossible", "rounds_to_180"),
        ("no_group", "accuracy_group_3"),
        ("not_measured", "local_rounds_to_80"),
        ("not_over_rounds", "newcomers_rounds_to_80"),
        ("at_the_end", "finetuned_bytes_to_80"),
    ):
        claimed = {**yaml.safe_load(STUDY), "claims": [f"FedAvg.{number} > 0"]}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(claimed))
    for arguments, text in (
        (["missing.yaml"], "missing.yaml: cannot be read"),
        (["typed.yaml", "--only", "FedAgv"], "--only: no method 'FedAgv'; did you mean 'FedAvg'?"),
        (["typed.yaml", "rounds=x"], "rounds: got 'x'"),
        (["typed.yaml", "--jobs", "0"], "--jobs"),
        (["typed.yaml", "--seeds", ""], "--seeds: '' is not a seed"),
        (["typed.yaml", "--inline", "--out", "typed.yaml"], "typed.yaml: is a file; name a folder"),
        (["typed.yaml", "--inline", "output.root=typed.yaml"], "typed.yaml: is a file; name a folder"),
        (["typed.yaml", "--only", "SOLO", "--check"], "--check: no claim is about these methods alone; run"),
        (
            ["impossible.yaml"],
            "claims: 'FedAvg.rounds_to_180 > 0': rounds_to_180: 180 % is not a possible",
        ),
        (
            ["not_measured.yaml"],
            "no run of FedAvg measures local_rounds_to_80; add to settings, or to methods.FedAvg: evaluation",
        ),
        (
            ["not_over_rounds.yaml"],
            "no run has newcomers_accuracy_mean over its rounds; such as rounds_to_80",
        ),
        (["at_the_end.yaml"], "no run has finetuned_accuracy_mean over its rounds"),
        (["no_group.yaml", "--dry-run"], "accuracy_group_3 > 0': no client is in group 3; no planted groups"),
    ):
        code, _, err = rayfl(capsys, "study", *arguments)
        assert code == 2
        assert text in err
        assert len(err.strip().splitlines()) == 1
        assert not (folder / "runs").exists()


@pytest.mark.parametrize(("place", "out"), [(".", "."), (".", ""), ("studies/typed", None)])
def test_results_never_replace_the_study_file(
    folder: Path, capsys: pytest.CaptureFixture[str], place: str, out: str | None
) -> None:
    file = folder / place / "study.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("# why\n" + STUDY)
    options = [] if out is None else ["--out", out]
    code, _, err = rayfl(capsys, "study", str(file), "--inline", *options)
    assert (code, err.count("\n")) == (2, 1)
    assert "the results' study.yaml would replace the study file" in err
    with pytest.raises(ConfigError, match="would replace the study file"):
        run_study(file, folder="." if out == "" else out, inline=True)
    assert file.read_text().startswith("# why")
    assert not (folder / "runs").exists()


def test_a_folder_of_runs_that_cannot_be_written_is_noticed_at_once(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "runs" and access(path, mode))
    code, _, err = rayfl(capsys, "study", "typed.yaml", "--inline")
    assert (code, err.count("\n")) == (2, 1)
    assert "runs: cannot be written to" in err


def test_a_run_that_fails_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = rayfl(
        capsys, "study", "typed.yaml", "--inline", "--only", "FedAvg", "training.lr=1e30", "rounds=2"
    )
    assert code == 1
    assert "not checked: FedAvg.bytes_up > SOLO.bytes_up, which names methods that were not run" in out
    assert "error: FedAvg, seed 0: client" in err


def test_a_study_that_was_read_has_its_seeds_and_settings(folder: Path) -> None:
    """They would be ignored."""
    study = read("typed.yaml", seeds="0")
    for ignored in ({"seeds": "1"}, {"size": "smoke"}, {"settings": ["rounds=3"]}, {"only": ["SOLO"]}):
        with pytest.raises(ConfigError, match=rf"give {next(iter(ignored))} to rayfl\.study\.read"):
            run_study(study, inline=True, **ignored)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"onyl": ["FedAvg"]}, "onyl: no such argument; did you mean 'only'?"),
        ({"inlin": True}, "inlin: no such argument; did you mean 'inline'?"),
        ({"jobs": 0}, "jobs: got 0; expected a number of parallel runs"),
        ({"jobs": "2"}, "jobs: got '2'; expected a number of parallel runs"),
        ({"jobs": 2, "inline": True}, "jobs: 2 runs cannot be parallel in this process"),
        ({"inline": "no"}, "inline: got 'no'; expected true or false"),
        ({"folder": 3}, "folder: got an int; expected the path of a folder"),
        ({"folder": ""}, "folder: got an empty text; expected the path of a folder"),
        ({"archive": ""}, "archive: got an empty text"),
        ({"source": None}, "source: got nothing (None); expected the path of a study file"),
        ({"source": [1]}, "source: got a list; expected the path of a study file"),
        ({"seeds": 1.5}, "seeds: expected numbers and ranges"),
    ],
)
def test_wrong_arguments_are_refused_in_a_line(folder: Path, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        run_study(**{"source": "typed.yaml", **arguments})
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (folder / "runs").exists()


def test_parallel_runs_in_one_process_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = rayfl(capsys, "study", "typed.yaml", "--inline", "--jobs", "2")
    assert (code, err) == (
        2,
        "error: --jobs: 2 runs cannot be parallel in this process; leave out jobs or inline\n",
    )


def test_a_part_from_python_leaves_the_results_of_the_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    run_study("typed.yaml", seeds="0", inline=True, folder="whole")
    part = run_study("typed.yaml", only=["FedAvg"], seeds="0", inline=True, archive="~/kept")
    assert part.folder == Path("studies/typed-FedAvg-seeds0")
    assert set(part.runs["method"]) == {"FedAvg"}
    shutil.rmtree("runs")
    again = run_study("typed.yaml", only=["FedAvg"], seeds="0", inline=True, archive="~/kept")
    assert again.runs["seconds"].equals(part.runs["seconds"])  # out of the archive


def test_a_part_of_a_study_has_a_folder_of_its_own() -> None:
    study = take(yaml.safe_load(STUDY), Path())
    assert folder_of(study) == Path("studies/typed")
    values = {**yaml.safe_load(STUDY), "sizes": {"smoke": {"settings": {"rounds": 1}}}}

    def part(**chosen: Any) -> Path:
        return folder_of(take(values, Path(), **chosen))

    assert part(size="smoke", only=["FedAvg"], seeds="0-9") == Path("studies/typed-smoke-FedAvg-seeds0-9")
    assert part(settings=["rounds=3", "output.root=/tmp/x"]) == Path("studies/typed-rounds=3")
    named = {"A|B": {"algorithm": "fedavg"}, "A B": {"algorithm": "fedavg", "rounds": 2}}
    folders = [
        folder_of(take({**values, "methods": named, "claims": []}, Path(), only=[each])) for each in named
    ]
    assert folders[0] != folders[1] == Path("studies/typed-A_B")
    long = [part(settings=[f"data.path={'x' * 300}{end}"]) for end in "ab"]
    assert long[0] != long[1]
    assert len(long[0].name) <= 120


@pytest.mark.slow
def test_a_study_on_object_storage_is_continued_on_another_machine(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = STUDY.replace("output: {", f"output: {{root: 'file://{tmp_path}/there', ")
    (folder / "typed.yaml").write_text(text)
    monkeypatch.setenv("RAYFL_STAGING", str(tmp_path / "here"))
    code, out, _ = rayfl(capsys, "study", "typed.yaml", "--inline", "--check")
    assert (code, "runs: 4 to do" in out) == (0, True)
    first = (folder / "studies" / "typed" / "runs.csv").read_text()
    monkeypatch.setenv("RAYFL_STAGING", str(tmp_path / "elsewhere"))
    names = {path.name for path in (tmp_path / "there").iterdir()}
    shutil.rmtree(tmp_path / "there" / min(names))
    code, out, _ = rayfl(capsys, "study", "typed.yaml", "--dry-run")
    assert (code, "4 runs: 3 finished, 0 to resume, 1 new" in out) == (0, True)
    code, out, _ = rayfl(capsys, "study", "typed.yaml", "--inline", "--check")
    assert (code, "runs: 1 to do" in out) == (0, True)
    assert {path.name for path in (tmp_path / "there").iterdir()} == names
    again = (folder / "studies" / "typed" / "runs.csv").read_text()
    assert [line.split(",")[:4] for line in again.splitlines()] == [
        line.split(",")[:4] for line in first.splitlines()
    ]


def test_a_dry_run_checks_no_claims(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = rayfl(capsys, "study", "typed.yaml", "--dry-run", "--check")
    assert code == 2
    assert "--check: nothing is checked with --dry-run; leave one of them out" in err


@pytest.mark.parametrize("option", ["--out", "--archive"])
def test_a_dry_run_refuses_the_folders_that_a_run_would(
    folder: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    Path("plain").write_text("")
    code, _, err = rayfl(capsys, "study", "typed.yaml", "--dry-run", option, "plain")
    assert code == 2
    assert "plain: is a file; name a folder" in err


@pytest.mark.parametrize("more", [["--inline"], ["--dry-run"]], ids=["run", "dry run"])
def test_clients_that_cannot_be_given_data_are_found_before_anything_runs(
    folder: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    grid = "grid: {clients: {few: {partition.clients: 6}, many: {partition.clients: 20000}}}\n"
    (folder / "typed.yaml").write_text(STUDY + grid)
    code, out, err = rayfl(capsys, "study", "typed.yaml", *more)
    assert code == 2
    assert err.startswith("error: FedAvg, many, seed 0: partition")
    assert len(err.splitlines()) == 1
    assert "accuracy" not in out
    assert list((folder / "runs").glob("*")) == []


def test_an_estimate_finds_the_runs_with_chosen_settings(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayfl.study.estimate._timed_cost", lambda run: (_Cost(), ""))
    tune = "tune: {training.lr: [0.02, 0.2], on: validation, seeds: [100]}\n"
    (folder / "typed.yaml").write_text(STUDY + tune)
    assert rayfl(capsys, "study", "typed.yaml", "--inline", "--check")[0] == 0
    _, out, _ = rayfl(capsys, "study", "typed.yaml", "--dry-run")
    assert out.count("4 runs: 4 finished, 0 to resume, 0 new") == 2
    drawn = tune.replace("[0.02, 0.2]", "{loguniform: [0.02, 0.2]}, samples: 3")
    (folder / "typed.yaml").write_text(STUDY + drawn)
    _, out, _ = rayfl(capsys, "study", "typed.yaml", "--dry-run")
    assert "searching settings:\n  at most 6 runs; " in out

"""The command line: what people type, what they read, and the exit code."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest

from rayfl import api, cli
from rayfl.clustering.embeddings.umap import Umap
from rayfl.config import load, presets
from rayfl.errors import ClientError
from rayfl.servers import driver

QUICK = ["execution.backend=inline", "rounds=2", "training.epochs=1", "output.report=false"]


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


Rayfl = Callable[..., Answer]


@pytest.fixture
def rayfl(tmp_path, monkeypatch, capsys) -> Rayfl:
    """Runs the entry point in an empty folder, with nothing in the home folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "no-data"))
    monkeypatch.setenv("COLUMNS", "200")

    def call(*args: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["rayfl", *args])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        captured = capsys.readouterr()
        return Answer(int(caught.value.code or 0), captured.out, captured.err)

    return call


# --- mistakes ------------------------------------------------------------------------------------------

MISTAKES = [
    (["run", "digits-demo", "rounds=x"], "error: rounds: got 'x'; expected an integer >= 1"),
    (["run", "digits-demo", "trainin.lr=1"], "error: trainin: no such setting; did you mean 'training'?"),
    (["run", "digits-dem"], "error: digits-dem: no such preset; did you mean 'digits-demo'?"),
    (
        ["run", "algorithm=cfl", "rounds=2"],
        "error: algorithm=cfl: is a setting, not a config; put a preset or YAML file first, such as "
        "digits-demo",
    ),
    (["run", "no.yaml"], "error: no.yaml: no such file; name a preset or an existing file"),
    (
        ["run", "digits-demo", "rounds"],
        "error: rounds: not an override; expected key=value, e.g. training.lr=0.1",
    ),
    (
        ["run", "digits-demo", "--beside", "fedavg,sol"],
        "error: --beside sol: algorithm: no algorithm named 'sol'; did you mean 'solo'?",
    ),
    (
        ["run", "digits-demo", "clustering.signature.q=7", "--beside", "pacfl"],
        "error: --beside pacfl: clustering.signature.q: no such setting in clustering.signature (subspace); "
        "spectrum has it",
    ),
    (
        ["run", "digits-demo", "--dry-run", "hierarchy.common_layers=[fc9]"],
        "error: hierarchy.common_layers: mlp has no layer 'fc9'; did you mean 'fc2'?",
    ),
    (
        ["run", "digits-demo", "--dry-run", "partition=iid", "partition.clients=5000"],
        "error: partition.clients: 5000 clients for 1438 training samples; use fewer",
    ),
    (
        ["run", "digits-demo", "--dry-run", "clustering.n_clusters=50"],
        "error: clustering.n_clusters: 50 clusters of 20 clients; use at most 20",
    ),
    (
        ["run", "digits-demo", "--dry-run", "clustering.exact_up_to=5"],
        "error: clustering.exact_up_to: 20 clients, and spectrum compares all pairs: ",
    ),
    (
        [
            *("run", "digits-demo", "--dry-run", "partition={name: iid, clients: 4}", "algorithm=pacfl"),
            "clustering={grouping: planted, n_clusters: null}",
        ],
        "error: clustering.grouping: planted needs the true groups; use a partition with groups",
    ),
    (
        ["run", "digits-demo", "--dry-run", "execution.actors=1000"],
        "error: execution.actors: 1,000 actors of ",
    ),
    (["run", "digits-demo", "data=mnist", "--dry-run"], "error: dataset mnist is not in "),
    (["run", "digits-demo", "--beside", "solo", "data=mnist"], "error: dataset mnist is not in "),
    (["list", "partition"], "error: list: no such kind 'partition'; did you mean 'partitions'?"),
    (["prepare", "mnits"], "error: data: no data named 'mnits'; did you mean 'mnist'?"),
    (
        ["prepare", "digits", "foo=1"],
        "error: data.foo: no such setting in data (digits); ",
    ),
    (["resume", "nowhere"], "error: nowhere: no such directory; give the directory of a run"),
    (["report", "."], "error: .: not a run directory; it holds no config.yaml"),
    (["report", "nowhere"], "error: nowhere: no such directory; give the directory of a run"),
    (["compare", "nowhere", "there"], "error: nowhere: no such directory; give the directory of a run"),
    (["run"], "error: Missing argument 'config'; see rayfl run --help"),
    (["run", "digits-demo", "--dryrun"], "error: No such option: --dryrun"),
    (["lisst"], "error: No such command 'lisst'"),
    (["list", "pacfl"], "error: list: no such kind 'pacfl'; rayfl list methods pacfl shows the part"),
    (
        ["run", "digits-demo", "--rounds", "3"],
        "error: No such option: --rounds; settings are written rounds=...; see rayfl run --help",
    ),
    (["compare", "--out"], "error: Option '--out' requires an argument"),
]


@pytest.mark.parametrize(("args", "line"), MISTAKES, ids=[" ".join(args) for args, _ in MISTAKES])
def test_a_mistake_is_one_line_and_leaves_nothing_behind(rayfl, tmp_path, args, line):
    answer = rayfl(*args)
    assert answer.code == 2
    assert answer.err.startswith(line)
    assert answer.err.count("\n") == 1
    assert "Traceback" not in answer.out + answer.err
    assert list(tmp_path.iterdir()) == []


def test_nothing_runs_when_one_of_several_methods_is_refused(rayfl, tmp_path):
    answer = rayfl("run", "digits-demo", *QUICK, "--beside", "solo,nonsense")
    assert (answer.code, answer.out) == (2, "")
    assert list(tmp_path.iterdir()) == []


def test_of_all_methods_those_that_a_setting_does_not_fit_are_left_out_of_a_clustering(rayfl, monkeypatch):
    """Settings on the command line hold for every method; one that is named and does not fit is refused."""
    # FLT's UMAP takes ten seconds, and says nothing here.
    monkeypatch.setattr(Umap, "embed", lambda self, signatures, key=0: [s[:, :2] for s in signatures])
    settings = ["execution.backend=inline", "algorithm=pacfl", "clustering.features=pca"]
    alone = ["cluster", "digits-demo", *settings]
    line = "clustering: features 'pca' would do nothing: signatures 'predictions' do not look at them"
    answer = rayfl(*alone, "--beside", "all")
    assert answer.code == 0
    assert f"left out: flis_hc: {line}" in answer.out
    assert [name for name in ("pacfl", "mt_hfl", "pca_km_hc") if f"│ {name}" in answer.out] == [
        "pacfl",
        "mt_hfl",
        "pca_km_hc",
    ]
    answer = rayfl(*alone, "--beside", "flis_hc")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"error: --beside flis_hc: {line}")


def test_a_config_without_a_method_that_clusters_can_say_how_others_shall(rayfl, tmp_path):
    text = "data: digits\npartition: {name: label_skew, clients: 6, rho: 0.2}\nmodel: mlp\n"
    (tmp_path / "own.yaml").write_text(text + "clustering: {n_clusters: 2}\n")
    answer = rayfl("cluster", "own.yaml", "execution.backend=inline", "--beside", "pacfl")
    assert (answer.code, answer.err) == (0, "")
    assert "│ pacfl" in answer.out
    answer = rayfl("cluster", "own.yaml")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("error: clustering.n_clusters: would do nothing with fedavg")


def test_a_client_error_shows_its_traceback_and_exits_with_1(rayfl, monkeypatch):
    def fail(*args: object, **kwargs: object) -> None:
        raise ClientError(3, 7, "Traceback ...\nValueError: broken")

    monkeypatch.setattr(api, "run", fail)
    answer = rayfl("run", "digits-demo", *QUICK)
    assert answer.code == 1
    assert (
        answer.err
        == "Traceback ...\nValueError: broken\nerror: client 3 failed in round 8: ValueError: broken\n"
    )


def test_what_does_not_fit_into_memory_is_one_line(rayfl, monkeypatch):
    def fill(*args: object, **kwargs: object) -> None:
        raise MemoryError("Unable to allocate 16.0 GiB for an array")

    monkeypatch.setattr(api, "run", fill)
    answer = rayfl("run", "digits-demo", *QUICK)
    line = "error: out of memory: Unable to allocate 16.0 GiB for an array; choose smaller sizes\n"
    assert (answer.code, answer.err) == (2, line)


def test_a_diverged_client_is_one_line(rayfl):
    answer = rayfl("run", "digits-demo", *QUICK, "training.lr=1e38")
    assert answer.code == 1
    assert answer.err.startswith("error: client 0 failed in round 1: FloatingPointError: ")
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize("error", [driver.Interrupted(), KeyboardInterrupt()])
def test_an_interrupt_exits_with_130(rayfl, monkeypatch, error):
    def stop(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(api, "run", stop)
    answer = rayfl("run", "digits-demo", *QUICK)
    assert answer.code == 130
    assert "Traceback" not in answer.err


def test_a_command_that_is_given_again_with_resume_goes_on(rayfl, monkeypatch, tmp_path):
    """Stopped in the second of two runs; the third time nothing is left. Other settings are other runs."""
    command = ["run", "digits-demo", *QUICK, "--beside", "fedavg", "--resume", f"output.root={tmp_path}/runs"]
    whole, rounds = driver.Driver.round, []

    def stop(self: driver.Driver, state: object) -> object:
        rounds.append(self.config.algorithm.name)
        if len(rounds) == 4:
            raise driver.Interrupted
        return whole(self, state)

    with monkeypatch.context() as patch:
        patch.setattr(driver.Driver, "round", stop)
        assert rayfl(*command).code == 130
        assert rayfl(*command).code == 0
        assert rounds == ["mt_hfl", "mt_hfl", "fedavg", "fedavg", "fedavg"]
        again = rayfl(*command)
        assert (again.code, len(rounds)) == (0, 5)
    assert len(list((tmp_path / "runs").glob("*/summary.json"))) == 2
    assert rayfl(*command, "seed=1", "execution.tolerate_failures=1").code == 0
    assert len(list((tmp_path / "runs").glob("*/summary.json"))) == 4


def test_a_bug_is_not_hidden(rayfl, monkeypatch):
    """That is, an error without a line of the user's code in its traceback."""
    monkeypatch.setattr(api, "run", None)
    with pytest.raises(TypeError, match="not callable"):
        rayfl("run", "digits-demo", *QUICK)


# --- looking around ------------------------------------------------------------------------------------


def test_a_reader_that_has_gone_is_no_error():
    read, write = os.pipe()
    os.close(read)  # as of head, which has read enough
    try:
        command = [sys.executable, "-m", "rayfl", "list", "losses"]
        ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(write)
    assert ended.stderr == ""
    assert ended.returncode == 128 + signal.SIGPIPE


def test_help(rayfl):
    assert rayfl("--help") == rayfl()
    answer = rayfl()
    assert answer.code == 0
    for command in ("run", "resume", "prepare", "list", "report", "compare", "doctor"):
        assert command in answer.out
        assert rayfl(command, "--help").code == 0


def test_help_needs_neither_torch_nor_ray():
    """They take seconds to import."""
    code = "import sys, rayfl, rayfl.cli; sys.exit(any(m in sys.modules for m in ('torch', 'ray', 'pandas')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_list_all(rayfl):
    answer = rayfl("list")
    assert answer.code == 0
    for name in (*presets(), "fedavg", "mt_hfl", "lenet5", "digits", "label_skew", "spectrum"):
        assert f"  {name} " in answer.out
    for kind in cli.KINDS:
        assert kind in [line.partition(" (")[0].strip() for line in answer.out.splitlines()]


@pytest.mark.parametrize(
    ("kind", "inside", "outside"),
    [
        ("methods", "pacfl", "lenet5"),
        ("models", "resnet9", "fedavg"),
        ("datasets", "svhn", "iid"),
        ("partitions", "dirichlet", "svhn"),
        ("signatures", "subspace", "digits-demo"),
        ("measures", "emd_classes", "scgiga"),
        ("coresets", "scgiga", "graphs"),
        ("presets", "digits-demo", "lenet5"),
    ],
)
def test_list_one_kind(rayfl, kind, inside, outside):
    answer = rayfl("list", kind)
    assert answer.code == 0
    assert f"  {inside} " in answer.out
    assert f"  {outside} " not in answer.out
    for line in answer.out.splitlines()[1:]:
        assert len(line.split(maxsplit=1)) == 2, f"nothing is said about {line}"


def test_list_says_of_a_preset_what_is_not_the_papers_and_why(rayfl):
    line = " ".join(rayfl("list", "presets").out.split())
    assert "(Sattler et al., Figure 8); 1 setting not the paper's" in line
    answer = rayfl("list", "presets", "pacfl-fmnist")
    assert answer.code == 0
    assert "paper: Vahidian's thesis, Table 3.8" in answer.out
    row = next(line for line in answer.out.splitlines() if line.startswith("│ rounds"))
    assert [cell.strip() for cell in row.split("│")[1:4]] == ["rounds", "200", "30"]
    assert "partition.rho 0.2" in answer.out
    assert "left open by the paper: clustering.proximity: " in answer.out


def test_list_of_one_thing_that_is_not_there(rayfl):
    assert rayfl("list", "presets", "pacfl").err.startswith("error: pacfl: no such preset; did you mean")
    answer = rayfl("list", "models", "lenet")
    assert answer.code == 2
    assert answer.err.startswith("error: lenet: no such part among models; did you mean 'lenet5'")


def test_list_shows_a_part_with_its_settings(rayfl):
    said = rayfl("list", "methods", "pacfl").out
    assert "principal angles" in said
    assert "Cost" in said
    assert "batch normalisation after each convolution" in " ".join(
        rayfl("list", "models", "lenet5").out.split()
    )
    assert "Algorithm 12" in rayfl("list", "coresets", "scgiga").out


def test_list_shows_the_settings_of_a_section_a_line_each(rayfl):
    said = rayfl("list", "methods", "cfl").out
    assert "criteria={" not in said
    assert [line for line in said.splitlines() if "criteria" in line and "name: absolute" in line]
    assert "│ eps1: 0.4" in said


def test_list_schema_is_json(rayfl):
    import json

    assert json.loads(rayfl("list", "--schema").out)["title"] == "Config"


def test_doctor(rayfl, tmp_path):
    answer = rayfl("doctor")
    assert answer.code == 0
    for fact in ("python", "torch", "ray cluster", "data: digits", "cores"):
        assert fact in answer.out
    assert "rayfl prepare mnist" in answer.out
    assert "rayfl prepare ag_news" not in answer.out  # nothing downloads it
    assert "put train.csv" in answer.out
    assert list(tmp_path.iterdir()) == []


def test_prepare_what_is_there(rayfl, tmp_path):
    answer = rayfl("prepare", "digits")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == f"digits is already in {tmp_path / 'no-data'}\n"


@pytest.mark.parametrize("extra", [[], ["--beside", "fedavg,solo"], ["execution.backend=inline"]])
def test_dry_run_prints_a_config_that_can_be_run(rayfl, tmp_path, extra):
    answer = rayfl("run", "digits-demo", "rounds=7", "--dry-run", *extra)
    assert (answer.code, answer.err) == (0, "")
    assert list(tmp_path.iterdir()) == []
    assert "# 20 clients, 20 per round, in at least 4 blocks of 5 on " in answer.out
    parts = ("\n" + answer.out).split("\nname: ")[1:]
    assert len(parts) == (3 if "--beside" in extra else 1)
    (tmp_path / "again.yaml").write_text("name: " + parts[0])
    assert load(tmp_path / "again.yaml") == load("digits-demo", ["rounds=7", *(e for e in extra if "=" in e)])


# --- running -------------------------------------------------------------------------------------------


@pytest.fixture
def finished(rayfl, tmp_path) -> tuple[Answer, list[Path]]:
    """Three methods on the same partition."""
    answer = rayfl("run", "digits-demo", *QUICK, "--beside", "fedavg, solo", "name=demo", "output.root=there")
    return answer, sorted(p for p in (tmp_path / "there").iterdir() if p.is_dir())


def test_run_beside(finished, tmp_path):
    answer, runs = finished
    assert (answer.code, answer.err) == (0, "")
    names = [f"demo-{method}-epochs=1-seed0" for method in ("fedavg", "mt_hfl", "solo")]
    assert [p.name.rsplit("-", 2)[0] for p in runs] == names
    for run in runs:
        assert f"run directory: {run.relative_to(tmp_path)}" in answer.out
    assert "comparison: there/demo-comparison.html" in answer.out
    assert (tmp_path / "there" / "demo-comparison.html").is_file()
    assert answer.out.count("round   2/2") == 3
    # the table: one row a method in the order asked for, the clusters of the one that clusters
    rows = [line.split("│")[1:-1] for line in answer.out.splitlines() if "│" in line]
    cells, groups = ([[cell.strip() for cell in row] for row in part] for part in (rows[:3], rows[3:]))
    assert [row[0] for row in cells] == ["mt_hfl", "fedavg", "solo"]
    assert cells[0][1:3] == ["3", "1.00"]
    assert cells[1][1:3] == ["–", "–"]
    assert cells[2][6:8] == ["0 B", "0 B"]
    # and one row a planted group, with a column a method
    names = ["0, 10 clients", "1, 6 clients", "2, 4 clients", "variance within", "variance between"]
    assert [row[0] for row in groups] == names
    assert {len(row) for row in groups} == {4}
    # the same partition
    sizes = [pd.read_csv(run / "clients.csv")[["n", "group", "test_samples"]] for run in runs]
    assert sizes[0].equals(sizes[1])
    assert sizes[0].equals(sizes[2])


def test_one_run_names_its_report(rayfl, tmp_path):
    answer = rayfl("run", "digits-demo", *QUICK[:3], "output.report=true", "output.root=a[b]")
    assert answer.code == 0
    (run,) = (tmp_path / "a[b]").iterdir()
    assert f"report: {run.relative_to(tmp_path)}/report.html" in answer.out
    assert "comparison" not in answer.out


@pytest.mark.parametrize("mistake", ["partition={name: iid, clients: 5000}", "hierarchy.common_layers=[fc9]"])
def test_what_only_the_data_show_leaves_no_run_directory(rayfl, tmp_path, mistake):
    answer = rayfl("run", "digits-demo", *QUICK, mistake)
    assert answer.code == 2
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1
    assert list(tmp_path.glob("runs/*")) == []


def test_what_can_be_done_with_finished_runs(finished, rayfl, tmp_path, monkeypatch):
    runs = finished[1]
    before = (runs[0] / "summary.json").read_text()
    answer = rayfl("resume", str(runs[0]))
    assert answer.code == 0
    assert "all 2 rounds are complete; nothing to resume" in answer.out
    assert (runs[0] / "summary.json").read_text() == before

    answer = rayfl("resume", str(runs[0]), "training.lr=0.5")
    assert answer.code == 2
    assert "training.lr=0.5: cannot be changed in a resumed run" in answer.err
    assert rayfl("resume", str(runs[0]), "roundz=5").code == 2
    answer = rayfl("resume", str(runs[0]), str(runs[1]))  # as a pattern of the shell may give them
    assert answer.code == 2
    assert f"{runs[1]}: one run at a time can be resumed" in answer.err

    answer = rayfl("resume", str(runs[0]), "rounds=3")
    assert answer.code == 0
    assert "resuming: 2 of 3 rounds are complete" in answer.out
    assert len(pd.read_csv(runs[0] / "rounds.csv")) == 3

    # as shells leave it in quotes and after --out=
    monkeypatch.setenv("HOME", str(tmp_path))
    answer = rayfl("report", f"~/there/{runs[1].name}")
    assert (answer.code, answer.out) == (0, f"report: {runs[1].relative_to(tmp_path)}/report.html\n")
    assert (runs[1] / "report.html").stat().st_size > 10_000

    answer = rayfl("compare", str(runs[0]))
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "is one run; name two or more; rayfl report shows one" in answer.err
    answer = rayfl("compare", *map(str, runs), "--out=~/page/side.html")
    assert answer.code == 0
    assert not (tmp_path / "~").exists()
    assert api.Result(f"~/there/{runs[1].name}").path == runs[1]
    assert (tmp_path / "page" / "side.html").is_file()
    assert len(pd.read_csv(tmp_path / "page" / "side.csv")) == 3
    assert "not ranked" not in answer.out
    assert "planted group" in answer.out

    config = runs[1] / "config.yaml"
    config.write_text(config.read_text().replace("\nseed: 0\n", "\nseed: 7\n"))
    answer = rayfl("compare", *map(str, runs), "--out", "page/side.html")
    others = f"{runs[0].name}, {runs[2].name}"
    lines = answer.out.splitlines()
    assert lines[0].startswith("not ranked: these runs do not have the same clients with the same data")
    assert lines[1] == f"  seed: 0 ({others}); 7 ({runs[1].name})"
    assert lines[2].startswith("┏")
    assert "planted group" not in answer.out  # the groups are others
    assert "Not ranked" in (tmp_path / "page" / "side.html").read_text()

    (runs[2] / "summary.json").unlink()
    answer = rayfl("compare", *map(str, runs), "--out", "other.html")
    assert answer.code == 2
    assert "is not finished; resume with: rayfl resume " in answer.err
    assert not (tmp_path / "other.html").exists()


FAULTY = """
import os
import pickle
from typing import Literal

from rayfl.algorithms.fedavg import FedAvg


class Faulty(FedAvg):
    name: Literal["faulty_mix"] = "faulty_mix"
    how: str

    def mix(self, setup, state, plan, reports):
        if self.how == "end of file":
            pickle.loads(b"")
        if self.how == "broken pipe":
            raise BrokenPipeError(32, "Broken pipe")
        raise KeyboardInterrupt
"""


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("end of file", 1, "EOFError: Ran out of input"),
        ("broken pipe", 1, "BrokenPipeError: [Errno 32] Broken pipe"),
        ("interrupt", 130, "interrupted"),
    ],
)
def test_errors_of_users_code_are_not_taken_for_the_end_of_the_terminal(
    how, code, text, rayfl, tmp_path, forgotten_parts
):
    file = tmp_path / f"faulty_{how.replace(' ', '_')}.py"
    file.write_text(FAULTY)
    method = f"algorithm={{name: faulty_mix, how: {how}}}"
    answer = rayfl("run", "digits-demo", "--plugin", file.name, method, *QUICK)
    assert answer.code == code
    expected = text if code == 130 else rf"error: mix, .*{file.name}:1\d: {re.escape(text)}"
    assert re.fullmatch(expected, answer.err.splitlines()[-1])


def test_the_installed_command(tmp_path):
    """Once as a process: the exit code and the two streams."""
    command = [sys.executable, "-m", "rayfl.cli", "run", "digits-demo", "rounds=x"]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr == "error: rounds: got 'x'; expected an integer >= 1\n"

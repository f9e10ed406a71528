"""Loggers: what they are told, that a run goes on without them, and resumes with the same."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import rayfl
from rayfl import plugins
from rayfl.errors import ConfigError
from rayfl.loggers import LOGGERS, LoggedRun, OpenLoggers
from rayfl.loggers.base import environment
from rayfl.loggers.mlflow import MLflow, _absolute
from rayfl.loggers.wandb import Wandb


def logging(settings: dict[str, Any], *loggers: Any, **output: Any) -> dict[str, Any]:
    return {**settings, "output": {**settings["output"], "loggers": list(loggers), **output}}


def notes(settings: dict[str, Any]) -> tuple[rayfl.Result, list[str]]:
    seen: list[rayfl.RunEvent] = []
    found = rayfl.run(settings, on_event=seen.append)
    return found, [event.text for event in seen if isinstance(event, rayfl.Note)]


def stopped(settings: dict[str, Any]) -> Path:
    """The directory of a run that was stopped after its first round."""
    paths: list[Path] = []

    def watch(event: rayfl.RunEvent) -> None:
        if isinstance(event, rayfl.RoundDone):
            raise KeyError
        if isinstance(event, rayfl.Begun):
            paths.append(event.path)

    with pytest.raises(KeyError):
        rayfl.run(settings, on_event=watch)
    return paths[0]


class Fake:
    """A module that notes what is called: names and arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
        self.calls: list[tuple[str, Any]] = []
        for each in (name, f"{name}.entities"):
            module = ModuleType(each)
            module.__spec__ = ModuleSpec(each, None)
            vars(module).update(members)
            monkeypatch.setitem(sys.modules, each, module)

    def called(self, name: str) -> list[Any]:
        return [arguments for what, arguments in self.calls if what == name]


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """MLflow's client and entities, as far as the logger uses them."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    fake: Fake

    class MlflowClient:
        def __init__(self, tracking_uri: str) -> None:
            fake.calls.append(("client", tracking_uri))

        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
            fake.calls.append(("create_run", (experiment, run_name)))
            return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

        def __getattr__(self, name: str) -> Any:
            def call(*args: Any, **named: Any) -> str:
                fake.calls.append((name, (*args, *named.values())))
                return "e1"

            return call

    fake = Fake(
        monkeypatch,
        "mlflow",
        MlflowClient=MlflowClient,
        Param=lambda key, value: (key, value),
        Metric=lambda key, value, time, step: (key, value, step),
    )
    return fake


def test_mlflow_has_settings_curves_and_closing_numbers(mlflow: Fake, settings: dict[str, Any]) -> None:
    found = rayfl.run(logging(settings, {"name": "mlflow", "experiment": "mine"}))
    assert mlflow.called("client") == [f"sqlite:///{found.path.parent}/mlflow.db"]
    ((name, artifacts),) = mlflow.called("create_experiment")
    assert (name, artifacts) == ("mine", (found.path.parent / "mlartifacts").as_uri())
    assert mlflow.called("create_run") == [("e1", found.path.name)]
    batches = [entries for _, entries in mlflow.called("log_batch")]
    parameters = dict(entry for batch in batches for entry in batch if len(entry) == 2)
    assert parameters["training.lr"] == "0.05"
    assert parameters["algorithm.name"] == "fedavg"
    metrics = [entry for batch in batches for entry in batch if len(entry) == 3]
    losses = [(value, step) for name, value, step in metrics if name == "train_loss"]
    assert losses == list(zip(found.rounds["train_loss"], range(3), strict=True))
    assert ("final/accuracy_mean", found.summary["accuracy_mean"], 0) in metrics
    assert mlflow.called("set_tag") == [("r1", "models_sha256", found.summary["models_sha256"])]
    assert mlflow.called("set_terminated") == [("r1", "FINISHED")]


def test_a_resumed_run_goes_on_with_the_same_run_of_mlflow(mlflow: Fake, settings: dict[str, Any]) -> None:
    path = stopped(logging(settings, "mlflow"))
    assert mlflow.called("set_terminated") == [("r1", "KILLED")]
    rayfl.resume(path)
    assert len(mlflow.called("create_run")) == 1
    assert mlflow.called("update_run") == [("r1", "RUNNING")]
    assert mlflow.called("set_terminated")[-1] == ("r1", "FINISHED")
    assert sum(any(len(e) == 2 for e in entries) for _, entries in mlflow.called("log_batch")) == 1


def test_where_mlflow_keeps_its_runs() -> None:
    folder = Path("/runs")
    assert _absolute("sqlite:///a.db", folder) == "sqlite:////runs/a.db"
    assert _absolute("sqlite:////x/a.db", folder) == "sqlite:////x/a.db"
    assert _absolute("mlruns", folder) == "/runs/mlruns"
    for same in ("http://host:5000", "databricks", "databricks://profile", "file:///x"):
        assert _absolute(same, folder) == same


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake: Fake

    def init(**settings: Any) -> Any:
        fake.calls.append(("init", settings))
        summary = SimpleNamespace(update=lambda values: fake.calls.append(("summary", values)))
        return SimpleNamespace(
            log=lambda values, step: fake.calls.append(("log", (step, values))),
            finish=lambda exit_code: fake.calls.append(("finish", exit_code)),
            summary=summary,
        )

    fake = Fake(monkeypatch, "wandb", init=init, Settings=dict)
    return fake


def test_wandb_goes_on_with_the_same_run(wandb: Fake, settings: dict[str, Any]) -> None:
    path = stopped(logging(settings, {"name": "wandb", "project": "mine", "mode": "offline"}))
    found = rayfl.resume(path)
    first, second = wandb.called("init")
    assert first["id"] == second["id"]
    assert (first["project"], first["resume"], first["dir"]) == ("mine", "allow", str(path))
    assert first["config"]["training"]["lr"] == 0.05
    assert [step for step, _ in wandb.called("log")] == [0, 1, 2]
    assert [v["train_loss"] for _, v in wandb.called("log")] == found.rounds["train_loss"].tolist()
    (closing,) = wandb.called("summary")
    assert closing["final/accuracy_mean"] == found.summary["accuracy_mean"]
    assert wandb.called("finish") == [1, 0]


def test_a_library_that_is_not_installed_is_one_line(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("mlflow", "wandb"):
        with pytest.raises(ConfigError) as raised:
            rayfl.run(logging(settings, name))
        remedy = f"pip install 'rayfl[{name}]'"
        assert str(raised.value) == f"output.loggers: {name} needs {name}, which is not installed; {remedy}"
    assert not list(Path(settings["output"]["root"]).iterdir())


MINE = '''
from typing import Literal

from rayfl import RoundDone
from rayfl.loggers import Log, Logger


class Writing(Log):
    def __init__(self, run, breaks):
        self.run, self.breaks = run, breaks
        if breaks == "open":
            raise ConnectionError("no answer from\\nthe tracker")

    def write(self, event):
        if isinstance(event, RoundDone):
            if self.breaks == "write" and event.round == 1:
                raise ConnectionError("no answer")
            with (self.run.path / "mine.txt").open("a") as file:
                file.write(f"{event.round} ")

    def close(self):
        if self.breaks == "close":
            raise ConnectionError("no answer")


class Mine(Logger):
    """Numbers of rounds in a file."""

    name: Literal["mine"] = "mine"
    breaks: str = ""

    def open(self, run):
        return Writing(run, self.breaks)
'''


@pytest.fixture
def mine(tmp_path: Path) -> Any:
    (tmp_path / "my_logger.py").write_text(MINE)
    yield {"plugins": [str(tmp_path / "my_logger.py")]}
    LOGGERS.withdraw("mine")
    sys.modules.pop("my_logger", None)
    plugins._loaded.pop("my_logger", None)
    sys.path[:] = [path for path in sys.path if path != str(tmp_path)]


def test_a_plug_in_brings_a_logger_and_its_trouble_is_not_the_runs(
    mine: dict[str, Any], settings: dict[str, Any]
) -> None:
    expected = rayfl.run(settings).summary["models_sha256"]
    written = {"": "0 1 2 ", "open": None, "write": "0 ", "close": "0 1 2 "}
    lines = {
        "": [],
        "open": ["logger mine: ConnectionError: no answer from the tracker; the run goes on without it"],
        "write": ["logger mine: ConnectionError: no answer; the run goes on without it"],
        "close": ["logger mine: could not be closed (ConnectionError: no answer)"],
    }
    for breaks, text in written.items():
        found, said = notes({**logging(settings, {"name": "mine", "breaks": breaks}), **mine})
        assert found.summary["models_sha256"] == expected
        file = found.path / "mine.txt"
        assert (file.read_text() if file.exists() else None) == text
        assert [line for line in said if "logger" in line] == lines[breaks]


def test_tensorboard_is_a_logger_that_is_on_unless_it_is_switched_off() -> None:
    def names(**output: Any) -> list[str]:
        return [logger.name for logger in rayfl.load({"output": output}).output.all_loggers]

    assert names() == ["tensorboard"]
    assert names(loggers=["mlflow", "wandb"]) == ["tensorboard", "mlflow", "wandb"]
    assert names(loggers=["mlflow", "tensorboard"]) == ["mlflow", "tensorboard"]
    assert names(tensorboard=False, loggers=["wandb"]) == ["wandb"]
    for output, text in (
        ({"loggers": ["wandb", {"name": "wandb", "project": "x"}]}, "'wandb' is named twice"),
        ({"loggers": ["tensorboard"], "tensorboard": False}, "'loggers' names it; leave one of them out"),
        ({"loggers": ["mlfow"]}, "no logger named 'mlfow'; did you mean 'mlflow'?"),
        ({"loggers": ["xml"]}, "no logger named 'xml'"),
        ({"loggers": "mlflow"}, "expected a list of items, each one of csv, mlflow"),
    ):
        with pytest.raises(ConfigError, match=r"^output") as raised:
            names(**output)
        assert text in str(raised.value)
        assert "\n" not in str(raised.value)


def test_tensorboard_has_a_curve_of_each_number(tmp_path: Path) -> None:
    read = pytest.importorskip("tensorboardX.proto.event_pb2").Event
    log = OpenLoggers([LOGGERS["tensorboard"]()], LoggedRun(tmp_path, {}), lambda event: None)
    for round, accuracy in enumerate((50.0, 62.5)):
        log(rayfl.RoundDone(round, 2, {"train_loss": 1.5, "accuracy_mean": accuracy, "estimated_from": 8}))
    log.close()
    (file,) = tmp_path.glob("events.out.*")
    data, place, found = file.read_bytes(), 0, []
    while place < len(data):  # length, its checksum, the event, its checksum
        size = int.from_bytes(data[place : place + 8], "little")
        event = read.FromString(data[place + 12 : place + 12 + size])
        found += [(value.tag, value.simple_value, event.step) for value in event.summary.value]
        place += 16 + size
    assert found == [
        (tag, value, step)
        for step, accuracy in enumerate((50.0, 62.5))
        for tag, value in (("train_loss", 1.5), ("estimated/accuracy_mean", accuracy))
    ]


def test_the_tables_may_be_named_among_the_loggers(settings: dict[str, Any]) -> None:
    found, said = notes(logging(settings, "csv"))
    assert not any("csv" in line for line in said)
    assert len(found.rounds) == found.summary["rounds"]
    assert (found.path / "rounds.csv").is_file()


def test_variables_of_loggers_go_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t")
    assert environment([]) == {}
    assert environment([Wandb()]).get("WANDB_MODE") == "offline"
    assert "MLFLOW_TRACKING_TOKEN" not in environment([Wandb()])
    assert environment([MLflow()])["MLFLOW_TRACKING_TOKEN"] == "t"


def test_a_damaged_memory_of_loggers_is_begun_anew(tmp_path: Path) -> None:
    run = LoggedRun(tmp_path, {})
    run.remember("a", {"id": 1})
    run.remember("b", {"id": 2})
    assert (run.remembered("a"), run.remembered("b")) == ({"id": 1}, {"id": 2})
    (tmp_path / "loggers.json").write_text("{")
    assert run.remembered("a") == {}


def test_mlflow_itself(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a local store; skipped where MLflow is not installed."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    path = stopped(logging(settings, {"name": "mlflow", "tracking_uri": "sqlite:///own.db"}))
    found = rayfl.resume(path)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{path.parent}/own.db")
    (run,) = client.search_runs([client.get_experiment_by_name("rayfl").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", path.name)
    assert run.data.params["training.lr"] == "0.05"
    losses = client.get_metric_history(run.info.run_id, "train_loss")
    assert [entry.value for entry in losses] == found.rounds["train_loss"].tolist()
    assert run.data.tags["models_sha256"] == found.summary["models_sha256"]


def test_wandb_itself(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline; skipped where it is not installed."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    path = stopped(logging(settings, "wandb"))
    rayfl.resume(path)
    number = LoggedRun(path, {}).remembered("wandb")["id"]
    assert len(list(path.glob(f"wandb/offline-run-*-{number}/run-{number}.wandb"))) == 2

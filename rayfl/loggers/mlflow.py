"""MLflow: a run in an experiment, with the settings as parameters and the curves as metrics."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from rayfl.events import Finished, RoundDone, RunEvent, Stopped
from rayfl.loggers.base import Log, LoggedRun, Logger, require

_MAX_PARAMETERS = 100
"""Maximum number of parameters in one call of MLflow."""

_MAX_LENGTH = 500
"""Maximum length of a parameter that every version of MLflow accepts."""


class MLflow(Logger):
    """MLflow (``pip install 'rayfl[mlflow]'``): settings, curves and closing numbers of the run.

    A resumed run continues the same MLflow run. Give credentials in MLflow's environment variables
    (``MLFLOW_TRACKING_USERNAME``, ...), not in the config, which is written to ``config.yaml``.
    """

    name: Literal["mlflow"] = "mlflow"
    experiment: str = Field("rayfl", min_length=1, description="its name; created if it does not exist")
    tracking_uri: str | None = Field(
        None,
        description="a server or a store, such as sqlite:///mlflow.db (relative to the folder of the run "
        "directories); by default MLFLOW_TRACKING_URI, or else mlflow.db in that folder",
    )
    variables: ClassVar[tuple[str, ...]] = ("MLFLOW_", "DATABRICKS_")

    def check(self) -> None:
        """Refuse if MLflow is not installed."""
        require("mlflow", "mlflow")

    def open(self, run: LoggedRun) -> Log:
        """Create the run, or continue that of an earlier start."""
        # By default MLflow tries for minutes to reach a server, while the run would wait.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow import MlflowClient

        folder = run.path.parent
        uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        client = MlflowClient(tracking_uri=_absolute(uri, folder))
        earlier_id = run.remembered(self.name).get("run_id")
        if earlier_id is not None:
            client.update_run(earlier_id, status="RUNNING")
            return _Run(client, earlier_id)
        existing = client.get_experiment_by_name(self.experiment)
        if existing is None:
            local = "://" not in uri or uri.startswith(("sqlite:", "file:"))
            artifacts = (folder / "mlartifacts").as_uri() if local else None
            experiment = client.create_experiment(self.experiment, artifact_location=artifacts)
        else:
            experiment = existing.experiment_id
        tags = {"rayfl.run_directory": str(run.path)}
        run_id = client.create_run(experiment, run_name=run.path.name, tags=tags).info.run_id
        run.remember(self.name, {"run_id": run_id})
        log = _Run(client, run_id)
        log.parameters(run.settings())
        return log


def _absolute(uri: str, folder: Path) -> str:
    """The address of a store with an absolute path: the driver may run in another folder."""
    prefix = "sqlite:///"
    if uri.startswith(prefix):
        return f"{prefix}{folder / uri[len(prefix) :]}"
    return uri if ":" in uri or uri == "databricks" else str(folder / uri)


class _Run(Log):
    """An open run of MLflow; its client has no global state."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id, self._status = client, run_id, "FAILED"

    def parameters(self, settings: dict[str, Any]) -> None:
        """Write the settings; in MLflow they cannot change later."""
        from mlflow.entities import Param

        params = [Param(name, str(value)[:_MAX_LENGTH]) for name, value in settings.items()]
        for first in range(0, len(params), _MAX_PARAMETERS):
            self._client.log_batch(self._run_id, params=params[first : first + _MAX_PARAMETERS])

    def write(self, event: RunEvent) -> None:
        """Curves by round, and the closing numbers as ``final/<name>``."""
        match event:
            case RoundDone(round=round):
                self._metrics(event.curves, round)
            case Finished():
                self._metrics({f"final/{name}": value for name, value in event.numbers.items()}, 0)
                self._client.set_tag(self._run_id, "models_sha256", event.summary["models_sha256"])
                self._status = "FINISHED"
            case Stopped(repeats=repeats):
                self._status = "FAILED" if repeats else "KILLED"

    def _metrics(self, values: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._run_id, metrics=[Metric(k, v, now, step) for k, v in values.items()])

    def close(self) -> None:
        """Set the final status of the run."""
        self._client.set_terminated(self._run_id, status=self._status)

"""Weights & Biases: a run in a project, online or offline."""

from __future__ import annotations

import uuid
from typing import Any, ClassVar, Literal

from pydantic import Field

from rayfl.events import Finished, RoundDone, RunEvent
from rayfl.loggers.base import Log, LoggedRun, Logger, require


class Wandb(Logger):
    """Weights & Biases (``pip install 'rayfl[wandb]'``): settings, curves and closing numbers of the run.

    A resumed run continues the same W&B run. Log in with ``wandb login`` or ``WANDB_API_KEY``.
    """

    name: Literal["wandb"] = "wandb"
    project: str = Field("rayfl", min_length=1, description="its name; created if it does not exist")
    entity: str | None = Field(None, description="user or team; by default your own")
    mode: Literal["online", "offline", "shared", "disabled"] | None = Field(
        None,
        description="offline: write to the run directory, for 'wandb sync'; default: WANDB_MODE",
    )
    variables: ClassVar[tuple[str, ...]] = ("WANDB_",)

    def check(self) -> None:
        """Refuse if the library is not installed."""
        require("wandb", "wandb")

    def open(self, run: LoggedRun) -> Log:
        """Create the run, or continue that of an earlier start, whose id is stored in the run directory."""
        import wandb

        run_id = run.remembered(self.name).get("id")
        if run_id is None:
            run_id = uuid.uuid4().hex[:12]
            run.remember(self.name, {"id": run_id})
        return _Run(
            wandb.init(
                project=self.project,
                entity=self.entity,
                name=run.path.name,
                id=run_id,
                resume="allow",
                reinit="create_new",  # a run that the user has open stays open
                config=dict(run.config),
                dir=str(run.path),
                mode=self.mode,
                settings=wandb.Settings(console="off", silent=True, init_timeout=30),
            )
        )


class _Run(Log):
    """An open run of Weights & Biases."""

    def __init__(self, run: Any) -> None:
        self._run, self._finished = run, False

    def write(self, event: RunEvent) -> None:
        """Curves by round, and the closing numbers as ``final/<name>`` of the summary."""
        match event:
            case RoundDone(round=round):
                self._run.log(event.curves, step=round)
            case Finished():
                closing = {f"final/{name}": value for name, value in event.numbers.items()}
                self._run.summary.update({**closing, "models_sha256": event.summary["models_sha256"]})
                self._finished = True

    def close(self) -> None:
        """Send what is left."""
        self._run.finish(exit_code=0 if self._finished else 1)

"""``rayfl bench CONFIG``: a config of the user's against the plain loop."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rayfl import plugins
from rayfl.config import Config, load
from rayfl.data import Federation
from rayfl.errors import ConfigError
from rayfl.models import ModelSpec
from rayfl.servers.building import check, divide

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rayfl.bench.naive import Reader

_ENDLESS = 1_000_000
"""Upper limit on rounds; the benchmark stops when it has measured enough."""


@dataclass(frozen=True)
class OwnWorkload:
    """A config as a workload; the plain loop runs FedAvg with its clients, network, loss and local SGD.

    Attributes:
        given: a preset's name or a YAML file.
        overrides: dotted settings.
        name, about: for tables.
        clients, cohort: N, and clients per round.
        steps: client-steps of a round, if its clients have the average number of samples.
        training: epochs, batch size, learning rate, momentum and weight decay.
    """

    given: str
    overrides: Sequence[str]
    name: str
    about: str
    clients: int
    cohort: int
    steps: int
    training: dict[str, Any]

    @classmethod
    def of(cls, given: str, overrides: Sequence[str] = ()) -> OwnWorkload:
        """Read the config and its data.

        Raises:
            ConfigError, DataError: as ``rayfl run``.
        """
        for name in (override.split("=")[0].strip() for override in overrides):
            if name == "rounds":
                raise ConfigError(name, "has no effect in a benchmark", "use --rounds")
            if name == "evaluation.every" or name.partition(".")[0] == "output":
                raise ConfigError(name, "has no effect in a benchmark", "leave it out")
        config = load(given, overrides)
        # Other processes, which measure the plain loop and the start-up, have not been told of them.
        if brought := [plugin.named for plugin in plugins.loaded()]:
            overrides = [*overrides, f"plugins={json.dumps(brought)}"]
        check(config)
        sizes = _federation_and_model(given, tuple(overrides))[0].sizes
        training = config.training
        cohort = training.cohort(len(sizes))
        steps = cohort * training.epochs * np.ceil(sizes / training.batch_size).mean()
        keys = ("epochs", "batch_size", "lr", "momentum", "weight_decay")
        about = f"{config.algorithm.name}, {config.model.name_of()}, {cohort} of {len(sizes)} clients"
        return cls(
            given=given,
            overrides=list(overrides),
            name=config.name,
            about=about,
            clients=len(sizes),
            cohort=cohort,
            steps=round(steps),
            training={key: getattr(training, key) for key in keys},
        )

    def config(self, folder: Path, **execution: Any) -> Config:
        """The config with an unlimited number of rounds and without tests, reports and checkpoints."""
        output = [f"output.{key}=false" for key in ("tensorboard", "report")]
        return load(
            self.given,
            [
                *self.overrides,
                f"rounds={_ENDLESS}",
                f"evaluation.every={_ENDLESS}",
                f"output.root={folder}",
                "output.checkpoint_every=0",
                *output,
                *(f"execution.{key}={value}" for key, value in execution.items()),
            ],
        )

    def refuse_gpu(self) -> None:
        """Refuse a config that trains on a GPU, which cannot be compared with a plain loop on the CPU.

        Raises:
            ConfigError: if the config trains on a GPU of this machine.
        """
        import torch

        if load(self.given, self.overrides).execution.wants_gpu and torch.cuda.is_available():
            raise ConfigError(
                "--device", f"{self.name} trains on a GPU", "use --device=cuda, or set execution.device=cpu"
            )

    def network(self) -> nn.Module:
        """See :class:`~rayfl.bench.naive.Plain`."""
        return _federation_and_model(self.given, tuple(self.overrides))[1].build()

    def reader(self) -> Reader:
        """Reads a client's samples, scaled as rayfl does."""
        import torch

        from rayfl.training.batches import Batches

        federation = _federation_and_model(self.given, tuple(self.overrides))[0]
        batches = Batches(federation.samples, torch.device("cpu"))

        def read(client: int) -> tuple[Tensor, Tensor]:
            return batches.train(federation.train[client])

        return read

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The config's loss; shapes as in :class:`~rayfl.losses.Loss`: ``(B, C)``, ``(B,)``."""
        return _federation_and_model(self.given, tuple(self.overrides))[1].loss.mean(outputs, targets)


@functools.cache
def _federation_and_model(given: str, overrides: tuple[str, ...]) -> tuple[Federation, ModelSpec]:
    """The clients' data and the model, computed once per process."""
    stages, spec = divide(load(given, overrides))
    return stages[0].federation, spec

"""The results of a run: tables, models, figures."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfl.config import Config
from rayfl.data.arrays import as_tokens
from rayfl.data.events import client_number
from rayfl.data.scaling import Scaling
from rayfl.errors import ConfigError, Damaged, RayflError, nearest
from rayfl.rundir import RunDirectory
from rayfl.servers.building import build
from rayfl.servers.driver import Driver, tensors_of

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import torch
    from numpy.typing import NDArray
    from torch import nn

    from rayfl.clients.jobs import HostSpec
    from rayfl.data.events import Stage
    from rayfl.report.plots import Plots

_BATCH = 500
"""Samples per forward pass."""


@dataclass(frozen=True, init=False)
class Result:
    """A finished (or stopped) run, read from its directory.

    Attributes:
        path: the run directory.
    """

    path: Path
    _kept: dict[str, tuple[tuple[int, int] | None, Any]] = field(repr=False, compare=False)

    def __init__(self, path: Path | str) -> None:
        object.__setattr__(self, "path", Path(os.path.expanduser(path)))
        object.__setattr__(self, "_kept", {})

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from rayfl.report.html import summary_html

        return summary_html(self.path)

    @property
    def plot(self) -> Plots:
        """Figures of the run: ``result.plot.accuracy()``, ``result.plot.clusters()``."""
        from rayfl.report.plots import Plots

        return Plots(self.path)

    @property
    def config(self) -> Config:
        """The resolved config."""
        return RunDirectory(self.path).config

    @property
    def rounds(self) -> pd.DataFrame:
        """One row per round."""
        frame: pd.DataFrame = self._read("rounds.csv", RunDirectory(self.path).read_frame)
        return frame

    @property
    def groups(self) -> pd.DataFrame:
        """Accuracy by planted group and by cluster: one row for each of them in every tested round."""
        frame: pd.DataFrame = self._read("groups.csv", RunDirectory(self.path).read_frame)
        return frame

    @property
    def clients(self) -> pd.DataFrame:
        """One row per client: size, group, cluster, last and best accuracy."""
        frame: pd.DataFrame = self._read("clients.csv", RunDirectory(self.path).read_frame)
        return frame

    @property
    def communication(self) -> pd.DataFrame:
        """Bytes by round, tier, direction and kind."""
        frame: pd.DataFrame = self._read("communication.csv", RunDirectory(self.path).read_frame)
        return frame

    @property
    def clusters(self) -> dict[str, Any]:
        """The planted groups, and the clusters over time."""
        return dict(self._read("clusters.json", RunDirectory(self.path).read_json) or {})

    def client_model(self, client: int | str, finetuned: bool = False) -> dict[str, torch.Tensor]:
        """The model with which a client was last tested, see :func:`client_models`."""
        return next(client_models(self.path, [client], finetuned))[1]

    def model(
        self, client: int | str | None = None, cluster: int | str | None = None, finetuned: bool = False
    ) -> nn.Module:
        """A trained network, in evaluation mode on the CPU; :attr:`scaling` prepares its inputs.

        Args:
            client: take the model with which this client was last tested, see :func:`client_models`.
            cluster: take the server's model of this cluster; ``0`` if there is one model for all clients.
                With several edges give the suffix of the file in ``models/``, such as ``"0_edge_1"``.
            finetuned: take the client's model after ``evaluation.finetune_epochs``.

        Raises:
            ConfigError: unless exactly one of ``client`` and ``cluster`` is given and exists, or if a
                cluster's model should be fine-tuned.
            RayflError: if the run has no models: it is not finished, or comes from an archive.
        """
        from safetensors.torch import load_file

        if (client is None) == (cluster is None):
            raise ConfigError("model", "takes either a client or a cluster", "as in model(client=3)")
        if cluster is not None and finetuned:
            what = "clients fine-tune models, a cluster has only the server's"
            raise ConfigError("model", what, "leave finetuned out, or name a client")
        _, host = self._built
        if client is not None:
            tensors = self.client_model(client, finetuned)
        else:
            file = self.path / "models" / f"model_{cluster}.safetensors"
            if not file.is_file():
                clusters = sorted(
                    f.stem.removeprefix("model_") for f in file.parent.glob("model_*.safetensors")
                )
                if not clusters:
                    directory = RunDirectory(self.path)
                    if (self.path / "checkpoints").is_dir() and not self.summary:
                        what = "is not finished, and has no models of clusters yet"
                        raise RayflError(f"{self.path}: {what}; resume with: {directory.resume}")
                    raise directory.without_checkpoint()  # as for a client
                remedy = nearest(str(cluster), clusters)
                raise ConfigError(str(self.path), f"there is no cluster {cluster!r}", remedy)
            tensors = load_file(file)
        module = host.spec.build()
        module.load_state_dict(tensors, strict=False)  # BatchNorm's batch counters are not averaged or saved
        return module.eval()

    def predict(
        self,
        x: NDArray[np.generic] | pd.DataFrame,
        client: int | str | None = None,
        cluster: int | str | None = None,
    ) -> NDArray[np.generic]:
        """The classes that a model predicts; with numeric losses, its outputs.

        Args:
            x: inputs as the dataset stores them ``(n, *shape)``; the run's :attr:`scaling` is applied to
                them. Images may also be ``(n, H, W)`` or ``(n, H, W, C)``. If the run's data are a table,
                a data frame with the same columns of features is also accepted.
            client, cluster: whose model, see :meth:`model`.

        Returns:
            Classes ``(n,)``; for language models words ``(n, L)``; with numeric losses floats ``(n, K)``.

        Raises:
            ConfigError: as :meth:`model`, or if the inputs have another shape than the run's, or only one of
                the two consists of pixels (uint8), or values are not finite.
            DataError: if a table lacks a column, or has a value that the run's table has not; or if texts are
                no tokens.
        """
        import numpy as np
        import pandas as pd
        import torch

        from rayfl.models.base import task_of

        module, (_, host) = self.model(client, cluster), self._built
        shape = tuple(host.spec.shape)
        if isinstance(x, pd.DataFrame):
            x = RunDirectory.open(self.path).config.data.inputs_of(x)
        x = _channels_first(_plain(x), shape)
        if np.shape(x)[1:] != shape:
            raise ConfigError(
                "predict", f"inputs of shape {np.shape(x)}", f"they must be (n, {', '.join(map(str, shape))})"
            )
        task, numeric = task_of(host.spec.model), host.spec.loss.numeric
        if self.scaling.of_pixels and x.dtype.kind in "iu" and x.size and x.min() >= 0 and x.max() <= 255:
            x = x.astype(np.uint8)  # as images given as such integers are stored
        if task == "numbers" and (np.asarray(x).dtype == np.uint8) != self.scaling.of_pixels:
            kinds = ("floats", "uint8 from 0 to 255")
            raise ConfigError(
                "predict",
                f"inputs of {np.asarray(x).dtype}; the run's are {kinds[self.scaling.of_pixels]}",
                "give them as the dataset stores them",
            )
        if task == "numbers":
            if not np.isfinite(x).all():
                raise ConfigError("predict", "inputs hold NaN or infinity", "every value must be finite")
        else:
            x = as_tokens(x, "predict: x")
            words = len(self._built[0][-1].federation.samples.vocabulary)
            if len(x) and x.max() >= words:
                what = f"inputs hold word {x.max()}"
                raise ConfigError("predict", what, f"the model knows words 0 to {words - 1}")
        predictions = []
        with torch.inference_mode():
            for start in range(0, len(x), _BATCH):
                part = np.asarray(x[start : start + _BATCH])
                inputs = self.scaling.apply(part) if task == "numbers" else part.astype(np.int64)
                outputs = module(torch.from_numpy(inputs))
                predictions.append((outputs if numeric else outputs.argmax(dim=1)).numpy())
        return (
            np.concatenate(predictions) if predictions else np.empty((0, *shape[: task == "words"]), np.int64)
        )

    @cached_property
    def _built(self) -> tuple[tuple[Stage, ...], HostSpec]:
        """The stages of the federation and the host's settings, built again from config and data."""
        directory = RunDirectory.open(self.path)
        return build(directory.config, directory.scaling, reading=True)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the numbers that :meth:`predict` returns; empty if the
        dataset has none.
        """
        return self._built[0][-1].federation.samples.class_names

    @cached_property
    def scaling(self) -> Scaling:
        """Prepares inputs for models: ``result.scaling.apply(x)``, with ``x`` as the dataset stores it.

        Raises:
            Damaged: if the run has no ``normalisation.json``.
        """
        scaling = RunDirectory(self.path).scaling
        if scaling is None:
            raise Damaged(f"{self.path / 'normalisation.json'}: is missing")
        return scaling

    @property
    def summary(self) -> dict[str, Any]:
        """The final numbers; empty if the run is not finished."""
        return dict(self._read("summary.json", RunDirectory(self.path).read_json) or {})

    def _read(self, name: str, read: Callable[[str], Any]) -> Any:
        """The contents of a file of the run, cached until the file changes (the run may be resumed)."""
        try:
            stat = (self.path / name).stat()
            stamp = (stat.st_mtime_ns, stat.st_size)
        except OSError:
            stamp = None
        cached_stamp, content = self._kept.get(name, (None, None))
        if content is None or (stamp is not None and stamp != cached_stamp):
            content = read(name)
            self._kept[name] = (stamp, content)
        return content


def _plain(x: Any) -> NDArray[np.generic]:
    """Inputs as an array of numbers.

    Raises:
        ConfigError
    """
    import numpy as np

    array = np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)
    if array.dtype.kind not in "fiub":
        raise ConfigError("predict", f"inputs of {array.dtype}", "expected numbers")
    return array


def client_models(
    path: Path | str, clients: Sequence[int | str] | None = None, finetuned: bool = False
) -> Iterator[tuple[int | str, dict[str, torch.Tensor]]]:
    """Rebuild the models with which clients of a run were last tested (``accuracy_last``).

    A client's model is the server's model combined with the client's own state (layers, a mask, a whole
    model), after test-time adaptation (Per-FedAvg). It is rebuilt from the newest checkpoint and the data. A
    stopped run was last tested some rounds before that checkpoint. Training is repeated on this machine's
    device; if the run used a GPU, results may differ by rounding.

    Args:
        path: the run directory.
        clients: ids, your own if the partition has them; None for all clients present at the end.
        finetuned: rebuild the models of ``accuracy_finetuned``, after ``evaluation.finetune_epochs``.

    Yields:
        The client's id (your own, if there is one) and its model: tensors by their names in the module, as in
        ``models/*.safetensors``; in the order of the clients' numbers.

    Raises:
        ConfigError: if there is no such run or client, or if ``finetuned`` and the run did not fine-tune.
        RayflError: if there is no checkpoint yet, or a client was absent.
    """
    import torch

    from rayfl.runtime.inline import InlineBackend

    directory = RunDirectory.open(path)
    config = directory.config
    if finetuned and not config.evaluation.finetune_epochs:
        remedy = "only runs with evaluation.finetune_epochs have such models"
        raise ConfigError(str(path), "clients did not fine-tune", remedy)
    stages, host = build(config, directory.scaling, reading=True)
    directory.verify(stages)
    if not torch.cuda.is_available():
        host = replace(host, device="cpu")
    backend = InlineBackend()
    try:
        driver = Driver(config, stages, backend, directory, host)
        names = stages[0].federation.names
        numbers_by_id = {} if names is None else {name: i for i, name in enumerate(names.tolist())}
        numbers = None if clients is None else [client_number(c, numbers_by_id, str(path)) for c in clients]
        for client, row in driver.tested_models(numbers, finetuned):
            yield (client if names is None else str(names[client])), tensors_of(host.spec, row)
    finally:
        backend.close()


def _channels_first(x: NDArray[np.generic], shape: tuple[int, ...]) -> NDArray[np.generic]:
    """Images ``(n, H, W)`` or ``(n, H, W, C)`` as ``(n, C, H, W)``; other inputs as they are."""
    if len(shape) != 3 or x.shape[1:] == shape:
        return x
    if x.ndim == 3 and shape[0] == 1:
        return x[:, None]
    return x.transpose(0, 3, 1, 2) if x.ndim == 4 and x.shape[1:] == (*shape[1:], shape[0]) else x

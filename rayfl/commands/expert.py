"""``rayfl expert``: a model that knows the whole dataset, for curricula and for partitions by difficulty.

Vahidian's thesis, section 2.6.3: the expert has the topology of the global model and is trained on all data.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from rayfl import api, files
from rayfl.config import Config, load
from rayfl.data import IGNORED, Samples, held_out
from rayfl.events import Listener
from rayfl.models import ModelSpec
from rayfl.servers import building
from rayfl.training.batches import Batches

_BATCH = 500
"""Samples in a forward pass."""


def train_expert(
    config: Config, epochs: int, folder: Path, on_event: Listener | None = None
) -> tuple[Path, Path]:
    """Train the config's model on all training samples of its dataset, as one client that has them all.

    Learning rate, momentum and batch size are those of ``training``; method, partition and curricula are not
    used.

    Args:
        config: data, model and training.
        epochs: over all samples.
        folder: to write to, created if need be.
        on_event: as for :func:`rayfl.run`.

    Returns:
        The model for ``order.expert`` (.safetensors), and its loss on every training sample ``(n,)`` for
        ``partition.losses`` (.npy).

    Raises:
        ConfigError, DataError: as for a run.
    """
    # The expert knows all training samples, unless inputs are scaled by those of the server.
    all_samples = [] if config.data.normalise == "server" else ["data.server_share=0"]
    with tempfile.TemporaryDirectory() as root:
        expert_config = load(
            config,
            [
                *all_samples,
                "algorithm={name: fedavg}",
                "local={name: sgd}",
                "order={name: shuffled}",
                "sampling={name: uniform}",
                "aggregation={name: mean}",
                "partition={name: iid, clients: 1, validation: 0}",
                "events=[]",
                f"rounds={epochs}",
                "training.epochs=1",
                "training.participation=1.0",
                f"evaluation={{every: {epochs}}}",
                "execution.backend=inline",
                f"output={{root: {root}, report: false, tensorboard: false}}",
            ],
        )
        trained = api.run(expert_config, on_event=on_event).path / "models" / "model_0.safetensors"
        model = folder / "expert.safetensors"
        files.make(folder, parents=True)
        files.write(model, trained.read_bytes())
    (stage, *_), host = building.build(expert_config, reading=True)
    samples, losses = stage.federation.samples, folder / "losses.npy"
    if samples.x_server is not None:  # include the server's samples, which depend on the seed
        full_data = expert_config.data.model_copy(update={"server_share": 0.0})
        samples = held_out.read(
            full_data, building.data_root(expert_config), 0, expert_config.seed, samples.scaling
        )
    array = io.BytesIO()
    np.save(array, losses_of(model, host.spec, samples))
    files.write(losses, array.getvalue())
    return model, losses


def losses_of(model: Path, spec: ModelSpec, samples: Samples) -> NDArray[np.float64]:
    """The loss of a saved model on every training sample ``(n,)``; for texts the mean over the words."""
    module, batches = spec.build().eval(), Batches(samples, torch.device("cpu"))
    module.load_state_dict(load_file(model), strict=False)
    losses = []
    with torch.inference_mode():
        for start in range(0, len(samples.y_train), _BATCH):
            ids = np.arange(start, min(start + _BATCH, len(samples.y_train)))
            x, y = batches.train(ids)
            elementwise = spec.loss.for_tests().each(module(x), y)
            counted = (y != IGNORED).reshape(len(ids), -1).sum(1).clamp(min=1)
            losses.append((elementwise.double().reshape(len(ids), -1).sum(1) / counted).numpy())
    return np.concatenate(losses)

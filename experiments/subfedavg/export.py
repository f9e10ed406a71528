"""Write the smaller network of a client of a finished Sub-FedAvg run to a file, and time it.

::

    python experiments/subfedavg/export.py RUN --client 3 --file client-3.safetensors

Pruned channels (hybrid) are removed from the tensors, so the network needs fewer operations on any hardware.
Single pruned weights stay as zeros: they save bytes, and save time only with sparse kernels.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from rayfl.config import Config
from rayfl.data import Federation
from rayfl.errors import ConfigError
from rayfl.local.pruning import conv_flops, gammas, shrink
from rayfl.local.sub_fedavg import SubFedAvg
from rayfl.models import ModelSpec
from rayfl.rundir import RunDirectory
from rayfl.servers.building import build
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from rayfl.training.batches import Batches

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import frame


@dataclass(frozen=True)
class Network:
    """A client's network.

    Attributes:
        client: its id.
        module: without the pruned channels; in training mode, as built.
        dense: the full network, with zeros in place of pruned weights.
        parameters: of the smaller network, zeros included.
        nonzero: the number of those that are not pruned.
        flops: of its convolutions, for one sample.
        server_accuracy: test accuracy in percent of the server's model with the client's mask.
    """

    client: int
    module: nn.Module
    dense: nn.Module
    parameters: int
    nonzero: int
    flops: int
    server_accuracy: float


def open_run(path: Path) -> tuple[Config, Checkpoint, ModelSpec, Federation]:
    """Config, last checkpoint, layout and data of a run.

    Raises:
        ConfigError: if it is not a run of Sub-FedAvg, or has no checkpoint.
    """
    config = RunDirectory.open(path).config
    if not isinstance(config.local, SubFedAvg):
        raise ConfigError(str(path), f"its local objective is {config.local.name}", "a run of sub_fedavg")
    paths = checkpoints(path / "checkpoints")
    if not paths:
        raise ConfigError(str(path), "holds no checkpoint", "let it finish")
    stages, host = build(config)
    return config, Checkpoint.load(paths[-1]), host.spec, stages[-1].federation


def network(
    config: Config, saved: Checkpoint, spec: ModelSpec, federation: Federation, client: int
) -> Network:
    """The network that a client uses.

    Raises:
        ConfigError: if the client never took part.
    """
    positions = np.flatnonzero(saved.state_clients == client)
    if not len(positions):
        examples = ", ".join(map(str, saved.state_clients[:10]))
        raise ConfigError("--client", f"client {client} never took part", f"some that did: {examples}")
    state = torch.from_numpy(saved.state_rows[positions[0]])
    mask = state[: spec.P].numpy() > 0
    model = torch.from_numpy(saved.models[saved.state.assignment[client]])
    vector = config.local.client_model(model, state, spec).numpy()
    dense = spec.build()
    spec.load(dense, vector)
    if isinstance(config.local, SubFedAvg) and config.local.pruning == "hybrid":
        module: nn.Module = shrink(spec, vector, gammas(spec, mask).astype(np.bool_))
    else:
        module = spec.build()
        spec.load(module, vector)
    parameters = sum(p.numel() for p in module.parameters())
    nonzero = int(mask[: spec.n_parameters].sum())
    server = spec.build()
    spec.load(server, model * torch.from_numpy(mask))
    server_accuracy = accuracy(server, *tests(federation, client))
    return Network(
        client, module, dense, parameters, nonzero, conv_flops(module, spec.shape), server_accuracy
    )


def tests(federation: Federation, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A client's test samples and their labels."""
    return Batches(federation.samples, torch.device("cpu")).test(federation.test[client])


def accuracy(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Percent of right predictions."""
    with torch.inference_mode():
        return 100 * float((module.eval()(x).argmax(1) == y).double().mean())


def networks(path: Path) -> Iterator[Network]:
    """The networks of all clients that took part in a run."""
    config, saved, spec, federation = open_run(path)
    for client in saved.state_clients.tolist():
        yield network(config, saved, spec, federation, client)


def seconds(modules: Sequence[nn.Module], x: torch.Tensor, repeats: int = 200) -> list[float]:
    """The shortest time of a forward pass over ``x`` for each network, measured in turns; other load only
    adds time.
    """
    times = np.empty((repeats, len(modules)))
    with torch.inference_mode():
        for index in np.ndindex(times.shape):
            begun = time.perf_counter()
            modules[index[1]].eval()(x)
            times[index] = time.perf_counter() - begun
    return [float(least) for least in times.min(axis=0)]


def work(given: argparse.Namespace) -> None:
    """Write the smaller network, check it against the masked one, and time both."""
    torch.set_num_threads(1)
    config, saved, spec, federation = open_run(given.run)
    pruned = network(config, saved, spec, federation, given.client)
    x, y = tests(federation, given.client)
    with torch.inference_mode():
        masked, small = pruned.dense.eval()(x), pruned.module.eval()(x)
    full = sum(p.numel() for p in pruned.dense.parameters())
    flops = conv_flops(pruned.dense, spec.shape)
    print(f"parameters       {full:>10,} -> {pruned.parameters:,} ({pruned.nonzero:,} of them not zero)")
    print(f"conv operations  {flops:>10,} -> {pruned.flops:,} ({flops / pruned.flops:.2f} times fewer)")
    print(f"largest difference of the outputs {float((masked - small).abs().max()):.1e}")
    print(f"accuracy on its {len(y)} test samples {accuracy(pruned.module, x, y):.2f} %")
    for batch in (1, 100):
        before, after = seconds([pruned.dense, pruned.module], x[:batch])
        print(
            f"batch of {batch:<3}     {1e3 * before:.3f} -> {1e3 * after:.3f} ms ({before / after:.2f} times)"
        )
    if given.file is not None:
        tensors = {name: t.contiguous() for name, t in pruned.module.state_dict().items()}
        save_file(tensors, given.file)
        print(f"{given.file}: {given.file.stat().st_size:,} bytes")


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    options = (
        frame.option("run", type=Path),
        frame.option("--client", type=int, required=True),
        frame.option("--file", type=Path, help="safetensors file; by default nothing is written"),
    )
    return frame.main(__doc__, work, *options, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())

"""experiments/subfedavg/export.py: the smaller network of a client."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import rayfl
from experiments.subfedavg import export
from rayfl.local.pruning import gammas
from rayfl.servers.checkpoint import Checkpoint, checkpoints


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> rayfl.Result:
    """Four clients that prune channels of a LeNet-5, every round."""
    return rayfl.run(
        {
            "rounds": 2,
            "data": {"name": "digits", "size": 28},
            "partition": {"name": "iid", "clients": 4},
            "model": {"name": "lenet5", "batch_norm": True},
            "algorithm": "sub_fedavg",
            "local": {
                "pruning": "hybrid",
                "accuracy": 0.0,
                "channel_distance": 0.0,
                "step": 0.3,
                "channel_step": 0.3,
            },
            "training": {"epochs": 2, "batch_size": 40, "lr": 0.1, "participation": 0.5},
            "execution": {"backend": "inline"},
            "output": {
                "root": str(tmp_path_factory.mktemp("runs")),
                "report": False,
                "tensorboard": False,
            },
        }
    )


@pytest.mark.slow
def test_the_smaller_network_answers_as_the_client_did(
    pruned: rayfl.Result,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved = Checkpoint.load(checkpoints(pruned.path / "checkpoints")[-1])
    client = int(saved.state_clients[0])
    file = tmp_path / "small.safetensors"
    assert export.main([str(pruned.path), "--client", str(client), "--file", str(file)]) == 0
    text = capsys.readouterr().out
    # What the run measured for this client is what the file's network does.
    assert f"{pruned.clients['accuracy_last'][client]:.2f} %" in text
    config, _, spec, federation = export.open_run(pruned.path)
    mask = saved.state_rows[0, : spec.P] > 0
    kept = gammas(spec, mask)
    assert kept.sum() < 22
    first, second = int(kept[:6].sum()), int(kept[6:].sum())
    tensors = load_file(file)
    assert tensors["conv1.weight"].shape == (first, 1, 5, 5)
    assert tensors["conv2.weight"].shape == (second, first, 5, 5)
    assert tensors["fc1.weight"].shape == (120, second * 16)
    found = export.network(config, saved, spec, federation, client)
    assert found.flops == 2 * 25 * (first * 24 * 24 + first * second * 8 * 8)
    assert found.parameters == sum(p.numel() for p in found.module.parameters())
    assert found.nonzero == mask[: spec.n_parameters].sum() < found.parameters
    assert f"{found.parameters:,}" in text
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 1, 28, 28)).astype(np.float32))
    with torch.no_grad():
        one, other = found.dense.eval()(x), found.module.eval()(x)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert one.std() > 0.1


def test_clients_without_a_network(pruned: rayfl.Result, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main([str(pruned.path), "--client", "77"]) == 2
    assert "client 77 never took part" in capsys.readouterr().err
    assert export.main([str(pruned.path.parent), "--client", "0"]) == 2

"""Every client's model that was tested can be had again: it has the accuracy that ``clients.csv`` says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import rayfl
from rayfl.api import client_models
from rayfl.cli import app
from rayfl.errors import ConfigError, RayflError
from rayfl.servers.building import build
from rayfl.training.batches import Batches
from rayfl.units import size

MLP = {"name": "mlp", "hidden": [12]}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "scaffold": {"local": "scaffold"},
    "solo": {},
    "lg_fedavg": {"algorithm": {"name": "lg_fedavg", "local_layers": 1}},
    "per_fedavg": {},
    "mtl": {"training": {"epochs": 2}},
    "sub_fedavg": {"local": {"step": 0.3, "accuracy": 0.0}},
    "ifca": {},
    "flis_dc": {"algorithm": {"name": "flis_dc", "beta": 0.9}},
    "cfl": {
        "algorithm": {"name": "cfl", "criteria": {"eps1": 10, "eps2": 0, "min_size": 5}, "fallback": True}
    },
    "permuted": {"algorithm": {"name": "cfl", "permute": True}},
}


def settings(root: Path, method: str = "fedavg", **changes: Any) -> dict[str, Any]:
    execution = {"backend": "inline", "block_size": 3}
    base = {
        "rounds": 3,
        "seed": 4,
        "partition": {"name": "label_skew", "clients": 8, "validation": 0.2},
        "model": MLP,
        "algorithm": method,
        "training": {"participation": 0.5, "batch_size": 20, "lr": 0.1},
        "execution": execution,
        "output": {"root": str(root), "report": False, "tensorboard": False},
    }
    return base | changes


def accuracies(result: rayfl.Result, finetuned: bool = False) -> dict[int, float]:
    """In per cent, of every client's model, by plain PyTorch."""
    stages, host = build(result.config)
    federation = stages[-1].federation
    batches, found = Batches(federation.samples, torch.device("cpu")), {}
    for client, tensors in client_models(result.path, finetuned=finetuned):
        module = host.spec.build().eval()
        missing, unknown = module.load_state_dict(tensors, strict=False)
        assert not unknown
        assert all(name.endswith("num_batches_tracked") for name in missing)
        x, y = batches.test(federation.test[client])
        with torch.inference_mode():
            found[client] = 100 * float((module(x).argmax(1) == y).double().mean())
    return found


@pytest.mark.one_in(5)
@pytest.mark.parametrize("method", METHODS)
def test_it_has_the_accuracy_of_the_table(tmp_path: Path, method: str) -> None:
    ran = rayfl.run(settings(tmp_path, **{"method": method, **METHODS[method]}))
    found = accuracies(ran)
    assert list(found) == list(range(8))
    assert list(found.values()) == pytest.approx(ran.clients["accuracy_last"].tolist(), abs=1e-9)


@pytest.mark.parametrize("method", ["solo", "per_fedavg"])
def test_personal_models_are_not_the_server_s(tmp_path: Path, method: str) -> None:
    """What ``models/`` holds is not what these clients use."""
    ran = rayfl.run(settings(tmp_path, method))
    shared = load_file(ran.path / "models" / "model_0.safetensors")
    for _, own in client_models(ran.path):
        assert any(not torch.equal(own[name], shared[name]) for name in shared)


@pytest.mark.parametrize("method", ["fedavg", "lg_fedavg", "per_fedavg"])
def test_after_fine_tuning(tmp_path: Path, method: str) -> None:
    changes = METHODS[method] | {"evaluation": {"finetune_epochs": 2}}
    ran = rayfl.run(settings(tmp_path, **{"method": method, **changes}))
    tuned = accuracies(ran, finetuned=True)
    assert list(tuned.values()) == pytest.approx(ran.clients["accuracy_finetuned"].tolist(), abs=1e-9)
    assert tuned != accuracies(ran)
    with pytest.raises(ConfigError, match="did not fine-tune"):
        rayfl.run(settings(tmp_path)).client_model(0, finetuned=True)
    with pytest.raises(ConfigError, match="clients fine-tune models, a cluster has only the server's"):
        ran.model(cluster=0, finetuned=True)


def test_one_client_s_is_the_same_as_among_all(tmp_path: Path) -> None:
    """Also in the last bit: it adapts in the block in which it was tested."""
    ran = rayfl.run(settings(tmp_path, "per_fedavg"))
    everyone = dict(client_models(ran.path))
    for client in (0, 4, 7):
        alone = ran.client_model(client)
        assert all(torch.equal(alone[name], everyone[client][name]) for name in alone)


def test_clients_that_left_have_none(tmp_path: Path) -> None:
    ran = rayfl.run(settings(tmp_path, "solo", events=[{"name": "leave", "round": 2, "clients": [1, 4]}]))
    there = [client for client, _ in client_models(ran.path)]
    gone = np.setdiff1d(np.arange(8), there)
    assert len(gone) == 2
    with pytest.raises(RayflError, match=f"client {gone[0]} was absent after round 3; 6 of the clients"):
        ran.client_model(int(gone[0]))
    with pytest.raises(RayflError, match="there is no client 8; the clients are 0 to 7"):
        ran.client_model(8)


def test_the_run_is_left_as_it_was(tmp_path: Path) -> None:
    ran = rayfl.run(settings(tmp_path, "lg_fedavg"))
    before = {path: path.read_bytes() for path in ran.path.rglob("*") if path.is_file()}
    ran.client_model(3)
    assert {path: path.read_bytes() for path in ran.path.rglob("*") if path.is_file()} == before


def test_the_command_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = rayfl.run(settings(tmp_path, "lg_fedavg"))
    assert app(["models", str(ran.path), "2", "5"], standalone_mode=False) in (0, None)
    assert f"{size(4 * (64 * 12 + 12 + 12 * 10 + 10))} a client" in capsys.readouterr().out
    folder = ran.path / "models" / "clients"
    assert sorted(path.name for path in folder.iterdir()) == ["client_2.safetensors", "client_5.safetensors"]
    inside = str(folder / "client_2.safetensors" / "x")  # a file, which is no folder
    with pytest.raises(ConfigError, match=r"--out: cannot create .*client_2\.safetensors"):
        app(["models", str(ran.path), "2", "--out", inside], standalone_mode=False)
    wanted, found = ran.client_model(5), load_file(folder / "client_5.safetensors")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)

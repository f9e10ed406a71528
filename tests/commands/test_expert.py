"""The expert: the config's model, trained on all data; its file and its losses are what curricula take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

import rayfl
from rayfl import cli
from rayfl.commands.expert import train_expert
from rayfl.config import load
from rayfl.data import DATASETS
from rayfl.data.held_out import read
from rayfl.errors import DataError, Interrupted
from rayfl.servers.building import build
from rayfl.training.batches import Batches

SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "partition": {"name": "dirichlet", "clients": 8, "alpha": 0.3, "min_samples": 3},
    "model": {"name": "mlp", "hidden": [12]},
    "algorithm": "pacfl",
    "local": "fedprox",
    "order": "curriculum",
    "sampling": "curriculum",
    "aggregation": "krum",  # of several clients
    "training": {"participation": 0.9, "batch_size": 20, "lr": 0.1, "epochs": 3},
    "execution": {"backend": "inline"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("expert") / "new"
    assert train_expert(load(SETTINGS), 5, folder) == (folder / "expert.safetensors", folder / "losses.npy")
    return folder / "expert.safetensors", folder / "losses.npy"


def test_it_knows_the_whole_dataset(trained: tuple[Path, Path]) -> None:
    """Right on nine of ten samples of every class, whoever has them; each loss is that of its sample."""
    (stage, *_), host = build(load(SETTINGS))
    samples = stage.federation.samples
    module = host.spec.build().eval()
    module.load_state_dict(load_file(trained[0]), strict=False)
    x, y = Batches(samples, torch.device("cpu")).train(np.arange(len(samples.y_train)))
    with torch.inference_mode():
        logits = module(x)
    right = (logits.argmax(1) == y).numpy()
    assert min(right[samples.y_train == label].mean() for label in range(10)) > 0.8
    losses = functional.cross_entropy(logits, y, reduction="none").double().numpy()
    np.testing.assert_allclose(np.load(trained[1]), losses, rtol=1e-4, atol=1e-6)


def test_curricula_take_it(trained: tuple[Path, Path], tmp_path: Path) -> None:
    model, losses = trained
    output = {"root": str(tmp_path), "report": False, "tensorboard": False}
    order = {"name": "curriculum", "score": "expert", "expert": str(model)}
    partition = {"name": "difficulty", "clients": 8, "labels": "iid", "losses": str(losses)}
    ran = rayfl.run({**SETTINGS, "order": order, "partition": partition, "output": output})
    assert len(ran.rounds) == 2
    (stage, *_), _ = build(ran.config)
    means = [np.load(losses)[ids].mean() for ids in stage.federation.train]
    assert (np.diff(means) > 0).all()  # the first client has the easiest samples


def test_losses_of_samples_that_the_server_holds_are_there_too(tmp_path: Path) -> None:
    """The server takes others with another seed; a run with the file therefore needs all of them."""
    settings = {**SETTINGS, "data": {"name": "digits", "normalise": "server"}}
    model, losses = train_expert(load(settings), 2, tmp_path)
    found = np.load(losses)
    everything = DATASETS["digits"]().load(Path())
    assert found.shape == everything.y_train.shape
    partition = {"name": "difficulty", "clients": 8, "labels": "iid", "losses": str(losses)}
    (stage, *_), host = build(load({**settings, "partition": partition}))
    own = read(load(settings).data, Path(), load(settings).public_samples, 0)
    np.testing.assert_array_equal(own.x_train, stage.federation.samples.x_train)
    assert own.numbering is not None
    module = host.spec.build().eval()
    module.load_state_dict(load_file(model), strict=False)
    x, y = Batches(own, torch.device("cpu")).train(np.arange(len(own.y_train)))
    with torch.inference_mode():
        expected = functional.cross_entropy(module(x), y, reduction="none").double().numpy()
    np.testing.assert_allclose(found[own.numbering.train >= 0], expected, rtol=1e-4, atol=1e-6)


def test_the_command_says_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cli.app(
        ["expert", "digits-demo", "model.hidden=[4]", "--epochs", "1", "--out", "e"], standalone_mode=False
    )
    said = capsys.readouterr().out
    assert "order.expert=e/expert.safetensors" in said
    assert "partition.losses=e/losses.npy" in said
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["e", "expert.safetensors", "losses.npy"]


def test_a_run_goes_on_with_the_same_expert(trained: tuple[Path, Path], tmp_path: Path) -> None:
    """One that is trained again in the same folder would change what follows."""
    expert = tmp_path / "expert.safetensors"
    expert.write_bytes(trained[0].read_bytes())
    order = {"name": "curriculum", "score": "expert", "expert": str(expert)}
    output = {"root": str(tmp_path / "runs"), "report": False, "tensorboard": False}
    stopped = rayfl.run({**SETTINGS, "rounds": 1, "order": order, "aggregation": "mean", "output": output})
    known = expert.read_bytes()
    expert.write_bytes(known[:-4] + b"abcd")
    with pytest.raises(DataError, match=r"expert\.safetensors: has changed since the run began; restore it"):
        rayfl.resume(stopped, "rounds=2")
    expert.write_bytes(known)
    assert rayfl.resume(stopped, "rounds=2").summary["rounds"] == 2


def test_nothing_is_left_of_an_expert_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*given: Any, **more: Any) -> None:
        raise Interrupted

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rayfl.commands.expert.train_expert", interrupted)
    monkeypatch.setattr("sys.argv", ["rayfl", "expert", "digits-demo"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 130
    assert capsys.readouterr().out == "interrupted; nothing was written\n"
    assert not list(tmp_path.iterdir())


def test_an_expert_that_diverged_is_told_by_its_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ["model.hidden=[4]", "training.lr=1e30", "--epochs", "2"]
    monkeypatch.setattr("sys.argv", ["rayfl", "expert", "digits-demo", *settings])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert capsys.readouterr().err == (
        "error: the expert diverged in epoch 1; a smaller training.lr may help\n"
    )
    assert not list(tmp_path.iterdir())

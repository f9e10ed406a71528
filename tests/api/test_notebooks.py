"""Results in notebooks: what is shown of them, figures, networks, predictions, live progress."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

import rayfl
from rayfl.errors import ConfigError, RayflError
from rayfl.notebook import Progress, listener
from rayfl.report.figures import map_of_clients, picture
from rayfl.servers.building import build
from tests.runs import TASKS


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> rayfl.Result:
    root = tmp_path_factory.mktemp("runs")
    return rayfl.run(
        {
            "rounds": 3,
            "partition": {"name": "tasks", "tasks": TASKS},
            "model": {"name": "mlp", "hidden": [12]},
            "algorithm": "pacfl",
            "clustering": {"n_clusters": 3},
            "execution": {"backend": "inline"},
            "output": {"root": str(root), "report": False, "tensorboard": False},
        }
    )


def test_a_result_shows_itself(ran: rayfl.Result) -> None:
    shown = ran._repr_html_()
    assert f"<b>{ran.path.name}</b>" in shown
    assert f"{ran.summary['accuracy_mean']:.1f} %" in shown
    assert "pacfl · digits · tasks · mlp" in shown


def test_its_figures(ran: rayfl.Result) -> None:
    last = ran.rounds["accuracy_mean"].iloc[-1]
    axes = ran.plot.accuracy().axes[0]
    x, y = (np.asarray(values) for values in axes.lines[0].get_data())
    assert x.tolist() == [1, 2, 3]
    assert y[-1] == pytest.approx(last)
    for name in ("clusters", "loss", "clients", "communication", "threshold"):
        assert getattr(ran.plot, name)()._repr_png_().startswith(b"\x89PNG")
    points = ran.plot.clusters().axes[0].collections
    assert sorted(len(part.get_offsets()) for part in points) == [2, 3, 4]


def test_no_dot_of_a_map_is_cut() -> None:
    row = np.array([[0.0, 0.0], [1.0, 0.01], [9.0, 0.02]])  # nearly a line: the axes would be a strip
    found = picture(map_of_clients(row, np.zeros(3, int), "labels"), height=5)
    axes = found.axes[0]
    FigureCanvasAgg(found).draw()
    box = axes.get_window_extent()
    for x, y in axes.transData.transform(row):
        assert box.x0 + 8 < x < box.x1 - 8
        assert box.y0 + 8 < y < box.y1 - 8


def test_a_run_without_numbers_says_so(ran: rayfl.Result, tmp_path: Path) -> None:
    with pytest.raises(RayflError, match="has no accuracy over rounds to draw"):
        _ = rayfl.Result(tmp_path).plot.accuracy()


def test_predictions_have_the_accuracy_of_the_table(ran: rayfl.Result) -> None:
    stages, _ = build(ran.config)
    federation, clients = stages[-1].federation, ran.clients
    for client in (0, 5, 8):
        samples = federation.test[client]
        x, y = federation.samples.x_test[samples], federation.samples.y_test[samples]
        for chosen in ({"client": client}, {"cluster": clients["cluster"][client]}):
            found = ran.predict(x, **chosen)
            assert 100 * (found == y).mean() == pytest.approx(clients["accuracy_last"][client])
    assert ran.predict(x[:0], cluster=0).shape == (0,)
    for images in (x[:, 0], x.transpose(0, 2, 3, 1)):  # as files and other libraries have them
        np.testing.assert_array_equal(ran.predict(images, client=8), ran.predict(x, client=8))
    np.testing.assert_array_equal(ran.predict(x.astype(np.int64), client=8), ran.predict(x, client=8))


def test_what_cannot_be_predicted_is_refused(ran: rayfl.Result) -> None:
    shape = (2, *ran.scaling.apply(build(ran.config)[0][0].federation.samples.x_test[:1]).shape[1:])
    kind = build(ran.config)[0][0].federation.samples.x_test.dtype
    for x, line in (
        (np.full(shape, "a"), "predict: inputs of <U1; expected numbers"),
        (np.full(shape, np.nan), r"predict: inputs (hold NaN or infinity|of float64)"),
        (torch.ones(shape, requires_grad=True), None if kind != np.uint8 else "predict: inputs of float32"),
    ):
        if line is None:
            assert len(ran.predict(x, client=0)) == 2
            continue
        with pytest.raises(RayflError, match=line):
            ran.predict(x, client=0)


def test_networks_are_ready_to_use(ran: rayfl.Result) -> None:
    module = ran.model(client=0)
    assert isinstance(module, torch.nn.Module)
    assert not module.training
    for name, tensor in ran.client_model(0).items():
        torch.testing.assert_close(module.state_dict()[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("chosen", "line"),
    [
        ({}, "model: takes either a client or a cluster; as in model(client=3)"),
        ({"client": 1, "cluster": 1}, "model: takes either a client or a cluster"),
        ({"cluster": 7}, "there is no cluster 7; valid: 0, 1, 2"),
        ({"client": 99}, "there is no client 99; the clients are 0 to 8"),
    ],
)
def test_mistakes(ran: rayfl.Result, chosen: dict[str, Any], line: str) -> None:
    with pytest.raises(RayflError, match=r"takes|there is no|was absent") as caught:
        ran.model(**chosen)
    assert line in str(caught.value)


def test_inputs_of_another_shape_are_refused(ran: rayfl.Result) -> None:
    with pytest.raises(ConfigError, match="predict: inputs of shape"):
        ran.predict(np.zeros((2, 3)), cluster=0)
    with pytest.raises(ConfigError, match="inputs of float64; the run's are uint8 from 0 to 255"):
        ran.predict(np.zeros((2, 1, 8, 8)), cluster=0)


class Handle:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def update(self, shown: Any) -> None:
        self.seen.append(shown._repr_html_())


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Handle:
    """As in Jupyter's kernel, which has imported IPython."""
    handle, module, display = Handle(), types.ModuleType("IPython"), types.ModuleType("IPython.display")
    events = types.SimpleNamespace(register=lambda event, call: None)  # Matplotlib asks for these, too
    shell = {"kernel": object(), "events": events, "enable_gui": lambda gui: None}
    module.get_ipython = type("Shell", (), shell)  # type: ignore[attr-defined]
    module.version_info = (9, 0)  # type: ignore[attr-defined]
    display.display = lambda shown, display_id: handle  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return handle


def test_a_notebook_shows_progress_by_itself(ran: rayfl.Result, kernel: Handle, tmp_path: Path) -> None:
    config = ran.config.model_dump(mode="json") | {"rounds": 2}
    config["output"]["root"] = str(tmp_path)
    again = rayfl.run(config)
    assert "round 1 of 2, loss" in "".join(kernel.seen)
    assert 'value="2" max="2"' in kernel.seen[-1]
    assert f"accuracy {again.summary['accuracy_mean']:.1f} %" in kernel.seen[-1]
    assert "finished in" in kernel.seen[-1]
    kernel.seen.clear()
    heard: list[rayfl.RunEvent] = []
    config["output"]["root"] = str(tmp_path / "other")
    rayfl.run(config, on_event=heard.append)
    assert heard
    assert kernel.seen == []  # the callback says what it wants


def test_a_notebook_shows_what_a_regression_measures(kernel: Handle, tmp_path: Path) -> None:
    """There is no accuracy."""
    x = np.linspace(-1, 1, 80, dtype=np.float32).reshape(40, 2)
    ran = rayfl.run(
        {
            "rounds": 2,
            "loss": "mse",
            "model": {"name": "mlp", "hidden": [4]},
            "execution": {"backend": "inline"},
            "output": {"root": str(tmp_path), "report": False, "tensorboard": False},
        },
        data=(x, x.sum(axis=1), x, x.sum(axis=1)),
        partition=[range(20), range(20, 40)],
    )
    assert f"rmse {ran.summary['rmse_mean']:.4g}" in kernel.seen[-1]
    assert "accuracy" not in kernel.seen[-1]
    with pytest.raises(RayflError, match="has no accuracy over rounds to draw"):
        ran.plot.accuracy()


def test_a_notebook_shows_the_progress_of_a_study(kernel: Handle, tmp_path: Path) -> None:
    output = {"root": str(tmp_path / "runs"), "report": False, "tensorboard": False}
    small = {"rounds": 2, "partition": {"name": "iid", "clients": 4}, "output": output}
    methods = {"FedAvg": {"algorithm": "fedavg"}, "SOLO": {"algorithm": "solo"}}
    study = {"name": "two", "base": "digits-demo", "settings": small, "methods": methods, "seeds": [0]}
    done = rayfl.run_study(study, tmp_path / "out", inline=True)
    assert "runs: 2 to do" in kernel.seen[-1]
    for number, method in enumerate(methods, 1):
        accuracy = done.result(method).summary["accuracy_mean"]
        assert f"{number}/2  {method}, seed 0: accuracy {accuracy:.1f} % in" in kernel.seen[-1]
    assert any('<progress value="4" max="4"' in each for each in kernel.seen)


def test_elsewhere_nothing_is_shown_and_ipython_is_not_imported() -> None:
    before = set(sys.modules)
    assert not isinstance(listener(), Progress)
    assert {name for name in set(sys.modules) - before if name.startswith("IPython")} == set()

"""Everything that trains and tests, on a device that only pretends: nothing is left on the CPU by mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rayfl
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from rayfl.training.batches import Batches
from rayfl.training.engine import COARSER
from rayfl.training.loop import LoopEngine
from tests.runs import METHODS
from tests.training import pretended
from tests.training.bounds import Truth
from tests.training.test_graphs import CPU, LARGE, MODEL_CASES, arguments
from tests.training.test_terms import OPTIONS

pytest.importorskip("torch.utils.backend_registration")
if not hasattr(__import__("torch").utils.backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this PyTorch has no devices written in Python", allow_module_level=True)


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Callable[..., Any]]:
    with pretended.elsewhere() as call:
        yield call


@pytest.mark.parametrize(
    "name", ["add", "in place", "out", "module", "where", "samples", "assignment", "stack", "sum", "numpy"]
)
def test_two_devices_do_not_mix(name: str, elsewhere: Callable[..., Any]) -> None:
    """What a GPU refuses, or these tests would find nothing."""
    said = elsewhere(pretended.mixed, name)
    assert ("numpy() is not supported" if name == "numpy" else "expected all tensors on one device") in said


def check(outcome: pretended.Outcome, case: str, option: str = "", extra: str = "sgd") -> None:
    spec, samples, sizes, work, terms = pretended.setting(case, option, extra)
    truth = Truth.of(spec, Batches(samples, CPU), 0, work, *arguments(spec, sizes, 0), terms)
    truth.check(outcome.block)


@pytest.mark.parametrize("engine", ["batched", pytest.param("vmap", marks=pytest.mark.slow), "loop"])
@pytest.mark.parametrize("case", ["averaging"])
def test_engines_train_there(case: str, engine: str, elsewhere: Callable[..., Any]) -> None:
    outcome = elsewhere(pretended.trained, case, engine)
    assert engine != "batched" or outcome.opened == "batched on pretended with graphs"
    check(outcome, case)


SLOW = (*LARGE, "averaging", "dropping", "lenet5", "lenet5-bn", "lstm", "subfedavg_cnn")
"""Convolutions, words; ``averaging`` is trained above."""


@pytest.mark.parametrize(
    "case",
    [
        *(case for case in MODEL_CASES if case not in SLOW),
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("grouped", *SLOW)),
    ],
)
def test_every_network_trains_there(case: str, elsewhere: Callable[..., Any]) -> None:
    """With recorded steps, as on a GPU: the trials that an engine has to pass there are passed."""
    outcome = elsewhere(pretended.trained, case, "batched")
    assert outcome.opened == "batched on pretended with graphs"
    check(outcome, case)


TOGETHER = "frozen-all", "maml-all"
"""Options that together include all others but a look ahead past what is frozen."""


@pytest.mark.parametrize(
    "option",
    [option if option in TOGETHER else pytest.param(option, marks=pytest.mark.slow) for option in OPTIONS],
)
def test_every_option_trains_there(option: str, elsewhere: Callable[..., Any]) -> None:
    extra = "sgd" if "inner_lr" in OPTIONS[option][0] else "momentum"
    check(elsewhere(pretended.trained, "mlp", "batched", option, extra), "mlp", option, extra)


@pytest.mark.parametrize(("case", "engine"), [("mlp", "VmapEngine"), ("lenet5-bn", "VmapEngine")])
def test_losses_that_look_at_other_models(case: str, engine: str, elsewhere: Callable[..., Any]) -> None:
    opened, block = elsewhere(pretended.guided, case)
    assert opened == engine
    spec, samples, sizes, work, _ = pretended.setting(case)
    terms = pretended.pulled(spec, len(sizes))
    Truth.of(spec, Batches(samples, CPU), 0, work, *arguments(spec, sizes, 0), terms).check(block)


@pytest.mark.parametrize("engine", [pytest.param("vmap", marks=pytest.mark.slow), "loop"])
def test_reduced_precision_trains_there(engine: str, elsewhere: Callable[..., Any]) -> None:
    """As near to the plain loop in float32 as engines in bfloat16 on the CPU have to be."""
    outcome = elsewhere(pretended.trained, "averaging", engine, "", "sgd", True, "bf16")
    graphs = " with graphs" if engine == "vmap" else ""
    assert outcome.opened == f"{engine} on pretended in bf16{graphs}"
    spec, samples, sizes, work, _ = pretended.setting("averaging")
    exact, loop = (
        LoopEngine(spec, Batches(samples, CPU), 0, precision=kind)
        .train(work, *arguments(spec, sizes, 0))
        .rows
        for kind in ("float32", "bf16")
    )
    off, gap = (loop - exact).norm(dim=1), (outcome.block.rows - exact).norm(dim=1)
    assert outcome.block.rows.dtype == exact.dtype
    assert ((gap > 0) & (gap <= COARSER * off.max())).all()


@pytest.mark.slow
def test_a_run_in_reduced_precision_trains_there(
    elsewhere: Callable[..., Any], settings: dict[str, Any]
) -> None:
    given = {**settings, "training": {**settings["training"], "precision": "bf16"}}
    engine, summary, models = elsewhere(pretended.ran, given)
    assert engine == "vmap on pretended in bf16 with graphs"
    assert models.dtype == np.float32
    expected = rayfl.run(settings).summary["accuracy_mean"]
    assert summary["accuracy_mean"] == pytest.approx(expected, abs=5)


@pytest.mark.parametrize(
    ("network", "settings", "engine"),
    [
        ("W3: MLP", {"clients": 2}, "batched on pretended with graphs"),
        pytest.param(
            *("skip, 8 x 8 grey", {"clients": 2, "samples": 2}, "batched on pretended with graphs"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_benchmark_of_networks_runs_there(
    network: str, settings: dict[str, Any], engine: str, elsewhere: Callable[..., Any]
) -> None:
    row = elsewhere(pretended.benched, network, settings)
    assert row["engine"].startswith(engine)
    assert row["times_floor"] == pytest.approx(row["seconds"] / row["floor_seconds"])


FIRST = "mt_hfl, scaffold"
"""Client state in a tree; the others are slow."""


@pytest.mark.parametrize(
    "method",
    [method if method == FIRST else pytest.param(method, marks=pytest.mark.slow) for method in METHODS],
)
def test_every_method_runs_there(
    method: str, elsewhere: Callable[..., Any], settings: dict[str, Any]
) -> None:
    """As on the CPU, but for the rounding of sums in another order."""
    made = {"algorithm": method, **METHODS[method]}
    training = {**settings["training"], **made.get("training", {}), "engine": "batched"}
    given = {**settings, **made, "rounds": 2, "training": training}
    engine, summary, models = elsewhere(pretended.ran, given)
    assert engine == "batched on pretended with graphs"
    result = rayfl.run(given)
    expected = Checkpoint.load(checkpoints(result.path / "checkpoints")[-1]).models
    assert summary["clusters"] == result.summary["clusters"]
    assert summary["bytes_up"] == result.summary["bytes_up"]
    np.testing.assert_allclose(models, expected, rtol=1e-3, atol=1e-5)

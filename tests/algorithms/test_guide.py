"""The guide for authors of methods, :mod:`rayfl.algorithms.base`, whose example runs."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import rayfl.algorithms.base
from rayfl.config import load
from rayfl.errors import Interrupted
from rayfl.events import RoundDone
from rayfl.rundir import RunDirectory
from rayfl.runtime.inline import InlineBackend
from rayfl.servers.building import build
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from rayfl.servers.driver import Driver


@pytest.fixture(scope="module")
def guide() -> Iterator[ModuleType]:
    """A module of the example in the guide."""
    text = rayfl.algorithms.base.__doc__ or ""
    code = text[text.index("    from __future__") : text.index("To mix by what")]
    module = sys.modules["guide"] = ModuleType("guide")
    exec(textwrap.dedent(code), module.__dict__)
    yield module
    del sys.modules["guide"]


def run(method: Any, folder: Path, stop: int | None = None) -> Checkpoint:
    """A run of eight rounds, stopped once if asked; its last checkpoint."""
    overrides = ["rounds=8", "training.participation=0.5", f"output.root={folder}", "output.report=false"]
    config = load("digits-demo", [*overrides, "algorithm=fedavg", "execution.backend=inline"])
    config = config.model_copy(update={"algorithm": method})
    stages, host = build(config)
    directory, seen = RunDirectory.create(config), 0

    def stopping() -> bool:
        return stop is not None and seen >= stop

    def watch(event: Any) -> None:
        nonlocal seen
        seen += isinstance(event, RoundDone)

    backend = InlineBackend()
    try:
        try:
            Driver(config, stages, backend, directory, host, watch, stopping).run()
        except Interrupted:
            Driver(config, stages, backend, directory, host).run()
        kind = type(method.begin(Driver(config, stages, backend, directory, host).setup))
        return Checkpoint.load(checkpoints(directory.path / "checkpoints")[-1], kind)
    finally:
        backend.close()


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_the_example_runs_and_goes_on_where_it_was_stopped(guide: ModuleType, tmp_path: Path) -> None:
    catch_up = guide.CatchUp
    whole = run(catch_up(), tmp_path / "whole")
    assert whole.state.behind.any()  # type: ignore[attr-defined]
    assert not whole.state.behind.all()  # type: ignore[attr-defined]
    stopped = run(catch_up(), tmp_path / "stopped", stop=4)
    np.testing.assert_array_equal(stopped.models, whole.models)
    plain = run(catch_up(factor=1.0), tmp_path / "plain")
    assert (plain.models != whole.models).any()

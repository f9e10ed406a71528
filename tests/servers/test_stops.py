"""An error of any kind in a round loses none of those before it."""

from __future__ import annotations

import json
from typing import Any

import pytest

import rayfl
from rayfl.algorithms.ifca import IFCA
from rayfl.rundir import RunDirectory
from rayfl.servers.checkpoint import checkpoints
from tests.runs import METHODS


@pytest.mark.parametrize("error", [KeyError("missing"), ZeroDivisionError()])
def test_a_mistake_in_a_hook_leaves_a_checkpoint_and_no_trace_of_its_round(
    error: Exception, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a method's author meets it; mended, the run goes on to the bits of one without the mistake."""
    output = {**settings["output"], "checkpoint_every": 0}
    config = {**settings, **METHODS["ifca"], "rounds": 4, "output": output}
    whole = rayfl.run({**config, "seed": 1})
    end = IFCA.end

    def wrong(self: IFCA, setup: Any, state: Any, *rest: Any) -> Any:
        if state.round == 2:
            raise error
        return end(self, setup, state, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(IFCA, "end", wrong)
        with pytest.raises(type(error)):
            rayfl.run({**config, "seed": 1, "name": "wrong"})
    root = whole.path.parent
    (stopped,) = (path for path in root.iterdir() if path.name.startswith("wrong"))
    assert [path.name for path in checkpoints(stopped / "checkpoints")] == ["round-00002"]
    kept = json.loads((stopped / "clusters.json").read_text())["timeline"]
    assert all(entry["round"] < 2 for entry in kept)
    status = RunDirectory(stopped).read_json("status.json")
    assert status is not None
    assert status["state"] == "failed"
    assert status["why"].startswith(f"wrong, {__file__}:")
    assert type(error).__name__ in status["why"]
    assert rayfl.resume(stopped).summary["models_sha256"] == whole.summary["models_sha256"]

"""The discrete-event model of experiments/scaling: what it says where the answer is known."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "experiments" / "scaling" / "model.py"


@pytest.fixture(scope="module")
def model() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules["scaling_model"] = found
    spec.loader.exec_module(found)
    return found


FREE = {
    name: 0.0
    for name in (
        "round",
        "message",
        "work",
        "work_number",
        "step",
        "add",
        "add_number",
        "ray",
        "latency",
        "fetch",
        "byte",
    )
}


def case(model: ModuleType, **changes: object) -> object:
    known = {"nodes": 1, "actors": 1, "cohort": 40, "block": 10, "steps": 5, "parameters": 1000}
    return model.Case(**{**known, "samples": 10**9, **changes})


def test_one_actor_works_on_one_message_after_the_other(model: ModuleType) -> None:
    costs = model.Costs(**{**FREE, "round": 2.0, "work": 0.5, "work_number": 1e-3, "step": 0.01, "add": 0.25})
    found = model.predict(case(model), costs)
    assert found.seconds == pytest.approx(2.0 + 40 * 5 * 0.01 + 4 * (0.5 + 1.0) + 4 * 0.25)
    assert found.busy["training"] == pytest.approx(40 * 5 * 0.01 + 4 * 1.5)
    assert found.limit == "training"


@pytest.mark.parametrize(("actors", "cores", "seconds"), [(4, None, 1.0), (4, 2, 2.0), (2, None, 2.0)])
def test_actors_work_side_by_side_as_far_as_there_are_cores(
    model: ModuleType, actors: int, cores: int | None, seconds: float
) -> None:
    costs = model.Costs(**{**FREE, "step": 0.02})
    assert model.predict(case(model, actors=actors, cores=cores), costs).seconds == pytest.approx(seconds)


def test_the_driver_handles_one_message_after_the_other(model: ModuleType) -> None:
    costs = model.Costs(**{**FREE, "message": 1.0})
    found = model.predict(case(model, nodes=40, cohort=400), costs)
    assert found.seconds == pytest.approx(40.0)
    assert found.limit == "driver"


def test_calls_take_a_moment_on_their_way(model: ModuleType) -> None:
    """To the actor and back, to the LPS and back: four legs, and a second message waits at the actor."""
    costs = model.Costs(**{**FREE, "latency": 1.0})
    assert model.predict(case(model, cohort=20), costs).seconds == pytest.approx(4.0)


def test_a_model_spreads_from_whoever_has_it(model: ModuleType) -> None:
    """8 nodes in three steps, each as long as a copy; and all sums through one link."""
    costs = model.Costs(**{**FREE, "byte": 1.0})
    found = model.predict(case(model, nodes=8, cohort=80), costs)
    assert found.seconds == pytest.approx(3 * 4000 + 7 * 8000, rel=0.3)
    assert found.busy["link into the LPS"] == pytest.approx(7 * 8000)
    assert found.limit == "link into the LPS"


def test_a_tree_relieves_the_link_of_the_lps(model: ModuleType) -> None:
    costs = model.Costs(**{**FREE, "byte": 1.0})
    flat = case(model, nodes=64, cohort=640 * 4)
    tree = replace(flat, fan_in=8)
    first, second = (model.predict(each, costs) for each in (flat, tree))
    assert second.busy["link into the LPS"] < 0.2 * first.busy["link into the LPS"]
    assert second.seconds < first.seconds


def test_shards_share_what_one_link_had_to_carry(model: ModuleType) -> None:
    """Four nodes with a block each: to every LPS go a quarter of three sums, three quarters of the model."""
    costs = model.Costs(**{**FREE, "byte": 1.0})
    whole = case(model, nodes=4)
    one, four = (model.predict(each, costs) for each in (whole, replace(whole, shards=4)))
    assert one.busy["link into the LPS"] == pytest.approx(3 * 8000)
    assert four.busy["link into the LPS"] == pytest.approx(3 * 2000 + 3 * 1000)
    adding = model.Costs(**{**FREE, "add_number": 1.0})
    assert model.predict(whole, adding).busy["LPS"] == pytest.approx(4 * 1000)
    assert model.predict(replace(whole, shards=4), adding).busy["LPS"] == pytest.approx(4 * 250)


def test_costs_are_found_again_in_what_was_measured(model: ModuleType) -> None:
    planted = model.Costs(0.01, 1e-3, 8e-4, 2e-8, 1e-4, 3e-4, 1e-8, 2e-4, 5e-4, 1e-3, 1e-9)
    rows = [
        {
            "P": p,
            "messages": m,
            "driver": planted.round + m * planted.message,
            "client actors": 0.2 + m * (planted.work + p * planted.work_number),
            "local parameter server": m * (planted.add + p * planted.add_number),
            "Ray itself": m * planted.ray,
        }
        for p in (2410, 166_447)
        for m in (10, 100)
    ]
    link = {"fetch": planted.fetch, "byte": planted.byte, "latency": planted.latency}
    found = model.costs_of(rows, {"step": planted.step}, link)
    assert asdict(found) == pytest.approx(asdict(planted), rel=1e-6)


def test_the_prediction_from_the_costs_that_lie_here(
    model: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = model.read(model.COSTS)
    rows = model.table(costs, (1, 8))
    assert [row["nodes"] for row in rows] == [1] * 6 + [8] * 6
    assert all(0 < row["efficiency"] <= 1 for row in rows)
    profile = json.loads((model.HERE / "profile.json").read_text())
    fitted = vars(model.costs_of_profile(profile["profile"], profile["link"]))
    assert fitted == pytest.approx(vars(costs), rel=1e-9)  # least squares, by whatever library there is
    model.show(costs, 10.0, tmp_path, (1, 4))
    assert capsys.readouterr().out.startswith("Prediction, not a measurement")
    assert {path.name for path in tmp_path.iterdir()} == {"prediction.md", "prediction.svg"}


def test_the_measured_points_of_the_readme(model: ModuleType) -> None:
    """As far off as the README says."""
    costs = model.read(model.COSTS)
    errors = {name: model.predict(case, costs).seconds / seconds - 1 for name, case, seconds in model.KNOWN}
    text = (model.HERE / "README.md").read_text()
    for name, error in errors.items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} ")]
        assert float(line.split("|")[-2].split()[0]) == pytest.approx(100 * error, abs=0.6)


def test_costs_that_are_not_there_are_one_line(model: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no costs"):
        model.read(tmp_path / "none.json")

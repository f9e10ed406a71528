"""The resource arithmetic: what cannot fit is refused before anything of it exists."""

from __future__ import annotations

import pytest

from rayfl.config import load
from rayfl.errors import ConfigError
from rayfl.models.flat import ModelSpec
from rayfl.runtime import resources
from rayfl.runtime.driving import arithmetic, kept_numbers
from rayfl.runtime.resources import Available, Copies, Keeping, Node, ResourcePlan, plan_resources
from rayfl.servers import building
from rayfl.servers.building import check_model
from tests.runs import METHODS


def test_a_model_beyond_the_memory_is_refused_before_it_is_built():
    config = load("digits-demo", ["model=mlp", "model.hidden=[1000000000]"])
    with pytest.raises(ConfigError, match=r"model: 75,000,000,010 parameters need 1.20 TB to train one"):
        building.build(config)
    with pytest.raises(ConfigError, match=r"model: 'mlp' cannot be built"):
        ModelSpec.of(
            load({}, ["model=mlp", "model.hidden=[2000000000, 2000000000, 7]"]).model, (2**31,), 10, 0
        )


def test_the_bound_of_a_model_is_the_memory():
    check_model(10, 160.0)
    with pytest.raises(ConfigError, match="at most 10 parameters fit"):
        check_model(11, 160.0)


def test_it_says_how_much_lands_at_one_local_server():
    """6,400 blocks of a model of 10^6 parameters, flat and in a tree; of one client each they are smaller."""
    node = Available((Node(64.0, 0.0),), 1e13)
    settings = {"training": {"participation": 1.0}}
    for block, fan_in, sums, said in (
        (2, None, 6400, "51.2 GB"),
        (2, 80, 80, ""),
        (1, None, 6400, "25.6 GB"),
    ):
        config = load({**settings, "execution": {"block_size": block, "fan_in": fan_in}})
        plan = plan_resources(config, 6400 * block, block, 10**6, 0, node)
        assert plan.sums == sums
        assert plan.sums_gb == pytest.approx(0.004 * block * sums)
        assert any("fan_in" in line for line in plan.lines()) == bool(said)
        assert said in "".join(plan.lines())


def planned(
    parameters: int, *more: str, models: int = 1, memory: float = 64e9, block: int = 1
) -> ResourcePlan:
    config = load({}, ["training.participation=1", f"execution.block_size={block}", *more])
    node = Available((Node(2.0, 0.0, memory=memory),), memory, 0.3 * memory)
    return plan_resources(config, 100, block, parameters, 0, node, models)


def test_it_says_how_many_copies_of_a_model_there_are():
    """10^8 parameters, 400 MB: 100 clients a round do not leave 100 models anywhere."""
    plan = planned(10**8)
    assert plan.copies == Copies(client=4, server=3, driver=2, store=2 + (2 * 5 + 4) + 4)
    assert plan.store_gb == pytest.approx(0.4 * plan.copies.store)
    (line,) = [line for line in plan.lines() if "copies" in line]
    assert "4 copies (400 MB) of the model in a client actor, 3 in an LPS, 2 in the driver, 20 in the" in line
    assert line.endswith(f"{plan.node_gb:.2f} GB on a node with 2 client actors, the LPSs and the driver")
    several = planned(10**8, block=4)
    assert several.copies.client == 4 + 3
    assert planned(5 * 10**6, block=4).copies.client == 1 + 3 * 2 + 4 + 3  # three train in a call
    small = planned(10**5)
    assert small.copies.store == 2 + 100
    assert planned(10**8, models=3).copies.store == 6 + (4 * 5 + 4) + 12
    assert planned(10**8, "local=scaffold").copies.store >= 200


def test_it_says_what_a_shard_of_a_model_takes():
    """Four LPSs: each has a quarter of a model, of what is added, and of what clients send."""
    whole, quarter = (
        planned(10**8, "execution.fan_in=20", "hierarchy.lps_actors=4", f"execution.shard_models={sharded}")
        for sharded in ("false", "true")
    )
    assert (whole.copies.server, quarter.copies.server) == (1, pytest.approx(0.25, abs=1e-3))
    assert quarter.copies.client == whole.copies.client + 1  # the model from its shards
    assert quarter.sums_gb == pytest.approx(whole.sums_gb / 4, rel=1e-2)
    (line,) = [line for line in quarter.lines() if "copies" in line]
    assert "0.25 in an LPS (which has one of 4 shards)" in line
    sharded = ("hierarchy.lps_actors=4", "execution.shard_models=true")
    rows = planned(10**8, "aggregation=median", *sharded, block=4, memory=1e13)
    assert rows.copies.client == planned(10**8, "aggregation=median", block=4, memory=1e13).copies.client + 5
    small = planned(70_000, "hierarchy.lps_actors=4", "execution.shard_models=true")
    assert small.shards == 2  # of at least 65,536 numbers, but for the last one
    assert small.largest == pytest.approx(65_536 / 70_000)


def test_it_counts_the_clients_models_where_these_are_sent():
    """An aggregation rule needs the models of a round, 100 here, whatever the blocks."""
    for block in (1, 4):
        plan = planned(10**8, "aggregation=median", "execution.fan_in=4", block=block, memory=1e13)
        assert plan.copies.store == 2 + 100
        assert plan.copies.client == 3 + block
        assert plan.sums_gb == pytest.approx(40)
        (line,) = [line for line in plan.lines() if "local server" in line]
        assert line.endswith("100 models of clients, 40.0 GB; a lower 'training.participation' sends fewer")
    short = planned(10**8, "aggregation=median", memory=10e9).lines()
    assert any("is written to disk" in line for line in short)
    assert not any("fan_in" in line for line in short)


def test_activations_of_a_batch_are_in_the_plan_but_refuse_nothing():
    """Two client actors on a node with 64 GB, each with 40 GB of activations."""
    plan = planned(10**5)
    large = plan.with_activations(40e9)
    assert large.worker_gb == pytest.approx(plan.worker_gb + 40)
    assert large.node_gb == pytest.approx(plan.node_gb + 2 * 40)
    lines = "; ".join(large.lines())
    assert "40.3 GB a client actor (40.0 GB for a batch)" in lines
    assert "a smaller 'evaluation.batch_size' or 'training.batch_size' or a smaller model need less" in lines
    assert "for a batch" not in "; ".join(plan.lines())
    inline = planned(10**5, "execution.backend=inline")
    assert inline.with_activations(1e9).node_gb == pytest.approx(inline.node_gb + 1)


def test_where_activations_are_on_a_gpu_they_take_no_main_memory(settings):
    plans = []
    for gpus in (0, 0.25):
        execution = {**settings["execution"], "gpus_per_actor": gpus, "device": "auto"}
        config = load({**settings, "execution": execution})
        stages, host = building.build(config)
        plans.append(arithmetic(config, stages[0].federation, host, Available((Node(2.0, 2.0),), 1e12)))
    assert plans[0].activations_gb > 0
    assert plans[1].activations_gb == 0


def test_it_says_where_a_model_does_not_fit():
    lines = planned(10**8, memory=5e9).lines()
    assert any(
        "does not fit: a node has 5.00 GB free" in line and "execution.actors" in line for line in lines
    )
    (line,) = [line for line in lines if "object store of a node has only 1.50 GB" in line]
    assert "'execution.fan_in' sends fewer sums" in line
    in_tree = planned(10**8, "execution.fan_in=4", memory=8e9).lines()
    assert any("is written to disk" in line for line in in_tree)
    assert not any("sends fewer sums" in line for line in in_tree)
    assert not any("fit" in line for line in planned(10**6, memory=5e9).lines())
    (line,) = [x for x in planned(10**8, "execution.backend=inline").lines() if "copies" in x]
    assert "27 copies of 400 MB" in line
    with pytest.raises(ConfigError, match=r"execution.actors: 2 actors of 1.87 GB each do not fit in 3.00"):
        planned(10**8, memory=3e9)


# -- what clients keep -------------------------------------------------------------------------------------


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 GB of memory, 100 GB of disk."""
    monkeypatch.setattr(resources, "total_memory", lambda: 16 * 10**9)
    monkeypatch.setattr(resources, "free_disk", lambda folder: 1e11)


def kept(*more: str, clients: int = 10**5) -> Keeping:
    """1,000 clients a round, each of which keeps 10^5 numbers, 400 kB."""
    given = ["rounds=1000", f"training.participation={1000 / clients}", *more]
    return Keeping.of(load({}, given), clients, 10**5)


@pytest.mark.usefixtures("small_machine")
def test_it_says_the_disk_that_clients_need():
    """100,000 clients with 400 kB each, of which up to as many again are out of date."""
    found, row, all_of_it = kept("execution.backend=inline"), 4e5, 1e5
    assert found.all == all_of_it * row
    assert found.memory == 2 * 0.25 * 16e9 + 1000 * row
    assert found.disk == (2 * all_of_it + all_of_it / 32 + 2 * 10 * 1000) * row
    assert found.line() == (
        "clients keep up to 40.0 GB between rounds, at most 8.40 GB of it in memory; "
        "up to 89.2 GB on disk, where 100 GB are free"
    )
    assert kept().memory is None, "Ray's object store has them"
    assert "memory" not in kept().line()
    assert kept("rounds=7").all == 7 * 1000 * row, "no more than take part"
    small = kept("rounds=7", "execution.backend=inline", "training.participation=1", clients=100)
    assert small.disk == 2 * 100 * row, "copied into both checkpoints"
    large = kept("rounds=7", "execution.backend=inline", "training.participation=1", clients=1000)
    assert large.disk == 2 * (2 * 1000 + 256) * row, "no checkpoint needs more than what was held"
    less = kept("execution.backend=inline", "execution.state_memory=0.01")
    assert less.memory == 2 * 0.01 * 16e9 + 1000 * row


@pytest.mark.usefixtures("small_machine")
def test_states_that_go_to_disk_are_no_copies_in_memory():
    few, many = (
        planned(10**8, "local=scaffold", "execution.backend=inline", f"execution.state_memory={share}")
        for share in (0.1, 1)
    )
    assert many.copies.store - few.copies.store == (80 + 100) - (8 + 100)
    assert few.node_gb < many.node_gb


@pytest.mark.parametrize("method", METHODS)
def test_what_clients_of_each_method_keep_is_known_before(method: str):
    """Numbers of a client; P is 1,210, of which the last layer has 170."""
    own = {"algorithm": method, **METHODS[method], "model": {"name": "mlp", "hidden": [16]}}
    config = load({"partition": {"name": "iid", "clients": 6}, **own})
    stages, host = building.build(config)
    expected = {"solo": 1210, "lg_fedavg": 1210 - 170, "cfl": 1210, "sub_fedavg": 2 * 1210}
    expected |= {each: 1210 for each in METHODS if "scaffold" in each or "mtl" in each}
    assert kept_numbers(config, stages[0].federation, host) == expected.get(method, 0)


@pytest.mark.parametrize(
    ("gpus", "share", "room"),
    [
        (2, 0.4, 4),
        (2, 0.6, 2),
        (8, 0.3, 24),
        (8, 0.35, 16),
        (1, 0.1, 10),
        (1.5, 0.5, 3),
        (0.5, 0.5, 1),
        (4, 2, 2),
    ],
)
def test_a_fraction_of_a_gpu_is_taken_from_one_gpu(gpus: float, share: float, room: int) -> None:
    assert Node(100, gpus).room(1, share) == room

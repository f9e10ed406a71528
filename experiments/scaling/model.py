"""Predict seconds per round for 1 to 1,000 nodes: a discrete-event model of rayfl with measured costs.

::

    python experiments/scaling/model.py measure --out costs.json   a few minutes, on this machine
    python experiments/scaling/model.py profile --bench FILE       by 'rayfl bench profile --json FILE'
    python experiments/scaling/model.py check --costs costs.json   against 1, 2 and 4 Ray nodes here
    python experiments/scaling/model.py predict                    figure and table, by the costs.json here

The model has the same parts as rayfl: a driver that handles one message after another, client actors that
work on one message while a second waits, messages as :func:`rayfl.backend.bundles` makes them, a model that
every node fetches once from any node that has it, an LPS that fetches all sums and adds them, or several that
do so with a shard of the model each, ``execution.fan_in``, and a link in and out of every node. Each takes as
long as was measured per message, sum and byte. Not modelled: clients of different sizes, failures, tests,
Ray's scheduling and its head node with thousands of actors, and the network between racks. It is a
prediction: rayfl has not been run on 1,000 nodes.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
COSTS = HERE / "costs.json"


@dataclass(frozen=True)
class Costs:
    """Measured seconds: CPU time, except for the network.

    Attributes:
        round: of the driver per round, without messages.
        message: of the driver per message, sent and answered.
        work: of a client actor per message, without training.
        work_number: of a client actor per message and parameter of the model, to compute and store its sum.
        step: of a client actor per client-step of W1.
        add: of an LPS per sum.
        add_number: of an LPS per sum and parameter.
        ray: of Ray's own processes per message.
        latency: of a call, one way; nothing is busy during this time.
        fetch: of a link per object, in addition to its bytes.
        byte: of a link per byte.
    """

    round: float
    message: float
    work: float
    work_number: float
    step: float
    add: float
    add_number: float
    ray: float
    latency: float
    fetch: float
    byte: float


@dataclass(frozen=True)
class Case:
    """The case for which a round is predicted.

    Attributes:
        nodes: of the cluster; the driver is on the first, the LPSs are on the first ones.
        actors: client actors per node.
        cohort: clients per round.
        block: clients per block.
        steps: client-steps per client.
        parameters: P.
        samples: per client and epoch; they decide which blocks share a message.
        fan_in: ``execution.fan_in``.
        shards: of the model, each at an LPS of its own; at most as many as nodes.
        cores: of all nodes together, if they are on one machine; None: each process has its own core.
        step: seconds of a client-step, if different from that of the costs.
    """

    nodes: int
    actors: int
    cohort: int
    block: int
    steps: int
    parameters: int
    samples: int
    fan_in: int | None = None
    shards: int = 1
    cores: int | None = None
    step: float | None = None


@dataclass(frozen=True)
class Prediction:
    """Seconds of a round, and how long each resource was busy (the busiest of its kind)."""

    seconds: float
    busy: dict[str, float]

    @property
    def limit(self) -> str:
        """The resource that was busiest."""
        return max(self.busy, key=lambda name: self.busy[name])


class Resource:
    """A resource that serves one request after another, or ``places`` at a time."""

    def __init__(self, places: int = 1) -> None:
        self.places, self.taken, self.busy = places, 0, 0.0
        self.waiting = deque[Callable[[], None]]()

    @property
    def queue(self) -> int:
        """The number of requests that are served or waiting."""
        return self.taken + len(self.waiting)


class World:
    """Events in the order of their time."""

    def __init__(self) -> None:
        self.now, self._events, self._count = 0.0, list[tuple[float, int, Callable[[], None]]](), 0

    def at(self, when: float, then: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, then))

    def use(self, resources: Sequence[Resource], seconds: float, then: Callable[[], None]) -> None:
        """Acquire the resources one after another, hold all of them for some seconds, and release them."""

        def take(place: int) -> None:
            if place == len(resources):
                self.at(self.now + seconds, leave)
            elif resources[place].taken < resources[place].places:
                resources[place].taken += 1
                take(place + 1)
            else:
                resources[place].waiting.append(lambda: take(place + 1))

        def leave() -> None:
            for resource in resources:
                resource.busy += seconds
                if resource.waiting:
                    resource.waiting.popleft()()
                else:
                    resource.taken -= 1
            then()

        take(0)

    def run(self) -> float:
        while self._events:
            self.now, _, then = heapq.heappop(self._events)
            then()
        return self.now


class Round:
    """One round of a case."""

    def __init__(self, case: Case, costs: Costs) -> None:
        self.case, self.costs, self.world = case, costs, World()
        self.driver, self.lps = Resource(), [Resource() for _ in range(case.shards)]
        self.cores = [] if case.cores is None else [Resource(case.cores)]
        self.actors = [Resource() for _ in range(case.nodes * case.actors)]
        self.into, self.out = ([Resource() for _ in range(case.nodes)] for _ in range(2))
        self.holders = [[shard] for shard in range(case.shards)]  # the nodes that hold each shard
        self.coming = dict[tuple[int, int], list[Callable[[], None]]]()
        self.messages, self.left, self.unfinished = self._messages(), 0, case.shards
        self.sums: list[int] = []  # the node of each sum

    def _messages(self) -> deque[list[int]]:
        """The sizes of the blocks of each message, in the order of sending."""
        from rayfl.backend import Task, bundles

        case = self.case
        sizes = [case.block] * (case.cohort // case.block)
        sizes += [case.cohort % case.block] if case.cohort % case.block else []
        group = case.fan_in or 1
        groups = [sizes[first : first + group] for first in range(0, len(sizes), group)]
        tasks = [
            Task("train", None, cost=sum(g), work=case.parameters * case.samples * sum(g)) for g in groups
        ]
        messages = bundles(tasks, len(self.actors))
        return deque([[sum(groups[i]) for i in bundle] for bundle in messages])

    def predict(self) -> Prediction:
        self.left = len(self.messages)
        self.world.use([self.driver, *self.cores], self.costs.round / 2, self._begin)
        seconds = self.world.run()
        return Prediction(
            seconds,
            {
                "training": max(actor.busy for actor in self.actors),
                "driver": self.driver.busy,
                "LPS": max(each.busy for each in self.lps),
                "link into the LPS": max(each.busy for each in self.into[: self.case.shards]),
                "link out of the first node": self.out[0].busy,
            },
        )

    def _begin(self) -> None:
        for _ in range(2):
            for actor in range(len(self.actors)):
                self._feed(actor)

    def _feed(self, actor: int) -> None:
        if self.messages:
            message = self.messages.popleft()
            seconds = self.costs.message / 2
            self._call([self.driver], seconds, lambda: self._arrived(actor, message))
            if self.cores:
                self.world.use(self.cores, self.costs.ray, lambda: None)

    def _call(self, who: list[Resource], seconds: float, then: Callable[[], None]) -> None:
        """Work that ends with a call or an answer, which arrives after the latency."""
        world, latency = self.world, self.costs.latency
        world.use([*who, *self.cores], seconds, lambda: world.at(world.now + latency, then))

    def _arrived(self, actor: int, message: list[int]) -> None:
        self._with_model(actor // self.case.actors, lambda: self._work(actor, message))

    def _with_model(self, node: int, then: Callable[[], None]) -> None:
        """Continue as soon as all shards of the model are on this node."""
        missing = self.case.shards

        def one_more() -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                then()

        for shard in range(self.case.shards):
            self._with_shard(shard, node, one_more)

    def _with_shard(self, shard: int, node: int, then: Callable[[], None]) -> None:
        holders, place = self.holders[shard], (shard, node)
        if node in holders:
            then()
        elif place in self.coming:
            self.coming[place].append(then)
        else:
            self.coming[place] = [then]
            source = min(holders, key=lambda holder: self.out[holder].queue)

            def there() -> None:
                holders.append(node)
                for callback in self.coming.pop(place):
                    callback()

            self._send(source, node, 4 * self.case.parameters / self.case.shards, there)

    def _send(self, source: int, target: int, size: float, then: Callable[[], None]) -> None:
        if source == target:
            then()
        else:
            seconds = self.costs.fetch + size * self.costs.byte
            self.world.use([self.out[source], self.into[target]], seconds, then)

    def _work(self, actor: int, message: list[int]) -> None:
        costs, case = self.costs, self.case
        training = sum(message) * case.steps * (costs.step if case.step is None else case.step)
        rest = costs.work + len(message) * case.parameters * costs.work_number
        self._call([self.actors[actor]], training + rest, lambda: self._done(actor, message))

    def _done(self, actor: int, message: list[int]) -> None:
        self.sums += [actor // self.case.actors] * len(message)
        self.world.use([self.driver, *self.cores], self.costs.message / 2, lambda: self._answered(actor))

    def _answered(self, actor: int) -> None:
        self.left -= 1
        self._feed(actor)
        if not self.left:
            for shard in range(self.case.shards):
                self._reduce(shard, self.sums)

    def _reduce(self, shard: int, sums: list[int]) -> None:
        """Add the sums of a shard in a tree, then at its LPS."""
        if self.case.fan_in is None or len(sums) <= self.case.fan_in:
            self._call([self.driver], 0.0, lambda: self._gather(shard, sums, self.lps[shard], self._finish))
            return
        groups = [sums[i : i + self.case.fan_in] for i in range(0, len(sums), self.case.fan_in)]
        waiting, above = len(groups), [group[0] for group in groups]

        def added() -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                self._reduce(shard, above)

        for group in groups:
            call = self.costs.message / 2

            def ask(group: list[int] = group) -> None:
                self._gather(group[0], group, Resource(), added)

            self._call([self.driver], call, ask)

    def _gather(self, node: int, sums: list[int], who: Resource, then: Callable[[], None]) -> None:
        """Fetch the sums of a shard to a node and add them when all have arrived."""
        missing, numbers = len(sums), self.case.parameters / self.case.shards
        seconds = len(sums) * (self.costs.add + numbers * self.costs.add_number)

        def there() -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                self._call([who], seconds, then)

        for source in sums:
            self._send(source, node, 8 * numbers, there)

    def _finish(self) -> None:
        self.unfinished -= 1
        if not self.unfinished:
            self.world.use([self.driver, *self.cores], self.costs.round / 2, lambda: None)


def predict(case: Case, costs: Costs) -> Prediction:
    """Predict one round."""
    return Round(case, costs).predict()


# -- measuring ---------------------------------------------------------------------------------------------


def _workload(name: str, clients: int, model: list[int], shape: tuple[int, int, int]) -> Any:
    """Clients with one step each, so that messages and sums dominate."""
    from rayfl.bench.workloads import Workload

    return Workload(
        name,
        "one step a client",
        clients=clients,
        samples=10,
        cohort=clients,
        shape=shape,
        classes=47,
        model={"name": "mlp", "hidden": model},
        training={"epochs": 1, "batch_size": 10, "lr": 0.01},
    )


_BATCHES = 4
"""How often each cost is measured."""


def measure_one(small: bool, block: int, rounds: int) -> dict[str, Any]:
    """CPU seconds of a round by process, with one message per block; runs in this process with a local
    Ray.
    """
    from rayfl import backend
    from rayfl.bench.measure import running
    from rayfl.bench.profile import by_process_now

    backend.MESSAGE_WORK = 1.0
    task = _workload("small", 200, [32], (1, 8, 8)) if small else _workload("large", 200, [200], (1, 28, 28))
    execution = {"backend": "ray", "actors": 1, "cpus_per_actor": 0.5, "block_size": block}
    with tempfile.TemporaryDirectory() as folder, running(task, Path(folder), execution) as rayfl:
        for _ in range(3):
            rayfl.round()
        actors = set(rayfl.driver.backend.pids())
        samples = []
        for _ in range(_BATCHES):  # the minimum is least affected by other load on the machine
            before = by_process_now(actors)
            for _ in range(rounds):
                rayfl.round()
            after = by_process_now(actors)
            samples.append({who: (after[who] - before[who]) / rounds for who in after})
        cpu_seconds = {who: min(each[who] for each in samples) for who in samples[0]}
        return {**cpu_seconds, "P": rayfl.driver.host.spec.P, "messages": 200 // block}


def measure_step(rounds: int) -> dict[str, Any]:
    """CPU seconds of a client-step of W1 in one process."""
    from rayfl.bench.measure import running
    from rayfl.bench.workloads import WORKLOADS

    task = replace(WORKLOADS["W1"], clients=480, cohort=240)
    with tempfile.TemporaryDirectory() as folder, running(task, Path(folder), {"backend": "inline"}) as rayfl:
        rayfl.round()
        durations = []
        for _ in range(rounds):
            begun = time.process_time()
            rayfl.round()
            durations.append(time.process_time() - begun)
        return {"step": min(durations) / task.steps}


class Echo:
    """An actor that only answers."""

    def answer(self) -> None:
        """Return nothing."""


def measure_link() -> dict[str, Any]:
    """Seconds per object and per byte between two Ray nodes on this machine."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1, resources={"other": 1})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")

    def make(count: int, size: int) -> list[Any]:
        return [ray.put(np.zeros(size, np.uint8)) for _ in range(count)]

    remote_make = ray.remote(make).options(resources={"other": 0.1}, num_cpus=0)
    costs, latencies = {}, []
    try:
        actor = ray.remote(Echo).options(resources={"other": 0.1}, num_cpus=0).remote()
        for _ in range(200):
            start_time = time.perf_counter()
            ray.get(actor.answer.remote())
            latencies.append((time.perf_counter() - start_time) / 2)
        for count, size in ((50, 200_000), (300, 200_000), (20, 20_000_000)):
            durations = []
            for _ in range(3):
                refs = ray.get(remote_make.remote(count, size))
                start_time = time.perf_counter()
                ray.get(refs)
                durations.append(time.perf_counter() - start_time)
            costs[count, size] = min(durations) / count
    finally:
        ray.shutdown()
        cluster.shutdown()
    byte = max(0.0, (costs[20, 20_000_000] - costs[300, 200_000]) / (20_000_000 - 200_000))
    return {"fetch": max(0.0, costs[300, 200_000] - 200_000 * byte), "byte": byte, "latency": min(latencies)}


def costs_of(rows: Sequence[dict[str, Any]], step: dict[str, Any], link: dict[str, Any]) -> Costs:
    """Costs from differences between few and many messages, and between small and large models."""
    by_case = {(row["P"], row["messages"]): row for row in rows}
    small, large = sorted({row["P"] for row in rows})
    few, many = sorted({row["messages"] for row in rows})

    def slope(who: str, parameters: int) -> float:
        a, b = by_case[parameters, few], by_case[parameters, many]
        return float(max(0.0, (b[who] - a[who]) / (many - few)))

    def line(who: str) -> tuple[float, float]:
        small_slope, by_number = slope(who, small), (slope(who, large) - slope(who, small)) / (large - small)
        by_number = max(0.0, by_number)
        return max(0.0, small_slope - small * by_number), by_number

    message = statistics.mean(slope("driver", parameters) for parameters in (small, large))
    work, work_number = line("client actors")
    add, add_number = line("local parameter server")
    return Costs(
        round=max(0.0, by_case[small, few]["driver"] - few * message),
        message=message,
        work=work,
        work_number=work_number,
        step=step["step"],
        add=add,
        add_number=add_number,
        ray=statistics.mean(slope("Ray itself", parameters) for parameters in (small, large)),
        latency=link["latency"],
        fetch=link["fetch"],
        byte=link["byte"],
    )


SENT = {"W1": (16, 16, 166_447), "W2": (10, 10, 44_426), "W3": (2, 4, 2_410)}
"""For the workloads of ``rayfl bench`` with two client actors: messages per round, sums, parameters."""


def costs_of_profile(rows: Sequence[dict[str, Any]], link: dict[str, Any]) -> Costs:
    """Nonnegative costs that best explain the times by process of ``rayfl bench profile``.

    Args:
        rows: of its JSON: ``where``, ``what`` and milliseconds of a round by workload.
        link: ``latency``, ``fetch`` and ``byte``, which it does not measure.
    """
    from scipy.optimize import nnls

    from rayfl.bench.workloads import WORKLOADS

    by_place = {(row["where"], row["what"]): row for row in rows}
    sent = np.array([SENT[name] for name in SENT], np.float64)
    messages, sums, numbers = sent[:, 0], sent[:, 1], sent[:, 1] * sent[:, 2]

    def seconds(where: str, what: str) -> Any:
        return np.array([by_place[where, what][name] / 1000 for name in SENT])

    def fit(*columns: Any, to: Any) -> list[float]:
        coefficients, _ = nnls(np.stack(columns, axis=1), np.maximum(to, 0.0))
        return [float(each) for each in coefficients]

    servers = ("local parameter server", "driver: tasks and their results", "driver: cohort, plan, records")
    training = seconds("one process", "all") - sum(seconds("one process", what) for what in servers)
    round_, message = fit(np.ones(len(SENT)), messages, to=seconds("on Ray", "driver"))
    work, work_number = fit(messages, numbers, to=seconds("on Ray", "client actors") - training)
    add, add_number = fit(sums, numbers, to=seconds("on Ray", "local parameter server"))
    (ray,) = fit(messages, to=seconds("on Ray", "Ray itself"))
    step = float(training[0]) / WORKLOADS["W1"].steps
    return Costs(round_, message, work, work_number, step, add, add_number, ray, **link)


def _in_new_process(*arguments: object) -> dict[str, Any]:
    """Run a measurement of this script in a separate process."""
    command = [sys.executable, __file__, *map(str, arguments)]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads([x for x in process.stdout.splitlines() if x.startswith("{")][-1])
    return figures


# -- the commands ------------------------------------------------------------------------------------------


def measure(out: Path) -> None:
    """Measure all costs on this machine."""
    rows = [_in_new_process("one", small, block) for small in (1, 0) for block in (20, 2)]
    step, link = _in_new_process("step"), _in_new_process("link")
    costs = costs_of(rows, step, link)
    out.write_text(json.dumps({"costs": asdict(costs), "measured": [*rows, step, link]}, indent=1) + "\n")
    _print_costs(costs)
    print(f"written: {out}")


def _print_costs(costs: Costs) -> None:
    for name, value in asdict(costs).items():
        print(f"{name:12} {1e6 * value:12.4f} microseconds")


def read(path: Path) -> Costs:
    """Read costs that were measured before.

    Raises:
        SystemExit: with one line.
    """
    try:
        return Costs(**json.loads(path.read_text(encoding="utf-8"))["costs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path}: holds no costs ({error}); make it with: model.py measure") from None


W1: dict[str, Any] = {"steps": 25, "parameters": 166_447, "samples": 5 * 47}
"""A client of W1: 5 epochs of 5 batches."""


_W2: dict[str, Any] = {
    "cohort": 10,
    "block": 1,
    "steps": 120,
    "parameters": 44_426,
    "samples": 1200,
    "step": 0.387 / 1200,
}
_W3: dict[str, Any] = {
    "cohort": 1000,
    "block": 250,
    "steps": 1,
    "parameters": 2_410,
    "samples": 20,
    "step": 0.0066 / 1000,
}

KNOWN = (
    ("W1, 2 actors", Case(1, 2, 480, 30, cores=2, **W1), 0.381),
    ("W2, 2 actors", Case(1, 2, cores=2, **_W2), 0.221),
    ("W3, 2 actors", Case(1, 2, cores=2, **_W3), 0.0088),
    ("W1, 1 node", Case(1, 1, 480, 30, cores=2, **W1), 0.68),
    ("W1, 2 nodes", Case(2, 1, 480, 30, cores=2, **W1), 0.45),
    ("W1, 4 actors on two cores", Case(1, 4, 480, 30, cores=2, **W1), 0.51),
)
"""Seconds per round in README.md, on two otherwise idle cores."""


def check(costs: Costs, nodes: Sequence[int], out: Path) -> None:
    """Compare the model with W1 on Ray nodes on this machine, one CPU each."""
    import psutil

    for name, case, measured in KNOWN:
        expected = predict(case, read(COSTS)).seconds
        error = 100 * (expected / measured - 1)
        print(f"{name}: predicted {expected:.4f} s, measured {measured} s before; error {error:+.0f} %")
    rows = []
    for count in nodes:
        timing = _in_new_process("nodes", count)
        case = Case(count, 1, 480, timing["block"], cores=psutil.cpu_count(logical=False) or 1, **W1)
        expected = predict(case, costs).seconds
        error = 100 * (expected / timing["least"] - 1)
        rows.append(
            {"nodes": count, "predicted": expected, "least": timing["least"], "median": timing["median"]}
            | {"error_percent": error, "load": timing["load"]}
        )
        print(
            f"{count} nodes: predicted {expected:.3f} s, measured {timing['least']:.3f} s at least, "
            f"{timing['median']:.3f} s in the median (load {timing['load']:.1f}); error {error:+.0f} %"
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / "check.json").write_text(json.dumps(rows, indent=1) + "\n")


def measure_nodes(count: int, rounds: int = 6) -> dict[str, Any]:
    """Seconds per round of W1 on this many Ray nodes on this machine: the minimum, which is least affected
    by other load.
    """
    import psutil
    import ray
    from ray.cluster_utils import Cluster

    from rayfl.bench.measure import running
    from rayfl.bench.workloads import WORKLOADS

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(count - 1):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    execution = {"backend": "ray", "actors": count}
    with (
        tempfile.TemporaryDirectory() as folder,
        running(WORKLOADS["W1"], Path(folder), execution) as rayfl,
    ):
        rayfl.round()
        seconds = [rayfl.round() for _ in range(rounds)]
        block = rayfl.driver.servers.blocks.size(480)
    ray.shutdown()
    cluster.shutdown()
    load = psutil.getloadavg()[0]
    return {"least": min(seconds), "median": statistics.median(seconds), "block": block, "load": load}


NODES = (1, 2, 4, 8, 16, 64, 256, 1000)

ACTORS = 8
"""Client actors per node in the prediction."""

CLIENTS = 4800
"""Clients per node and round: the work grows with the cluster."""

SHARDS = 16
"""Maximum number of shards of a model."""

LARGE = 10_000_000
"""Parameters of the larger model; its client-step takes proportionally longer."""


def cases(nodes: int, costs: Costs) -> dict[str, Case]:
    """The cases of the figure: W1's clients in blocks of 64, the default, and a larger model in blocks of
    10.
    """
    base = Case(nodes, ACTORS, CLIENTS * nodes, 64, **W1, step=costs.step)
    step = costs.step * LARGE / base.parameters
    large = replace(base, parameters=LARGE, step=step, cohort=base.cohort // 20, block=10)
    return {
        "W1": base,
        "W1, fan_in 16": replace(base, fan_in=16),
        "10 million parameters": large,
        "10 million parameters, fan_in 4": replace(large, fan_in=4),
        "10 million parameters, a shard a node": replace(large, shards=min(nodes, SHARDS)),
        "10 million parameters, fan_in 4, a shard a node": replace(
            large, fan_in=4, shards=min(nodes, SHARDS)
        ),
    }


def table(costs: Costs, nodes: Sequence[int] = NODES) -> list[dict[str, Any]]:
    """One row per case and number of nodes: seconds, efficiency (training / round), and the busiest
    resource.
    """
    rows = []
    for count in nodes:
        for name, case in cases(count, costs).items():
            prediction = predict(case, costs)
            useful = case.cohort * case.steps * (case.step or 0.0) / (count * ACTORS)
            rest = {who: seconds for who, seconds in prediction.busy.items() if who != "training"}
            rows.append(
                {
                    "case": name,
                    "nodes": count,
                    "seconds": prediction.seconds,
                    "efficiency": useful / prediction.seconds,
                    "busiest": max(rest, key=lambda who: rest[who]),
                    "busiest_share": max(rest.values()) / prediction.seconds,
                }
            )
    return rows


def breaks(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any] | None]:
    """For each case the first row in which less than half of the round is training."""
    first_rows: dict[str, dict[str, Any] | None] = {}
    for row in rows:
        first_rows.setdefault(row["case"], None)
        if first_rows[row["case"]] is None and row["efficiency"] < 0.5:
            first_rows[row["case"]] = row
    return first_rows


def show(costs: Costs, gigabits: float, out: Path, nodes: Sequence[int] = NODES) -> None:
    """Write the table and the figure of a prediction for a cluster with these links."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Even with a faster network, Ray copies at most at the speed of this machine's memory.
    rows = table(replace(costs, byte=max(costs.byte, 8 / (gigabits * 1e9))), nodes)
    speed = min(gigabits, 8e-9 / costs.byte)
    lines = [
        f"Prediction, not a measurement: {CLIENTS:,} clients of W1 a node and round ({CLIENTS // 20} of the "
        f"larger model), {ACTORS} client actors a node, one LPS (or up to {SHARDS}, a shard each), "
        f"{speed:.3g} Gbit/s over a link.",
        "",
        "| case | nodes | s/round | training | busiest besides training |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['case']} | {r['nodes']:,} | {r['seconds']:.3g} | {100 * r['efficiency']:.0f} % | "
        f"{r['busiest']} ({100 * r['busiest_share']:.0f} %) |"
        for r in rows
    ]
    lines.append("")
    for name, row in breaks(rows).items():
        where = "not up to 1,000 nodes"
        if row is not None:
            where = f"from {row['nodes']:,} node{'s' * (row['nodes'] > 1)} on: {row['busiest']}"
        lines.append(f"Less than half of the round is training, {name}: {where}.")
    out.mkdir(parents=True, exist_ok=True)
    (out / "prediction.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    figure, axis = pyplot.subplots(figsize=(6.4, 4), layout="constrained")
    for name in cases(1, costs):
        case_rows = [row for row in rows if row["case"] == name]
        axis.plot([r["nodes"] for r in case_rows], [r["seconds"] for r in case_rows], marker="o", label=name)
    axis.set(xscale="log", yscale="log", xlabel="nodes", ylabel="predicted seconds a round")
    axis.set_title(f"Prediction: work grows with the nodes, {speed:.3g} Gbit/s")
    axis.legend()
    figure.savefig(out / "prediction.svg", metadata={"Date": None})
    print(f"written: {out / 'prediction.md'}, {out / 'prediction.svg'}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "what", choices=("measure", "profile", "check", "predict", "one", "step", "link", "nodes")
    )
    parser.add_argument("values", type=int, nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--costs", type=Path, default=COSTS)
    parser.add_argument("--bench", type=Path, default=HERE / "profile.json", help="a file, for profile")
    parser.add_argument("--gigabits", type=float, default=10.0, help="of a link, for predict")
    parser.add_argument("--out", type=Path, default=None, help="a file for measure, a folder for the others")
    arguments = parser.parse_args()
    values = arguments.values
    if not math.isfinite(arguments.gigabits) or arguments.gigabits <= 0:
        raise SystemExit("--gigabits: must be above 0")
    if arguments.what == "one":
        print(json.dumps(measure_one(bool(values[0]), values[1], 5)))
    elif arguments.what == "step":
        print(json.dumps(measure_step(4)))
    elif arguments.what == "link":
        print(json.dumps(measure_link()))
    elif arguments.what == "nodes":
        print(json.dumps(measure_nodes(values[0])))
    elif arguments.what == "measure":
        measure(arguments.out or COSTS)
    elif arguments.what == "profile":
        bench = json.loads(arguments.bench.read_text(encoding="utf-8"))
        costs = costs_of_profile(bench["profile"], bench.get("link") or _in_new_process("link"))
        (arguments.out or COSTS).write_text(json.dumps({"costs": asdict(costs)}, indent=1) + "\n")
        _print_costs(costs)
    elif arguments.what == "check":
        check(read(arguments.costs), values or (1, 2, 4), arguments.out or Path("scaling-model"))
    else:
        show(read(arguments.costs), arguments.gigabits, arguments.out or Path("scaling-model"))


if __name__ == "__main__":
    main()

"""Resource planning: the actors, blocks and bytes that a config needs, computed before anything starts."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rayfl.algorithms import Algorithm
from rayfl.clients.partial import LARGE
from rayfl.clients.ranges import Ranges
from rayfl.config import Config
from rayfl.errors import ConfigError
from rayfl.local import LocalObjective, work_of
from rayfl.memory import total_memory
from rayfl.servers.averaging import most_waiting
from rayfl.servers.shards import WHOLE
from rayfl.servers.states import PACK, SLACK
from rayfl.training import LocalWork
from rayfl.training.batched.calls import clients_in_a_call
from rayfl.units import counted, size

WORKER_BYTES = 270e6
"""A Python process with torch imported."""

SERVER_BYTES = 120e6
"""An LPS: a Python process without torch."""

_MANY_SUMS_GB = 4.0
"""If the sums at one local server take more gigabytes than this, the plan says so."""


ACTOR_GPU_BYTES = 8e9
"""GPU memory for each client actor, if ``execution.gpus_per_actor`` is ``auto``."""

_GPU_PARTS = 10_000
"""The number of parts into which Ray divides a GPU."""

PerActor = float | Literal["auto"]
"""The share of a GPU for an actor: a fraction, or the one that corresponds to :data:`ACTOR_GPU_BYTES`."""

_TRIAL_COPIES = 7
"""Copies of the model in the trial of engines, before anything starts."""

_IN_FLIGHT = 2
"""Blocks per actor that are being trained or wait to be added."""


@dataclass(frozen=True)
class Node:
    """The free resources of one machine.

    Attributes:
        cpus, gpus: how many.
        gpu_bytes: memory of the smallest of its GPUs; None if unknown.
        memory: free memory in bytes; infinite if unknown.
    """

    cpus: float
    gpus: float
    gpu_bytes: float | None = None
    memory: float = math.inf

    def share(self, gpus: PerActor) -> float:
        """The fraction of a GPU of this node that an actor gets; a whole GPU if its memory is unknown."""
        if gpus != "auto":
            return gpus
        # Rounded down: Ray rounds a seventh to 0.1429, and seven times that is more than one GPU.
        return _GPU_PARTS // max(1, int((self.gpu_bytes or 0.0) / ACTOR_GPU_BYTES)) / _GPU_PARTS

    def room(self, cpus: float, gpus: PerActor) -> int:
        """How many actors with these numbers of CPUs and GPUs can be placed.

        Ray takes a fraction of a GPU from one GPU; how what is free is divided among the GPUs is not known.
        """
        by_cpu, share = int(self.cpus / cpus + 1e-9), self.share(gpus)
        if not share:
            return by_cpu
        if share >= 1:
            return min(by_cpu, int(self.gpus / share + 1e-9))
        part, whole = math.modf(self.gpus + 1e-9)
        return min(by_cpu, int(whole) * int(1 / share + 1e-9) + int(part / share + 1e-9))


def in_turn(rooms: Sequence[int], count: int) -> list[int | None]:
    """A node for each actor, the nodes in turn while there is room; None for actors without room.

    Args:
        rooms: how many actors each node has room for.
        count: how many actors.
    """
    turns = range(max(rooms, default=0))
    places: list[int | None] = [node for turn in turns for node, room in enumerate(rooms) if turn < room]
    return (places + [None] * count)[:count]


@dataclass(frozen=True)
class Available:
    """The available resources, of this machine or of the whole Ray cluster.

    Attributes:
        nodes: an actor must fit on one of them.
        memory: in bytes, over all.
        store: bytes of the smallest object store of a node; None if it is not known yet.
        whole: the nodes including what other work uses; empty if unknown.
        assumed: what a plan with these resources takes for granted; empty if nothing.
    """

    nodes: tuple[Node, ...]
    memory: float
    store: float | None = None
    whole: tuple[Node, ...] = ()
    assumed: str = ""

    @property
    def cpus(self) -> float:
        """CPUs of all nodes."""
        return sum(node.cpus for node in self.nodes)

    @property
    def gpus(self) -> float:
        """GPUs of all nodes."""
        return sum(node.gpus for node in self.nodes)

    def room(self, cpus: float, gpus: PerActor) -> int:
        """How many actors with these numbers of CPUs and GPUs can be placed."""
        return sum(node.room(cpus, gpus) for node in self.nodes)

    def reserved(self, count: int, cpus: float, gpus: PerActor) -> float:
        """GPUs that this many actors reserve, placed on the nodes in turn."""
        rooms = [node.room(cpus, gpus) for node in self.nodes]
        shares = [self.nodes[place].share(gpus) for place in in_turn(rooms, count) if place is not None]
        return sum(shares)


def sends_models(config: Config) -> bool:
    """Whether the clients' trained models are sent, and not the sums of blocks."""
    return config.algorithm.mixes_by_reports or not config.aggregation.is_mean


@dataclass(frozen=True)
class Copies:
    """The largest number of copies of the model (4 P bytes each).

    A vector of sums in double precision counts as two copies. Users' networks may need more. If models are
    sharded, an LPS has only a part of a copy.

    Attributes:
        client, server, driver: in the memory of a client actor, of an LPS, and of the driver at a checkpoint.
        store: in the object store, if a single node holds all of a round.
    """

    client: int
    server: float
    driver: int
    store: int

    @classmethod
    def of(
        cls, config: Config, clients: int, parameters: int, block: int, blocks: int, actors: int, models: int
    ) -> Copies:
        """Count the copies for N clients that train in blocks on client actors, and K models."""
        method, fan_in = config.algorithm, config.execution.fan_in
        states = type(config.local).state_size is not LocalObjective.state_size
        kept_rows = states + method.keeps_updates  # of each client, between rounds
        sends_rows = sends_models(config)  # trained models are sent, not sums
        large = parameters >= LARGE
        work = work_of(config.local, LocalWork(1, 1, 1.0, momentum=config.training.momentum))
        calls = min(block, clients_in_a_call(parameters))
        # One model to test; for each client that trains: its model, its gradient, ...
        training = 1 + calls * (2 + bool(work.momentum) + bool(work.proximal))
        together = 1 if large and calls == 1 and not (kept_rows or sends_rows) else block
        # The sum, and gaps between freed arrays, which the process keeps.
        sums = 3 if not sends_rows and (block > 1 or fan_in) else 0
        steps = type(method).server_step is not Algorithm.server_step
        kept_copies = 2 * kept_rows * clients
        if config.execution.backend == "inline":  # more is written to disk
            budget = 2 * config.execution.state_memory * total_memory() / (4 * parameters)
            kept_copies = min(kept_copies, kept_rows * (int(budget) + config.training.cohort(clients)))
        waiting = most_waiting(parameters)
        ranges = Ranges.of(parameters, config.shards)
        early = not fan_in and blocks > waiting  # sums are added while others train
        a_sum = 1 if block == 1 and not fan_in else 2
        vectors = type(config.local).server_size is not LocalObjective.server_size
        joins = 1 + vectors + block * sends_rows  # shards are joined, rows are cut into shards
        if sends_rows:
            sent = blocks * block
        elif early:
            in_store = waiting * (1 + models) + _IN_FLIGHT * actors  # also those that are being added
            sent = a_sum * min(blocks, in_store) + 4 * models
        else:
            sent = a_sum * (-(-blocks // fan_in) if fan_in else blocks)
        return cls(
            client=training + together * (1 + kept_rows) + sums + joins * (len(ranges) > 1),
            server=(1 + 2 * early + 8 * steps) * ranges.largest,
            driver=2 * models,
            store=2 * models + sent + kept_copies,
        )


@dataclass(frozen=True)
class Keeping:
    """What clients keep between rounds (states, latest updates), in bytes, at most.

    Attributes:
        all: of all clients that may take part.
        memory: the part in the memory of an inline run; None on Ray, where the object store has all.
        disk: in the run directory, old checkpoints included.
        there: free bytes of that disk.
    """

    all: float
    memory: float | None
    disk: float
    there: float

    @classmethod
    def of(cls, config: Config, clients: int, numbers: int) -> Keeping:
        """Estimate for N clients that keep S numbers each, and start with nothing."""
        e, output, cohort = config.execution, config.output, config.training.cohort(clients)
        used, row = min(clients, config.rounds * cohort), 4.0 * numbers
        budget = e.state_memory * total_memory()
        held = (2 * used + max(PACK, used // SLACK)) * row  # some rows are out of date
        # What was in memory before a round stays there until the round is over.
        memory = min(held, 2 * budget + cohort * row) if e.backend == "inline" else None
        if used * row <= min(WHOLE, budget):
            disk = output.keep_checkpoints * used * row
        else:
            old = min(held, 2 * output.checkpoint_every * cohort * row)  # rows that changed later
            disk = held + (output.keep_checkpoints - 1) * old
        return cls(used * row, memory, disk, free_disk(output.folder))

    def line(self) -> str:
        """One line about it, for the plan as text."""
        where = "" if self.memory is None else f", at most {size(self.memory)} of it in memory"
        return (
            f"clients keep up to {size(self.all)} between rounds{where}; "
            f"up to {size(self.disk)} on disk, where {size(self.there)} are free"
        )


def free_disk(folder: Path) -> float:
    """Free bytes of the disk on which a folder is, or will be."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    return float(shutil.disk_usage(existing).free)


@dataclass(frozen=True)
class ResourcePlan:
    """What a run will use.

    Attributes:
        clients: N.
        cohort: clients per round.
        block_size: clients per block.
        blocks: blocks per round, at least (a cluster's last block may be smaller).
        actors: client actors that there is room for.
        most_actors: the largest number of actors, as nodes join; equal to ``actors`` if the number is fixed.
        clients_per_actor: largest number of clients per actor.
        cpus, gpus: reserved in total.
        parameters: P.
        worker_gb: estimated memory of a client actor.
        store_gb: estimated object store: the data once per node, the models, a round's partial products.
        store_there_gb: the smallest object store of a node; None if it is not known yet.
        sums: how many sums of blocks one local server may receive for a model in a round; or, if the
            clients' models are sent, how many of these.
        copies: of the model, in each process.
        node_actors: client actors on the node with the most of them.
        node_gb: estimated memory of that node's processes, if LPSs and driver are there too.
        node_there_gb: the free memory of that node; None if unknown.
        inline: whether everything is one process.
        in_tree: whether client actors add sums before they send them.
        unsummed: whether the clients' models are sent, and not sums.
        shards: number of shards of a model at the LPSs.
        largest: the largest shard, as a share of the model.
        keeping: what clients keep between rounds; None for nothing.
        activations_gb: the part of a client actor's memory that the activations of a batch take.
    """

    clients: int
    cohort: int
    block_size: int
    blocks: int
    actors: int
    clients_per_actor: int
    cpus: float
    gpus: float
    parameters: int
    worker_gb: float
    store_gb: float
    store_there_gb: float | None = None
    most_actors: int = 0
    sums: int = 0
    copies: Copies = Copies(0, 0, 0, 0)
    node_actors: int = 0
    node_gb: float = 0.0
    node_there_gb: float | None = None
    inline: bool = False
    in_tree: bool = False
    unsummed: bool = False
    shards: int = 1
    largest: float = 1.0
    keeping: Keeping | None = None
    activations_gb: float = 0.0

    def with_activations(self, activations: float) -> ResourcePlan:
        """The plan with these bytes more in each client actor.

        They are an estimate, so that no config is refused because of them.
        """
        more, actors = activations / 1e9, 1 if self.inline else self.node_actors
        return replace(
            self,
            worker_gb=self.worker_gb + more,
            node_gb=self.node_gb + actors * more,
            activations_gb=more,
        )

    @property
    def sums_gb(self) -> float:
        """Estimated memory of the sums, or models, that one local server may receive in a round."""
        single = self.unsummed or (self.block_size == 1 and not self.in_tree)
        return (4e-9 if single else 8e-9) * self.parameters * self.sums * self.largest

    def lines(self) -> list[str]:
        """The plan as text."""
        gpus = f", {self.gpus:g} GPU{'s' * (self.gpus != 1)}" if self.gpus else ""
        cpus = f"{self.cpus:g} CPU{'s' * (self.cpus != 1)}"
        more = f", up to {self.most_actors} as nodes join" if self.most_actors > self.actors else ""
        warnings = []
        if self.store_there_gb is not None and self.store_gb > self.store_there_gb:
            many = self.sums > 2 and not self.in_tree and not self.unsummed
            fewer = " 'execution.fan_in' sends fewer sums," if many else ""
            warnings = [
                f"the object store of a node has only {size(1e9 * self.store_there_gb)}: the rest is written "
                f"to disk, which is slow;{fewer} 'ray start --object-store-memory' makes it larger"
            ]
        if self.node_there_gb is not None and self.node_gb > self.node_there_gb:
            batch = 2 * self.activations_gb > self.worker_gb
            smaller = (
                "'evaluation.batch_size' or 'training.batch_size'" if batch else "'execution.block_size'"
            )
            warnings.append(
                f"this does not fit: a node has {size(1e9 * self.node_there_gb)} free; fewer client actors "
                f"('execution.actors'), a smaller {smaller} or a smaller model need less"
            )
        if self.sums_gb > _MANY_SUMS_GB and self.sums > 2:
            what, how = "sums of a model", "'execution.fan_in' has client actors add them first"
            if self.unsummed:
                what, how = "models of clients", "a lower 'training.participation' sends fewer"
            warnings.append(f"a local server may get {self.sums:,} {what}, {size(1e9 * self.sums_gb)}; {how}")
        return [
            f"{counted(self.clients, 'client')}, {self.cohort:,} per round, in at least {self.blocks:,} "
            f"blocks of {self.block_size} on {counted(self.actors, 'client actor')} ({cpus}{gpus}){more}",
            *self._memory_lines(),
            *([self.keeping.line()] if self.keeping and self.keeping.all > WHOLE else []),
            *warnings,
        ]

    def _memory_lines(self) -> list[str]:
        """The memory that copies of the model take, by process."""
        numbers, per_copy = f"{self.parameters:,} parameters", size(4.0 * self.parameters)
        of, needed = self.copies, size(1e9 * self.node_gb)
        batch = f" ({size(1e9 * self.activations_gb)} for a batch)" if self.activations_gb > 0.01 else ""
        shards = f" (which has one of {self.shards} shards)" if self.shards > 1 else ""
        if self.inline:
            many = math.ceil(of.client + of.server + of.driver + of.store)
            return [
                f"{numbers}; about {needed} in all{batch}, with at most {many} copies of {per_copy} of the "
                "model"
            ]
        return [
            f"{numbers}; about {size(1e9 * self.worker_gb)} a client actor{batch}, "
            f"{size(1e9 * self.store_gb)} in the object store",
            f"at most {of.client} copies ({per_copy}) of the model in a client actor, {of.server:.3g} in an "
            f"LPS{shards}, "
            f"{of.driver} in the driver, {of.store} in the object store; {needed} on a node with "
            f"{counted(self.node_actors, 'client actor')}, the LPSs and the driver",
        ]

    def to_dict(self) -> dict[str, Any]:
        """For ``environment.json``."""
        return asdict(self)


def plan_resources(
    config: Config,
    clients: int,
    block: int,
    parameters: int,
    data_bytes: int,
    available: Available,
    models: int = 1,
) -> ResourcePlan:
    """Plan the resources of a run.

    Args:
        config: of the run.
        clients: N.
        block: clients per block.
        parameters: P.
        data_bytes: of samples and index lists.
        available: the available resources.
        models: K at the start of the run.

    Raises:
        ConfigError: if the actors cannot be placed or the memory is too small; the message says what would
            fit.
    """
    e = config.execution
    cohort = config.training.cohort(clients)
    blocks = -(-cohort // block)
    room = available.room(e.cpus_per_actor, e.gpus_per_actor)
    if e.backend == "inline":
        actors = 1
    elif e.clients_per_actor is not None:
        actors = -(-clients // e.clients_per_actor)
    else:
        least, most = e.actors_wanted
        actors = int(max(least, min(room, most, blocks)))
    if e.backend == "ray" and actors > room:
        lacking, per, have = ("cpus", e.cpus_per_actor, available.cpus)
        if room < available.room(e.cpus_per_actor, 0):
            if e.gpus_per_actor == "auto":
                raise _too_few_gpus(actors, room, available)
            lacking, per, have = ("gpus", e.gpus_per_actor, available.gpus)
        if room == 0 and per <= have:
            raise ConfigError(
                "execution",
                f"no node has {e.cpus_per_actor:g} CPUs and {e.gpu_share:g} GPUs free for an actor",
                "lower execution.cpus_per_actor or execution.gpus_per_actor",
            )
        share = int(1000 * have / actors) / 1000
        setting = "execution.clients_per_actor" if e.clients_per_actor else "execution.actors"
        fewer = -(-clients // max(1, room)) if e.clients_per_actor else max(1, room)
        fitting = [f"execution.{lacking}_per_actor={share:g}"] if share > 0 else []
        fitting += [f"{setting}={fewer}"] if room else []
        needs = "needs" if actors == 1 else "need"
        needed = f"{counted(actors, 'actor')} of {per:g} {lacking[:-1].upper()} {needs} {actors * per:g}"
        total = float(sum(getattr(node, lacking) for node in available.whole))
        if total > have:
            cluster_room = Available(available.whole, 0.0).room(e.cpus_per_actor, e.gpus_per_actor)
            alone = -(-clients // max(1, cluster_room)) if e.clients_per_actor else cluster_room
            now = [" or ".join(fitting) + " would fit now"] if fitting else []
            later = (
                [f"{setting}={alone} with execution.wait=3600 waits up to an hour"] if cluster_room else []
            )
            raise ConfigError(
                setting,
                f"{needed}; the cluster has {total:g}, of which other work holds {total - have:g}",
                "; ".join(now + later) or f"none can be placed without {lacking}",
            )
        raise ConfigError(
            setting,
            f"{needed}, there are {have:g}",
            (" or ".join(fitting) + " would fit") if fitting else f"none can be placed without {lacking}",
        )
    model = 4.0 * parameters
    copies = Copies.of(config, clients, parameters, block, blocks, actors, models)
    ranges = Ranges.of(parameters, config.shards)
    shards = len(ranges)
    unsummed = sends_models(config)
    worker = WORKER_BYTES + copies.client * model
    store = data_bytes + copies.store * model
    rooms = [(node.room(e.cpus_per_actor, e.gpus_per_actor), node) for node in available.nodes]
    most, fullest = max(rooms, key=lambda pair: pair[0], default=(0, Node(0.0, 0.0)))
    on_node = min(actors, max(1, most))
    if e.backend == "inline":
        running = worker + (copies.server + copies.driver) * model + store
    else:
        servers = min(config.hierarchy.lps_actors, models * shards) * (SERVER_BYTES + copies.server * model)
        running = on_node * worker + servers + WORKER_BYTES + copies.driver * model
    if worker * actors > available.memory:
        what = f"{counted(actors, 'actor')} of {size(worker)} each do not fit in {size(available.memory)}"
        count = int(available.memory / worker)
        remedy = f"execution.actors={count} would fit" if count else "use a smaller model, or more memory"
        raise ConfigError("execution.actors", what, remedy)
    return ResourcePlan(
        clients=clients,
        cohort=cohort,
        block_size=block,
        blocks=blocks,
        actors=actors,
        clients_per_actor=e.clients_per_actor or -(-clients // actors),
        cpus=actors * e.cpus_per_actor,
        gpus=e.gpu_share
        if e.backend == "inline"
        else available.reserved(actors, e.cpus_per_actor, e.gpus_per_actor),
        parameters=parameters,
        worker_gb=worker / 1e9,
        store_gb=store / 1e9,
        store_there_gb=None if available.store is None or e.backend == "inline" else available.store / 1e9,
        sums=cohort if unsummed else min(blocks, e.fan_in or blocks),
        in_tree=e.fan_in is not None and not unsummed,
        unsummed=unsummed,
        shards=shards,
        largest=ranges.largest,
        copies=copies,
        node_actors=on_node,
        node_gb=max(running, WORKER_BYTES + _TRIAL_COPIES * model) / 1e9,
        node_there_gb=None if math.isinf(fullest.memory) else fullest.memory / 1e9,
        inline=e.backend == "inline",
        most_actors=max(actors, min(int(e.actors_wanted[1]), blocks))
        if e.elastic and e.backend == "ray"
        else actors,
    )


def _too_few_gpus(actors: int, room: int, available: Available) -> ConfigError:
    """The error for actors that share GPUs by memory and do not fit."""
    what = f"{counted(actors, 'actor')} of {size(ACTOR_GPU_BYTES)} of GPU memory each"
    there = f"there are {available.gpus:g} GPUs with room for {room}" if available.gpus else "there is no GPU"
    fitting = f"execution.actors={room} or a fraction would fit" if room else "execution.gpus_per_actor=0"
    return ConfigError("execution.gpus_per_actor", f"{what} do not fit: {there}", fitting)

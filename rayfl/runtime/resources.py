"""The resource arithmetic: the actors, blocks and bytes that a config means, before anything starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rayfl.config import Config
from rayfl.errors import ConfigError

WORKER_BYTES = 270e6
"""A Python process with torch imported."""


@dataclass(frozen=True)
class Available:
    """What there is, on this machine or in the whole Ray cluster."""

    cpus: float
    gpus: float
    memory: float


@dataclass(frozen=True)
class ResourcePlan:
    """What a run will use.

    Attributes:
        clients: N.
        cohort: clients a round.
        block_size: clients in a block.
        blocks: blocks a round, at least (a cluster's last block may be short).
        actors: client actors.
        clients_per_actor: clients that an actor hosts, at most.
        cpus, gpus: reserved in all.
        parameters: P.
        worker_gb: estimated memory of a client actor.
        store_gb: estimated object store: the data once a node, the models, a round's partial products.
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

    def lines(self) -> list[str]:
        """The arithmetic in words."""
        gpus = f", {self.gpus:g} GPUs" if self.gpus else ""
        return [
            f"{self.clients:,} clients, {self.cohort:,} a round, in {self.blocks:,} or more blocks of "
            f"{self.block_size} on {self.actors} client actors ({self.cpus:g} CPUs{gpus})",
            f"{self.parameters:,} numbers a model; about {self.worker_gb:.2f} GB a client actor, "
            f"{self.store_gb:.2f} GB in the object store",
        ]

    def to_dict(self) -> dict[str, float]:
        """For ``environment.json``."""
        return asdict(self)


def plan_resources(
    config: Config, clients: int, parameters: int, data_bytes: int, available: Available
) -> ResourcePlan:
    """Do the arithmetic.

    Raises:
        ConfigError: if the actors cannot be placed or the memory does not suffice; it names what would fit.
    """
    e = config.execution
    cohort = config.training.cohort(clients)
    block = e.clients_per_block(cohort)
    blocks = -(-cohort // block)
    cpu_room = int(available.cpus / e.cpus_per_actor + 1e-9)
    gpu_room = int(available.gpus / e.gpus_per_actor + 1e-9) if e.gpus_per_actor else cpu_room
    room = min(cpu_room, gpu_room)
    if e.backend == "inline":
        actors = 1
    elif e.clients_per_actor is not None:
        actors = -(-clients // e.clients_per_actor)
    elif e.actors == "auto":
        actors = max(1, min(room, blocks))
    else:
        actors = e.actors
    if e.backend == "ray" and actors > room:
        lacking, per, have = ("cpus", e.cpus_per_actor, available.cpus)
        if gpu_room < cpu_room:
            lacking, per, have = ("gpus", e.gpus_per_actor, available.gpus)
        share = int(1000 * have / actors) / 1000
        many = "execution.clients_per_actor" if e.clients_per_actor else "execution.actors"
        fewer = -(-clients // max(1, room)) if e.clients_per_actor else max(1, room)
        fitting = [f"execution.{lacking}_per_actor={share:g}"] if share > 0 else []
        fitting += [f"{many}={fewer}"] if room else []
        raise ConfigError(
            many,
            f"{actors} actors of {per:g} {lacking[:-1].upper()} need {actors * per:g}, there are {have:g}",
            (" or ".join(fitting) + " would fit") if fitting else f"none can be placed without {lacking}",
        )
    model = 4.0 * parameters
    worker = WORKER_BYTES + block * model * 2 + 8 * model
    store = data_bytes + 3 * blocks * 2 * model + 4 * model
    if worker * actors > available.memory:
        raise ConfigError(
            "execution.actors",
            f"{actors} actors of about {worker / 1e9:.2f} GB need more than the "
            f"{available.memory / 1e9:.1f} GB there are",
            f"execution.actors={max(1, int(available.memory / worker))} would fit",
        )
    return ResourcePlan(
        clients=clients,
        cohort=cohort,
        block_size=block,
        blocks=blocks,
        actors=actors,
        clients_per_actor=e.clients_per_actor or -(-clients // actors),
        cpus=actors * e.cpus_per_actor,
        gpus=actors * e.gpus_per_actor,
        parameters=parameters,
        worker_gb=worker / 1e9,
        store_gb=store / 1e9,
    )

"""The sections of a configuration, and :class:`Config`, which holds them all, frozen and validated.

Each package declares its own sections next to the code that uses them; the sections declared here belong to
the run as a whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator
from typing_extensions import override

from rayfl.aggregation import AGGREGATIONS, Aggregation
from rayfl.algorithms import ALGORITHMS, Algorithm, Hierarchy
from rayfl.clustering.config import Clustering
from rayfl.clustering.plane import MapMethod
from rayfl.config import text
from rayfl.data import DATASETS, PARTITIONS, Dataset, Partition
from rayfl.data.events import Event, Outage
from rayfl.errors import ConfigError
from rayfl.local import OBJECTIVES, LocalObjective, weights_of
from rayfl.loggers import LOGGERS, Logger
from rayfl.losses import LOSSES, Loss
from rayfl.models import MODELS, Model
from rayfl.ordering import ORDERINGS, Ordering
from rayfl.paper import Paper
from rayfl.remote import SCHEMES, URL, Remote, is_url, staging
from rayfl.sampling import SAMPLINGS, Sampling
from rayfl.settings import Section, choice
from rayfl.training import Training

if TYPE_CHECKING:
    DatasetChoice = Dataset
    PartitionChoice = Partition
    ModelChoice = Model
    AlgorithmChoice = Algorithm
    LocalChoice = LocalObjective
    OrderChoice = Ordering
    SamplingChoice = Sampling
    AggregationChoice = Aggregation
    LoggerChoice = Logger
    LossChoice = Loss
else:
    DatasetChoice, PartitionChoice = choice(DATASETS), choice(PARTITIONS)
    ModelChoice, AlgorithmChoice = choice(MODELS), choice(ALGORITHMS)
    LoggerChoice, LossChoice = choice(LOGGERS), choice(LOSSES)
    LocalChoice, OrderChoice, SamplingChoice = choice(OBJECTIVES), choice(ORDERINGS), choice(SAMPLINGS)
    AggregationChoice = choice(AGGREGATIONS)

USED_BY_SOME = {
    "clustering": tuple(Clustering.model_fields),
    "hierarchy": ("common_layers", "global_every", "weights", "edges"),
}
"""Settings used only by the methods that list the section in ``takes``."""

CHANGEABLE = ("rounds", "execution", "output")
"""What may change in a config when a run continues, except for :data:`BLOCK_SETTINGS`."""

BLOCK_SETTINGS = ("block_size", "clients_per_actor", "fan_in")
"""Settings of ``execution`` that determine the order of sums, and so their rounding: a run keeps them."""

EXCLUDED = {
    "clustering.n_clusters": "clustering.threshold",
    "clustering.threshold": "clustering.n_clusters",
}
"""Settings that exclude each other: an override of one drops the other."""

ActorRange = Annotated[str, Field(pattern=r"^[1-9][0-9]*-[1-9][0-9]*$", title="a range such as 2-64")]
"""``2-64``: minimum and maximum number of client actors."""

NodeMark = Annotated[
    str,
    Field(
        pattern=r"^[^=\s]+(=[^=\s]+)?$",
        title="a custom resource such as stays, a label such as role=server",
    ),
]
"""What marks nodes: a custom resource of Ray's, or a label ``key=value``."""

_RAY_RESOURCES = ("CPU", "GPU", "memory", "object_store_memory")
"""Ray's own resources: they do not mark nodes, and are requested from Ray by other options."""

RemoteRoot = Annotated[str, Field(pattern=URL, title="a URL such as s3://bucket/runs")]
"""A URL of object storage."""

_BLOCK_WORK = 1e7
"""Parameters times samples that take a core a few milliseconds: less is not worth a message."""

_GPU_BLOCK_WORK = 4e9
"""As ``_BLOCK_WORK``, on a GPU: a step of LeNet-5 takes 1.6 times as long for ten clients as for one."""

_MAX_BLOCK_CLIENTS = 64
"""Maximum number of clients in a block of a large cohort, unless ``_BLOCK_WORK`` needs more clients."""


class Evaluation(Section):
    """When and how clients are tested: each on its own test data with the model that it would use.

    Additional tests have their own columns (see :mod:`rayfl.evaluation.protocols` for the names).
    """

    every: int = Field(1, ge=1, description="rounds between two tests; the last round is always tested")
    batch_size: int = Field(500, ge=1, description="samples in one forward pass")
    validation: bool = Field(
        True,
        description="also test clients on the validation samples that partition.validation holds out "
        "(columns validation_...); the best round is chosen by them",
    )
    coreset: int | None = Field(
        None,
        ge=4,
        description="between rounds, test only this many clients (at least 4) and estimate the "
        "metrics from them, by SCGIGA on a graph of clients with similar label "
        "histograms, which all clients send. Estimates are marked and never count as "
        "best; the last test is of all clients",
    )
    local: bool = Field(
        False,
        description="in every round also test the models that the participating clients have trained, on "
        "their own data, before the models are averaged (columns local_...)",
    )
    common: bool = Field(
        False,
        description="also test models on all test samples, the same for every client (columns common_...)",
    )
    finetune_epochs: int = Field(
        0,
        ge=0,
        description="after the last round every client trains its model for this many more epochs and"
        " is tested again (the papers' suffix +: FedAvg+, FedProx+); methods with "
        "test-time adaptation fine-tune the same way",
    )

    @override
    def needs_classes(self) -> bool:
        return self.coreset is not None


class Execution(Section):
    """Where a run is executed. Only ``block_size``, ``clients_per_actor``, ``fan_in`` and the device change
    results, by rounding.
    """

    backend: Literal["ray", "inline"] = Field(
        "ray", description="ray: client actors; inline: the same code in this process, for debugging"
    )
    address: str | None = Field(
        None,
        description="address of a running Ray cluster ('auto' finds it); default: RAY_ADDRESS, else a"
        " new local Ray",
    )
    actors: Annotated[int, Field(ge=1)] | Literal["auto"] | ActorRange = Field(
        "auto",
        description="client actors; auto: as many as the CPUs (and GPUs) hold at the start, at most one per "
        "block of a round; 2-64: from 2 on, and up to 64 as nodes come and go during the run",
    )
    clients_per_actor: int | None = Field(
        None, ge=1, description="pin this many clients to each actor (1: one actor per client); sets 'actors'"
    )
    cpus_per_actor: float = Field(1.0, gt=0, description="CPUs that Ray reserves for a client actor")
    gpus_per_actor: Annotated[float, Field(ge=0)] | Literal["auto"] = Field(
        0.0,
        description="fraction of a GPU for a client actor, which caps its memory; auto: an actor for every "
        "8 GB of each GPU, so that larger GPUs get more",
    )
    placement: Literal["auto", "pack", "spread"] = Field(
        "auto", description="client actors on as few nodes as possible, or on as many; auto: Ray decides"
    )
    servers_on: NodeMark | None = Field(
        None,
        description="a custom resource of Ray, or a label key=value, of the nodes that stay for the whole "
        "run: the parameter servers are placed there, and the driver must be on one of them",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda if gpus_per_actor > 0 and there is one"
    )
    block_size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="clients in a block, the unit of scheduling; auto: a sixteenth of the cohort, at most 64 "
        "or as many as have together 10 million (on a GPU 4 billion) parameters x samples x epochs of work; "
        "an eighth or a quarter, without that limit, where a block would have less work; a cluster's last "
        "block may be smaller",
    )
    fan_in: Annotated[int, Field(ge=2)] | None = Field(
        None,
        description="add in a tree: an actor trains up to this many blocks of a model and sends one sum; "
        "client actors then add up to this many sums at a time, until at most that many are left for the "
        "LPS. By default the LPS receives the sum of every block",
    )
    shard_models: bool = Field(
        False,
        description="cut every model with more than 65,536 parameters into shards, one for each of the "
        "hierarchy.lps_actors, which are spread over the nodes: no LPS actor holds a whole model or "
        "receives whole updates",
    )
    wait: Annotated[float, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="seconds to wait until the cluster has room for the actors (with actors: auto, "
        "for one of them); auto: 900 if the cluster starts nodes when needed, else 5",
    )
    deadline: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto",
        description="seconds without an answer after which a process is killed and its work repeated;"
        " auto: 20 times the longest that such work has taken, at least 300",
    )
    state_memory: float = Field(
        0.25,
        ge=0,
        le=1,
        description="share of the machine's memory that the clients' states may take; the rest is written to "
        "the run directory (with Ray, its object store spills to disk)",
    )
    tolerate_failures: int = Field(
        0,
        ge=0,
        description="number of clients that may fail in a round; they are left out of its average. The "
        "same number may fail while they adapt their model for a test; they are tested without adaptation",
    )

    @model_validator(mode="after")
    def _in_order(self) -> Execution:
        """Refuse contradictions: a descending range of actors, impossible shares, or a mark that marks no
        nodes.
        """
        least, most = self.actors_wanted
        if least > most:
            raise ValueError(f"actors: {self.actors} is not a range; did you mean {most:g}-{least}?")
        if self.elastic and self.clients_per_actor is not None:
            raise ValueError(
                "actors: cannot be a range if clients_per_actor is set, which fixes their number"
            )
        # Ray counts in ten-thousandths, and gives an actor either a part of a GPU or whole GPUs.
        for name, share in (("cpus_per_actor", self.cpus_per_actor), ("gpus_per_actor", self.gpu_share)):
            if 0 < share < 1e-4:
                raise ValueError(f"{name}: got {share:g}; the smallest share that Ray accepts is 0.0001")
        if self.gpu_share > 1 and self.gpu_share % 1:
            raise ValueError(
                f"gpus_per_actor: got {self.gpu_share:g}; expected whole GPUs, or a share below 1"
            )
        if self.servers_on in _RAY_RESOURCES:
            raise ValueError(
                f"servers_on: {self.servers_on} is one of Ray's built-in resources, which cannot mark nodes; "
                "use a custom one, such as stays"
            )
        return self

    @property
    def actors_wanted(self) -> tuple[int, float]:
        """Minimum and maximum number of client actors."""
        if self.actors == "auto":
            return 1, math.inf
        if isinstance(self.actors, int):
            return self.actors, self.actors
        least, _, most = self.actors.partition("-")
        return int(least), int(most)

    @property
    def gpu_share(self) -> float:
        """GPUs for each actor; 1 if that depends on the GPU (``auto``)."""
        return 1.0 if self.gpus_per_actor == "auto" else self.gpus_per_actor

    @property
    def wants_gpu(self) -> bool:
        """Whether clients train on a GPU, if there is one."""
        return self.device == "cuda" or (self.device == "auto" and self.gpu_share > 0)

    @property
    def elastic(self) -> bool:
        """Whether actors may come and go during the run."""
        return isinstance(self.actors, str) and self.actors != "auto"

    def clients_per_block(self, cohort: int, work: float = math.inf) -> int:
        """The block size. It depends on config and data only, so that sums do not depend on the workers.

        Args:
            cohort: clients per round.
            work: of a client in a round: parameters times samples times epochs. Clients with little work get
                larger blocks, so that each block is worth a message, but there are at least four blocks.
        """
        if self.block_size == "auto":
            blocks, worthwhile = 16, _GPU_BLOCK_WORK if self.wants_gpu else _BLOCK_WORK
            while blocks > 4 and work * cohort / blocks < worthwhile:
                blocks //= 2
            size = -(-cohort // blocks)
            size = min(max(_MAX_BLOCK_CLIENTS, math.ceil(worthwhile / work)), size) if blocks == 16 else size
        else:
            size = self.block_size
        return min(size, self.clients_per_actor or size)


class Output(Section):
    """What is written, and where."""

    paths_from_here: ClassVar[bool] = True

    root: Path | RemoteRoot = Field(
        Path("runs"),
        description="folder of the run directories; or object storage (s3://bucket/runs, gs://, abfs://, "
        "hdfs://), to which runs are published at every checkpoint and at the end",
    )
    checkpoint_every: int = Field(
        10, ge=0, description="rounds between two checkpoints (0: only when interrupted and at the end)"
    )
    keep_checkpoints: int = Field(2, ge=1, description="number of checkpoints that are kept")
    loggers: tuple[LoggerChoice, ...] = Field(
        (), description="trackers besides the tables: mlflow, wandb, or your own logger"
    )
    tensorboard: bool = Field(
        True, description="write TensorBoard events; short for naming tensorboard in 'loggers'"
    )
    report: bool = Field(True, description="write report.html at the end")
    map: MapMethod = Field(
        "mds",
        description="map of the clients in reports, from the distances between their signatures: mds "
        "(classical multidimensional scaling) keeps distances, umap keeps neighbours",
    )

    @field_validator("root", mode="before")
    @classmethod
    def _known_storage(cls, root: object) -> object:
        """Refuse a URL that would be taken for a folder, and lost with the machine."""
        text = str(root)
        scheme, colon, rest = text.partition(":")
        if colon and scheme.lower() in SCHEMES and not is_url(text):  # S3://..., or s3:bucket
            address = rest if rest.startswith("//") else f"//{rest.lstrip('/')}"
            raise ValueError(f"got {text}; did you mean {scheme.lower()}:{address}?")
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) and not is_url(text):
            raise ValueError(f"{text} is on unknown storage; valid: {', '.join(SCHEMES)}")
        return root

    @model_validator(mode="after")
    def _named_once(self) -> Output:
        """Refuse a logger that is named twice, or named and switched off."""
        names = [logger.name for logger in self.loggers]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"loggers: {name!r} is named twice; one of each is possible")
        if "tensorboard" in names and not self.tensorboard:
            raise ValueError("tensorboard: is false, but 'loggers' names it; leave one of them out")
        return self

    @property
    def folder(self) -> Path:
        """Where runs are written on this machine."""
        return self.root if isinstance(self.root, Path) else staging(self.root)

    def remote(self, name: str) -> Remote | None:
        """Where a run of this name is published; None if it is only written to :attr:`folder`."""
        return None if isinstance(self.root, Path) else Remote(self.root, name)

    @property
    def all_loggers(self) -> tuple[Logger, ...]:
        """TensorBoard, unless it is switched off, and the loggers named in ``loggers``."""
        is_named = any(logger.name == "tensorboard" for logger in self.loggers)
        first = (LOGGERS["tensorboard"](),) if self.tensorboard and not is_named else ()
        return (*first, *self.loggers)


class Config(Section):
    """All settings of a run, including its seed: they determine every number of the result."""

    name: str = Field(
        "run",
        min_length=1,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="first part of the run directory's name",
    )
    plugins: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="modules or files with your own parts, such as my_method.py"
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="seed of all randomness")
    rounds: int = Field(
        20, ge=1, description="number of rounds; every cluster trains and averages once in each"
    )
    data: DatasetChoice = Field(default_factory=lambda: DATASETS["digits"](), description="the dataset")
    partition: PartitionChoice = Field(
        default_factory=lambda: PARTITIONS["label_skew"](),
        description="how the samples are divided among clients",
    )
    model: ModelChoice = Field(default_factory=lambda: MODELS["mlp"](), description="the network")
    algorithm: AlgorithmChoice = Field(
        default_factory=lambda: ALGORITHMS["fedavg"](), description="the method"
    )
    clustering: Clustering = Field(default_factory=Clustering, description="signature, proximity, grouping")
    hierarchy: Hierarchy = Field(default_factory=Hierarchy, description="local and global parameter servers")
    loss: LossChoice = Field(
        default_factory=lambda: LOSSES["cross_entropy"](), description="what models minimise"
    )
    training: Training = Field(default_factory=Training, description="local training")
    local: LocalChoice = Field(
        default_factory=lambda: OBJECTIVES["sgd"](), description="the clients' local objective"
    )
    order: OrderChoice = Field(
        default_factory=lambda: ORDERINGS["shuffled"](), description="the order of a client's samples"
    )
    sampling: SamplingChoice = Field(
        default_factory=lambda: SAMPLINGS["uniform"](), description="who takes part in a round"
    )
    aggregation: AggregationChoice = Field(
        default_factory=lambda: AGGREGATIONS["mean"](),
        description="how a server turns its clients' models into one",
    )
    events: tuple[Event, ...] = Field(
        (), description="events during the run: clients join, leave or drift, servers drop out"
    )
    evaluation: Evaluation = Field(default_factory=Evaluation, description="when clients are tested")
    execution: Execution = Field(default_factory=Execution, description="where it runs")
    output: Output = Field(default_factory=Output, description="what is written")

    @model_validator(mode="after")
    def _suited(self) -> Config:
        """Refuse combinations that make no sense, for example sampling where all clients take part."""
        suited, name = self.algorithm.objectives, self.local.name
        if suited is not None and name not in suited:
            raise ValueError(
                f"local objective {name!r} makes no sense with {self.algorithm.name}; "
                f"valid: {', '.join(suited)}"
            )
        if self.training.momentum and not self.algorithm.takes_momentum:
            raise ValueError(
                f"training.momentum {self.training.momentum:g} makes no sense with {self.algorithm.name}; "
                "it must be 0"
            )
        if self.sampling.name != "uniform" and self.training.participation == 1:
            raise ValueError(
                f"sampling {self.sampling.name!r} would do nothing if all clients take part; "
                "set training.participation below 1"
            )
        if not self.algorithm.uses_sampling and self.sampling.name != "uniform":
            raise ValueError(
                f"sampling {self.sampling.name!r} would do nothing with {self.algorithm.name}; leave it out"
            )
        partial = self.training.participation < 1
        if partial and self.algorithm.selects and self.hierarchy.weights == "population":
            raise ValueError(
                "hierarchy.weights 'population' counts the clients of each model, but clients "
                f"of {self.algorithm.name} outside the cohort have not chosen one; use 'participated'"
            )
        return self

    @property
    def shards(self) -> int:
        """Maximum number of shards of a model at the servers."""
        return self.hierarchy.lps_actors if self.execution.shard_models else 1

    @model_validator(mode="after")
    def _sharded(self) -> Config:
        """Refuse to shard models at one server, or with an aggregation rule that needs whole models."""
        if self.execution.shard_models and self.hierarchy.lps_actors == 1:
            what = "is 1, and execution.shard_models divides every model among several"
            raise ConfigError("hierarchy.lps_actors", what, "use 2 or more")
        if self.execution.shard_models and self.aggregation.reweighs:
            what = f"aggregation {self.aggregation.name!r} compares whole models"
            raise ConfigError("execution.shard_models", what, "set it to false")
        return self

    @model_validator(mode="after")
    def _mixed(self) -> Config:
        """Refuse objectives whose clients send more than models, where these are mixed by reports."""
        local, name = self.local, self.algorithm.name
        if not self.algorithm.mixes_by_reports:
            return self
        if local.masks or type(local).server_size is not LocalObjective.server_size:
            what = f"{local.name!r} sends more than models, and {name} mixes them one by one, by reports"
            raise ConfigError("local.name", what, "use another objective, such as sgd")
        return self

    @model_validator(mode="after")
    def _aggregated(self) -> Config:
        """Refuse an aggregation rule where models are not plain averages."""
        rule, local = self.aggregation.name, self.local
        if self.aggregation.is_mean:
            return self
        if not self.algorithm.takes_aggregation:
            what, remedy = f"{rule!r} makes no sense with {self.algorithm.name}", "it must be 'mean'"
            raise ConfigError("aggregation.name", what, remedy)
        size = np.ones(1, np.int64)
        reasons = {
            "leave parameters out of the average": local.masks,
            "add to a vector of the server": type(local).server_size is not LocalObjective.server_size,
            "count in the average when they are absent": local.counts_absent,
            "keep a part of the old model": weights_of(local, size, size * 0, self.training)[1] is not None,
        }
        for what, applies in reasons.items():
            if applies:
                what = f"{rule!r} makes no sense with local objective {local.name!r}, whose clients {what}"
                raise ConfigError("aggregation.name", what, "it must be 'mean'")
        return self

    @model_validator(mode="after")
    def _used(self) -> Config:
        """Refuse settings of sections that the method does not use."""
        for section, keys in USED_BY_SOME.items():
            if section in self.algorithm.takes:
                continue
            settings = getattr(self, section)
            idle = [key for key in keys if getattr(settings, key) != getattr(type(settings)(), key)]
            if idle:
                raise self._unused_setting_error(f"{section}.{idle[0]}", section)
        for place, event in enumerate(self.events):
            if isinstance(event, Outage) and "hierarchy" not in self.algorithm.takes:
                raise self._unused_setting_error(f"events.{place}", "hierarchy")
            if isinstance(event, Outage) and not self.hierarchy.averages:
                what = "an outage changes nothing where the global server averages nothing"
                raise ConfigError(f"events.{place}", what, "set hierarchy.common_layers or hierarchy.edges")
        return self

    def _unused_setting_error(self, where: str, section: str) -> ConfigError:
        takers = ", ".join(name for name, part in ALGORITHMS.items() if section in part.takes)
        return ConfigError(
            where,
            f"would do nothing with {self.algorithm.name}",
            f"leave it out, or take an algorithm that uses it: {takers}",
        )

    def parts(self) -> Iterator[tuple[str, Section]]:
        """Yield the dotted path and the section, for all sections that the run uses, also nested ones."""
        for name in type(self).model_fields:
            if name not in USED_BY_SOME or name in self.algorithm.takes:
                yield from _nested_sections(getattr(self, name), name)

    @property
    def public_samples(self) -> int:
        """How many held-out samples the server uses: the maximum of what its parts need."""
        clustering = self.clustering.public_samples if "clustering" in self.algorithm.takes else 0
        return max(self.data.public_samples, self.algorithm.public_samples, clustering)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written to ``config.yaml``."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """YAML that :func:`rayfl.load` reads back to an equal config."""
        return text.dump(self.to_dict())


def _nested_sections(value: object, where: str) -> Iterator[tuple[str, Section]]:
    if isinstance(value, tuple):
        for place, part in enumerate(value):
            yield from _nested_sections(part, f"{where}.{place}")
    if isinstance(value, Section):
        yield where, value
        for name in type(value).model_fields:
            yield from _nested_sections(getattr(value, name), f"{where}.{name}")


def json_schema() -> dict[str, Any]:
    """The JSON schema of a config file, for editors (``rayfl list --schema``)."""
    schema = Config.model_json_schema()
    schema["properties"]["paper"] = Paper.model_json_schema()
    return schema

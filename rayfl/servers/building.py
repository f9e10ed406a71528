"""Build the parts of a run from its config: the data divided among clients, and what client actors run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rayfl.algorithms import Algorithm, Setup
from rayfl.backend import Backend
from rayfl.clients.jobs import HostSpec
from rayfl.clustering.cluster import refuse, refuse_groups, refuse_number
from rayfl.config import Config
from rayfl.data import Federation, Samples
from rayfl.data import data_root as default_root
from rayfl.data.base import called
from rayfl.data.events import Outage, Stage, build_stages
from rayfl.data.held_out import read
from rayfl.data.scaling import Scaling
from rayfl.errors import ConfigError, DataError, type_of
from rayfl.local import LocalObjective
from rayfl.losses import LOSSES, Loss
from rayfl.memory import total_memory
from rayfl.models import MODELS, Model, ModelSpec
from rayfl.models._own import OwnNetwork
from rayfl.models.base import one_line, task_of
from rayfl.ordering import Ordering
from rayfl.plugins import call_part, is_own
from rayfl.rundir import ROUND_COLUMNS
from rayfl.servers.models import Blocks, Servers
from rayfl.units import counted, size

if TYPE_CHECKING:
    import torch

_COPIES = 4
"""Models in memory while one client trains: the server's, the client's, its gradient and its result."""


def check(config: Config) -> None:
    """Refuse what can be refused without reading data: missing datasets, libraries and devices.

    Code outside of rayfl that the model needs is imported, so that it is sent to Ray's workers.

    Raises:
        ConfigError, DataError
    """
    for logger in config.output.all_loggers:
        logger.check()
    config.model.prepare()
    root = data_root(config)
    if not config.data.available(root):
        config.data.load(root)  # raises the dataset's own message
        raise DataError(f"{config.data} is not available in {root}")
    config.partition.check()
    if device_of(config) != "cpu" and config.execution.backend == "inline":
        import torch

        from rayfl.training.precision import check_device

        if torch.cuda.is_available():
            check_device(config.training.precision, torch.device("cuda"))
        elif config.execution.device == "cuda":
            raise ConfigError(
                "execution.device", "no CUDA device here", "execution.device=auto takes what there is"
            )


def device_of(config: Config) -> str:
    """What clients train on: ``cpu``, ``cuda``, or ``auto`` for a GPU if the actor gets one."""
    e = config.execution
    return e.device if e.device != "auto" else ("auto" if e.wants_gpu else "cpu")


def data_root(config: Config) -> Path:
    """The folder of the config's dataset."""
    return config.data.root or default_root()


def build(
    config: Config, scaling: Scaling | None = None, reading: bool = False
) -> tuple[tuple[Stage, ...], HostSpec]:
    """The stages of the federation and what its hosts run: a function of the config alone.

    Args:
        config: of the run.
        scaling: of the existing run (:attr:`RunDirectory.scaling`), if any; it is not computed again.
        reading: only to use models that have been trained: whether the network could be trained is not
            checked.

    Raises:
        ConfigError, DataError: if data, partition and model do not fit together.
    """
    from rayfl.training.engine import choose_engine

    stages, spec = divide(config, scaling)
    check_model(spec.P, total_memory())
    if not reading:
        check_network(spec)
    check_words(spec, stages[0].federation.samples)
    check_loss(spec)
    check_measures(spec)
    check_facts(config.local, spec)
    check_hierarchy(config, spec, stages[0].federation)
    check_clustering(config, *clustered(stages[0].federation))
    check_aggregation(config, stages)
    config.algorithm.check(spec)
    config.local.check(spec, config.training, config.partition.validation)
    config.order.check(spec)
    check_finetuning(config, spec)
    check_batches(config, spec, stages)
    engine, why = choose_engine(spec, config.training.engine, config.training.precision)
    return stages, HostSpec(
        spec,
        config.seed,
        engine,
        why,
        device=device_of(config),
        gpu_fraction=config.execution.gpu_share,
        permutes=config.algorithm.permutes,
        cuda_graphs=config.training.cuda_graphs == "auto",
        precision=config.training.precision,
        shards=config.shards,
    )


def check_network(spec: ModelSpec) -> None:
    """Refuse a network that cannot be trained; rayfl's own are known to be sound.

    Raises:
        ConfigError
    """
    from rayfl.models.modules import own

    model = spec.model
    model.check(spec.build, spec.shape, spec.classes)
    if not isinstance(model, OwnNetwork) and not is_own(model):
        own.check_network(spec.build, spec.shape, spec.classes, task_of(model), model.load_weights)


def divide(config: Config, scaling: Scaling | None = None) -> tuple[tuple[Stage, ...], ModelSpec]:
    """The stages of the federation, and the model for its samples; see :func:`build`.

    Raises:
        ConfigError, DataError: if data, partition and model do not fit together.
    """
    samples = read(config.data, data_root(config), config.public_samples, config.seed, scaling)
    check_targets(config, samples)
    stages = build_stages(
        samples,
        config.partition,
        config.events,
        validation=config.partition.validation,
        test_samples=config.partition.test_samples,
        seed=config.seed,
        rounds=config.rounds,
    )
    check_inputs(config.model, samples)
    return stages, ModelSpec.of(config.model, samples.shape, samples.outputs, config.seed, config.loss)


def check_finetuning(config: Config, spec: ModelSpec) -> None:
    """Refuse fine-tuning if clients train several times in a round and the objective does not define it.

    Methods with test-time adaptation fine-tune as they adapt.

    Raises:
        ConfigError
    """
    adapts = type(config.algorithm).adaptation is not Algorithm.adaptation
    if not config.evaluation.finetune_epochs or adapts:
        return
    if config.local.finetuning(config.training.work(0, config.rounds), spec) is None:
        where, kind = "evaluation.finetune_epochs", type(config.local).__name__
        what = f"clients of {kind} may train several times in a round, and it does not say how they fine-tune"
        raise ConfigError(where, what, f"set it to 0, or define {kind}.finetuning")


def check_batches(config: Config, spec: ModelSpec, stages: Sequence[Stage]) -> None:
    """Refuse batches of a single sample if the network cannot be trained on one, as with BatchNorm.

    Orders of samples that form their own batches are not checked.

    Raises:
        ConfigError
    """
    import torch

    size, federations = config.training.batch_size, [stage.federation for stage in stages]
    if type(config.order).visits is not Ordering.visits:
        return
    affected = [np.flatnonzero((f.sizes > 0) & ((f.sizes - 1) % size == 0)) for f in federations]
    stage_index = next(
        (k for k, who in enumerate(affected) if len(who) > config.execution.tolerate_failures), None
    )
    if stage_index is None:
        return
    x, _ = spec.model.example(spec.shape, spec.classes, 1, np.random.default_rng(0))
    inputs = torch.from_numpy(x)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            spec.build().train()(inputs.long() if x.dtype == np.int32 else inputs)
    except Exception as error:
        federation, client = federations[stage_index], affected[stage_index][0]
        who, samples = called(federation.names, client), federation.sizes[client]
        sizes = np.concatenate([f.sizes for f in federations])
        sizes = sizes[sizes > 0]
        better_size = next((b for b in range(size + 1, 4 * size + 2) if ((sizes - 1) % b).all()), None)
        what = (
            f"client {who} has {counted(samples, 'sample')}, and so a batch of one, "
            f"on which the network cannot be trained ({one_line(error)})"
        )
        remedy = "GroupNorm works with one sample (model.norm=group)"
        if better_size:
            remedy = f"{better_size} leaves no such batch"
        raise ConfigError("training.batch_size", what, remedy) from None


def check_hierarchy(config: Config, spec: ModelSpec, federation: Federation) -> None:
    """Refuse common layers that the model does not have, and edges that do not fit the clients or the events.

    Raises:
        ConfigError
    """
    config.hierarchy.common(spec)
    client_edges = config.hierarchy.place(federation.clients, config.seed, _client_names(federation))
    edges = int(client_edges.max()) + 1
    for index, event in enumerate(config.events):
        if isinstance(event, Outage) and edges > 1 and max(event.servers) >= edges:
            raise ConfigError(
                f"events.{index}.servers",
                f"there is no edge {max(event.servers)}",
                f"use 0 to {edges - 1}",
            )


def check_aggregation(config: Config, stages: Sequence[Stage]) -> None:
    """Refuse an aggregation rule for which the cohorts are too small, even if all contribute to one model.

    Raises:
        ConfigError
    """
    for stage in stages:
        present = int((stage.federation.sizes > 0).sum())
        call_part(config.aggregation, "check", config.training.cohort(present))


def clustered(federation: Federation) -> tuple[int, bool, tuple[int, ...]]:
    """Number of clients present, whether there are true groups, and the shape of a sample."""
    return int((federation.sizes > 0).sum()), federation.groups is not None, federation.samples.shape


def check_clustering(config: Config, clients: int, grouped: bool, shape: tuple[int, ...]) -> None:
    """Refuse a clustering that cannot succeed with these clients and samples.

    Args:
        config: of the run.
        clients, grouped, shape: of the federation before round 0, see :func:`clustered`.

    Raises:
        ConfigError: if there are fewer clients than clusters, the true groups are needed and unknown, or the
            feature map cannot take the samples.
        RayflError: if the distances do not fit in memory.
    """
    if "clustering" not in config.algorithm.takes:
        return
    refuse_number(config.clustering, clients)
    if not grouped:
        refuse_groups(config.clustering)
    refuse(config.clustering, clients)
    if config.clustering.needs_signatures:
        config.clustering.features.check(shape)


def _client_names(federation: Federation, clients: int | None = None) -> list[str] | None:
    """The user's ids of the first ``clients`` clients (default: all); None if there are none."""
    return None if federation.names is None else federation.names[:clients].tolist()


def check_inputs(model: Model, samples: Samples) -> None:
    """Refuse a network for words on other data, and vice versa.

    Raises:
        ConfigError
    """
    task = task_of(model)
    if task == samples.task:
        return
    takes = {"numbers": "images and features", "texts": "texts to classify", "words": "words"}
    others = {"numbers": "other data", "texts": "texts to classify", "words": "texts"}
    what = f"{model.name_of()!r} takes {takes[task]}; {samples.name} has {others[samples.task]}"
    if "task" in type(model).model_fields:
        raise ConfigError("model.task", what, f"set model.task={samples.task}")
    suited = [name for name, part in MODELS.items() if "task" in part.model_fields]
    if samples.task != "texts":
        suited = [name for name, part in MODELS.items() if part.tokens == (samples.task == "words")]
    raise ConfigError("model.name", what, f"use one of {', '.join(suited)}")


def _example(spec: ModelSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and targets of three samples."""
    import torch

    _, targets = spec.model.example(spec.shape, spec.classes, 3, np.random.default_rng(0))
    words = task_of(spec.model) == "words"
    outputs = torch.zeros(3, spec.classes, *(spec.shape if words else ()), requires_grad=True)
    return outputs, torch.zeros(3, spec.classes) if spec.loss.numeric else torch.from_numpy(targets)


def check_loss(spec: ModelSpec) -> None:
    """Refuse a user's loss that does not return a number for each prediction, or whether it is right.

    Raises:
        ConfigError
    """
    import torch

    if is_own(spec.loss):
        return
    outputs, truth = _example(spec)
    expected = (3, *spec.shape) if task_of(spec.model) == "words" else (3,)
    losses = call_part(spec.loss, "each", outputs, truth)
    if not isinstance(losses, torch.Tensor) or tuple(losses.shape) != expected:
        what = f"shape {tuple(losses.shape)}" if isinstance(losses, torch.Tensor) else type_of(losses)
        raise ConfigError(f"{spec.loss.name}.each", f"returned {what}", f"expected a tensor {expected}")
    if not losses.requires_grad:
        what = "returned a loss through which no gradient flows to the outputs"
        raise ConfigError(f"{spec.loss.name}.each", what, "compute it from outputs, in PyTorch")
    if not spec.loss.accurate:
        return
    if spec.loss.numeric and type(spec.loss).right is Loss.right:
        what = "is True, and predictions of numbers are not right or wrong by themselves"
        remedy = "set accurate: ClassVar[bool] = False, or say by the method right which are"
        raise ConfigError(f"{spec.loss.name}.accurate", what, remedy)
    right = call_part(spec.loss, "right", outputs.detach(), truth)
    if not isinstance(right, torch.Tensor) or right.dtype != torch.bool or tuple(right.shape) != expected:
        what = f"returned {type_of(right)}"
        raise ConfigError(f"{spec.loss.name}.right", what, f"expected a tensor of bool {expected}")


_PREFIXES = ("local_", "common_", "validation_", "finetuned_", "newcomers_")
"""Of the names of rayfl's own numbers."""

_CLIENT_COLUMNS = (
    "client",
    "name",
    "n",
    "test_samples",
    "group",
    "cluster",
    "rounds_trained",
    "accuracy_last",
    "accuracy_best",
    "accuracy_finetuned",
    "best_round",
    "perplexity_last",
    "perplexity_best",
)
"""Columns of ``clients.csv`` that rayfl writes."""


def _is_taken(name: str) -> bool:
    """Whether a number of this name is rayfl's own."""
    return name.startswith(_PREFIXES) or name in _CLIENT_COLUMNS or f"{name}_mean" in ROUND_COLUMNS


def check_measures(spec: ModelSpec) -> None:
    """Refuse a user's loss that does not measure for each client what it names, or names rayfl's own numbers.

    Raises:
        ConfigError
    """
    loss = spec.loss
    if is_own(loss) or not loss.measures:
        return
    for name in loss.measures:
        if _is_taken(name):
            raise ConfigError(
                f"{loss.name}.measures", f"{name!r} is a number of rayfl", "choose another name"
            )
    import torch

    outputs, truth = _example(spec)
    sums = call_part(loss, "sums", outputs.detach(), truth)
    where = f"{loss.name}.sums"
    if not isinstance(sums, torch.Tensor) or sums.ndim != 2 or len(sums) != len(outputs):
        raise ConfigError(where, f"returned {type_of(sums)}", f"expected a tensor ({len(outputs)}, S)")
    totals, sizes = np.repeat(sums.double().sum(dim=0, keepdim=True).numpy(), 2, axis=0), np.array([3, 3])
    _check_columns(f"{loss.name}.measured", call_part(loss, "measured", totals, sizes), [*loss.measures], 2)


def check_facts(local: LocalObjective, spec: ModelSpec) -> None:
    """Refuse a user's local objective that does not report for each client what it names.

    Raises:
        ConfigError
    """
    size = local.state_size(spec)
    if is_own(local) or type(local).client_facts is LocalObjective.client_facts or not size:
        return
    for name in local.facts:
        if _is_taken(name):
            raise ConfigError(f"{local.name}.facts", f"{name!r} is a number of rayfl", "choose another name")
    found = call_part(local, "client_facts", np.zeros((2, size), np.float32), spec)
    where = f"{local.name}.client_facts"
    if isinstance(found, dict) and (unnamed := sorted(set(found) - set(local.facts))):
        raise ConfigError(where, f"returned {unnamed[0]!r}, which is not in facts", "add it there")
    _check_columns(where, found, [*found] if isinstance(found, dict) else [], 2)


def _check_columns(where: str, found: object, names: Sequence[str], count: int) -> None:
    """Check a dictionary of arrays with an entry for each client."""
    if not isinstance(found, dict) or set(found) != set(names):
        given = f"the names {sorted(found)}" if isinstance(found, dict) else type_of(found)
        expected = f"expected a dictionary of {', '.join(names)}" if names else "expected a dictionary"
        raise ConfigError(where, f"returned {given}", expected)
    for name, values in found.items():
        if not isinstance(values, np.ndarray) or values.shape != (count,) or values.dtype.kind not in "iuf":
            what = f"{name} is {type_of(values)} for {counted(count, 'client')}"
            raise ConfigError(where, what, "expected an array with a number for each")


def check_words(spec: ModelSpec, samples: Samples) -> None:
    """Refuse a network that does not know all words of the texts.

    Raises:
        ConfigError
    """
    import torch

    if not samples.tokens or "task" not in type(spec.model).model_fields:
        return
    top = max(int(x.max()) for x in (samples.x_train, samples.x_test))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            spec.build().eval()(torch.full((1, *spec.shape), top))
    except IndexError:
        what = f"{spec.model.name_of()!r} does not know word {top} of {samples.name}"
        raise ConfigError("model", what, f"its vocabulary needs {top + 1} words") from None


def check_targets(config: Config, samples: Samples) -> None:
    """Refuse a loss for classes on numeric targets and vice versa, and parts that need classes.

    Raises:
        ConfigError
    """
    loss = config.loss
    if loss.numeric != samples.numeric:
        kinds = "numbers (floats, or several per sample)", "classes (integers of shape (n,))"
        expected, actual = kinds if loss.numeric else kinds[::-1]
        suited = ", ".join(name for name, part in LOSSES.items() if part.numeric == samples.numeric)
        remedy = _class_remedy(samples) or f"use one of {suited}"
        if loss.numeric:
            remedy += ", or if these are numbers to predict, store floats: y.astype(float)"
        what = f"{loss.name!r} is a loss for {expected}; {samples.name} has {actual}"
        raise ConfigError("loss.name", what, remedy)
    if not samples.numeric:
        return
    for part in (samples.targets_train, samples.targets_test):
        loss.check(np.asarray(part, np.float32))
    for where, section in config.parts():
        if section.needs_classes():
            what = f"{getattr(section, 'name', where)!r} needs classes; {samples.name} has numbers to predict"
            raise ConfigError(where, what, "choose another")


def _class_remedy(samples: Samples) -> str:
    """How to convert targets that look like classes to classes; empty if they do not."""
    targets = samples.targets_train
    if targets is None or not len(targets):
        return ""
    if targets.ndim == 1 or targets.shape[1] == 1:
        integral = np.all(targets == np.round(targets)) and targets.min() >= 0
        return "if these are classes, store integers: y.astype(np.int64)" if integral else ""
    one_hot = np.isin(targets, (0, 1)).all() and (targets.sum(axis=1) == 1).all()
    return "if these are classes, one of which is 1, store their numbers: y.argmax(axis=1)" if one_hot else ""


def check_model(parameters: int, memory: float) -> None:
    """Refuse a model if one client and one server with it do not fit into the memory of this machine.

    Args:
        parameters: P.
        memory: of this machine, in bytes.

    Raises:
        ConfigError
    """
    needed = _COPIES * 4.0 * parameters
    if needed > memory:
        raise ConfigError(
            "model",
            f"{parameters:,} parameters need {size(needed)} to train one client; "
            f"this machine has {size(memory)}",
            f"at most {int(memory / needed * parameters):,} parameters fit",
        )


def setup_of(
    config: Config, federation: Federation, spec: ModelSpec, edges: NDArray[np.int64] | None = None
) -> Setup:
    """What the algorithm may know about a run with this federation; ``edges`` has the edge of each client
    ``(N,)``.
    """
    return Setup(
        clients=federation.clients,
        sizes=federation.sizes,
        spec=spec,
        rounds=config.rounds,
        seed=config.seed,
        training=config.training,
        hierarchy=config.hierarchy,
        clustering=config.clustering,
        local=config.local,
        order=config.order,
        sampling=config.sampling,
        edges=edges,
        outages=tuple(event for event in config.events if isinstance(event, Outage)),
    )


def stage_of(stages: Sequence[Stage], round: int) -> int:
    """Which of the stages a round belongs to."""
    return max(0, sum(stage.round <= round for stage in stages) - 1)


def block_rule(config: Config, federation: Federation, host: HostSpec) -> Callable[[int], int]:
    """Clients per block, given how many train in a round."""
    work = host.spec.P * float(federation.sizes.mean()) * config.training.epochs
    return lambda cohort: config.execution.clients_per_block(cohort, work)


def servers_of(
    config: Config, host: HostSpec, backend: Backend, federation: Federation, newcomers: int = 0
) -> Servers:
    """The servers of a run, without any model yet.

    Args:
        config: of the run.
        host: what the client actors run.
        backend: executes the work.
        federation: the clients' data.
        newcomers: how many clients, at the end, came after the run; they are assigned to its edges in turn.
    """
    before = federation.clients - newcomers
    edges = config.hierarchy.place(before, config.seed, _client_names(federation, before))
    return Servers(
        backend,
        host.spec,
        federation,
        blocks=Blocks(
            block_rule(config, federation, host),
            config.execution.clients_per_actor,
            config.execution.fan_in,
            host.shards,
        ),
        tolerate=config.execution.tolerate_failures,
        batch_size=config.evaluation.batch_size,
        edges=np.concatenate([edges, np.arange(newcomers) % (edges.max() + 1)]),
    )

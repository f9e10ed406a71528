"""The typed configuration of a run: YAML and dotted overrides in, one frozen, validated object out.

Each room declares its own section beside its owner; this module puts them together and turns every
mistake into one line that says where, what, and what would be right.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from rayfl.algorithms import ALGORITHMS, Algorithm, Hierarchy
from rayfl.clustering.config import Clustering
from rayfl.data import DATASETS, PARTITIONS, Dataset, Partition
from rayfl.data.events import Event, Outage
from rayfl.errors import ConfigError, nearest
from rayfl.local import OBJECTIVES, LocalObjective
from rayfl.models import MODELS, Model
from rayfl.ordering import ORDERINGS, Ordering
from rayfl.paper import Paper
from rayfl.sampling import SAMPLINGS, Sampling
from rayfl.settings import Section, choice, part_name
from rayfl.training import Training

PRESETS = Path(__file__).parent / "presets"

if TYPE_CHECKING:
    DatasetChoice = Dataset
    PartitionChoice = Partition
    ModelChoice = Model
    AlgorithmChoice = Algorithm
    LocalChoice = LocalObjective
    OrderChoice = Ordering
    SamplingChoice = Sampling
else:
    DatasetChoice, PartitionChoice = choice(DATASETS), choice(PARTITIONS)
    ModelChoice, AlgorithmChoice = choice(MODELS), choice(ALGORITHMS)
    LocalChoice, OrderChoice, SamplingChoice = choice(OBJECTIVES), choice(ORDERINGS), choice(SAMPLINGS)


_FOR_SOME = {
    "clustering": tuple(Clustering.model_fields),
    "hierarchy": ("common_layers", "global_every", "weights", "edges"),
}
"""Settings that only the methods use whose ``takes`` names the section."""

_BLOCK_WORK = 1e7
"""Parameters times samples that take a core a few milliseconds: less is not worth a message."""


class Evaluation(Section):
    """When and how clients are tested: each on its own test data with the model that it would use."""

    every: int = Field(
        1, ge=1, description="evaluate after every this many rounds, and always after the last"
    )
    batch_size: int = Field(500, ge=1, description="samples in one forward pass")
    coreset: int | None = Field(
        None,
        ge=4,
        description="between rounds test only this many clients (at least 4) and estimate the metrics from "
        "them: SCGIGA on the graph of clients with like label histograms, which all send. Estimates are "
        "marked and never count as best; the last test is of all clients",
    )
    finetune_epochs: int = Field(
        0,
        ge=0,
        description="at the end every client trains its model on for so many epochs, and is tested once more "
        "(the papers' suffix +: FedAvg+, FedProx+); methods whose clients adapt before every test: as then",
    )


class Execution(Section):
    """Where a run is executed. Nothing here changes its results (``block_size`` and the device aside)."""

    backend: Literal["ray", "inline"] = Field(
        "ray", description="ray: client actors; inline: the same code in this process, for debugging"
    )
    address: str | None = Field(
        None,
        description="address of a running Ray cluster ('auto' finds it); by default the environment decides",
    )
    actors: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="client actors; auto: as many as the CPUs (and GPUs) hold"
    )
    clients_per_actor: int | None = Field(
        None, ge=1, description="pin clients to actors, this many each (1: one actor a client); sets 'actors'"
    )
    cpus_per_actor: float = Field(1.0, gt=0, description="CPUs that Ray reserves for a client actor")
    gpus_per_actor: float = Field(
        0.0, ge=0, description="fraction of a GPU for a client actor; caps its memory"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda if gpus_per_actor > 0 and there is one"
    )
    block_size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="clients in a block, the unit of scheduling; auto: a sixteenth of the cohort, at most 64",
    )
    wait: Annotated[float, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="seconds to wait until the cluster has room for the actors (for one, with actors: auto); "
        "auto: 900 where nodes are started when needed, else 5",
    )
    deadline: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto",
        description="seconds for which a process may be silent before it is killed and its work done again; "
        "auto: 20 times what such work has taken at most, and 300 at least",
    )
    tolerate_failures: int = Field(
        0, ge=0, description="clients that may fail in a round and are then left out of its average"
    )

    def clients_per_block(self, cohort: int, work: float = math.inf) -> int:
        """The block size: a matter of config and data alone, so that sums do not depend on the workers.

        Args:
            cohort: clients a round.
            work: of a client in a round: parameters times samples times epochs. Blocks of tiny clients are
                larger, until they are worth a message, but there are four at least.
        """
        if self.block_size == "auto":
            blocks = 16
            while blocks > 4 and work * cohort / blocks < _BLOCK_WORK:
                blocks //= 2
            size = -(-cohort // blocks)
            size = min(64, size) if blocks == 16 else size
        else:
            size = self.block_size
        return min(size, self.clients_per_actor or size)


class Output(Section):
    """What is written, and where."""

    root: Path = Field(Path("runs"), description="folder of the run directories")
    checkpoint_every: int = Field(
        10, ge=0, description="rounds between two checkpoints (0: only when interrupted and at the end)"
    )
    keep_checkpoints: int = Field(2, ge=1, description="how many checkpoints are kept")
    tensorboard: bool = Field(True, description="write TensorBoard events")
    report: bool = Field(True, description="write report.html at the end")


class Config(Section):
    """A run: resolved, it and its seed determine every number of the result."""

    name: str = Field(
        "run", min_length=1, pattern=r"^[A-Za-z0-9._-]+$", description="begins the run directory"
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="of all randomness")
    rounds: int = Field(20, ge=1, description="local rounds: every cluster trains and averages once in each")
    data: DatasetChoice = Field(default_factory=lambda: DATASETS["digits"](), description="the dataset")
    partition: PartitionChoice = Field(
        default_factory=lambda: PARTITIONS["label_skew"](), description="how clients differ"
    )
    model: ModelChoice = Field(default_factory=lambda: MODELS["mlp"](), description="the network")
    algorithm: AlgorithmChoice = Field(
        default_factory=lambda: ALGORITHMS["fedavg"](), description="the method"
    )
    clustering: Clustering = Field(default_factory=Clustering, description="signature, proximity, grouping")
    hierarchy: Hierarchy = Field(default_factory=Hierarchy, description="local and global parameter servers")
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
    events: tuple[Event, ...] = Field(
        (), description="what happens during the run: clients join, leave or drift, servers drop out"
    )
    evaluation: Evaluation = Field(default_factory=Evaluation, description="when clients are tested")
    execution: Execution = Field(default_factory=Execution, description="where it runs")
    output: Output = Field(default_factory=Output, description="what is written")

    @model_validator(mode="after")
    def _suited(self) -> Config:
        """Refuse what makes no sense together: local objectives, momentum, sampling where all take part."""
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
                f"sampling {self.sampling.name!r} has nothing to choose where all clients take part; "
                "set training.participation below 1"
            )
        return self

    @model_validator(mode="after")
    def _used(self) -> Config:
        """Refuse settings of sections that the method does not use."""
        for section, keys in _FOR_SOME.items():
            if section in self.algorithm.takes:
                continue
            given = getattr(self, section)
            idle = [key for key in keys if getattr(given, key) != getattr(type(given)(), key)]
            if idle:
                raise self._idle(f"{section}.{idle[0]}", section)
        for place, event in enumerate(self.events):
            if isinstance(event, Outage) and "hierarchy" not in self.algorithm.takes:
                raise self._idle(f"events.{place}", "hierarchy")
        return self

    def _idle(self, where: str, section: str) -> ConfigError:
        takers = ", ".join(name for name, part in ALGORITHMS.items() if section in part.takes)
        return ConfigError(
            where,
            f"would do nothing with {self.algorithm.name}",
            f"leave it out, or take an algorithm that uses it: {takers}",
        )

    @property
    def public_samples(self) -> int:
        """How many samples that no client has the server looks at, all parts together."""
        clustering = self.clustering.public_samples if "clustering" in self.algorithm.takes else 0
        return max(self.data.public_samples, self.algorithm.public_samples, clustering)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written to ``config.yaml``."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """YAML that :func:`load` reads back to an equal config."""
        return yaml.dump(self.to_dict(), Dumper=_Dumper, sort_keys=False)


class _Loader(yaml.SafeLoader):
    """YAML in which ``1e-3`` is a number, as people mean it (YAML 1.1 reads text), and no key comes twice."""

    def get_single_node(self) -> yaml.Node | None:
        """As YAML defines it, but aliases may not make a small file huge, nor endless."""
        root: yaml.Node | None = super().get_single_node()
        sizes: dict[int, int] = {}
        written = _expanded(root, sizes) if root is not None else 0
        if written - len(sizes) > _REPEATED:
            problem = f"aliases repeat {written - len(sizes):.3g} values; at most {_REPEATED:,} are allowed"
            raise yaml.constructor.ConstructorError(None, None, problem, getattr(root, "start_mark", None))
        return root

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """As YAML defines it, but a repeated key is a mistake instead of the last one silently winning."""
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.value in seen and key.value != "<<":
                problem = f"{key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else "")
        return super().construct_mapping(node, deep)


_REPEATED = 100_000
"""Values that aliases may repeat: a few hundred bytes of nested anchors mean billions of values."""


def _expanded(node: yaml.Node, sizes: dict[int, int]) -> int:
    """The number of values in a node, those of aliases counted wherever they stand.

    Args:
        node: the root.
        sizes: filled with the size of each node by its id; 0 while it is being counted.
    """
    if id(node) in sizes:
        if not sizes[id(node)]:
            raise yaml.constructor.ConstructorError(None, None, "it contains itself", node.start_mark)
        return sizes[id(node)]
    sizes[id(node)] = 0
    inner = node.value if isinstance(node, yaml.CollectionNode) else ()
    size = 1
    for child in inner:
        for each in child if isinstance(child, tuple) else (child,):
            size += _expanded(each, sizes)
    sizes[id(node)] = size
    return size


class _Dumper(yaml.SafeDumper):
    """Quotes the text that :class:`_Loader` would take for a number."""


for _yaml in (_Loader, _Dumper):
    _yaml.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d[\d_]*(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def presets() -> dict[str, Path]:
    """The presets shipped with the package, by name."""
    return {path.stem: path for path in sorted(PRESETS.glob("*.yaml"))}


def describe_preset(path: Path) -> str:
    """The comment on the first line of a preset."""
    return path.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ")


def paper_of(path: Path) -> Paper:
    """The ``paper:`` block of a preset, or of another YAML file.

    Raises:
        ConfigError: if there is none, or if it is none; one line.
    """
    block = _read_yaml(path).get("paper")
    try:
        return Paper.model_validate(block)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("paper", *first["loc"])))
        raise ConfigError(f"{path}: {where}", first["msg"], "see the block of a preset") from None


def load(source: str | Path | Mapping[str, Any] | Config, overrides: Sequence[str] = ()) -> Config:
    """Read, complete and validate a configuration.

    Where ``overrides`` name another algorithm than the source, the source's settings of sections that it
    does not use are left out.

    Args:
        source: a preset's name, a YAML file, or a mapping (or a Config, to change it).
        overrides: dotted settings such as ``"training.lr=0.1"``; the value is read as YAML.

    Raises:
        ConfigError: one line: where, what, and what would be right.
    """
    settings = _read(source)
    algorithm = _algorithm(with_overrides(settings, overrides))
    if algorithm is not _algorithm(settings):
        settings = _of_use(settings, algorithm)
    return resolve(with_overrides(settings, overrides))


def reload(path: Path) -> Config:
    """The config of an earlier run, less what it said in vain: that was not refused once.

    Raises:
        ConfigError: as :func:`load`.
    """
    settings = _read(path)
    return resolve(_of_use(settings, _algorithm(settings)))


def _read(source: str | Path | Mapping[str, Any] | Config) -> dict[str, Any]:
    """The settings of a source, without what it says of a paper."""
    if isinstance(source, Config):
        return source.to_dict()
    settings = dict(source) if isinstance(source, Mapping) else _read_yaml(source)
    settings.pop("paper", None)
    return settings


def _read_yaml(source: str | Path) -> dict[str, Any]:
    path = Path(os.path.expanduser(source))
    if str(source) in presets():
        path = presets()[str(source)]
    elif not _is_file(path):
        is_path = path.suffix in (".yaml", ".yml") or len(path.parts) > 1
        remedy = "name a preset or an existing file" if is_path else nearest(str(source), presets())
        raise ConfigError(_one_line(str(source)), "no such file" if is_path else "no such preset", remedy)
    try:
        settings = _parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    except _NOT_YAML as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(place, f"not YAML: {problem}") from None
    if settings is None:
        settings = {}
    if not isinstance(settings, dict):
        raise ConfigError(
            str(path), f"holds a {type(settings).__name__}", "expected 'section: settings' lines"
        )
    return settings


_NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)
"""What the parser raises: ValueError for bytes that are no text, impossible dates and endless integers."""


def _parse(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def _one_line(text: str) -> str:
    """What somebody typed, fit for a message."""
    return text if text.isprintable() else repr(text)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name longer than the file system allows
        return False


def with_overrides(settings: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """``settings`` with dotted ``key=value`` overrides applied (a copy).

    Naming a part anew, as in ``algorithm=pacfl``, drops the settings of the part that it replaces.
    """
    result = copy.deepcopy(dict(settings))
    for text in overrides:
        path, equals, value = text.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(_one_line(text), "not an override", "expected key=value, e.g. training.lr=0.1")
        try:
            parsed = _parse(value)
        except _NOT_YAML:
            raise ConfigError(
                _one_line(path), f"{value!r} is not a YAML value", "quote it if it is text"
            ) from None
        _assign(result, keys, parsed)
    return result


def _assign(settings: dict[str, Any], path: list[str], value: Any) -> None:
    node = settings
    for part in path[:-1]:
        inner = node.get(part)
        if isinstance(inner, str):  # the short form 'algorithm: pacfl'
            inner = {"name": inner}
        node[part] = inner if isinstance(inner, dict) else {}
        node = node[part]
    last, old = path[-1], node.get(path[-1])
    if last == "name" and len(path) > 1 and node.get("name") not in (None, value):
        node.clear()
    renames = isinstance(old, dict) and isinstance(value, str) and old.get("name") == value
    node[last] = old if renames else value


def resolve(settings: Mapping[str, Any]) -> Config:
    """Complete ``settings`` with the algorithm's defaults for other sections, and validate.

    Raises:
        ConfigError: for the first mistake found.
    """
    settings = dict(settings)
    part = _algorithm(settings)
    for section, values in (part.defaults if part else {}).items():
        settings[section] = _merge(values, settings.get(section))
    settings = _complete(settings, Config)
    try:
        config = Config.model_validate(settings)
    except ValidationError as error:
        raise _explain(error, settings) from None
    _refuse_truth(settings, config)
    return config


def _refuse_truth(given: object, taken: object, where: str = "", expected: str = "") -> None:
    """Refuse YAML's yes, on and true where a number is wanted: Pydantic takes them for 1."""
    if isinstance(given, bool) and not isinstance(taken, bool):
        raise ConfigError(where, _shown(given), f"expected {expected}")
    if isinstance(given, Mapping) and isinstance(taken, BaseModel):
        for key, value in given.items():
            field = type(taken).model_fields[key]
            expected = _describe(field.annotation, field.metadata)
            _refuse_truth(value, getattr(taken, key), f"{where}.{key}".lstrip("."), expected)
    elif isinstance(given, (list, tuple)) and isinstance(taken, tuple):
        for place, (value, item) in enumerate(zip(given, taken, strict=False)):
            _refuse_truth(value, item, f"{where}.{place}" if isinstance(value, Mapping) else where, expected)


def _merge(base: Mapping[str, Any], over: Any) -> Any:
    """``base`` updated by ``over``, recursively; a part of another name replaces the base's part."""
    if over is None or (isinstance(over, str) and base.get("name") == over):
        return dict(base)
    if not isinstance(over, Mapping) or over.get("name", base.get("name")) != base.get("name"):
        return over
    merged = dict(base)
    for key, value in over.items():
        merged[key] = _merge(base[key], value) if isinstance(base.get(key), Mapping) else value
    return merged


def _complete(values: Mapping[str, Any], section: type[BaseModel]) -> dict[str, Any]:
    """Settings of a part that is not named belong to the default one; a section left empty is left out."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        field = section.model_fields.get(key) if isinstance(key, str) else None
        default = field.get_default(call_default_factory=True) if field else None
        if field is not None and isinstance(default, Section):
            if value is None:
                continue
            choices = _sections(field.annotation)
            if isinstance(value, Mapping):
                if None not in choices and "name" not in value:
                    value = {"name": part_name(type(default)), **value}
                chosen = value.get("name")
                inner = choices.get(None) or (choices.get(chosen) if isinstance(chosen, str) else None)
                value = _complete(value, inner) if inner else value
        result[key] = value
    return result


class _Place(NamedTuple):
    """Where an error lies: its dotted path, the section with its last element, and what is expected there."""

    path: tuple[str, ...]
    owner: type[BaseModel] | None
    siblings: Mapping[str | None, type[BaseModel]]
    expected: str


def _explain(error: ValidationError, settings: Mapping[str, Any]) -> ConfigError:
    """The first mistake, in words that help."""
    found = error.errors()
    outer = {e["loc"][:depth] for e in found for depth in range(len(e["loc"]))}
    # A list whose items are wrong counts as too short, too: the items are the mistake.
    errors = [(e, _locate(e["loc"])) for e in found if e["type"] != "too_short" or e["loc"] not in outer]
    # Where a name or a section is possible, mistakes within a section that was given say more.
    around = {p.path[:k] for _, p in errors for k in range(len(p.path))}
    errors = [(e, p) for e, p in errors if e["type"] != "literal_error" or p.path not in around]
    # What the user wrote comes first, then what is missing, then what a part computed from other mistakes.
    first, place = min(errors, key=lambda e: (not _given(settings, e[1]), e[0]["type"] != "missing"))
    depth = len(place.path)
    # The branches of a union, and what lies within, are one mistake.
    rest = {p.path for _, p in errors if p.path[:depth] != place.path[: len(p.path)]}
    more = f" (and {len(rest)} more mistake{'s' * (len(rest) > 1)})" if rest else ""
    dotted, owner, last = ".".join(place.path), ".".join(place.path[:-1]), place.path[-1] if depth else ""
    kind, given = first["type"], first.get("input")
    if kind in ("extra_forbidden", "invalid_key"):
        part = part_name(place.owner) if place.owner and owner and issubclass(place.owner, Section) else None
        within = f" in {owner}" + (f" ({part})" if part else "") if owner else ""
        return ConfigError(dotted, f"no such setting{within}{more}", _right_key(last, place))
    if kind == "union_tag_invalid":
        names = [t.strip(" '") for t in str(first["ctx"]["expected_tags"]).split(",")]
        tag = str(first["ctx"]["tag"])
        kind = last if not last.isdigit() else place.path[-2].rstrip("s")
        return ConfigError(dotted, f"no {kind} named {tag!r}{more}", nearest(tag, names))
    if kind in ("value_error", "assertion_error"):
        return ConfigError(dotted or "config", _sentence(first["msg"]) + more)
    what = "missing" if kind == "missing" else _shown(given)
    expected = (
        place.expected.replace("number", "finite number") if kind == "finite_number" else place.expected
    )
    return ConfigError(dotted or "config", what + more, f"expected {expected}" if expected else "")


def _right_key(key: str, place: _Place) -> str:
    """The remedy for an unknown key: the part that has it, or the nearest key of its own section."""
    having = [name for name, part in place.siblings.items() if name and key in part.model_fields]
    if having:
        return f"{', '.join(having)} {'has' if len(having) == 1 else 'have'} it"
    return nearest(key, place.owner.model_fields if place.owner else ())


def _given(settings: Any, place: _Place) -> bool:
    """Whether the user (or an algorithm's default) wrote something at this place."""
    for step in place.path:
        if isinstance(settings, Mapping) and step in settings:
            settings = settings[step]
        elif isinstance(settings, (list, tuple)) and step.isdigit() and int(step) < len(settings):
            settings = settings[int(step)]
        else:
            return False
    return True


def _shown(value: Any) -> str:
    """What was given, in a few words."""
    if isinstance(value, (Mapping, BaseModel)):
        return "got a section"
    try:
        text = "nothing" if value is None else repr(value if isinstance(value, _SIMPLE) else str(value))
    except ValueError:  # Python writes out no integer of more than 4,300 digits
        text = "an integer of thousands of digits"
    return f"got {text if len(text) <= 60 else text[:57] + '...'}"


_SIMPLE = (str, int, float, list, tuple)


def _sentence(message: str) -> str:
    """A validator's own words without Pydantic's."""
    message = " ".join(message.removeprefix("Value error, ").removeprefix("Assertion failed, ").split())
    return message[:1].lower() + message[1:] if message[:2].istitle() else message


def _locate(loc: Sequence[int | str]) -> _Place:
    """Where an error lies.

    Pydantic's own path repeats the name of a chosen part (``algorithm.pacfl.x``) and names the branch of
    a plain union (``execution.actors.int``); neither is part of what users write.
    """
    where: list[str] = []
    owner: type[BaseModel] | None = Config
    siblings: Mapping[str | None, type[BaseModel]] = {}  # what the owner was chosen from
    chosen: Mapping[str | None, type[BaseModel]] = {}
    inner: dict[str | None, type[BaseModel]] = {None: Config}  # sections that the next step may lie in
    annotation: Any = None  # what the value at this place has to be
    metadata: Sequence[Any] = ()
    branched = False
    for step in loc:
        if isinstance(step, int) and _item(annotation) is not None:
            where.append(str(step))
            annotation, metadata = _item(annotation), ()
        elif _mixed(annotation) and not branched:
            branched = True  # Pydantic's name of the branch
            continue
        elif None in inner:
            owner, siblings, chosen = inner[None], chosen, {}
            where.append(_one_line(str(step)))
            field = owner.model_fields.get(str(step))
            annotation, metadata = (field.annotation, field.metadata) if field else (None, ())
            inner = _sections(annotation)
        elif step in inner:
            chosen, inner = inner, {None: inner[str(step)]}
        branched = False
    return _Place(tuple(where), owner, siblings, _describe(annotation, metadata))


def _mixed(annotation: Any) -> bool:
    """Whether a setting may be a section or something else, apart from nothing."""
    kinds = [a for a in get_args(annotation) if a is not NoneType]
    sections = [a for a in kinds if isinstance(a, type) and issubclass(a, BaseModel)]
    return get_origin(annotation) in (Union, UnionType) and 0 < len(sections) < len(kinds)


_KINDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    Path: "a path",
    NoneType: "null",
}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def _describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """What a setting may be, for people: ``an integer >= 1 or 'auto'``."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        extra = [m for a in args[1:] for m in (a.metadata if isinstance(a, FieldInfo) else [a])]
        return _describe(args[0], [*metadata, *extra])
    if origin is Literal:
        return _either([repr(a) for a in args])
    if origin in (Union, UnionType):
        parts = [name for a in args if (name := isinstance(a, type) and _chosen_as(a))]
        if parts:
            return "one of " + ", ".join(parts)
        words = [w for a in args for w in (map(repr, get_args(a)) if get_origin(a) is Literal else [a])]
        return _either(
            [w if isinstance(w, str) else _describe(w, () if w is NoneType else metadata) for w in words]
        )
    if origin is tuple:
        least = ", at least one" if any(getattr(m, "min_length", 0) for m in metadata) else ""
        return f"a list with {_describe(args[0])} each{least}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a section with " + ", ".join(annotation.model_fields)
    bounds = [
        f"{sign} {getattr(m, key):g}"
        for m in metadata
        for key, sign in _BOUNDS.items()
        if hasattr(m, key) and getattr(m, key) < 2**53  # what fits into 64 bits need not be said
    ]
    bounds += [f"a multiple of {m.multiple_of}" for m in metadata if getattr(m, "multiple_of", None)]
    patterns = [f"that matches {m.pattern}" for m in metadata if getattr(m, "pattern", None)]
    return " ".join([_KINDS.get(annotation, ""), " and ".join(bounds), *patterns]).replace("  ", " ").strip()


def _either(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _item(annotation: Any) -> Any:
    """What the items of a list have to be; None if it is no list."""
    for a in (annotation, *_flat_args(annotation)):
        if get_origin(a) is tuple:
            return get_args(a)[0]
    return None


def _chosen_as(kind: type) -> str | None:
    return part_name(kind) if issubclass(kind, Section) else None


def _sections(annotation: Any) -> dict[str | None, type[BaseModel]]:
    """The sections that a field may hold: by part name if there is a choice, else under None."""
    found = [
        a for a in (annotation, *_flat_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)
    ]
    if len(found) == 1:
        return {None: found[0]}
    return {part_name(a): a for a in found if issubclass(a, Section)}


def _flat_args(annotation: Any) -> list[Any]:
    return [a for arg in get_args(annotation) for a in (arg, *_flat_args(arg))]


def json_schema() -> dict[str, Any]:
    """The JSON schema of a config file, for editors (``rayfl list --schema``)."""
    schema = Config.model_json_schema()
    schema["properties"]["paper"] = Paper.model_json_schema()
    return schema


def _algorithm(settings: Mapping[str, Any]) -> type[Algorithm] | None:
    """The algorithm that settings name, None if there is none of that name."""
    chosen = settings.get("algorithm") or "fedavg"
    name = chosen.get("name", "fedavg") if isinstance(chosen, Mapping) else chosen
    return ALGORITHMS.get(name) if isinstance(name, str) else None


def _of_use(settings: Mapping[str, Any], algorithm: type[Algorithm] | None) -> dict[str, Any]:
    """Settings without those of sections that the algorithm does not use."""
    kept = dict(settings)
    for section, keys in _FOR_SOME.items():
        values = settings.get(section)
        if isinstance(values, Mapping) and algorithm is not None and section not in algorithm.takes:
            kept[section] = {key: value for key, value in values.items() if key not in keys}
    return kept


def variant(
    source: str | Path | Mapping[str, Any] | Config, overrides: Sequence[str], algorithm: str
) -> Config:
    """The same settings with another algorithm (and that algorithm's defaults), for comparisons.

    What the source says of comparing signatures is left out if the other algorithm has signatures of another
    kind: degrees between subspaces mean nothing to it; and what its own defaults say otherwise: PCA+kM+HC has
    no encoder where FLT was given one. So is momentum where it makes no sense. What ``overrides`` say holds
    for every algorithm; but sections that it does not use are left out, whoever speaks of them: the number of
    clusters is for those that cluster.

    Raises:
        ConfigError: as :func:`load`.
    """
    settings = _for_another(_read(source), algorithm)
    settings = with_overrides(settings, [*overrides, f"algorithm={algorithm}"])
    return resolve(_of_use(settings, ALGORITHMS.get(algorithm)))


def on_the_same_data(configs: Sequence[Config]) -> list[Config]:
    """The configs of a comparison, with the same training samples held out for the server.

    Where ``data.server_share`` is ``auto`` all hold out as many as the one whose server needs most, so that
    their clients have the same samples.
    """
    most = max((config.public_samples for config in configs), default=0)
    return [
        load(config, [f"data.server_share={most}"]) if most and config.data.server_share == "auto" else config
        for config in configs
    ]


_OF_SIGNATURES = (
    "signature",
    "features",
    "embedding",
    "proximity",
    "grouping",
    "linkage",
    "threshold",
    "gamma",
)
"""Settings of ``clustering`` that belong to a kind of signature; a number of clusters does not."""


def _for_another(settings: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """What of a source's settings can be said of another algorithm too."""
    kept, before, part = dict(settings), _algorithm(settings), ALGORITHMS.get(algorithm)
    if part is None:
        return kept
    clustering, training = settings.get("clustering"), settings.get("training")
    first, second = (_clustering(each) for each in (before, part))
    if isinstance(clustering, Mapping) and first and second:
        alike = first["signature"]["name"] == second["signature"]["name"]
        meant = {key for key in _OF_SIGNATURES if alike and first.get(key) == second.get(key)}
        kept["clustering"] = {
            key: clustering[key] for key in clustering if key not in _OF_SIGNATURES or key in meant
        }
    if isinstance(training, Mapping) and not part.takes_momentum:
        kept["training"] = {key: training[key] for key in training if key != "momentum"}
    return kept


def _clustering(algorithm: type[Algorithm] | None) -> Mapping[str, Any]:
    """How an algorithm clusters by default; empty if it says nothing of signatures."""
    found: Mapping[str, Any] = algorithm.defaults.get("clustering", {}) if algorithm else {}
    return found if "signature" in found else {}

"""The typed configuration of a run: YAML and dotted overrides in, one frozen, validated object out.

Each room declares its own section beside its owner; this module puts them together and turns every
mistake into one line that says where, what, and what would be right.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError

from rayfl.algorithms import ALGORITHMS, Algorithm, Hierarchy
from rayfl.clustering.config import Clustering
from rayfl.data import DATASETS, PARTITIONS, Dataset, Partition
from rayfl.errors import ConfigError, nearest
from rayfl.models import MODELS, Model
from rayfl.settings import Section, choice, part_name
from rayfl.training import Training

PRESETS = Path(__file__).parent / "presets"

if TYPE_CHECKING:
    DatasetChoice = Dataset
    PartitionChoice = Partition
    ModelChoice = Model
    AlgorithmChoice = Algorithm
else:
    DatasetChoice, PartitionChoice = choice(DATASETS), choice(PARTITIONS)
    ModelChoice, AlgorithmChoice = choice(MODELS), choice(ALGORITHMS)


class Evaluation(Section):
    """When and how clients are tested: each on its own test data with the model that it would use."""

    every: int = Field(
        1, ge=1, description="evaluate after every this many rounds, and always after the last"
    )
    batch_size: int = Field(500, ge=1, description="samples in one forward pass")


class Execution(Section):
    """Where a run is executed. Nothing here changes its results (``block_size`` and the device aside)."""

    backend: Literal["ray", "inline"] = Field(
        "ray", description="ray: client actors; inline: the same code in this process, for debugging"
    )
    address: str | None = Field(
        None,
        description="address of a running Ray cluster ('auto' finds it); by default the environment decides",
    )
    actors: int | Literal["auto"] = Field(
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
    block_size: int | Literal["auto"] = Field(
        "auto",
        description="clients in a block, the unit of scheduling; auto: a sixteenth of the cohort, at most 64",
    )
    tolerate_failures: int = Field(
        0, ge=0, description="clients that may fail in a round and are then left out of its average"
    )

    def clients_per_block(self, cohort: int) -> int:
        """The block size: a matter of config alone, so that sums do not depend on the workers."""
        size = min(64, -(-cohort // 16)) if self.block_size == "auto" else self.block_size
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
    seed: int = Field(0, ge=0, description="of all randomness")
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
    evaluation: Evaluation = Field(default_factory=Evaluation, description="when clients are tested")
    execution: Execution = Field(default_factory=Execution, description="where it runs")
    output: Output = Field(default_factory=Output, description="what is written")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written to ``config.yaml``."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """YAML that :func:`load` reads back to an equal config."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)


def presets() -> dict[str, Path]:
    """The presets shipped with the package, by name."""
    return {path.stem: path for path in sorted(PRESETS.glob("*.yaml"))}


def describe_preset(path: Path) -> str:
    """The comment on the first line of a preset."""
    return path.read_text().split("\n", 1)[0].lstrip("# ")


def load(source: str | Path | Mapping[str, Any] | Config, overrides: Sequence[str] = ()) -> Config:
    """Read, complete and validate a configuration.

    Args:
        source: a preset's name, a YAML file, or a mapping (or a Config, to change it).
        overrides: dotted settings such as ``"training.lr=0.1"``; the value is read as YAML.

    Raises:
        ConfigError: one line: where, what, and what would be right.
    """
    return resolve(with_overrides(_read(source), overrides))


def _read(source: str | Path | Mapping[str, Any] | Config) -> dict[str, Any]:
    if isinstance(source, Config):
        return source.to_dict()
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    path = Path(source)
    if str(source) in presets():
        path = presets()[str(source)]
    elif not path.is_file():
        is_path = path.suffix in (".yaml", ".yml") or len(path.parts) > 1
        remedy = "name a preset or an existing file" if is_path else nearest(str(source), presets())
        raise ConfigError(str(source), "no such file" if is_path else "no such preset", remedy)
    try:
        settings = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(place, f"not YAML ({getattr(error, 'problem', None) or error})") from None
    if settings is None:
        settings = {}
    if not isinstance(settings, dict):
        raise ConfigError(
            str(path), f"holds a {type(settings).__name__}", "expected 'section: settings' lines"
        )
    return settings


def with_overrides(settings: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """``settings`` with dotted ``key=value`` overrides applied (a copy).

    Naming a part anew, as in ``algorithm=pacfl``, drops the settings of the part that it replaces.
    """
    result = copy.deepcopy(dict(settings))
    for text in overrides:
        path, equals, value = text.partition("=")
        if not equals or not path.strip():
            raise ConfigError(text, "not an override", "expected key=value, e.g. training.lr=0.1")
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(path, f"{value!r} is not a YAML value", "quote it if it is text") from None
        _assign(result, path.strip().split("."), _number(parsed))
    return result


def _number(value: Any) -> Any:
    """YAML 1.1 reads ``1e-3`` as text; people mean a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


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
    algorithm = settings.get("algorithm")
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm
    part = ALGORITHMS.get(name) if isinstance(name, str) else None
    for section, values in (part.defaults if part else {}).items():
        settings[section] = _merge(values, settings.get(section, {}))
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        raise _explain(error, settings) from None


def _merge(base: Mapping[str, Any], over: Any) -> Any:
    """``base`` updated by ``over``, recursively; a part of another name replaces the base's part."""
    if isinstance(over, str) and base.get("name") == over:
        return dict(base)
    if not isinstance(over, Mapping) or over.get("name", base.get("name")) != base.get("name"):
        return over
    merged = dict(base)
    for key, value in over.items():
        merged[key] = _merge(base[key], value) if isinstance(base.get(key), Mapping) else value
    return merged


def _explain(error: ValidationError, settings: Mapping[str, Any]) -> ConfigError:
    """The first mistake, in words that help."""
    errors = error.errors()
    first = errors[0]
    same = [e for e in errors if _locate(e["loc"])[0] == _locate(first["loc"])[0]]
    errors = [e for e in errors if e not in same[1:]]  # the branches of a union are one mistake
    where, section = _locate(first["loc"])
    dotted = ".".join(where)
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    kind, given = first["type"], first.get("input")
    if kind == "extra_forbidden":
        fields = list(section.model_fields) if section else []
        owner = ".".join(where[:-1])
        remedy = nearest(where[-1], fields)
        return ConfigError(dotted, "no such setting" + (f" in {owner}" if owner else "") + more, remedy)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tags = [t.strip(" '") for t in str(first["ctx"].get("expected_tags", "")).split(",") if t.strip()]
        if kind == "union_tag_not_found":
            return ConfigError(dotted + ".name", "missing" + more, nearest("", tags or _names(where)))
        return ConfigError(
            dotted, f"no {where[-1]} named {first['ctx']['tag']!r}" + more, nearest(first["ctx"]["tag"], tags)
        )
    message = " or ".join(_sentence(e["msg"]) for e in same)
    shown = "" if isinstance(given, (Mapping, BaseModel)) or kind == "missing" else f"got {given!r}"
    return ConfigError(dotted or "config", message + more, shown)


def _sentence(message: str) -> str:
    """Pydantic's words without what it thinks aloud."""
    message = message.removeprefix("Value error, ").split(", unable to")[0]
    return message[0].lower() + message[1:]


def _names(where: Sequence[str]) -> list[str]:
    kinds: dict[str, Mapping[str, Any]] = {
        "data": DATASETS,
        "partition": PARTITIONS,
        "model": MODELS,
        "algorithm": ALGORITHMS,
    }
    return list(kinds.get(where[-1], {}))


def _locate(loc: Sequence[int | str]) -> tuple[list[str], type[BaseModel] | None]:
    """The dotted path of an error, and the section that holds its last element.

    Pydantic's own path repeats the name of a chosen part (``algorithm.pacfl.x``) and names the branch of
    a plain union (``execution.actors.int``); neither is part of what users write.
    """
    where: list[str] = []
    owner: type[BaseModel] | None = Config
    inner: dict[str | None, type[BaseModel]] = {None: Config}  # sections that the next step may lie in
    for step in loc:
        if step in inner:
            inner = {None: inner[str(step)]}
        elif None in inner:
            owner = inner[None]
            where.append(str(step))
            field = owner.model_fields.get(str(step))
            inner = _sections(field.annotation) if field else {}
        elif isinstance(step, int):
            where.append(str(step))
    return where, owner


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
    return Config.model_json_schema()


def variant(
    source: str | Path | Mapping[str, Any] | Config, overrides: Sequence[str], algorithm: str
) -> Config:
    """The same settings with another algorithm (and that algorithm's defaults), for comparisons.

    Raises:
        ConfigError: as :func:`load`.
    """
    return resolve(with_overrides(_read(source), [*overrides, f"algorithm={algorithm}"]))

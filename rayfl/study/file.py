"""The study file: what is compared, over which settings and seeds, what is reported and claimed."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator

from rayfl.config.mistakes import explain
from rayfl.config.objects import not_in_itself
from rayfl.config.reading import names_first, parse_overrides, refuse_replaced, with_overrides
from rayfl.config.schema import EXCLUDED
from rayfl.config.text import NOT_YAML, as_value, parse, problem_of
from rayfl.errors import ArgumentError, ConfigError, nearest, type_of
from rayfl.settings import Section
from rayfl.study.claims import axis_of, point_of
from rayfl.study.claims import parse as parse_claim
from rayfl.units import counted

Value = str | int | float | bool | None
Settings = dict[str, Any]


class Tune(Section):
    """How settings are chosen for every method before the study's own runs; never on test data.

    It contains these options, and settings by their dotted paths. A list of values is a grid. A search draws
    from ``{uniform: [low, high]}``, ``{loguniform: [low, high]}``, ``{randint: [low, high]}`` or ``{choice:
    [...]}``.
    """

    space: dict[str, Any] = Field({}, description="settings and their values, by dotted path")
    on: Literal["validation"] = Field("validation", description="the data on which the best is chosen")
    metric: str = Field(
        "accuracy_mean",
        description="metric by which settings are chosen, on the clients' validation samples after "
        "the last round",
    )
    share: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="share of each client's samples held out to tune on, unless partition.validation is set",
    )
    seeds: tuple[int, ...] = Field(
        (100,), min_length=1, description="seeds of the runs that choose; a list or text"
    )
    per: Literal["method", "point"] = Field(
        "method", description="choose once for a method over the whole grid, or for each point of the grid"
    )
    samples: int = Field(1, ge=1, le=10_000, description="number of points that a search draws, at least 2")
    search: Literal["random", "optuna"] = Field("random", description="search algorithm")
    scheduler: Literal["none", "asha"] = Field("none", description="asha: ends unpromising runs early")
    settings: Settings = Field({}, description="settings only for the runs that choose, such as rounds")

    @model_validator(mode="before")
    @classmethod
    def _collect_space(cls, values: Any) -> Any:
        """Collect the settings, which have dots in their names, next to the options."""
        if not isinstance(values, Mapping) or "space" in values:
            return values
        values = {"on" if key is True else key: value for key, value in values.items()}  # YAML's own 'on'
        space = {key: value for key, value in values.items() if "." in str(key)}
        return {**{key: value for key, value in values.items() if key not in space}, "space": space}

    @field_validator("seeds", mode="before")
    @classmethod
    def _seeds(cls, value: Any) -> Any:
        return seeds_of(value)

    @model_validator(mode="after")
    def _check_space(self) -> Tune:
        if not self.space:
            raise ValueError("names no setting to choose; add one such as training.lr: [0.01, 0.1]")
        drawn = [setting for setting, values in self.space.items() if isinstance(values, Mapping)]
        for setting, values in self.space.items():
            if isinstance(values, Mapping):
                _check_distribution(setting, values)
            elif not isinstance(values, list) or not values:
                raise ValueError(
                    f"{setting}: expected a list of values, or a distribution such as {{uniform: [0, 1]}}"
                )
            elif len({shown(value) for value in values}) < len(values):
                raise ValueError(f"{setting}: a value is listed twice")
            if setting.split(".")[0] in _DATA_SECTIONS:
                raise ValueError(
                    f"{setting}: the data are the same for all methods and cannot be tuned; vary them in grid"
                )
        for path in paths_of(self.settings):
            if path == "seed":
                raise ValueError("settings.seed: set tune.seeds instead")
            if path in _chosen_paths(self):
                raise ValueError(f"settings.{path}: is chosen by tune; leave it out here")
            if path.split(".")[0] in _DATA_SECTIONS and path != "partition.validation":
                raise ValueError(f"settings.{path}: the data are those of the study; leave it out here")
        _check_once(self.settings, "settings")
        if self.samples != 1 and self.is_grid:
            raise ValueError("samples: has no effect, since all values are listed; leave it out")
        if drawn and self.per == "point":
            raise ValueError(
                f"{drawn[0]}: values from a range are chosen once per method; with per: point, list them"
            )
        if self.samples == 1 and not self.is_grid:
            raise ValueError("samples: a search draws that many points; set it to 2 or more, such as 20")
        return self

    @property
    def is_grid(self) -> bool:
        """Whether all values are listed and all combinations are tried."""
        listed = all(isinstance(values, list) for values in self.space.values())
        return listed and self.scheduler == "none" and self.search == "random"


_DATA_SECTIONS = ("data", "partition", "events")
"""Sections that determine the clients' data: the same for all methods."""

DISTRIBUTIONS = ("uniform", "loguniform", "randint", "choice")
"""What a search may draw from."""


def _check_distribution(setting: str, values: Mapping[str, Any]) -> None:
    if len(values) != 1 or next(iter(values)) not in DISTRIBUTIONS:
        raise ValueError(f"{setting}: expected one of {', '.join(DISTRIBUTIONS)} and its range")
    ((kind, parameters),) = values.items()
    if not isinstance(parameters, list) or not parameters:
        raise ValueError(f"{setting}.{kind}: expected a list")
    if kind == "choice":
        return
    if len(parameters) != 2 or not all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in parameters
    ):
        raise ValueError(f"{setting}.{kind}: expected [low, high]")
    if parameters[0] >= parameters[1] or (kind == "loguniform" and parameters[0] <= 0):
        raise ValueError(
            f"{setting}.{kind}: expected {'0 < ' * (kind == 'loguniform')}low < high, got {parameters}"
        )


class Report(Section):
    """What the table shows."""

    columns: tuple[str | dict[str, float], ...] = Field(
        ("accuracy_mean", "accuracy_worst10", "bytes_up"),
        min_length=1,
        description="numbers of a run's summary; rounds_to: 80, bytes_to: 80, local_rounds_to: 80: until "
        "that mean accuracy",
    )
    by: tuple[str, ...] = Field(
        (),
        description="axes of the grid that become columns of the table; the other axes become rows",
    )
    reference: str | None = Field(
        None, description="the method with which all others are compared; default: the first"
    )

    @field_validator("columns", mode="before")
    @classmethod
    def _read_targets(cls, columns: Any) -> Any:
        """Check columns with a target; ``"rounds_to: 80"`` in quotes is text to YAML, and means the same."""
        if not isinstance(columns, (list, tuple)):
            return columns
        matches = [
            re.fullmatch(r"(\w+):\s*(.+)", each) if isinstance(each, str) else None for each in columns
        ]
        return [
            _target_of({match[1]: match[2]} if match else each)
            if match or isinstance(each, Mapping)
            else each
            for match, each in zip(matches, columns, strict=True)
        ]

    @model_validator(mode="after")
    def _check_columns(self) -> Report:
        for name in self.names:
            if self.names.count(name) > 1:
                raise ValueError(f"columns: {name} is named twice")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The columns, each as one name: ``rounds_to_80``."""
        return tuple(name if isinstance(name, str) else _as_name(name) for name in self.columns)


def _as_name(column: Mapping[str, float]) -> str:
    """``rounds_to: 80`` as ``rounds_to_80``."""
    ((name, target),) = column.items()
    return f"{name}_{target:g}"


def _target_of(column: Mapping[Any, Any]) -> dict[str, float]:
    """A column such as ``rounds_to: 80``, with a known name and a possible accuracy."""
    with contextlib.suppress(TypeError, ValueError):  # several entries, or a target that is not a number
        ((name, target),) = column.items()
        known = re.fullmatch(r"(\w+_)?(rounds|bytes)_to", name)
        if known and not isinstance(target, bool) and 1 <= float(target) <= 100:
            return {name: float(target)}
    given = f"{{{', '.join(f'{key}: {value}' for key, value in column.items())}}}"
    given = given if len(given) <= 60 else f"{given[:57]}..."
    raise ValueError(
        f"got {given}; expected rounds_to or bytes_to and an accuracy in %, such as rounds_to: 80"
    )


class Expected(Section):
    """Published figures, shown with ours; with a tolerance each is also a claim."""

    source: str = Field(min_length=1, description="paper and table")
    protocol: str = Field("", description="which model was tested when, on what, if the source says so")
    column: str = Field("accuracy_mean", description="the column with the number to compare with")
    figures: dict[str, float | dict[str, float]] = Field(
        min_length=1, description="by method; or by method and point of the grid"
    )
    within: float | None = Field(None, gt=0, description="tolerance; with it the figure is also a claim")

    @field_validator("figures", mode="before")
    @classmethod
    def _name_points(cls, value: Any) -> Any:
        """Points of the grid are often numbers: ``FedAvg: {0.1: 77.3}``. Pydantic takes true for 1."""
        if not isinstance(value, Mapping):
            return value
        for label, each in value.items():
            figures = each.values() if isinstance(each, Mapping) else (each,)
            for figure in figures:
                if isinstance(figure, bool):
                    raise ValueError(f"the figure of {label} is {str(figure).lower()}; expected a number")
        return {
            label: {shown(point): figure for point, figure in each.items()}
            if isinstance(each, Mapping)
            else each
            for label, each in value.items()
        }

    @field_validator("column", mode="before")
    @classmethod
    def _read_target(cls, value: Any) -> Any:
        return _as_name(_target_of(value)) if isinstance(value, Mapping) else value

    @field_validator("within", mode="before")
    @classmethod
    def _tolerance(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError(f"got {str(value).lower()}; expected a number > 0")
        return value

    def claim(self, label: str, figure: float) -> str:
        """The claim that a method has its figure; there must be a tolerance."""
        name = label if label.replace("_", "").isalnum() else f'"{label}"'
        return f"{name}.{self.column} ~ {figure:.15g} +- {self.within:.15g}"


class Claim(Section):
    """A claim with its source; text alone stands for a claim without one."""

    claim: str = Field(min_length=1, description="such as A.accuracy_mean - B.accuracy_mean > 10")
    source: str = Field("", description="source of the claim: paper, table")
    protocol: str = Field("", description="what the source measured")
    at: dict[str, Value] = Field({}, description="the points of the grid at which it must hold; default: all")

    @model_validator(mode="before")
    @classmethod
    def _claim_from_text(cls, value: Any) -> Any:
        return {"claim": value} if isinstance(value, str) else value


def _claims_of(claims: Any) -> Any:
    """A list of claims; a claim alone stands for a list of one."""
    return [claims] if isinstance(claims, str | Mapping) else claims


class Size(Section):
    """Another size of the same study: entries replace those of the file, settings are added to its own."""

    settings: Settings = Field({}, description="settings of this size, over those of the study")
    methods: dict[str, Settings] = Field(
        {}, description="by label: settings of a method, over its own; with another algorithm in their place"
    )
    only: tuple[str, ...] = Field(
        (), description="labels of the methods of this size; default: those of the study"
    )
    grid: dict[str, Any] = Field({}, description="axes that replace those of the same names")
    seeds: tuple[int, ...] | None = Field(None, description="in place of the study's")
    tune: dict[str, Any] | Literal[False] | None = Field(
        None, description="settings to choose, in place of the study's; false: none"
    )
    report: Report | None = Field(None, description="in place of the study's")
    claims: tuple[Claim, ...] | None = Field(None, description="in place of the study's")
    expected: tuple[Expected, ...] | None = Field(None, description="in place of the study's")

    @field_validator("seeds", mode="before")
    @classmethod
    def _seeds(cls, value: Any) -> Any:
        return None if value is None else seeds_of(value)

    _one_claim = field_validator("claims", mode="before")(_claims_of)

    @field_validator("tune", mode="before")
    @classmethod
    def _tune(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {"on" if key is True else key: each for key, each in value.items()}  # YAML's own 'on'


_FILE_NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$"
"""Names of studies and sizes: their results have a folder of this name."""


class StudyFile(Section):
    """A study: methods x grid x seeds, and what is reported and claimed."""

    name: str = Field(description="name of the folder with its results")
    title: str = Field("", description="a line for the page and the table")
    base: str | dict[str, Any] = Field(
        "",
        description="from where all runs start: a preset, a config file, or settings; default: the default "
        "settings",
    )
    plugins: tuple[str, ...] = Field((), description="modules or files with your own parts")
    settings: Settings = Field({}, description="settings of all runs, over the base's")
    methods: dict[str, Settings] = Field(min_length=1, description="by label: the algorithm and its settings")
    only: tuple[str, ...] = Field(
        (), description="labels of the methods that are run, on the clients of all methods; default: all"
    )
    grid: dict[str, Any] = Field(
        {}, description="axes: a setting and its values; or a name and points, each a name and its settings"
    )
    tune: Tune | None = Field(None, description="settings that are chosen on validation data first")
    seeds: tuple[int, ...] = Field((0, 1, 2), min_length=1, description="seeds, such as 0-4 or [0, 3]")
    report: Report = Field(default_factory=Report, description="what the table shows")
    expected: tuple[Expected, ...] = Field((), description="published figures")
    claims: tuple[Claim, ...] = Field((), description="claims to check")
    sizes: dict[str, Size] = Field({}, description="other sizes by name, for --size")
    part: tuple[str, ...] = Field(
        (),
        description="in the copy of a study with its results: the size, methods, seeds and settings that "
        "were asked for; they are part of the name of the folder",
    )
    _other_methods: dict[str, Settings] = PrivateAttr(default_factory=dict)
    _claims_left_out: tuple[Claim, ...] = PrivateAttr(())
    _expected_of_all: tuple[Expected, ...] = PrivateAttr(())
    _reference_left_out: str | None = PrivateAttr(None)
    _size_name: str = PrivateAttr("")
    _of_size: dict[str, Settings] = PrivateAttr(default_factory=dict)
    _source: Path | None = PrivateAttr(None)

    @field_validator("base")
    @classmethod
    def _nest_base(cls, base: str | dict[str, Any]) -> str | dict[str, Any]:
        """Settings may be dotted, as everywhere in a study; refuse what no file could contain."""
        if isinstance(base, str):
            return base
        _check_once(base, "base")
        try:
            return with_overrides({}, overrides_of(base))
        except ConfigError as error:
            raise ConfigError(f"base: {error.where}", error.what, error.remedy) from None

    @field_validator("seeds", mode="before")
    @classmethod
    def _seeds(cls, value: Any) -> Any:
        return seeds_of(value)

    _one_claim = field_validator("claims", mode="before")(_claims_of)

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not re.fullmatch(_FILE_NAME, name) or len(name) > _LONGEST_NAME:
            raise ValueError(
                f"{name[:60]!r} cannot be the name of a folder; expected at most {_LONGEST_NAME} letters, "
                "digits, - _ and ., not starting with ."
            )
        return name

    @field_validator("methods", mode="before")
    @classmethod
    def _check_methods(cls, methods: Any) -> Any:
        if not isinstance(methods, Mapping):
            return methods
        if not methods:
            raise ValueError(
                "there are none; expected labels with settings, such as FedAvg: {algorithm: fedavg}"
            )
        for label, settings in methods.items():
            if isinstance(settings, str):
                raise ValueError(f"expected settings, such as {label}: {{algorithm: {settings}}}")
        return methods

    @model_validator(mode="after")
    def _check_whole(self) -> StudyFile:
        """Refuse labels that cannot be told apart, and unknown names."""
        for label, method in self.methods.items():
            _check_label(label)
            _check_method(method, f"methods.{label}")
        for name, size in self.sizes.items():
            _check_shared(size.settings, f"sizes.{name}.settings")
            for label, method in size.methods.items():
                _check_method(method, f"sizes.{name}.methods.{label}")
        for axis, points in self.grid.items():
            _check_axis(axis, points)
        _check_shared(self.settings, "settings")
        _check_axes_set_once(self)
        for name in self.sizes:
            if not re.fullmatch(_FILE_NAME, name):
                raise ValueError(
                    f"sizes: {name!r} cannot be the name of a size; expected letters, digits, - _ and ."
                )
        chosen: dict[str, Iterable[str]] = {"only": self.only}
        for name, size in self.sizes.items():
            chosen |= {f"sizes.{name}.only": size.only, f"sizes.{name}.methods": size.methods}
        for where, labels in chosen.items():
            for label in labels:
                if label not in self.methods:
                    raise ValueError(f"{where}: no method {label!r}; {nearest(label, self.methods)}")
        for axis in self.report.by:
            if self.report.by.count(axis) > 1:
                raise ValueError(f"report.by: {axis} is named twice")
            if axis not in self.grid:
                raise ValueError(f"report.by: the grid has no {axis!r}; {nearest(axis, self.grid)}")
        if self.report.reference is not None and self.report.reference not in self.methods:
            raise ValueError(
                f"report.reference: no method {self.report.reference!r}; "
                f"{nearest(self.report.reference, self.methods)}"
            )
        given: dict[tuple[str, str, str, str], set[str]] = {}
        for published in self.expected:
            for label, figures in published.figures.items():
                at = set(figures) if isinstance(figures, dict) else {""}
                place = (published.source, published.protocol, published.column, label)
                others = given.setdefault(place, set())
                if at & others or (others and "" in at | others):
                    raise ValueError(
                        f"expected: {published.source!r} gives two figures of {label}; leave one out"
                    )
                others |= at
                if label not in self.methods:
                    raise ValueError(f"expected: no method {label!r}; {nearest(label, self.methods)}")
        if self.tune is not None:
            elsewhere = {*paths_of(self.settings), *itertools.chain(*map(_paths_of_axis, self.axes.values()))}
            for setting in _chosen_paths(self.tune):
                if setting in elsewhere:
                    raise ValueError(f"tune: {setting} is also in settings or grid; leave it out there")
            _check_tuning_seeds(self.tune, self.seeds)
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the table: those of ``report``, then those with published figures."""
        return tuple(dict.fromkeys([*self.report.names, *(each.column for each in self.expected)]))

    def has_point(self, name: str) -> bool:
        """Whether a name is that of a point of one axis, or of points of all axes, separated by commas."""
        axes = self.axes.values()
        return any(name in points for points in axes) or any(
            name == ", ".join(point) for point in itertools.product(*axes)
        )

    @property
    def extent(self) -> str:
        """What is combined: ``4 methods x 3 points of the grid x 5 seeds (0-4)``."""
        n_points = math.prod(map(len, self.axes.values()))
        points = [f"{counted(n_points, 'point')} of the grid"] if self.grid else []
        seeds = f"{counted(len(self.seeds), 'seed')} ({ranges(self.seeds)})"
        return " x ".join([counted(len(self.methods), "method"), *points, seeds])

    @property
    def source(self) -> Path | None:
        """The file that it was read from; None if it was given as values."""
        return self._source

    def place_of_setting(self, section: str, path: str) -> str:
        """Where the file sets a setting of ``settings`` or ``methods.LABEL``: there, or in the size's own."""
        of_size = paths_of(self._of_size.get(section, {}))
        inside = any(f"{path}.".startswith(f"{each}.") for each in of_size)
        return f"sizes.{self._size_name}.{section}" if inside else section

    @property
    def all_methods(self) -> dict[str, Settings]:
        """All methods, also those that are not run now: the clients' data depend on all of them."""
        return {**self.methods, **self._other_methods}

    @property
    def claims_left_out(self) -> list[str]:
        """The claims that are not checked, since they name methods that are not run now."""
        figures = [
            expected.claim(label, figure)
            for expected in self._expected_of_all
            if expected.within is not None
            for label, at in expected.figures.items()
            if label in self._other_methods
            for figure in (self._at_points(at).values() if isinstance(at, dict) else [at])
        ]
        return [*(each.claim for each in self._claims_left_out), *figures]

    def content(self) -> dict[str, Any]:
        """What :func:`take` reads as this study, also where only some of its methods are run."""
        only = tuple(self.methods) if self._other_methods else ()
        # A size may have fewer points than the published figures.
        expected = tuple(
            each.model_copy(
                update={
                    "figures": {
                        label: self._at_points(at) if isinstance(at, dict) else at
                        for label, at in each.figures.items()
                    }
                }
            )
            for each in self._expected_of_all or self.expected
        )
        reference = self.report.reference or self._reference_left_out
        update = {
            "methods": self.all_methods,
            "only": only,
            "expected": expected,
            "claims": (*self.claims, *self._claims_left_out),
            "report": self.report.model_copy(update={"reference": reference}),
        }
        whole = self.model_copy(update=update)
        return whole.model_dump(mode="json")

    def _at_points(self, figures: Mapping[str, float]) -> dict[str, float]:
        """The published figures of the points of the grid."""
        return {name: figure for name, figure in figures.items() if self.has_point(name)}

    def values_of(self, point: Mapping[str, str]) -> dict[str, str | float]:
        """A point of the grid for tables: numbers as numbers, everything else as text."""
        values: dict[str, str | float] = dict(point)
        for axis, name in point.items():
            listed = self.grid[axis] if isinstance(self.grid[axis], list) else ()
            for value in listed:
                if isinstance(value, int | float) and not isinstance(value, bool) and shown(value) == name:
                    values[axis] = value
        return values

    @property
    def axes(self) -> dict[str, dict[str, Settings]]:
        """The grid: for each axis its points by name, with the settings of each."""
        return {axis: points_of(axis, points) for axis, points in self.grid.items()}


def _check_method(method: Mapping[str, Any], where: str) -> None:
    """Refuse a method that names no algorithm or two, or sets what all methods share."""
    names = _algorithm_names(method)
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{where}.algorithm: expected the name of an algorithm")
    if len(names) == 2 and names[0] != names[1]:
        raise ValueError(f"{where}: names two algorithms, {names[0]} and {names[1]}")
    _check_once(method, where)
    for path in paths_of(method):
        if path == "seed":
            raise ValueError(f"{where}.seed: all methods have the study's seeds")
        if path.split(".")[0] in _DATA_SECTIONS:
            raise ValueError(f"{where}.{path}: the data are the same for all methods; vary them in grid")


def _changed_method(method: Mapping[str, Any], change: Mapping[str, Any]) -> Settings:
    """A method with the settings of a size over its own; with another algorithm it has those alone."""
    names = _algorithm_names(change)
    return dict(change) if names and names != _algorithm_names(method)[:1] else _layered(method, change)


def _check_once(settings: Mapping[str, Any], where: str) -> None:
    """Refuse a setting that is given both dotted and nested: the order of keys should mean nothing."""
    seen: set[str] = set()
    for path in _written_paths(settings):
        if path in seen:
            raise ValueError(f"{where}.{path}: is given twice, dotted and nested; leave one out")
        seen.add(path)


def _written_paths(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted path of each value, as often as it is written."""
    for key, value in settings.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _written_paths(value, f"{path}.")
        else:
            yield path


def _algorithm_names(method: Mapping[str, Any]) -> list[Any]:
    """What a method gives as the name of its algorithm: nothing, one name, or the same in two ways."""
    names = []
    if "algorithm" in method:
        algorithm = method["algorithm"]
        if not isinstance(algorithm, Mapping):
            names.append(algorithm)
        elif "name" in algorithm:
            names.append(algorithm["name"])
    if "algorithm.name" in method:
        names.append(method["algorithm.name"])
    return names


def _check_label(label: str) -> None:
    spaced = " ".join(label.split()) == label
    if not label or not spaced or not label.isprintable() or '"' in label or "[" in label:
        raise ValueError(
            f"methods: {label[:60]!r} cannot be a label; expected text without quotes, brackets, spaces at "
            "either end or several spaces in a row"
        )
    if len(label) > _LONGEST_LABEL:
        raise ValueError(
            f"methods: {label[:60]!r}... is too long for a label; at most {_LONGEST_LABEL} characters"
        )


_LONGEST_LABEL = 100
"""Characters of a label, or of a point of the grid."""

_LONGEST_NAME = 80
"""Characters of the name of a study."""

_RESERVED_COLUMNS = (
    *("method", "seed", "state", "key", "path", "rayfl", "error"),
    *("column", "mean", "low", "high", "seeds"),
)
"""Columns of the tables. An axis becomes a column, too, so it cannot have one of these names."""


def _check_shared(settings: Mapping[str, Any], where: str) -> None:
    """Refuse settings for all methods that the study sets itself: the seed and the algorithm."""
    _check_once(settings, where)
    paths = paths_of(settings)
    if "seed" in paths:
        raise ValueError(f"{where}.seed: set the study's seeds instead, such as seeds: 0-4")
    if "algorithm" in paths:
        raise ValueError(f"{where}.algorithm: set the algorithm of each method in methods")


def _check_tuning_seeds(tune: Tune, seeds: Sequence[int]) -> None:
    """Refuse to tune on a seed of the study itself."""
    for seed in tune.seeds:
        if seed in seeds:
            raise ValueError(f"tune.seeds: {seed} is one of the study's seeds; tune on other seeds")


def _check_axes_set_once(study: StudyFile) -> None:
    """Refuse an axis whose setting another axis sets, or a listed axis whose setting a method sets: its
    points would be misnamed."""
    paths_by_axis = {axis: _paths_of_axis(points) for axis, points in study.axes.items()}
    for axis, paths in paths_by_axis.items():
        for path in paths:
            if path.startswith("algorithm."):
                remedy = "add a method for each value, in methods"
                where = f"grid.{axis}" + f": {path}" * (path != axis)
                raise ValueError(f"{where}: a setting of an algorithm cannot be an axis; {remedy}")
            for other, others in paths_by_axis.items():
                if other != axis and path in others:
                    what = "is an axis of the grid" if path == axis else f"is also set by the axis {axis}"
                    raise ValueError(f"grid.{other}: {path} {what}; leave it out here")
    for label, settings in study.methods.items():
        for path in paths_of(settings):
            if path in {axis.removesuffix(".name") for axis in study.grid}:
                raise ValueError(f"methods.{label}: {path} is an axis of the grid; leave it out here")


def _chosen_paths(tune: Tune) -> set[str]:
    return {setting.removesuffix(".name") for setting in tune.space}


def _paths_of_axis(points: Mapping[str, Settings]) -> set[str]:
    """The paths of all settings that points of an axis set."""
    return {path for settings in points.values() for path in paths_of(settings)}


def _check_axis(axis: str, points: Any) -> None:
    if not isinstance(points, list | dict) or not points:
        raise ValueError(f"grid.{axis}: expected a list of values, or names with settings")
    if isinstance(points, list):
        if "." not in axis and axis not in ("rounds",):
            raise ValueError(
                f"grid.{axis}: is not a setting such as partition.alpha; give names with settings"
            )
        if not all(isinstance(point, Value) for point in points):
            raise ValueError(f"grid.{axis}: expected text, numbers, true or false")
        if len({shown(point) for point in points}) < len(points):
            raise ValueError(f"grid.{axis}: a value is listed twice")
    else:
        for name, settings in points.items():
            if not isinstance(settings, Mapping):
                raise ValueError(f"grid.{axis}.{name}: expected settings")
            _check_shared(settings, f"grid.{axis}.{name}")
    if axis in _RESERVED_COLUMNS:
        raise ValueError(f"grid.{axis}: cannot be the name of an axis; tables have a column of this name")
    for name in points_of(axis, points):
        if not name.strip() or not name.isprintable() or len(name) > _LONGEST_LABEL:
            raise ValueError(f"grid.{axis}: {name[:60]!r} cannot name a point")


def points_of(axis: str, points: Any) -> dict[str, Settings]:
    """The points of an axis by name, with the settings of each."""
    if isinstance(points, Mapping):
        return {shown(name): dict(settings) for name, settings in points.items()}
    return {shown(value): {axis: value} for value in points}


def shown(value: Any) -> str:
    """A value as users write it: ``0.1``, ``true``, ``pacfl``."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return short if not isinstance(value, float) or float(short) == value else repr(value)


def overrides_of(settings: Mapping[str, Any]) -> Iterator[str]:
    """Settings, dotted or nested, as overrides: ``training.lr=0.1``; the name of a part comes first.

    Raises:
        ConfigError: if a config cannot contain a value, such as a date.
    """
    for path, value in _by_path(settings).items():
        try:
            yield f"{path}={as_value(value)}"
        except TypeError:
            what = f"got {' '.join(str(value).split())[:60]} ({type(value).__name__})"
            raise ConfigError(path, what, "expected text, numbers, lists or sections") from None


def paths_of(settings: Mapping[str, Any]) -> list[str]:
    """The dotted paths of settings; that of a part is the same with ``.name`` and without."""
    return [text.partition("=")[0].removesuffix(".name") for text in overrides_of(settings)]


MOST_SEEDS = 10_000
"""The largest number of seeds of a range."""


def seeds_of(value: Any) -> tuple[int, ...]:
    """Parse seeds: ``0-4``, ``"0,3,7-9"``, ``3``, ``[0, 1]``.

    Raises:
        ValueError
    """
    if isinstance(value, bool):
        raise ValueError(f"{value} is not a seed; expected numbers and ranges such as 0-4")
    parts = [value] if isinstance(value, int) else value
    parts = parts.split(",") if isinstance(parts, str) else parts
    if not isinstance(parts, Sequence):
        raise ValueError("expected numbers and ranges such as 0-4")
    seeds: list[int] = []
    for part in parts:
        if isinstance(part, int) and not isinstance(part, bool):
            seeds.append(part)
            continue
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part) if isinstance(part, str) else None
        if match is None:
            raise ValueError(f"{part!r} is not a seed; expected numbers and ranges such as 0-4")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{part.strip()!r} is not a range of seeds; did you mean {last}-{first}?")
        if last - first >= MOST_SEEDS:
            raise ValueError(
                f"{part.strip()!r} is {1 + last - first:,} seeds; at most {MOST_SEEDS:,} are allowed"
            )
        seeds += range(first, last + 1)
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0 or max(seeds) >= 2**63:
        raise ValueError("expected one or more different seeds from 0 to 2^63 - 1")
    return tuple(seeds)


def ranges(seeds: Sequence[int]) -> str:
    """Seeds as :func:`seeds_of` reads them: ``0-4, 7``."""
    ranges: list[list[int]] = []
    for seed in sorted(seeds):
        if ranges and seed == ranges[-1][-1] + 1:
            ranges[-1].append(seed)
        else:
            ranges.append([seed])
    return ", ".join(f"{each[0]}-{each[-1]}" if len(each) > 1 else str(each[0]) for each in ranges)


def read(
    path: Path | str,
    size: str = "",
    settings: Sequence[str] = (),
    only: Sequence[str] = (),
    seeds: str | int | Sequence[int] | None = None,
) -> StudyFile:
    """Read a study file.

    Args:
        path: the file.
        size: a size that the file defines; empty: the study as it stands.
        settings: overrides of all runs such as ``rounds=5``, also where a method has its own value.
        only: labels of methods; empty: all.
        seeds: in place of the file's: ``"0-4"``, ``3``, ``[0, 1]``; None: the file's.

    Raises:
        ConfigError: one line: where, what, what would be right.
    """
    file = path_of("source", path, "a study file")
    study = take(_parsed(file), file.parent, size, settings, only, seeds)
    study._source = file
    return study


def take(
    given: Any,
    folder: Path,
    size: str = "",
    settings: Sequence[str] = (),
    only: Sequence[str] = (),
    seeds: str | int | Sequence[int] | None = None,
) -> StudyFile:
    """As :func:`read`, for the content of a file; its paths are relative to ``folder``."""
    if not isinstance(size, str):
        raise ArgumentError("size", f"got {type_of(size)}", "expected a size of the study, as text")
    settings, only = _texts("settings", settings, '["rounds=5"]'), _texts("only", only, '["FedAvg"]')
    study = _validated(given)
    _check_figures(study)
    listed = () if size or study.part else study.only
    sized = {name: _with_size(study, given, name) for name in study.sizes}  # all: mistakes are told early
    if size:
        if size not in sized:
            raise ArgumentError("size", f"the study has no size {size!r}", nearest(size, study.sizes))
        study = sized[size]
    if labels := only or study.only:
        study = _with_methods(study, labels)
    study = _with_overrides(study, settings)
    try:
        seed_update = {} if seeds is None else {"seeds": seeds_of(seeds)}
        if study.tune is not None:
            _check_tuning_seeds(study.tune, seed_update.get("seeds", ()))
    except ValueError as error:
        raise ArgumentError("seeds", str(error)) from None
    base = _located_base(study.base, folder)
    plugins = tuple(_located(each, folder) for each in study.plugins)
    named_seeds = "" if seeds is None else f"seeds{seeds}"
    # Where the runs are kept makes no other study
    naming = [text for text in settings if text.split("=")[0].split(".")[0].strip() != "output"]
    part = (*study.part, *filter(None, [size, *(only or listed), named_seeds, *naming]))
    update = {**seed_update, "base": base, "plugins": plugins, "part": part}
    return study.model_copy(update=update)


def _texts(argument: str, given: object, example: str) -> list[str]:
    """A list of texts; a text alone stands for a list of one.

    Raises:
        ArgumentError
    """
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not all(isinstance(each, str) for each in texts):
        raise ArgumentError(argument, f"got {type_of(given)}", f"expected a list of texts, such as {example}")
    return [*texts]


def _with_overrides(study: StudyFile, overrides: Sequence[str]) -> StudyFile:
    """The study with settings of all runs in place of those of the file and of its methods.

    Raises:
        ConfigError: if an override cannot be read, or cannot have an effect.
    """
    settings, methods, others = study.settings, study.methods, study._other_methods
    overrides = names_first(overrides)
    refuse_replaced(overrides)
    for path, value in parse_overrides(overrides):
        # As for a single run, a section in braces replaces the section.
        if isinstance(value, Mapping):
            change = {path: {}, **_by_path({path: {**_DEFAULTS.get(path, {}), **value}})}
        else:
            change = {path: value}
        try:
            _check_shared(change, "settings")
        except ValueError as error:
            raise ConfigError("override", str(error)) from None
        for given in paths_of(change):
            for axis, points in study.axes.items():
                if given in _paths_of_axis(points):
                    what = (
                        "is an axis of the grid"
                        if given == axis.removesuffix(".name")
                        else f"is set by the axis {axis}"
                    )
                    raise ConfigError(given, what, "change it in the study file")
            if study.tune is not None and given in _chosen_paths(study.tune):
                raise ConfigError(given, "is chosen by tune", "change it in the study file")
        settings = _layered(settings, change)
        replaced = [
            path.removesuffix(".name"),
            *(EXCLUDED[each] for each in change if each in EXCLUDED and change[each]),
        ]
        methods, others = (
            {label: _without(own, replaced) for label, own in each.items()} for each in (methods, others)
        )
    changed = study.model_copy(update={"settings": settings, "methods": methods})
    changed._other_methods = others
    return changed


_DEFAULTS = {"output": {"report": False}}
"""Defaults of the runs of a study, by section."""


def path_of(argument: str, path: Path | str, what: str) -> Path:
    """An argument that names a file or folder; ``~`` is the home folder.

    Raises:
        ArgumentError: if it is no path, or empty.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        given = "an empty text" if isinstance(path, str) else type_of(path)
        raise ArgumentError(argument, f"got {given}", f"expected the path of {what}")
    return Path(os.path.expanduser(path))


def _parsed(file: Path) -> Any:
    try:
        return parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(file), f"cannot be read: {error.strerror}", "name a study file") from None
    except NOT_YAML as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else str(file)
        raise ConfigError(place, f"not YAML: {problem_of(error)}") from None


def _validated(content: Any) -> StudyFile:
    if not isinstance(content, Mapping):
        raise ConfigError("study", "is empty" if content is None else f"is {type_of(content)}", _REMEDY)
    with not_in_itself("study"):
        _refuse_keys(content)
    if isinstance(content.get("name"), bool):
        raise ConfigError("name", f"got {str(content['name']).lower()}", f"expected text; {_YAML_WORDS}")
    try:
        return StudyFile.model_validate(content)
    except ValidationError as error:
        mistake = explain(error, content, StudyFile)
        where, what = mistake.where, mistake.what
        if where == "config":  # of the whole study: the text begins with the place
            where, _, what = what.partition(": ")
        raise ConfigError(where, what, mistake.remedy) from None


_YAML_WORDS = "YAML reads on, yes, off and no as true and false: put them in quotes"


def _refuse_keys(content: Any, *path: str) -> None:
    """Refuse names of entries, settings, axes and sizes that are no text. Points of the grid may be numbers,
    and ``on`` of ``tune`` is true in YAML.

    Args:
        content: of the study file, or of an entry.
        path: of the entry.

    Raises:
        ConfigError
    """
    if isinstance(content, list | tuple):
        for each in content:
            _refuse_keys(each, *path)
    if not isinstance(content, Mapping):
        return
    of_points = path[-1:] in (("at",), ("figures",)) or path[-2:-1] in (("grid",), ("figures",))
    for key, value in content.items():
        if not isinstance(key, str) and not of_points and not (key is True and path[-1:] == ("tune",)):
            remedy = _YAML_WORDS if isinstance(key, bool) else "put it in quotes"
            written = "null" if key is None else str(key).lower()
            raise ConfigError(".".join(path) or "study", f"the key {written} is not text", remedy)
        _refuse_keys(value, *path, str(key))


def _check_figures(study: StudyFile, whole: StudyFile | None = None) -> None:
    """Refuse figures for points that neither the grid nor that of the whole study has.

    Args:
        study: with the figures.
        whole: the study of which it is a size, which may have fewer points.
    """
    for published in study.expected:
        for label, figures in published.figures.items():
            for name in figures if isinstance(figures, dict) else ():
                if not study.has_point(name) and not (whole and whole.has_point(name)):
                    remedy = "name a point of one axis, or of every axis, separated by commas"
                    raise ConfigError(f"expected: {label}", f"the grid has no point {name!r}", remedy)
                grids = [each.axes.items() for each in (whole, study) if each]
                axes = dict.fromkeys(axis for grid in grids for axis, at in grid if name in at)
                if len(axes) > 1:
                    remedy = "name a point of every axis, separated by commas"
                    raise ConfigError(
                        f"expected: {label}", f"{name!r} is a point of {' and '.join(axes)}", remedy
                    )


_REMEDY = "expected name, base, methods and so on; 'rayfl init study' writes one"


def _with_size(study: StudyFile, file_content: Mapping[str, Any], size: str) -> StudyFile:
    chosen = study.sizes[size]
    content = {key: value for key, value in file_content.items() if key != "sizes"}
    if chosen.only:
        content["only"] = chosen.only
    content["settings"] = _layered(study.settings, chosen.settings)
    changed = {label: _changed_method(study.methods[label], own) for label, own in chosen.methods.items()}
    content["methods"] = {**study.methods, **changed}
    content["grid"] = {**study.grid, **chosen.grid}
    for name in ("seeds", "report", "claims", "expected"):
        value = getattr(chosen, name)
        if value is not None:
            content[name] = file_content["sizes"][size][name]
    if chosen.tune is not None:
        content["tune"] = chosen.tune or None
    try:
        sized = _validated(content)
    except ConfigError as error:  # the study without the size is valid
        raise ConfigError(f"sizes.{size}: {error.where}", error.what, error.remedy) from None
    _check_claims(sized, size)
    own = {f"methods.{label}": method for label, method in chosen.methods.items()}
    sized._size_name, sized._of_size = size, {"settings": chosen.settings, **own}
    for axis, points in sized.axes.items():
        for path in paths_of(chosen.settings):
            if all(path in paths_of(at) for at in points.values()):
                where, remedy = f"sizes.{size}.settings.{path}", f"change it in sizes.{size}.grid"
                raise ConfigError(where, f"has no effect, since it is set by the axis {axis}", remedy)
    if chosen.expected:
        _check_figures(sized, study)
    return sized


def _check_claims(sized: StudyFile, size: str) -> None:
    """Refuse claims that cannot be read at a size, which may have another grid."""
    axes = {axis: list(at) for axis, at in sized.axes.items()}
    for claim in sized.claims:
        where = f"claims: {claim.claim!r}: at"
        try:
            parse_claim(claim.claim, sized.methods, axes)
            for axis, point in claim.at.items():
                known = axis_of(axis, axes, partial(ConfigError, where))
                point_of(known, shown(point), axes, partial(ConfigError, where))
        except ConfigError as error:
            raise ConfigError(f"sizes.{size}: {error.where}", error.what, error.remedy) from None


def _layered(settings: Mapping[str, Any], added: Mapping[str, Any]) -> Settings:
    """Settings, and others that replace them, by their dotted paths in the order in which they apply."""
    kept, new = _by_path(settings), _by_path(added)
    for path, value in new.items():
        part = path.removesuffix(".name")
        inner = [each for each in kept if each.startswith(f"{part}.")]
        if isinstance(value, str) and (part != path or inner):  # it names a part
            former = kept.get(part, kept.get(f"{part}.name"))
            same = former in (None, value) or (former == {} and part != path)
            replaced = [part, f"{part}.name"] if same else [part, *inner]
        else:
            replaced = [path, *inner]
        if value is not None:
            replaced.append(EXCLUDED.get(path, ""))
        for each in replaced:
            kept.pop(each, None)
    return {**kept, **new}


def _by_path(settings: Mapping[str, Any], prefix: str = "") -> Settings:
    """Settings, dotted or nested, by their paths; the name of a part comes first."""
    by_path: Settings = {}
    for key in sorted(settings, key=lambda key: key != "name"):
        value, path = settings[key], f"{prefix}{key}"
        by_path |= _by_path(value, f"{path}.") if isinstance(value, Mapping) and value else {path: value}
    return by_path


def _without(settings: Mapping[str, Any], paths: Iterable[str], prefix: str = "") -> Settings:
    """Settings without those at or below some paths."""
    remaining: Settings = {}
    for key, value in settings.items():
        path = f"{prefix}{key}"
        part = path.removesuffix(".name")
        if any(part == each or path.startswith(f"{each}.") for each in paths):
            continue
        inner = _without(value, paths, f"{path}.") if isinstance(value, Mapping) else value
        if inner or not value:  # an empty section would replace the section
            remaining[key] = inner
    return remaining


def _with_methods(study: StudyFile, only: Sequence[str]) -> StudyFile:
    """The study with some of its methods; claims and figures of the others are dropped.

    Raises:
        ArgumentError
    """
    for label in only:
        if label not in study.methods:
            raise ArgumentError("only", f"no method {label!r}", nearest(label, study.methods))
    methods = {label: method for label, method in study.methods.items() if label in only}
    expected = []
    for published in study.expected:
        figures = {label: value for label, value in published.figures.items() if label in methods}
        if figures:
            expected.append(published.model_copy(update={"figures": figures}))
    axes = {axis: list(at) for axis, at in study.axes.items()}
    claims = tuple(c for c in study.claims if parse_claim(c.claim, study.methods, axes).methods <= {*methods})
    reference = study.report.reference if study.report.reference in methods else None
    report = study.report.model_copy(update={"reference": reference})
    chosen = study.model_copy(
        update={"methods": methods, "expected": tuple(expected), "claims": claims, "report": report}
    )
    chosen._other_methods = {label: own for label, own in study.all_methods.items() if label not in methods}
    chosen._claims_left_out = tuple(claim for claim in study.claims if claim not in claims)
    chosen._expected_of_all = study.expected
    chosen._reference_left_out = study.report.reference
    return chosen


def _located(name: str, folder: Path) -> str:
    """The path of a file next to the study file; if there is none, the name of a preset, module or file."""
    neighbour = folder / os.path.expanduser(name)
    return str(neighbour.absolute()) if name and neighbour.is_file() else name


def _located_base(base: str | dict[str, Any], folder: Path) -> str | dict[str, Any]:
    """The base; it, or the plug-ins in its settings, may be files next to the study file."""
    if isinstance(base, str):
        return _located(base, folder)
    named = base.get("plugins")
    if not isinstance(named, list):
        return base
    return {**base, "plugins": [_located(each, folder) if isinstance(each, str) else each for each in named]}

"""The runs of a study: a resolved config for every method, point of the grid and seed, with its hash."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rayfl import plugins
from rayfl.algorithms import ALGORITHMS
from rayfl.config import BLOCK_SETTINGS, Config, load, on_the_same_data, variant, with_overrides
from rayfl.config.reading import bring_plugins, continued, parse_overrides, read
from rayfl.config.transfer import algorithm_of
from rayfl.errors import ConfigError, nearest
from rayfl.inputs import Seen, content_of, inputs_of, parts_in, portable_settings, seen
from rayfl.models.module import OwnModule
from rayfl.study.file import Settings, StudyFile, overrides_of, paths_of, shown

_UNHASHED_SECTIONS = ("name", "plugins", "output")
"""Sections that change no number of a run."""

_HASHED_EXECUTION = (*BLOCK_SETTINGS, "device")
"""Settings of ``execution`` that may change results: the order of sums, and the arithmetic of a GPU."""

_UNHASHED_SETTINGS = {"hierarchy": "lps_actors", "data": "cache_gb"}
"""Settings of other sections that change no number; their defaults are hashed."""


MOST_RUNS = 10_000
"""The largest number of runs of a study, and of points of its grid."""


@dataclass(frozen=True)
class PlannedRun:
    """A run of a study.

    Attributes:
        method: its label.
        point: the point of each axis of the grid, by name.
        seed: of the run.
        config: resolved.
        chosen: settings that were chosen on validation data.
    """

    method: str
    point: Mapping[str, str]
    seed: int
    config: Config
    chosen: Mapping[str, Any]

    @cached_property
    def key(self) -> str:
        """The hash of everything that determines the run's numbers: 16 hexadecimal digits."""
        _ = self.inputs  # recorded before the files are hashed, so that later changes are noticed
        return key_of(self.config)

    @cached_property
    def inputs(self) -> dict[Path, Seen]:
        """The files and folders that it reads, as they are."""
        return {path: seen(path) for path in inputs_of(self.config)}

    @property
    def title(self) -> str:
        """``PACFL, alpha 0.1, seed 0``."""
        drawn = {name: f"{v:g}" if isinstance(v, float) else shown(v) for name, v in self.chosen.items()}
        settings = {**self.point, **drawn}
        texts = [spoken(name, value) for name, value in settings.items()]
        return ", ".join([self.method, *texts, f"seed {self.seed}"])


def spoken(axis: str, name: str) -> str:
    """A point of an axis as text: ``alpha 0.1``; for an axis with named points, the name."""
    return f"{axis.split('.')[-1]} {name}" if "." in axis or axis == "rounds" else name


def key_of(config: Config) -> str:
    """The hash of a resolved config, and of the plug-ins and files that it names.

    Where a run is executed or written, and its name, do not count. Files and folders count by their names and
    contents, not by their location; for a folder of many images the names, sizes and times of its files
    count. Datasets that rayfl downloads count by name.
    """
    hashed = [hashed_settings(config, portable_settings(config)), sources_of(config)]
    contents = contents_of(config)
    text = json.dumps([*hashed, contents] if contents else hashed, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hashed_settings(config: Config, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config that determine the run's numbers; where it is executed does not count.

    Args:
        config: resolved.
        settings: all of its settings.
    """
    settings = {
        name: copy.deepcopy(value) for name, value in settings.items() if name not in _UNHASHED_SECTIONS
    }
    for section, name in _UNHASHED_SETTINGS.items():
        if name in settings[section]:
            settings[section][name] = type(getattr(config, section)).model_fields[name].default
    execution = {name: settings["execution"][name] for name in _HASHED_EXECUTION}
    for name in ("clients_per_actor", "fan_in"):
        if execution[name] is None:
            del execution[name]
    if config.execution.tolerate_failures:  # a run that may drop failed clients is another one
        execution["tolerate_failures"] = config.execution.tolerate_failures
    # Settings that earlier versions named differently or did not have: keys stay the same, as runs do.
    if settings["data"]["name"] == "npz" and settings["data"]["test_fraction"] is None:
        del settings["data"]["test_fraction"], settings["data"]["seed"]
    if settings["data"].get("test_by") is None:
        settings["data"].pop("test_by", None)
    if settings["data"].get("predict") == "class":
        del settings["data"]["predict"]
    if not settings["partition"].get("min_test_samples"):
        settings["partition"].pop("min_test_samples", None)
    if settings["partition"].get("shard_size") is None:
        settings["partition"].pop("shard_size", None)
    if settings["data"]["name"] == "image_folder" and settings["data"]["folders"] == "class":
        del settings["data"]["folders"]
    if settings["training"]["precision"] == "float32":
        del settings["training"]["precision"]
    if settings["aggregation"] == {"name": "mean"}:
        del settings["aggregation"]
    criteria = settings["algorithm"].get("criteria")
    if isinstance(criteria, dict) and "name" in criteria:
        criteria["norms"] = criteria.pop("name")
    return {**settings, "execution": execution}


def contents_of(config: Config) -> list[str]:
    """The hashes of the user's files and folders that a config names."""
    return [content_of(path) for path in inputs_of(config)]


def sources_of(config: Config) -> list[str]:
    """The hashes of the plug-ins that a config uses, sorted.

    A plug-in is used if it defines the class of a part or one of its base classes, if a setting names it as
    in ``my_net:Net``, or if it defines a module of a network that was given as an object.
    """
    used: set[str] = set()
    for part in parts_in(config):
        plugins.refuse_old([type(part).__module__])
        used.update(base.__module__ for base in type(part).__mro__)
        used.update(plugins.module_of(value) for _, value in part if isinstance(value, str) and ":" in value)
        for target in _targets(part):
            plugins.refuse_old([target])  # else the key would be that of the old source
            plugins.resolve(target, "target")  # else its source would be known only after the first use
            used.add(plugins.module_of(target))
    digests = {plugin.module: plugin.sha256 for plugin in plugins.loaded()}
    return sorted({digests[m] for name in used for m in digests if (name + ".").startswith(m + ".")})


def _targets(part: BaseModel) -> list[str]:
    """What a part calls by name: its target, and the classes of the network that the target reads."""
    target = getattr(part, "target", None)
    if not isinstance(target, str):
        return []
    return [target, *(part.given_classes() if isinstance(part, OwnModule) else ())]


def check_number(count: int, what: str = "runs") -> None:
    """Refuse a study with too many runs, before its configs are made.

    Raises:
        ConfigError
    """
    if count > MOST_RUNS:
        remedy = f"at most {MOST_RUNS:,} are allowed; draw settings with tune.samples"
        raise ConfigError("study", f"{count:,} {what} are too many", remedy)


def points(study: StudyFile) -> list[dict[str, str]]:
    """All points of the grid; one without axes.

    Raises:
        ConfigError: if there are too many.
    """
    axes = study.axes
    check_number(math.prod(map(len, axes.values())), "points of the grid")
    return [dict(zip(axes, each, strict=True)) for each in itertools.product(*axes.values())]


def plan(
    study: StudyFile,
    chosen: Mapping[tuple[str, str], Settings] | None = None,
) -> list[PlannedRun]:
    """All runs, seed by seed; runs of a seed have the same clients and first model.

    Args:
        study: the file.
        chosen: settings that were chosen for a method and a point (:func:`place_of`).

    Raises:
        ConfigError: for the first invalid run: which, and why.
    """
    check_number(len(points(study)) * len(study.all_methods) * len(study.seeds))
    first_runs = []  # the runs of the first seed; those of the others differ in nothing else
    for point in points(study):
        configs, settings = {}, {}
        for label in study.all_methods:
            settings[label] = (chosen or {}).get((label, place_of(point))) or {}
            configs[label] = resolved(study, label, point, study.seeds[0], (), overrides_of(settings[label]))
        check_algorithm_settings("settings", paths_of(study.settings), configs.values())
        # All methods count, also those that are not run now: a part of a study has the whole study's data.
        final_configs = dict(zip(configs, on_the_same_data(list(configs.values())), strict=True))
        first_runs += [
            PlannedRun(label, point, study.seeds[0], final_configs[label], settings[label])
            for label in study.methods
        ]
    return [
        replace(run, seed=seed, config=run.config.model_copy(update={"seed": seed}))
        for seed in study.seeds
        for run in first_runs
    ]


def place_of(point: Mapping[str, str]) -> str:
    """A point of the grid as text: ``partition.alpha=0.1, rounds=20``; empty without a grid."""
    return ", ".join(f"{axis}={name}" for axis, name in point.items())


def resolved(
    study: StudyFile,
    label: str,
    point: Mapping[str, str],
    seed: int,
    changes: Sequence[str] = (),
    tuned: Iterable[str] = (),
) -> Config:
    """The config of a run: base, settings, grid, what was tuned, the method's own, ``changes``.

    Of the settings for all methods, and of those that were tuned, it takes those that its algorithm uses.

    Raises:
        ConfigError: with the method's label, or ``base``, ``settings`` or ``grid`` if the mistake is there.
    """
    method_settings = dict(study.all_methods[label])
    algorithm = method_settings.pop("algorithm", None)
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm
    name = method_settings.pop("algorithm.name", name)
    inner = algorithm if isinstance(algorithm, Mapping) else {}
    settings = list(overrides_of(study.settings))
    grid = [change for axis, at in point.items() for change in overrides_of(study.axes[axis][at])]
    kept = _not_replaced(settings, paths_of(study.all_methods[label]))
    of_all, for_algorithm = _separated([*kept, *grid])
    of_tuned = list(tuned)
    tuned_of_all, tuned_for_algorithm = _separated(of_tuned)
    base = _base_of(study)
    try:
        if name is None:
            algorithm_class = algorithm_of(base)
            name = "fedavg" if algorithm_class is None else str(algorithm_class.model_fields["name"].default)
        config = variant(base, [*of_all, *tuned_of_all, f"seed={seed}"], name)
        fields = type(config.algorithm).model_fields.keys()
        if applicable := _of_fields(for_algorithm, fields):
            config = continued(config, applicable)
        section = overrides_of({"algorithm": inner} if inner else {})
        chosen = _of_fields(tuned_for_algorithm, fields - inner.keys())
        return continued(config, [*section, *chosen, *overrides_of(method_settings), *changes])
    except ConfigError as error:
        where = f"methods.{label}"
        if name is not None and name not in ALGORITHMS:  # plug-ins are known by now
            where = study.place_of_setting(where, "algorithm")
            raise ConfigError(f"{where}: algorithm", error.what, error.remedy) from None
        tuned_too = [*settings, *grid, *of_tuned]
        for part, overrides in (
            ("base", []),
            ("settings", settings),
            ("grid", [*settings, *grid]),
            ("tune", tuned_too if of_tuned else []),
        ):
            if _first_mistake(_error_in(base, overrides, name)) == _first_mistake(error):
                where = part
                break
        where = study.place_of_setting(where, error.where)
        raise ConfigError(f"{where}: {error.where}", error.what, error.remedy) from None


def _first_mistake(error: ConfigError | None) -> tuple[str, str, str] | None:
    """An error without the number of other mistakes, which may lie elsewhere."""
    if error is None:
        return None
    return error.where, re.sub(r" \(and \d+ more mistakes?\)", "", error.what), error.remedy


def _base_of(study: StudyFile) -> dict[str, Any]:
    """The settings from which all runs start.

    Raises:
        ConfigError: if the base cannot be read.
    """
    try:
        settings = with_overrides(read(study.base or {}), ["output.report=false"])  # a study has its own page
        if study.plugins:
            of_base = settings.get("plugins")
            named = of_base if isinstance(of_base, list | tuple) else ()
            settings["plugins"] = list(dict.fromkeys([*named, *study.plugins]))
        bring_plugins(settings)
        return settings
    except ConfigError as error:
        raise ConfigError(f"base: {error.where}", error.what, error.remedy) from None


def check_algorithm_settings(where: str, names: Iterable[str], configs: Iterable[Config]) -> None:
    """Refuse a setting ``algorithm.*`` that the algorithm of no method has.

    Raises:
        ConfigError
    """
    fields = {field for config in configs for field in type(config.algorithm).model_fields} - {"name"}
    for setting in names:
        if setting.startswith("algorithm.") and (name := setting.split(".")[1]) not in fields:
            raise ConfigError(where, f"{setting}: no method has such a setting", nearest(name, fields))


def tuned_names(study: StudyFile, label: str) -> list[str]:
    """The settings of the search space that a method uses: ``algorithm.*`` that its algorithm has, and those
    that the method does not set itself.
    """
    if study.tune is None:
        return []
    fields = type(resolved(study, label, points(study)[0], study.seeds[0]).algorithm).model_fields
    own = paths_of(study.all_methods[label])
    return [
        name
        for name in study.tune.space
        if name.removesuffix(".name") not in own
        and (not name.startswith("algorithm.") or name.split(".")[1] in fields)
    ]


def _separated(changes: Iterable[str]) -> tuple[list[str], list[str]]:
    """Overrides for all methods, and those ``algorithm.*`` of the methods whose algorithm has the setting."""
    changes = list(changes)
    for_algorithm = [change for change in changes if change.startswith("algorithm.")]
    return [change for change in changes if change not in for_algorithm], for_algorithm


def _not_replaced(changes: Sequence[str], own: Collection[str]) -> list[str]:
    """Overrides without the numbers that a method replaces by its own: they may be impossible for it.

    Others stay: the settings of other overrides may depend on them, as those of a part on its name.
    """
    return [
        change
        for change, (path, value) in zip(changes, parse_overrides(changes), strict=True)
        if path not in own or isinstance(value, bool) or not isinstance(value, int | float)
    ]


def _of_fields(changes: Iterable[str], fields: Set[str]) -> list[str]:
    """Overrides of some settings of an algorithm: ``algorithm.q=0.5`` is one of ``q``."""
    return [change for change in changes if change.partition("=")[0].split(".")[1] in fields]


def _error_in(base: Mapping[str, Any], settings: Sequence[str], name: str | None) -> ConfigError | None:
    """The error in a base with these settings, without those of the method; None if there is none."""
    try:
        load(base, settings) if name is None else load(variant(base, settings, name))
    except ConfigError as error:
        return error
    return None

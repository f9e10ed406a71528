"""From presets, YAML files, mappings and dotted overrides to a :class:`Config`."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rayfl import plugins
from rayfl.config import kinds
from rayfl.config.mistakes import explain
from rayfl.config.objects import bring_classes, modules_of, plain
from rayfl.config.schema import EXCLUDED, Config
from rayfl.config.text import NOT_YAML, parse, problem_of
from rayfl.config.transfer import algorithm_of, transferred, used
from rayfl.config.words import choices, describe, printable, shown
from rayfl.data import DATASETS
from rayfl.errors import ArgumentError, ConfigError, nearest, type_of
from rayfl.paper import Paper
from rayfl.settings import Section, default_part, named, part_name

PRESETS = Path(__file__).parents[1] / "presets"


def presets() -> dict[str, Path]:
    """The presets by name: rayfl's own, then those of plug-ins, which cannot replace rayfl's."""
    bundled = _bundled()
    return {**bundled, **{name: path for name, path in plugins.presets().items() if name not in bundled}}


@cache
def _bundled() -> Mapping[str, Path]:
    return {path.stem: path for path in sorted(PRESETS.glob("*.yaml"))}


def describe_preset(path: Path) -> str:
    """The comment on the first line of a preset."""
    return path.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ")


def paper_of(path: Path) -> Paper:
    """The ``paper:`` block of a preset, or of another YAML file.

    Raises:
        ConfigError: if the block is missing or invalid; one line.
    """
    return _parse_paper(_read_yaml(path), path)


def with_paper(path: Path) -> tuple[Paper | None, Config]:
    """The paper and the config of a preset; presets of plug-ins may have no paper.

    Raises:
        ConfigError: as :func:`paper_of` and :func:`load`.
    """
    settings = _read_yaml(path)
    paper = _parse_paper(settings, path) if "paper" in settings else None
    settings.pop("paper", None)
    return paper, load(settings)


def _parse_paper(settings: Mapping[str, Any], path: Path) -> Paper:
    try:
        return Paper.model_validate(settings.get("paper"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("paper", *first["loc"])))
        raise ConfigError(f"{path}: {where}", first["msg"], "see the block of a preset") from None


def load(
    source: str | Path | Mapping[str, Any] | Config, overrides: Sequence[str] = (), **parts: Any
) -> Config:
    """Read, complete and validate a configuration.

    If ``overrides`` or ``parts`` name another algorithm than the source, the source's settings that are for
    its own algorithm are left out (:func:`~rayfl.config.transfer.transferred`).

    Args:
        source: a preset's name, a YAML file, or a mapping (or a Config, to change it).
        overrides: dotted settings such as ``"training.lr=0.1"``; the value is read as YAML.
        parts: Python objects in place of the source's sections: ``algorithm=MyMethod(rate=0.1)``,
            ``model=MyNet`` (an ``nn.Module`` class), ``data=(x_train, y_train, x_test, y_test)``. Settings of
            a section without a name, such as ``{"data": {"normalise": "none"}}``, are kept.

    Raises:
        ConfigError: one line: where, what, and what would be right.
    """
    settings, part_settings, overrides = read(source), plain(parts), names_first(overrides)
    refuse_replaced(overrides)
    requested = with_overrides(_with_parts(settings, part_settings), overrides)
    # Old versions may have other settings.
    plugins.refuse_old([*_plugins_in(requested), *_possible_targets(requested)])
    complete = isinstance(source, Config)
    config = _resolve_with_plugins(settings, part_settings, overrides, requested, complete)
    plugins.refuse_old(modules_of(config))
    return config


def continued(config: Config, overrides: Sequence[str]) -> Config:
    """The config of an earlier run with overrides, and with the plug-ins with which it was read."""
    settings, overrides = read(config), names_first(overrides)
    return _resolve_with_plugins(settings, {}, overrides, with_overrides(settings, overrides), True)


def _possible_targets(value: Any) -> Iterator[str]:
    """The texts among settings that may be targets (``module:Class``)."""
    if isinstance(value, str) and ":" in value:
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _possible_targets(each)


def _resolve_with_plugins(
    settings: dict[str, Any],
    part_settings: dict[str, Any],
    overrides: Sequence[str],
    requested: dict[str, Any],
    complete: bool,
) -> Config:
    bring_plugins(requested)
    if (algorithm := algorithm_of(requested)) is not algorithm_of(settings):
        kept = used(transferred(settings, algorithm, complete), algorithm)
        requested = with_overrides(_with_parts(kept, part_settings), overrides)
    return resolve(requested)


def _with_parts(settings: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with parts in place of sections; settings of a section without a name are kept."""
    result = {**settings, **parts}
    for section, given in parts.items():
        kept = settings.get(section)
        if isinstance(given, dict) and isinstance(kept, Mapping) and "name" not in kept:
            result[section] = {**kept, **given}
    return result


def reload(source: Path | Mapping[str, Any]) -> Config:
    """The config of an earlier run, ignoring settings without effect that older versions accepted.

    Args:
        source: its file, or the contents of that file.

    Raises:
        ConfigError: as :func:`load`.
    """
    settings = read(source)
    if not settings:
        what = "is empty; it held the settings of a run, which are lost"
        raise ConfigError(str(source), what, "start the run again in a new directory")
    bring_plugins(settings)
    data = settings.get("data")
    dataset = DATASETS.get(str(data.get("name"))) if isinstance(data, dict) else None
    if isinstance(data, dict) and dataset is not None and dataset.elsewhere:
        data.pop("root", None)  # this dataset was never read from a folder
    return resolve(used(settings, algorithm_of(settings)))


def bring_plugins(settings: Mapping[str, Any]) -> None:
    """Import the plug-ins that settings name; anything but a list of names is refused later.

    Raises:
        ConfigError: if a plug-in cannot be imported.
    """
    kinds.bring(_plugins_in(settings))


def _plugins_in(settings: Mapping[str, Any]) -> list[str]:
    listed = settings.get("plugins")
    names = listed if isinstance(listed, (list, tuple)) else ()
    return [name for name in names if isinstance(name, str) and name]


def read(source: str | Path | Mapping[str, Any] | Config) -> dict[str, Any]:
    """The settings of a source, without its ``paper`` block; objects are converted to settings.

    Raises:
        ConfigError
    """
    if isinstance(source, Config):
        bring_classes(source)
        return source.to_dict()
    untyped: object = source
    if not isinstance(untyped, (str, os.PathLike, Mapping)):
        what, others = (
            f"{printable(repr(untyped))[:60]} is not a config",
            "a YAML file, a mapping or a rayfl.Config",
        )
        raise ConfigError("config", what, f"expected a preset's name, {others}")
    settings = plain(source) if isinstance(source, Mapping) else _read_yaml(source)
    settings.pop("paper", None)
    return settings


def own_settings(config: Config) -> dict[str, Any]:
    """The settings of a config's algorithm, and those of other sections that are not its defaults.

    :func:`load` completes them to the same config. Unlike all settings of the config, they leave to other
    algorithms what depends on the algorithm.
    """
    bring_classes(config)
    settings = config.to_dict()
    chosen = {"algorithm": settings["algorithm"]}
    try:
        own = {**_differing(settings, resolve(chosen).to_dict()), **chosen}
        return own if resolve(own).to_dict() == settings else settings
    except ConfigError:  # this algorithm needs other settings as well
        return settings


def _differing(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that differ from the defaults; those of another part are kept whole."""
    result: dict[str, Any] = {}
    for key, value in settings.items():
        default = defaults.get(key)
        if value == default:
            continue
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            name = value.get("name")
            if name == default.get("name"):
                value = {**({} if name is None else {"name": name}), **_differing(value, default)}
        result[key] = value
    return result


def _read_yaml(source: str | Path) -> dict[str, Any]:
    path = Path(os.path.expanduser(source))
    if str(source) not in presets() and not _is_file(path):
        kinds.bring()  # the preset may be that of an installed package
    if str(source) in presets():
        path = presets()[str(source)]
    elif not _is_file(path):
        if re.match(r"[a-z_][\w.]*=", str(source)):
            what, remedy = (
                "is a setting, not a config",
                "put a preset or YAML file first, such as digits-demo",
            )
            raise ConfigError(printable(str(source)), what, remedy)
        is_path = path.suffix in (".yaml", ".yml") or len(path.parts) > 1
        remedy = "name a preset or an existing file" if is_path else nearest(str(source), presets())
        raise ConfigError(printable(str(source)), "no such file" if is_path else "no such preset", remedy)
    try:
        settings = parse(path.read_text(encoding="utf-8"), trusted=path.parent == PRESETS)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    except NOT_YAML as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(place, f"not YAML: {problem_of(error)}") from None
    if settings is None:
        settings = {}
    if not isinstance(settings, dict):
        raise ConfigError(str(path), f"holds {type_of(settings)}", "expected 'section: settings' lines")
    return settings


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name longer than the file system allows
        return False


def with_overrides(settings: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """``settings`` with dotted ``key=value`` overrides applied (a copy).

    Naming another part, as in ``algorithm=pacfl``, drops the settings of the part that it replaces. Setting
    one of two settings that exclude each other drops the other, unless the overrides set both.

    Raises:
        ConfigError: if an override cannot be read.
    """
    result = copy.deepcopy(dict(settings))
    parsed = parse_overrides(overrides)
    override_paths = {path for path, _ in parsed}
    for path, value in parsed:
        excluded = EXCLUDED.get(path)
        if excluded is not None and excluded not in override_paths and value is not None:
            _assign(result, excluded.split("."), None)  # a default of the algorithm must not bring it back
        _assign(result, _current_path(result, path.split(".")), value)
    return result


def parse_overrides(overrides: Iterable[str]) -> list[tuple[str, Any]]:
    """The dotted path and the value of each override ``key=value``, in order.

    Raises:
        ConfigError: if an override cannot be read.
    """
    parsed: list[tuple[str, Any]] = []
    for text in overrides:
        path, equals, value = text.partition("=")
        path = path.strip()
        if not equals or not all(path.split(".")):
            raise ConfigError(printable(text), "not an override", "expected key=value, e.g. training.lr=0.1")
        try:
            parsed.append((path, parse(value)))
        except NOT_YAML:
            raise ConfigError(
                printable(path), f"{value!r} is not a YAML value", "quote it if it is text"
            ) from None
    return parsed


def refuse_replaced(overrides: Iterable[str]) -> None:
    """Refuse an override that has no effect since a later one replaces its section, part or list.

    Raises:
        ConfigError
    """
    parsed = parse_overrides(overrides)
    for place, (path, value) in enumerate(parsed):
        _refuse_replaced(parsed[:place], path, value)


def _refuse_replaced(earlier: Sequence[tuple[str, Any]], path: str, value: Any) -> None:
    """Refuse settings before an override that replaces their section, part or list.

    Allowed are settings that the override names itself, and those of a part that it only names again.

    Raises:
        ConfigError
    """
    section = path.removesuffix(".name")
    names = [_name(each) for earlier_path, each in earlier if earlier_path.removesuffix(".name") == section]
    name = next((each for each in reversed(names) if each is not None), None)
    replaced = _settings_in(section, value)
    later = {setting.removeprefix(f"{section}.").removesuffix(".name") for setting in replaced}
    named_here_first = name is None and path != section  # then the settings in the section stay
    if isinstance(value, Mapping):
        given, what, remedy = "{...}", "section", "give it inside the braces, or after them"
    elif isinstance(value, list):
        given, what, remedy = "[...]", "list", "give it inside the brackets, or after them"
    elif isinstance(value, str) and names and name != value and not named_here_first:
        given, what, remedy = value, "part", "give it together with that name"
    else:
        return
    effect = f"has no effect, since {path}={given} comes later and replaces the {what}"
    if isinstance(value, Mapping) and name is not None and "name" not in later:
        raise ConfigError(f"{section}={name}", effect, "give the name inside the braces")
    for earlier_path, earlier_value in earlier:
        for setting in _settings_in(earlier_path.removesuffix(".name"), earlier_value):
            inner = setting.removeprefix(f"{section}.").removesuffix(".name")
            given_again = inner in later or any(each.startswith(f"{inner}.") for each in later)
            if setting.startswith(f"{section}.") and inner != "name" and not given_again:
                raise ConfigError(setting, effect, remedy)


def _settings_in(path: str, value: Any) -> list[str]:
    """The dotted paths of the settings in a section at a path; of anything else, the path."""
    if not isinstance(value, Mapping) or not value:
        return [path]
    return [setting for key, each in value.items() for setting in _settings_in(f"{path}.{key}", each)]


def _name(part: Any) -> Any:
    """The name of a part, which stands for the part or is in its section; None if it has none."""
    return part.get("name") if isinstance(part, Mapping) else part


def names_first(overrides: Sequence[str]) -> list[str]:
    """Reorder overrides so that the settings of a part come after its first name: ``partition.clients=6
    partition=iid`` means six clients, too.

    Raises:
        ArgumentError: if they are no texts.
    """
    if isinstance(overrides, str):
        return [overrides]
    listed = (
        [overrides] if isinstance(overrides, Mapping) or not isinstance(overrides, Iterable) else overrides
    )
    for text in (overrides := [*listed]):
        if not isinstance(text, str):
            expected = 'expected texts, such as ["training.lr=0.1"]'
            raise ArgumentError("overrides", f"got {type_of(text)}", expected)
    ordered: list[str] = []
    for text in overrides:
        part, value = _overridden_part(text)
        place = len(ordered)
        same_part = [_overridden_part(earlier)[0] == part for earlier in ordered]
        if part and value and not any(same_part):  # settings before a second name were given for the first
            indices = (
                index for index, earlier in enumerate(ordered) if earlier.strip().startswith(f"{part}.")
            )
            place = next(indices, place)
        ordered.insert(place, text)
    return ordered


_NAME = re.compile(r"""\s*(["']?)[A-Za-z_][\w.:/-]*\1\s*""")
"""A name as the value of an override; study files quote it."""


def _overridden_part(text: str) -> tuple[str, bool]:
    """The path that an override sets, without ``.name``; and whether its value may be a name."""
    path, _, value = text.partition("=")
    return path.strip().removesuffix(".name"), _NAME.fullmatch(value) is not None


def _current_path(settings: Mapping[str, Any], path: Sequence[str]) -> list[str]:
    """The current names of a dotted setting (:attr:`~rayfl.settings.Section.renamed`)."""
    current: list[str] = []
    section: type[BaseModel] | None = Config
    parts: Mapping[Any, type[BaseModel]] = {}
    node: Any = settings
    for key in path:
        names = section.renamed if section is not None and issubclass(section, Section) else {}
        current.append(names.get(key, key))
        default = default_part(section, current[-1]) if section is not None else None
        if not isinstance(node, (list, tuple)):
            parts = choices(section, current[-1]) if section is not None else {}
        node = item(node, current[-1])
        chosen = node.get("name") if isinstance(node, Mapping) else node
        if not isinstance(chosen, str) and default is not None:
            chosen = part_name(default)
        section = parts.get(None) or (parts.get(chosen) if isinstance(chosen, str) else None)
    return current


def item(node: object, key: str) -> Any:
    """The value of a mapping under a key, or of a list at an index from 0; None if there is none."""
    if isinstance(node, Mapping):
        return node.get(key)
    if isinstance(node, (list, tuple)) and key.isdecimal() and int(key) < len(node):
        return node[int(key)]
    return None


def _assign(settings: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set the value at ``path``, in place. In lists, a part of the path is an index.

    Raises:
        ConfigError: if a list has no such index.
    """
    node: Any = settings
    for depth, part in enumerate(path[:-1]):
        if isinstance(node, list):
            _refuse_index(node, path, depth)
        inner = item(node, part)
        if isinstance(inner, str):  # the short form 'algorithm: pacfl'
            inner = {"name": inner}
        elif isinstance(inner, tuple):
            inner = list(inner)
        inner = inner if isinstance(inner, (dict, list)) else {}
        node[int(part) if isinstance(node, list) else part] = inner
        node = inner
    last, old = path[-1], item(node, path[-1])
    if isinstance(node, list):
        _refuse_index(node, path, len(path) - 1)
    elif last == "name" and len(path) > 1 and node.get("name") not in (None, value):
        node.clear()
    renames = isinstance(old, dict) and isinstance(value, str) and old.get("name") == value
    node[int(last) if isinstance(node, list) else last] = old if renames else value


def _refuse_index(items: list[Any], path: Sequence[str], depth: int) -> None:
    """Refuse a path into a list that has no such item.

    Raises:
        ConfigError: if that part of the path is not an index of the list.
    """
    place, count = path[depth], len(items)
    if not place.isdecimal() or int(place) >= count:
        list_path = ".".join(path[:depth])
        what = f"{list_path} is a list of {count} item{'' if count == 1 else 's'}"
        places = (
            f"its items are {list_path}.0 to {list_path}.{count - 1}"
            if count > 1
            else f"its item is {list_path}.0"
        )
        raise ConfigError(".".join(path), what, places if count else f"give {list_path} as a whole")


def resolve(settings: Mapping[str, Any]) -> Config:
    """Complete ``settings`` with the algorithm's defaults for other sections, and validate.

    Raises:
        ConfigError: for the first mistake found.
    """
    settings = dict(settings)
    part = algorithm_of(settings)
    for section, values in (part.defaults if part else {}).items():
        settings[section] = _merge(values, settings.get(section))
    settings = _name_default_parts(settings, Config)
    try:
        config = Config.model_validate(settings)
    except ValidationError as error:
        raise explain(error, settings) from None
    _refuse_booleans(settings, config)
    return config


def _refuse_booleans(
    written: object, validated: object, where: str = "", field: FieldInfo | None = None
) -> None:
    """Refuse YAML's yes, on and true where a number is wanted: Pydantic takes them for 1."""
    if isinstance(written, bool) and not isinstance(validated, bool):
        expected = describe(field.annotation, field.metadata) if field else ""
        raise ConfigError(where, shown(written), f"expected {expected}")
    if isinstance(written, Mapping) and isinstance(validated, BaseModel):
        for key, value in written.items():
            inner = type(validated).model_fields[key]
            _refuse_booleans(value, getattr(validated, key), f"{where}.{key}".lstrip("."), inner)
    elif isinstance(written, (list, tuple)) and isinstance(validated, tuple):
        for place, (value, item) in enumerate(zip(written, validated, strict=False)):
            _refuse_booleans(value, item, f"{where}.{place}" if isinstance(value, Mapping) else where, field)


def _merge(base: Mapping[str, Any], changes: Any) -> Any:
    """``base`` updated by ``changes``, recursively; a part of another name replaces the base's part."""
    if changes is None or (isinstance(changes, str) and base.get("name") == changes):
        return dict(base)
    if not isinstance(changes, Mapping) or changes.get("name", base.get("name")) != base.get("name"):
        return changes
    merged = dict(base)
    for key, value in changes.items():
        merged[key] = _merge(base[key], value) if isinstance(base.get(key), Mapping) else value
    return merged


def _name_default_parts(values: Mapping[str, Any], section: type[BaseModel]) -> dict[str, Any]:
    """Name the default part where settings name none, and drop empty sections.

    Settings under a former name (:attr:`~rayfl.settings.Section.renamed`) get the current one.
    """
    result: dict[str, Any] = {}
    names = section.renamed if issubclass(section, Section) else {}
    for key, value in values.items():
        key = names.get(key, key)
        field = section.model_fields.get(key) if isinstance(key, str) else None
        default = default_part(section, key) if field is not None else None
        if field is not None and default is not None:
            if value is None:
                continue
            parts = choices(section, key)
            if isinstance(value, Mapping):
                if None not in parts:
                    value = named(value, default)
                chosen = value.get("name")
                inner = parts.get(None) or (parts.get(chosen) if isinstance(chosen, str) else None)
                value = _name_default_parts(value, inner) if inner else value
        result[key] = value
    return result

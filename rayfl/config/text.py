"""YAML as people write it: numbers such as 1e-3, no key twice, no aliases that make a small file huge."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import yaml

NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)
"""What the parser raises: ValueError for bytes that are not text, impossible dates and too long integers."""


def problem_of(error: Exception) -> str:
    """What is wrong with the text, in a line, of an error in :data:`NOT_YAML`."""
    return " ".join(str(getattr(error, "problem", None) or error).split())


def parse(text: str, trusted: bool = False) -> Any:
    """The value of YAML text.

    Args:
        text: the YAML.
        trusted: whether the text comes with rayfl, and so is known to be valid. It is read by libyaml, which
            is many times faster, but crashes the process if brackets are nested too deeply.

    Raises:
        YAMLError, ValueError, RecursionError: those of :data:`NOT_YAML`.
    """
    loader = _TrustedLoader if trusted else _Loader
    if len(text) <= _SHORT:
        return copy.deepcopy(_parse_short(text, loader))
    if len(text) <= _LONG:
        return copy.deepcopy(_parse_long(text, loader))
    return yaml.load(text, Loader=loader)


_SHORT, _LONG = 200, 10_000
"""The most characters of texts whose values are remembered: studies have the same few values in all runs, all
their runs the same base, and their pages show the configs of all runs in several places."""


@lru_cache(maxsize=2000)
def _parse_short(text: str, loader: type) -> Any:
    return yaml.load(text, Loader=loader)


@lru_cache(maxsize=300)
def _parse_long(text: str, loader: type) -> Any:
    return yaml.load(text, Loader=loader)


def dump(values: Mapping[str, Any]) -> str:
    """YAML that :func:`parse` reads back to equal values."""
    try:
        return yaml.dump(values, Dumper=_Dumper, sort_keys=False)
    except UnicodeEncodeError:  # libyaml takes no lone surrogates, as in names of files that are not UTF-8
        return yaml.dump(values, Dumper=_PythonDumper, sort_keys=False)


def is_dump(text: str, values: Mapping[str, Any]) -> bool:
    """Whether the text is what :func:`dump` writes of the values, with libyaml or without: lines are broken
    differently."""
    return text in (dump(values), yaml.dump(values, Dumper=_PythonDumper, sort_keys=False))


def as_value(value: Any) -> str:
    """A value in one line that :func:`parse` reads back: JSON, which is YAML except for surrogate pairs.

    Raises:
        TypeError: if JSON cannot represent the value.
    """
    return _SURROGATES.sub(_escape_surrogates, json.dumps(value))


_SURROGATES = re.compile(r"(?<!\\)((?:\\\\)*)\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})")
"""A character beyond U+FFFF as JSON writes it, after an even number of backslashes."""


def _escape_surrogates(match: re.Match[str]) -> str:
    high, low = (int(match[place], 16) for place in (2, 3))
    return f"{match[1]}\\U{0x10000 + ((high - 0xD800) << 10) + low - 0xDC00:08x}"


class _Loader(yaml.SafeLoader):
    """YAML in which ``1e-3`` is a number (text in YAML 1.1), ``2:4`` is text (124 in YAML 1.1, to base 60),
    and no key occurs twice.
    """

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
        """As YAML defines it, except for numbers to base 60."""
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        numeric = tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        return self.DEFAULT_SCALAR_TAG if numeric and ":" in value else tag

    def get_single_node(self) -> yaml.Node | None:
        """As YAML defines it, but aliases may not make a small file huge or endless."""
        root: yaml.Node | None = super().get_single_node()
        sizes: dict[int, int] = {}
        written = _expanded_size(root, sizes) if root is not None else 0
        if written - len(sizes) > _MAX_REPEATED:
            problem = (
                f"aliases repeat {written - len(sizes):.3g} values; at most {_MAX_REPEATED:,} are allowed"
            )
            raise yaml.constructor.ConstructorError(None, None, problem, getattr(root, "start_mark", None))
        return root

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """As YAML defines it, but a repeated key is an error (otherwise the last one would win silently)."""
        written: dict[Any, str] = {}  # the keys as the file writes them, by their values
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            value = self.construct_object(key)
            if value in written:
                first = written[value]
                same = "is given twice" if first == key.value else f"is the same key as {first!r}; quote them"
                problem = f"{key.value!r} {same}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            written[value] = key.value
        return super().construct_mapping(node, deep)


_MAX_REPEATED = 100_000
"""Values that aliases may repeat: a few hundred bytes of nested anchors mean billions of values."""


def _expanded_size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """The number of values in a node; values behind aliases count at each occurrence.

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
            size += _expanded_size(each, sizes)
    sizes[id(node)] = size
    return size


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes the text that :class:`_Loader` would take for a number. It is libyaml's where PyYAML has that,
    which is five times as fast and breaks long lines differently."""


class _TrustedLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """libyaml's reader, where PyYAML has it."""


class _PythonDumper(yaml.SafeDumper):
    """As :class:`_Dumper`, in Python."""


for _yaml in (_Loader, _TrustedLoader, _Dumper, _PythonDumper):
    _yaml.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d[\d_]*(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )

"""What several tests of configs ask for."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rayfl.config import Config, json_schema, load
from rayfl.config.text import parse
from rayfl.config.words import sections
from rayfl.errors import ConfigError


def refusal(source: Any, *overrides: str) -> str:
    """The one line with which a config is refused."""
    with pytest.raises(ConfigError) as caught:
        load(source, overrides)
    text = str(caught.value)
    assert text.isprintable()  # one line
    return text


def reread(config: Config, folder: Path) -> Config:
    path = folder / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    return load(path)


def yaml_mapping(text: str) -> dict[str, Any]:
    return dict(parse(text))


@cache
def validator() -> Any:
    return pytest.importorskip("jsonschema").Draft202012Validator(json_schema())


def valid(settings: Any) -> bool:
    return bool(validator().is_valid(settings))


def keys(section: type[BaseModel], prefix: str = "") -> dict[str, type[BaseModel]]:
    """Every dotted key of the default config, and the section that it belongs to."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in section.model_fields.items():
        found[prefix + name] = section
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel) and sections(field.annotation):
            found |= keys(type(default), f"{prefix}{name}.")
    return found


KEYS = keys(Config)

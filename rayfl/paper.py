"""The ``paper:`` block of a preset's YAML file: the settings of the paper whose experiment it repeats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import Field

from rayfl.settings import Section


class Paper(Section):
    """The paper's settings, and why the preset differs from them. Not part of a run's config.

    Settings are named by their dotted paths. Their values are written as in a config of rayfl, or in words if
    rayfl has no such value.
    """

    source: str = Field(min_length=1, description="the paper, and its table, figure or section")
    settings: dict[str, Any] = Field({}, description="what the paper states, by dotted setting")
    why: dict[str, str] = Field(
        {}, description="reasons for the settings that differ from the paper's, by dotted setting"
    )
    open: dict[str, str] = Field(
        {},
        description="settings that the paper leaves open, or states in words only, and how they were chosen",
    )


class Deviation(NamedTuple):
    """A setting that differs from the paper."""

    setting: str
    paper: Any
    here: Any
    why: str


def deviations(paper: Paper, config: Mapping[str, Any]) -> list[Deviation]:
    """The settings that differ from the paper.

    Args:
        paper: what the paper states.
        config: the resolved config as plain values (``Config.to_dict``).

    Raises:
        KeyError: if the config has no such setting.
    """
    settings = ((setting, stated, value(config, setting)) for setting, stated in paper.settings.items())
    return [
        Deviation(setting, stated, here, paper.why.get(setting, ""))
        for setting, stated, here in settings
        if here != stated
    ]


def value(config: Mapping[str, Any], setting: str) -> Any:
    """A setting of a config by its dotted path."""
    node: Any = config
    for key in setting.split("."):
        node = node[key]
    return node

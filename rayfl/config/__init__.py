"""The typed configuration of a run: YAML and dotted overrides in, one frozen, validated object out.

Each module uses only those above it:

- ``text``: YAML, read and written;
- ``words``: valid values of a setting, in words;
- ``kinds``: the parts that may be chosen, and plug-ins with more;
- ``schema``: the sections, and :class:`Config`;
- ``objects``: Python objects that users give in place of settings;
- ``mistakes``: error messages of one line: where, what, and what would be right;
- ``reading``: presets, files and overrides to a config;
- ``variants``: the same settings for another algorithm;
- ``changes``: the settings that appear in a run's name.
"""

from rayfl.config.changes import changes
from rayfl.config.reading import (
    describe_preset,
    load,
    paper_of,
    presets,
    reload,
    resolve,
    with_overrides,
    with_paper,
)
from rayfl.config.schema import (
    BLOCK_SETTINGS,
    CHANGEABLE,
    Config,
    Evaluation,
    Execution,
    Output,
    json_schema,
)
from rayfl.config.variants import on_the_same_data, variant

__all__ = [
    "BLOCK_SETTINGS",
    "CHANGEABLE",
    "Config",
    "Evaluation",
    "Execution",
    "Output",
    "changes",
    "describe_preset",
    "json_schema",
    "load",
    "on_the_same_data",
    "paper_of",
    "presets",
    "reload",
    "resolve",
    "variant",
    "with_overrides",
    "with_paper",
]

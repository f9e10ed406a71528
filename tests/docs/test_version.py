"""One version everywhere, and a changelog that has it."""

from __future__ import annotations

import re

import rayfl
from tests.docs.blocks import ROOT


def test_all_files_name_the_same_version() -> None:
    (project,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    (citation,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert project == citation == rayfl.__version__ == released[0]

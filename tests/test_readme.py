"""The README: short, its methods are all there are, its links and numbers hold. tests/docs runs its code."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from rayfl.algorithms import ALGORITHMS
from rayfl.api import run
from rayfl.config import variant
from tests.docs.blocks import INLINE, ROOT

TEXT = (ROOT / "README.md").read_text()


def test_the_readme_is_a_page() -> None:
    assert len(TEXT.encode()) <= 6_000


def test_the_readme_names_every_method() -> None:
    (table,) = re.findall(r"^\| clients belong together by .*?\n\n", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`([a-z_]+)`", table)) == set(ALGORITHMS.own)


def test_the_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)(?:#([^)]+))?\)", TEXT)
    assert len(links) > 10
    for path, anchor in links:
        text = (ROOT / path).read_text()
        headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, f"{path}#{anchor}"


def test_the_picture_of_the_readme_is_what_its_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs" / "generate"), *sys.path])
    import pictures

    assert (ROOT / "docs" / "pictures" / "overview.svg").read_text() == pictures.overview().svg()


@pytest.mark.slow
def test_the_numbers_of_the_readme_are_what_a_run_prints(tmp_path: Path) -> None:
    rows = dict(re.findall(r"^│(\w+) *│.*?│ *[\d.–]+│ *([\d.]+)", TEXT, flags=re.MULTILINE))
    assert set(rows) == {"mt_hfl", "fedavg", "solo"}
    for method, printed in rows.items():
        config = variant("digits-demo", [*INLINE, f"output.root={tmp_path}"], method)
        assert abs(run(config).summary["accuracy_mean"] - float(printed)) < 1.0

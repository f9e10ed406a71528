"""The pages of the documentation and the READMEs: code blocks run, the site builds without a warning."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from rayfl.study import prepare, read
from tests.docs.blocks import DOCS, INLINE, ROOT, Page, blocks, forgotten, pages, rayfl


def _with_blocks(when: str) -> list[Path]:
    return [
        path
        for path in pages()
        if any(b.when == when and b.language != "text" for b in blocks(path.read_text()))
    ]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the examples, in which a page's commands are run."""
    shutil.copytree(ROOT / "examples", tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "200")
    with forgotten():
        yield tmp_path / "here"


@pytest.mark.parametrize("path", _with_blocks("always"), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_code_blocks_of_a_page_run(path: Path) -> None:
    assert Page(path.read_text()).run() > 0


def test_the_method_of_the_guide_clusters_after_its_warm_up() -> None:
    page = (DOCS / "your" / "method.md").read_text()
    (code,) = [b.code for b in blocks(page) if b.title == "late_clustering.py"]
    Path("late_clustering.py").write_text(code)
    changes = ["algorithm=late_clustering", "algorithm.warmup=2", "rounds=4", "training.epochs=1", *INLINE]
    rayfl(["--plugin", "late_clustering.py", "run", "digits-demo", *changes])
    (rounds,) = Path("runs").glob("*/rounds.csv")
    assert pd.read_csv(rounds).clusters.tolist() == [1, 1, 3, 3]


def test_the_study_of_the_guide_is_as_large_as_it_looks() -> None:
    (code,) = [b.code for b in blocks((DOCS / "studies.md").read_text()) if b.title == "who-profits.yaml"]
    Path("who-profits.yaml").write_text(code)
    prepared = prepare(read(Path("who-profits.yaml")), check_data=False)
    assert (len(prepared.runs), len(prepared.candidates)) == (3 * 3 * 5, 3 * 3)


@pytest.mark.parametrize("path", sorted((DOCS / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(DOCS / "generate"), *sys.path])
    import notebook_pages

    notebook = notebook_pages.read(path)
    kept = [len(cell.get("outputs", [])) for cell in notebook["cells"]]
    notebook_pages.execute(
        notebook, faster={"rounds=10": "rounds=2", "rounds=12": "rounds=3", "rounds=6": "rounds=2"}
    )
    assert kept == [len(cell.get("outputs", [])) for cell in notebook["cells"]]


@pytest.mark.slow
@pytest.mark.parametrize("path", _with_blocks("slow"), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_slow_code_blocks_of_a_page_run(path: Path) -> None:
    assert Page(path.read_text(), slow=True).run() > 0


def test_a_block_that_fails_is_found(folder: Path) -> None:
    for bad in ("```python\n1 / 0\n```", "```bash\nrayfl rum digits-demo\n```", "```yaml\nrouns: 3\n```"):
        with pytest.raises(BaseException, match=r"zero|rum|rouns"):
            Page(bad).run()


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs mkdocs-material (the docs extra)")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        [*command, "-d", str(tmp_path / "site")], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "site" / "methods" / "pacfl" / "index.html").is_file()

"""What MkDocs runs while it builds the site: generated pages, pictures, links into the repository."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]
import method_pages  # noqa: E402
import notebook_pages  # noqa: E402
import pictures  # noqa: E402
import reference  # noqa: E402

REPOSITORY = "https://github.com/rayfl/rayfl/blob/main"
log = logging.getLogger("mkdocs.plugins.rayfl")

COPIED = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Files of the repository that are pages, too, and under which name."""


def generated() -> Iterator[tuple[str, str]]:
    """The pages and pictures that are made of the code, by their path in ``docs``."""
    for name in ("settings", "parts", "cli", "python", "contract"):
        yield f"reference/{name}.md", getattr(reference, name)()
    yield from method_pages.pages()
    yield from notebook_pages.pages()
    for name, draw in pictures.PICTURES.items():
        if name != "overview":
            yield f"pictures/{name}.svg", draw().svg()
    for source, page in COPIED.items():
        yield page, (ROOT / source).read_text(encoding="utf-8")


def on_config(config: Any) -> Any:
    """Put the generated pages into the navigation."""
    for section in config.nav:
        if "Methods" in section:
            section["Methods"] += [
                {name: f"methods/{name}.md"} for group in method_pages.groups().values() for name in group
            ]
        if "Start" in section:
            section["Start"] += [{title: path} for title, path in notebook_pages.titles()]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for path, text in generated():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """``[text](repo:path)`` points into the repository; so do the links of the files that are copied."""
    source = page.file.src_uri

    def into_repository(match: re.Match[str]) -> str:
        path = match[1]
        if not (ROOT / path.split("#")[0]).exists():
            log.warning("%s: the repository has no %s", source, path)
        return f"]({REPOSITORY}/{path})"

    if source in COPIED.values():
        for name, to in COPIED.items():
            markdown = markdown.replace(f"]({name})", f"]({to})")
        markdown = re.sub(r"\]\(docs/([^)]+)\)", r"](\1)", markdown)
        markdown = re.sub(r"\]\((?!https?:|#|repo:)([^)]+)\)", _of_copy, markdown)
    return re.sub(r"\]\(repo:([^)]+)\)", into_repository, markdown)


def _of_copy(match: re.Match[str]) -> str:
    """A link of a copied file: to a page, or else into the repository."""
    path = match[1].split("#")[0]
    is_page = (
        path in COPIED.values()
        or (HERE.parent / path).is_file()
        or path.startswith(("methods/", "reference/"))
    )
    return match[0] if is_page else f"](repo:{match[1]})"

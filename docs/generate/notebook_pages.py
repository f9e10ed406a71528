"""Pages made of the notebooks: text and code as they are, with the output that is stored in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"


def pages() -> Iterator[tuple[str, str]]:
    """A page for each notebook, by its path in ``docs``."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        yield f"notebooks/{path.stem}.md", page(path)


def titles() -> Iterator[tuple[str, str]]:
    """Their titles and pages."""
    for path, text in pages():
        yield text.split("\n", 1)[0].lstrip("# "), path


def page(path: Path) -> str:
    """A notebook as Markdown."""
    lines = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            lines += [source, ""]
        else:
            lines += ["```python", source, "```", "", *_outputs(cell)]
    first, *rest = lines
    note = f"*This page is the notebook [{path.name}](repo:docs/notebooks/{path.name}).*"
    return "\n".join([first, "", note, "", *rest]) + "\n"


def _outputs(cell: Any) -> Iterator[str]:
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        if "image/svg+xml" in data:
            yield from ("".join(data["image/svg+xml"]), "")
        elif "image/png" in data:
            png = "".join(data["image/png"]).replace("\n", "")
            yield from (f"![output](data:image/png;base64,{png})", "")
        else:
            text = "".join(output.get("text") or data.get("text/plain") or ())
            if text:
                yield from ("```text", text.rstrip(), "```", "")

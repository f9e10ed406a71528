"""The notebooks: run their code, and make pages of them.

::

    python docs/generate/notebook_pages.py      # run all notebooks in place and keep what they show

As in a notebook, what the last line of a cell gives is shown, and ``%%writefile name`` writes a file.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
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
    lines: list[str] = []
    for cell in read(path)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            title, _, rest = source.partition("\n") if not lines else ("", "", source)
            note = f"*This page is the notebook [{path.name}](repo:docs/notebooks/{path.name}).*"
            lines += [title, "", note, "", rest, ""] if title else [rest, ""]
        else:
            lines += ["```python", source, "```", "", *_shown(cell["outputs"])]
    return "\n".join(lines) + "\n"


def _shown(outputs: list[dict[str, Any]]) -> Iterator[str]:
    for output in outputs:
        data = output.get("data", {})
        if "image/png" in data:
            yield from (f"![output](data:image/png;base64,{''.join(data['image/png']).strip()})", "")
        else:
            text = "".join(output.get("text") or data.get("text/plain") or ())
            yield from ("```text", text.rstrip(), "```", "")


def read(path: Path) -> dict[str, Any]:
    """A notebook (nbformat 4)."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def execute(notebook: dict[str, Any], faster: Mapping[str, str] = MappingProxyType({})) -> None:
    """Run the code cells in the current folder and put what they show into the notebook.

    Args:
        notebook: is changed.
        faster: texts of the code and what tests run in their place.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cell for cell in notebook["cells"] if cell["cell_type"] == "code"):
        source = "".join(cell["source"])
        for text, other in faster.items():
            source = source.replace(text, other)
        cell["execution_count"], cell["outputs"] = number + 1, []
        if source.startswith("%%writefile "):
            first, _, rest = source.partition("\n")
            Path(first.split()[1]).write_text(rest + "\n", encoding="utf-8")
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            value = _run(source, names)
        if printed.getvalue():
            cell["outputs"] += [{"output_type": "stream", "name": "stdout", "text": printed.getvalue()}]
        if value is not None:
            result = {"output_type": "execute_result", "execution_count": number + 1, "metadata": {}}
            cell["outputs"] += [{**result, "data": _data(value)}]


def _run(source: str, names: dict[str, Any]) -> Any:
    """Execute a cell; the value of its last line if that is an expression."""
    tree = ast.parse(source)
    last = tree.body[-1]
    value = isinstance(last, ast.Expr)
    exec(compile(ast.Module(tree.body[: -1 if value else None], []), "cell", "exec"), names)
    return (
        eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        if isinstance(last, ast.Expr)
        else None
    )


def _data(value: Any) -> dict[str, Any]:
    if hasattr(value, "savefig"):
        buffer = io.BytesIO()
        value.savefig(buffer, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
        return {"image/png": base64.b64encode(buffer.getvalue()).decode(), "text/plain": "a figure"}
    return {"text/plain": str(value)}


def main() -> None:
    """Run all notebooks and keep what they show."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook, before = read(path), Path.cwd()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            sys.path.append(folder)
            execute(notebook)
            os.chdir(before)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()

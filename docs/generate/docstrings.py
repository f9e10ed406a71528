"""Docstrings as Markdown: Google sections, reStructuredText roles, literals."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_SECTION = re.compile(r"^([A-Z][A-Za-z ]*):$", re.MULTILINE)
_ANNOTATION = re.compile(r"(: |-> )'([^']*)'")
"""An annotation that is not evaluated, which Python shows in quotes."""
_ENTRY = re.compile(r"^(\*{0,2}[\w`.*][^:\n]*): +(.*)$", re.DOTALL)


@dataclass(frozen=True)
class Docstring:
    """A docstring in parts.

    Attributes:
        text: what stands before the first section, as Markdown.
        sections: what the others hold, by their titles (``Args``, ``Returns``, ``Cost``...), not yet
            converted and without their indentation.
    """

    text: str
    sections: dict[str, str]

    @classmethod
    def of(cls, thing: object) -> Docstring:
        """The docstring of a class, function or module; empty if it has none of its own."""
        raw = inspect.getdoc(thing) or ""
        pieces = _SECTION.split(raw)
        named = dict(zip(pieces[1::2], pieces[2::2], strict=True))
        sections = {title: inspect.cleandoc(body) for title, body in named.items()}
        return cls(markdown(pieces[0].strip()), sections)

    @property
    def first(self) -> str:
        """The first paragraph."""
        return self.text.split("\n\n", 1)[0]


def markdown(text: str) -> str:
    """Docstring text with roles and double backticks replaced, and ``::`` blocks fenced."""
    text = re.sub(
        r":[a-z]+:`~?([^`<]+?)`", lambda m: f"`{m[1].split('.')[-1] if '~' in m[0] else m[1]}`", text
    )
    text = text.replace("``", "`")
    lines: list[str] = []
    fenced = False
    for line in text.split("\n"):
        if fenced and line.strip() and not line.startswith("    "):
            while lines[-1] == "":
                lines.pop()
            lines += ["```", ""]
            fenced = False
        if line.endswith("::"):
            lines += [line[:-1] if line.strip() != "::" else "", "", "```text"]
            fenced = True
        elif not (fenced and not line.strip() and lines[-1] == "```text"):
            lines.append(line[4:] if fenced else line)
    return "\n".join([*lines, "```"] if fenced else lines)


def entries(section: str) -> Iterator[tuple[str, str]]:
    """Names and texts of a section such as ``Args``: ``name: text`` with deeper lines continuing."""
    for part in re.split(r"\n(?=\S)", section):
        found = _ENTRY.match(part)
        yield (
            (found[1], " ".join(markdown(found[2]).split()))
            if found
            else ("", " ".join(markdown(part).split()))
        )


def signature(function: Callable[..., Any]) -> str:
    """How a function is called, one line a parameter where one line would be too long."""
    try:
        found = inspect.signature(function)
    except ValueError:
        return "(...)"
    kept = [p for name, p in found.parameters.items() if name not in ("self", "cls")]
    whole = _ANNOTATION.sub(r"\1\2", str(found.replace(parameters=kept)))
    if len(whole) < 80:
        return whole
    inner = "".join(_ANNOTATION.sub(r"\1\2", f"    {parameter},\n") for parameter in kept)
    returned = "" if found.return_annotation is inspect.Signature.empty else f" -> {found.return_annotation}"
    return f"(\n{inner}){returned}"

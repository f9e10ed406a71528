"""What a page says: its tables as text, and the data of its charts."""

from __future__ import annotations

import html
import json
import re
from typing import Any


def rows(page: str) -> list[list[str]]:
    """The text of every table row that is part of the page."""
    return [
        [html.unescape(re.sub(r"<[^>]*>", "", cell)) for cell in re.findall(r"<t[dh][^>]*>.*?</t[dh]>", row)]
        for row in re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    ]


def titles(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


def values(page: str) -> dict[str, Any]:
    """The page's data: ``data``, ``charts`` and ``tables``."""
    [text] = re.findall(r'<script type="application/json" id="page-data">(.*?)</script>', page, re.DOTALL)
    found: dict[str, Any] = json.loads(text)
    return found


def charts(page: str) -> dict[str, dict[str, Any]]:
    """The charts by the titles of their sections; of several the first."""
    found: dict[str, dict[str, Any]] = {}
    for section in re.findall(r"<section.*?</section>", page, re.DOTALL):
        for number in re.findall(r'data-chart="(\d+)"', section):
            found.setdefault(titles(section)[0], values(page)["charts"][int(number)])
    return found


def choices(chart: dict[str, Any], label: str) -> dict[str, Any]:
    """What each choice of a selector sets."""
    [selector] = [each for each in chart["selectors"] if each["label"] == label]
    return {choice["label"]: choice["set"] for choice in selector["choices"]}


def text(page: str) -> str:
    """What is read on the page: no tags, scripts or styles."""
    without = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", "", without))

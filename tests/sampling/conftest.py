"""Small whole runs on digits, inline."""

from __future__ import annotations

from tests.ordering.conftest import run  # noqa: F401 (a fixture)

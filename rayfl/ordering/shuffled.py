"""All samples once an epoch, shuffled: what federated averaging does."""

from __future__ import annotations

from typing import Literal

from rayfl.ordering.base import Ordering


class Shuffled(Ordering):
    """All samples once in every epoch, in a new random order (vanilla)."""

    name: Literal["shuffled"] = "shuffled"

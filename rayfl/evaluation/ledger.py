"""What a run would have sent over the network, transfer by transfer."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import pandas as pd

Tier = Literal["client_lps", "lps_gps"]
Direction = Literal["up", "down"]
COLUMNS = ("round", "tier", "direction", "kind", "bytes")


@dataclass(frozen=True)
class Transfer:
    """Bytes that were sent in one round over one tier in one direction.

    Attributes:
        round: the round, 0-based; -1 for what is sent before the first.
        tier: between clients and their local parameter server, or between those and the global one.
        direction: up (towards the global server) or down.
        kind: what was sent: ``model``, ``signature``, ``prediction``, ...
        bytes: the number of bytes, over all senders.

    Raises:
        ValueError: for an unknown tier or direction, or negative bytes.
    """

    round: int
    tier: Tier
    direction: Direction
    kind: str
    bytes: int

    def __post_init__(self) -> None:
        if self.tier not in get_args(Tier) or self.direction not in get_args(Direction):
            raise ValueError(f"no such tier or direction: {self.tier}, {self.direction}")
        if self.bytes < 0:
            raise ValueError(f"{self.bytes} bytes")


@dataclass(frozen=True)
class Ledger:
    """All transfers so far; immutable, grows by :meth:`add`.

    Attributes:
        transfers: by ascending round, so that those of one round are found quickly.
    """

    transfers: tuple[Transfer, ...] = ()

    def add(self, *transfers: Transfer) -> Ledger:
        """The ledger with more transfers (a round's in one call)."""
        whole = self.transfers + transfers
        if any(b.round < a.round for a, b in pairwise((*self.transfers[-1:], *transfers))):
            whole = tuple(sorted(whole, key=_round))
        return Ledger(whole)

    def total(
        self,
        *,
        round: int | None = None,
        tier: Tier | None = None,
        direction: Direction | None = None,
        kind: str | None = None,
    ) -> int:
        """Total bytes of the transfers that match all given attributes; of all transfers if none is given."""
        some = self.transfers
        if round is not None:
            some = some[bisect_left(some, round, key=_round) : bisect_right(some, round, key=_round)]
        return sum(
            transfer.bytes
            for transfer in some
            if (tier is None or transfer.tier == tier)
            and (direction is None or transfer.direction == direction)
            and (kind is None or transfer.kind == kind)
        )

    def rows(self, after: int | None = None, upto: int | None = None) -> list[dict[str, Any]]:
        """The rows of ``communication.csv``: one per (round, tier, direction, kind), summed and sorted.

        Args:
            after: only of later rounds.
            upto: only of rounds up to this one.
        """
        first = 0 if after is None else bisect_right(self.transfers, after, key=_round)
        last = len(self.transfers) if upto is None else bisect_right(self.transfers, upto, key=_round)
        sums: dict[tuple[int, str, str, str], int] = {}
        for each in self.transfers[first:last]:
            key = each.round, each.tier, each.direction, each.kind
            sums[key] = sums.get(key, 0) + each.bytes
        return [dict(zip(COLUMNS, (*key, sums[key]), strict=True)) for key in sorted(sums)]

    def to_frame(self) -> pd.DataFrame:
        """The table of ``communication.csv``."""
        import pandas as pd

        return pd.DataFrame(self.rows(), columns=list(COLUMNS)).astype({"round": "int64", "bytes": "int64"})

    @classmethod
    def from_frame(cls, frame: pd.DataFrame) -> Ledger:
        """The ledger of a table with the columns of :meth:`to_frame`."""
        rows: Iterable[dict[str, object]] = frame[list(COLUMNS)].to_dict("records")  # type: ignore[assignment]
        return cls().add(*(Transfer(**row) for row in rows))  # type: ignore[arg-type]


def _round(transfer: Transfer) -> int:
    return transfer.round

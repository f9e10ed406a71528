"""What a run would have sent over the network, transfer by transfer."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

from typing_extensions import override

if TYPE_CHECKING:
    import pandas as pd

Tier = Literal["client_lps", "lps_gps"]
Direction = Literal["up", "down"]
COLUMNS = ("round", "tier", "direction", "kind", "bytes")


@dataclass(frozen=True)
class Transfer:
    """Bytes that were sent in one round over one tier in one direction.

    Attributes:
        round: the round, 0-based; what is sent before the first counts in round 0.
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


class Ledger:
    """All transfers so far; immutable, grows by :meth:`add`.

    Ledgers made by :meth:`add` share one list, and each stores how many entries of it are its own. Adding to
    the newest ledger appends to the list, so the cost of a call does not grow with earlier transfers.

    Args:
        transfers: by ascending round.
    """

    def __init__(self, transfers: Iterable[Transfer] = ()) -> None:
        self._shared = list(transfers)
        self._length = len(self._shared)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """A copy of the transfers, by ascending round."""
        return tuple(self._shared[: self._length])

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self.transfers == other.transfers

    __hash__ = None  # type: ignore[assignment]

    @override
    def __repr__(self) -> str:
        return f"Ledger({self.transfers!r})"

    def add(self, *transfers: Transfer) -> Ledger:
        """The ledger with more transfers; pass all transfers of a round in one call."""
        last = self._shared[self._length - 1 : self._length]
        if any(b.round < a.round for a, b in pairwise((*last, *transfers))):
            return Ledger(sorted((*self.transfers, *transfers), key=_round_of))
        if len(self._shared) > self._length:  # another ledger was made from this one
            return Ledger((*self.transfers, *transfers))
        self._shared.extend(transfers)
        grown = Ledger()
        grown._shared, grown._length = self._shared, len(self._shared)
        return grown

    def total(
        self,
        *,
        round: int | None = None,
        tier: Tier | None = None,
        direction: Direction | None = None,
        kind: str | None = None,
    ) -> int:
        """Total bytes of the transfers that match all given attributes; of all transfers if none is given."""
        first, end = 0, self._length
        if round is not None:
            first = bisect_left(self._shared, round, hi=end, key=_round_of)
            end = self._end_of_round(round)
        return sum(
            transfer.bytes
            for transfer in self._shared[first:end]
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
        first = 0 if after is None else self._end_of_round(after)
        last = self._length if upto is None else self._end_of_round(upto)
        sums: dict[tuple[int, str, str, str], int] = {}
        for transfer in self._shared[first:last]:
            key = transfer.round, transfer.tier, transfer.direction, transfer.kind
            sums[key] = sums.get(key, 0) + transfer.bytes
        return [dict(zip(COLUMNS, (*key, sums[key]), strict=True)) for key in sorted(sums)]

    def _end_of_round(self, round: int) -> int:
        """Where the transfers of later rounds begin."""
        return bisect_right(self._shared, round, hi=self._length, key=_round_of)

    def to_frame(self) -> pd.DataFrame:
        """The table of ``communication.csv``."""
        import pandas as pd

        return pd.DataFrame(self.rows(), columns=list(COLUMNS)).astype({"round": "int64", "bytes": "int64"})

    @classmethod
    def from_frame(cls, frame: pd.DataFrame) -> Ledger:
        """The ledger of a table with the columns of :meth:`to_frame`."""
        rows: Iterable[dict[str, object]] = frame[list(COLUMNS)].to_dict("records")  # type: ignore[assignment]
        return cls().add(*(Transfer(**row) for row in rows))  # type: ignore[arg-type]


def _round_of(transfer: Transfer) -> int:
    return transfer.round

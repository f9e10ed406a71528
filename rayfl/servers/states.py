"""Client state between rounds: where the row of each client is stored, not the rows themselves.

A block returns the states of its clients as one object, owned by the driver, so that it outlives the worker.
The driver keeps (object, row) for every client. When most rows of the objects are out of date, the objects
with the fewest current rows are repacked, so that memory stays proportional to the number of clients with a
state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayfl.backend import Backend, Key, Ref

_PACK = 256
"""Clients in one object after packing."""

_HELD = 1.5
"""Rows that are held per row in use, after packing."""


class Rows:
    """Rows ``(n, S)`` that are stored elsewhere and read a few at a time, by slicing as with an array.

    Args:
        count: n.
        read: returns the rows of a range.
    """

    def __init__(self, count: int, read: Callable[[int, int], NDArray[np.float32]]) -> None:
        self._count, self._read = count, read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> NDArray[np.float32]:
        start, stop, _ = part.indices(self._count)
        return self._read(start, stop)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)


class ClientStates:
    """The state rows of all clients that have one; empty for methods without client state."""

    def __init__(self) -> None:
        self._objects: dict[int, Ref] = {}
        self._alive: dict[int, int] = {}  # object -> rows that are still the state of a client
        self._rows: dict[int, int] = {}  # object -> rows that it holds
        # For each client: object (-1: none) and row
        self._where: NDArray[np.int32] = np.zeros((2, 0), np.int32)
        self._count = 0
        self._shared = False  # whether a copy shares the array
        self._next = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, client: int) -> bool:
        return client < self._where.shape[1] and bool(self._where[0, client] >= 0)

    @property
    def clients(self) -> NDArray[np.int64]:
        """The clients that have a state, ascending ``(n,)``."""
        return np.flatnonzero(self._where[0] >= 0)

    def copy(self) -> ClientStates:
        """A copy that later updates of this one do not change; objects and arrays are shared."""
        other = ClientStates()
        other._objects, other._alive = dict(self._objects), dict(self._alive)
        other._rows, other._next = dict(self._rows), self._next
        other._where, other._count = self._where, self._count
        other._shared = self._shared = True
        return other

    def update(
        self,
        clients: Sequence[int] | NDArray[np.int64],
        ref: Ref,
        valid: Sequence[bool] | NDArray[np.bool_] | None = None,
    ) -> None:
        """Make row ``r`` of the object ``(n, S)`` the state of ``clients[r]``, where ``valid`` ``(n,)``
        (default: all).
        """
        who = np.asarray(clients, np.int64)
        rows = np.arange(len(who)) if valid is None else np.flatnonzero(valid)
        if not len(rows):
            return
        who = who[rows]
        number, self._next = self._next, self._next + 1
        self._make_room(int(who.max()) + 1)
        before = self._where[0, who]
        self._where[0, who], self._where[1, who] = number, rows
        self._objects[number], self._alive[number], self._rows[number] = ref, len(who), len(clients)
        old, counts = np.unique(before[before >= 0], return_counts=True)
        self._count += len(who) - int(counts.sum())
        for each, count in zip(old.tolist(), counts.tolist(), strict=True):
            self._alive[each] -= count
            if self._alive[each] == 0:
                del self._objects[each], self._alive[each], self._rows[each]

    def _make_room(self, clients: int) -> None:
        """Make room for this many clients, in an array that no copy shares."""
        here = self._where.shape[1]
        if clients > here:
            grown = np.full((2, max(clients, 2 * here)), -1, np.int32)
            grown[:, :here] = self._where
            self._where, self._shared = grown, False
        elif self._shared:
            self._where, self._shared = self._where.copy(), False

    def locate(
        self, clients: Sequence[int] | NDArray[np.int64]
    ) -> tuple[dict[Key, Ref], tuple[tuple[int, int] | None, ...]]:
        """The objects ``("state", number)`` that hold the states of ``clients`` ``(n,)``, and for each client
        (number of its object, row).
        """
        who = np.asarray(clients, np.int64)
        numbers, rows = np.full(len(who), -1), np.zeros(len(who), np.int64)
        known = who < self._where.shape[1]
        numbers[known], rows[known] = self._where[:, who[known]]
        found = tuple(
            None if number < 0 else (number, row)
            for number, row in zip(numbers.tolist(), rows.tolist(), strict=True)
        )
        used = dict.fromkeys(at[0] for at in found if at is not None)
        return {("state", number): self._objects[number] for number in used}, found

    def pack(self, backend: Backend) -> None:
        """If fewer than half of the held rows are still in use, repack the objects with the fewest of them.

        These come first because the fewest rows must be copied to free them.
        """
        held, used = sum(self._rows.values()), self._count
        if held <= 2 * used + _PACK:
            return
        emptiest = sorted(
            self._objects, key=lambda number: (self._alive[number] / self._rows[number], number)
        )
        chosen: set[int] = set()
        for number in emptiest:
            if held <= _HELD * used:
                break
            held -= self._rows[number] - self._alive[number]
            chosen.add(number)
        clients = np.flatnonzero(np.isin(self._where[0], list(chosen)))
        for start in range(0, len(clients), _PACK):
            part = clients[start : start + _PACK]
            self.update(part, self.packed(backend, part))

    def packed(self, backend: Backend, clients: Sequence[int] | NDArray[np.int64]) -> Ref:
        """The rows of some clients as one array ``(n, S)``, by reference."""
        objects, rows = self.locate(clients)
        return backend.call(pack_rows, tuple(objects), rows, *objects.values())

    def fetch(self, backend: Backend) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """All states for a checkpoint: client ids ``(n,)`` ascending and rows ``(n, S)``."""
        clients, rows = self.rows(backend)
        return clients, rows[:]

    def rows(self, backend: Backend) -> tuple[NDArray[np.int64], Rows]:
        """The same, without holding all rows in this process at once."""
        clients = self.clients

        def read(start: int, stop: int) -> NDArray[np.float32]:
            objects, rows = self.locate(clients[start:stop])
            return pack_rows(tuple(objects), rows, *backend.get(list(objects.values())))

        return clients, Rows(len(clients), read)

    @classmethod
    def restore(
        cls, backend: Backend, clients: NDArray[np.int64], rows: NDArray[np.float32] | Rows
    ) -> ClientStates:
        """States from a checkpoint: ids ``(n,)`` and rows ``(n, S)``."""
        states = cls()
        for start in range(0, len(clients), _PACK):
            part = slice(start, start + _PACK)
            states.update(clients[part], backend.put(np.ascontiguousarray(rows[part])))
        return states


def pack_rows(
    names: Sequence[Key], rows: Sequence[tuple[int, int] | None], *objects: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Rows of the named objects, each given as (number of its object, row), as one array ``(n, S)``."""
    if not rows:
        return np.empty((0, 0), np.float32)
    named = dict(zip(names, objects, strict=True))
    return np.stack([named["state", at[0]][at[1]] for at in rows if at is not None])

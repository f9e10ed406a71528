"""Client state between rounds: where the row of each client is stored, not the rows themselves.

A block returns the states of its clients as one object, owned by the driver, so that it outlives the worker.
The driver keeps (object, row) for every client. When most rows of the objects are out of date, the objects
with the fewest current rows are repacked, so that memory stays proportional to the number of clients with a
state.

If rows need too much memory, or would make checkpoints slow, they are written to files
(:mod:`rayfl.servers.shards`), each row once. With the inline backend the files then replace the objects.
Ray's object store spills to disk itself, so there only checkpoints refer to the files.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayfl.backend import Backend, Key, Ref
from rayfl.files import OnDisk
from rayfl.servers.shards import SIZE, WHOLE, Shard, Shards, Stored

PACK = 256
"""Clients in one object after packing, at most."""

_HELD_PER_ROW = 2
"""After packing, at most this many rows are held per row in use."""

SLACK = 32
"""Packing begins when the rows held exceed that limit by one per this many rows in use, so that few rows are
copied each time."""

_SMALL_FILE_BYTES = 1 << 20
"""Files of fewer bytes are small; more than :data:`_MAX_SMALL_FILES` of them are merged."""

_MAX_SMALL_FILES = 64


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

    def __getitem__(self, part: int | slice) -> NDArray[np.float32]:
        if not isinstance(part, slice):
            place = range(self._count)[part]
            row: NDArray[np.float32] = self._read(place, place + 1)[0]
            return row
        start, stop, _ = part.indices(self._count)
        return self._read(start, stop)

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        return (self[place] for place in range(self._count))

    def pieces(self) -> Iterator[NDArray[np.float32]]:
        """All rows, some megabytes at a time."""
        step = max(1, SIZE // max(1, self[:1].nbytes)) if self._count else 1
        return (self[start : start + step] for start in range(0, self._count, step))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)


class ClientStates:
    """The state rows of all clients that have one; empty for methods without client state.

    Args:
        shards: where to write rows that need too much memory; None: all rows stay in memory.
    """

    def __init__(self, shards: Shards | None = None) -> None:
        self._shards = shards
        self._files: dict[int, Shard] = {}  # object -> the file that also contains it
        self._width = 0  # S, once it is known
        self._objects: dict[int, Ref] = {}
        self._used: dict[int, int] = {}  # object -> rows that are still the state of a client
        self._held: dict[int, int] = {}  # object -> rows that it holds
        # For each client: object (-1: none) and row
        self._locations: NDArray[np.int32] = np.zeros((2, 0), np.int32)
        self._count = 0
        self._array_shared = False  # whether a copy shares the array
        self._next_number = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, client: int) -> bool:
        return client < self._locations.shape[1] and bool(self._locations[0, client] >= 0)

    @property
    def clients(self) -> NDArray[np.int64]:
        """The clients that have a state, ascending ``(n,)``."""
        return np.flatnonzero(self._locations[0] >= 0)

    def copy(self) -> ClientStates:
        """A copy that later updates of this one do not change; objects and arrays are shared."""
        other = ClientStates(self._shards)
        other._files, other._width = dict(self._files), self._width
        other._objects, other._used = dict(self._objects), dict(self._used)
        other._held, other._next_number = dict(self._held), self._next_number
        other._locations, other._count = self._locations, self._count
        other._array_shared = self._array_shared = True
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
        number, self._next_number = self._next_number, self._next_number + 1
        self._make_room(int(who.max()) + 1)
        former = self._locations[0, who]
        self._locations[0, who], self._locations[1, who] = number, rows
        self._objects[number], self._used[number], self._held[number] = ref, len(who), len(clients)
        former_numbers, counts = np.unique(former[former >= 0], return_counts=True)
        self._count += len(who) - int(counts.sum())
        for former_number, count in zip(former_numbers.tolist(), counts.tolist(), strict=True):
            self._used[former_number] -= count
            if self._used[former_number] == 0:
                del self._objects[former_number], self._used[former_number], self._held[former_number]
                self._files.pop(former_number, None)

    def _make_room(self, clients: int) -> None:
        """Make room for this many clients, in an array that no copy shares."""
        capacity = self._locations.shape[1]
        if clients > capacity:
            grown = np.full((2, max(clients, 2 * capacity)), -1, np.int32)
            grown[:, :capacity] = self._locations
            self._locations, self._array_shared = grown, False
        elif self._array_shared:
            self._locations, self._array_shared = self._locations.copy(), False

    def locate(
        self, clients: Sequence[int] | NDArray[np.int64]
    ) -> tuple[dict[Key, Ref], tuple[tuple[int, int] | None, ...]]:
        """The objects ``("state", number)`` that hold the states of ``clients`` ``(n,)``, and for each client
        (number of its object, row).
        """
        who = np.asarray(clients, np.int64)
        numbers, rows = np.full(len(who), -1), np.zeros(len(who), np.int64)
        in_table = who < self._locations.shape[1]
        numbers[in_table], rows[in_table] = self._locations[:, who[in_table]]
        locations = tuple(
            None if number < 0 else (number, row)
            for number, row in zip(numbers.tolist(), rows.tolist(), strict=True)
        )
        used = dict.fromkeys(location[0] for location in locations if location is not None)
        return {("state", number): self._objects[number] for number in used}, locations

    def pack(self, backend: Backend) -> None:
        """If clearly fewer than half of the held rows are in use, repack objects until half of them are.

        Objects with the smallest share of rows in use come first: little is copied to free much.

        Raises:
            Damaged, DiskError: if a file to be replaced cannot be read, or a new one cannot be written.
        """
        held, used = sum(self._held.values()), self._count
        if held <= _HELD_PER_ROW * used + max(PACK, used // SLACK):
            return
        emptiest = sorted(self._objects, key=lambda number: (self._used[number] / self._held[number], number))
        chosen: set[int] = set()
        for number in emptiest:
            if held <= _HELD_PER_ROW * used:
                break
            held -= self._held[number] - self._used[number]
            chosen.add(number)
        for part in self._client_parts(backend, chosen, PACK):
            self.update(part, self.packed(backend, part))
            self.spill(backend)

    def _client_parts(
        self, backend: Backend, numbers: Iterable[int], limit: int
    ) -> Iterator[NDArray[np.int64]]:
        """Yield the clients ``(n,)`` of some objects; ``limit``, or a few megabytes of rows, at a time."""
        numbers = list(numbers)
        clients = np.flatnonzero(np.isin(self._locations[0], numbers))
        if not len(clients):
            return
        for number in numbers:
            if number in self._files and isinstance(self._objects[number], OnDisk):
                assert self._shards is not None
                self._shards.verify(self._files[number])  # otherwise damaged rows would get a valid hash
        if not self._width:
            self._width = int(backend.get(self.packed(backend, clients[:1])).shape[1])
        step = min(limit, max(1, SIZE // (4 * self._width)))
        for start in range(0, len(clients), step):
            yield clients[start : start + step]

    def spill(self, backend: Backend) -> None:
        """Write rows that are only in the memory of this process to files, if they exceed the budget.

        Raises:
            DiskError
        """
        if self._shards is not None:
            loose = self._objects.keys() - self._files.keys()
            if sum(backend.held(self._objects[number]) for number in loose) > self._shards.budget:
                self._write_loose_rows(backend)

    def _write_loose_rows(self, backend: Backend) -> None:
        """Write all rows that are in no file yet to files, and merge small files if there are many."""
        assert self._shards is not None
        loose = self._objects.keys() - self._files.keys()
        small = [number for number, shard in self._files.items() if shard.bytes < _SMALL_FILE_BYTES]
        if len(small) > _MAX_SMALL_FILES:
            loose |= set(small)
        for part in self._client_parts(backend, loose, len(self._locations[0])):
            rows = self.packed(backend, part)
            shard = self._shards.write(backend.get(rows))
            number = self._next_number
            self.update(part, backend.stored(self._shards.path(shard), rows))
            self._files[number] = shard

    @property
    def names(self) -> set[str]:
        """The names of the files in use."""
        return {shard.name for shard in self._files.values()}

    def packed(self, backend: Backend, clients: Sequence[int] | NDArray[np.int64]) -> Ref:
        """The rows of some clients as one array ``(n, S)``, by reference."""
        objects, rows = self.locate(clients)
        return backend.call(pack_rows, tuple(objects), rows, *objects.values())

    def save(self, backend: Backend) -> tuple[NDArray[np.int64], Rows, Stored | None]:
        """All states for a checkpoint: client ids ``(n,)`` ascending, rows ``(n, S)``, and where the rows are
        if they are in files. Rows that have changed are written to files first.

        Raises:
            DiskError
        """
        clients, rows = self.rows(backend)
        if self._shards is None or not len(clients):
            return clients, rows, None
        if not self._files:
            self._width = self._width or rows[:1].shape[1]
            if 4 * self._width * len(clients) <= min(WHOLE, self._shards.budget):
                return clients, rows, None
        self._write_loose_rows(backend)
        numbers = np.array(sorted(self._files))
        files = tuple(self._files[number] for number in numbers.tolist())
        where = self._locations[:, clients]
        at = np.stack([np.searchsorted(numbers, where[0]), where[1]]).astype(np.int32)
        stored = Stored(self._shards, files, at)
        return clients, Rows(len(clients), stored.read), stored

    def fetch(self, backend: Backend) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """All states: client ids ``(n,)`` ascending and rows ``(n, S)``."""
        clients, rows = self.rows(backend)
        return clients, rows[:]

    def rows(self, backend: Backend) -> tuple[NDArray[np.int64], Rows]:
        """As :meth:`fetch`, without holding all rows in this process at the same time."""
        clients = self.clients

        def read(start: int, stop: int) -> NDArray[np.float32]:
            objects, rows = self.locate(clients[start:stop])
            return pack_rows(tuple(objects), rows, *backend.get(list(objects.values())))

        return clients, Rows(len(clients), read)

    @classmethod
    def restore(
        cls,
        backend: Backend,
        clients: NDArray[np.int64],
        rows: NDArray[np.float32] | Rows,
        stored: Stored | None = None,
        shards: Shards | None = None,
    ) -> ClientStates:
        """States from a checkpoint.

        Args:
            backend: shares the rows.
            clients: ids ``(n,)``.
            rows: ``(n, S)``.
            stored: where the rows are, if they are in files.
            shards: as for the class.
        """
        states = cls(shards or (stored.shards if stored else None))
        if stored is None:
            for start in range(0, len(clients), PACK):
                part = slice(start, start + PACK)
                states.update(clients[part], backend.put(np.ascontiguousarray(rows[part])))
            return states
        order = np.argsort(stored.at[0], kind="stable")
        bounds = np.searchsorted(stored.at[0, order], np.arange(len(stored.files) + 1))
        for shard, (first, last) in zip(stored.files, itertools.pairwise(bounds.tolist()), strict=True):
            positions = order[first:last]
            who, valid = np.zeros(shard.rows, np.int64), np.zeros(shard.rows, np.bool_)
            who[stored.at[1, positions]], valid[stored.at[1, positions]] = clients[positions], True
            if len(positions):
                number = states._next_number
                states.update(who, backend.stored(stored.shards.path(shard)), valid)
                states._files[number] = shard
        return states


def pack_rows(
    names: Sequence[Key], rows: Sequence[tuple[int, int] | None], *objects: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Rows of the named objects, each given as (number of its object, row), as one array ``(n, S)``."""
    if not rows:
        return np.empty((0, 0), np.float32)
    named = dict(zip(names, objects, strict=True))
    return np.stack([named["state", location[0]][location[1]] for location in rows if location is not None])

"""Which samples every client visits in every step, for clients that train together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rayfl.random import orders_of_size
from rayfl.training.work import LocalWork, Visits, check_visits


class StepPlan:
    """The steps of C clients, sorted by decreasing number of steps.

    A step is one forward and backward pass over a batch; in Per-FedAvg it is two passes over two batches. The
    arrays below therefore have one row for each of T passes.

    Args:
        seed, round: keys of the shuffled orders.
        clients: their ids.
        sizes: samples of each client ``(C,)``.
        work: what to do.
        visits: samples of each client's passes in place of the shuffled epochs, see ``Terms.visits``.

    Attributes:
        passes: T, the number of passes of the client with the most.
        totals: steps tau_i of each client ``(C,)``.
        active: how many clients still train in each pass ``(T,)``; they are the first ones.
        counts: samples of each client in each pass ``(T, C)``.
        widths: the most samples of any client in each pass ``(T,)``.
        full: whether all active clients have that many, so that nothing is padding, ``(T,)``.
        places: rows of the samples of all C clients, one after the other, ``(T, C, B)``; 0 for padding.
        weights: ``1 / count`` for samples, 0 for padding, ``(T, C, B)`` float32.
        seen: samples whose loss counts, of each client over all steps ``(C,)``.
        snapshots: after which step each client's model is kept ``(C,)``; 0 for never.

    Raises:
        IndexError: if a client is to visit samples that it does not have.
    """

    def __init__(
        self,
        seed: int,
        round: int,
        clients: Sequence[int] | NDArray[np.integer],
        sizes: NDArray[np.int64],
        work: LocalWork,
        visits: Sequence[Visits] | NDArray[np.intp] | None = None,
    ) -> None:
        self._passes_per_step = work.batches_a_step
        if visits is None:
            self._fill_epochs(seed, round, clients, sizes, work)
        else:
            self._fill_visits(visits, sizes)
        self.widths = self.counts.max(axis=1, initial=0)
        self.active = (self.counts > 0).sum(axis=1)
        self.full = ((self.counts == self.widths[:, None]) | (self.counts == 0)).all(axis=1)
        valid = np.arange(self.places.shape[2]) < self.counts[:, :, None]
        self.weights = valid * (1 / np.maximum(1, self.counts)).astype(np.float32)[:, :, None]
        self.seen = self.counts[self._passes_per_step - 1 :: self._passes_per_step].sum(axis=0)
        self.snapshots = np.minimum(self.totals, work.snapshot_epoch * work.steps_an_epoch(sizes))

    def _fill_epochs(
        self,
        seed: int,
        round: int,
        clients: Sequence[int] | NDArray[np.integer],
        sizes: NDArray[np.int64],
        work: LocalWork,
    ) -> None:
        """Fill in epochs over shuffled samples."""
        epochs = work.epochs
        batch = min(work.batch_size, int(sizes.max(initial=1)))  # arrays are as wide as the data, not as B
        self.totals = work.steps_an_epoch(sizes) * epochs
        self._allocate(batch, len(clients))
        firsts = np.cumsum(sizes) - sizes
        ids = np.asarray(clients)
        for n in np.unique(sizes[sizes > 0]).tolist():  # clients of one size at a time
            same = np.flatnonzero(sizes == n)
            s = -(-n // batch)
            padded = np.zeros((len(same), epochs, s * batch), np.int64)
            orders = orders_of_size(seed, round, ids[same], n, epochs, work.phase)
            padded[:, :, :n] = orders + firsts[same, None, None]
            batches = padded.reshape(len(same), epochs, s, batch)[:, :, :, : self.places.shape[2]]
            ends = np.minimum(batch, n - batch * np.arange(s))
            if s % self._passes_per_step:  # an odd last one is paired with the first
                batches, ends = np.concatenate([batches, batches[:, :, :1]], axis=2), np.append(ends, ends[0])
            passes = epochs * len(ends)
            self.places[:passes, same] = batches.reshape(len(same), passes, -1).transpose(1, 0, 2)
            self.counts[:passes, same] = np.tile(ends, epochs)[:, None]

    def _fill_visits(self, visits: Sequence[Visits] | NDArray[np.intp], sizes: NDArray[np.int64]) -> None:
        """Fill in the given passes; in Per-FedAvg an odd last one is paired with the first."""
        if isinstance(visits, np.ndarray) and visits.size:
            self.totals = np.full(len(visits), -(-visits.shape[1] // self._passes_per_step), np.int64)
            self._allocate(visits.shape[2], len(visits))
            self._fill_equal_batches(visits.transpose(1, 0, 2), np.arange(len(visits)), sizes)
            return
        self.totals = np.array([-(-len(batches) // self._passes_per_step) for batches in visits], np.int64)
        widths = [
            batches.shape[1] if isinstance(batches, np.ndarray) else max(map(len, batches), default=0)
            for batches in visits
        ]
        self._allocate(max([1, *widths]), len(visits))
        firsts = np.cumsum(sizes) - sizes
        shapes: dict[tuple[int, ...], list[int]] = {}
        for c, passes in enumerate(visits):
            if isinstance(passes, np.ndarray) and passes.size:
                shapes.setdefault(passes.shape, []).append(c)
                continue
            check_visits(passes, int(sizes[c]))
            if len(passes):
                batches = [*passes, passes[0]] if len(passes) % self._passes_per_step else passes
                lengths = np.array([len(batch) for batch in batches])
                valid = np.arange(self.places.shape[2]) < lengths[:, None]
                self.places[: len(batches), c][valid] = np.concatenate(batches) + firsts[c]
                self.counts[: len(batches), c] = lengths
        for same in shapes.values():
            self._fill_equal_batches(np.stack([visits[c] for c in same], axis=1), np.array(same), sizes)

    def _fill_equal_batches(
        self, batches: NDArray[np.intp], positions: NDArray[np.intp], sizes: NDArray[np.int64]
    ) -> None:
        """Fill in passes ``(T, c, b)``, all with b samples, of some clients ``(c,)``."""
        for c in np.flatnonzero((batches.min((0, 2)) < 0) | (batches.max((0, 2)) >= sizes[positions])):
            check_visits(batches[:, c], int(sizes[positions[c]]))
        if len(batches) % self._passes_per_step:
            batches = np.concatenate([batches, batches[:1]])
        firsts = np.cumsum(sizes) - sizes
        self.places[: len(batches), positions, : batches.shape[2]] = batches + firsts[positions, None]
        self.counts[: len(batches), positions] = batches.shape[2]

    def _allocate(self, width: int, clients: int) -> None:
        self.passes = int(self.totals.max(initial=0)) * self._passes_per_step
        self.counts = np.zeros((self.passes, clients), np.int64)
        self.places = np.zeros((self.passes, clients, width), np.int64)

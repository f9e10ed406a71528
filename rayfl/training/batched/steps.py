"""Which samples every client visits in every step, for clients that train together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rayfl.random import orders
from rayfl.training.work import LocalWork


class StepPlan:
    """The steps of C clients, sorted by falling number of steps.

    Attributes:
        steps: T, of the client with the most.
        totals: steps tau_i of each client ``(C,)``.
        active: clients that still train in each step ``(T,)``: the first so many.
        counts: samples of each client in each step ``(T, C)``.
        widths: the most samples of any client in each step ``(T,)``.
        full: whether all active clients have that many, so that nothing is padding, ``(T,)``.
        places: rows of the samples of all C clients, one after the other, ``(T, C, B)``; 0 for padding.
        weights: ``1 / count`` for samples, 0 for padding, ``(T, C, B)`` float32.
        seen: samples visited by each client over all epochs ``(C,)``.
    """

    def __init__(
        self, seed: int, round: int, clients: Sequence[int], sizes: NDArray[np.int64], work: LocalWork
    ) -> None:
        epochs, batch = work.epochs, work.batch_size
        per_epoch = -(-sizes // batch)
        self.totals = per_epoch * epochs
        self.steps = int(self.totals.max(initial=0))
        width = int(min(batch, sizes.max(initial=1)))
        self.counts = np.zeros((self.steps, len(clients)), np.int64)
        self.places = np.zeros((self.steps, len(clients), width), np.int64)
        firsts = np.cumsum(sizes) - sizes
        shuffled = orders(seed, round, clients, sizes.tolist(), epochs)
        for n in np.unique(sizes[sizes > 0]).tolist():  # clients of one size at a time
            same = np.flatnonzero(sizes == n)
            s = -(-n // batch)
            padded = np.zeros((len(same), epochs, s * batch), np.int64)
            padded[:, :, :n] = np.stack([shuffled[c] for c in same]) + firsts[same, None, None]
            visits = padded.reshape(len(same), epochs * s, batch)[:, :, :width]
            self.places[: epochs * s, same] = visits.transpose(1, 0, 2)
            ends = np.minimum(batch, n - batch * np.arange(s))
            self.counts[: epochs * s, same] = np.tile(ends, epochs)[:, None]
        self.widths = self.counts.max(axis=1, initial=0)
        self.active = (self.counts > 0).sum(axis=1)
        self.full = ((self.counts == self.widths[:, None]) | (self.counts == 0)).all(axis=1)
        valid = np.arange(width) < self.counts[:, :, None]
        self.weights = (valid / np.maximum(1, self.counts)[:, :, None]).astype(np.float32)
        self.seen = sizes * epochs

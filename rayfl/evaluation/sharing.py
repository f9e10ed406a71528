"""Evaluation with one forward pass per distinct (model, test sample) pair, shared by all clients that need
it.

Clients of a cluster share a model, and clients draw their test samples from one pool, so the same pair of
model and sample occurs many times: 100,000 clients with 200 test samples each need 20 million predictions,
but 10 cluster models on 10,000 samples only 100,000. A plan finds the distinct pairs, cuts them into jobs for
workers, and distributes the results of the jobs to the clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rayfl.data.base import Ragged, pieces
from rayfl.evaluation.metrics import Score

_TABLE_CELLS = 1 << 24
"""Cells of the (model, sample) table that are in memory at a time; limits the memory of planning."""

_SAMPLES_AT_ONCE = 1 << 22
"""Test samples of clients that are processed at a time; limits the memory of planning, too."""

_MAX_INT32 = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Job:
    """One piece of work: run ``model`` on ``samples``, sorted distinct indices into the test set."""

    model: int
    samples: NDArray[np.int32]


@dataclass(frozen=True)
class EvaluationPlan:
    """Which model runs on which samples, and which results belong to which client. Build it with :meth:`of`.

    Attributes:
        samples: the distinct test samples of each model, one model after the other, ``(U,)``.
        job_models: the model of each job, ``(J,)``, ascending.
        job_offsets: job ``j`` is ``samples[job_offsets[j]:job_offsets[j + 1]]``, ``(J + 1,)``.
        order: the clients by ascending model, ``(M,)``.
        sizes: test samples of each client, ``(M,)``, in the caller's order of clients.
        places: for every test sample of every client, clients in ``order``, its position in ``samples``.
    """

    samples: NDArray[np.int32]
    job_models: NDArray[np.int64]
    job_offsets: NDArray[np.int64]
    order: NDArray[np.intp]
    sizes: NDArray[np.int64]
    places: NDArray[np.int32 | np.int64]

    @classmethod
    def of(cls, model_of_client: ArrayLike, tests: Ragged, batch: int, batches: int = 1) -> EvaluationPlan:
        """Plan an evaluation.

        Args:
            model_of_client: the model that each client is evaluated with, ``(M,)``, non-negative.
            tests: the test samples of each client, ``M`` lists of indices into the test set.
            batch: samples in one forward pass.
            batches: forward passes in one job, at most.

        Raises:
            ValueError: if the lengths differ or a number is negative.
        """
        client_models = np.asarray(model_of_client, np.int64)
        if client_models.shape != (len(tests),):
            raise ValueError(f"{len(tests)} lists of test samples for {client_models.size} clients")
        if batch < 1 or batches < 1:
            raise ValueError("batch and batches must be at least 1")
        if client_models.min(initial=0) < 0 or tests.values.min(initial=0) < 0:
            raise ValueError("models and sample indices must not be negative")

        models, rank = np.unique(client_models, return_inverse=True)
        order = np.argsort(rank, kind="stable")
        rank, starts, sizes = rank[order], tests.offsets[:-1][order], tests.sizes[order]
        samples, counts, places = _distinct_samples(tests.values, starts, sizes, rank, len(models))

        pieces = -(-counts // (batch * batches))  # jobs of each model
        first = np.cumsum(pieces) - pieces
        job_rank = np.repeat(np.arange(len(models)), pieces)
        within = (np.arange(len(job_rank)) - first[job_rank]) * (batch * batches)
        job_starts = (np.cumsum(counts) - counts)[job_rank] + within
        job_offsets = np.append(job_starts, len(samples)).astype(np.int64)
        return cls(samples, models[job_rank], job_offsets, order, tests.sizes, places)

    @cached_property
    def jobs(self) -> list[Job]:
        """The jobs, by ascending model and sample."""
        bounds = zip(self.job_offsets[:-1].tolist(), self.job_offsets[1:].tolist(), strict=True)
        return [
            Job(model, self.samples[start:stop])
            for model, (start, stop) in zip(self.job_models.tolist(), bounds, strict=True)
        ]

    def spread(self, job_values: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Distribute the jobs' numbers, one per sample, to all clients that have the sample.

        Args:
            job_values: for each job one number per sample ``(n,)``.

        Returns:
            One number for every sample of every client, in the caller's order of clients and samples.
        """
        values: NDArray[np.float32] = np.concatenate([*job_values, np.empty(0, np.float32)])[self.places]
        if (self.order[1:] > self.order[:-1]).all():
            return values
        sizes = self.sizes[self.order]
        begins = (np.cumsum(sizes) - sizes)[np.argsort(self.order)]
        ends = np.cumsum(self.sizes)
        places: NDArray[np.int64] = np.repeat(begins - (ends - self.sizes), self.sizes)
        ordered: NDArray[np.float32] = values[places + np.arange(len(values))]
        return ordered

    def gather(
        self,
        correct: Sequence[NDArray[np.generic]] | None,
        loss: Sequence[NDArray[np.float32]],
        job_sums: Sequence[NDArray[np.float64]] | None = None,
    ) -> Score:
        """Distribute the results of the jobs to the clients.

        Args:
            correct: for each job, in the order of :attr:`jobs`, whether each sample was classified
                correctly, or how many of its predictions were right ``(n,)``; None if that is not known.
            loss: for each job the loss of each sample (the sum over its predictions) ``(n,)``.
            job_sums: for each job further sums per sample, ``(n, S)``; None for none.

        Returns:
            The scores of the M clients, in the caller's order.

        Raises:
            ValueError: if the results do not match the jobs.
        """
        lengths = np.diff(self.job_offsets).tolist()
        if any(
            [len(part) for part in results] != lengths for results in (correct, loss) if results is not None
        ):
            raise ValueError("one array for each job, one number for each of its samples")
        score = Score.zeros(len(self.sizes), job_sums[0].shape[1] if job_sums else 0)
        sizes = self.sizes[self.order]
        clients = self.order[sizes > 0]
        ends = np.cumsum(sizes[sizes > 0])
        parts: list[tuple[NDArray[Any], NDArray[Any]]] = [
            (score.losses, np.concatenate([*loss, np.empty(0)]).astype(np.float64))
        ]
        if correct is not None:
            parts.append((score.correct, np.concatenate([*correct, np.empty(0)]).astype(np.int64)))
        if score.sums.size and job_sums:
            parts.append((score.sums, np.concatenate(job_sums)))
        for chunk in pieces(ends, slice(0, len(clients)), _SAMPLES_AT_ONCE):
            begin = int(ends[chunk.start - 1]) if chunk.start else 0
            places = self.places[begin : ends[chunk.stop - 1]]
            starts = np.concatenate([np.zeros(1, np.int64), ends[chunk][:-1] - begin])
            for target, values in parts:
                target[clients[chunk]] = np.add.reduceat(values[places], starts)
        return score


def _distinct_samples(
    values: NDArray[np.int32],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    rank: NDArray[np.intp],
    models: int,
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32 | np.int64]]:
    """The distinct samples of each model, their number, and the position of every client's samples.

    Instead of sorting the pairs it marks them in a dense table (model, sample) of bounded size, some clients
    at a time.
    """
    width = int(values.max(initial=-1)) + 1
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    places: NDArray[np.int32 | np.int64] = np.empty(total, np.int32 if total <= _MAX_INT32 else np.int64)
    samples: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
    counts = np.zeros(models, np.int64)
    done = 0
    step = max(1, _TABLE_CELLS // max(1, width))

    def entries(clients: slice, low: int) -> Iterator[tuple[slice, NDArray[np.int64]]]:
        """For some clients at a time: where the positions of their samples are written, and their cells in
        the table.
        """
        for chunk in pieces(ends, clients, _SAMPLES_AT_ONCE):
            begin, end = int(ends[chunk.start] - sizes[chunk.start]), int(ends[chunk.stop - 1])
            # Entry e of a client lies at values[start + e]; consecutive clients may lie anywhere.
            shift = starts[chunk] - (ends[chunk] - sizes[chunk])
            lists = values[np.arange(begin, end) + np.repeat(shift, sizes[chunk])]
            yield slice(begin, end), np.repeat((rank[chunk] - low) * width, sizes[chunk]) + lists

    for low in range(0, models, step):
        high = min(models, low + step)
        first, last = np.searchsorted(rank, [low, high]).tolist()
        present = np.zeros((high - low) * width, np.bool_)
        for _, cells in entries(slice(first, last), low):
            present[cells] = True
        distinct = np.flatnonzero(present)
        if not len(distinct):
            continue
        place_of_cell = np.empty(len(present), places.dtype)
        place_of_cell[distinct] = np.arange(done, done + len(distinct))
        for span, cells in entries(slice(first, last), low):
            places[span] = place_of_cell[cells]
        samples.append((distinct % width).astype(np.int32))
        counts[low:high] = np.bincount(distinct // width, minlength=high - low)
        done += len(distinct)
    return np.concatenate(samples), counts, places

"""Estimate of the remaining time of a run, from its last rounds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_AVERAGED_ROUNDS = 20
"""Rounds that the estimate averages over: some take longer than others, for example those with tests."""


class Pace:
    """Estimates the remaining seconds of a run.

    The estimates of progress bars are wrong if rounds take hours, or if a resumed run starts with many rounds
    done.

    Args:
        clock: returns seconds since any fixed time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[tuple[int, float]] = deque(maxlen=_AVERAGED_ROUNDS + 1)

    def round(self, done: int, seconds: float, ended: float | None = None) -> None:
        """Record that a round has ended.

        Args:
            done: rounds that are complete.
            seconds: the duration of this round.
            ended: when, by the clock; by default now. Given by callers that process many rounds at a time.
        """
        now = self._clock() if ended is None else ended
        if self._ends and done <= self._ends[-1][0]:  # results were lost, and the rounds are repeated
            self._ends.clear()
        if not self._ends:
            self._ends.append((done - 1, now - seconds))
        self._ends.append((done, now))

    def remaining(self, rounds: int) -> float | None:
        """Seconds until ``rounds`` rounds in total are complete; None before the first."""
        if not self._ends:
            return None
        (first, begun), (last, ended) = self._ends[0], self._ends[-1]
        expected = (ended - begun) / (last - first) * (rounds - last)
        return max(0.0, expected - (self._clock() - ended))

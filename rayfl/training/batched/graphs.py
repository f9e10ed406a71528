"""Steps that are recorded once and then replayed: on a GPU, as CUDA graphs.

A step of small models is dozens of kernels that run for a few microseconds each, and starting one from Python
takes longer than that. A CUDA graph starts all kernels of a step at once. It is a recording: the same kernels
on the same addresses, and none of the Python around them. So

- everything that steps read and write except for their own scratch (models, velocities, samples, weights,
  losses) lies at fixed addresses (:class:`FixedMemory`); a call of the engine moves it there before its first
  step. What dropout multiplies by is drawn there before each step: every client has its own generator;
- numbers that Python hands to kernels, such as the learning rate, and all shapes belong to the *kind* of
  the step, and each kind has a recording of its own. Ragged clients need no more than that: the engine
  narrows the models to the clients that still train, the first so many rows of the same memory.

A new kind is first run a few times without recording (which also sets the libraries up), then recorded.
Recordings have only the fixed memory in common, so they may be replayed in any order and share their scratch.

A :class:`Recorder` does the recording; the rest is independent of CUDA and is tested on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch

from rayfl.training.batched.dropout import fill
from rayfl.training.batched.layers import Step
from rayfl.training.batched.network import Network
from rayfl.training.device import out_of_memory

WARM_UPS = 3
"""How often a kind of step is run before it is recorded."""

MOST = 128
"""Recordings kept at a time. Further kinds of steps are run without recording. Recordings of other work, such
as the learning rate of an earlier round, are all dropped first, and recording starts again."""


_Kind = tuple[Hashable, ...]
"""What is fixed in a recording: the work, the Python arguments of the step, and its shapes."""


class Unrecordable(Exception):
    """A step could not be recorded; the message is one line."""


class Recorder(Protocol):
    """Records what a function does on a device."""

    def warm_up(self, function: Callable[[], None]) -> None:
        """Run the function where it will be recorded."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Record what the function does, without executing it; returns a function that replays it.

        Raises:
            Exception: any error raised during capture.
        """

    def forget(self) -> None:
        """Called before all recordings are dropped: none of them will be replayed."""


class CudaRecorder:
    """CUDA graphs, captured on a separate stream, with one memory pool for all of them.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def forget(self) -> None:
        """Wait for the last replay, and begin a new pool: a pool ends with its last graph."""
        torch.cuda.synchronize(self._device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], None]) -> None:
        """Run the function on the stream of the captures, as PyTorch asks for."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()
        current.wait_stream(self._stream)

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Capture a graph; its replay goes to the stream that is current then."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        try:
            # thread_local: what other threads of the process do with CUDA does not end the capture.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                function()
        finally:
            torch.cuda.set_stream(current)  # a capture that fails at its end leaves its own stream current
        return graph.replay


class FixedMemory:
    """Named tensors whose addresses stay the same as long as they do not grow.

    Args:
        device: where the tensors are.

    Attributes:
        moves: how often a tensor was allocated, for the first time or because it grew.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat: dict[str, torch.Tensor] = {}
        self.moves = 0

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of this shape at the fixed address of ``name``, to be written."""
        size, flat = math.prod(shape), self._flat.get(name)
        if flat is None or len(flat) < size or flat.dtype != dtype:
            self._flat.pop(name, None)  # before a larger one takes its place
            self._flat[name] = flat = torch.empty(size, dtype=dtype, device=self._device)
            self.moves += 1
        return flat[:size].view(tuple(shape))

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of any shape to its fixed address."""
        return self.take(name, tensor.shape, tensor.dtype).copy_(tensor)

    def gather(self, name: str, tensor: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """Copy the ``rows`` ``(n,)`` of a tensor to its fixed address; None for all rows."""
        if rows is None:
            return self.copy(name, tensor)
        destination = self.take(name, (len(rows), *tensor.shape[1:]), tensor.dtype)
        return torch.index_select(tensor, 0, rows, out=destination)


class RecordedSteps:
    """Takes the steps of a network from recordings, which it makes as kinds of steps come up again.

    Args:
        recorder: makes the recordings.
        device: where the network is.

    Attributes:
        replays: how many steps were replayed.
    """

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        self._recorder, self._device = recorder, device
        self.replays = 0
        self.release()

    def release(self) -> None:
        """Give all memory back."""
        self._forget()
        self._memory = FixedMemory(self._device)

    def _forget(self) -> None:
        self._recorder.forget()
        self._recordings: dict[_Kind, Callable[[], None]] = {}
        self._runs: dict[_Kind, int] = {}

    def begin(
        self, network: Network, work: Hashable, clients: int, width: int, x: torch.Tensor, y: torch.Tensor
    ) -> None:
        """Before the first step of some clients: move everything that their steps use to fixed addresses.

        Args:
            network: holds their models.
            work: the Python arguments that all of their steps share.
            clients: their number, C.
            width: the largest number of samples of one client in a step.
            x, y: all their samples ``(n, ...)`` and targets ``(n, ...)``.
        """
        memory, moves = self._memory, self._memory.moves
        network.move(memory.copy)
        memory.take("samples", (clients * width, *x.shape[1:]), x.dtype)
        memory.take("targets", (clients * width, *y.shape[1:]), y.dtype)
        memory.take("weights", (clients, width), torch.float32)
        memory.take("counts", (clients,), torch.int64)
        memory.take("losses", (clients,), torch.float32)
        self._factors(network, (clients, width))
        if memory.moves != moves:  # recordings have the old addresses
            self._forget()
        self._work = (work, x.shape[1:], y.shape[1:])

    def step(
        self,
        network: Network,
        kind: Hashable,
        x: torch.Tensor,
        y: torch.Tensor,
        rows: torch.Tensor | None,
        weights: torch.Tensor,
        step: Step,
    ) -> torch.Tensor:
        """One step of C clients, see :meth:`Network.step`.

        Args:
            network: holds their models; narrowed and prepared.
            kind: Python arguments of this step alone, such as a decaying learning rate.
            x, y: all samples and targets.
            rows: of the samples of this step, ``(C * B,)``; None for all in order.
            weights: ``(C, B)``.
            step: as for a step that is not recorded.

        Returns:
            The losses ``(C,)``, valid until the next step.

        Raises:
            Unrecordable: if the step cannot be recorded; the models are then invalid.
            torch.OutOfMemoryError: if there is no memory to do it.
        """
        memory, shape = self._memory, weights.shape
        inputs = memory.gather("samples", x, rows).view(*shape, *x.shape[1:])
        targets = memory.gather("targets", y, rows).view(*shape, *y.shape[1:])
        fixed_weights = memory.copy("weights", weights)
        counts = None if step.counts is None or not network.counts else memory.copy("counts", step.counts)
        factors = self._factors(network, shape)
        fill(factors, network.draws, step)
        fixed_step = Step((), counts, factors=factors)
        losses = memory.take("losses", shape[:1], torch.float32)

        def take() -> None:
            losses.copy_(network.step(inputs, targets, fixed_weights, fixed_step))

        self._replay_or_run((self._work, kind, *shape, counts is None), take)
        return losses

    def _factors(self, network: Network, shape: Sequence[int]) -> list[torch.Tensor]:
        """Where a step's factors of dropout lie, for C clients and B samples: ``shape`` is ``(C, B)``."""
        return [
            self._memory.take(f"dropout {k}", (*shape, *draw.shape), torch.float32)
            for k, draw in enumerate(network.draws)
        ]

    def _replay_or_run(self, kind: _Kind, function: Callable[[], None]) -> None:
        """Replay what was recorded of this kind, or run the function as it is."""
        replay = self._recordings.get(kind)
        if replay is None:
            if len(self._recordings) >= MOST:
                if all(recorded[0] == self._work for recorded in self._recordings):
                    function()
                    return
                self._forget()
            runs = self._runs[kind] = self._runs.get(kind, 0) + 1
            if runs <= WARM_UPS:
                self._recorder.warm_up(function)
                return
            replay = self._recordings[kind] = self._record(function)
        replay()
        self.replays += 1

    def _record(self, function: Callable[[], None]) -> Callable[[], None]:
        try:
            return self._recorder.record(function)
        except Exception as error:
            if out_of_memory(error):
                raise torch.OutOfMemoryError(f"while recording a step: {error}") from error
            raise Unrecordable(f"{type(error).__name__}: {error}".split("\n")[0]) from error

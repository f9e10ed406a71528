"""The plain loop: one client after another, one optimizer step after another.

It is the reference that faster engines are tested against, so it is kept simple.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.func import functional_call

from rayfl.models import ModelSpec
from rayfl.random import key, moment, orders, python_and_numpy_seeded
from rayfl.training.batches import Batches
from rayfl.training.forward import Forward
from rayfl.training.guides import Guides, watching
from rayfl.training.precision import Precision, forward
from rayfl.training.work import (
    NO_TERMS,
    Indices,
    LocalWork,
    Terms,
    TrainedBlock,
    Visits,
    check_diverged,
    check_visits,
)

_Compare: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@contextlib.contextmanager
def seeded(key: int) -> Iterator[None]:
    """Seed the generators of PyTorch (used by dropout), Python and NumPy (users' networks may use them);
    restore all three on exit.
    """
    with torch.random.fork_rng(devices=[]), python_and_numpy_seeded(key):
        _seed_torch(key >> 1)
        yield


def _seed_torch(key: int) -> None:
    """As ``torch.manual_seed``, which formats a stack trace for each kind of device that is not there: that
    takes as long as some steps of training."""
    torch.default_generator.manual_seed(key)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(key)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(key)


class LoopEngine:
    """Trains a block of clients with a plain PyTorch loop.

    Args:
        spec: the model and its flat layout.
        batches: where samples come from.
        seed: the run's seed.
        channels_last: whether images use the channels-last layout, which is faster for many convolutions on a
            CPU.
        precision: of forward and backward passes.
    """

    def __init__(
        self,
        spec: ModelSpec,
        batches: Batches,
        seed: int,
        channels_last: bool = False,
        precision: Precision = "float32",
    ) -> None:
        self.spec, self.batches, self.seed, self._precision = spec, batches, seed, precision
        self.module = spec.build().to(batches.device)
        self.forward = Forward(spec, self.module)
        self._channels_last = channels_last and len(spec.shape) == 3
        self._trained_names = frozenset(spec.names)
        self._extra_buffers = [
            (part._buffers, key, None if buffer is None else buffer.clone())
            for prefix, part in self.module.named_modules()
            for key, buffer in part._buffers.items()
            if (f"{prefix}.{key}" if prefix else key) not in self._trained_names
        ]
        self._guide_module: nn.Module | None = None  # runs the guides' models, in evaluation mode

    def one_by_one(self, clients: int) -> bool:
        """Always True: clients train one after another."""
        return True

    def train(
        self,
        work: LocalWork,
        round: int,
        clients: Sequence[int],
        indices: Indices,
        start: torch.Tensor,
        terms: Terms = NO_TERMS,
    ) -> TrainedBlock:
        """Train every client of a block from its row of ``start``.

        Args:
            work: what to do.
            round: the round (0-based): part of the key of all randomness.
            clients: ids of the B clients.
            indices: each client's training samples.
            start: start models ``(B, P)`` float32; left as they are.
            terms: per-client offsets, masks, visits and guides.

        Raises:
            ValueError: if the terms do not fit this block, or ``work.frozen`` does not fit the model.
            ConfigError: if the network does not have the layer that the guides specify.
        """
        self.forward.module_changed()
        terms.check(start)
        self.spec.frozen(work.frozen)  # raises here: an invalid setting is not the failure of a client
        if terms.guides is not None:
            terms.guides.check(self.module)
        rows = start.clone(memory_format=torch.contiguous_format)
        losses, steps = np.zeros(len(clients)), np.zeros(len(clients), np.int64)
        failures: dict[int, str] = {}
        snapshots = rows.clone() if work.snapshot_epoch else None
        shuffled = orders(self.seed, round, clients, [len(i) for i in indices], work.epochs, work.phase)
        for row, client in enumerate(clients):
            try:
                plan = _steps(work, shuffled[row], None if terms.visits is None else terms.visits[row])
                with seeded(key(self.seed, "train", *moment(round, work.phase), client)):
                    losses[row] = self._train_client(
                        work,
                        indices[row],
                        plan,
                        rows[row],
                        _ClientTerms.of(terms, row),
                        None if snapshots is None else snapshots[row],
                    )
                steps[row] = len(plan)
            except Exception:
                failures[row] = traceback.format_exc()
        self._reset_buffers()
        return TrainedBlock(rows, losses, steps, failures, snapshots)

    def _reset_buffers(self) -> None:
        """Restore buffers that are not part of the model, so that no state passes from one client to the
        next, or to the tests of a model.
        """
        for buffers, name, initial in self._extra_buffers:
            buffer = buffers[name]
            if initial is None or buffer is None or buffer.shape != initial.shape:
                buffers[name] = None if initial is None else initial.clone()
            else:
                buffer.copy_(initial)

    def _train_client(
        self,
        work: LocalWork,
        indices: NDArray[np.integer],
        plan: Sequence[Sequence[NDArray[np.intp]]],
        vector: torch.Tensor,
        terms: _ClientTerms,
        snapshot: torch.Tensor | None,
    ) -> float:
        """Train the model ``vector`` ``(P,)`` of one client in place; returns the mean loss over the samples
        of its steps.
        """
        x, y = self.batches.train(indices)
        module = self.module.train()
        self.spec.load(module, vector)
        self._reset_buffers()
        parameters = list(module.parameters())
        offsets = None if terms.offset is None else self._split_like(parameters, terms.offset)
        masks = None if terms.mask is None else self._split_like(parameters, terms.mask)
        _hold_at_zero(parameters, masks)
        frozen = self.spec.frozen(work.frozen)
        trainable = [name not in frozen for name in self.spec.names[: len(parameters)]]
        trained = list(compress(parameters, trainable))
        offsets = None if offsets is None else list(compress(offsets, trainable))
        anchor = _copies(trained) if work.proximal else None
        velocity: list[torch.Tensor | None] = [None] * len(trained)
        total, samples = torch.zeros((), dtype=torch.float64, device=x.device), 0
        snapshot_step, snapshot_model = work.snapshot_step(len(indices), len(plan)), None

        def descent(positions: NDArray[np.intp]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
            batch = torch.from_numpy(positions).to(x.device)
            inputs = x[batch]
            if self._channels_last:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            outputs = forward(module, inputs, self._precision)
            loss = self.spec.loss.mean(outputs, y[batch])
            objective = loss if compare is None else loss + compare(outputs, inputs, y[batch]).mean()
            # A parameter that the network does not use has a gradient of zero.
            return loss.detach(), torch.autograd.grad(objective, trained, materialize_grads=True)

        with self._comparing(terms.guides) as compare:
            for step, batches in enumerate(plan):
                if work.inner_lr:
                    weights = _copies(trained)
                    _, gradients = descent(batches[0])
                    _look_ahead(trained, gradients, work.inner_lr)
                    _hold_at_zero(parameters, masks)
                    loss, gradients = descent(batches[1])
                    _assign(trained, weights)
                else:
                    loss, gradients = descent(batches[0])
                sgd_step(trained, gradients, velocity, work, work.rate(step), anchor, offsets)
                _hold_at_zero(parameters, masks)
                total += loss * len(batches[-1])
                samples += len(batches[-1])
                if step + 1 == snapshot_step:
                    snapshot_model = torch.from_numpy(self.spec.flatten(module))
        mean = float(total) / max(1, samples)
        tensors = (*parameters, *(b for name, b in module.named_buffers() if name in self._trained_names))
        norms = torch.stack([torch.linalg.vector_norm(t.detach()) for t in tensors])
        check_diverged(mean, float(torch.linalg.vector_norm(norms.double())))
        self.spec.store(module, vector)
        if snapshot is not None and snapshot_model is not None:
            snapshot.copy_(snapshot_model)
        return mean

    @contextlib.contextmanager
    def _comparing(self, guides: Guides | None) -> Iterator[_Compare | None]:
        """Yield the function that computes the term added to the loss of each sample, ``(n,)``, from
        outputs, samples and targets; None without guides. The guides' models are ``(P,)`` here.
        """
        if guides is None:
            yield None
            return
        if self._guide_module is None:
            self._guide_module = self.spec.build().to(next(self.module.parameters())).eval()
        guide_module, like = self._guide_module, next(self.module.parameters())
        states = [self.spec.to_state_dict(each) for each in guides.models]
        networks = [
            partial(functional_call, guide_module, {n: t.to(like) for n, t in v.items()}) for v in states
        ]
        with (
            watching(self.module, guides.layer) as see_client,
            watching(guide_module, guides.layer) as see_guide,
        ):

            def compare(outputs: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                client_seen = see_client(outputs)
                with torch.no_grad():
                    guides_seen = [
                        see_guide(forward(_function_of_samples(each), x, self._precision))
                        for each in networks
                    ]
                return guides.compare(client_seen, guides_seen, y)

            yield compare

    def _split_like(self, parameters: Sequence[nn.Parameter], vector: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a vector ``(P,)`` that belong to the parameters, in their shapes (they come first)."""
        places = self.spec.slices[: len(parameters)]
        return [vector[s].view_as(p).to(p) for s, p in zip(places, parameters, strict=True)]


@dataclass(frozen=True)
class _ClientTerms:
    """The terms of one client: ``(P,)`` in place of ``(B, P)``."""

    offset: torch.Tensor | None
    mask: torch.Tensor | None
    guides: Guides | None

    @classmethod
    def of(cls, terms: Terms, row: int) -> _ClientTerms:
        guides = terms.guides
        return cls(
            None if terms.offset is None else terms.offset[row],
            None if terms.mask is None else terms.mask[row] != 0,
            None if guides is None else replace(guides, models=tuple(each[row] for each in guides.models)),
        )


def _function_of_samples(
    call: Callable[[tuple[torch.Tensor]], torch.Tensor],
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Turn a function of a tuple of arguments into a function of the samples."""
    return lambda x: call((x,))


def _steps(work: LocalWork, order: NDArray[np.intp], visits: Visits | None) -> list[list[NDArray[np.intp]]]:
    """The batches of every local step, one or (Per-FedAvg) two, from shuffled epochs ``(E, n)`` or visits."""
    if visits is None:
        n, size = order.shape[1], work.batch_size
        epochs = [[epoch[begin : begin + size] for begin in range(0, n, size)] for epoch in order]
    else:
        check_visits(visits, order.shape[1])
        epochs = [list(visits)]
    if not work.inner_lr:
        return [[batch] for epoch in epochs for batch in epoch]
    return [
        [epoch[k], epoch[k + 1] if k + 1 < len(epoch) else epoch[0]]
        for epoch in epochs
        for k in range(0, len(epoch), 2)
    ]


@torch.no_grad()
def sgd_step(
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[torch.Tensor],
    velocity: list[torch.Tensor | None],
    work: LocalWork,
    lr: float,
    anchor: Sequence[torch.Tensor] | None,
    offset: Sequence[torch.Tensor] | None,
) -> None:
    """One step of SGD as ``torch.optim.SGD`` defines it: ``v = m v + g + lambda w``, ``w -= eta v``.

    ``mu (w - anchor)`` of FedProx and ``offset`` are added to the gradient. All lists have one tensor (of any
    shape) per parameter. Written out because creating the first ``torch.optim.SGD`` of a process takes 1.6 s:
    it imports a compiler.
    """
    for k, (p, g) in enumerate(zip(parameters, gradients, strict=True)):
        if work.weight_decay:
            g = g.add(p, alpha=work.weight_decay)
        if anchor is not None:
            g = g.add(p - anchor[k], alpha=work.proximal)
        if offset is not None:
            g = g + offset[k]
        if work.momentum:
            previous = velocity[k]
            g = g.clone() if previous is None else previous.mul_(work.momentum).add_(g)
            velocity[k] = g
        p.add_(g, alpha=-lr)


@torch.no_grad()
def _look_ahead(
    parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor], inner_lr: float
) -> None:
    """``w' = w - alpha g``, in place."""
    for p, g in zip(parameters, gradients, strict=True):
        p.add_(g, alpha=-inner_lr)


@torch.no_grad()
def _hold_at_zero(parameters: Sequence[nn.Parameter], masks: Sequence[torch.Tensor] | None) -> None:
    """Multiply by the masks, if there are any."""
    for p, mask in zip(parameters, masks or (), strict=masks is not None):
        p.mul_(mask)


def _copies(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [p.detach().clone() for p in parameters]


@torch.no_grad()
def _assign(parameters: Sequence[nn.Parameter], values: Sequence[torch.Tensor]) -> None:
    for p, value in zip(parameters, values, strict=True):
        p.copy_(value)

"""Training of any module that ``torch.func`` can vectorise, for networks without batched counterparts."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from rayfl.models import ModelSpec
from rayfl.models.base import task_of
from rayfl.training.activations import MANY_ACTIVATIONS, kept
from rayfl.training.batched import dropout
from rayfl.training.batched.engine import BatchedEngine
from rayfl.training.batched.layers import Step
from rayfl.training.batched.network import Network, loss_of, predictions
from rayfl.training.batched.parameters import Sgd
from rayfl.training.batched.reading import Unsupported, drawn
from rayfl.training.batches import Batches
from rayfl.training.guides import Guides, watching
from rayfl.training.loop import LoopEngine
from rayfl.training.precision import Precision, forward
from rayfl.training.work import NO_TERMS, Indices, LocalWork, Terms, TrainedBlock

_RANDOM_LAYERS = (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)

_LEAST_CLIENTS = 8
"""Number of clients below which a vectorised step is slower than that many plain steps, on a CPU."""

_MANY_PARAMETERS = 1 << 24
"""Parameters above which networks that predict every word train in the plain loop: it holds fewer copies."""

_TYPICAL_BATCH = 32
"""A typical batch size, to estimate whether a step reads more activations or more weights."""

_NO_RULE = re.compile(r"There is a performance drop because .* the batching rule for (aten::\w+)")
"""PyTorch's warning about an operation that ``torch.func`` runs for one client after another."""

Tensors = dict[str, torch.Tensor]

_StepInputs = tuple[torch.Tensor, Sequence[torch.Tensor], torch.Tensor]
"""Inputs of a step: samples ``(C, B, ...)``, factors of dropout ``(C, B, ...)`` each, weights ``(C, B)``."""


class VmapNetwork(Network):
    """The network's own forward pass, with autograd, vectorised over clients.

    Each client has its own copy of the parameters, and of the buffers that are part of the model. Where
    batches are padded, BatchNorm leaves the padding out of its statistics. Dropout draws for each client what
    it would draw alone (see :mod:`.dropout`); networks that draw other random numbers are refused.

    Networks that predict every word of a text have large outputs, a number for each word of the vocabulary:
    their loss and its gradient come from the compiled kernel, and autograd goes on from there.

    Args:
        spec: the model's layout.
        precision: of forward and backward passes.

    Attributes:
        activations: numbers per sample that the forward pass keeps for the backward pass.

    Raises:
        Unsupported: for networks that draw random numbers other than dropout's, or any in reduced precision.
    """

    counts = True  # for a BatchNorm, which may be called anywhere in the forward pass

    def __init__(self, spec: ModelSpec, precision: Precision = "float32") -> None:
        super().__init__(spec)
        self._precision = precision
        module = spec.build().train()
        for name, part in module.named_modules():
            if isinstance(part, _RANDOM_LAYERS) and getattr(part, "p", 1.0) != 0:
                raise Unsupported(f"{name} draws random numbers")
        self._module = module
        # Buffers that are not in the vector, such as BatchNorm's counter, are reset for every client.
        self._extra_buffers = {
            name: b.clone() for name, b in module.named_buffers() if name not in spec.names
        }
        self.activations, self.draws = _rehearse(module, spec)
        if self.draws and precision != "float32":
            raise Unsupported(f"it draws random numbers in {precision}")
        self._padded, self._least = False, 0
        in_dims = 0, 0, None, 0, 0, 0, 0
        self._gradients: Any = vmap(grad_and_value(self._loss, has_aux=True), in_dims=in_dims)
        self._outputs_of_all: Any = vmap(self._outputs, in_dims=(0, 0, None, 0, 0, 0))
        self._guides: Guides | None = None
        self._guide_module: nn.Module | None = None  # runs the guides' models, in evaluation mode

    def takes_channels_last(self) -> bool:
        """Whether the network works with images in the channels-last layout: in it, ``x.view(...)`` of a
        convolution's output fails.
        """
        x, _ = self.spec.model.example(self.spec.shape, self.spec.classes, 2, np.random.default_rng(0))
        if x.ndim != 4:
            return False
        leaves = {name: p.detach().requires_grad_() for name, p in self._module.named_parameters()}
        buffers = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        images = torch.from_numpy(x).contiguous(memory_format=torch.channels_last)
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the plain loop shows them
            try:
                outputs = functional_call(self._module, {**leaves, **buffers}, (images,))
                torch.autograd.grad(outputs.sum(), list(leaves.values()), allow_unused=True)
            except RuntimeError:
                return False
        return True

    def _outputs(
        self, parameters: Tensors, buffers: Tensors, extra_buffers: Tensors, x: torch.Tensor,
        factors: Sequence[torch.Tensor], weights: torch.Tensor,
    ) -> tuple[torch.Tensor, Tensors]:  # fmt: skip
        """One client's outputs, and its buffers after the forward pass; ``factors`` are those of dropout."""
        values = {**parameters, **buffers, **extra_buffers}
        counted = (weights > 0).to(weights.dtype)
        # torch.func has no BatchNorm of bfloat16 with statistics in float32.
        replace_norm = self._padded or self._precision != "float32"
        dropping = dropout.given(factors) if self.draws else nullcontext()
        with dropping, _WithoutPadding(counted, self._least) if replace_norm else nullcontext():
            # Autocast would keep its cache of rounded weights beyond the function that is vectorised.
            network = partial(functional_call, self._module, values)
            outputs = forward(network, x, self._precision, cached=False)
        # A module may have replaced its buffers.
        return outputs, {name: values[name] for name in buffers}

    def _loss(
        self, parameters: Tensors, buffers: Tensors, extra_buffers: Tensors, x: torch.Tensor,
        factors: Sequence[torch.Tensor], weights: torch.Tensor, y: torch.Tensor,
    ) -> tuple[torch.Tensor, Tensors]:  # fmt: skip
        """One client's loss, and its buffers after the forward pass."""
        outputs, new_buffers = self._outputs(parameters, buffers, extra_buffers, x, factors, weights)
        return (self.spec.loss.each(outputs, y) * weights).sum(), new_buffers

    @override
    def load(
        self,
        models: torch.Tensor,
        rows: torch.Tensor,
        sgd: Sgd,
        offset: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        guides: Guides | None = None,
    ) -> None:
        super().load(models, rows, sgd, offset, mask, guides)
        self._guides = guides
        self._extra_on_device = {
            name: b.to(models.device, copy=True) for name, b in self._extra_buffers.items()
        }

    @override
    def move(self, copy: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        super().move(copy)
        # Steps write to them, too: BatchNorm counts its batches.
        self._extra_on_device = {name: copy(f"extra {name}", b) for name, b in self._extra_on_device.items()}

    @override
    def step(self, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, step: Step) -> torch.Tensor:
        clients = len(x)
        values = {name: parameter.value for name, parameter in self.parameters.items()}
        buffers = {name: buffer[:clients] for name, buffer in self.buffers.items()}
        self._padded = step.counts is not None
        # A recorded step's counts are known only on the device, so there only a padded size of 1 is refused.
        self._least = min(step.lengths) if step.lengths is not None else x.shape[1]
        inputs = x, self.factors(x, step), weights
        if self._guides is not None:
            gradients, losses, new_buffers = self._guided_gradients(self._guides, values, buffers, inputs, y)
        elif task_of(self.spec.model) == "words":
            gradients, losses, new_buffers = self._word_gradients(values, buffers, inputs, y)
        else:
            gradients, (losses, new_buffers) = self._gradients(
                values, buffers, self._extra_on_device, *inputs, y
            )
        for name, buffer in buffers.items():
            buffer.copy_(new_buffers[name])
        for name, gradient in gradients.items():
            self.parameters[name].descend(gradient)
        assert isinstance(losses, torch.Tensor)
        return losses

    @property
    @override
    def guided(self) -> bool:  # type: ignore[override]
        """True except for networks that predict every word, whose losses are computed separately."""
        return task_of(self.spec.model) != "words"

    def _guided_gradients(
        self, guides: Guides, values: Tensors, buffers: Tensors, inputs: _StepInputs, y: torch.Tensor
    ) -> tuple[Tensors, torch.Tensor, Tensors]:
        """Gradients of the loss with the term of the guides, losses without it ``(C,)``, and buffers."""
        if self._guide_module is None:
            self._guide_module = self.spec.build().to(y.device).eval()
        guide_module, clients = self._guide_module, len(y)
        guide_models = [self._tensors_by_name(model[:clients]) for model in guides.models]
        with (
            watching(self._module, guides.layer) as see_client,
            watching(guide_module, guides.layer) as see_guide,
        ):

            def loss(
                parameters: Tensors, buffers: Tensors, extra_buffers: Tensors, models: Sequence[Tensors],
                inputs: _StepInputs, y: torch.Tensor,
            ) -> tuple[torch.Tensor, tuple[torch.Tensor, Tensors]]:  # fmt: skip
                """One client's loss with the term; then its loss without the term, and its buffers."""
                x, factors, weights = inputs
                outputs, new_buffers = self._outputs(parameters, buffers, extra_buffers, x, factors, weights)
                client_seen = see_client(outputs)
                guides_seen = [
                    see_guide(
                        forward(
                            partial(functional_call, guide_module, model), x, self._precision, cached=False
                        )
                    )
                    for model in models
                ]
                plain = (self.spec.loss.each(outputs, y) * weights).sum()
                term = guides.compare(client_seen, guides_seen, y)
                return plain + (term * weights).sum(), (plain, new_buffers)

            step: Any = vmap(grad_and_value(loss, has_aux=True), in_dims=(0, 0, None, 0, 0, 0))
            gradients, (_, (losses, new_buffers)) = step(
                values, buffers, self._extra_on_device, guide_models, inputs, y
            )
        return gradients, losses, new_buffers

    def _tensors_by_name(self, models: torch.Tensor) -> Tensors:
        """The tensors ``(C, *shape)`` of models ``(C, P)``, by name."""
        spec = self.spec
        return {
            name: models[:, place].reshape(len(models), *shape)
            for name, shape, place in zip(spec.names, spec.shapes, spec.slices, strict=True)
        }

    def _word_gradients(
        self, values: Tensors, buffers: Tensors, inputs: _StepInputs, y: torch.Tensor
    ) -> tuple[Tensors, torch.Tensor, Tensors]:
        """Gradients, losses ``(C,)`` and buffers of a network that predicts every word."""
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        with torch.enable_grad():
            outputs, new_buffers = self._forward(leaves, buffers, inputs)
            logits = outputs.movedim(2, 3).flatten(1, 2)  # (C, B, K, L) to (C, B L, K)
        losses, delta = loss_of(self.spec.loss, logits.detach(), *predictions(y, inputs[2]))
        gradients = torch.autograd.grad(logits, list(leaves.values()), delta, materialize_grads=True)
        return (
            dict(zip(leaves, gradients, strict=True)),
            losses,
            {n: b.detach() for n, b in new_buffers.items()},
        )

    def _forward(
        self, leaves: Tensors, buffers: Tensors, inputs: _StepInputs
    ) -> tuple[torch.Tensor, Tensors]:
        """Outputs ``(C, B, K, L)`` and buffers of all clients; a single client needs no vectorisation."""
        x, factors, weights = inputs
        if len(x) > 1:
            with sdpa_kernel(SDPBackend.MATH):  # fused attention cannot be vectorised
                return self._outputs_of_all(  # type: ignore[no-any-return]
                    leaves, buffers, self._extra_on_device, *inputs
                )
        parameters, client_buffers = (
            {n: t.view(t.shape[1:]) for n, t in tensors.items()} for tensors in (leaves, buffers)
        )
        client_factors = [factor[0] for factor in factors]
        outputs, new_buffers = self._outputs(
            parameters, client_buffers, self._extra_on_device, x[0], client_factors, weights[0]
        )
        return outputs.unsqueeze(0), {name: buffer.unsqueeze(0) for name, buffer in new_buffers.items()}


class VmapEngine(BatchedEngine):
    """Trains the clients of a block together with a :class:`VmapNetwork`, where that is faster.

    On a CPU a plain step at a time is faster for a few clients and for large networks; then the plain loop
    trains them, with images in the channels-last layout if the network has more activations than weights.
    Networks of up to 16 million parameters that predict every word always train here, those with many
    activations one client at a time. The choice depends on the model, the device and the number of clients in
    the block, never on timings.

    Args:
        spec: the model and its flat layout.
        batches: where samples come from.
        seed: the run's seed.
        least: smallest number of clients in a block that train together; None chooses.
        clients_per_call: see :class:`BatchedEngine`.
        precision: of forward and backward passes.

    Attributes:
        apart: operations that ``torch.func`` runs for one client after another, known after the first block.
    """

    def __init__(
        self,
        spec: ModelSpec,
        batches: Batches,
        seed: int,
        least: int | None = None,
        clients_per_call: int | None = None,
        precision: Precision = "float32",
    ) -> None:
        network = VmapNetwork(spec, precision)
        on_cpu, large = batches.device.type == "cpu", network.activations > MANY_ACTIVATIONS
        words = task_of(spec.model) == "words" and spec.P <= _MANY_PARAMETERS
        if words and on_cpu and large:
            clients_per_call = clients_per_call or 1
        super().__init__(spec, batches, seed, network, clients_per_call)
        # Dropout draws in the order of memory, which must be the same as in the plain loop.
        channels_last = on_cpu and network.activations * _TYPICAL_BATCH > spec.P and not network.draws
        channels_last = channels_last and network.takes_channels_last()
        self.loop = LoopEngine(spec, batches, seed, channels_last, precision)
        self.module, self.forward = self.loop.module, self.loop.forward
        self.least: float = (math.inf if large else _LEAST_CLIENTS) if on_cpu and not words else 1
        if least is not None:
            self.least = least
        self.apart: set[str] | None = None

    @override
    def one_by_one(self, clients: int) -> bool:
        return clients < self.least or (self.least <= 1 and super().one_by_one(clients))

    @override
    def train(
        self,
        work: LocalWork,
        round: int,
        clients: Sequence[int],
        indices: Indices,
        start: torch.Tensor,
        terms: Terms = NO_TERMS,
    ) -> TrainedBlock:
        if len(clients) < self.least:
            return self.loop.train(work, round, clients, indices, start, terms)
        with self._noting_fallbacks():
            return super().train(work, round, clients, indices, start, terms)

    @contextmanager
    def _noting_fallbacks(self) -> Iterator[None]:
        """Turn PyTorch's warnings in every step about operations into names in :attr:`apart`.

        After the first block PyTorch itself switches these warnings off, which costs nothing. A filter would
        show other warnings again that are shown only once.
        """
        if self.apart is None:
            self.apart = set()
            with warnings.catch_warnings():
                warnings.filterwarnings("always", _NO_RULE.pattern)
                show = warnings.showwarning

                def listen(message: Warning | str, *others: Any) -> None:
                    match = _NO_RULE.match(str(message))
                    if match and self.apart is not None:
                        self.apart.add(match.group(1))
                    else:
                        show(message, *others)

                warnings.showwarning = listen  # type: ignore[assignment]
                yield
            return
        functorch: Any = torch._C._functorch
        functorch._set_vmap_fallback_warning_enabled(False)
        try:
            yield
        finally:
            functorch._set_vmap_fallback_warning_enabled(True)


class _WithoutPadding(TorchFunctionMode):
    """While this mode is active, BatchNorm leaves the padding of a batch out of its statistics.

    Args:
        counted: 1 for samples, 0 for padding, ``(B,)``.
        least: the fewest samples that any client has in this step; if unknown, the size of the padded batch.
    """

    def __init__(self, counted: torch.Tensor, least: int) -> None:
        super().__init__()
        self._counted, self._least = counted, least

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if func is functional.batch_norm and keywords.pop("training", False):
            return self._normalise(*args, **keywords)
        return func(*args, **keywords)

    def _normalise(
        self,
        x: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        momentum: float,
        eps: float,
    ) -> torch.Tensor:
        """:func:`torch.nn.functional.batch_norm` in training, ``(B, channels, ...)``."""
        if len(x) != len(self._counted):
            raise Unsupported("a BatchNorm's batch is not the batch of samples")
        if self._least * x[0, 0].numel() < 2:
            raise ValueError("a batch of one has no variance")  # PyTorch's own message contains the shape
        dims, channels = (0, *range(2, x.dim())), (1, -1, *[1] * (x.dim() - 2))
        counted = self._counted.view(-1, *[1] * (x.dim() - 1))
        count = self._counted.sum() * x[0, 0].numel()
        mean = (x * counted).sum(dims) / count
        centred = (x - mean.view(channels)) * counted
        var = (centred * centred).sum(dims) / count
        for running, statistic in ((running_mean, mean), (running_var, var * (count / (count - 1)))):
            if running is not None:
                running.mul_(1 - momentum).add_(statistic.detach() * momentum)
        y = centred * torch.rsqrt(var + eps).view(channels)
        y = y if weight is None else y * weight.view(channels)
        y = y if bias is None else y + bias.view(channels)
        return y.to(x.dtype)


def _rehearse(module: nn.Module, spec: ModelSpec) -> tuple[int, list[dropout.Draw]]:
    """Run a forward pass without changing the module, to see what it draws, and what it keeps for the
    backward pass.

    Returns:
        Numbers kept per sample, not counting weights; and the draws of dropout.

    Raises:
        Unsupported: if the module draws other random numbers, or replaces a buffer that is not part of the
            model by another tensor, which would be lost.
    """
    x, _ = spec.model.example(spec.shape, spec.classes, 2, np.random.default_rng(0))
    values: Tensors = dict(module.named_parameters())
    values.update((name, buffer.clone()) for name, buffer in module.named_buffers())
    rest = {name: value for name, value in values.items() if name not in spec.names}
    draws: list[dropout.Draw] = []
    with torch.random.fork_rng(devices=[]), kept(module.parameters()) as sizes:
        generator_states = drawn()
        inputs = torch.from_numpy(x)
        with dropout.rehearsed(len(x), draws):
            output = functional_call(module, values, (inputs.long() if x.dtype == np.int32 else inputs,))
        if generator_states != drawn():
            raise Unsupported("it draws random numbers")
    for name, value in rest.items():
        if values[name] is not value:
            raise Unsupported(f"it replaces {name}, which is not part of the model")
    del output
    return sum(sizes.values()) // 2, draws

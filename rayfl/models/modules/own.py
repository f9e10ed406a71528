"""Networks from outside of rayfl: their layers, their weights, and the checks that refuse them."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rayfl.errors import ConfigError, type_of
from rayfl.losses.base import Task
from rayfl.models.base import one_line
from rayfl.models.flat import flat_tensors
from rayfl.random import python_and_numpy_seeded
from rayfl.units import counted

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Containers whose children become separate layers. Subclasses of them are not split."""

_DOMINANT_SHARE = 0.9
"""A child that holds this share of a network's parameters is treated as the network itself."""

_BATCH_SIZES = {True: (2, 3), False: (1, 3)}
"""Samples in the batches that are tried before anything starts, in training (BatchNorm needs two) and in
evaluation; of different sizes, as in a run."""

_WHERE = "model"


def check_network(
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    classes: int,
    task: Task = "numbers",
    load_weights: Callable[[nn.Module], None] = lambda module: None,
) -> None:
    """Refuse a network that could not be trained, averaged, or sent to other processes as its tensors.

    Args:
        build: builds the module, with random weights; always the same.
        shape: of a sample, without the batch.
        classes: outputs of the network.
        task: what the network does.
        load_weights: replaces the random weights, for a network that starts from others.

    Raises:
        ConfigError
    """
    module = build()
    _check_tensors(module, build())
    load_weights(module)
    _check_forward(module, shape, classes, task)
    del module  # at most two copies at a time
    _check_rebuilt(build, _random_batch(shape, task))


def _check_tensors(module: nn.Module, again: nn.Module) -> None:
    """Refuse networks that cannot be trained or averaged; ``again`` is the network, built a second time."""
    parameters = dict(module.named_parameters())
    if not parameters:
        raise ConfigError(_WHERE, "the network has no parameters")
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            remedy = "every parameter is trained; register tensors that are not trained as buffers"
            raise ConfigError(_WHERE, f"{name} has requires_grad=False", remedy)
    state, other_state = module.state_dict(), again.state_dict()
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            continue
        if tensor.is_meta:
            raise ConfigError(_WHERE, f"{name} has no values (device meta)", "build the network on the CPU")
        if not tensor.isfinite().all():
            remedy = "keep a table out of the model by register_buffer(..., persistent=False)"
            raise ConfigError(_WHERE, f"{name} starts with NaN or infinity", remedy)
        if not torch.equal(tensor, other_state[name]):
            remedy = "draw from torch's global generator, which is seeded"
            raise ConfigError(_WHERE, f"{name} starts with different numbers each time it is built", remedy)


def _required_inputs(module: nn.Module) -> list[str]:
    """The inputs of ``forward`` that have no default."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except ValueError:  # a function in C has no signature
        return ["x"]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in parameters if p.default is p.empty and p in positional]
    needed += [p.name for p in parameters if p.default is p.empty and p.kind is p.KEYWORD_ONLY]
    if needed or not parameters:
        return needed
    return [p.name for p in positional[:1]] or ["x"]


def _check_forward(module: nn.Module, shape: tuple[int, ...], classes: int, task: Task) -> None:
    """Run a few samples through the network, in training and in evaluation: it has to map a batch to logits
    ``(batch, classes)``, or for words ``(batch, classes, L)``, through which gradients flow.
    """
    inputs = _required_inputs(module)
    if len(inputs) != 1:
        what = f"forward takes {len(inputs)} inputs ({', '.join(inputs)})"
        raise ConfigError(_WHERE, what, "expected one, a batch of samples")
    for training, batches in _BATCH_SIZES.items():
        module.train(training)
        for samples in batches:
            x = torch.zeros(samples, *shape, dtype=torch.float32 if task == "numbers" else torch.int64)
            expected = (samples, classes, *shape) if task == "words" else (samples, classes)
            with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(training):
                logits = _call_or_refuse("forward", partial(module, x), x)
                _check_logits(logits, expected)
                if training:
                    _check_gradients(module, logits, x)
    x = _random_batch(shape, task)
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # module is in evaluation
        outputs, repeated = (_call_or_refuse("forward", partial(module, x), x) for _ in range(2))
    if not outputs.isfinite().all():
        raise ConfigError(_WHERE, "forward returns NaN or infinity for inputs between 0 and 1")
    if not torch.equal(outputs, repeated):
        what = "forward returns different outputs for the same samples in evaluation"
        remedy = "draw random numbers only in training, as F.dropout(x, p, self.training) does"
        raise ConfigError(_WHERE, what, remedy)
    _check_steps(module, x)


def _random_batch(shape: tuple[int, ...], task: Task) -> Tensor:
    """Two samples; not zeros: a network may divide by them, and dropout would not change them."""
    if task != "numbers":
        return torch.zeros(2, *shape, dtype=torch.int64)
    return torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))


def _check_steps(module: nn.Module, x: Tensor) -> None:
    """Refuse a network that keeps something from one step to the next, outside of its buffers.

    One module trains many clients in turn, in whatever order: they would depend on each other. What the
    network keeps on first sight of a batch, such as a mask, does no harm.
    """
    module.train()
    buffers, seen = _buffers(module), []
    for _ in range(3):
        _restore(buffers)
        seen.append((_seeded_outputs(module, x), remembered(module)))
    _, (outputs, before), (repeated, after) = seen
    changed = [".".join(filter(None, name)) for name, value in before.items() if after.get(name) != value]
    if changed or not torch.allclose(outputs, repeated, rtol=0, atol=0, equal_nan=True):
        what = "forward returns other outputs when it is called again with the same samples"
        remedy = "what lasts from step to step belongs in a buffer (register_buffer)"
        raise ConfigError(_WHERE, f"forward changes {changed[0]}" if changed else what, remedy)


def _check_rebuilt(build: Callable[[], nn.Module], x: Tensor) -> None:
    """Refuse a network that is another one in every process, though its tensors are the same: from its
    beginning, or from the first batch that it has seen.
    """
    module, other = build(), build()
    for training in (True, False):
        buffers = _buffers(other.train(training))
        _seeded_outputs(other, torch.cat([1 - x, x[:1]]) if x.is_floating_point() else x[:1].repeat(3, 1))
        _restore(buffers)
    outputs = _seeded_outputs(module.eval(), x)
    if _alike(outputs, _seeded_outputs(other.eval(), x)):
        return
    del module, other
    if _alike(outputs, _seeded_outputs(build().eval(), x)):
        what, remedy = "outputs depend on the first batch that the network has seen", "keep nothing of it"
    else:
        what = "the network is another one each time it is built, though its tensors are the same"
        remedy = "draw from the global generators of PyTorch, NumPy or Python, which are seeded"
    raise ConfigError(_WHERE, what, remedy)


def _seeded_outputs(module: nn.Module, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]), python_and_numpy_seeded(0):
        torch.default_generator.manual_seed(0)
        outputs: Tensor = _call_or_refuse("forward", partial(module, x), x)
        return outputs.detach()


def _alike(first: Tensor, second: Tensor) -> bool:
    """Up to rounding, which differs where tensors lie elsewhere in memory."""
    return torch.allclose(first, second, rtol=1e-4, atol=1e-6, equal_nan=True)


_Buffers = list[tuple[dict[str, Tensor | None], str, Tensor]]


def _buffers(module: nn.Module) -> _Buffers:
    """Where the buffers of a module are, and copies of them."""
    return [
        (part._buffers, name, buffer.clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]


def _restore(buffers: _Buffers) -> None:
    for place, name, buffer in buffers:
        place[name] = buffer.clone()


def remembered(module: nn.Module) -> dict[tuple[str, str], str]:
    """What a network may remember from one forward pass to the next, apart from tensors: by the names of a
    module and of its attribute.
    """
    found = {}
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, random.Random):
                value = repr(value.getstate())
            elif isinstance(value, np.random.Generator):
                value = str(value.bit_generator.state)
            elif isinstance(value, torch.Generator):
                value = value.get_state().tolist()
            items = value if isinstance(value, tuple | list) else (value,)
            if all(isinstance(item, bool | int | float | str | None) for item in items):
                found[name, key] = repr(value)
    return found


def _call_or_refuse(what: str, call: Callable[[], Any], x: Tensor) -> Any:
    try:
        return call()
    except (Exception, SystemExit) as error:
        text = f"{what} fails for a batch of shape {tuple(x.shape)}: {one_line(error)}"
        raise ConfigError(_WHERE, text, "does it take samples of this shape and type?") from error


def _check_logits(logits: object, expected: tuple[int, ...]) -> None:
    if not isinstance(logits, Tensor):
        raise ConfigError(_WHERE, f"forward returns {type_of(logits)}", "expected a tensor of logits")
    if tuple(logits.shape) != expected:
        what = f"forward returns shape {tuple(logits.shape)} for {counted(expected[0], 'sample')}"
        kind = "class, or number to predict" if len(expected) == 2 else "word and position"
        raise ConfigError(_WHERE, what, f"expected logits of shape {expected}: one per {kind}")
    if logits.dtype != torch.float32:
        raise ConfigError(_WHERE, f"forward returns {logits.dtype}", "expected torch.float32")


def _check_gradients(module: nn.Module, logits: Tensor, x: Tensor) -> None:
    if not logits.requires_grad:
        what = "no gradient flows from the logits to the parameters"
        raise ConfigError(_WHERE, what, "does forward detach them, or run under torch.no_grad?")
    parameters = dict(module.named_parameters())
    wanted = partial(torch.autograd.grad, logits.sum(), list(parameters.values()), allow_unused=True)
    gradients = _call_or_refuse("the backward pass", wanted, x)
    unused = [name for name, gradient in zip(parameters, gradients, strict=True) if gradient is None]
    if not unused:
        return
    total = _call_or_refuse("forward", partial(module, x), x).sum()  # some graphs can be used only once
    _call_or_refuse("the backward pass", partial(torch.autograd.backward, total), x)
    lost = [name for name in unused if parameters[name].grad is not None]
    module.zero_grad(set_to_none=True)
    if lost:
        what = f"the gradient of {lost[0]} only comes from backward(), not from torch.autograd.grad"
        raise ConfigError(_WHERE, what, "does it use checkpoint(..., use_reentrant=True)? Set it to False")


def derived_layers(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """The layers of any network, in the order in which its children were registered.

    A layer is a child that contains tensors; a normalisation belongs to the layer before it. The children of
    a container (``nn.Sequential``, ``nn.ModuleList``, ``nn.ModuleDict``) of the network are layers
    themselves, and so are those of a child that contains nine tenths of all parameters. Each parameter and
    buffer of the network itself is a layer. Shared tensors belong to their first owner.
    """
    layers: dict[str, tuple[str, ...]] = {}
    last = ""
    for name, part in _named_layers(
        module, "", {name: tensor.numel() for name, tensor in flat_tensors(module)}
    ):
        if last and part is not None and "Norm" in type(part).__name__:
            layers[last] += (name,)
        else:
            layers[name] = (name,)
            last = name if part is not None else last
    return layers


def _named_layers(
    module: nn.Module, prefix: str, sizes: Mapping[str, int], unfold: bool = True
) -> Iterator[tuple[str, nn.Module | None]]:
    """Yield the name of each module or tensor that becomes a layer, with the module (None for a tensor).

    Args:
        module: a part of the network.
        prefix: its name, and a dot; empty for the whole network.
        sizes: the number of elements of every tensor of the network, by name.
        unfold: whether its containers are split.
    """
    yield from ((name, None) for name in sizes if name.rpartition(".")[0] + "." * bool(prefix) == prefix)
    for key, child in module.named_children():
        name = prefix + key
        inside = sum(size for tensor, size in sizes.items() if tensor.startswith(name + "."))
        if not any(tensor.startswith(name + ".") for tensor in sizes):
            continue
        if list(child.children()) and inside >= _DOMINANT_SHARE * sum(sizes.values()):
            yield from _named_layers(child, name + ".", sizes)
        elif unfold and list(child.children()) and type(child) in _CONTAINERS:
            yield from _named_layers(child, name + ".", sizes, unfold=False)
        else:
            yield name, child


def replace_batch_norm(module: nn.Module) -> None:
    """Replace each BatchNorm by a GroupNorm.

    Over images its groups are the most that divide both 32 and the channels. Over vectors, which have a
    single number a channel, all channels are one group.

    Raises:
        ConfigError: if there is no BatchNorm, or a subclass of it that does more than normalise.
    """
    norms = [(n, m) for n, m in module.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        raise ConfigError("model.norm", "the network has no BatchNorm to replace", "leave norm out")
    for name, part in norms:
        if type(part) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) or not name:
            what = f"{name or 'the network'} is {type_of(part)}, which is more than BatchNorm"
            raise ConfigError("model.norm", what, "choose the norm by kwargs")
        groups = 1 if isinstance(part, nn.BatchNorm1d) else math.gcd(32, part.num_features)
        owner, _, key = name.rpartition(".")
        setattr(
            module.get_submodule(owner),
            key,
            nn.GroupNorm(groups, part.num_features, eps=part.eps, affine=part.affine),
        )


def load_weights(module: nn.Module, path: Path, last: tuple[str, ...]) -> None:
    """Copy a state dict into a module; tensors of the last layer that do not fit stay as they are.

    Raises:
        ConfigError: if the file is not a state dict, or another tensor is missing or of another shape.
    """
    where = "model.weights"
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
        state = {str(name): tensor for name, tensor in dict(state).items() if isinstance(tensor, Tensor)}
    except Exception as error:
        what = f"{path} is not a state dict ({one_line(error)})"
        raise ConfigError(where, what, "expected tensors by name, .safetensors or torch.save") from error
    tensors = dict(flat_tensors(module))
    wrapper = next((f"{name}." for name, _ in module.named_children()), "")
    if wrapper and all(name.startswith(wrapper) for name in tensors):  # a file may lack this prefix
        state = {**{wrapper + name: tensor for name, tensor in state.items()}, **state}

    def is_last(name: str) -> bool:
        return any((name + ".").startswith(member + ".") for member in last)

    with torch.no_grad():
        for name, tensor in tensors.items():
            stored = state.get(name)
            if stored is not None and stored.shape == tensor.shape:
                tensor.copy_(stored)
            elif not is_last(name):
                problem = "is missing" if stored is None else f"has shape {tuple(stored.shape)}"
                what = f"{path.name}: {name} {problem}"
                raise ConfigError(where, what, f"the network's has shape {tuple(tensor.shape)}")

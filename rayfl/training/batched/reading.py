"""The layers of a network, read from its forward pass.

Only a network's ``forward`` determines what it computes. It is run on a few samples, and every call of
PyTorch is recorded. Layers that follow one another become a :class:`~rayfl.training.batched.layers.Chain`,
and the sum of a value and of what was computed from it becomes a
:class:`~rayfl.training.batched.layers.Residual`. So it does not matter whether a network is written with
modules, functions, or methods of tensors, nor in which order its modules are defined.

Layers without a batched counterpart are refused, and so is what cannot be followed: other calls, also those
that read values of samples or parameters; parameters that are in no layer or in two; parts of the computation
without a gradient; random numbers other than dropout's; and forward passes that differ with the size of the
batch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from rayfl.losses import CrossEntropy
from rayfl.models import ModelSpec
from rayfl.models.base import one_line, task_of
from rayfl.models.modules.own import remembered
from rayfl.training.batched import layers, recurrent
from rayfl.training.batched.fused import fuse
from rayfl.training.batched.layers import Chain, Layer, Residual, pair

_aten = torch.ops.aten

_BATCHES = 2, 1, 3, 10
"""Sizes of the batches with which a network is read."""


class Unsupported(Exception):
    """The network computes something that has no batched counterpart; the message says what."""


class _ForwardFailed(Unsupported):
    """The forward pass itself failed."""


@dataclass(frozen=True, eq=False)
class Leaf:
    """A layer that contains no other layers.

    Attributes:
        layer: the layer.
        names: names in the module of its parameters and buffers, by their names in the layer.
    """

    layer: Layer
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Reading:
    """A network as batched layers.

    Attributes:
        root: all layers.
        leaves: the layers that contain no others, in the order in which they compute.
    """

    root: Chain
    leaves: tuple[Leaf, ...]


def read(spec: ModelSpec, training: bool = True) -> Reading:
    """The layers of a model in training or in evaluation mode.

    Raises:
        Unsupported: if it computes anything else.
    """
    module = spec.outline()
    if any(parameter._backward_hooks for parameter in module.parameters()):
        raise Unsupported("a parameter has a hook")
    if len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.named_parameters())):
        raise Unsupported("two layers share their weights")
    # The values do not matter. Not to_empty(), which imports half of a compiler.
    module._apply(_blank)  # type: ignore[no-untyped-call]
    module.train(training)
    state = remembered(module)
    steps = _read_steps(spec, module, _BATCHES[0])
    for batch in _BATCHES[1:]:
        try:
            other_steps = _read_steps(spec, module, batch)
        except _ForwardFailed:
            if batch > 1:  # for one sample, a BatchNorm has no variance
                raise
        else:
            if _description(other_steps) != _description(steps):
                raise Unsupported("what it computes depends on the size of the batch")
    if remembered(module) != state:
        raise Unsupported("it changes its attributes")
    return Reading(_chain(steps), tuple(_leaves(steps)))


_Steps: TypeAlias = "tuple[Leaf | _Steps, ...]"
"""Leaves one after another; a tuple among them is what a residual adds to its input."""


@dataclass(frozen=True, eq=False)
class _Value:
    """A value computed from the samples.

    Attributes:
        before: the value from which the last step computes this one; None: these are the samples.
        step: that last step, a leaf or the inside of a residual.
        words: whether every word is a sample.
        final: whether nothing but the loss may follow.
        last: the number of layers and of words, if these are an LSTM's states behind the last word, one for
            each layer ``(layers, B, H)``; otherwise None. ``step`` is then the LSTM.
    """

    before: _Value | None = None
    step: Leaf | _Steps = ()
    words: bool = False
    final: bool = False
    last: tuple[int, int] | None = None

    def since(self, other: _Value) -> _Steps | None:
        """The steps between another value and this one; None if this one was not computed from it alone."""
        steps: list[Leaf | _Steps] = []
        value: _Value | None = self
        while value is not None and value is not other:
            steps.append(value.step)
            value = value.before
        return None if value is None else tuple(reversed(steps))


def _read_steps(spec: ModelSpec, module: nn.Module, batch: int) -> _Steps:
    """The steps from samples to outputs, for a batch of this size."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    dtype = torch.float32 if task_of(spec.model) == "numbers" else torch.int64
    samples = torch.zeros((batch, *spec.shape), dtype=dtype)
    notes = _Notes(spec, module.training, {id(tensor): name for name, tensor in tensors.items()}, samples)
    with torch.random.fork_rng(devices=[]):
        generator_states = drawn()
        with torch.enable_grad(), notes:
            try:
                outputs = module(samples)
            except Exception as error:  # a network may raise any error for samples of zeros
                if not notes.problem:
                    raise _ForwardFailed(f"its forward pass cannot be read: {one_line(error)}") from None
        if notes.problem:
            raise Unsupported(notes.problem)
        if drawn() != generator_states:
            raise Unsupported("it draws random numbers")
    return notes.steps(outputs)


_RULES: dict[Any, Callable[..., _Value]] = {}
"""The rules, by function of PyTorch; modules of ``torch.nn`` and operators call these functions."""

_INPUT_KEEPING_RULES: set[Callable[..., _Value]] = set()
"""The rules of functions that may return their input, but never change it."""

_R = TypeVar("_R", bound=Callable[..., _Value])


def _rule(*functions: Any, keeps_input: bool = False) -> Callable[[_R], _R]:
    """Register a rule for functions with the same parameters; it takes the output, then their arguments."""

    def add(rule: _R) -> _R:
        _RULES.update(dict.fromkeys(functions, rule))
        if keeps_input:
            _INPUT_KEEPING_RULES.add(rule)
        return rule

    return add


class _Notes(TorchFunctionMode):
    """Records every call of PyTorch while the mode is active.

    Args:
        spec: the model's layout.
        training: whether the network is in training mode.
        names: of the tensors of the model, by their identity.
        samples: what enters the network.

    Attributes:
        problem: the first problem found; empty if there is none.
    """

    def __init__(self, spec: ModelSpec, training: bool, names: Mapping[int, str], samples: Tensor) -> None:
        super().__init__()
        self.problem = ""
        self._spec, self._training, self._names = spec, training, dict(names)
        self._start = _Value()
        self._values = {id(samples): self._start}
        self._tensors = [samples]  # keeps them alive: the id of a freed one may be reused
        self._zeros: set[int] = set()
        self._leaves: list[Leaf] = []

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if not self.problem:
            # Dropout draws nothing here, so that other random numbers are detected.
            out = (_no_dropout if func is functional.dropout else func)(*args, **keywords)
            try:
                self._note(func, args, keywords, out)
            except Unsupported as error:
                self.problem = str(error)
            except TypeError:  # arguments that the rule does not take
                self.problem = f"it calls {_function_name(func)} in another way"
        if self.problem:  # in every later call, too: a network that retries must not loop forever
            raise Unsupported(self.problem)
        return out

    def steps(self, outputs: Any) -> _Steps:
        """The steps from the samples to the outputs.

        Raises:
            Unsupported: if these are not the outputs of a classifier or of a model of words, or do not depend
                on all of the model and on all recorded layers.
        """
        value = self._values.get(id(outputs)) if isinstance(outputs, Tensor) else None
        words = task_of(self._spec.model) == "words"
        if value is None or value.words != words or (words and not value.final):
            raise Unsupported("its outputs cannot be read")
        if not words and outputs.dim() != 2:
            raise Unsupported(f"its outputs have {outputs.dim()} dimensions")
        steps = value.since(self._start) or ()
        leaves = list(_leaves(steps))
        if len(leaves) < len(self._leaves):
            raise Unsupported("a part of what it computes is not in its outputs")
        names = [name for leaf in leaves for name in leaf.names.values()]
        if len(set(names)) < len(names):
            raise Unsupported("two layers share their weights")
        missing = [name for name in self._spec.names if name not in names]
        if missing:
            raise Unsupported(f"{missing[0]} is in none of its layers")
        return steps

    def _note(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self._tensors += outputs
        names = [self._names[id(tensor)] for tensor in inputs if id(tensor) in self._names]
        if not outputs and func.__name__ in _ALLOWED_QUERIES:
            return
        if not any(id(tensor) in self._values for tensor in inputs):
            self._zeros -= {id(tensor) for tensor in outputs}
            if func is torch.zeros:
                self._zeros.add(id(out))
            if any(name in self._spec.names or not outputs for name in names):
                raise Unsupported(f"it calls {_function_name(func)} with {names[0]}")
            if names:  # computed from a buffer that is not part of the model
                self._names.update((id(tensor), names[0]) for tensor in outputs)
            return
        rule = _RULES.get(func)
        if rule is None:
            raise Unsupported(f"it calls {_function_name(func)}")
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            raise Unsupported(f"it calls {_function_name(func)} without a gradient")
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            raise Unsupported("it chooses a precision of its own")
        value, result = rule(self, out, *args, **kwargs), outputs[0]
        if rule not in _INPUT_KEEPING_RULES and any(result is tensor for tensor in inputs):
            self._forget_views(result)
        self._values[id(result)] = value

    def _forget_views(self, changed: Tensor) -> None:
        """A tensor was changed in place: other views of its memory are no longer what they were."""
        memory = changed.untyped_storage()._cdata
        for tensor in self._tensors:
            if tensor.untyped_storage()._cdata == memory:
                self._values.pop(id(tensor), None)

    def _value_of(self, tensor: Any) -> _Value:
        """The value of a tensor to which a layer is applied."""
        value = self._values.get(id(tensor))
        if value is None:
            operand = self._names.get(id(tensor), "something else than its samples")
            raise Unsupported(f"it computes with {operand} outside of a layer")
        if value.final:
            raise Unsupported("it computes with its outputs")
        if value.last:
            raise Unsupported("it takes something else than the last layer of an LSTM's last states")
        return value

    def _apply_layer(self, before: _Value, layer: Layer, **tensors: Tensor | None) -> _Value:
        """The value that a layer with these tensors of the model computes from a value."""
        names = {}
        for role, tensor in tensors.items():
            if tensor is not None:
                name = self._names.get(id(tensor))
                if name not in self._spec.names or role.startswith("running") == isinstance(
                    tensor, nn.Parameter
                ):
                    raise Unsupported(f"the {role} of a {type(layer).__name__} is not one of its parameters")
                names[role] = name
        leaf = Leaf(layer, names)
        self._leaves.append(leaf)
        return _Value(before, leaf, before.words)

    @_rule(functional.linear)
    def _linear(self, out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Value:
        before = self._value_of(input)
        if input.dim() != 2 and not before.words:
            raise Unsupported("a linear layer takes inputs of several dimensions")
        return self._apply_layer(before, layers.Linear(), weight=weight, bias=bias)

    @_rule(functional.conv2d)
    def _conv2d(
        self, out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
        padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> _Value:  # fmt: skip
        kernel = weight.shape[2], weight.shape[3]
        if isinstance(padding, str):
            totals = [d * (k - 1) for d, k in zip(pair(dilation), kernel, strict=True)]
            if padding == "same" and any(total % 2 for total in totals):
                raise Unsupported("a convolution pads its two sides differently")
            padding = [total // 2 if padding == "same" else 0 for total in totals]
        layer = layers.Conv2d(pair(stride), pair(padding), pair(dilation), groups, input.shape[1], kernel)
        return self._apply_layer(self._value_of_image(input), layer, weight=weight, bias=bias)

    @_rule(functional.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_)
    def _relu(self, out: Tensor, input: Tensor, inplace: bool = False) -> _Value:
        before = self._value_of(input)
        if isinstance(before.step, Leaf) and isinstance(
            before.step.layer, recurrent.Lstm | layers.Activation
        ):
            raise Unsupported(f"a ReLU right behind {type(before.step.layer).__name__}")  # it works in place
        return self._apply_layer(before, layers.ReLU())

    @_rule(torch.clamp, torch.clamp_min, Tensor.clamp, Tensor.clamp_min)
    def _clamp(
        self, out: Tensor, input: Tensor, min: float | None = None, max: float | None = None
    ) -> _Value:
        if min != 0 or max is not None:
            raise Unsupported("it calls clamp for something else than a ReLU")
        return self._relu(out, input)

    @_rule(torch.tanh, Tensor.tanh, functional.tanh)
    def _tanh(self, out: Tensor, input: Tensor) -> _Value:
        layer = layers.Activation(("tanh",), torch.tanh, lambda dy, x, y: _aten.tanh_backward(dy, y))
        return self._apply_layer(self._value_of(input), layer)

    @_rule(torch.sigmoid, Tensor.sigmoid, functional.sigmoid)
    def _sigmoid(self, out: Tensor, input: Tensor) -> _Value:
        layer = layers.Activation(("sigmoid",), torch.sigmoid, lambda dy, x, y: _aten.sigmoid_backward(dy, y))
        return self._apply_layer(self._value_of(input), layer)

    @_rule(functional.leaky_relu)
    def _leaky_relu(
        self, out: Tensor, input: Tensor, negative_slope: float = 0.01, inplace: bool = False
    ) -> _Value:
        layer = layers.Activation(
            ("leaky_relu", negative_slope),
            lambda x: functional.leaky_relu(x, negative_slope),
            lambda dy, x, y: _aten.leaky_relu_backward(dy, x, negative_slope, False),
        )
        return self._apply_layer(self._value_of(input), layer)

    @_rule(functional.elu)
    def _elu(self, out: Tensor, input: Tensor, alpha: float = 1.0, inplace: bool = False) -> _Value:
        layer = layers.Activation(
            ("elu", alpha),
            lambda x: functional.elu(x, alpha),
            lambda dy, x, y: _aten.elu_backward(dy, alpha, 1, 1, False, x),
        )
        return self._apply_layer(self._value_of(input), layer)

    @_rule(functional.gelu)
    def _gelu(self, out: Tensor, input: Tensor, *, approximate: str = "none") -> _Value:
        layer = layers.Activation(
            ("gelu", approximate),
            lambda x: functional.gelu(x, approximate=approximate),
            lambda dy, x, y: _aten.gelu_backward(dy, x, approximate=approximate),
        )
        return self._apply_layer(self._value_of(input), layer)

    @_rule(functional.silu)
    def _silu(self, out: Tensor, input: Tensor, inplace: bool = False) -> _Value:
        layer = layers.Activation(("silu",), functional.silu, lambda dy, x, y: _aten.silu_backward(dy, x))
        return self._apply_layer(self._value_of(input), layer)

    @_rule(functional.max_pool2d, torch.max_pool2d)
    def _max_pool2d(
        self, out: Any, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0,
        dilation: Any = 1, ceil_mode: bool = False, return_indices: bool = False,
    ) -> _Value:  # fmt: skip
        if return_indices:
            raise Unsupported("a pooling returns indices")
        kernel, step = pair(kernel_size), pair(stride or kernel_size)
        layer = layers.MaxPool2d(kernel, step, pair(padding), pair(dilation), ceil_mode)
        return self._apply_layer(self._value_of_image(input), layer)

    @_rule(functional.avg_pool2d)
    def _avg_pool2d(
        self, out: Tensor, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0,
        ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> _Value:  # fmt: skip
        if divisor_override is not None:
            raise Unsupported("a pooling has a divisor of its own")
        kernel, step = pair(kernel_size), pair(stride or kernel_size)
        layer = layers.AvgPool2d(kernel, step, pair(padding), ceil_mode, count_include_pad)
        return self._apply_layer(self._value_of_image(input), layer)

    @_rule(functional.adaptive_avg_pool2d)
    def _adaptive_avg_pool2d(self, out: Tensor, input: Tensor, output_size: Any) -> _Value:
        sizes = list(zip(input.shape[2:], out.shape[2:], strict=True))
        if any(size % parts for size, parts in sizes):
            raise Unsupported("windows of a pooling overlap")
        return self._means(self._value_of_image(input), [size // parts for size, parts in sizes])

    @_rule(torch.mean, Tensor.mean)
    def _mean(
        self, out: Tensor, input: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None
    ) -> _Value:
        dims = sorted(axis % input.dim() for axis in ([dim] if isinstance(dim, int) else dim or ()))
        if dims == [1] and input.dim() == 3 and not keepdim and not (before := self._value_of(input)).words:
            return self._apply_layer(before, recurrent.MeanOfWords())
        if dims != [2, 3]:
            raise Unsupported("a mean over something else than pixels or words")
        value = self._means(self._value_of_image(input), list(input.shape[2:]))
        return value if keepdim else self._apply_layer(value, layers.Flatten())

    def _means(self, before: _Value, window: Sequence[int]) -> _Value:
        """Means over adjacent windows."""
        size = window[0], window[1]
        return self._apply_layer(before, layers.AvgPool2d(size, size, (0, 0), False, True))

    @_rule(functional.dropout)
    def _dropout(
        self, out: Tensor, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> _Value:
        before = self._value_of(input)
        if not training or p == 0:
            return before
        if before.words:
            raise Unsupported("dropout of the states of words")
        return self._apply_layer(before, layers.Dropout(p, input.shape[1:]))

    @_rule(functional.batch_norm)
    def _batch_norm(
        self, out: Tensor, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
        weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False,
        momentum: float = 0.1, eps: float = 1e-5,
    ) -> _Value:  # fmt: skip
        if running_mean is None or running_var is None:
            raise Unsupported("a BatchNorm keeps no running statistics")
        if training != self._training:
            raise Unsupported("a BatchNorm is not in the mode of the network")
        return self._apply_layer(
            self._value_of_channels(input),
            layers.BatchNorm(eps, momentum),
            weight=weight,
            bias=bias,
            running_mean=running_mean,
            running_var=running_var,
        )

    @_rule(functional.group_norm)
    def _group_norm(
        self, out: Tensor, input: Tensor, num_groups: int, weight: Tensor | None = None,
        bias: Tensor | None = None, eps: float = 1e-5,
    ) -> _Value:  # fmt: skip
        return self._apply_layer(
            self._value_of_channels(input), layers.GroupNorm(num_groups, eps), weight=weight, bias=bias
        )

    @_rule(functional.layer_norm)
    def _layer_norm(
        self, out: Tensor, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
        bias: Tensor | None = None, eps: float = 1e-5,
    ) -> _Value:  # fmt: skip
        """A LayerNorm of vectors is a GroupNorm with one group."""
        before = self._value_of(input)
        if len(normalized_shape) != 1 or (input.dim() != 2 and not before.words):
            raise Unsupported("a LayerNorm of something else than vectors")
        return self._apply_layer(before, layers.GroupNorm(1, eps), weight=weight, bias=bias)

    @_rule(
        torch.flatten,
        Tensor.flatten,
        Tensor.view,
        torch.reshape,
        Tensor.reshape,
        torch.squeeze,
        Tensor.squeeze,
        keeps_input=True,
    )
    def _reshape(self, out: Tensor, input: Tensor, *shape: Any, **named: Any) -> _Value:
        states = self._values.get(id(input))
        if states is not None and states.last and out.shape == input.shape[1:]:  # of an LSTM with one layer
            return self._last_word(states)
        before = self._value_of(input)
        if out.shape == input.shape and out.dtype == input.dtype:
            return before
        if out.shape[:1] != input.shape[:1]:
            raise Unsupported(
                "a view or squeeze changes how many samples there are, if only in a batch of one"
            )
        if before.words or out.shape != (len(input), math.prod(input.shape[1:])):
            raise Unsupported(f"it gives {tuple(input.shape[1:])} the shape {tuple(out.shape[1:])}")
        return self._apply_layer(before, layers.Flatten())

    @_rule(
        torch.clone, Tensor.clone, Tensor.contiguous, Tensor.float, Tensor.long, Tensor.to, keeps_input=True
    )
    def _identity(self, out: Tensor, input: Tensor, *how: Any, **named: Any) -> _Value:
        if (out.dtype, out.shape, out.device) != (input.dtype, input.shape, input.device):
            raise Unsupported(f"it turns its samples into {out.dtype}")
        return self._values.get(id(input)) or self._value_of(input)

    @_rule(torch.add, Tensor.add, Tensor.add_)
    def _add(self, out: Tensor, input: Tensor, other: Any, *, alpha: float = 1) -> _Value:
        left, right = self._value_of(input), self._value_of(other)
        if alpha != 1 or input.shape != other.shape or left is right:
            raise Unsupported("a sum of something else than a value and what was computed from it")
        for first, last in ((left, right), (right, left)):
            inside = last.since(first)
            if inside is not None:
                return _Value(first, inside, first.words)
        raise Unsupported("a sum of two branches")

    @_rule(functional.embedding)
    def _embedding(
        self, out: Tensor, input: Tensor, weight: Tensor, padding_idx: int | None = None,
        max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> _Value:  # fmt: skip
        if max_norm is not None or scale_grad_by_freq or sparse:
            raise Unsupported("an embedding is not a plain one")
        padding = None if padding_idx is None else padding_idx % len(weight)
        return self._apply_layer(self._value_of(input), recurrent.Embedding(padding), weight=weight)

    @_rule(torch.lstm)
    def _lstm(
        self, out: Any, input: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool,
        num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
    ) -> _Value:  # fmt: skip
        plain = has_biases and batch_first and not bidirectional and input.dim() == 3
        roles = [f"{role}_l{k}" for k in range(num_layers) for role in _LSTM_ROLES]
        if not plain or (dropout and train and num_layers > 1) or len(params) != len(roles):
            raise Unsupported("an LSTM is not a plain one with the batch first")
        if not all(id(state) in self._zeros for state in hx):
            raise Unsupported("an LSTM starts from states of its own")
        before = self._value_of(input)
        if before.words:
            raise Unsupported("an LSTM behind another")
        value = self._apply_layer(before, recurrent.Lstm(num_layers), **dict(zip(roles, params, strict=True)))
        self._values[id(out[1])] = replace(value, words=True, last=(num_layers, input.shape[1]))
        return replace(value, words=True)

    @_rule(Tensor.__getitem__)
    def _getitem(self, out: Tensor, input: Tensor, index: Any) -> _Value:
        states = self._values.get(id(input))
        if states is not None and states.last:
            layer = index[0] if isinstance(index, tuple) else index
            if (
                not isinstance(layer, int)
                or layer not in (-1, states.last[0] - 1)
                or index not in (layer, *((layer, *[slice(None)] * k) for k in range(3)))
            ):
                raise Unsupported("it takes something else than the last layer of an LSTM's last states")
            return self._last_word(states)
        before, length = self._value_of(input), input.shape[1]
        place = index[1] if isinstance(index, tuple) and len(index) in (2, 3) else None
        everything = slice(None)
        if (
            not before.words
            or not isinstance(place, int)
            or index != (everything, place, everything)[: len(index)]
        ):
            raise Unsupported("it takes a part of a value that is not the sequence of words behind an LSTM")
        return replace(self._apply_layer(before, recurrent.WordAt(place % length, length)), words=False)

    def _last_word(self, states: _Value) -> _Value:
        """The last layer's state behind the last word."""
        assert states.last is not None
        words = states.last[1]
        all_states = replace(states, last=None)
        return replace(self._apply_layer(all_states, recurrent.WordAt(words - 1, words)), words=False)

    @_rule(torch.transpose, Tensor.transpose, torch.permute, Tensor.permute, keeps_input=True)
    def _transpose(self, out: Tensor, input: Tensor, *dims: Any, **named: Any) -> _Value:
        before = self._value_of(input)
        order = tuple(range(input.dim()))
        if named or not before.words or len(order) != 3:
            raise Unsupported("it transposes something else than the classes of words")
        axes = [axis % 3 for dim in dims for axis in ([dim] if isinstance(dim, int) else dim)]
        if axes not in ([0, 2, 1], [1, 2], [2, 1]):
            raise Unsupported("it transposes something else than the classes of words")
        return replace(before, final=True)

    @_rule(functional.log_softmax, torch.log_softmax, Tensor.log_softmax)
    def _log_softmax(
        self, out: Tensor, input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
    ) -> _Value:
        """The logarithms of probabilities are logits, too: the cross-entropy of both is the same."""
        before = self._value_of(input)
        if not self._training or type(self._spec.loss) is not CrossEntropy or dim not in (1, -1, None):
            raise Unsupported("it calls log_softmax")
        if input.dim() != 2 or dtype is not None:
            raise Unsupported("it calls log_softmax in another way")
        return replace(before, final=True)

    def _value_of_channels(self, input: Tensor) -> _Value:
        """The value of samples ``(B, channels, ...)``."""
        value = self._value_of(input)
        if value.words:
            raise Unsupported("a normalisation over the words of a text")
        return value

    def _value_of_image(self, input: Tensor) -> _Value:
        """The value of images ``(B, channels, height, width)``."""
        if input.dim() != 4:
            raise Unsupported("a convolution or pooling takes no images")
        return self._value_of(input)


_LSTM_ROLES = "weight_ih", "weight_hh", "bias_ih", "bias_hh"
"""PyTorch's names for the tensors of a layer of an LSTM, in the order in which it passes them."""

_ALLOWED_QUERIES = {
    "__get__", "__len__", "dim", "element_size", "get_device", "is_contiguous", "is_floating_point",
    "ndimension", "nelement", "numel", "size", "stride", "type",
}  # fmt: skip
"""Properties and methods of tensors that are allowed, since their results do not depend on the values."""


def _leaves(steps: _Steps) -> Iterator[Leaf]:
    """All leaves, also those in residuals, in the order in which they compute."""
    for step in steps:
        if isinstance(step, Leaf):
            yield step
        else:
            yield from _leaves(step)


def _chain(steps: _Steps) -> Chain:
    """The layers of the steps, fused where one kernel computes several."""
    parts = [step.layer if isinstance(step, Leaf) else Residual(_chain(step)) for step in steps]
    return Chain(fuse(_pool_first(parts)))


def _pool_first(chain: list[Layer]) -> list[Layer]:
    """Move a ReLU behind a maximum pooling: the result is the same, and with 2x2 windows it has a quarter of
    the work."""
    result = list(chain)
    for k in range(len(result) - 1):
        pooled = k > 0 and isinstance(result[k - 1], layers.MaxPool2d)  # conv, pool, ReLU are one kernel
        if isinstance(result[k], layers.ReLU) and isinstance(result[k + 1], layers.MaxPool2d) and not pooled:
            result[k], result[k + 1] = result[k + 1], result[k]
    return result


def _description(steps: _Steps) -> list[Any]:
    """A description of the steps, by which two readings are compared."""
    description: list[Any] = []
    for step in steps:
        if isinstance(step, Leaf):
            settings = {k: v for k, v in vars(step.layer).items() if isinstance(v, int | float | tuple)}
            description.append((type(step.layer), settings, dict(step.names)))
        else:
            description.append(_description(step))
    return description


def _function_name(func: Callable[..., Any]) -> str:
    """The name of a function of PyTorch, or of a property of tensors."""
    owner = getattr(func, "__self__", None)
    return str(getattr(owner if func.__name__ == "__get__" else func, "__name__", func))


def _blank(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and dtype on the CPU; buffers, which may be sizes or indices, are zero."""
    make = torch.empty if isinstance(tensor, nn.Parameter) else torch.zeros
    return make(tensor.shape, dtype=tensor.dtype)


def _no_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Stands in for dropout, and drops nothing."""
    return input if inplace or not training or p == 0 else input.clone()


def drawn() -> tuple[object, ...]:
    """The states of the generators that a forward pass may draw from."""
    state = np.random.get_state(legacy=False)  # noqa: NPY002
    numbers = [*state.pop("state").values(), *state.values()]  # a normal number may be kept for later
    numpy = [each.tobytes() if isinstance(each, np.ndarray) else each for each in numbers]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy

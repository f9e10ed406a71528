"""A device that is no device: tensors that say they are on a GPU, and are strict about it.

Their numbers lie in tensors on the CPU, which do all arithmetic. But PyTorch sees another device, so what
fails on a GPU fails here too: operations on tensors of two devices, NumPy's view of a tensor that is not on
the CPU, models or samples that nobody moved. Code that asks whether a tensor is on a GPU takes the GPU's way.
What is not tested so: CUDA's own kernels, their rounding, streams, memory, and asynchrony.

The device is registered for the whole process, hence all of this runs in a process of its own
(:func:`elsewhere`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import rayfl
from rayfl.bench import floor, networks
from rayfl.data import Samples
from rayfl.events import Note, RunEvent
from rayfl.models import ModelSpec
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from rayfl.training import Guides, LocalWork, Seen, Terms, TrainedBlock
from rayfl.training import engine as engines
from rayfl.training.batches import Batches
from rayfl.training.engine import ENGINES, GuidedEngines, open_engine
from rayfl.training.precision import Precision
from tests.training import fused_cell
from tests.training.test_graphs import LARGE, PLAIN, Tape, arguments, make_case
from tests.training.test_terms import EXTRAS, OPTIONS, make_terms, make_work

NAME = "pretended"

Found = TypeVar("Found")

_aten = torch.ops.aten
_BETWEEN = {_aten._to_copy.default, _aten.copy_.default}
"""Operations between devices."""

_BY_INDEX = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}
"""Operations of which a GPU takes indices on the CPU."""

_WRITTEN_OUT = {
    _aten._thnn_fused_lstm_cell.default: fused_cell.cell,
    _aten._thnn_fused_lstm_cell_backward_impl.default: fused_cell.cell_backward,
}
"""Operations that only CUDA has."""

_NO_SCALARS = {_aten.cat.default, _aten.stack.default}
"""Operations of which a GPU takes no number on the CPU."""


class PretendedTensor(torch.Tensor):
    """A tensor on the device.

    Args:
        inner: its numbers, on the CPU.
    """

    inner: torch.Tensor
    is_cuda = True  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> PretendedTensor:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _done(func, args, kwargs or {})


class _Pretending(TorchDispatchMode):
    """Makes new tensors on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _done(func, args, kwargs or {})


def _done(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Do an operation on the CPU; the result is where a GPU would have it."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, PretendedTensor)]
    checked = [] if func in _BETWEEN or not there else [args[0], *args[2:]] if func in _BY_INDEX else tensors
    for tensor in checked:
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, PretendedTensor):
            continue
        if tensor.dim() or func in _NO_SCALARS or (tensor is args[0] and _writes(func)):
            raise RuntimeError(f"{func}: expected all tensors on one device, found cpu and {NAME}")
    target = kwargs.get("device")
    if target is not None:
        result_is_there, kwargs = torch.device(target).type == NAME, {**kwargs, "device": "cpu"}
    else:
        result_is_there = isinstance(args[0], PretendedTensor) if func is _aten.copy_.default else bool(there)
    outcome = _WRITTEN_OUT.get(func, func)(*tree_map(_inner, args), **tree_map(_inner, dict(kwargs)))
    same = {id(tensor.inner): tensor for tensor in there}  # what is changed in place stays what it is

    def wrapped(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not result_is_there:
            return leaf
        return same.get(id(leaf)) if id(leaf) in same else PretendedTensor(leaf)

    return tree_map(wrapped, outcome)


def _writes(func: Any) -> bool:
    """Whether an operation changes its first argument."""
    alias = func._schema.arguments[0].alias_info
    return alias is not None and bool(alias.is_write)


def _inner(leaf: Any) -> Any:
    return leaf.inner if isinstance(leaf, PretendedTensor) else leaf


_REAL_GENERATOR = torch.Generator


class _Generator:
    """A generator for any device, which is one for the CPU."""

    def __new__(cls, device: object = None) -> torch.Generator:  # type: ignore[misc]
        return _REAL_GENERATOR()


@contextmanager
def pretended_device() -> Iterator[torch.device]:
    """The device, in place of CUDA's in all of rayfl."""
    device = torch.device(NAME, 0)
    with (
        mock.patch("torch.Generator", _Generator),
        mock.patch("torch.inference_mode", torch.no_grad),  # such wrappers of tensors have no other
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.is_bf16_supported", return_value=True),
        mock.patch("rayfl.clients.host.open_device", return_value=device),
        mock.patch.object(engines, "CudaRecorder", side_effect=lambda device: Tape()),
        _Pretending(),
    ):
        yield device


@dataclass(frozen=True)
class Outcome:
    """What an engine did on the device.

    Attributes:
        opened: what opening it said.
        block: the trained models, on the CPU.
        recorded: steps that were replayed.
    """

    opened: str
    block: TrainedBlock
    recorded: int


def trained(
    case: str,
    engine: str,
    option: str = "",
    extra: str = "sgd",
    tried: bool = True,
    precision: Precision = "float32",
) -> Outcome:
    """Train the clients of a case of ``test_graphs.py`` on the device.

    Args:
        case, option, extra: model and samples, and what is special in the local work.
        engine: its name.
        tried: whether it is opened as in a run, with the trials that it has to pass on a GPU.
        precision: of forward and backward passes, if it is opened so.
    """
    spec, samples, sizes, work, terms = setting(case, option, extra)
    with pretended_device() as device:
        batches = Batches(samples, device)
        opened, said = (
            open_engine(engine, spec, batches, 0, precision=precision)
            if tried
            else (ENGINES[engine](spec, batches, 0), "")
        )
        round, clients, indices, start = arguments(spec, sizes, 0)
        block = opened.train(work, round, clients, indices, start.to(device), terms)
        assert isinstance(block.rows, PretendedTensor), "the models are not on the device"
        recorded = getattr(opened, "recorded", None)
        there = replace(
            block,
            rows=block.rows.cpu(),
            snapshots=None if block.snapshots is None else block.snapshots.cpu(),
        )
        return Outcome(said, there, 0 if recorded is None else recorded.replays)


def guided(case: str) -> tuple[str, TrainedBlock]:
    """Train on the device with a loss that looks at another model; the engine that does, and the models."""
    spec, samples, sizes, work, _ = setting(case)
    with pretended_device() as device:
        terms = pulled(spec, len(sizes))
        assert terms.guides is not None
        engine = GuidedEngines(spec, Batches(samples, device), 0).engine(terms.guides)
        round, clients, indices, start = arguments(spec, sizes, 0)
        block = engine.train(work, round, clients, indices, start.to(device), terms)
        assert isinstance(block.rows, PretendedTensor), "the models are not on the device"
        return type(engine).__name__, replace(block, rows=block.rows.cpu())


def pulled(spec: ModelSpec, clients: int) -> Terms:
    """Outputs and features are pulled to those of another model."""

    def pull(own: Seen, others: Sequence[Seen], targets: torch.Tensor) -> torch.Tensor:
        outputs = (own.outputs - others[0].outputs).square().mean(1)
        return outputs + (own.features - others[0].features).square().mean(1)

    other = torch.from_numpy(spec.initial(index=1)).expand(clients, -1)
    return Terms(guides=Guides((other,), pull))


def setting(
    case: str, option: str = "", extra: str = "sgd"
) -> tuple[ModelSpec, Samples, list[int], LocalWork, Terms]:
    """Model, samples, sizes of clients, work and terms of a case."""
    spec, samples, _ = make_case(case)
    sizes = [2, 1] if case == "resnet9" else [5, 2] if case in LARGE else [6, 3, 2, 7, 4]
    changes, names = OPTIONS[option] if option else ({}, ())
    epochs = 1 if case in LARGE else 3
    work = make_work(replace(PLAIN, epochs=epochs), spec, {**changes, **EXTRAS[extra]})
    return spec, samples, sizes, work, make_terms(names, spec, sizes)


def ran(settings: Mapping[str, Any]) -> tuple[str, dict[str, Any], NDArray[np.float32]]:
    """A run whose clients train on the device: which engine did, the summary, and the models ``(K, P)``."""
    events: list[RunEvent] = []
    with pretended_device(), warnings.catch_warnings():
        warnings.filterwarnings("error", "training goes on without CUDA graphs")
        there = {**settings["execution"], "device": "cuda"}
        result = rayfl.run({**settings, "execution": there}, on_event=events.append)
    (said,) = (e.text for e in events if isinstance(e, Note) and e.text.startswith("on the device: "))
    models = Checkpoint.load(checkpoints(result.path / "checkpoints")[-1]).models
    return said.removeprefix("on the device: "), result.summary, models


def benched(network: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A row of ``rayfl bench networks --device cuda``."""
    case = next(case for case in networks.CASES if case.network == network)
    with pretended_device() as device, mock.patch.object(floor, "_SIDE", 8):
        peak = floor.peak(1, device)
        return networks.measure(replace(case, **settings), 1, peak, lambda line: None, device)


def mixed(name: str) -> str:
    """What an operation on tensors of two devices says; empty if it is not refused."""
    with pretended_device() as device:
        x, other, number = torch.ones(3, device=device), torch.ones(3), torch.ones(())
        places = torch.zeros(1, dtype=torch.int64).to(device)
        mistakes: dict[str, Callable[[], object]] = {
            "add": lambda: x + other,
            "in place": lambda: other.add_(x),
            "numpy": lambda: x.numpy(),
            "out": lambda: torch.add(x, 1, out=other),
            "module": lambda: torch.nn.Linear(3, 2)(x),
            "where": lambda: torch.where(x > 0, other, x),
            "samples": lambda: other[places],
            "assignment": lambda: x.index_put_((places,), other[:1]),
            "stack": lambda: torch.stack([x.sum(), number]),
            "sum": lambda: number.add_(x.sum()),
        }
        try:
            mistakes[name]()
        except (RuntimeError, TypeError) as error:
            return str(error)
    return ""


def register() -> None:
    """Make the device known to PyTorch, in this process and for good."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    torch.set_num_threads(1)
    _setup_privateuseone_for_python_backend(NAME)
    _register_autocast()


_LIBRARIES: list[torch.library.Library] = []
"""What is registered lasts as long as these."""


def _register_autocast() -> None:
    """Products and convolutions in bfloat16 under ``torch.autocast``, as CUDA has them."""
    getattr(torch, NAME).get_amp_supported_dtype = lambda: [torch.bfloat16]
    others, aten = (torch.library.Library(of, "IMPL", "AutocastPrivateUse1") for of in ("_", "aten"))
    others.fallback(torch.library.fallthrough_kernel)
    for name in ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "conv2d"):
        aten.impl(name, _rounding(getattr(_aten, name)))
    _LIBRARIES.extend((others, aten))


def _rounding(function: Any) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def rounded(leaf: Any) -> Any:
        return leaf.bfloat16() if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 else leaf

    def call(*given: Any, **named: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return function(*tree_map(rounded, given), **named)

    return call


@contextmanager
def elsewhere() -> Iterator[Callable[..., Any]]:
    """Calls a function of this module in a process that has the device."""
    with ProcessPoolExecutor(1, get_context("spawn"), register) as pool:

        def call(function: Callable[..., Found], *given: Any) -> Found:
            return pool.submit(function, *given).result()

        yield call

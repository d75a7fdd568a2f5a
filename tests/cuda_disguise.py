"""A device `cuda:0` without a GPU: tensors of the meta device that say they are there.

They have shapes, types and gradients, and no numbers, so that code takes its branches for CUDA. A tensor that was left
on the host raises beside them. Whatever the host reads of them is 0, and is noted, as are calls of streams, of graphs
and of the allocator.

torch's own fake tensors cannot stand for CUDA here: torch without CUDA refuses to index them, and ends the process when
they need gradients.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import skyrl.algorithms
from skyrl.algorithms import linear_logprobs
from skyrl.models.attention import varlen_attention

MEMORY = 141 * 10**9
"""Bytes of the device."""

CUDA, META, HOST = torch.device("cuda", 0), torch.device("meta"), torch.device("cpu")

_OF_BOTH = {Tensor.to, Tensor.copy_, torch._has_compatible_shallow_copy_type}
"""What takes tensors of different devices."""

_READ: dict[object, Callable[[Tensor], object]] = {
    Tensor.item: lambda tensor: tensor.item(),
    Tensor.__float__: float,
    Tensor.__int__: int,
    Tensor.__bool__: bool,
    Tensor.tolist: lambda tensor: tensor.tolist(),
    Tensor.cpu: lambda tensor: tensor,
}
"""What makes the host wait for the device, and what a tensor on the host gives instead."""


class Disguise(TorchFunctionMode):
    """While it is entered, tensors on the meta device are on `cuda:0`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        """Calls of streams, graphs and the allocator, and what the host reads, in order."""
        self.reads = 0
        """The number that the host reads everywhere."""

    def __torch_function__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Executes a function of torch, or reads an attribute of a tensor."""
        attribute, kwargs = getattr(func, "__self__", None), kwargs or {}
        if attribute is Tensor.device:
            return CUDA if args[0].device == META else args[0].device
        if attribute is Tensor.is_cuda:
            return args[0].device == META
        if attribute is Tensor.data and len(args) == 2 and torch.is_inference(args[1]):
            return None  # torch refuses that on the meta device alone
        if func is Tensor.pin_memory:
            return args[0]
        if func is torch.device:
            return func(*args, **kwargs)
        on = {item.device for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor) and item.dim()}
        if on >= {META, HOST} and func not in _OF_BOTH:
            raise RuntimeError(f"{func.__name__}: tensors on cuda:0 and on cpu")
        if func is Tensor.to and args[0].device == META and _is_host(args[1:]):
            self.calls.append("to the host")
            return torch.full(args[0].shape, self.reads, dtype=args[0].dtype)
        if func in _READ and args[0].device == META:
            self.calls.append("read")
            return _READ[func](torch.full(args[0].shape, self.reads, dtype=args[0].dtype))
        return func(*tree_map(_undisguised, args), **tree_map(_undisguised, dict(kwargs)))


def _is_host(values: Sequence[object]) -> bool:
    return any(value in (HOST, "cpu") for value in values if isinstance(value, torch.device | str))


def _undisguised(value: object) -> object:
    """The meta device in place of CUDA."""
    is_cuda = isinstance(value, torch.device | str) and str(value).startswith("cuda")
    return META if is_cuda else value


class Stream:
    """A CUDA stream, whose calls are noted."""

    def __init__(self, calls: list[str], name: str) -> None:
        self.device, self.name, self._calls = CUDA, name, calls

    def wait_stream(self, other: Stream) -> None:
        self._calls.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self._calls.append(f"the host waits for {self.name}")


@contextmanager
def cuda_without_gpu(patch: pytest.MonkeyPatch) -> Iterator[Disguise]:
    """A block in which `cuda:0` is there, with Triton."""
    disguise = Disguise()
    run: Callable[..., object] = torch.autograd._engine_run_backward  # type: ignore[attr-defined]  # it is imported there

    def run_backward(*args: object, **kwargs: object) -> object:
        with disguise:  # torch left it for its own code, and recomputation enters ours
            return run(*args, **kwargs)

    async def in_this_thread(function: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        return function(*args, **kwargs)

    _put_device(patch, disguise.calls)
    _put_triton(patch)
    patch.setattr(asyncio, "to_thread", in_this_thread)  # a disguise is that of one thread
    patch.setattr(torch.autograd, "_engine_run_backward", run_backward)
    patch.setattr(torch, "get_device_module", lambda device=None: torch.cuda)
    checks: dict[str, Any] = torch.utils.checkpoint._allowed_determinism_checks_to_fns
    patch.setitem(checks, "default", lambda tensor: (tensor.shape, tensor.dtype))  # the device, too, by default
    cached = (varlen_attention.has_varlen_kernels, varlen_attention.has_cudnn_attention, linear_logprobs.has_kernels)
    for function in cached:
        function.cache_clear()
    try:
        with disguise:
            yield disguise
    finally:
        for function in cached:
            function.cache_clear()


def _put_device(patch: pytest.MonkeyPatch, calls: list[str]) -> None:
    """An H200 in `torch.cuda`; what is called of its streams, graphs and allocator is added to `calls`."""
    streams = [Stream(calls, "main")]

    @contextmanager
    def stream(entered: Stream | None) -> Iterator[None]:
        streams.append(entered or streams[-1])
        yield
        streams.pop()

    @contextmanager
    def graph(graph: object, *, pool: object, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        calls.append(f"record on {stream.name}")
        yield

    replaced: dict[str, object] = {
        "is_available": lambda: True,
        "Stream": lambda device=None: Stream(calls, "side"),
        "stream": stream,
        "current_stream": lambda device=None: streams[-1],
        "device": lambda device: nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: calls.append("replay")),
        "graph": graph,
        "graph_pool_handle": object,
        "synchronize": lambda device=None: calls.append("the host waits"),
        "empty_cache": lambda: calls.append("empty cache"),
        "mem_get_info": lambda device=None: (MEMORY // 2, MEMORY),
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=MEMORY),
        "get_device_capability": lambda device=None: (9, 0),
    }
    for name, value in replaced.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(Tensor, "record_stream", lambda tensor, stream: calls.append(f"memory is kept for {stream.name}"))
    patch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    patch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda enabled: None)
    patch.setattr(torch.backends.cudnn, "is_available", lambda: True)


class _Kernel:
    """A kernel of Triton that computes nothing: a launch has to fit its parameters."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._signature = inspect.signature(function)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: object, num_warps: int, **kwargs: object) -> None:
            self._signature.bind(*args, **kwargs)

        return launch


def _put_triton(patch: pytest.MonkeyPatch) -> None:
    """A package triton whose kernels compute nothing, and the module of ours that needs it."""
    language: Any = ModuleType("triton.language")
    language.constexpr = object
    triton: Any = ModuleType("triton")
    triton.__spec__, triton.jit, triton.language = ModuleSpec("triton", None), _Kernel, language
    patch.setitem(sys.modules, "triton", triton)
    patch.setitem(sys.modules, "triton.language", language)
    name = "skyrl.algorithms.logprob_kernels"
    patch.setattr(skyrl.algorithms, "logprob_kernels", None, raising=False)
    patch.setitem(sys.modules, name, triton)  # what was there, or nothing, is there again afterwards
    del sys.modules[name]
    importlib.import_module(name)

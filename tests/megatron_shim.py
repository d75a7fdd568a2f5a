"""Megatron-core on a CPU: what it takes from CUDA is given to it from the host. For tests alone.

It shows that the wiring and the mathematics of parallelism are right, and says nothing of the CUDA path.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor
from torch.overrides import TorchFunctionMode

from skyrl.config.settings.strategies import STRATEGIES
from skyrl.learners.ranks import Ranks
from skyrl.learners.workers.roles import (
    PairReferenceWorker,
    PolicyWorker,
    PreferenceWorker,
    RewardModelWorker,
    SFTWorker,
)

ON_ANY_DEVICE = evolve(STRATEGIES["megatron"], devices=("cuda", "cpu"))
"""Facts about Megatron with the devices that it computes on with this shim: a test puts them into `STRATEGIES`."""

_NAMES = {torch.float32: "Float", torch.bfloat16: "BFloat16", torch.float16: "Half"}


class _OnTheHost(TorchFunctionMode):
    """`device="cuda"` is the CPU, and a tensor on the CPU says that it is one of CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.type and len(args) == 1 and not kwargs and args[0].dtype in _NAMES:
            return f"torch.cuda.{_NAMES[args[0].dtype]}Tensor"
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class _Stream:
    def __init__(self, *_: object, **__: object) -> None:
        """Takes what a stream or an event of CUDA takes."""

    def wait_stream(self, _: object) -> None:
        """What is computed on the host is there."""

    def record_event(self) -> _Stream:
        """An event of a stream."""
        return self

    def synchronize(self) -> None:
        """What is computed on the host is there."""


_all_gather = dist.all_gather


def _gather_uneven(outputs: list[Tensor], own: Tensor, group: Any = None, **options: Any) -> Any:
    """`all_gather` of numbers of rows that differ, which NCCL does and gloo does not."""
    most = max(len(output) for output in outputs)
    if min(len(output) for output in outputs) == most:
        return _all_gather(outputs, own, group=group, **options)
    sent = own.new_zeros(most, *own.shape[1:])
    sent[: len(own)] = own
    received = [torch.empty_like(sent) for _ in outputs]
    _all_gather(received, sent, group=group)
    for target, rows in zip(outputs, received, strict=True):
        target.copy_(rows[: len(target)])
    return None


def _scatter_uneven(output: Tensor, inputs: list[Tensor], group: Any = None) -> None:
    """`reduce_scatter` of numbers of rows that differ."""
    combined = torch.cat(inputs)
    dist.all_reduce(combined, group=group)
    output.copy_(combined.split([len(part) for part in inputs])[dist.get_rank(group)])


class _Counts(list[int]):
    """In the place of an array of numpy."""

    def tolist(self) -> list[int]:
        """What an array says of itself."""
        return self


@contextmanager
def _nothing(*_: object, **__: object) -> Iterator[None]:
    yield


def _on_the_host(tensor: Any, *, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What CUDA's tensor would be on the host; numbers of tokens as gloo takes them."""
    return _Counts(tensor.tolist()) if as_numpy and isinstance(tensor, Tensor) else tensor


@cache
def install() -> None:
    """Once in a process, for good."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(torch, "compile", lambda function: function)  # it would take a minute, and is not what is tested
        from megatron.core.models import gpt  # noqa: F401 - all of it that is compiled
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.moe import token_dispatcher
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = cuda.empty_cache = cuda.set_device = lambda *_: None
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = _Stream
    cuda.stream = _nothing
    modules: Any = (Tensor, torch.nn.Module)
    for module in modules:
        module.cuda = lambda self, *_, **__: self
    random._get_cuda_rng_state = lambda *_, **__: torch.zeros(())
    random._set_cuda_rng_state = lambda *_, **__: None
    random.CudaRNGStatesTracker.fork = _nothing
    groups: Any = dist
    groups.all_gather, groups.reduce_scatter = _gather_uneven, _scatter_uneven
    token_dispatcher.maybe_move_tensor_to_cpu = _on_the_host  # it leaves tensors that are there as they are
    mode: Any = _OnTheHost()
    mode.__enter__()
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # seems to be ours


def shimmed(maker: Callable[..., Any], *, ranks: Ranks) -> Any:
    """`maker(ranks=...)` in a process where Megatron-core takes the CPU for CUDA."""
    install()
    return maker(ranks=ranks)


class HostPolicyWorker(PolicyWorker):
    """A policy's rank in a process where Megatron-core takes the CPU for CUDA."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As a policy's rank is made."""
        install()
        super().__init__(*args, **kwargs)


class HostSFTWorker(SFTWorker):
    """A rank of supervised fine-tuning in such a process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As a rank of supervised fine-tuning is made."""
        install()
        super().__init__(*args, **kwargs)


class HostRewardModelWorker(RewardModelWorker):
    """A rank of a reward model in such a process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As a rank of a reward model is made."""
        install()
        super().__init__(*args, **kwargs)


class HostPreferenceWorker(PreferenceWorker):
    """A rank of the policy of a preference run in such a process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As a rank of this policy is made."""
        install()
        super().__init__(*args, **kwargs)


class HostPairReferenceWorker(PairReferenceWorker):
    """A rank of the reference of a preference run in such a process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As a rank of this reference is made."""
        install()
        super().__init__(*args, **kwargs)

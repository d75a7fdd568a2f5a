"""Torch's operations while a function runs, for tests of what it computes and how much memory that takes."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def operations(function: Callable[[], object]) -> list[tuple[object, int]]:
    """Each of torch's operations while the function runs, with the entries of the largest tensor that it makes."""
    seen = list[tuple[object, int]]()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's signature
            result = func(*args, **(kwargs or {}))
            outputs = result if isinstance(result, list | tuple) else [result]
            seen.append((func, max((output.numel() for output in outputs if isinstance(output, Tensor)), default=0)))
            return result

    with Watch():  # type: ignore[no-untyped-call]  # torch's signature
        function()
    return seen


def largest_tensor(function: Callable[[], object]) -> int:
    """Entries of the largest tensor that is made while the function runs."""
    return max(entries for _, entries in operations(function))

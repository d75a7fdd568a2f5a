"""Low-rank updates of several adapters in one pass: each adapter changes the rows of its own stretch of the input.

    y[i : j] = x[i : j] W^T + b + s (x[i : j] A^T) B^T          LoRA, arXiv:2106.09685, eq. 3

The product with W is computed once for all rows. A and B may have any rank in each stretch. Gradients of A and B are
added to tensors that the caller gives; they do not go through autograd, which would hold a node for each factor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable


@frozen(kw_only=True, eq=False)
class StretchUpdate:
    """The update of one layer by one adapter, on rows `start` to `stop` of the layer's input (T, in)."""

    start: int
    stop: int
    a: Tensor
    """(rank, in), in the type of the computation."""

    b: Tensor
    """(out, rank), in the type of the computation."""

    scale: float
    for_a: Tensor | None = None
    """(rank, in): the gradient of A is added to it. None in passes without gradient."""

    for_b: Tensor | None = None

    def add(self, output: Tensor, x: Tensor) -> Tensor:
        """Add the update to the rows of `output` (T, out). Returns x A^T of its rows, (stop - start, rank)."""
        inner = x[self.start : self.stop] @ self.a.T
        add_product(output[self.start : self.stop], inner, self.b.T, self.scale)
        return inner

    def add_gradients(self, errors: Tensor, x: Tensor, inner: Tensor, for_x: Tensor | None) -> None:
        """Add the gradients of A, B and x, from that of the output: `errors` (T, out), `for_x` (T, in)."""
        own, rows = errors[self.start : self.stop], x[self.start : self.stop]
        back = own.to(self.b.dtype) @ self.b
        if self.for_a is not None and self.for_b is not None:
            add_product(self.for_b, own.to(inner.dtype).T, inner, self.scale)
            add_product(self.for_a, back.T, rows, self.scale)
        if for_x is not None:
            add_product(for_x[self.start : self.stop], back, self.a, self.scale)

    def within(self, rows: slice) -> StretchUpdate | None:
        """The part of the update on these rows of the input, counted from the first of them; None if there is none."""
        start, stop = max(self.start, rows.start), min(self.stop, rows.stop)
        return evolve(self, start=start - rows.start, stop=stop - rows.start) if start < stop else None


def add_product(total: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """total += scale left right, in the type of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, alpha=scale)
    else:
        total.add_(left @ right, alpha=scale)


def with_updates(x: Tensor, output: Tensor, updates: tuple[StretchUpdate, ...]) -> Tensor:
    """The layer's `output` (..., out) for `x` (..., in) with the updates added; rows are counted over all dimensions
    but the last.
    """
    apply: Any = _Updates.apply
    result: Tensor = apply(x, output, gradient_anchor(), updates)
    return result


@contextmanager
def updated(layers: Mapping[str, nn.Linear], updates: Mapping[str, Sequence[StretchUpdate]]) -> Iterator[None]:
    """A block in which layers, by name, add these updates to their output. A backward pass that computes layers again
    must be in the block, too.
    """
    with ExitStack() as block:
        for name, update in updates.items():
            block.enter_context(layers[name].register_forward_hook(partial(_added, tuple(update))))
        yield


def _added(updates: tuple[StretchUpdate, ...], layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return with_updates(inputs[0], output, updates)


def gradient_anchor() -> Tensor | None:
    """An argument for functions whose gradient is not that of any argument, as that of an update of a frozen layer's
    input: autograd goes backward only through functions with an argument that needs a gradient.
    """
    return torch.zeros((), requires_grad=True) if torch.is_grad_enabled() else None


class UpdateContext(FunctionCtx):
    """Context of a function with updates, between its forward and its backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    updates: tuple[StretchUpdate, ...]
    inner: list[Tensor]
    """x A^T of each update."""


class _Updates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: UpdateContext, x: Tensor, output: Tensor, anchor: Tensor | None, updates: tuple[StretchUpdate, ...]
    ) -> Tensor:
        result, rows = output.clone(memory_format=torch.contiguous_format), x.flatten(0, -2)
        flat = result.view(-1, result.shape[-1])
        ctx.inner = [item.add(flat, rows) for item in updates]
        ctx.save_for_backward(x)
        ctx.updates = updates
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: UpdateContext, errors: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        for_x = torch.zeros_like(x, memory_format=torch.contiguous_format) if ctx.needs_input_grad[0] else None
        flat, rows = errors.reshape(-1, errors.shape[-1]), x.flatten(0, -2)
        for_rows = None if for_x is None else for_x.view(rows.shape)
        for update, inner in zip(ctx.updates, ctx.inner, strict=True):
            update.add_gradients(flat, rows, inner, for_rows)
        return for_x, errors if ctx.needs_input_grad[1] else None, None, None

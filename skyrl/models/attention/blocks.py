"""Attention in blocks of queries and keys, whose results are joined by their log-sum-exp (arXiv:2205.14135, sec. 3.1).

With z = q k^T scale and lse_i = log sum exp z over the keys of block i, the attention of a query over several blocks is
sum exp(lse_i - lse) out_i, where lse is the log-sum-exp of all blocks. The backward pass of a block gives the gradient
of the whole attention for its keys, if its inputs are the output and the log-sum-exp of all blocks. torch's kernels
return both in forward and accept both in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from attrs import frozen
from torch import Tensor

_ATEN: Any = torch.ops.aten


@frozen(kw_only=True)
class AttentionBlock:
    """Queries and the keys that they see."""

    queries: slice
    keys: slice

    causal: bool
    """Whether queries and keys are the same positions and each sees those up to itself; else queries see all keys."""


def forward_of(
    blocks: Sequence[AttentionBlock], query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of the queries over all blocks, and the log-sum-exp of each.

    Shapes: query (1, heads, Q, D), key and value (1, kv_heads, K, D) -> (1, heads, Q, D) in the queries' type and
    (1, heads, Q) float32. Every query must be in a block.
    """
    repeats = query.shape[1] // key.shape[1]
    mixed = torch.zeros(query.shape, dtype=_exact(query), device=query.device)
    norms = torch.full(query.shape[:3], -torch.inf, dtype=_exact(query), device=query.device)
    for block in blocks:
        own = block.queries
        keys, values = (_grouped(item[:, :, block.keys], repeats) for item in (key, value))
        output, norm = _forward(query[:, :, own], keys, values, block.causal, scale)
        before, total = norms[:, :, own], torch.logaddexp(norms[:, :, own], norm)
        mixed[:, :, own] = mixed[:, :, own] * (before - total).exp().unsqueeze(-1) + output * (
            norm - total
        ).exp().unsqueeze(-1)
        norms[:, :, own] = total
    return mixed.to(query.dtype), norms


def backward_of(
    blocks: Sequence[AttentionBlock],
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    norms: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in their shapes and types, from the gradient of `mixed` (1, heads, Q, D)."""
    repeats = query.shape[1] // key.shape[1]
    totals = [torch.zeros(item.shape, dtype=_exact(query), device=query.device) for item in (query, key, value)]
    for block in blocks:
        own = block.queries
        keys, values = (_grouped(item[:, :, block.keys], repeats) for item in (key, value))
        gradients = _backward(
            gradient[:, :, own].contiguous(),
            query[:, :, own],
            keys,
            values,
            mixed[:, :, own],
            norms[:, :, own].contiguous(),
            block.causal,
            scale,
        )
        totals[0][:, :, own] += gradients[0]
        for total, of_heads in zip(totals[1:], gradients[1:], strict=True):
            total[:, :, block.keys] += of_heads.unflatten(1, (-1, repeats)).sum(2)
    return totals[0].to(query.dtype), totals[1].to(key.dtype), totals[2].to(value.dtype)


def _exact(tensor: Tensor) -> torch.dtype:
    """The type in which blocks are joined."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _grouped(tensor: Tensor, repeats: int) -> Tensor:
    return tensor.repeat_interleave(repeats, dim=1) if repeats > 1 else tensor


_LSE_ALIGNED = 32
"""The memory-efficient kernel of float32 pads the queries of its log-sum-exp to a multiple of this number."""


def _kernel(query: Tensor) -> Literal["cpu", "flash", "efficient"]:
    if query.device.type == "cpu":
        return "cpu"
    return "flash" if query.dtype.itemsize == 2 and query.shape[-1] % 8 == 0 else "efficient"


def _forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one block."""
    match _kernel(query):
        case "cpu":
            kernel = _ATEN._scaled_dot_product_flash_attention_for_cpu
            mixed, norm = kernel(query, key, value, 0.0, causal, scale=scale)
        case "flash":
            kernel = _ATEN._scaled_dot_product_flash_attention
            mixed, norm, *_ = kernel(query, key, value, 0.0, causal, False, scale=scale)
        case "efficient":
            kernel = _ATEN._scaled_dot_product_efficient_attention
            mixed, norm, *_ = kernel(query, key, value, None, True, 0.0, causal, scale=scale)
            norm = norm[:, :, : query.shape[2]]
    return mixed, norm


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, norm: Tensor, causal: bool, scale: float
) -> Sequence[Tensor]:
    """Gradients of query, key and value of one block."""
    inputs = (gradient, query, key, value)
    gradients: Sequence[Tensor]
    match _kernel(query):
        case "cpu":
            kernel = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
            gradients = kernel(*inputs, mixed, norm, 0.0, causal, scale=scale)
        case "flash":
            kernel = _ATEN._scaled_dot_product_flash_attention_backward
            seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the seed of dropout, which is off
            sizes = (None, None, query.shape[2], key.shape[2])
            gradients = kernel(*inputs, mixed, norm, *sizes, 0.0, causal, seed, seed[:0], scale=scale)
        case "efficient":
            kernel = _ATEN._scaled_dot_product_efficient_attention_backward
            padded = torch.nn.functional.pad(norm, (0, -norm.shape[2] % _LSE_ALIGNED), value=torch.inf)
            seed, needed = torch.zeros((), dtype=torch.int64, device=query.device), [True, True, True, False]
            gradients = kernel(*inputs, None, mixed, padded, seed, seed, 0.0, needed, causal, scale=scale)[:3]
    return gradients

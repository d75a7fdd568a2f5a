"""Attention of one new token per row over keys and values in pages, by torch's FlashAttention kernels for CUDA.

The kernels read the number of keys of each row, and the pages that hold them, from tensors on the device: one recorded
call computes every step. Older versions of torch do not pass them a table of pages. There a row has one page, as long
as the longest row.

Shapes: R rows, D head size, P pages of B tokens.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from skyrl.models.attention.varlen_attention import AMPERE, LARGEST_HEAD

PAGE = 256
"""Number of tokens in a page, of which the kernels accept multiples."""


@frozen(kw_only=True, eq=False)
class RowPages:
    """The keys of each row of a step."""

    table: Tensor
    """(R, pages of a row) int32: pages of each row, in order. Entries behind the row's last token are not read."""

    used: Tensor
    """(R,) int32: number of keys of each row, at least 1."""

    query_bounds: Tensor
    """(R + 1,) int32: 0 to R, one query for each row."""

    longest: int
    """Number of tokens in all pages of a row."""

    @classmethod
    def of(cls, table: Tensor, positions: Tensor, page: int) -> RowPages:
        """The keys up to `positions` (R,), the place of each row's newest token. Only tensors depend on it."""
        return cls(
            table=table,
            used=positions.int() + 1,
            query_bounds=torch.arange(len(table) + 1, dtype=torch.int32, device=table.device),
            longest=table.shape[1] * page,
        )


def paged_attention(query: Tensor, keys: Tensor, values: Tensor, rows: RowPages) -> Tensor:
    """Attention of each row's query to all its keys, by FlashAttention.

    Shapes: query (R, heads, D), keys and values (P, B, kv_heads, D), all of one 16-bit type -> (R, heads * D).
    """
    if has_tables():
        arguments: dict[str, Any] = {"block_table": rows.table}
        key_bounds = rows.query_bounds  # not read
    else:
        arguments = {}
        key_bounds = torch.cat((rows.table[:, 0] * keys.shape[1], rows.table[-1:, 0]))  # first key of each row
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    mixed: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        keys,
        values,
        rows.query_bounds,
        key_bounds,
        1,
        rows.longest,
        0.0,
        False,
        False,
        seqused_k=rows.used,
        **arguments,
    )[0]
    return mixed.reshape(len(query), -1)


def gathered_attention(query: Tensor, keys: Tensor, values: Tensor, rows: RowPages) -> Tensor:
    """The same as `paged_attention`, for every device and type, row by row: it makes the host wait for the device."""
    mixed = []
    for row, (table, used) in enumerate(zip(rows.table.long(), rows.used.tolist(), strict=True)):
        key, value = (states[table].flatten(0, 1)[:used].transpose(0, 1) for states in (keys, values))
        mixed.append(scaled_dot_product_attention(query[row].unsqueeze(1), key, value, enable_gqa=True).flatten())
    return torch.stack(mixed)


def refusal(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head: int) -> str:
    """Why `paged_attention` cannot be used for heads of this number and size; empty if it can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"the device is {device}"
    if dtype.itemsize != 2:
        return f"the type is {dtype}, not one of 16 bits"
    if head % 8 or head > LARGEST_HEAD:
        return f"heads of {head} are not multiples of 8 up to {LARGEST_HEAD}"
    if not torch.backends.cuda.is_flash_attention_available() or "seqused_k" not in _arguments():
        return f"torch {torch.__version__} has no kernels for it"
    if torch.cuda.get_device_capability(device) < AMPERE:
        return f"{torch.cuda.get_device_name(device)} is too old"
    return _fault(device, dtype, heads, kv_heads, head)


@torch.inference_mode()
def _fault(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head: int) -> str:
    """Describes what is wrong with the kernel's result for three rows of different lengths; empty if nothing is."""
    generator = torch.Generator().manual_seed(0)
    width = 2 if has_tables() else 1
    keys, values = torch.randn((2, 3 * width + 1, PAGE, kv_heads, head), generator=generator).to(device, dtype)
    query = torch.randn((3, heads, head), generator=generator).to(device, dtype)
    table = torch.arange(3 * width, 0, -1, dtype=torch.int32, device=device).view(3, width)
    rows = RowPages.of(table, torch.tensor([0, 176, width * PAGE - 8], device=device), PAGE)
    try:
        result, expected = (attend(query, keys, values, rows) for attend in (paged_attention, gathered_attention))
    except (RuntimeError, TypeError) as error:
        return f"the kernel raises {error}"
    largest = float((result - expected).abs().max())
    return "" if largest < 0.05 else f"the kernel is wrong by {largest:.2g}"  # NaN is wrong, too


def has_tables() -> bool:
    """Whether the kernels take a table of pages."""
    return "block_table" in _arguments()


@cache
def _arguments() -> frozenset[str]:
    """Names of the arguments of torch's FlashAttention operator, which differ between versions."""
    return frozenset(argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments)

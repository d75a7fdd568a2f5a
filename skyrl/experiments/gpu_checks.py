"""Checks of the kernels of a CUDA run: they only warn about what is slower than necessary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from skyrl.config.derive.every_kind import has_flash_attention
from skyrl.config.loading.kinds import kind_of
from skyrl.errors import Problem
from skyrl.runs.run_tree import AnyRun
from skyrl.tree import get_at


def flash_attention_is_installed(run: AnyRun) -> Iterator[Problem]:
    """If FlashAttention is configured but its package is missing, the run uses torch's attention and warns."""
    table: Any = get_at(run, kind_of(run).trainer)
    falls_back = table.device == "cuda" and table.flash_attn and table.attention == "sdpa"
    if falls_back and not has_flash_attention():
        field = run.trainer.path_of("flash_attn")
        yield Problem(
            path=field,
            message="the package flash-attn is not installed: attention falls back to PyTorch's sdpa",
            hint=f"install flash-attn, or set {field} = false",
            severity="warning",
        )

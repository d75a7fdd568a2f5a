"""Checks of what a CUDA run is computed with: they stop nothing, and name what is slower than it has to be."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.every_kind import has_flash_attention
from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import Problem
from skyrl.runs.run_tree import AnyRun, field_path


def flash_attention_is_installed(run: AnyRun) -> Iterator[Problem]:
    """Where FlashAttention is wanted and its package is not there, the run takes torch's own attention and warns."""
    table = run.trainer if isinstance(run, SkyRLTrainConfig) else run
    falls_back = table.device == "cuda" and table.flash_attn and table.attention == "sdpa"
    if falls_back and not has_flash_attention():
        field = field_path(run, "flash_attn")
        yield Problem(
            path=field,
            message="the package flash-attn is not installed: attention is sdpa, torch's own",
            hint=f"install flash-attn, or set {field} = false",
            severity="warning",
        )

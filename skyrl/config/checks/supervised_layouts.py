"""Checks of supervised runs whose ranks share sequences, matrices or experts.

Whether the sizes divide the heads of the model is checked in `skyrl.experiments.model_checks`, which reads its files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from skyrl.config.derive.supervised_model import MODEL
from skyrl.config.settings.supervised_root import SupervisedConfig
from skyrl.errors import Problem
from skyrl.planning.batches import divisors
from skyrl.tree.rules import Check

_SIZES = ("sequence_parallel_size", "context_parallel_size", "tensor_parallel_size")


def ranks_form_whole_groups(run: SupervisedConfig) -> Iterator[Problem]:
    """Every row is computed by the same number of ranks."""
    ranks, together = MODEL.ranks(run), MODEL.degrees(run).inner
    if ranks % together:
        written = [f"{name} = {getattr(run, name)}" for name in _SIZES if getattr(run, name) > 1]
        yield Problem(
            path=next(name for name in _SIZES if getattr(run, name) > 1),
            message=f"{ranks} ranks cannot be divided into groups of {together} ({', '.join(written)})",
            hint=f"sizes whose product is one of {', '.join(map(str, divisors(ranks)))}",
        )


def sequence_parallel_needs_packing(run: SupervisedConfig) -> Iterator[Problem]:
    """Ranks share packed rows, and use torch's own attention."""
    for name in _SIZES[:2]:
        size = getattr(run, name)
        if size > 1 and not run.use_sequence_packing:
            message = f"{size} ranks share a sequence only where rows are packed"
            yield Problem(path=name, message=message, hint="set use_sequence_packing = true")
        if size > 1 and run.attention not in (None, "sdpa"):
            message = f"{size} ranks cannot share a sequence where attention is {run.attention}"
            hint = "set attention = sdpa, which uses torch's FlashAttention kernels on CUDA"
            yield Problem(path=name, message=message, hint=hint)


LAYOUT_CHECKS: tuple[Check[Any], ...] = (
    ranks_form_whole_groups,
    sequence_parallel_needs_packing,
)

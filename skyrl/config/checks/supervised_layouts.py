"""Checks of supervised runs whose ranks share sequences, matrices or experts.

Whether the sizes divide the heads of the model is checked in `skyrl.experiments.model_checks`, which reads its files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from skyrl.config.derive.supervised_model import MODEL, sharing_rows
from skyrl.config.foundation.remedies import nearest_divisors
from skyrl.config.settings.supervised_root import SupervisedConfig
from skyrl.errors import Problem
from skyrl.planning.batches import divisors, nearest
from skyrl.tree.rules import Check

_SIZES = ("sequence_parallel_size", "context_parallel_size", "tensor_parallel_size")


def ranks_form_whole_groups(run: SupervisedConfig) -> Iterator[Problem]:
    """Every row is computed by the same number of ranks."""
    ranks, together = MODEL.ranks(run), sharing_rows(run)
    if ranks % together:
        written = [f"{name} = {getattr(run, name)}" for name in _SIZES if getattr(run, name) > 1]
        yield Problem(
            path=next(name for name in _SIZES if getattr(run, name) > 1),
            message=f"{ranks} ranks cannot be divided into groups of {together} ({', '.join(written)})",
            hint=f"sizes whose product is one of {', '.join(map(str, divisors(ranks)))}",
        )


def shared_sequences_are_packed(run: SupervisedConfig) -> Iterator[Problem]:
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


def gathered_keys_are_not_dropped(run: SupervisedConfig) -> Iterator[Problem]:
    """Attention in blocks of gathered keys has no dropout."""
    if run.use_dropout and run.context_parallel_size > 1:
        message = f"attention dropout does not work with context_parallel_size = {run.context_parallel_size}"
        hint = "set it to false, or use sequence_parallel_size instead"
        yield Problem(path="use_dropout", message=message, hint=hint)


def experts_are_spread_under_fsdp(run: SupervisedConfig) -> Iterator[Problem]:
    """Experts are spread over all ranks under FSDP, with all other matrices whole."""
    path, size, ranks = "expert_parallel_size", run.expert_parallel_size, MODEL.ranks(run)
    if size == 1:
        return
    if not MODEL.reads(run, "fsdp_config"):
        message = f"{size}: strategy = {run.strategy} does not read it"
        yield Problem(path=path, message=message, hint="set it to 1, or strategy = fsdp2")
    elif run.tensor_parallel_size > 1:
        message = f"{size} ranks cannot spread experts where tensor_parallel_size = {run.tensor_parallel_size}"
        yield Problem(path=path, message=message, hint="set one of them to 1")
    elif run.fsdp_config.fsdp_size not in (-1, ranks):
        message = f"{size} ranks cannot spread experts of copies that are sharded over a part of the ranks"
        yield Problem(path=path, message=message, hint="set fsdp_config.fsdp_size = -1")
    elif ranks % size:
        message = f"{size} does not divide the {ranks} ranks of the model"
        yield Problem(path=path, message=message, hint=nearest_divisors(nearest(size, divisors(ranks))))


LAYOUT_CHECKS: tuple[Check[Any], ...] = (
    ranks_form_whole_groups,
    shared_sequences_are_packed,
    gathered_keys_are_not_dropped,
    experts_are_spread_under_fsdp,
)

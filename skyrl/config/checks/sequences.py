"""Checks of models whose ranks share sequences. Whether they divide the model's heads is seen when a run starts."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.root import SkyRLTrainConfig
from skyrl.config.sizes import models_of
from skyrl.errors import Problem
from skyrl.tree.rules import Check


def shared_sequences_are_packed(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Ranks share the row that samples are packed into; padded rows would be cut into stretches of padding."""
    if run.trainer.use_sample_packing:
        return
    for path, size in _sharing(run):
        yield Problem(
            path=path,
            message=f"{size} ranks share a sequence only where samples are packed",
            hint="set trainer.use_sample_packing = true",
        )


def shared_sequences_are_attended_to_by_torch(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Between ranks, stretches are exchanged for heads around torch's own kernels, on CUDA those of FlashAttention."""
    if run.trainer.attention in (None, "sdpa"):
        return
    for path, size in _sharing(run):
        yield Problem(
            path=path,
            message=f"{size} ranks cannot share a sequence where trainer.attention is {run.trainer.attention}",
            hint="set trainer.attention = sdpa, which takes torch's FlashAttention kernels on CUDA",
        )


SEQUENCE_CHECKS: tuple[Check[SkyRLTrainConfig], ...] = (
    shared_sequences_are_packed,
    shared_sequences_are_attended_to_by_torch,
)


def _sharing(run: SkyRLTrainConfig) -> Iterator[tuple[str, int]]:
    """Path and size of each model whose ranks share sequences; Megatron does not read the size."""
    for model in models_of(run):
        size = getattr(run.trainer, model).sequence_parallel_size
        if size > 1 and run.trainer.strategy != "megatron":
            yield f"trainer.{model}.sequence_parallel_size", size

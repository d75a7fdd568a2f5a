"""Checks of models whose ranks share sequences, matrices or experts.

Whether the sizes divide the model is checked in `skyrl.experiments.model_checks`, which reads its files.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from skyrl.config.checks import checks_in
from skyrl.config.derive.sizes import degrees_of, models_of
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.config.settings.strategies import facts_of
from skyrl.errors import Problem


def sequence_parallel_needs_packing(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Ranks share the row that samples are packed into; padded rows would be cut into stretches of padding."""
    if run.trainer.use_sample_packing:
        return
    for path, size in _sharing(run):
        yield Problem(
            path=path,
            message=f"{size} ranks share a sequence only where samples are packed",
            hint="set trainer.use_sample_packing = true",
        )


def sequence_parallel_needs_torch_attention(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Ranks that share sequences use torch's own attention kernels, which on CUDA are those of FlashAttention."""
    if run.trainer.attention in (None, "sdpa") or facts_of(run.trainer).own_modules:
        return
    for path, size in _sharing(run):
        yield Problem(
            path=path,
            message=f"{size} ranks cannot share a sequence where trainer.attention is {run.trainer.attention}",
            hint="set trainer.attention = sdpa, which uses torch's FlashAttention kernels on CUDA",
        )


SEQUENCE_CHECKS = checks_in(__name__)


def _sharing(run: SkyRLTrainConfig) -> Iterator[tuple[str, int]]:
    """Path and size of each model whose ranks share sequences."""
    own = facts_of(run.trainer).degrees
    for model, dimension in product(models_of(run), ("sequence", "context")):
        size = getattr(degrees_of(run, model), dimension)
        if size > 1:
            yield f"trainer.{model}.{own[dimension]}", size

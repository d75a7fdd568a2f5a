"""Checks of models whose ranks share sequences, matrices or experts.

Whether the sizes divide the model is checked in `skyrl.experiments.model_checks`, which reads its files.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from skyrl.config.checks.every_kind import flash_attention_computes_on_cuda
from skyrl.config.derive.sizes import degrees_of, grid_of, models_of, trained_models
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.config.settings.strategies import facts_of, reads
from skyrl.errors import Problem
from skyrl.planning.batches import divisors, nearest
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
    """Ranks that share sequences use torch's own attention kernels, which on CUDA are those of FlashAttention."""
    if run.trainer.attention in (None, "sdpa") or facts_of(run.trainer).own_modules:
        return
    for path, size in _sharing(run):
        yield Problem(
            path=path,
            message=f"{size} ranks cannot share a sequence where trainer.attention is {run.trainer.attention}",
            hint="set trainer.attention = sdpa, which uses torch's FlashAttention kernels on CUDA",
        )


def attention_has_kernels_for_the_device(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """FlashAttention has kernels for CUDA only."""
    yield from flash_attention_computes_on_cuda(run.trainer.attention, run.trainer.device, "trainer.attention")


def gathered_keys_are_not_dropped(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Attention in blocks of gathered keys has no dropout."""
    for model in trained_models(run):
        section, path = getattr(run.trainer, model), f"trainer.{model}.use_dropout"
        if section.use_dropout and section.context_parallel_size > 1:
            yield Problem(
                path=path,
                message=f"attention dropout does not work with context_parallel_size = {section.context_parallel_size}",
                hint=f"set it to false, or use trainer.{model}.sequence_parallel_size instead",
            )


def strategies_read_the_degrees(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A strategy has its own fields for ranks along a dimension: Megatron's are in `megatron_config`, where a context
    size takes the place of a sequence size, and DeepSpeed has none for experts.
    """
    own = facts_of(run.trainer).degrees
    for model, dimension in product(models_of(run), ("sequence", "context", "tensor", "expert")):
        name = f"{dimension}_parallel_size"
        size = getattr(getattr(run.trainer, model), name)
        if size == 1 or name in own.values():
            continue
        field = own.get("context" if dimension == "sequence" else dimension)
        other = f"trainer.{model}.{field} = {size}" if field else "trainer.strategy = fsdp2"
        yield Problem(
            path=f"trainer.{model}.{name}",
            message=f"{size}: strategy = {run.trainer.strategy} does not read it",
            hint=f"set it to 1, {'and' if field else 'or'} {other}",
        )


def experts_are_spread_under_fsdp(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Experts are spread over all ranks of a model under FSDP, with all other matrices whole."""
    for model in models_of(run) if reads(run.trainer, "fsdp_config") else ():
        path, section = f"trainer.{model}.expert_parallel_size", getattr(run.trainer, model)
        size, ranks = section.expert_parallel_size, grid_of(run, model).ranks
        if size == 1:
            continue
        if section.tensor_parallel_size > 1:
            message = f"{size} ranks cannot spread experts where tensor_parallel_size = {section.tensor_parallel_size}"
            yield Problem(path=path, message=message, hint="set one of them to 1")
        elif section.fsdp_config.fsdp_size not in (-1, ranks):
            message = f"{size} ranks cannot spread experts of copies that are sharded over a part of the ranks"
            yield Problem(path=path, message=message, hint=f"set trainer.{model}.fsdp_config.fsdp_size = -1")
        elif ranks % size:
            fitting = " and ".join(map(str, nearest(size, divisors(ranks))))
            message = f"{size} does not divide the {ranks} ranks of the model"
            yield Problem(path=path, message=message, hint=f"nearest divisors: {fitting}")


SEQUENCE_CHECKS: tuple[Check[SkyRLTrainConfig], ...] = (
    shared_sequences_are_packed,
    shared_sequences_are_attended_to_by_torch,
    attention_has_kernels_for_the_device,
    gathered_keys_are_not_dropped,
    strategies_read_the_degrees,
    experts_are_spread_under_fsdp,
)


def _sharing(run: SkyRLTrainConfig) -> Iterator[tuple[str, int]]:
    """Path and size of each model whose ranks share sequences."""
    own = facts_of(run.trainer).degrees
    for model, dimension in product(models_of(run), ("sequence", "context")):
        size = getattr(degrees_of(run, model), dimension)
        if size > 1:
            yield f"trainer.{model}.{own[dimension]}", size

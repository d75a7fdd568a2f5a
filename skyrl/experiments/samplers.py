"""Builds the sampler of a run from its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import frozen

from skyrl.config.foundation.import_paths import is_import_path
from skyrl.config.settings.samplers import CurriculumConfig, SamplerConfig
from skyrl.data.samplers import (
    CustomSampler,
    Mixture,
    Permutation,
    Pool,
    Pools,
    Sampler,
    Schedule,
    SkipSolved,
    TargetDifficulty,
)
from skyrl.errors import DataError
from skyrl.trajectory import Prompt


@frozen(kw_only=True)
class SampledRows:
    """The rows that a sampler draws from."""

    rows: Sequence[Any]
    sizes: tuple[int, ...]
    """Number of rows of each source."""

    batch: int
    """Rows in a batch."""

    seed: int


def sampler_of(config: SamplerConfig, drawn: SampledRows, permutation: Permutation) -> Sampler:
    """The configured sampler. `permutation` is the one that follows the order of the rows. Raises `UserError`."""
    sampler = _make_sampler(config.sampler, config, drawn, permutation)
    if not isinstance(config, CurriculumConfig) or config.skip_solved is None:
        return sampler
    return SkipSolved(sampler, len(drawn.rows), times=config.skip_solved, reward=config.solved_reward)


def _make_sampler(name: str, config: SamplerConfig, drawn: SampledRows, permutation: Permutation) -> Sampler:
    if is_import_path(name):
        return CustomSampler(name, drawn.rows, config.sampler_kwargs)
    if name == "mixture":
        return Mixture(drawn.sizes, [(stage.step, stage.weights) for stage in config.mixture], drawn.seed)
    if name == "schedule":
        named = [(stage.step, _make_sampler(stage.sampler, config, drawn, permutation)) for stage in config.stages]
        return Schedule(named)
    if name == "pools" and isinstance(config, CurriculumConfig):
        pools = [Pool(pool.name, pool.threshold, pool.weight) for pool in config.pools]
        return Pools(len(drawn.rows), pools, config.unseen_weight, config.pool_memory, drawn.seed)
    if name == "target_difficulty" and isinstance(config, CurriculumConfig):
        target = config.target
        return TargetDifficulty(
            np.array([_difficulty(prompt, target.column) for prompt in drawn.rows]),
            initial=target.initial,
            bounds=(target.min, target.max),
            step_size=target.step_size,
            sensitivity=target.sensitivity,
            reward=target.reward,
            batch=drawn.batch,
            seed=drawn.seed,
        )
    return permutation


def _difficulty(prompt: Prompt, column: str) -> float:
    value: object = prompt.extras
    for part in column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise DataError(
            f"data.curriculum.target.column = {column}: row {prompt.id} has {value!r:.40} there, and no number; name "
            "the column of the difficulties, with a dot for one in a table, such as extra_info.difficulty"
        )
    return float(value)

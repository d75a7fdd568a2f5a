"""Checks of a learning-rate schedule of any model."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.settings.learners import OptimizerConfig
from skyrl.errors import Problem

WITHOUT_FIELDS = ("reduce_lr_on_plateau", "greedy")
"""Schedules with parameters that have no field."""


def schedule_problems(config: OptimizerConfig, path: str) -> Iterator[Problem]:
    """Contradictory settings of a learning-rate schedule; `path` is the path of the optimizer's table."""
    if config.scheduler in WITHOUT_FIELDS:
        yield Problem(
            path=f"{path}.scheduler",
            message=f"{config.scheduler!r} needs settings that are not implemented yet in this version",
            hint="use another, such as constant_with_warmup, linear, cosine, warmup_stable_decay or inverse_sqrt",
        )
    yield from config.problems_at(path)

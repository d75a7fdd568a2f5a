"""Checks of a learning-rate schedule of any model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from skyrl.config.learners import OptimizerConfig
from skyrl.errors import Problem
from skyrl.tree.rules import Effect

WITHOUT_FIELDS = ("reduce_lr_on_plateau", "greedy")
"""Schedules with parameters that have no field."""

DECAYING = ("linear", "cosine", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay")
"""Schedules that end at `min_lr_ratio`."""

OURS = (*DECAYING, "constant", "constant_with_warmup")
"""Schedules that `skyrl.learners.schedule` computes itself; the others are transformers' own."""


def schedule_problems(config: OptimizerConfig, path: str) -> Iterator[Problem]:
    """Contradictory settings of a learning-rate schedule; `path` is the path of the optimizer's table."""
    if config.scheduler in WITHOUT_FIELDS:
        yield Problem(
            path=f"{path}.scheduler",
            message=f"{config.scheduler!r} needs settings that are not implemented yet in this version",
            hint="use another, such as constant_with_warmup, linear, cosine, warmup_stable_decay or inverse_sqrt",
        )
    yield from config.problems_at(path)


def schedule_reads(
    path: str, optimizer: Callable[[Any], OptimizerConfig], updates: Callable[[Any], int]
) -> tuple[Effect, ...]:
    """Conditions under which the fields of a schedule act; `updates` are optimizer steps in one training step."""

    def follows(*names: str) -> Callable[[Any], bool]:
        return lambda run: optimizer(run).scheduler in names

    return (
        Effect(f"{path}.min_lr_ratio", f"scheduler is one of {', '.join(DECAYING)}", follows(*DECAYING)),
        Effect(f"{path}.num_decay_steps", "scheduler is warmup_stable_decay", follows("warmup_stable_decay")),
        Effect(
            f"{path}.warmup_start_ratio",
            "there is a warm-up, of a schedule that is not transformers' own",
            lambda run: follows(*OURS)(run) and _warms_up(optimizer(run)),
        ),
        *(
            Effect(f"{path}.{name}", "scheduler is not constant", lambda run: not follows("constant")(run))
            for name in ("num_warmup_steps", "warmup_steps_proportion")
        ),
        Effect(
            f"{path}.schedule_unit",
            "the learning rate changes and a training step has several optimizer steps",
            lambda run: updates(run) > 1 and _changes(optimizer(run)),
        ),
    )


def _warms_up(config: OptimizerConfig) -> bool:
    return config.scheduler != "constant" and bool(config.num_warmup_steps or config.warmup_steps_proportion)


def _changes(config: OptimizerConfig) -> bool:
    return _warms_up(config) or config.scheduler not in ("constant", "constant_with_warmup")

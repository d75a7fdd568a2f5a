"""Checks of where a run begins, of which checkpoints it keeps, and of alarms that may end it."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.checks.every_kind import alarms_name_a_metric, recovery_begins_where_resuming_does
from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import Problem
from skyrl.tree.rules import Check


def a_resumed_run_has_a_path(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """`from_path` says where from, and only it does."""
    if run.trainer.resume_mode == "from_path" and not run.trainer.resume_path:
        hint = "give the folder of a checkpoint: .../global_step_N"
        yield Problem(path="trainer.resume_path", message="resume_mode = from_path needs it", hint=hint)
    if run.trainer.resume_path and run.trainer.resume_mode != "from_path":
        message = f"is not read with resume_mode = {run.trainer.resume_mode}"
        yield Problem(path="trainer.resume_path", message=message, hint="set trainer.resume_mode = from_path")


def recovery_and_resuming_agree(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """One field says where a run begins, and it may not be contradicted by the other."""
    resume = run.trainer.resume_mode
    yield from recovery_begins_where_resuming_does(
        run.trainer.recover_mode,
        resume,
        path="trainer.recover_mode",
        written=f"trainer.resume_mode = {resume or 'none'}",
    )


def the_best_checkpoints_have_a_measure(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Best is by some metric."""
    if run.trainer.ckpt_keep_best > 0 and not run.trainer.ckpt_best_metric:
        yield Problem(
            path="trainer.ckpt_best_metric",
            message=f"ckpt_keep_best = {run.trainer.ckpt_keep_best} needs it",
            hint="name a metric of metrics.jsonl, such as eval/all/avg_score",
        )


def alarms_can_be_raised(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Each alarm says what it watches."""
    yield from alarms_name_a_metric(run.trainer.alarms, "trainer.alarms")


CHECKPOINT_CHECKS: tuple[Check[SkyRLTrainConfig], ...] = (
    a_resumed_run_has_a_path,
    recovery_and_resuming_agree,
    the_best_checkpoints_have_a_measure,
    alarms_can_be_raised,
)

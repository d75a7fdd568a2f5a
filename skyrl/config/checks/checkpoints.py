"""Checks of where a run starts, which checkpoints it keeps, and its alarms."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.checks.every_kind import alarms_name_metrics, recovery_matches_resuming
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.errors import Problem
from skyrl.tree.rules import Check


def resume_mode_matches_path(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """`resume_mode = "from_path"` needs `resume_path`, and no other mode reads it."""
    if run.trainer.resume_mode == "from_path" and not run.trainer.resume_path:
        hint = "give the folder of a checkpoint: .../global_step_N"
        yield Problem(path="trainer.resume_path", message="resume_mode = from_path needs it", hint=hint)
    if run.trainer.resume_path and run.trainer.resume_mode != "from_path":
        message = f"is not read with resume_mode = {run.trainer.resume_mode}"
        yield Problem(path="trainer.resume_path", message=message, hint="set trainer.resume_mode = from_path")


def recover_mode_matches_resuming(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """`recover_mode` and `resume_mode` must not contradict each other about where a run starts."""
    resume = run.trainer.resume_mode
    yield from recovery_matches_resuming(
        run.trainer.recover_mode,
        resume,
        path="trainer.recover_mode",
        written=f"trainer.resume_mode = {resume or 'none'}",
    )


def best_checkpoints_need_metric(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Keeping the best checkpoints needs a metric to compare them by."""
    if run.trainer.ckpt_keep_best > 0 and not run.trainer.ckpt_best_metric:
        yield Problem(
            path="trainer.ckpt_best_metric",
            message=f"ckpt_keep_best = {run.trainer.ckpt_keep_best} needs it",
            hint="set it to a metric of metrics.jsonl, such as eval/all/avg_score",
        )


def alarms_are_valid(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Each alarm names the metric that it watches."""
    yield from alarms_name_metrics(run.trainer.alarms, "trainer.alarms")


CHECKPOINT_CHECKS: tuple[Check[SkyRLTrainConfig], ...] = (
    resume_mode_matches_path,
    recover_mode_matches_resuming,
    best_checkpoints_need_metric,
    alarms_are_valid,
)

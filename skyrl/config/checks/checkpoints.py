"""Checks of where a run starts, and which checkpoints it keeps."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.errors import Problem


def resume_mode_matches_path(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """`resume_mode = "from_path"` needs `resume_path`, and no other mode reads it."""
    if run.trainer.resume_mode == "from_path" and not run.trainer.resume_path:
        hint = "give the folder of a checkpoint: .../global_step_N"
        yield Problem(path="trainer.resume_path", message="resume_mode = from_path needs it", hint=hint)
    if run.trainer.resume_path and run.trainer.resume_mode != "from_path":
        message = f"is not read with resume_mode = {run.trainer.resume_mode}"
        yield Problem(path="trainer.resume_path", message=message, hint="set trainer.resume_mode = from_path")


def best_checkpoints_need_metric(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Keeping the best checkpoints needs a metric to compare them by."""
    if run.trainer.ckpt_keep_best > 0 and not run.trainer.ckpt_best_metric:
        yield Problem(
            path="trainer.ckpt_best_metric",
            message=f"ckpt_keep_best = {run.trainer.ckpt_keep_best} needs it",
            hint="set it to a metric of metrics.jsonl, such as eval/all/avg_score",
        )

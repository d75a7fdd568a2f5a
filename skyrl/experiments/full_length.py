"""Runs of made-up steps (`trainer.num_dummy_steps`), which test whether the longest batches fit before training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import mean
from typing import Any

from skyrl.config import SkyRLTrainConfig
from skyrl.config.derive.every_kind import folder_of
from skyrl.config.derive.sizes import longest_row
from skyrl.rollout.full_length import FullLengthRollouts
from skyrl.tree import evolve_at

FOLDER = "full_length"
"""Folder of such a run, below that of the run itself, which stays free for training."""


def without_traces(run: SkyRLTrainConfig) -> SkyRLTrainConfig:
    """A copy of the run without evaluation, checkpoints and exports, which resumes nothing and has its own folder."""
    folder = f"{folder_of(run.trainer)}/{FOLDER}"
    changes: dict[str, Any] = {
        **dict.fromkeys(("eval_interval", "ckpt_interval", "hf_save_interval"), -1),
        "eval_before_train": False,
        "resume_mode": "none",
        "recover_mode": None,
        "recording": "off",
        "samples_per_step_kept": 1,
        "run_path": folder,
        "ckpt_path": f"{folder}/checkpoints",
        "export_path": f"{folder}/exports",
    }
    for name, value in changes.items():
        run = evolve_at(run, f"trainer.{name}", value)
    return run


def full_length_rollouts(run: SkyRLTrainConfig, vocabulary: int) -> FullLengthRollouts:
    """Batches of the run's size, with rows of the run's maximum length."""
    prompt, answer = longest_row(run)
    return FullLengthRollouts(
        prompts=run.trainer.train_batch_size,
        samples=run.generator.n_samples_per_prompt,
        prompt_tokens=prompt,
        answer_tokens=answer,
        vocabulary=vocabulary,
        has_logprobs=run.generator.sampling_params.logprobs is not None,
        seed=run.trainer.seed,
    )


def verdict(run: SkyRLTrainConfig, records: Iterable[Mapping[str, Any]]) -> str:
    """Sentence about finished made-up steps: that they fit, and how long they took."""
    seconds = [record["timing/step"] for record in records if "timing/step" in record]
    (prompt, answer), steps = longest_row(run), run.trainer.num_dummy_steps
    samples = run.trainer.train_batch_size * run.generator.n_samples_per_prompt
    return (
        f"{steps} made-up step{'s' * (steps != 1)} of {samples:,} samples of {prompt:,} + {answer:,} tokens fit, in "
        f"{mean(seconds):.1f} s each without sampling. Nothing was trained or kept: set trainer.num_dummy_steps = 0 to "
        "train."
    )

"""Conditions under which the fields of a supervised run have an effect."""

from __future__ import annotations

from skyrl.config.checks.schedule import schedule_reads
from skyrl.config.every_kind import EVERY_KIND_EFFECTS
from skyrl.config.supervised.root import SupervisedConfig
from skyrl.tree.rules import Effect


def _is_fsdp(run: SupervisedConfig) -> bool:
    return run.strategy in ("fsdp", "fsdp2")


SUPERVISED_EFFECTS: tuple[Effect, ...] = (
    *EVERY_KIND_EFFECTS,
    *schedule_reads("optimizer_config", lambda run: run.optimizer_config),
    Effect("optimizer_config.offload_after_step", "engines share the device, and there are none", lambda run: False),
    Effect(
        "optimizer_config.max_skipped_updates",
        "faults.on_non_finite is skip",
        lambda run: run.faults.on_non_finite == "skip",
    ),
    Effect("faults.max_skipped_steps", "a reinforcement-learning run leaves steps out", lambda run: False),
    Effect("faults.max_roll_backs", "a reinforcement-learning run goes back", lambda run: False),
    Effect("fsdp_config", "the strategy is fsdp2", _is_fsdp),
    Effect("deepspeed_config", "the strategy is deepspeed", lambda run: run.strategy == "deepspeed"),
    Effect(
        "micro_train_batch_size_per_gpu",
        "max_tokens_per_microbatch is -1",
        lambda run: run.max_tokens_per_microbatch == -1,
    ),
    Effect("eval_dataset_names", "there are eval_datasets", lambda run: bool(run.eval_datasets)),
)

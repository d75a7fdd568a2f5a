"""Conditions under which the fields of a supervised run have an effect."""

from __future__ import annotations

from skyrl.config.derive.every_kind import EVERY_KIND_EFFECTS, saves
from skyrl.config.derive.supervised_model import MODEL
from skyrl.config.effects.models import model_effects
from skyrl.config.foundation.intervals import read_interval
from skyrl.config.settings.strategies import facts_of
from skyrl.config.settings.supervised_root import SupervisedConfig
from skyrl.tree.rules import Effect


def evaluates(run: SupervisedConfig) -> bool:
    """Whether the run ever evaluates."""
    return run.eval_before_train or read_interval(run.eval_interval).ever


def _resumes(run: SupervisedConfig) -> bool:
    return run.recover_mode != "disabled" and (run.resume_from != "" or run.recover_mode is not None)


def _is_named(run: SupervisedConfig) -> bool:
    return bool(run.chat_template.name_or_path)


SUPERVISED_EFFECTS: tuple[Effect, ...] = (
    *EVERY_KIND_EFFECTS,
    *model_effects(MODEL),
    Effect("record_memory", "profile_steps has a step", lambda run: bool(run.profile_steps)),
    Effect(
        "use_torch_compile",
        "tensor_parallel_size is 1, and the device is a CPU or the strategy is fsdp2",
        lambda run: run.tensor_parallel_size == 1 and (run.device != "cuda" or facts_of(run).compiles),
    ),
    Effect("optimizer_config.offload_after_step", "engines share the device, and there are none", lambda run: False),
    Effect(
        "optimizer_config.max_skipped_updates",
        "faults.on_non_finite is skip",
        lambda run: run.faults.on_non_finite == "skip",
    ),
    Effect("faults.max_skipped_steps", "a reinforcement-learning run leaves steps out", lambda run: False),
    Effect("faults.max_roll_backs", "a reinforcement-learning run goes back", lambda run: False),
    Effect(
        "micro_train_batch_size_per_gpu",
        "max_tokens_per_microbatch is -1",
        lambda run: run.max_tokens_per_microbatch == -1,
    ),
    Effect(
        "epoch_tail",
        "there are several epochs (num_epochs)",
        lambda run: run.num_epochs > 1 or run.epoch_tail == "short",
    ),
    Effect("eval_datasets", "evaluation is on (eval_before_train or eval_interval)", evaluates),
    Effect("eval_dataset_names", "evaluation is on (eval_before_train or eval_interval)", evaluates),
    Effect("chat_template.source", "chat_template.name_or_path is given", _is_named),
    Effect("ckpt_path", "checkpoints are saved or resumed from", lambda run: saves(run) or _resumes(run)),
    Effect("resume_with_changes", "the run may resume (resume_from is not empty)", _resumes),
    Effect(
        "export_path",
        "the model is exported while it trains (hf_save_interval)",
        lambda run: read_interval(run.hf_save_interval).ever,
    ),
)

"""Conditions under which the fields of a supervised run have an effect."""

from __future__ import annotations

from skyrl.config.derive.every_kind import EVERY_KIND_EFFECTS, evaluates, may_resume
from skyrl.config.derive.supervised_rules import MODEL
from skyrl.config.effects.models import model_effects
from skyrl.config.effects.samplers import SAMPLER_EFFECTS, draws_by
from skyrl.config.foundation.intervals import read_interval
from skyrl.config.settings.strategies import facts_of
from skyrl.config.settings.supervised_root import SFTConfig, SupervisedConfig
from skyrl.tree.rules import Condition, Effect, condition, effects, fields_in, is_given, is_one

_EVALUATES = Condition("evaluation is on (eval_before_train or eval_interval)", evaluates)
_ENGINES = Condition("engines share the device, and there are none", lambda run: False)
_SKIPS_STEPS = Condition("a reinforcement-learning run leaves steps out", lambda run: False)
_ROLLS_BACK = Condition("a reinforcement-learning run goes back", lambda run: False)


@condition("tensor_parallel_size is 1, and the device is a CPU or the strategy is fsdp2")
def _compiles(run: SupervisedConfig) -> bool:
    return run.tensor_parallel_size == 1 and (run.device != "cuda" or facts_of(run).compiles)


_RESUMES = Condition("the run may resume (resume_from is not empty)", may_resume)


_LOADS = Condition("rows are loaded (streaming = false)", lambda run: not run.streaming)
_SHUFFLES_A_STREAM = Condition(
    "rows are streamed and shuffled (streaming, sampler)", lambda run: run.streaming and run.sampler == "random"
)


@condition("there are several epochs (num_epochs)")
def _has_epochs(run: SupervisedConfig) -> bool:
    return run.num_epochs > 1 or run.epoch_tail == "short"


@condition("the model is exported while it trains (hf_save_interval)")
def _exports(run: SupervisedConfig) -> bool:
    return read_interval(run.hf_save_interval).ever


SUPERVISED_EFFECTS: tuple[Effect, ...] = (
    *EVERY_KIND_EFFECTS,
    *model_effects(MODEL),
    Effect("record_memory", Condition("profile_steps has a step", lambda run: bool(run.profile_steps))),
    Effect("use_torch_compile", _compiles),
    Effect("optimizer_config.offload_after_step", _ENGINES),
    Effect("optimizer_config.max_skipped_updates", is_one("faults.on_non_finite", "skip", name="faults.on_non_finite")),
    Effect("faults.max_skipped_steps", _SKIPS_STEPS),
    Effect("faults.max_roll_backs", _ROLLS_BACK),
    Effect("micro_train_batch_size_per_gpu", is_one("max_tokens_per_microbatch", -1)),
    Effect("epoch_tail", _LOADS & _has_epochs),
    Effect("shuffle_buffer_size", _SHUFFLES_A_STREAM),
    Effect("num_epochs", _LOADS),
    *SAMPLER_EFFECTS,
    *effects(draws_by("permutation"), "sampler", "train_dataset_weights"),
    *effects(_EVALUATES, "eval_datasets", "eval_dataset_names"),
    Effect("chat_template.source", is_given("chat_template.name_or_path", "chat_template.name_or_path")),
    Effect("resume_with_changes", _RESUMES),
    Effect("export_path", _exports),
)


@condition("there is a teacher (stored, teacher_path or endpoint.url)")
def _distills(run: SFTConfig) -> bool:
    return run.distillation.has_teacher


@condition("the likeliest tokens are compared (stored, or top_k)")
def _compares_few(run: SFTConfig) -> bool:
    return not run.distillation.compares_all


TEACHER_EFFECTS: tuple[Effect, ...] = (
    *effects(_distills, *fields_in("distillation", "coef task_coef beta top_k temperature max_divergence")),
    *effects(_distills & _compares_few, *fields_in("distillation", "tail min_logprob")),
    *effects(
        is_given("distillation.endpoint.url", "distillation.endpoint.url"),
        *fields_in("distillation.endpoint", "protocol timeout max_requests"),
    ),
)
"""Conditions under which the fields of the teacher of supervised fine-tuning have an effect."""

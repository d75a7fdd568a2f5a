"""Conditions under which the fields of a supervised run have an effect."""

from __future__ import annotations

from skyrl.config.derive.every_kind import EVERY_KIND_EFFECTS, evaluates, may_resume
from skyrl.config.derive.supervised_rules import MODEL
from skyrl.config.effects.models import model_effects, never
from skyrl.config.effects.samplers import SAMPLER_EFFECTS, draws_by
from skyrl.config.foundation.intervals import read_interval
from skyrl.config.settings.preference_root import PREFERENCE_LOSSES, USER_LOSS
from skyrl.config.settings.strategies import facts_of
from skyrl.tree.rules import Condition, Effect, effects, fields_in, is_given, is_one, join_choices

_EVALUATES = Condition("evaluation is on (eval_before_train or eval_interval)", evaluates)
_COMPILES = Condition(
    "tensor_parallel_size is 1, and the device is a CPU or the strategy is fsdp2",
    lambda run: run.tensor_parallel_size == 1 and (run.device != "cuda" or facts_of(run).compiles),
)
_LOADS = Condition("rows are loaded (streaming = false)", lambda run: not run.streaming)
_SHUFFLES_A_STREAM = Condition(
    "rows are streamed and shuffled (streaming, sampler)", lambda run: run.streaming and run.sampler == "random"
)
_HAS_EPOCHS = Condition(
    "there are several epochs (num_epochs)", lambda run: run.num_epochs > 1 or run.epoch_tail == "short"
)
_EXPORTS = Condition(
    "the model is exported during training (hf_save_interval)", lambda run: read_interval(run.hf_save_interval).ever
)


SUPERVISED_EFFECTS: tuple[Effect, ...] = (
    *EVERY_KIND_EFFECTS,
    *model_effects(MODEL),
    Effect("record_memory", Condition("profile_steps has a step", lambda run: bool(run.profile_steps))),
    Effect("use_torch_compile", _COMPILES),
    Effect("optimizer_config.offload_after_step", never("engines share the device, and there are none")),
    Effect("optimizer_config.max_skipped_updates", is_one("faults.on_non_finite", "skip", name="faults.on_non_finite")),
    Effect("faults.max_skipped_steps", never("a reinforcement-learning run skips steps")),
    Effect("faults.max_roll_backs", never("a reinforcement-learning run rolls back")),
    Effect("micro_train_batch_size_per_gpu", is_one("max_tokens_per_microbatch", -1)),
    Effect("epoch_tail", _LOADS & _HAS_EPOCHS),
    Effect("shuffle_buffer_size", _SHUFFLES_A_STREAM),
    Effect("num_epochs", _LOADS),
    *SAMPLER_EFFECTS,
    *effects(draws_by("permutation"), "sampler", "train_dataset_weights"),
    *effects(_EVALUATES, "eval_datasets", "eval_dataset_names"),
    Effect("chat_template.source", is_given("chat_template.name_or_path", "chat_template.name_or_path")),
    Effect("resume_with_changes", Condition("the run may resume (resume_from is not empty)", may_resume)),
    Effect("export_path", _EXPORTS),
)


_DISTILLS = Condition(
    "there is a teacher (stored, teacher_path or endpoint.url)", lambda run: run.distillation.has_teacher
)
_COMPARES_FEW = Condition(
    "the likeliest tokens are compared (stored, or top_k)", lambda run: not run.distillation.compares_all
)


TEACHER_EFFECTS: tuple[Effect, ...] = (
    *effects(_DISTILLS, *fields_in("distillation", "coef task_coef beta top_k temperature max_divergence")),
    *effects(_DISTILLS & _COMPARES_FEW, *fields_in("distillation", "tail min_logprob")),
    *effects(
        is_given("distillation.endpoint.url", "distillation.endpoint.url"),
        *fields_in("distillation.endpoint", "protocol timeout max_requests"),
    ),
)
"""Conditions under which the fields of the teacher of supervised fine-tuning have an effect."""


def _read_by(field: str) -> Effect:
    readers = [name for name, loss in PREFERENCE_LOSSES.items() if field in loss.fields]
    words = f"loss_type names {join_choices([*readers, *['a loss of your own'] * (field in USER_LOSS.fields)], 'or')}"
    return Effect(field, Condition(words, lambda run: any(field in loss.fields for loss in run.facts)))


_COMPARES = Condition("a loss compares with a reference, and reference_free is off", lambda run: run.compares)
_WEIGHS_PAIRS = Condition(
    "a loss compares the answers of pairs (loss_type)",
    lambda run: any(loss.fields and not loss.unpaired and not loss.ranks for loss in run.facts),
)
_IS_UNPAIRED = Condition("a row is one answer (loss_type is kto or apo_zero_unpaired)", lambda run: run.unpaired)
_IS_PAIRED = Condition("a row is a pair (loss_type is not kto or apo_zero_unpaired)", lambda run: not run.unpaired)
_MOVES_REFERENCE = Condition(
    "a loss compares with a reference, into which the policy is mixed (sync_ref_model)",
    lambda run: run.compares and run.sync_ref_model,
)
_MAY_COMPARE = Condition(
    "a loss compares with a reference (loss_type)", lambda run: any(loss.reference for loss in run.facts)
)


PREFERENCE_EFFECTS: tuple[Effect, ...] = (
    *map(
        _read_by, ("beta", "label_smoothing", "discopop_tau", "simpo_gamma", "desirable_weight", "undesirable_weight")
    ),
    Effect("loss_weights", Condition("loss_type names several", lambda run: len(run.loss_type) > 1)),
    Effect("f_divergence_type", _MAY_COMPARE),
    Effect("f_alpha_divergence_coef", is_one("f_divergence_type", "alpha_divergence")),
    Effect("ld_alpha", _WEIGHS_PAIRS),
    Effect("reference_free", _MAY_COMPARE),
    *effects(_IS_PAIRED, "chosen_key", "rejected_key"),
    *effects(_IS_UNPAIRED, "completion_key", "label_key"),
    *effects(_IS_PAIRED, "num_answers", "answers_key", "ranks_key", "scores_key"),
    Effect("use_weighting", _WEIGHS_PAIRS),
    *effects(_COMPARES, "ref_model_path", "precompute_ref_log_probs", "sync_ref_model"),
    *effects(_MOVES_REFERENCE, "ref_model_mixup_alpha", "ref_model_sync_steps"),
    Effect("ref_log_probs_path", _COMPARES & Condition("they are stored", lambda run: run.precompute_ref_log_probs)),
)
"""Conditions under which the fields of a preference run have an effect, besides those of every supervised run."""

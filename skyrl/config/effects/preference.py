"""Conditions under which the fields of a preference run have an effect, besides those of every supervised run."""

from __future__ import annotations

from skyrl.config.settings.preference_root import PREFERENCE_LOSSES, USER_LOSS, PreferenceConfig
from skyrl.tree.rules import Condition, Effect, condition, effects, is_one, join_choices


def _read_by(field: str) -> Effect:
    readers = [name for name, loss in PREFERENCE_LOSSES.items() if field in loss.fields]
    words = f"loss_type names {join_choices([*readers, *['a loss of your own'] * (field in USER_LOSS.fields)], 'or')}"
    return Effect(field, Condition(words, lambda run: any(field in loss.fields for loss in run.facts)))


@condition("a loss compares with a reference, and reference_free is off")
def _compares(run: PreferenceConfig) -> bool:
    return run.compares


@condition("a loss of pairs is minimized (loss_type)")
def _weighs_pairs(run: PreferenceConfig) -> bool:
    return any(loss.fields and not loss.unpaired and not loss.ranks for loss in run.facts)


@condition("a row is one answer (loss_type is kto or apo_zero_unpaired)")
def _is_unpaired(run: PreferenceConfig) -> bool:
    return run.unpaired


@condition("a row is a pair (loss_type is not kto or apo_zero_unpaired)")
def _is_paired(run: PreferenceConfig) -> bool:
    return not run.unpaired


@condition("a loss compares with a reference, into which the policy is mixed (sync_ref_model)")
def _moves_reference(run: PreferenceConfig) -> bool:
    return run.compares and run.sync_ref_model


@condition("a loss compares with a reference (loss_type)")
def _may_compare(run: PreferenceConfig) -> bool:
    return any(loss.reference for loss in run.facts)


PREFERENCE_EFFECTS: tuple[Effect, ...] = (
    *map(
        _read_by, ("beta", "label_smoothing", "discopop_tau", "simpo_gamma", "desirable_weight", "undesirable_weight")
    ),
    Effect("loss_weights", Condition("loss_type names several", lambda run: len(run.loss_type) > 1)),
    Effect("f_divergence_type", _may_compare),
    Effect("f_alpha_divergence_coef", is_one("f_divergence_type", "alpha_divergence")),
    Effect("ld_alpha", _weighs_pairs),
    Effect("reference_free", _may_compare),
    *effects(_is_paired, "chosen_key", "rejected_key"),
    *effects(_is_unpaired, "completion_key", "label_key"),
    *effects(_is_paired, "num_answers", "answers_key", "ranks_key", "scores_key"),
    Effect("use_weighting", _weighs_pairs),
    *effects(_compares, "ref_model_path", "precompute_ref_log_probs", "sync_ref_model"),
    *effects(_moves_reference, "ref_model_mixup_alpha", "ref_model_sync_steps"),
    Effect("ref_log_probs_path", _compares & Condition("they are stored", lambda run: run.precompute_ref_log_probs)),
)

"""Conditions under which the fields of `trainer.algorithm` have an effect."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from skyrl.config.derive.algorithm_facts import (
    FIELDS_OF_PEER_LOSSES,
    PARAMETERS_OF_PEER_ESTIMATORS,
    estimator_facts,
    loss_facts,
)
from skyrl.config.derive.rl_models import POLICY, distills, has_critic, has_reference
from skyrl.config.derive.rl_models import REFERENCE as REFERENCE_ROLE
from skyrl.config.derive.sizes import scores_old_logprobs
from skyrl.config.settings.algorithm import AlgorithmConfig
from skyrl.config.settings.estimators import ADVANTAGE_ESTIMATORS, EstimatorFacts
from skyrl.config.settings.losses import POLICY_LOSSES, LossFacts
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.tree.rules import Condition, Effect, condition, effects, fields_in, is_given, is_on, is_one, join_choices

REFERENCE = Condition(REFERENCE_ROLE.exists_where, has_reference)
CRITIC = Condition("there is a critic", has_critic)
DISTILLS = Condition("there is a teacher (trainer.teacher.model.path, sources or endpoint, or self_teacher)", distills)


@condition(
    "pi_old comes from the engine, or from a scoring pass of the learner (several optimizer steps per batch, or a KL "
    "term in the reward)"
)
def _compares_with_an_old_policy(run: SkyRLTrainConfig) -> bool:
    algorithm = run.trainer.algorithm
    return algorithm.old_logprobs != "learner" or scores_old_logprobs(algorithm, POLICY.optimizer_steps(run))


@condition(
    "the ratio pi / pi_old can differ from 1 (several optimizer steps per batch, pi_old from the engine, or a KL term "
    "in the reward; the ratios of rollout_is, of cispo to the engine and of your own loss always can)"
)
def _ratio_can_differ_from_1(run: SkyRLTrainConfig) -> bool:
    # With one optimizer step, pi_old is the same forward pass that the policy learns from (`training/objective.py`):
    # the ratio is exactly 1, and no bound around 1 is ever reached. The ratio to the engine can still differ from 1.
    algorithm = run.trainer.algorithm
    is_of_old = algorithm.policy_loss_type in POLICY_LOSSES and loss_facts(algorithm).reads_old_logprobs
    return not is_of_old or _compares_with_an_old_policy.holds(run)


_LEARNS_FROM_ANSWERS = Condition(
    "the loss does not learn from pairs (online_dpo does)",
    lambda run: not loss_facts(run.trainer.algorithm).learns_from_pairs,
)
_USES_ADVANTAGES = (
    "the loss uses advantages ("
    + join_choices([name for name, facts in POLICY_LOSSES.items() if not facts.reads_advantages], "and")
    + " do not)"
)
_READS_ADVANTAGES = Condition(_USES_ADVANTAGES, lambda run: loss_facts(run.trainer.algorithm).reads_advantages)
_READS_RETURNS = Condition(
    f"either {_USES_ADVANTAGES} or there is a critic", lambda run: _READS_ADVANTAGES.holds(run) or has_critic(run)
)
_DISCOUNTS = Condition(
    "there is a critic, or the estimator is gae, reinforce++ or your own in the signature of SkyRL or verl and "
    + _USES_ADVANTAGES,
    lambda run: (
        has_critic(run) or ("gamma" in estimator_facts(run.trainer.algorithm).fields and _READS_ADVANTAGES.holds(run))
    ),
)
_READS_REWARDS = Condition(
    "either the loss depends on rewards ("
    + join_choices([name for name, facts in POLICY_LOSSES.items() if not facts.reads_rewards], "and")
    + " does not) or there is a critic",
    lambda run: loss_facts(run.trainer.algorithm).reads_rewards or has_critic(run),
)
TEACHES = Condition(
    f"either {_USES_ADVANTAGES} or trainer.algorithm.distillation.type is loss",
    lambda run: run.trainer.algorithm.distillation.type == "loss" or _READS_ADVANTAGES.holds(run),
)


@condition(
    "use_kl_in_reward has an effect, or use_kl_loss is true with a loss that does not learn from pairs "
    "(online_dpo does)"
)
def _has_kl_term(run: SkyRLTrainConfig) -> bool:
    algorithm = run.trainer.algorithm
    in_reward = algorithm.use_kl_in_reward and _READS_REWARDS.holds(run)
    return in_reward or (algorithm.use_kl_loss and _LEARNS_FROM_ANSWERS.holds(run))


_READS_OLD_LOGPROBS = Condition(
    "the loss or a KL term in the reward compares with pi_old",
    lambda algorithm: algorithm.use_kl_in_reward or loss_facts(algorithm).reads_old_logprobs,
)
_HAS_OWN_ESTIMATOR = Condition(
    "the estimator is your own", lambda algorithm: algorithm.advantage_estimator not in ADVANTAGE_ESTIMATORS
)
_HAS_OWN_LOSS = Condition("the loss is your own", lambda algorithm: algorithm.policy_loss_type not in POLICY_LOSSES)


def _fields_of_losses() -> Iterator[Effect]:
    """The conditions of the fields that some losses read."""
    for field in dict.fromkeys(field for facts in POLICY_LOSSES.values() for field in facts.fields):
        also = ("decoupled with decoupled.dual_clip",) if field == "clip_ratio_c" else ()
        yield _field_of_some(field, "loss", POLICY_LOSSES, loss_facts, FIELDS_OF_PEER_LOSSES, also)


def _field_of_some(
    field: str,
    kind: str,
    table: Mapping[str, LossFacts] | Mapping[str, EstimatorFacts],
    facts_of: Callable[[AlgorithmConfig], LossFacts | EstimatorFacts],
    of_peers: Collection[str],
    also: Sequence[str] = (),
) -> Effect:
    """The condition of a field that only some entries of a table, losses or estimators, read. `also` names what else
    reads it; if `of_peers` has the field, code of the user's own may.
    """
    names = [name for name, facts in table.items() if field in facts.fields]
    own = ["your own in the signature of SkyRL or verl"] if field in of_peers else []
    words = f"the {kind} is {join_choices([*names, *also, *own], 'or')}"
    return Effect(field, Condition(words, lambda algorithm: field in facts_of(algorithm).fields))


_FILTERS = is_one("dynamic_sampling.type", "filter", name="dynamic_sampling.type")

_FURTHER_CONDITIONS = {
    **dict.fromkeys(("eps_clip_low", "eps_clip_high"), _ratio_can_differ_from_1),
    # `torch.minimum` splits the gradient between equal terms: a bound of 1 halves it even where the ratio is 1.
    "clip_ratio_c": is_one("trainer.algorithm.clip_ratio_c", 1) | _ratio_can_differ_from_1,
    **dict.fromkeys(("grpo_norm_by_std", "whiten_advantages"), _READS_ADVANTAGES),
    **dict.fromkeys(("lambd", "advantage"), _READS_RETURNS),
    "kl_ctrl": _READS_REWARDS,
    "max_seq_len": _LEARNS_FROM_ANSWERS,
}
"""Conditions on the whole run, for fields in `_EFFECTS_IN_TABLE` that depend on more than `trainer.algorithm`."""


def _add_further_condition(effect: Effect) -> Effect:
    nested, further = effect.below("trainer.algorithm"), _FURTHER_CONDITIONS.get(effect.path)
    return nested if further is None else Effect(nested.path, nested.condition & further)


_EFFECTS_IN_TABLE: tuple[Effect, ...] = (
    Effect("kl_ctrl", is_on("use_kl_in_reward")),
    Effect("distillation.teacher_sync_steps", is_given("distillation.teacher_update_rate")),
    Effect("distillation.discount", is_one("distillation.type", "advantage")),
    Effect("distillation.hint.column", is_one("distillation.hint.source", "column", name="hint.source")),
    Effect(
        "distillation.hint.template",
        is_one("distillation.hint.source", "column", "success", "feedback", name="hint.source"),
    ),
    *effects(is_one("distillation.type", "loss"), *fields_in("distillation", "beta temperature max_divergence top_k")),
    *effects(
        is_one("distillation.type", "loss") & is_given("distillation.top_k"),
        *fields_in("distillation", "top_k_of tail min_logprob"),
    ),
    Effect("old_logprobs", _READS_OLD_LOGPROBS),
    Effect("entropy_loss_coef", is_on("use_entropy_loss")),
    *(
        _field_of_some(field, "estimator", ADVANTAGE_ESTIMATORS, estimator_facts, PARAMETERS_OF_PEER_ESTIMATORS)
        for field in ("grpo_norm_by_std", "lambd", "whiten_advantages")
    ),
    Effect("advantage", _HAS_OWN_ESTIMATOR),
    Effect("policy_loss", _HAS_OWN_LOSS),
    *_fields_of_losses(),
    *(
        Effect(facts.table, is_one("policy_loss_type", name, name="the loss"))
        for name, facts in POLICY_LOSSES.items()
        if facts.table
    ),
    Effect("max_seq_len", is_one("loss_reduction", "seq_mean_token_sum_norm")),
    Effect("tis_imp_ratio_cap", is_on("use_tis")),
    *(
        Effect(
            f"off_policy_correction.{kind}_tis_ratio_clip_high", is_one("off_policy_correction.tis_ratio_type", kind)
        )
        for kind in ("token", "sequence")
    ),
    *(
        effect
        for short, metric in (("geo", "geometric"), ("product", "product"))
        for effect in effects(
            is_one("off_policy_correction.sequence_mask_metric", metric),
            *fields_in("off_policy_correction", f"{short}_mask_low {short}_mask_high"),
        )
    ),
    Effect("zero_variance_filter_tol", is_on("zero_variance_filter")),
    Effect("dynamic_sampling.max_sample_batches", is_given("dynamic_sampling.type", "dynamic_sampling.type")),
    *effects(_FILTERS, *fields_in("dynamic_sampling", "min_success_rate max_success_rate min_reward_spread")),
    *effects(_FILTERS, *fields_in("dynamic_sampling", "min_mean_reward max_mean_reward")),
    Effect(
        "dynamic_sampling.min_replace_ratio", is_one("dynamic_sampling.type", "replace", name="dynamic_sampling.type")
    ),
    *effects(
        is_given("reward_shaping.overlong.buffer_len"),
        *fields_in("reward_shaping.overlong", "penalty_factor max_len floor"),
    ),
    *(
        effect
        for table in ("reward_shaping.norm", "advantage_norm")
        for effect in (
            Effect(f"{table}.mean_leave1out", is_given(f"{table}.mean_level")),
            *effects(is_given(f"{table}.std_level"), *fields_in(table, "std_unbiased eps")),
        )
    ),
)
"""Effects with paths and conditions inside the table `trainer.algorithm`."""

ALGORITHM_EFFECTS: tuple[Effect, ...] = (
    *effects(_has_kl_term, *fields_in("trainer.algorithm", "kl_loss_coef kl_estimator_type")),
    *effects(_LEARNS_FROM_ANSWERS, *fields_in("trainer.algorithm", "use_kl_loss loss_reduction")),
    *effects(_READS_ADVANTAGES, *fields_in("trainer.algorithm", "advantage_batch_normalize advantage_norm")),
    Effect("trainer.algorithm.advantage_estimator", _READS_RETURNS),
    *effects(_READS_REWARDS, *fields_in("trainer.algorithm", "reward_shaping use_kl_in_reward")),
    *effects(CRITIC, *fields_in("trainer.algorithm", "value_clip value_head_prefix normalize_values")),
    Effect("trainer.algorithm.distillation", DISTILLS & TEACHES),
    Effect("trainer.algorithm.distillation.task_coef", _READS_ADVANTAGES),
    Effect("trainer.algorithm.max_importance_ratio", _compares_with_an_old_policy & _LEARNS_FROM_ANSWERS),
    Effect("trainer.algorithm.gamma", _DISCOUNTS),
    # Fields in the table of a loss, whose own condition is that this loss is chosen.
    *(
        Effect(f"trainer.algorithm.{facts.table}.{field}", _ratio_can_differ_from_1)
        for facts in POLICY_LOSSES.values()
        for field in facts.ratio_fields
    ),
    *map(_add_further_condition, _EFFECTS_IN_TABLE),
)

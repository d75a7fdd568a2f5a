"""Conditions under which the fields of `trainer.algorithm` have an effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from skyrl.config.derive.chosen_facts import estimator_facts, loss_facts
from skyrl.config.derive.rl_models import POLICY, has_critic, has_reference
from skyrl.config.derive.sizes import scores_old_logprobs
from skyrl.config.settings.algorithm import AlgorithmConfig
from skyrl.config.settings.estimators import ADVANTAGE_ESTIMATORS
from skyrl.config.settings.losses import POLICY_LOSSES
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.tree.rules import Effect


def _when(path: str, when: str, acts: Callable[[AlgorithmConfig], bool]) -> Effect:
    return Effect(f"trainer.algorithm.{path}", when, lambda run: acts(run.trainer.algorithm))


def _compares_with_an_old_policy(run: SkyRLTrainConfig) -> bool:
    """Whether log pi_old comes from a policy other than the one being updated."""
    algorithm = run.trainer.algorithm
    return algorithm.old_logprobs != "learner" or scores_old_logprobs(algorithm, POLICY.updates(run))


def _loss_tables() -> Iterator[Effect]:
    for name, facts in POLICY_LOSSES.items():
        if facts.table:
            yield _when(facts.table, f"the loss is {name}", partial(_loss_is, name=name))


def _loss_is(algorithm: AlgorithmConfig, name: str) -> bool:
    return algorithm.policy_loss_type == name


def _loss_field(field: str, also: str = "") -> Effect:
    """The condition of a field that some losses read."""
    names = [name for name, facts in POLICY_LOSSES.items() if field in facts.fields]
    return _when(field, f"the loss is {_one_of(names)}{also}", lambda algorithm: field in loss_facts(algorithm).fields)


def _estimator_field(field: str) -> Effect:
    """The condition of a field that some estimators, or a critic, read."""
    names = [name for name, facts in ADVANTAGE_ESTIMATORS.items() if field in facts.fields]
    when = f"the estimator is {_one_of(names)}"
    return _when(field, when, lambda algorithm: field in estimator_facts(algorithm).fields)


def _one_of(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"


ALGORITHM_EFFECTS: tuple[Effect, ...] = (
    Effect("trainer.algorithm.kl_loss_coef", "a KL term is on", has_reference),
    Effect("trainer.algorithm.kl_estimator_type", "a KL term is on", has_reference),
    _when("kl_ctrl", "use_kl_in_reward is on", lambda algorithm: algorithm.use_kl_in_reward),
    Effect("trainer.algorithm.value_clip", "there is a critic", has_critic),
    Effect("trainer.algorithm.value_head_prefix", "there is a critic", has_critic),
    Effect("trainer.algorithm.normalize_values", "there is a critic", has_critic),
    _when(
        "old_logprobs",
        "the loss, or a KL term in the reward, is taken from pi_old",
        lambda algorithm: algorithm.use_kl_in_reward or loss_facts(algorithm).reads_old_logprobs,
    ),
    Effect(
        "trainer.algorithm.max_importance_ratio",
        "pi_old is the engine's, or scored by the learner, which has several optimizer steps for a batch",
        _compares_with_an_old_policy,
    ),
    _when("entropy_loss_coef", "use_entropy_loss is on", lambda algorithm: algorithm.use_entropy_loss),
    _estimator_field("grpo_norm_by_std"),
    _estimator_field("lambd"),
    _estimator_field("whiten_advantages"),
    Effect(
        "trainer.algorithm.gamma",
        "the estimator is gae or reinforce++, or there is a critic",
        lambda run: "gamma" in estimator_facts(run.trainer.algorithm).fields or has_critic(run),
    ),
    _when(
        "advantage",
        "the estimator is your own",
        lambda algorithm: algorithm.advantage_estimator not in ADVANTAGE_ESTIMATORS,
    ),
    _when("policy_loss", "the loss is your own", lambda algorithm: algorithm.policy_loss_type not in POLICY_LOSSES),
    _loss_field("eps_clip_low"),
    _loss_field("eps_clip_high"),
    _loss_field("clip_ratio_c", ", or decoupled with decoupled.dual_clip"),
    *_loss_tables(),
    _when(
        "max_seq_len",
        "loss_reduction is seq_mean_token_sum_norm",
        lambda algorithm: algorithm.loss_reduction == "seq_mean_token_sum_norm",
    ),
    _when("tis_imp_ratio_cap", "use_tis is on", lambda algorithm: algorithm.use_tis),
    *(
        _when(
            f"off_policy_correction.{kind}_tis_ratio_clip_high",
            f"tis_ratio_type is {kind}",
            lambda algorithm, kind=kind: algorithm.off_policy_correction.tis_ratio_type == kind,  # type: ignore[misc]  # bound by its default
        )
        for kind in ("token", "sequence")
    ),
    *(
        _when(
            f"off_policy_correction.{short}_mask_{side}",
            f"sequence_mask_metric is {metric}",
            lambda algorithm, metric=metric: (  # type: ignore[misc]  # bound by its default
                algorithm.off_policy_correction.sequence_mask_metric == metric
            ),
        )
        for short, metric in (("geo", "geometric"), ("product", "product"))
        for side in ("low", "high")
    ),
    _when("zero_variance_filter_tol", "zero_variance_filter is on", lambda algorithm: algorithm.zero_variance_filter),
    _when(
        "dynamic_sampling.max_sample_batches",
        "dynamic_sampling.type is given",
        lambda algorithm: algorithm.dynamic_sampling.type is not None,
    ),
    *(
        _when(
            f"dynamic_sampling.{name}",
            "dynamic_sampling.type is filter",
            lambda algorithm: algorithm.dynamic_sampling.type == "filter",
        )
        for name in ("min_success_rate", "max_success_rate")
    ),
    _when(
        "dynamic_sampling.min_replace_ratio",
        "dynamic_sampling.type is replace",
        lambda algorithm: algorithm.dynamic_sampling.type == "replace",
    ),
    *(
        _when(
            f"reward_shaping.overlong.{name}",
            "buffer_len is given",
            lambda algorithm: algorithm.reward_shaping.overlong.buffer_len is not None,
        )
        for name in ("penalty_factor", "max_len", "floor")
    ),
    *(
        effect
        for table, norm in (
            ("reward_shaping.norm", lambda algorithm: algorithm.reward_shaping.norm),
            ("advantage_norm", lambda algorithm: algorithm.advantage_norm),
        )
        for effect in (
            _when(
                f"{table}.mean_leave1out",
                "mean_level is given",
                lambda algorithm, norm=norm: norm(algorithm).mean_level is not None,  # type: ignore[misc]  # bound by its default
            ),
            *(
                _when(
                    f"{table}.{name}",
                    "std_level is given",
                    lambda algorithm, norm=norm: norm(algorithm).std_level is not None,  # type: ignore[misc]  # bound by its default
                )
                for name in ("std_unbiased", "eps")
            ),
        )
    ),
)

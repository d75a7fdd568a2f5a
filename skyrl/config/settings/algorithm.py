"""The objective: how rewards become advantages, and advantages a loss."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from skyrl.config.foundation.entry import BaseConfig
from skyrl.config.settings.distillation import DistillationConfig
from skyrl.config.settings.estimators import ADVANTAGE_ESTIMATORS
from skyrl.config.settings.losses import (
    POLICY_LOSSES,
    CISPOConfig,
    ClipCovConfig,
    DecoupledConfig,
    DPPOConfig,
    GMPOConfig,
    KLCovConfig,
    OffPolicyCorrectionConfig,
    OnlineDPOConfig,
    SAPOConfig,
)
from skyrl.config.settings.registry import AdvantageEstimatorRegistry, PolicyLossRegistry
from skyrl.config.settings.rewards import NormConfig, RewardShapingConfig
from skyrl.errors import Problem
from skyrl.tree import IDENTITY, FrozenDict, field, frozen
from skyrl.tree.classes import choice_metadata
from skyrl.tree.code_names import named_code
from skyrl.tree.types import ClassOf
from skyrl.tree.validators import at_least, fraction, non_negative, positive, positive_or_off

LossReduction = Literal["token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"]
"""How the losses of the tokens of a mini-batch become one number."""

_LossSettings = Annotated[Mapping[str, Any], ClassOf("policy_loss_type", PolicyLossRegistry.settings_class)]
_EstimatorSettings = Annotated[
    Mapping[str, Any], ClassOf("advantage_estimator", AdvantageEstimatorRegistry.settings_class)
]


@frozen
class KLCtrlConfig(BaseConfig):
    """How the weight of the KL penalty changes, from `kl_loss_coef` on; read with `use_kl_in_reward` only."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: the weight rises while the measured KL divergence is above `kl_target` and falls while it is below
    (arXiv:1909.08593)."""

    kl_target: float = field(default=0.1, validator=positive)
    """KL divergence per token that `adaptive` steers to, in nats."""

    horizon: int = field(default=10000, validator=positive)
    """Samples over which `adaptive` makes up for a deviation; larger is slower."""


@frozen
class DynamicSamplingConfig(BaseConfig):
    """Policy for groups whose samples all got the same reward, which carry no learning signal."""

    type: Literal["filter", "replace"] | None = None
    """filter: such groups are dropped and more are drawn until the batch is full (DAPO, arXiv:2503.14476); replace:
    copies of good groups of the same batch take their place. None: they stay."""

    max_sample_batches: int = field(default=30, validator=at_least(-1))
    """Batches that may be drawn for one step before the run stops with an error. -1 or 0: no limit."""

    min_success_rate: float = field(default=0.0, validator=fraction)
    """Minimum share of samples with a reward above 0 in a group that is kept under `filter`."""

    max_success_rate: float = field(default=1.0, validator=fraction)
    """Maximum share of samples with a reward above 0 in a group that is kept under `filter`."""

    min_mean_reward: float | None = None
    """Minimum mean reward of a group that is kept under `filter`. None: no such bound."""

    max_mean_reward: float | None = None
    """Maximum mean reward of a group that is kept under `filter`. None: no such bound."""

    min_reward_spread: float = field(default=0.0, validator=non_negative)
    """A group is kept under `filter` only if its rewards differ by more than this."""

    min_replace_ratio: float = field(default=0.3, validator=fraction)
    """Minimum share of good groups under `replace`; below it the whole batch is drawn again."""


@frozen
class AlgorithmConfig(BaseConfig):
    """Objective of a run: advantage estimator, policy loss, KL terms and corrections."""

    named_by: ClassVar[str] = "advantage_estimator"

    advantage_estimator: str = field(
        default="grpo", converter=named_code, metadata=choice_metadata(IDENTITY, ADVANTAGE_ESTIMATORS)
    )
    """How rewards become advantages: grpo, rloo, maxrl, reinforce++, reinforce++-baseline, gae (needs a critic), remax
    (samples one additional greedy answer per prompt), opo, gpg, or one of your own, by import path
    (`my_package.advantages:Mine`, `advantages.py:Mine`) or by the name that it is registered under."""

    advantage: _EstimatorSettings = FrozenDict()
    """Settings of an estimator of your own: the fields of its class."""

    policy_loss_type: str = field(
        default="regular", converter=named_code, metadata=choice_metadata(IDENTITY, POLICY_LOSSES)
    )
    """How advantages become a loss: regular (PPO), dual_clip, gspo, gmpo, cispo, sapo, clip_cov, kl_cov, rollout_is,
    dppo, decoupled, importance_sampling, cross_entropy, online_dpo (pairs of answers, without advantages), or one of
    your own, by import path (`my_package.losses:Mine`, `losses.py:Mine`) or by the name that it is registered under."""

    policy_loss: _LossSettings = FrozenDict()
    """Settings of a loss of your own: the fields of its class."""

    loss_reduction: LossReduction = "token_mean"
    """token_mean: mean over the tokens of the mini-batch; token_mean_legacy: over those of each micro-batch, then over
    micro-batches; sequence_mean: over each sequence's tokens, then over sequences; prompt_mean: over the tokens of each
    prompt's samples, then over prompts; seq_mean_token_sum_norm: mean over sequences of each one's sum divided by
    `max_seq_len`."""

    old_logprobs: Literal["learner", "engine", "interpolated"] = "learner"
    """Source of log pi_old, which ratios in losses and a KL term in the reward use. learner: the weights before the
    batch's first update score its tokens again; engine: the log-probabilities that the tokens were drawn with, which
    saves that pass, as AReaL without `recompute_logprob`, but leaves no correction for differences between engine and
    learner. interpolated: no pass either; for a token drawn s > 0 versions ago, a loss takes the engine's
    log-probability plus 1 - 1/s of its distance to the current one (AReaL's `loglinear`); meant for decoupled."""

    max_seq_len: int | None = field(default=None, validator=positive)
    """Tokens by which `seq_mean_token_sum_norm` divides a sequence's sum. None: `generator.max_input_length` plus
    `generator.sampling_params.max_generate_length`, the longest sequence of any number of turns: a turn begins only
    where all before it, prompt and observations included, have at most `max_input_length` tokens."""

    temperature: float | None = field(default=None, validator=non_negative)
    """The learner divides logits by this. None: `generator.sampling_params.temperature`, since ratios of probabilities
    mean something only at the temperature that the tokens were drawn at. 0 cannot be trained on."""

    grpo_norm_by_std: bool = True
    """Divide by the group's standard deviation, with grpo. False is Dr. GRPO (arXiv:2503.20783)."""

    whiten_advantages: bool = True
    """Shift and scale the advantages of gae and reinforce++ to mean 0 and standard deviation 1 over the tokens of the
    batch. False: advantages as they are, which with reinforce++ are plain returns (REINFORCE); `advantage_norm` can
    scale them in another way."""

    advantage_batch_normalize: bool = False
    """Shift and scale the advantages of a batch to mean 0 and standard deviation 1 over its tokens."""

    advantage_norm: NormConfig = NormConfig()
    """Shift and scale advantages by the mean and deviation of the batch or of each group, over tokens, so that long
    answers weigh more. Not with `advantage_batch_normalize`."""

    reward_shaping: RewardShapingConfig = RewardShapingConfig()
    """Adjustments of rewards before advantages are computed."""

    gamma: float = field(default=1.0, validator=fraction)
    """Discount per token; read by gae and reinforce++, and for the returns that a critic learns."""

    lambd: float = field(default=1.0, validator=fraction)
    """Lambda of generalized advantage estimation (arXiv:1506.02438); read by gae. 1: plain returns minus values."""

    value_head_prefix: str = "value_head"
    """Name of the critic's value head among its weights."""

    value_clip: float | None = field(default=0.2, validator=non_negative)
    """Clip range of the critic's loss: a value counts as at most this far from the one before the update. None: plain
    squared error."""

    normalize_values: bool = False
    """The critic's model predicts returns normalized by their running mean and standard deviation over the run
    (arXiv:2103.01955, section 5.1), so that the scale of rewards does not matter to it; its values are converted back
    to the units of rewards. `value_clip` and the critic's loss are in normalized units."""

    use_kl_loss: bool = True
    """Add `kl_loss_coef` times the KL divergence from the reference to the policy loss. Not with `use_kl_in_reward`."""

    use_kl_in_reward: bool = False
    """Subtract the weighted KL divergence of each token from its reward. Not with `use_kl_loss`."""

    kl_loss_coef: float = field(default=0.001, validator=non_negative)
    """Weight of the KL divergence; with `use_kl_in_reward`, the initial weight."""

    kl_estimator_type: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimate of the divergence from one token, with d = log pi_ref - log pi. k1: -d; abs: |d|; k2: d^2 / 2; k3:
    e^d - d - 1, which is unbiased and never negative (joschu.net/blog/kl-approx.html)."""

    kl_ctrl: KLCtrlConfig = KLCtrlConfig()
    """How the weight of the KL penalty changes; read with `use_kl_in_reward` only."""

    use_entropy_loss: bool = False
    """Subtract `entropy_loss_coef` times the policy's entropy from the loss, to keep the entropy high."""

    entropy_loss_coef: float = 0.01
    """Weight of the entropy. Negative drives it down."""

    eps_clip_low: float = field(default=0.2, validator=non_negative)
    """The ratio pi / pi_old is clipped below at 1 minus this. 1 or more: no lower bound."""

    eps_clip_high: float = field(default=0.2, validator=non_negative)
    """The ratio pi / pi_old is clipped above at 1 plus this; larger than `eps_clip_low` is DAPO's clip-higher."""

    clip_ratio_c: float = field(default=3.0, validator=at_least(1))
    """Bound of the loss at a negative advantage A, with dual_clip: at most -A times this (arXiv:1912.09729)."""

    max_importance_ratio: float | None = field(default=None, validator=at_least(1))
    """Skip a mini-batch if the mean of pi / pi_old over its trained tokens is above this: the policy has moved too far
    from pi_old. Each mini-batch is scored before its update, with an additional forward pass, so that the decision
    depends neither on micro-batches nor on ranks. None: no bound."""

    zero_variance_filter: bool = False
    """Leave groups whose rewards are all equal out of the loss: none of their tokens counts."""

    zero_variance_filter_tol: float = field(default=1e-6, validator=non_negative)
    """Rewards that differ by no more than this are equal for `zero_variance_filter`."""

    distillation: DistillationConfig = DistillationConfig()
    """Distillation of the policy from `trainer.teacher`."""

    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    """Policy for groups whose samples all got the same reward."""

    off_policy_correction: OffPolicyCorrectionConfig = OffPolicyCorrectionConfig()
    """Corrections for the gap between engine and learner."""

    use_tis: bool = False
    """Old spelling of `off_policy_correction.tis_ratio_type = "token"`."""

    tis_imp_ratio_cap: float = field(default=-1.0, validator=positive_or_off)
    """Old spelling of `off_policy_correction.token_tis_ratio_clip_high`; read with `use_tis`. -1: unset."""

    sapo: SAPOConfig = SAPOConfig()
    """Settings of the loss sapo."""

    clip_cov: ClipCovConfig = ClipCovConfig()
    """Settings of the loss clip_cov."""

    kl_cov: KLCovConfig = KLCovConfig()
    """Settings of the loss kl_cov."""

    cispo: CISPOConfig = CISPOConfig()
    """Settings of the loss cispo."""

    dppo: DPPOConfig = DPPOConfig()
    """Settings of the loss dppo."""

    gmpo: GMPOConfig = GMPOConfig()
    """Settings of the loss gmpo."""

    decoupled: DecoupledConfig = DecoupledConfig()
    """Settings of the loss decoupled."""

    online_dpo: OnlineDPOConfig = OnlineDPOConfig()
    """Settings of the loss online_dpo."""

    def own_problems(self) -> Iterator[Problem]:
        """A KL penalty goes into the reward or into the loss, not into both."""
        if self.use_kl_in_reward and self.use_kl_loss:
            message = "use_kl_in_reward and use_kl_loss are both on, which counts the penalty twice"
            yield Problem(path="use_kl_in_reward", message=message, hint="turn one of them off")

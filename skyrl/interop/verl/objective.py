"""Converts verl's objective, which several settings determine together: estimator, loss, KL divergence, corrections."""

from __future__ import annotations

from skyrl.interop.translation import (
    ALGORITHM,
    Dependent,
    Translation,
    Values,
    number,
    redundant,
    refused,
    unsupported,
    word,
)
from skyrl.interop.verl.asynchronous import BYPASS, is_bypassed
from skyrl.interop.verl.rewards import is_overlong_on

ACTOR = "actor_rollout_ref.actor."
_CORRECTION = ALGORITHM + "off_policy_correction."
ESTIMATORS = {
    "gae": "gae", "grpo": "grpo", "grpo_vectorized": "grpo", "rloo": "rloo", "rloo_vectorized": "rloo", "opo": "opo",
    "remax": "remax", "gpg": "gpg", "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++-baseline",
}  # fmt: skip
"""Estimators that exist here -> their names here."""

LOSSES = {
    "vanilla": "dual_clip", "gspo": "gspo", "sapo": "sapo", "clip_cov": "clip_cov", "kl_cov": "kl_cov",
    "geo_mean": "gmpo", "cispo": "cispo",
}  # fmt: skip
"""Losses that exist here -> their names here."""

_VALUE_REDUCTION = "critic.loss_agg_mode"

_OF_WHOLE_ANSWERS = ("gspo", "sapo", "geo_mean")
"""Losses that verl averages over each answer first, regardless of `loss_agg_mode`."""

_CLIP = {
    "vanilla": "eps_clip_{side}", "gspo": "eps_clip_{side}", "clip_cov": "eps_clip_{side}",
    "cispo": "cispo.cispo_eps_clip_{side}", "geo_mean": "gmpo.log_clip_{side}",
}  # fmt: skip
_SETTINGS_OF = {
    "policy_loss.clip_cov_ratio": ("clip_cov", "clip_cov.clip_ratio"),
    "policy_loss.clip_cov_lb": ("clip_cov", "clip_cov.clip_cov_lb"),
    "policy_loss.clip_cov_ub": ("clip_cov", "clip_cov.clip_cov_ub"),
    "policy_loss.kl_cov_ratio": ("kl_cov", "kl_cov.kl_cov_frac"),
    "policy_loss.ppo_kl_coef": ("kl_cov", "kl_cov.ppo_kl_coef"),
    "tau_pos": ("sapo", "sapo.tau_pos"),
    "tau_neg": ("sapo", "sapo.tau_neg"),
    "clip_ratio_c": ("vanilla", "clip_ratio_c"),
}
"""Setting of one loss -> that loss, and our path below `trainer.algorithm`."""

_DIVERGENCES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


_AFTER_SHAPING = ("reward", "seq_reward", "seq_final_reward")
"""Metrics of groups that include what is added to the reward of the environment."""


def has_v1(values: Values) -> bool:
    """Whether the file has settings of verl's trainer `v1`, which replaced the older one in 0.9."""
    return any(key.startswith(("trainer.v1.", "trainer.use_v1")) for key in values)


def has_critic(values: Values) -> bool:
    """Whether a critic is trained: GAE needs one."""
    enabled = values.get("critic.enable")
    return enabled if isinstance(enabled, bool) else values.get("algorithm.adv_estimator", "gae") == "gae"


def _loss(values: Values) -> str:
    return str(values.get(ACTOR + "policy_loss.loss_mode", "vanilla"))


def _estimator(key: str, value: object, values: Values) -> Translation:
    if word(value, ESTIMATORS) not in ESTIMATORS:
        return unsupported(f"advantage estimator {value!r}")
    return Translation(writes={ALGORITHM + "advantage_estimator": ESTIMATORS[str(value)]})


def _loss_mode(key: str, value: object, values: Values) -> Translation:
    if word(value, LOSSES) not in LOSSES:
        return unsupported(f"loss {value!r}")
    writes = {ALGORITHM + "policy_loss_type": LOSSES[str(value)]}
    return Translation(
        writes=writes | ({ALGORITHM + "loss_reduction": "sequence_mean"} if value in _OF_WHOLE_ANSWERS else {})
    )


def _setting_of_a_loss(key: str, value: object, values: Values) -> Translation:
    loss, path = _SETTINGS_OF[key.removeprefix(ACTOR)]
    if _loss(values) != loss:
        return redundant(f"no effect: the loss is {_loss(values)}")
    return Translation(writes={ALGORITHM + path: number(value)})


def _clip(key: str, value: object, values: Values) -> Translation:
    pattern = _CLIP.get(_loss(values))
    if pattern is None:
        return redundant(f"no effect: the loss {_loss(values)} does not clip ratios")
    if value is None:
        return redundant("not set: clip_ratio applies")
    return Translation(writes={ALGORITHM + pattern.format(side=key.rpartition("_")[2]): number(value)})


def _clip_ratio(key: str, value: object, values: Values) -> Translation:
    """Convert `clip_ratio`, which verl reads only for a low or high bound that is null; both are 0.2 by default."""
    sides = [side for side in ("low", "high") if values.get(f"{ACTOR}clip_ratio_{side}", 0.2) is None]
    pattern = _CLIP.get(_loss(values))
    if not sides or pattern is None:
        return redundant("no effect: verl clips by clip_ratio_low and clip_ratio_high, which default to 0.2")
    return Translation(writes={ALGORITHM + pattern.format(side=side): number(value) for side in sides})


def _reduction(key: str, value: object, values: Values) -> Translation:
    if _loss(values) in _OF_WHOLE_ANSWERS:
        if value != "token-mean" and _note_on_values(values):
            return unsupported(f"a value loss reduced by {value!r}")
        return redundant(f"no effect: the loss {_loss(values)} is averaged over each response")
    match value:
        case "token-mean":
            note = "verl before 0.8 averages each micro-batch separately, which is token_mean_legacy here"
            return Translation(writes={ALGORITHM + "loss_reduction": "token_mean"}, note=note)
        case "seq-mean-token-mean":
            return Translation(writes={ALGORITHM + "loss_reduction": "sequence_mean"}, note=_note_on_values(values))
        case "seq-mean-token-sum":
            return _divide_by_length(1, _note_on_values(values))
        case "seq-mean-token-sum-norm":
            length = values.get(ACTOR + "loss_scale_factor") or values.get("data.max_response_length", 512)
            return _divide_by_length(length, _note_on_values(values))
    return unsupported(f"loss reduction {value!r}")


def _divide_by_length(length: object, note: str) -> Translation:
    writes = {"loss_reduction": "seq_mean_token_sum_norm", "max_seq_len": length}
    return Translation(writes={ALGORITHM + name: setting for name, setting in writes.items()}, note=note)


def _note_on_values(values: Values) -> str:
    """Remark on the critic's reduction, which is the policy's unless a file sets it (critic.yaml of verl)."""
    if not has_critic(values) or _VALUE_REDUCTION in values:
        return ""
    return "the critic's loss, which is reduced alike in verl, is averaged over tokens here"


def _value_reduction(key: str, value: object, values: Values) -> Translation:
    """Judge the critic's `loss_agg_mode`; in a file of defaults it is a reference to the policy's."""
    reduction = values.get(ACTOR + "loss_agg_mode", "token-mean") if "${" in str(value) else value
    if reduction == "token-mean":
        return redundant("the value loss is averaged over tokens")
    return unsupported(f"a value loss reduced by {reduction!r}")


def _entropy(key: str, value: object, values: Values) -> Translation:
    if not number(value):
        return redundant("no effect at this value")
    return Translation(writes={ALGORITHM + "use_entropy_loss": True, ALGORITHM + "entropy_loss_coef": number(value)})


def _weight_in_loss(key: str, value: object, values: Values) -> Translation:
    if not values.get(ACTOR + "use_kl_loss"):
        return redundant("use_kl_loss is off")
    return Translation(writes={ALGORITHM + "kl_loss_coef": number(value)})


def _weight_in_reward(key: str, value: object, values: Values) -> Translation:
    if not values.get("algorithm.use_kl_in_reward"):
        return redundant("use_kl_in_reward is off")
    return Translation(writes={ALGORITHM + "kl_loss_coef": number(value)})


def _divergence(key: str, value: object, values: Values) -> Translation:
    """Convert the KL estimator; a `+` after its name takes the value of that estimator and the gradient of k2."""
    in_loss = key.startswith(ACTOR)
    if not values.get(ACTOR + "use_kl_loss" if in_loss else "algorithm.use_kl_in_reward"):
        return redundant(f"{'use_kl_loss' if in_loss else 'use_kl_in_reward'} is off")
    if in_loss and str(value).endswith("+"):
        return Translation(writes={ALGORITHM + "kl_estimator_type": "k2"}, note="its gradient equals that of k2")
    if str(value).removesuffix("+") not in _DIVERGENCES:
        return unsupported(f"KL estimator {value!r}")
    return Translation(writes={ALGORITHM + "kl_estimator_type": _DIVERGENCES[str(value).removesuffix("+")]})


def _control(key: str, value: object, values: Values) -> Translation:
    if not values.get("algorithm.use_kl_in_reward"):
        return redundant("use_kl_in_reward is off")
    name = {"type": "type", "horizon": "horizon", "target_kl": "kl_target"}[key.rpartition(".")[2]]
    return Translation(writes={f"{ALGORITHM}kl_ctrl.{name}": value})


def _importance_sampling(key: str, value: object, values: Values) -> Translation:
    if value is None:
        return redundant("not set: nothing is corrected")
    if is_bypassed(values):
        return redundant("no effect: with bypass_mode, the ratio itself is taken to the engine's log-probabilities")
    return Translation(writes={_CORRECTION + "tis_ratio_type": value})


def _threshold(key: str, value: object, values: Values) -> Translation:
    level = values.get("algorithm.rollout_correction.rollout_is")
    if level not in ("token", "sequence"):
        return redundant("no effect: rollout_is is neither token nor sequence")
    if is_bypassed(values):
        return redundant("no effect: bypass_mode is on")
    if isinstance(value, str) and "_" in value:
        return unsupported("importance weights that are 0 outside of two bounds (IcePop)")
    return Translation(writes={f"{_CORRECTION}{level}_tis_ratio_clip_high": number(value)})


def _rejection(key: str, value: object, values: Values) -> Translation:
    if values.get("algorithm.rollout_correction.rollout_rs") is None:
        return redundant("no effect: rollout_rs is not set")
    return unsupported("rejecting samples by rollout_rs; see trainer.algorithm.off_policy_correction")


def _bypass(key: str, value: object, values: Values) -> Translation:
    """Convert bypass mode, in which verl takes the engine's log-probabilities as those of the old policy."""
    if not value or not is_bypassed(values):
        return redundant("off" if not value else "no effect: async_training says what the old policy is")
    return Translation(writes={ALGORITHM + "old_logprobs": "engine"})


def _bypassing_loss(key: str, value: object, values: Values) -> Translation:
    if not is_bypassed(values):
        return redundant("bypass_mode is off")
    if value != "ppo_clip":
        return unsupported(f"loss {value!r} of bypass mode")
    return redundant("set by policy_loss.loss_mode")


def _critic(key: str, value: object, values: Values) -> Translation:
    follows = values.get("algorithm.adv_estimator", "gae") == "gae"
    if value is None or value == follows:
        return redundant("derived from algorithm.adv_estimator")
    return refused("a critic is trained if the advantage estimator is gae, and only then")


def _filter(key: str, value: object, values: Values) -> Translation:
    if not values.get("algorithm.filter_groups.enable"):
        return redundant("filter_groups.enable is off")
    match key.rpartition(".")[2]:
        case "enable":
            return Translation(writes={ALGORITHM + "dynamic_sampling.type": "filter"})
        case "max_num_gen_batches" if has_v1(values):
            return redundant("not read by verl 0.9 (trainer/ppo/v1/trainer_base.py:205)")
        case "max_num_gen_batches":
            return Translation(writes={ALGORITHM + "dynamic_sampling.max_sample_batches": value})
        case "metric":
            return _metric(value, values)
    return redundant("how many prompts are sampled at the same time does not affect results")


def _metric(value: object, values: Values) -> Translation:
    """Convert the number by which groups are filtered. Here it is the reward that the environment gave."""
    if value in (None, "acc", "score") or (value in _AFTER_SHAPING and not is_overlong_on(values)):
        return redundant("groups whose rewards are all equal are replaced")
    if value in _AFTER_SHAPING:
        return unsupported("filtering groups by rewards that include the penalty on long answers")
    return unsupported(f"filtering groups by {value!r}")


def _critic_only(key: str, value: object, values: Values) -> Translation | None:
    return None if has_critic(values) else redundant("no critic is trained")


CRITIC: dict[str, Dependent] = {"critic.[!e]*": _critic_only}
"""Settings of a critic, without one."""

OBJECTIVE: dict[str, Dependent] = {
    "algorithm.adv_estimator": _estimator,
    "algorithm.kl_penalty": _divergence,
    "algorithm.kl_ctrl.kl_coef": _weight_in_reward,
    "algorithm.kl_ctrl.type": _control,
    "algorithm.kl_ctrl.horizon": _control,
    "algorithm.kl_ctrl.target_kl": _control,
    "algorithm.filter_groups.*": _filter,
    "algorithm.rollout_correction.rollout_is": _importance_sampling,
    "algorithm.rollout_correction.rollout_is_threshold": _threshold,
    "algorithm.rollout_correction.rollout_rs": _rejection,
    "algorithm.rollout_correction.rollout_rs_threshold": _rejection,
    BYPASS: _bypass,
    "algorithm.rollout_correction.loss_type": _bypassing_loss,
    "critic.enable": _critic,
    _VALUE_REDUCTION: _value_reduction,
    **{ACTOR + name: _setting_of_a_loss for name in _SETTINGS_OF},
    ACTOR + "policy_loss.loss_mode": _loss_mode,
    ACTOR + "clip_ratio": _clip_ratio,
    ACTOR + "clip_ratio_low": _clip,
    ACTOR + "clip_ratio_high": _clip,
    ACTOR + "loss_agg_mode": _reduction,
    ACTOR + "entropy_coeff": _entropy,
    ACTOR + "kl_loss_coef": _weight_in_loss,
    ACTOR + "kl_loss_type": _divergence,
}

"""Converts verl's objective, which several settings determine together: rewards, estimator, loss, KL divergence,
corrections, distillation.

Rewards are `reward.*` of verl 0.9, and the names that its settings had before (reward_loop.py:39). The teacher of
`distillation.*` (verl 0.9.1) is a server; ours computes in a learner's ranks, so that settings of its engine have no
equivalent and its placement is ours to choose.
"""

from __future__ import annotations

import re
from typing import Any

from skyrl.interop.peer_trees import peer_trees
from skyrl.interop.translation import (
    ALGORITHM,
    Dependent,
    Translation,
    UnexpectedValue,
    Values,
    fixed,
    idle,
    independent,
    is_off,
    number,
    redundant,
    refused,
    unsupported,
    word,
)
from skyrl.interop.verl.asynchronous import BYPASS, ROLLOUT, is_bypassed
from skyrl.tree.types import display_value

_OVERLONG = ("reward_model.reward_kwargs.", "reward.reward_kwargs.")
_FUNCTION = ("custom_reward_function.", "reward.custom_reward_function.")
_MANAGER = ("reward_model.reward_manager", "reward.reward_manager.name")
_SERVED = 'reward models that verl serves; set environment.env_class = "reward_model" (docs/built-in-environments.md)'


def reward_path(values: Values) -> Any:
    """File of the user's reward function; None if there is none."""
    return _first_set(values, [f"{table}path" for table in _FUNCTION])


def _first_set(values: Values, keys: list[str]) -> Any:
    return next((values[key] for key in keys if not is_off(values.get(key))), None)


def is_overlong_on(values: Values) -> bool:
    """Whether long answers are penalised: only the reward manager `dapo` does so."""
    enabled = _first_set(values, [f"{table}overlong_buffer_cfg.enable" for table in _OVERLONG])
    return bool(enabled) and (_first_set(values, [*_MANAGER]) or "naive") == "dapo"


def _overlong(key: str, value: object, values: Values) -> Translation:
    """Convert DAPO's overlong penalty, which verl's reward manager `dapo` applies."""
    _, _, name = key.partition("reward_kwargs.")
    if not name.startswith("overlong_buffer_cfg.") and name != "max_resp_len":
        return unsupported(f"arguments of a reward manager ({name})")
    if not _first_set(values, [f"{table}overlong_buffer_cfg.enable" for table in _OVERLONG]):
        return redundant("overlong_buffer_cfg.enable is off")
    if not is_overlong_on(values):
        return redundant("no effect: the reward manager is not dapo")
    paths = {"len": "buffer_len", "penalty_factor": "penalty_factor", "max_resp_len": "max_len"}
    if (ours := paths.get(name.rpartition(".")[2])) is None:
        return redundant("set by overlong_buffer_cfg.len")
    return Translation(writes={f"{ALGORITHM}reward_shaping.overlong.{ours}": value})


def _manager(key: str, value: object, values: Values) -> Translation:
    if value is None:
        return redundant("not set")
    if value in ("naive", "dapo"):
        return redundant("each sample is scored by its environment")
    return unsupported(f"reward manager {display_value(value)}")


_SOURCE = fixed(
    None,
    "register",
    does="verl's own reward managers",
    otherwise="custom reward managers; set environment.env_class to a function",
)


def _function(key: str, value: object, values: Values) -> Translation:
    path, name = reward_path(values), _first_set(values, [f"{table}name" for table in _FUNCTION])
    if path is None or key.endswith(".name"):
        return redundant("set by custom_reward_function.path" if path else "no custom reward function is set")
    if is_off(value):
        return redundant("not set")
    return Translation(writes={"environment.env_class": f"{path}:{name or 'compute_score'}"})


def _arguments(key: str, value: object, values: Values) -> Translation:
    if is_off(value) or reward_path(values) is None:
        return redundant("no custom reward function is set, or it has no arguments of its own")
    return unsupported("arguments of a reward function in the settings; set them as defaults in its file")


def _model(key: str, value: object, values: Values) -> Translation:
    """Convert a reward model under its older name; its settings are idle while it is off."""
    if is_off(values.get("reward_model.enable")) and key != "reward_model.enable":
        return redundant("reward_model.enable is off")
    if is_off(value):
        return redundant("off")
    if key not in ("reward_model.enable", "reward_model.model.path"):
        return redundant("only used with reward_model.enable, which is not implemented")
    return unsupported(_SERVED)


def _served(key: str, value: object, values: Values) -> Translation:
    if is_off(value):
        return redundant("off")
    if key != "reward.reward_model.enable":
        return redundant("only used with reward.reward_model.enable, which is not converted")
    return unsupported(_SERVED)


def _sandbox(key: str, value: object, values: Values) -> Translation:
    if is_off(value):
        return redundant("not set")
    if reward_path(values) is not None:
        return redundant("no effect: only verl's own rewards use it")
    if not key.endswith(".url"):
        return redundant("limits of the sandbox that runs programs are those of environment.skyrl_gym")
    return unsupported(
        'programs run by Sandbox Fusion; set environment.env_class = "code" (docs/built-in-environments.md)'
    )


def _old_manager(key: str, value: object, values: Values) -> Translation:
    if value is None or not key.endswith("_source"):
        return redundant("not set" if value is None else "set by reward_model.reward_loop_source")
    return _SOURCE(value)


REWARDS: dict[str, Dependent] = {
    **dict.fromkeys([f"{table}{name}" for table in _FUNCTION for name in ("path", "name")], _function),
    **dict.fromkeys([f"{table}reward_kwargs*" for table in _FUNCTION], _arguments),
    **dict.fromkeys(_MANAGER, _manager),
    **dict.fromkeys([f"{table}*" for table in _OVERLONG], _overlong),
    **dict.fromkeys(("reward.reward_manager.source", "reward_manager.source"), independent(_SOURCE)),
    "reward_model.reward_loop_*": _old_manager,
    **dict.fromkeys(
        ("reward_model.num_workers", "reward.num_workers"),
        independent(redundant("each sample is scored by its environment as soon as it is complete")),
    ),
    "reward.reward_model.*": _served,
    "reward_model.*": _model,
    "reward.sandbox_fusion.*": _sandbox,
    "sandbox_fusion.*": _sandbox,
}
"""Settings of rewards."""


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


def longest_answer(values: Values) -> Any:
    """Longest answer in tokens: engines read `rollout.response_length`, which is `data.max_response_length` unless a
    file has another (rollout.yaml:39 of verl).
    """
    of_engines = values.get(ROLLOUT + "response_length")
    return values.get("data.max_response_length", 512) if of_engines is None else of_engines


def _loss(values: Values) -> str:
    return str(values.get(ACTOR + "policy_loss.loss_mode", "vanilla"))


def _estimator(key: str, value: object, values: Values) -> Translation:
    if word(value, ESTIMATORS) not in ESTIMATORS:
        return unsupported(f"advantage estimator {display_value(value)}")
    return Translation(writes={ALGORITHM + "advantage_estimator": ESTIMATORS[str(value)]})


def _loss_mode(key: str, value: object, values: Values) -> Translation:
    if word(value, LOSSES) not in LOSSES:
        return unsupported(f"loss {display_value(value)}")
    reduction = {ALGORITHM + "loss_reduction": "sequence_mean"} if value in _OF_WHOLE_ANSWERS else {}
    return Translation(writes={ALGORITHM + "policy_loss_type": LOSSES[str(value)], **reduction})


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
            return unsupported(f"a value loss reduced by {display_value(value)}")
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
            length = values.get(ACTOR + "loss_scale_factor") or longest_answer(values)
            return _divide_by_length(length, _note_on_values(values))
    return unsupported(f"loss reduction {display_value(value)}")


def _divide_by_length(length: object, note: str) -> Translation:
    writes = {ALGORITHM + "loss_reduction": "seq_mean_token_sum_norm", ALGORITHM + "max_seq_len": length}
    return Translation(writes=writes, note=note)


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
    return unsupported(f"a value loss reduced by {display_value(reduction)}")


def _entropy(key: str, value: object, values: Values) -> Translation:
    if not number(value):
        return redundant("no effect at this value")
    return Translation(writes={ALGORITHM + "use_entropy_loss": True, ALGORITHM + "entropy_loss_coef": number(value)})


def _divergence(key: str, value: object, values: Values) -> Translation:
    """Convert a setting of the KL divergence in the loss, or of the one in rewards."""
    in_loss = key.startswith(ACTOR)
    if not values.get(ACTOR + "use_kl_loss" if in_loss else "algorithm.use_kl_in_reward"):
        return redundant(f"{'use_kl_loss' if in_loss else 'use_kl_in_reward'} is off")
    match key.rpartition(".")[2]:
        case "kl_loss_coef" | "kl_coef":
            return Translation(writes={ALGORITHM + "kl_loss_coef": number(value)})
        case "type" | "horizon" as name:
            return Translation(writes={f"{ALGORITHM}kl_ctrl.{name}": value})
        case "target_kl":
            return Translation(writes={ALGORITHM + "kl_ctrl.kl_target": value})
    # An estimator: a `+` after its name takes the value of that estimator and the gradient of k2.
    if in_loss and str(value).endswith("+"):
        return Translation(writes={ALGORITHM + "kl_estimator_type": "k2"}, note="its gradient equals that of k2")
    if (ours := _DIVERGENCES.get(str(value).removesuffix("+"))) is None:
        return unsupported(f"KL estimator {display_value(value)}")
    return Translation(writes={ALGORITHM + "kl_estimator_type": ours})


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
        return unsupported(f"loss {display_value(value)} of bypass mode")
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
    return unsupported(f"filtering groups by {display_value(value)}")


CRITIC: dict[str, Dependent] = {"critic.[!e]*": idle(lambda values: not has_critic(values), "no critic is trained")}
"""Settings of a critic, without one."""

OBJECTIVE: dict[str, Dependent] = {
    "algorithm.adv_estimator": _estimator,
    "algorithm.kl_penalty": _divergence,
    **{f"algorithm.kl_ctrl.{name}": _divergence for name in ("kl_coef", "type", "horizon", "target_kl")},
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
    ACTOR + "kl_loss_coef": _divergence,
    ACTOR + "kl_loss_type": _divergence,
}

_LOSS = "distillation.distillation_loss."
_TEACHER = re.compile(r"distillation\.teacher_models\.([^.]+)\.(.+)")
_OURS = ALGORITHM + "distillation."
_SCORES = "the teacher is scored by ranks of its own (trainer.teacher, trainer.placement.teacher_*), not by an engine"


def distillation(key: str, value: object, values: Values) -> Translation:
    """Convert a setting of distillation, which `distillation.enabled` turns on."""
    if key == "distillation.enabled":
        if is_off(value):
            return redundant("off")
        if value is not True:
            raise UnexpectedValue("expected true or false")
        mode = _LOSS + "loss_mode"
        unwritten = Translation() if mode in values else _teacher_loss("k3", values)  # verl's default
        return unwritten if unwritten.unsupported else redundant("there is a teacher where its path is set")
    teacher_match = _TEACHER.fullmatch(key)
    if teacher_match is not None:
        return _convert_teacher(key, teacher_match[1], teacher_match[2], value, values)
    of_distributions = values.get(_LOSS + "loss_mode") == "forward_kl_topk"
    match key.removeprefix(_LOSS):
        case "loss_mode":
            return _teacher_loss(value, values)
        case "distillation_loss_coef":
            return Translation(writes={_OURS + "coef": number(value)})
        case "use_task_rewards":
            return Translation(writes={_OURS + "task_coef": 1.0 if value else 0.0})
        case "loss_max_clamp":
            if is_off(value):
                return redundant("not set")
            bounded = Translation(writes={_OURS + "max_divergence": value})
            return bounded if of_distributions else unsupported("a bound of the teacher's part in an advantage")
        case "use_policy_gradient":
            return redundant("part of the choice by loss_mode")
        case "topk":
            return redundant(
                "written with loss_mode" if of_distributions else "no effect: the loss reads the sampled tokens alone"
            )
        case "log_prob_min_clamp":
            if value is None:
                return redundant("not set")
            lowest = Translation(writes={_OURS + "min_logprob": number(value)})
            return lowest if of_distributions else redundant("no effect: the loss reads no tokens but the sampled one")
        case "policy_loss_mode":
            usual = redundant("the loss of the policy is that of trainer.algorithm")
            return (
                usual
                if value == "vanilla"
                else unsupported(f"the loss {display_value(value)} of a teacher's advantages")
            )
        case "clip_ratio" | "clip_ratio_low" | "clip_ratio_high":
            return redundant("tokens that a teacher rewards are clipped as all others: trainer.algorithm.eps_clip_*")
    match key.removeprefix("distillation."):
        case "teacher_key":
            usual = redundant("the column data_source of a row selects its teacher, if there are several")
            return (
                usual
                if value in (None, "data_source")
                else unsupported(f"the choice of a teacher by {display_value(value)}")
            )
        case "nnodes" | "n_gpus_per_node":
            return redundant("size of a pool of engines; trainer.placement.teacher_* give the teacher its GPUs")
    return unsupported("this setting of distillation")


def _convert_teacher(key: str, name: str, setting: str, value: object, values: Values) -> Translation:
    paths = {m[1]: v for k, v in values.items() if (m := _TEACHER.fullmatch(k)) and m[2] == "model_path" and v}
    if setting == "model_path":
        if not value:
            return redundant("not set")
        if len(paths) == 1:
            return Translation(writes={"trainer.teacher.model.path": value})
        sources = {values.get(f"distillation.teacher_models.{teacher}.key"): path for teacher, path in paths.items()}
        if None in sources or len(sources) < len(paths):
            return unsupported("several teachers without a key of its own for each")
        return Translation(writes={"trainer.teacher.sources": sources})
    if setting == "key":
        return redundant("written with model_path" if len(paths) > 1 else "there is one teacher")
    if setting == "num_replicas":
        return redundant(_SCORES)
    if setting == "inference.temperature":
        of_policy = values.get("actor_rollout_ref.rollout.temperature", 1.0)
        same = value == of_policy or str(value).startswith("${")
        return redundant("scored at the policy's temperature") if same else unsupported("a temperature of the teacher")
    default = key.replace(f".{name}.", ".teacher_model.")
    of_verl = peer_trees("verl", "fsdp")[-1].defaults.get(default)
    if setting.startswith("inference.") and (value == of_verl or setting.removeprefix("inference.") in _OF_ENGINES):
        return redundant(_SCORES)
    return unsupported(f"the teacher's {setting}")


_OF_ENGINES = (
    "cudagraph_capture_sizes", "data_parallel_size", "disable_log_stats", "enable_chunked_prefill",
    "enable_prefix_caching", "enforce_eager", "free_cache_engine", "gpu_memory_utilization", "load_format",
    "max_model_len", "max_num_batched_tokens", "max_num_seqs", "name", "prompt_length", "response_length",
    "skip_tokenizer_init", "tensor_model_parallel_size", "expert_parallel_size", "dtype",
)  # fmt: skip


def _teacher_loss(value: object, values: Values) -> Translation:
    """k1 in the policy gradient is our advantage; forward_kl_topk is our forward KL. The other estimates are losses of
    the sampled token whose gradients are others.
    """
    by_gradient = bool(values.get(_LOSS + "use_policy_gradient"))
    if value == "k1" and by_gradient:
        return Translation(writes={_OURS + "type": "advantage"})
    if value == "forward_kl_topk" and not by_gradient:
        writes: dict[str, Any] = {"type": "loss", "beta": 0.0, "top_k": values.get(_LOSS + "topk", 32), "tail": False}
        return Translation(writes={_OURS + name: setting for name, setting in writes.items()})
    suffix = " in the policy gradient" if by_gradient else ""
    return unsupported(
        f"distillation by the estimate {value}{suffix}: k1 with use_policy_gradient and forward_kl_topk without it are "
        "converted"
    )


DISTILLATION: dict[str, Dependent] = {"distillation.*": distillation}
"""Settings of distillation."""

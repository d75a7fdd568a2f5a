"""Converts AReaL's objective, which several settings determine together: from rewards to advantages to a loss.

AReaL always computes advantages with GAE, which without a critic takes every value as 0 and so yields plain returns.
They are then normalised over tokens as `adv_norm` says; before that, `reward_norm` decides whether rewards are
compared within groups (`PPOActor.compute_advantages`).

The teacher of on-policy distillation is `trainer.teacher` here, its weights are those of
`trainer.algorithm.distillation`.
"""

from __future__ import annotations

from typing import Any

from skyrl.interop.areal.defaults import age, has_critic
from skyrl.interop.peer_trees import peer_trees
from skyrl.interop.translation import (
    ALGORITHM,
    Dependent,
    Translation,
    Values,
    fixed,
    independent,
    number,
    redundant,
    refused,
    unsupported,
    when_on,
)

FUNCTION = "a function that computes the lambda of GAE"


def estimator(values: Values) -> dict[str, Any]:
    """Settings of `trainer.algorithm` that reproduce the advantages of a complete file, before `adv_norm`.

    If rewards are compared within groups, without discounting and without a KL penalty in them, AReaL's returns are the
    advantages of GRPO.
    """
    if has_critic(values):
        return {"advantage_estimator": "gae", "whiten_advantages": False}
    has_kl = bool(number(values.get("actor.kl_ctl", 0.1)))
    is_flat = all(number(values.get(f"actor.{name}", 1)) == 1 for name in ("discount", "gae_lambda"))
    is_compared = "group" in (values.get("actor.reward_norm.mean_level"), values.get("actor.adv_norm.mean_level"))
    if is_compared and not has_kl and is_flat:
        return {"advantage_estimator": "grpo", "grpo_norm_by_std": False}
    return {"advantage_estimator": "reinforce++", "whiten_advantages": False}


def is_weighted(values: Values) -> bool:
    """Whether the loss weighs tokens by how the learner's probabilities differ from the engine's. Since `age` 2026,
    the decoupled loss does so only with `rejection_sampling` (areal/utils/functional/functional.py:589).
    """
    if not (values.get("actor.use_decoupled_loss") or values.get("ppo.use_decoupled_loss")):
        return False
    return age(values) < 2026 or any(name in key for key in values for name in (".rejection_sampling.", ".behav"))


def _decoupled(key: str, value: object, values: Values) -> Translation:
    """Convert `use_decoupled_loss`. Without weights it is the usual loss, around recomputed log-probabilities."""
    if not value:
        return redundant("off")
    if not is_weighted(values):
        return redundant("without rejection_sampling it is PPO with recomputed log-probabilities, as by default here")
    return Translation(writes={ALGORITHM + "policy_loss_type": "decoupled"})


def _cispo(key: str, value: object, values: Values) -> Translation:
    if not value:
        return redundant("off")
    if is_weighted(values):
        return unsupported("CISPO with the weights of the decoupled loss")
    writes: dict[str, Any] = {ALGORITHM + "policy_loss_type": "cispo"}
    for name, side in (("eps_clip", "low"), ("eps_clip_higher", "high")):
        writes[f"{ALGORITHM}cispo.cispo_eps_clip_{side}"] = number(values.get(f"actor.{name}", 0.2))
    return Translation(writes=writes)


def _advantage_norm(key: str, value: object, values: Values) -> Translation:
    name = key.removeprefix("actor.adv_norm.")
    ours = None if name.endswith("_level") and value == "none" else number(value)
    return Translation(writes={f"{ALGORITHM}advantage_norm.{name}": ours})


def _old_logprobs(key: str, is_recomputed: Any, values: Values) -> Translation:
    """Convert `recompute_logprob`. Without it, AReaL computes ratios from the engine's log-probabilities; the decoupled
    loss needs both.
    """
    interpolates = values.get("actor.use_decoupled_loss") and values.get("actor.prox_logp_method") == "loglinear"
    if is_recomputed and not interpolates:
        return redundant("the learner recomputes log-probabilities by default")
    if values.get("actor.use_decoupled_loss") or values.get("ppo.use_decoupled_loss"):
        return redundant("set by prox_logp_method in the decoupled loss, which recomputes them by default")
    return Translation(writes={ALGORITHM + "old_logprobs": "engine"})


def _proximal(value: object) -> Translation:
    if value == "loglinear":
        return Translation(writes={ALGORITHM + "old_logprobs": "interpolated"})
    if value in ("recompute", None):
        return redundant("log-probabilities are recomputed by default")
    if value == "reuse_train_logp":  # AReaL then requires one mini-batch: areal/api/cli_args.py:1912
        return redundant("with one mini-batch, recomputed log-probabilities are those of the training pass")
    return unsupported("metrics that compare interpolated with recomputed log-probabilities")


def _kl_estimator(key: str, value: object, values: Values) -> Translation:
    if number(values.get("actor.kl_ctl", 0.1)) == 0:
        return redundant("no effect: there is no KL penalty")
    return Translation(writes={ALGORITHM + "kl_estimator_type": value})


def _gae_lambda(key: str, value: object, values: Values) -> Translation:
    """Convert `gae_lambda`. Without values from a critic, lambda acts as an additional discount."""
    lambd = number(value)
    if isinstance(lambd, str):
        return unsupported(FUNCTION)
    if has_critic(values) or "actor.path" not in values:
        return Translation(writes={ALGORITHM + "lambd": lambd})
    if lambd == 1:
        return redundant("no effect at this value")
    discount = number(values.get("actor.discount", 1))
    note = "discount times gae_lambda, because there is no critic"
    return Translation(writes={ALGORITHM + "gamma": discount * lambd}, note=note)


def _level(key: str, value: object, values: Values) -> Translation:
    if value == "token":
        return redundant("ratios are per token by default")
    if is_weighted(values):
        return unsupported("sequence-level ratios in the decoupled loss")
    return Translation(writes={ALGORITHM + "policy_loss_type": "gspo"})


OBJECTIVE: dict[str, Dependent] = {
    "actor.adv_norm": independent(
        lambda value: redundant("advantages are not normalized") if value is None else refused("expected a table")
    ),
    **{f"actor.adv_norm.{name}": _advantage_norm for name in (
        "mean_level", "std_level", "eps", "std_unbiased", "mean_leave1out",
    )},
    "actor.kl_estimator": _kl_estimator,
    "actor.gae_lambda": _gae_lambda,
    "actor.gae_timestep_unit": independent(
        fixed("token", does="steps of GAE are tokens", otherwise="GAE over turns")
    ),
    "actor.recompute_logprob": _old_logprobs,
    "ppo.recompute_logprob": _old_logprobs,
    "actor.importance_sampling_level": _level,
    "actor.use_sapo_loss": independent(when_on(ALGORITHM + "policy_loss_type", "sapo")),
    "actor.sapo_tau_pos": independent(lambda tau: Translation(writes={ALGORITHM + "sapo.tau_pos": number(tau)})),
    "actor.sapo_tau_neg": independent(lambda tau: Translation(writes={ALGORITHM + "sapo.tau_neg": number(tau)})),
    "actor.prox_logp_method": independent(_proximal),
    "actor.use_decoupled_loss": _decoupled,
    "actor.use_cispo_loss": _cispo,
}  # fmt: skip
"""Settings of the objective whose meaning depends on others."""

_PATH = "teacher.path"
_JOINT = (
    "added to the advantage of each token: in AReaL's loss beside rewards, log pi - log nu, the teacher has no part in "
    "the gradient"
)


def teacher(key: str, value: object, values: Values) -> Translation:
    """Convert a setting of the teacher, which exists where its path is given."""
    if not values.get(_PATH) and key != _PATH:
        return redundant("no effect: without teacher.path there is no teacher")
    match key:
        case "teacher.path":
            return Translation(writes={"trainer.teacher.model.path": value}) if value else redundant("not set")
        case "teacher.distill_loss_weight":
            return _teacher_weight(value, values)
        case "teacher.rl_loss_weight":
            return Translation(writes={ALGORITHM + "distillation.task_coef": number(value)})
        case "teacher.engine_type":
            return redundant("the teacher is a model that scores tokens, on ranks of its own or in turn with others")
        case "teacher.offload":
            return redundant("models that take turns on GPUs leave them between their turns")
        case "teacher.train.path" | "teacher.rollout.model" if value in ("", None, values.get(_PATH)):
            return redundant("set by teacher.path")
    if any(key in tree.defaults and tree.defaults[key] == value for tree in peer_trees("areal", "GRPOConfig")):
        return redundant("AReaL's default, for a teacher")
    name = key.removeprefix("teacher.")
    return unsupported(
        f"the teacher's {name}: set what it stands for in trainer.teacher and trainer.placement.teacher_*"
    )


def _teacher_weight(value: object, values: Values) -> Translation:
    weight = number(value)
    if not isinstance(weight, int | float) or weight <= 0:
        return refused("a teacher with this weight teaches nothing: leave the table out, or give a positive weight")
    beside_rewards = number(values.get("teacher.rl_loss_weight", 1.0)) != 0
    return Translation(writes={ALGORITHM + "distillation.coef": weight}, note=_JOINT if beside_rewards else "")

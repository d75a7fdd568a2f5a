"""Converts AReaL's objective, which several settings determine together: from rewards to advantages to a loss.

AReaL always computes advantages with GAE, which without a critic takes every value as 0 and so yields plain returns.
They are then normalised over tokens as `adv_norm` says; before that, `reward_norm` decides whether rewards are
compared within groups (`PPOActor.compute_advantages`).
"""

from __future__ import annotations

from typing import Any

from skyrl.interop.areal.defaults import age, has_critic
from skyrl.interop.translation import ALGORITHM, Translation, Values, number, redundant, refused, unsupported

_NORM = ALGORITHM + "advantage_norm."
FUNCTION = "a function that computes the lambda of GAE"
OBJECTIVE_KEYS = (
    "actor.adv_norm", "actor.adv_norm.mean_level", "actor.adv_norm.std_level", "actor.adv_norm.eps",
    "actor.adv_norm.std_unbiased", "actor.adv_norm.mean_leave1out", "actor.kl_estimator", "actor.gae_lambda",
    "actor.recompute_logprob", "ppo.recompute_logprob", "actor.importance_sampling_level", "actor.use_sapo_loss",
    "actor.sapo_tau_pos", "actor.sapo_tau_neg", "actor.prox_logp_method", "actor.use_decoupled_loss",
    "actor.use_cispo_loss", "actor.gae_timestep_unit",
)  # fmt: skip
"""Settings whose conversion depends on others: see `objective`."""


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


def objective(key: str, value: object, values: Values) -> Translation:
    """Convert one of `OBJECTIVE_KEYS`."""
    name = key.removeprefix("actor.")
    if name == "adv_norm" or name.startswith("adv_norm."):
        return _advantage_norm(name, value)
    if name.endswith("recompute_logprob"):
        return _old_logprobs(value, values)
    if name == "prox_logp_method":
        return _proximal(value, values)
    if name == "kl_estimator":
        return _kl_estimator(value, values)
    if name == "gae_lambda":
        return _gae_lambda(value, values)
    if name == "gae_timestep_unit":
        return redundant("steps of GAE are tokens") if value == "token" else unsupported("GAE over turns")
    if name == "use_decoupled_loss":
        return _decoupled(value, values)
    if name == "use_cispo_loss":
        return _cispo(value, values)
    if name == "importance_sampling_level":
        return _level(value, values)
    return _sapo(name, value, values)


def is_weighted(values: Values) -> bool:
    """Whether the loss weighs tokens by how the learner's probabilities differ from the engine's. Since `age` 2026,
    the decoupled loss does so only with `rejection_sampling` (areal/utils/functional/functional.py:589).
    """
    if not (values.get("actor.use_decoupled_loss") or values.get("ppo.use_decoupled_loss")):
        return False
    return age(values) < 2026 or any(name in key for key in values for name in (".rejection_sampling.", ".behav"))


def _decoupled(value: object, values: Values) -> Translation:
    """Convert `use_decoupled_loss`. Without weights it is the usual loss, around recomputed log-probabilities."""
    if not value:
        return redundant("off")
    if not is_weighted(values):
        return redundant("without rejection_sampling it is PPO with recomputed log-probabilities, as by default here")
    return Translation(writes={ALGORITHM + "policy_loss_type": "decoupled"})


def _cispo(value: object, values: Values) -> Translation:
    if not value:
        return redundant("off")
    if is_weighted(values):
        return unsupported("CISPO with the weights of the decoupled loss")
    low, high = (number(values.get(f"actor.{name}", 0.2)) for name in ("eps_clip", "eps_clip_higher"))
    table = ALGORITHM + "cispo."
    return Translation(
        writes={
            ALGORITHM + "policy_loss_type": "cispo",
            table + "cispo_eps_clip_low": low,
            table + "cispo_eps_clip_high": high,
        }
    )


def _advantage_norm(name: str, value: object) -> Translation:
    if name == "adv_norm":
        return redundant("advantages are not normalized") if value is None else refused("expected a table")
    field = name.removeprefix("adv_norm.")
    if field.endswith("_level") and value == "none":
        value = None
    return Translation(writes={_NORM + field: number(value)})


def _old_logprobs(is_recomputed: Any, values: Values) -> Translation:
    """Convert `recompute_logprob`. Without it, AReaL computes ratios from the engine's log-probabilities; the decoupled
    loss needs both.
    """
    interpolates = values.get("actor.use_decoupled_loss") and values.get("actor.prox_logp_method") == "loglinear"
    if is_recomputed and not interpolates:
        return redundant("the learner recomputes log-probabilities by default")
    if values.get("actor.use_decoupled_loss") or values.get("ppo.use_decoupled_loss"):
        return redundant("set by prox_logp_method in the decoupled loss, which recomputes them by default")
    return Translation(writes={ALGORITHM + "old_logprobs": "engine"})


def _proximal(value: object, values: Values) -> Translation:
    if value == "loglinear":
        return Translation(writes={ALGORITHM + "old_logprobs": "interpolated"})
    if value in ("recompute", None):
        return redundant("log-probabilities are recomputed by default")
    if value == "reuse_train_logp":  # AReaL then requires one mini-batch: areal/api/cli_args.py:1912
        return redundant("with one mini-batch, recomputed log-probabilities are those of the training pass")
    return unsupported("metrics that compare interpolated with recomputed log-probabilities")


def _kl_estimator(value: object, values: Values) -> Translation:
    if number(values.get("actor.kl_ctl", 0.1)) == 0:
        return redundant("no effect: there is no KL penalty")
    return Translation(writes={ALGORITHM + "kl_estimator_type": value})


def _gae_lambda(value: object, values: Values) -> Translation:
    """Convert `gae_lambda`. Without values from a critic, lambda acts as an additional discount."""
    if isinstance(number(value), str):
        return unsupported(FUNCTION)
    if has_critic(values) or "actor.path" not in values:
        return Translation(writes={ALGORITHM + "lambd": number(value)})
    if number(value) == 1:
        return redundant("no effect at this value")
    discount = number(values.get("actor.discount", 1))
    return Translation(
        writes={ALGORITHM + "gamma": discount * number(value)},
        note="discount times gae_lambda, because there is no critic",
    )


def _level(value: object, values: Values) -> Translation:
    if value == "token":
        return redundant("ratios are per token by default")
    if is_weighted(values):
        return unsupported("sequence-level ratios in the decoupled loss")
    return Translation(writes={ALGORITHM + "policy_loss_type": "gspo"})


def _sapo(name: str, value: object, values: Values) -> Translation:
    if name == "use_sapo_loss" and not value:
        return redundant("off")
    if name == "use_sapo_loss":
        return Translation(writes={ALGORITHM + "policy_loss_type": "sapo"})
    return Translation(writes={f"{ALGORITHM}sapo.{name.removeprefix('sapo_')}": number(value)})

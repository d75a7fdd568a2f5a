"""Converts TRL's objective, which several arguments determine together: loss, clipping, divergence, corrections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.interop.conversions import ALGORITHM, Becomes, number
from skyrl.interop.foreign import Together, Values, needless

_CORRECTION = ALGORITHM + "off_policy_correction."
REDUCTIONS = {
    "grpo": "sequence_mean", "sapo": "sequence_mean", "dapo": "token_mean", "cispo": "token_mean",
    "bnpo": "token_mean_legacy", "dr_grpo": "seq_mean_token_sum_norm",
}  # fmt: skip
"""Types of loss that exist here -> their reduction."""


def loss_of(values: Values) -> str:
    """Our name of the loss."""
    kind = str(values.get("loss_type", "dapo"))
    if kind in ("cispo", "sapo"):
        return kind
    if values.get("importance_sampling_level", "token") == "sequence":
        return "gspo"
    return "dual_clip" if values.get("delta") is not None else "regular"


def _divergence(key: str, value: object, values: Values) -> Becomes:
    weight = number(value)
    writes: dict[str, Any] = {ALGORITHM + "use_kl_loss": bool(weight)}
    if weight:
        writes |= {ALGORITHM + "kl_loss_coef": weight, ALGORITHM + "kl_estimator_type": "k3"}
    return Becomes(writes=writes)


def _loss(key: str, value: object, values: Values) -> Becomes:
    if value not in REDUCTIONS:
        return Becomes(not_yet=f"loss {value!r}")
    writes = {ALGORITHM + "policy_loss_type": loss_of(values), ALGORITHM + "loss_reduction": REDUCTIONS[value]}
    if value == "dr_grpo":
        writes[ALGORITHM + "max_seq_len"] = values.get("max_completion_length", 512)
    return Becomes(writes=writes)


def _level(key: str, value: object, values: Values) -> Becomes:
    if value == "token":
        return needless("ratios are per token by default")
    if value != "sequence" or loss_of(values) != "gspo" or values.get("delta") is not None:
        return Becomes(not_yet=f"ratios at level {value!r} with this loss")
    return Becomes(writes={ALGORITHM + "policy_loss_type": "gspo"})


def _clip(key: str, value: object, values: Values) -> Becomes:
    """Convert clipping: `epsilon` is both bounds unless `epsilon_high` is given. CISPO has only an upper bound."""
    if value is None:
        return needless("not set: epsilon applies")
    kind, bound = loss_of(values), number(value)
    if kind == "sapo":
        return needless("no effect: the loss sapo does not clip ratios")
    if kind == "cispo":
        if key == "epsilon":
            return needless("no effect: the loss cispo has no lower bound")
        cispo = {"cispo_eps_clip_low": 1.0, "cispo_eps_clip_high": bound - 1}
        return Becomes(writes={f"{ALGORITHM}cispo.{name}": each for name, each in cispo.items()})
    sides = ["high"] if key == "epsilon_high" else ["low", "high"]
    if key == "epsilon" and values.get("epsilon_high") is not None:
        sides = ["low"]
    return Becomes(writes={f"{ALGORITHM}eps_clip_{side}": bound for side in sides})


def _delta(key: str, value: object, values: Values) -> Becomes:
    """Convert `delta`, the upper bound of the ratios of tokens with negative advantage, as in dual clip."""
    if value is None:
        return needless("not set")
    if loss_of(values) != "dual_clip":
        return Becomes(not_yet="two-sided clipping with this loss")
    return Becomes(writes={ALGORITHM + "clip_ratio_c": number(value)})


def _of_sapo(key: str, value: object, values: Values) -> Becomes:
    if loss_of(values) != "sapo":
        return needless("no effect: the loss is not sapo")
    return Becomes(writes={f"{ALGORITHM}sapo.tau_{key.rpartition('_')[2]}": number(value)})


def _scale(key: str, value: object, values: Values) -> Becomes:
    match {True: "group", False: "none"}.get(value, value) if isinstance(value, bool) else value:
        case "group":
            return Becomes(writes={ALGORITHM + "grpo_norm_by_std": True})
        case "none":
            return Becomes(writes={ALGORITHM + "grpo_norm_by_std": False})
        case "batch":
            norm = ALGORITHM + "reward_shaping.norm.std_level"
            return Becomes(writes={ALGORITHM + "grpo_norm_by_std": False, norm: "batch"})
    return Becomes(refused=f"unknown scale_rewards {value!r}; TRL supports: group, batch, none")


def _entropy(key: str, value: object, values: Values) -> Becomes:
    if not number(value):
        return needless("no effect at this value")
    note = "TRL averages the entropy over all tokens, regardless of the loss reduction"
    return Becomes(
        writes={ALGORITHM + "use_entropy_loss": True, ALGORITHM + "entropy_loss_coef": number(value)}, note=note
    )


def _correction(key: str, value: object, values: Values) -> Becomes:
    """Convert importance sampling against the engine, which TRL supports only for vLLM."""
    if not values.get("use_vllm") or not values.get("vllm_importance_sampling_correction", True):
        return needless("vllm_importance_sampling_correction or use_vllm is off")
    if key != "vllm_importance_sampling_mode":
        return needless("converted together with vllm_importance_sampling_mode")
    high, low = (_bound(values, side) for side in ("max", "min"))
    level, _, action = str(value).partition("_")
    if level not in ("token", "sequence") or action not in ("mask", "truncate") or high is None:
        return Becomes(not_yet=f"correction {value!r} with bounds {low} and {high}")
    writes = {"tis_ratio_type": level, f"{level}_tis_ratio_clip_high": high}
    if action == "truncate" and low is not None:
        return Becomes(not_yet="a lower bound on truncated weights")
    if action == "mask" and level == "sequence":
        writes |= {"sequence_mask_metric": "product", "product_mask_high": high, "product_mask_low": low or 0.0}
    elif action == "mask":
        writes |= {"token_mask_is_threshold_high": high} | ({"token_mask_is_threshold_low": low} if low else {})
    return Becomes(writes={_CORRECTION + name: each for name, each in writes.items()})


def _bound(values: Values, side: str) -> Any:
    cap = values.get("vllm_importance_sampling_cap") if side == "max" else None
    return (
        cap if cap is not None else values.get(f"vllm_importance_sampling_clip_{side}", 3.0 if side == "max" else None)
    )


OBJECTIVE: Mapping[str, Together] = {
    "beta": _divergence,
    "loss_type": _loss,
    "importance_sampling_level": _level,
    "epsilon": _clip,
    "epsilon_high": _clip,
    "delta": _delta,
    "sapo_temperature_pos": _of_sapo,
    "sapo_temperature_neg": _of_sapo,
    "scale_rewards": _scale,
    "entropy_coef": _entropy,
    "vllm_importance_sampling_*": _correction,
}

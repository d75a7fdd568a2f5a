"""Converts TRL's objective, which several arguments determine together: loss, clipping, divergence, corrections."""

from __future__ import annotations

from typing import Any

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


def _divergence(key: str, value: object, values: Values) -> Translation:
    weight = number(value)
    writes: dict[str, Any] = {ALGORITHM + "use_kl_loss": bool(weight)}
    if weight:
        writes |= {ALGORITHM + "kl_loss_coef": weight, ALGORITHM + "kl_estimator_type": "k3"}
    return Translation(writes=writes)


def _loss(key: str, value: object, values: Values) -> Translation:
    if word(value, REDUCTIONS) not in REDUCTIONS:
        return unsupported(f"loss {value!r}")
    writes = {ALGORITHM + "policy_loss_type": loss_of(values), ALGORITHM + "loss_reduction": REDUCTIONS[str(value)]}
    if value == "dr_grpo":
        writes[ALGORITHM + "max_seq_len"] = values.get("max_completion_length", 512)
    return Translation(writes=writes)


def _level(key: str, value: object, values: Values) -> Translation:
    if value == "token":
        return redundant("ratios are per token by default")
    if value != "sequence" or loss_of(values) != "gspo" or values.get("delta") is not None:
        return unsupported(f"ratios at level {value!r} with this loss")
    return Translation(writes={ALGORITHM + "policy_loss_type": "gspo"})


def _clip(key: str, value: object, values: Values) -> Translation:
    """Convert clipping: `epsilon` is both bounds unless `epsilon_high` is given. CISPO has only an upper bound."""
    if value is None:
        return redundant("not set: epsilon applies")
    kind, bound = loss_of(values), number(value)
    if kind == "sapo":
        return redundant("no effect: the loss sapo does not clip ratios")
    if kind == "cispo":
        if key == "epsilon":
            return redundant("no effect: the loss cispo has no lower bound")
        cispo = {"cispo_eps_clip_low": 1.0, "cispo_eps_clip_high": bound - 1}
        return Translation(writes={f"{ALGORITHM}cispo.{name}": setting for name, setting in cispo.items()})
    sides = ["high"] if key == "epsilon_high" else ["low", "high"]
    if key == "epsilon" and values.get("epsilon_high") is not None:
        sides = ["low"]
    return Translation(writes={f"{ALGORITHM}eps_clip_{side}": bound for side in sides})


def _delta(key: str, value: object, values: Values) -> Translation:
    """Convert `delta`, the upper bound of the ratios of tokens with negative advantage, as in dual clip."""
    if value is None:
        return redundant("not set")
    if loss_of(values) != "dual_clip":
        return unsupported("two-sided clipping with this loss")
    return Translation(writes={ALGORITHM + "clip_ratio_c": number(value)})


def _convert_sapo(key: str, value: object, values: Values) -> Translation:
    return Translation(writes={f"{ALGORITHM}sapo.tau_{key.rpartition('_')[2]}": number(value)})


def _scale(key: str, value: object, values: Values) -> Translation:
    match {True: "group", False: "none"}.get(value, value) if isinstance(value, bool) else value:
        case "group":
            return Translation(writes={ALGORITHM + "grpo_norm_by_std": True})
        case "none":
            return Translation(writes={ALGORITHM + "grpo_norm_by_std": False})
        case "batch":
            norm = ALGORITHM + "reward_shaping.norm.std_level"
            return Translation(writes={ALGORITHM + "grpo_norm_by_std": False, norm: "batch"})
    return refused(f"unknown scale_rewards {value!r}; TRL supports: group, batch, none")


def _entropy(key: str, value: object, values: Values) -> Translation:
    if not number(value):
        return redundant("no effect at this value")
    note = "TRL averages the entropy over all tokens, regardless of the loss reduction"
    return Translation(
        writes={ALGORITHM + "use_entropy_loss": True, ALGORITHM + "entropy_loss_coef": number(value)}, note=note
    )


def _correction(key: str, value: object, values: Values) -> Translation:
    """Convert importance sampling against the engine, which TRL supports only for vLLM."""
    if not values.get("use_vllm") or not values.get("vllm_importance_sampling_correction", True):
        return redundant("vllm_importance_sampling_correction or use_vllm is off")
    if key != "vllm_importance_sampling_mode":
        return redundant("converted together with vllm_importance_sampling_mode")
    high = values.get("vllm_importance_sampling_cap")  # the older name of the upper bound
    high = values.get("vllm_importance_sampling_clip_max", 3.0) if high is None else high
    low = values.get("vllm_importance_sampling_clip_min")
    level, _, action = str(value).partition("_")
    if level not in ("token", "sequence") or action not in ("mask", "truncate") or high is None:
        return unsupported(f"correction {value!r} with bounds {low} and {high}")
    writes = {"tis_ratio_type": level, f"{level}_tis_ratio_clip_high": high}
    if action == "truncate" and low is not None:
        return unsupported("a lower bound on truncated weights")
    if action == "mask" and level == "sequence":
        writes |= {"sequence_mask_metric": "product", "product_mask_high": high, "product_mask_low": low or 0.0}
    elif action == "mask":
        writes |= {"token_mask_is_threshold_high": high} | ({"token_mask_is_threshold_low": low} if low else {})
    return Translation(writes={_CORRECTION + name: setting for name, setting in writes.items()})


OBJECTIVE: dict[str, Dependent] = {
    "beta": _divergence,
    "loss_type": _loss,
    "importance_sampling_level": _level,
    "epsilon": _clip,
    "epsilon_high": _clip,
    "delta": _delta,
    "sapo_temperature_pos": _convert_sapo,
    "sapo_temperature_neg": _convert_sapo,
    "scale_rewards": _scale,
    "entropy_coef": _entropy,
    "vllm_importance_sampling_*": _correction,
}

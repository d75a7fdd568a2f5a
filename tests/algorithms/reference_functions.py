"""Each function of the reference cases in our terms: a case's inputs -> what we find, under the names of `expected`.

Tensors of ours are 0 outside the mask; the reference leaves there what its sums happen to be, so that masked positions
are compared inside the mask only (`inside`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from skyrl.algorithms.advantages import group_relative, leave_one_out, relative_to_mean
from skyrl.algorithms.critic import value_is_clipped, value_loss
from skyrl.algorithms.estimators import GAE, AdvantageEstimator, Compared, ReinforcePlusPlus
from skyrl.algorithms.kl import AdaptiveKLController, FixedKLController, KLController, kl_estimate
from skyrl.algorithms.logprobs import entropy, token_logprobs
from skyrl.algorithms.losses import LossInputs, importance_ratio, measured
from skyrl.algorithms.masked import masked_mean, masked_var, whiten
from skyrl.algorithms.off_policy import Corrected, correct
from skyrl.algorithms.reductions import sequence_mean
from skyrl.algorithms.returns import discounted_returns, generalized_advantages
from skyrl.batch import TrainingBatch
from skyrl.config import AlgorithmConfig, OffPolicyCorrectionConfig
from skyrl.training.objective import Reduction, off_policy_correction, policy_loss
from skyrl.tree import evolve_at
from tests.algorithms.reference_rollouts import OF_SAMPLES

Case = dict[str, Any]
Result = dict[str, Any]


def tensor(rows: Any) -> Tensor:
    """Nested lists as float32; null stands for NaN."""
    if isinstance(rows, list) and rows and isinstance(rows[0], list):
        return torch.stack([tensor(row) for row in rows])
    return torch.tensor([float("nan") if value is None else value for value in rows], dtype=torch.float32)


def selected(mask: Any, like: Tensor) -> Tensor:
    """A case's mask as bool; null selects everything."""
    return torch.ones_like(like, dtype=torch.bool) if mask is None else tensor(mask).bool()


def numbers_of(names: list[Any]) -> Tensor:
    """Names as group numbers, in the order of their first appearance."""
    known = list(dict.fromkeys(names))
    return torch.tensor([known.index(name) for name in names])


def kl(case: Case, _: Any) -> Result:
    inputs = case["inputs"]
    values = kl_estimate(tensor(inputs["log_probs"]), tensor(inputs["ref_log_probs"]), inputs["estimator"])
    weights = torch.ones_like(values) if inputs.get("mask") is None else tensor(inputs["mask"])
    return {"kl": torch.where(weights != 0, values, 0.0) * weights}


def batch_of(inputs: Result) -> TrainingBatch:
    rewards = tensor(inputs["token_level_rewards"])
    mask = selected(inputs["response_mask"], rewards)
    return TrainingBatch(
        input_ids=torch.zeros(mask.shape, dtype=torch.long),
        lengths=torch.full((len(mask),), mask.shape[1]),
        loss_mask=mask,
        rollout_logprobs=torch.zeros(mask.shape),
        rewards=rewards,
        groups=numbers_of(inputs.get("index") or list(range(len(mask)))),
        values=tensor(inputs["values"]) if inputs.get("values") else None,
    )


def advantage(make: Callable[[Result], AdvantageEstimator]) -> Callable[[Case, Any], Result]:
    def run(case: Case, _: Any) -> Result:
        batch = batch_of(case["inputs"])
        advantages = make(case["inputs"])(batch)
        zero = bool((advantages[~batch.loss_mask] == 0).all())
        return {
            "advantages": inside(advantages, batch.loss_mask),
            "returns": inside(advantages, batch.loss_mask),
            "advantages_zero_where_masked": zero,
            "returns_equal_advantages": True,  # there is no second result to differ
        }

    return run


def reinforce(case: Case, _: Any) -> Result:
    inputs, batch = case["inputs"], batch_of(case["inputs"])
    gamma = inputs.get("gamma", 1.0)
    result = advantage(lambda inputs: ReinforcePlusPlus(gamma=gamma))(case, _)
    returns = discounted_returns(batch.rewards, batch.loss_mask, gamma=gamma)
    return result | {"returns": inside(returns, batch.loss_mask)}


def gae(case: Case, _: Any) -> Result:
    inputs, batch = case["inputs"], batch_of(case["inputs"])
    settings = {"gamma": inputs.get("gamma", 1.0), "lambd": inputs.get("lambd", 1.0)}
    assert batch.values is not None
    _, returns = generalized_advantages(batch.rewards, batch.values, batch.loss_mask, **settings)
    advantages = GAE(**settings)(batch)
    return {"advantages": inside(advantages, batch.loss_mask), "returns": inside(returns, batch.loss_mask)}


@attrs.frozen(eq=False)
class inside:  # a word: inside(advantages, mask)
    """Numbers of which only those inside the mask are compared."""

    values: Tensor
    mask: Tensor


def settings(overrides: dict[str, Any], defaults: dict[str, Any]) -> AlgorithmConfig:
    """Our configuration with the reference's defaults and a case's changes."""
    config = AlgorithmConfig()
    tables = ("sapo", "clip_cov", "kl_cov", "cispo", "dppo")
    for source in (defaults, overrides):
        for name, value in source.items():
            if name in tables:
                for field, item in value.items():
                    config = evolve_at(config, f"{name}.{field}", item)
            elif name in ("eps_clip_low", "eps_clip_high", "clip_ratio_c"):
                config = evolve_at(config, name, value)
    return config


def loss(case: Case, meta: dict[str, Any]) -> Result:
    inputs = case["inputs"]
    name = case["function"].rpartition(":")[2]
    direct = {name: {key: value for key, value in inputs.items() if key.startswith(name)}} if name == "cispo" else {}
    config = settings(inputs.get("config_overrides", direct), meta["defaults"])
    chosen = policy_loss(evolve_at(config, "policy_loss_type", name))
    logprobs = tensor(inputs["log_probs"]).requires_grad_()
    old = tensor(inputs["old_log_probs"])
    mask = selected(inputs.get("loss_mask"), old)
    seen = LossInputs.selected(
        mask,
        logprobs=logprobs,
        old_logprobs=old,
        rollout_logprobs=tensor(inputs["rollout_logprobs"]) if inputs.get("rollout_logprobs") else old,
        advantages=tensor(inputs["advantages"]),
    )
    losses = chosen(seen)
    result: Result = {"metrics": spread(measured(chosen, seen), mask), "tis_ratio": None}
    if "off_policy_correction" in inputs:
        left = corrected(inputs["off_policy_correction"], old, seen.rollout_logprobs, mask)
        losses = torch.where(left.mask, losses * left.weights, 0.0)
        result["new_loss_mask"] = left.mask
        result["tis_ratio"] = weights_of(left, inputs["off_policy_correction"], mask)
        result["metrics"] |= numbers_found(left, mask)
    total = torch.where(mask, losses, 0.0).sum()
    (gradient,) = torch.autograd.grad(total, logprobs)
    clipped = result["metrics"]["clip_ratio"] > 0
    return result | {
        "loss": total.detach(),
        "grad_log_probs": gradient,
        "keep_mask": gradient != 0,
        "clip_ratio_gt_zero": clipped,
    }


def spread(tensors: dict[str, Tensor], mask: Tensor) -> dict[str, float]:
    """Means, and the extremes of ratios."""
    return {"clip_ratio": 0.0} | means({name: values[mask] for name, values in tensors.items()})


def means(tensors: dict[str, Tensor]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, values in tensors.items():
        exact = values.double()
        metrics[name] = exact.mean().item()
        metrics |= {f"{name}_mean": exact.mean().item(), f"{name}_max": exact.max().item()}
        metrics |= {f"{name}_min": exact.min().item(), f"{name}_std": exact.std(correction=0).item()}
    return metrics


def corrected(config: dict[str, Any], old: Tensor, rollout: Tensor, mask: Tensor) -> Corrected:
    return correct(old, rollout, mask, off_policy_correction(OffPolicyCorrectionConfig(**config)))


def weights_of(left: Corrected, config: dict[str, Any], mask: Tensor) -> Tensor | inside | None:
    """The factors of the losses: one for each sequence, one for each real token, or none."""
    match config.get("tis_ratio_type"):
        case "sequence":
            return left.weights[:, :1]
        case "token":
            return inside(left.weights, mask)
        case _:
            return None


def numbers_found(left: Corrected, mask: Tensor) -> dict[str, float]:
    """What is logged, as the reference computes it: padding counts as a ratio of 0, except in the mean."""
    padded = torch.zeros(mask.shape).masked_scatter(mask, left.numbers["is_ratio"])
    extremes = {"is_ratio_max": padded.max(), "is_ratio_min": padded.min(), "is_ratio_std": padded.std()}
    return means(left.numbers) | {name: value.item() for name, value in extremes.items()}


def correction(case: Case, _: Any) -> Result:
    inputs = case["inputs"]
    old, rollout = tensor(inputs["old_log_probs"]), tensor(inputs["rollout_logprobs"])
    mask = selected(inputs["loss_mask"], old)
    left = corrected(inputs["config"], old, rollout, mask)
    intact_rows = (left.mask == mask).all(1, keepdim=True)
    result: Result = {
        "token_mask": left.mask | ~mask,  # the reference says 1 of what was left out before
        "outlier_mask": intact_rows,
        "sequence_mask": intact_rows,
        "tis_ratio": weights_of(left, inputs["config"], mask),
    }
    return result | numbers_found(left, mask)


def reduction(case: Case, _: Any) -> Result:
    inputs = case["inputs"]
    advantages = tensor(inputs["advantages"])
    mask = selected(inputs["mask"], advantages)
    groups = torch.zeros(len(mask), dtype=torch.long)
    for number, (start, stop) in enumerate(inputs.get("prompt_boundaries", ())):
        groups[start:stop] = number
    batch = attrs.evolve(
        batch_of({"token_level_rewards": inputs["advantages"], "response_mask": inputs["mask"]}), groups=groups
    )
    name = case["function"].rpartition(":")[2]
    weights = Reduction(name=name, max_seq_len=inputs["max_seq_len"], micro_batch_rows=inputs["micro_batch_size"])
    scaled = weights(batch) * advantages
    return {"sum_of_scaled_times_mask": scaled.sum(), "scaled_advantages": inside(scaled, mask)}


def critic(case: Case, _: Any) -> Result:
    inputs = case["inputs"]
    values, old, returns = (tensor(inputs[name]) for name in ("values", "old_values", "returns"))
    clip, chosen = inputs["value_clip"], selected(inputs["mask"], values)
    losses = value_loss(values, old, returns, clip=clip)
    share = None if clip is None else masked_mean(value_is_clipped(values, old, returns, clip=clip).float(), chosen)
    return {"loss": (losses * sequence_mean(chosen)).sum(), "clipfrac": share}


def controller(make: Callable[[Result], KLController]) -> Callable[[Case, Any], Result]:
    def run(case: Case, _: Any) -> Result:
        control = make(case["inputs"])
        for update in case["inputs"]["updates"]:
            control.update(update["current"], update["n_steps"])
        return {"value": control.value}

    return run


def masked(case: Case, _: Any) -> Result:
    inputs = case["inputs"]
    values = tensor(inputs["x"])
    mask = selected(inputs["mask"], values)
    match case["function"]:
        case "masked_mean":
            return {"y": masked_mean(values, mask, dim=inputs.get("dim"))}
        case "masked_var(unbiased)":
            return {"y": masked_var(values, mask)}
        case _:
            return {"y": inside(whiten(values, mask), mask)}


def safe_exp(case: Case, _: Any) -> Result:
    exponents = tensor(case["inputs"]["x"])
    return {"y": importance_ratio(exponents, torch.zeros_like(exponents))}


def reduce_loss(case: Case, _: Any) -> Result:
    losses = tensor(case["inputs"]["loss"])
    mask = selected(case["inputs"]["mask"], losses)
    return {"loss": torch.where(mask, losses, 0.0).sum()}


def logprobs_of_labels(case: Case, _: Any) -> Result:
    logits, labels = tensor(case["inputs"]["logits"][0]), torch.tensor(case["inputs"]["labels"][0])
    return {"logprobs": token_logprobs(logits, labels, temperature=1.0).unsqueeze(0)}


def entropy_of_logits(case: Case, _: Any) -> Result:
    return {"entropy": entropy(tensor(case["inputs"]["logits"][0]), temperature=1.0).unsqueeze(0)}


OURS: dict[str, Callable[[Case, dict[str, Any]], Result]] = {
    "approx_kl": kl,
    "advantage:grpo": advantage(
        lambda inputs: Compared(partial(group_relative, normalize_by_std=inputs.get("grpo_norm_by_std", True)))
    ),
    "advantage:rloo": advantage(lambda inputs: Compared(leave_one_out)),
    "advantage:maxrl": advantage(lambda inputs: Compared(relative_to_mean)),
    "advantage:reinforce++": reinforce,
    "advantage:gae": gae,
    **{
        f"policy_loss:{name}": loss
        for name in (
            "regular",
            "dual_clip",
            "gspo",
            "cispo",
            "sapo",
            "rollout_is",
            "dppo",
            "clip_cov",
            "kl_cov",
            "cross_entropy",
            "importance_sampling",
        )
    },
    "off_policy_correction+policy_loss:regular": loss,
    "off_policy_correction": correction,
    **{
        f"loss_reduction:{name}": reduction
        for name in ("token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")
    },
    "critic_loss": critic,
    "adaptive_kl_controller": controller(
        lambda inputs: AdaptiveKLController(inputs["init"], target=inputs["target"], horizon=inputs["horizon"])
    ),
    "fixed_kl_controller": controller(lambda inputs: FixedKLController(inputs["init"])),
    "masked_mean": masked,
    "masked_var(unbiased)": masked,
    "masked_whiten": masked,
    "safe_exp_delta(clip=20)": safe_exp,
    "reduce_loss": reduce_loss,
    "logprobs": logprobs_of_labels,
    "entropy": entropy_of_logits,
    **OF_SAMPLES,
}
"""Every function of the cases."""

"""Losses and estimators as users of SkyRL and verl write them: own bodies, in each system's signature."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def skyrl_ppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """SkyRL's form of 2026: a sum, over advantages that hold the weights."""
    assert loss_mask is not None
    ratio = (log_probs - old_log_probs).exp()
    clipped = ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high)
    loss = -torch.min(ratio * advantages, clipped * advantages)
    moved = masked_mean((clipped * advantages < ratio * advantages).float(), loss_mask)
    return (loss * loss_mask).sum(), {"clip_ratio": moved.item()}


def skyrl_reinforce(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, loss_mask: Tensor
) -> tuple[Tensor, float]:
    """SkyRL's form of 2025: a mean of its own, and one number."""
    assert config.get("loss_reduction") == "token_mean"
    return masked_mean(-log_probs * advantages, loss_mask), 0.0


def skyrl_gspo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, loss_mask: Tensor, **others: Any
) -> tuple[Tensor, dict[str, float]]:
    """One ratio for each answer, and `**others`."""
    distance = ((log_probs - old_log_probs) * loss_mask).sum(1, keepdim=True) / loss_mask.sum(1, keepdim=True)
    ratio = (log_probs - log_probs.detach() + distance.detach()).exp()
    clipped = ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high)
    return (-torch.min(ratio * advantages, clipped * advantages) * loss_mask).sum(), {"ratio": ratio.mean().item()}


def verl_aggregated(values: Tensor, mask: Tensor, mode: str) -> Tensor:
    if mode == "token-mean":
        return masked_mean(values, mask)
    assert mode == "seq-mean-token-mean"
    return ((values * mask).sum(1) / mask.sum(1)).mean()


def verl_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """verl's form of now, which aggregates as it is told."""
    ratio = (log_prob - old_log_prob).exp()
    low, high = config.clip_ratio_low, config.clip_ratio_high
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    loss = torch.where(advantages < 0, torch.min(-advantages * config.get("clip_ratio_c", 3.0), loss), loss)
    assert rollout_is_weights is None and config.global_batch_info == {} and config["clip_ratio"] == low
    return verl_aggregated(loss, response_mask, loss_agg_mode), {"actor/ppo_kl": (old_log_prob - log_prob).mean()}


def verl_of_2025(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """verl's form before 0.6: four numbers."""
    assert cliprange_low is not None and cliprange_high is not None
    ratio = (log_prob - old_log_prob).exp()
    clipped = ratio.clamp(1 - cliprange_low, 1 + cliprange_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    none = torch.zeros(())
    return verl_aggregated(loss, response_mask, loss_agg_mode), none, none + 0.5, none


def skyrl_grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    grpo_norm_by_std: bool = True,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    scores = token_level_rewards.sum(-1)
    of_prompt = defaultdict(list)
    for score, prompt in zip(scores.tolist(), index, strict=True):
        of_prompt[prompt].append(score)
    for row, prompt in enumerate(index):
        group = torch.tensor(of_prompt[prompt])
        scores[row] = (scores[row] - group.mean()) / (group.std() + epsilon if grpo_norm_by_std else 1)
    return scores[:, None] * response_mask, scores[:, None] * response_mask


def skyrl_baseline(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, **others: Any
) -> tuple[Tensor, Tensor]:
    rewards = (token_level_rewards * response_mask).sum(-1, keepdim=True)
    advantages = (rewards - rewards.mean()) * response_mask
    return advantages, advantages.clone()


def verl_returns(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, **others: Any
) -> tuple[Tensor, Tensor]:
    returns, running = torch.zeros_like(token_level_rewards), torch.zeros(len(token_level_rewards))
    for column in reversed(range(token_level_rewards.shape[1])):
        running = token_level_rewards[:, column] + config.gamma * running
        returns[:, column] = running
    return returns * response_mask, returns


def verl_leave_one_out(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: Any = None
) -> tuple[Tensor, Tensor]:
    scores = token_level_rewards.sum(-1)
    same = torch.from_numpy(index[:, None] == index[None, :]).float()
    count = same.sum(1)
    others = (same @ scores - scores) / (count - 1).clamp(min=1)
    advantages = (scores - others)[:, None] * response_mask
    return advantages, advantages


def skyrl_ranks(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Each answer's place among those to its prompt, from -1 to 1."""
    scores = token_level_rewards.sum(-1)
    same = torch.from_numpy(index[:, None] == index[None, :])
    ahead = (same & (scores[:, None] > scores[None, :])).sum(1) - (same & (scores[:, None] < scores[None, :])).sum(1)
    advantages = (ahead / (same.sum(1) - 1).clamp(min=1))[:, None] * response_mask
    return advantages, advantages


# Those below are refused.


def takes_two(first: Tensor, second: Tensor) -> Tensor:
    return first + second


def asks_for_entropy(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, entropy: Tensor) -> Tensor:
    return entropy.mean()


def reduces_nothing(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any) -> Tensor:
    return -log_probs * advantages


def counts_padding(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, loss_mask: Tensor | None = None
) -> tuple[Tensor, dict[str, float]]:
    """As SkyRL's example of a custom loss does."""
    return (-log_probs * advantages).mean(), {"clip_ratio": 0.0}


def takes_a_logarithm(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, loss_mask: Tensor
) -> tuple[Tensor, dict[str, float]]:
    return -(log_probs.log() * advantages * loss_mask).sum(), {"clip_ratio": 0.0}


def always_by_answer(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    return verl_aggregated(-log_prob * advantages, response_mask, "seq-mean-token-mean"), {}


def reads_what_is_not_here(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: Any
) -> Any:
    return config.policy_loss.dro_beta * masked_mean(log_prob, response_mask)


def asks_for_entropies(token_level_rewards: Tensor, response_mask: Tensor, entropies: Tensor) -> Tensor:
    return entropies


def forgets_the_tokens(token_level_rewards: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    return token_level_rewards.sum(1), token_level_rewards


class OfNoCall:
    """A class whose instances cannot be called."""


def compares_answers(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """A variance over the answers of a call, of which a micro-batch may have one."""
    scores = (advantages * loss_mask).sum(1)
    variance = (scores - scores.mean()).square().sum() / (len(scores) - 1)
    return -(torch.exp(log_probs - old_log_probs) * advantages / variance * loss_mask).sum()

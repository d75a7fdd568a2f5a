"""Laws of advantages, losses and reductions."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from skyrl.algorithms.advantages import group_relative
from skyrl.algorithms.clipped_losses import RegularLoss
from skyrl.algorithms.kl import kl_estimate
from skyrl.algorithms.losses import ppo_clip
from skyrl.algorithms.reductions import sequence_mean, token_mean
from skyrl.batch import TrainingBatch
from skyrl.training.objective import PolicyObjective

finite = st.floats(-5, 5, width=32)


@st.composite
def scored_groups(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Scores and the group of each, two or more to a group, in any order."""
    sizes = draw(st.lists(st.integers(2, 5), min_size=1, max_size=4))
    members = draw(st.permutations([number for number, size in enumerate(sizes) for _ in range(size)]))
    scores = draw(st.lists(finite, min_size=len(members), max_size=len(members)))
    return torch.tensor(scores), torch.tensor(members)


@st.composite
def batches(draw: st.DrawFn) -> tuple[TrainingBatch, Tensor]:
    """A batch with everything an objective reads, and the current policy's log-probabilities."""
    rows, width = draw(st.integers(1, 6)), draw(st.integers(2, 7))
    lengths = draw(st.lists(st.integers(2, width), min_size=rows, max_size=rows))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    mask = torch.rand(rows, width, generator=generator) < 0.6
    mask[:, 0] = False
    mask &= torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    old, new, ref = (-3 * torch.rand(rows, width, generator=generator) for _ in range(3))
    batch = TrainingBatch(
        input_ids=torch.ones(rows, width, dtype=torch.long),
        lengths=torch.tensor(lengths),
        loss_mask=mask,
        rollout_logprobs=old,
        rewards=torch.zeros(rows, width),
        groups=torch.zeros(rows, dtype=torch.long),
        old_logprobs=old,
        ref_logprobs=ref,
        advantages=torch.randn(rows, width, generator=generator) * mask,
    )
    return batch, new


OBJECTIVE = PolicyObjective(
    policy_loss=RegularLoss(eps_clip_low=0.2, eps_clip_high=0.28), kl_loss_coef=0.1, kl_estimator="k3"
)


def loss_and_gradient(batch: TrainingBatch, logprobs: Tensor, rows_at_once: int) -> tuple[float, Tensor]:
    """Of one mini-batch, computed in micro-batches."""
    leaf = logprobs.clone().requires_grad_()
    total = torch.zeros(())
    for micro in OBJECTIVE.weigh(batch.with_fields(values=leaf)).split(rows_at_once):  # the values go where the rows go
        assert micro.values is not None
        loss, _, _ = OBJECTIVE(micro.values, micro)
        total = total + loss
    total.backward()
    assert leaf.grad is not None
    return total.item(), leaf.grad


@given(scored_groups())
def test_advantages_sum_to_zero_in_a_group(scored: tuple[Tensor, Tensor]) -> None:
    scores, groups = scored
    for by_std in (True, False):
        advantages = group_relative(scores, groups, normalize_by_std=by_std)
        sums = torch.zeros(int(groups.max()) + 1).index_add_(0, groups, advantages)
        torch.testing.assert_close(sums, torch.zeros_like(sums), atol=1e-4, rtol=0)


@given(scored_groups(), st.integers(0, 10_000))
def test_permuting_rows_permutes_advantages(scored: tuple[Tensor, Tensor], seed: int) -> None:
    scores, groups = scored
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed))
    expected = group_relative(scores, groups, normalize_by_std=True)[order]
    result = group_relative(scores[order], groups[order], normalize_by_std=True)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@given(scored_groups(), st.integers(-8, 8))
def test_a_constant_bonus_changes_no_advantage(scored: tuple[Tensor, Tensor], bonus: int) -> None:
    scores, groups = scored
    scores = scores.round(decimals=2)
    with_bonus = group_relative(scores + bonus, groups, normalize_by_std=False)
    torch.testing.assert_close(with_bonus, group_relative(scores, groups, normalize_by_std=False), atol=1e-5, rtol=1e-5)


@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=8))
def test_k3_is_never_negative(pairs: list[tuple[float, float]]) -> None:
    new, ref = torch.tensor([pairs]).unbind(-1)
    assert (kl_estimate(new, ref, "k3") >= 0).all()


@given(batches(), st.integers(1, 6))
def test_splitting_a_mini_batch_changes_neither_loss_nor_gradient(
    batch_and_logprobs: tuple[TrainingBatch, Tensor], rows: int
) -> None:
    batch, logprobs = batch_and_logprobs
    total, whole_gradient = loss_and_gradient(batch, logprobs, len(batch))
    parts, parts_gradient = loss_and_gradient(batch, logprobs, rows)
    assert abs(total - parts) < 1e-5
    torch.testing.assert_close(parts_gradient, whole_gradient, atol=1e-6, rtol=1e-5)


@given(batches())
def test_what_stands_outside_the_mask_never_reaches_the_loss(batch_and_logprobs: tuple[TrainingBatch, Tensor]) -> None:
    batch, logprobs = batch_and_logprobs
    clean, clean_gradient = loss_and_gradient(batch, logprobs, len(batch))
    poison = torch.where(batch.loss_mask, 0.0, torch.nan)
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None
    poisoned = batch.with_fields(old_logprobs=batch.old_logprobs + poison, ref_logprobs=batch.ref_logprobs + poison)
    loss, gradient = loss_and_gradient(poisoned, logprobs, len(batch))
    assert loss == clean
    torch.testing.assert_close(gradient, clean_gradient)


@given(batches())
def test_shares_of_tokens_add_up_to_one(batch_and_logprobs: tuple[TrainingBatch, Tensor]) -> None:
    mask = batch_and_logprobs[0].loss_mask
    if mask.any(1).all():
        torch.testing.assert_close(token_mean(mask).sum(), torch.tensor(1.0))
        torch.testing.assert_close(sequence_mean(mask).sum(), torch.tensor(1.0))


@given(batches())
def test_at_ratio_one_clipping_changes_nothing(batch_and_logprobs: tuple[TrainingBatch, Tensor]) -> None:
    batch, logprobs = batch_and_logprobs
    assert batch.advantages is not None
    loss = ppo_clip(logprobs, logprobs, batch.advantages, clip_low=0.2, clip_high=0.2)
    torch.testing.assert_close(loss, -batch.advantages)

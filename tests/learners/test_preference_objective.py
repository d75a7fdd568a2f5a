"""Objectives of preference runs on rankings, with weights, and with a loss of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from skyrl.algorithms.linear_logprobs import collision_entropy, collision_entropy_of_logits
from skyrl.algorithms.preferences import Pairs, PairSettings, plackett_luce
from skyrl.batch import TrainingBatch
from skyrl.config import PreferenceConfig
from skyrl.errors import ConfigError
from skyrl.experiments.preference import preference_objective, tried
from skyrl.learners.workers.group import deal
from skyrl.learners.workers.learning_worker import weighed

SIZES = (3, 4, 2)
"""Answers of three rankings, of up to four."""


def drawn(sizes: tuple[int, ...], answers: int, seed: int = 0) -> tuple[TrainingBatch, Tensor]:
    """Rankings with log-probabilities of a reference, and those of a policy."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(sizes) * answers
    lengths = torch.randint(1, 6, (rows,), generator=generator)
    exist = torch.tensor([index < size for size in sizes for index in range(answers)])
    columns = torch.arange(8)
    mask = (columns >= 2) & (columns < 2 + lengths.unsqueeze(1)) & exist.unsqueeze(1)
    logprobs, reference = (torch.where(mask, -torch.rand(mask.shape, generator=generator) * 3, 0.0) for _ in range(2))
    batch = TrainingBatch(
        input_ids=torch.zeros(mask.shape, dtype=torch.long),
        lengths=2 + lengths,
        loss_mask=mask,
        rollout_logprobs=None,
        rewards=torch.zeros(mask.shape),
        groups=torch.arange(rows) // answers,
    )
    return batch.with_fields(ref_logprobs=reference), logprobs


def result(logprobs: Tensor, batch: TrainingBatch, entropy: Tensor | None = None, **settings: Any) -> tuple[Any, ...]:
    """Loss, gradient and measurements of a batch."""
    run = PreferenceConfig(**settings)
    objective, leaf = preference_objective(run), logprobs.clone().requires_grad_()
    loss, parts, _ = objective(leaf, weighed(objective, batch), entropy)
    loss.backward()
    return loss.detach(), leaf.grad, parts


def test_the_probability_of_a_ranking_is_a_product_of_choices() -> None:
    rewards = torch.tensor([[1.0, 0.5, -2.0], [0.3, 0.1, 9.0]])
    exists = torch.tensor([[True, True, True], [True, True, False]])
    odds = rewards.exp()
    first = odds[0, 0] / odds[0].sum() * odds[0, 1] / odds[0, 1:].sum()
    second = odds[1, 0] / odds[1, :2].sum()
    torch.testing.assert_close(plackett_luce(rewards, exists), -torch.stack([first, second]).log())


def test_a_ranking_of_two_is_dpo() -> None:
    batch, logprobs = drawn((2, 2, 2), 2)
    dpo, ranked = (result(logprobs, batch, loss_type=(name,)) for name in ("sigmoid", "plackett_luce"))
    torch.testing.assert_close(ranked[0], dpo[0])
    torch.testing.assert_close(ranked[1], dpo[1])


def test_a_ranking_counts_as_its_formula_says() -> None:
    batch, logprobs = drawn(SIZES, 4)
    assert batch.ref_logprobs is not None
    rewards = 0.3 * (logprobs - batch.ref_logprobs).sum(1).view(3, 4)
    expected = torch.stack(
        [
            sum((own[index:].logsumexp(0) - own[index] for index in range(len(own))), torch.zeros(()))
            for own in (rewards[item, :size] for item, size in enumerate(SIZES))
        ]
    ).mean()
    torch.testing.assert_close(
        result(logprobs, batch, loss_type=("plackett_luce",), num_answers=4, beta=0.3)[0], expected
    )


@pytest.mark.parametrize(
    "more", [{}, {"ld_alpha": 0.4}, {"loss_type": ("ipo",)}, {"loss_type": ("simpo", "sft")}], ids=str
)
def test_a_loss_of_pairs_is_the_mean_over_all_pairs_of_a_list(more: dict[str, Any]) -> None:
    batch, logprobs = drawn(SIZES, 4)
    losses, gradient = [], torch.zeros_like(logprobs)
    for item, size in enumerate(SIZES):
        pairs = [(one, other) for one in range(size) for other in range(one + 1, size)]
        of_pairs = [name for name in more.get("loss_type", ("sigmoid",)) if name != "sft"]
        for one, other in pairs:
            rows = torch.tensor([4 * item + one, 4 * item + other])
            pair_batch = batch.select(rows)
            pair = result(
                logprobs[rows, : pair_batch.input_ids.shape[1]], pair_batch, **{**more, "loss_type": tuple(of_pairs)}
            )
            losses.append(pair[0] / len(pairs) / len(SIZES))
            gradient[rows, : pair[1].shape[1]] += pair[1] / len(pairs) / len(SIZES)
    full = result(logprobs, batch, **more, num_answers=4)
    expected = torch.stack(losses).sum()
    if "sft" in more.get("loss_type", ()):
        best = batch.loss_mask & (torch.arange(len(batch)) % 4 == 0).unsqueeze(1)
        expected = expected - logprobs[best].mean()
        gradient = gradient - best.float() / best.sum()
    torch.testing.assert_close(full[0], expected)
    torch.testing.assert_close(full[1], gradient)


def test_the_cut_of_rankings_changes_nothing() -> None:
    batch, logprobs = drawn(SIZES, 4)
    settings: dict[str, Any] = {"loss_type": ("plackett_luce", "sigmoid", "sft"), "num_answers": 4}
    full = result(logprobs, batch, **settings)
    objective = preference_objective(PreferenceConfig(**settings))
    prepared = weighed(objective, batch)
    cut = [(start, prepared.rows(start, start + 4)) for start in (0, 4, 8)]
    parts = [objective(logprobs[start : start + 4, : own.input_ids.shape[1]], own) for start, own in cut]
    torch.testing.assert_close(torch.stack([loss for loss, _, _ in parts]).sum(), full[0])
    for name, value in full[2].items():
        torch.testing.assert_close(torch.stack([own[name] for _, own, _ in parts]).sum(), value)


def test_lists_that_are_dealt_to_ranks_have_the_loss_of_one() -> None:
    batch, logprobs = drawn(SIZES, 4)
    settings: dict[str, Any] = {"loss_type": ("plackett_luce", "sigmoid", "sft"), "num_answers": 4}
    full = result(logprobs, batch, **settings)
    objective = preference_objective(PreferenceConfig(**settings))
    carried = batch.with_fields(old_logprobs=logprobs)  # for its place in the shares
    shares = deal(weighed(objective, carried), 2, rows_of_an_item=4)
    assert [len(share) for share in shares] == [8, 8]  # the last list once more, without weight
    results = []
    for share in shares:
        assert share.old_logprobs is not None
        results.append(objective(torch.where(share.loss_mask, share.old_logprobs, 0.0), share))
    torch.testing.assert_close(torch.stack([loss for loss, _, _ in results]).sum(), full[0])
    for name, value in full[2].items():
        torch.testing.assert_close(torch.stack([parts[name] for _, parts, _ in results]).sum(), value)


def test_a_pair_counts_by_the_policys_own_probability_of_it() -> None:
    batch, logprobs = drawn((2, 2), 2)
    entropy = torch.where(batch.loss_mask, torch.rand(logprobs.shape, generator=torch.Generator().manual_seed(1)), 0.0)
    means = ((logprobs + entropy) * batch.loss_mask).sum(1) / batch.loss_mask.sum(1)
    weights = means.view(2, 2).sum(1).exp()
    assert batch.ref_logprobs is not None
    ratios = (logprobs - batch.ref_logprobs).sum(1).view(2, 2)
    expected = (weights * -logsigmoid(0.1 * (ratios[:, 0] - ratios[:, 1]))).mean()
    loss, gradient, parts = result(logprobs, batch, entropy, use_weighting=True)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(parts["weight"], weights.mean())
    plain = result(logprobs, batch)
    torch.testing.assert_close(gradient.view(2, -1), plain[1].view(2, -1) * weights.unsqueeze(1))
    torch.testing.assert_close(result(logprobs, batch, use_weighting=True)[0], plain[0])  # an evaluation


def test_the_collision_entropy_is_that_of_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl.algorithms.linear_logprobs.LOGITS_AT_A_TIME", 5 * 31)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(23, 8, generator=generator), torch.randn(31, 8, generator=generator)
    expected = -(hidden @ weight.T / 1.5).softmax(1).square().sum(1).log()
    torch.testing.assert_close(collision_entropy(hidden, weight, temperature=1.5), expected)
    torch.testing.assert_close(collision_entropy_of_logits(hidden @ weight.T, temperature=1.5), expected)


def doubled(pairs: Pairs, settings: PairSettings) -> Tensor:
    return -2 * logsigmoid(settings.beta * (pairs.a - pairs.b))


def summed(pairs: Pairs, settings: PairSettings) -> Tensor:
    return doubled(pairs, settings).sum()


def centred(pairs: Pairs, settings: PairSettings) -> Tensor:
    return doubled(pairs, settings) - pairs.a.mean()


def misspelled(pairs: Any, settings: PairSettings) -> Tensor:
    value: Tensor = pairs.c
    return value


OWN = f"{__file__}:doubled"


def test_a_loss_of_ones_own_is_added_like_any_other() -> None:
    batch, logprobs = drawn(SIZES, 4)
    dpo = result(logprobs, batch, loss_type=("sigmoid",), num_answers=4)
    own = result(logprobs, batch, loss_type=(OWN, "sigmoid"), loss_weights=(0.5, 1.0), num_answers=4)
    torch.testing.assert_close(own[0], 2 * dpo[0])
    torch.testing.assert_close(own[1], 2 * dpo[1])


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (summed, r"gives \(\) for three pairs, not a tensor with a number for each"),
        (centred, "depends on the other pairs of its micro-batch"),
        (lambda pairs, _: pairs.chosen * float("nan"), r"gives \[nan, nan, nan\] for three pairs"),
        (misspelled, r"fails with three pairs: AttributeError: .*'c'"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_before_the_start(loss: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        tried("losses.py:mine", loss, PairSettings())
    tried("losses.py:mine", doubled, PairSettings())

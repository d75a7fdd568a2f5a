"""Numbers that are not finite, on one rank of several: nothing of them is learned or saved, on any rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attrs import evolve

from skyrl.errors import NonFiniteError
from tests.learners.spreading import (
    WAYS,
    Spread,
    assert_same_numbers,
    assert_same_weights,
    changed_state,
    mini_batch,
    stored,
    weights_of,
)
from tests.long_cases import long_except

pytestmark = pytest.mark.xdist_group("ranks")


GUARDED = [
    "one process",
    "FSDP2 on 2 ranks",
    "ZeRO-0 on 2 ranks",
    "ZeRO-2 on 2 ranks",
    "ZeRO-3 on 2 ranks",
    "FSDP2 on 4 ranks",
    "FSDP2 hybrid 2x2",
    "FSDP2, 2 ranks cut matrices",
    "ZeRO-1 on 2 ranks",
    "ZeRO-0, 2 ranks cut matrices",
    "ZeRO-2, 2 ranks cut matrices",
    "ZeRO-3, 2 ranks cut matrices",
]
"""Ways whose guards are not the same code come first."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", long_except(GUARDED, "FSDP2 on 2 ranks", "ZeRO-2 on 2 ranks"))
@pytest.mark.parametrize(
    "part",
    long_except(["model.model.norm.weight", "optimizer.model.norm.weight.exp_avg"], "model.model.norm.weight"),
)
async def test_a_state_that_holds_no_number_on_one_rank_is_not_saved(
    name: str, part: str, spread: Spread, tmp_path: Path
) -> None:
    changes, ranks = WAYS.get(name, ({}, 1))
    learner = spread.policy(changes, ranks)
    await learner.update(mini_batch(0))
    tensors, numbers = await stored(learner, tmp_path)
    await learner.refuse_non_finite_state()
    spoilt = tensors[part].clone()
    spoilt[-1] = torch.nan  # the last rank has it
    await learner.load_state(changed_state(tensors, "spoilt", {part: spoilt}), numbers)
    with pytest.raises(NonFiniteError, match=r"of the policy holds NaN or infinity before saving"):
        await learner.refuse_non_finite_state()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", long_except(GUARDED, "one process", "FSDP2 on 2 ranks", "ZeRO-3 on 2 ranks"))
async def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(name: str, spread: Spread) -> None:
    changes, ranks = WAYS.get(name, ({}, 1))
    learner = spread.policy({**changes, "policy.optimizer_config.max_skipped_updates": 1}, ranks)
    twin = spread.policy({}, 1)
    await learner.update(mini_batch(0))
    await twin.update(mini_batch(0))
    good, last = mini_batch(1), torch.arange(8) == 7
    assert good.advantages is not None
    bad = evolve(good, advantages=torch.where(last.unsqueeze(1), torch.nan, good.advantages))
    assert (await learner.update(bad))["skipped_updates"] == 1
    assert_same_weights(await weights_of(twin), await weights_of(learner))
    assert_same_numbers(await twin.update(good), await learner.update(good))
    assert (await learner.update(bad))["skipped_updates"] == 1
    with pytest.raises(NonFiniteError, match=r"2 times in a row.*Lower trainer\.policy\.optimizer_config\.lr"):
        await learner.update(bad)
    assert_same_weights(await weights_of(twin), await weights_of(learner))


@pytest.mark.parametrize(
    "name",
    long_except(["one process", "FSDP2 on 2 ranks", *(name for name in WAYS if "ZeRO" in name)], "FSDP2 on 2 ranks"),
)
async def test_an_infinite_loss_with_a_finite_gradient_on_one_rank_is_skipped_on_all(name: str, spread: Spread) -> None:
    changes, ranks = WAYS.get(name, ({}, 1))
    learner = spread.policy({**changes, "policy.optimizer_config.max_skipped_updates": 1}, ranks)
    before = await weights_of(learner)
    good, last = mini_batch(0), (torch.arange(8) == 7).unsqueeze(1)
    assert good.advantages is not None and good.old_logprobs is not None
    bad = evolve(
        good,
        advantages=torch.where(last & good.loss_mask, -1e36, good.advantages),
        old_logprobs=torch.where(last & good.loss_mask, -90.0, good.old_logprobs),  # e^20 and no gradient
    )
    metrics = await learner.update(bad)
    assert (metrics["policy_loss"], metrics["skipped_updates"]) == (float("inf"), 1.0)
    assert_same_weights(before, await weights_of(learner))
    with pytest.raises(NonFiniteError, match=r"gradient norm is nan \(2 times in a row"):
        await learner.update(bad)

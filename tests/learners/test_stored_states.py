"""The state of a learner is the same however it is spread: it goes on under another strategy and on other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyrl.errors import ResumeError
from tests.learners.rows import batch
from tests.learners.spreading import (
    WAYS,
    Spread,
    Trained,
    assert_same_numbers,
    assert_same_weights,
    changed_state,
    mini_batch,
    stored,
    weights_of,
)
from tests.long_cases import long_except

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.long
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param("FSDP2 on 2 ranks", "ZeRO-3 on 2 ranks", marks=pytest.mark.long),
        ("ZeRO-1 on 2 ranks", "FSDP2 on 4 ranks"),
        ("ZeRO-2, 2 ranks cut matrices", None),
        *(
            pytest.param(saved, loaded, marks=pytest.mark.long)
            for saved, loaded in (
                ("ZeRO-3 on 2 ranks", None),
                ("FSDP2, 2x2 ranks cut matrices", None),
                ("ZeRO-0, 2 ranks cut matrices", "ZeRO-1, 2 ranks cut matrices"),
                ("ZeRO-1, 2 ranks cut matrices", "ZeRO-3, 2 ranks cut matrices"),
                ("ZeRO-3, 2 ranks cut matrices", "FSDP2, 2 ranks cut matrices"),
                ("FSDP2 on 4 ranks", "ZeRO-0, 2 ranks cut matrices"),
                ("ZeRO-2 on 2 ranks", "ZeRO-2, 2x2 ranks cut matrices"),
                ("ZeRO-2, 2x2 ranks cut matrices", "ZeRO-3, 2x2 ranks cut matrices"),
                ("ZeRO-3, 2x2 ranks cut matrices", None),
            )
        ),
        pytest.param("FSDP2, 2 ranks cut matrices", "ZeRO-3 on 2 ranks", marks=pytest.mark.long),
        pytest.param("FSDP2, 2 ranks cut matrices", "FSDP2, 2x2 ranks cut matrices", marks=pytest.mark.long),
        pytest.param("ZeRO-2 on 2 ranks", "FSDP2, 2 ranks cut matrices", marks=pytest.mark.long),
        pytest.param("FSDP2 hybrid 2x2", "FSDP2, 2x2 ranks cut matrices", marks=pytest.mark.long),
        pytest.param("FSDP2 on 2 ranks", None, marks=pytest.mark.long),
        pytest.param("FSDP2 on 2 ranks", "FSDP2 on 4 ranks", marks=pytest.mark.long),
        pytest.param("FSDP2 hybrid 2x2", None, marks=pytest.mark.long),
        pytest.param("FSDP2 on 2 ranks", "ZeRO-0 on 2 ranks", marks=pytest.mark.long),
        pytest.param("FSDP2 on 2 ranks", "ZeRO-2 on 2 ranks", marks=pytest.mark.long),
        pytest.param("ZeRO-2 on 2 ranks", "ZeRO-3 on 2 ranks", marks=pytest.mark.long),
        pytest.param("ZeRO-0 on 2 ranks", "FSDP2 hybrid 2x2", marks=pytest.mark.long),
    ],
)
async def test_a_state_goes_on_under_another_strategy_and_on_other_ranks(
    saved: str, loaded: str | None, spread: Spread, baseline: Trained, tmp_path: Path
) -> None:
    first = spread.policy(*WAYS[saved])
    for step in range(3):
        await first.update(mini_batch(step))
    tensors, numbers = await stored(first, tmp_path)
    second = spread.policy(*(WAYS[loaded] if loaded else ({}, 1)))
    await second.update(mini_batch(9))  # what is there before is replaced
    await second.load_state(tensors, numbers)
    for step in (3, 4):
        assert_same_numbers(baseline.metrics[step], await second.update(mini_batch(step)))
    assert_same_weights(baseline.weights, await weights_of(second))


@pytest.mark.parametrize(
    "name",
    long_except(
        ["FSDP2 on 2 ranks", "ZeRO-2 on 2 ranks", "ZeRO-3 on 2 ranks", "ZeRO-2, 2 ranks cut matrices"],
        "ZeRO-2 on 2 ranks",
    ),
)
async def test_a_state_from_before_the_first_step_forgets_later_ones(
    name: str, spread: Spread, baseline: Trained, tmp_path: Path
) -> None:
    learner = spread.policy(*WAYS[name])
    tensors, numbers = await stored(learner, tmp_path)
    assert not any(name.startswith("optimizer.") for name in tensors)
    await learner.update(mini_batch(9))
    await learner.load_state(tensors, numbers)
    assert_same_numbers(baseline.metrics[0], await learner.update(mini_batch(0)))
    assert_same_numbers(baseline.metrics[1], await learner.update(mini_batch(1)))


@pytest.mark.parametrize(
    "name",
    long_except(
        ["one process", "FSDP2, 2 ranks cut matrices", "ZeRO-2 on 2 ranks", "ZeRO-2, 2 ranks cut matrices"],
        "one process",
    ),
)
@pytest.mark.parametrize("recomputing", long_except([True, False], True))
async def test_dropout_resumes_bit_for_bit_and_scores_are_without(
    name: str, recomputing: bool, spread: Spread, tmp_path: Path
) -> None:
    dropping = {
        "policy.use_dropout": True,
        "policy.model_config_kwargs": {"attention_dropout": 0.3},
        "recompute_activations": recomputing,
    }
    changes, ranks = WAYS.get(name, ({}, 1))
    plain, learner = spread.policy({}, 1), spread.policy(changes | dropping, ranks)
    torch.testing.assert_close(await learner.score(batch(7)), await plain.score(batch(7)), atol=1e-5, rtol=1e-5)
    without, first = await plain.update(mini_batch(0)), await learner.update(mini_batch(0))
    assert first["grad_norm"] != pytest.approx(without["grad_norm"], rel=1e-3)
    tensors, numbers = await stored(learner, tmp_path)
    undisturbed = await learner.update(mini_batch(1)), await weights_of(learner)
    await learner.load_state(tensors, numbers)
    resumed = await learner.update(mini_batch(1)), await weights_of(learner)
    assert resumed[0] == undisturbed[0]
    assert all(torch.equal(weight, resumed[1][key]) for key, weight in undisturbed[1].items())


@pytest.mark.parametrize("name", long_except(["FSDP2 on 2 ranks", "ZeRO-3 on 2 ranks"], "ZeRO-3 on 2 ranks"))
async def test_the_state_of_another_model_is_refused(name: str, spread: Spread, tmp_path: Path) -> None:
    learner = spread.policy(*WAYS[name])
    tensors, numbers = await stored(learner, tmp_path)
    by_number = changed_state(tensors, "more", {"optimizer.0.exp_avg": torch.zeros(3)})
    with pytest.raises(ResumeError, match="it has optimizer state of '0'"):
        await learner.load_state(by_number, numbers)
    without = changed_state(tensors, "less", {"model.model.norm.weight": None})
    with pytest.raises(ResumeError, match=r"for model\.norm\.weight, of shape \(32,\), it holds nothing"):
        await learner.load_state(without, numbers)

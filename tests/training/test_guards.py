"""What follows a non-finite value, and which sample it is found in."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve

from skyrl.config import FaultsConfig
from skyrl.errors import BatchError, NonFiniteError
from skyrl.training.guards import FiniteNumbers, NonFiniteGuard, refuse_non_finite
from skyrl.training.middleware import with_listeners
from tests.training.batches import batch_of
from tests.training.test_metrics import answer, group

NAN = BatchError("nan in the batch")
GROUPS = [group(answer("11", 1.0), answer("11", 0.0, sample_index=1))]
TERMS = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "rewards", "advantages")


class Trainer:
    """What the guard asks of one: its version, its position and its engines."""

    def __init__(self) -> None:
        self.version, self.position, self.weights = 6, self, self
        self.done: list[Any] = []

    def take_back_shaping(self, before: Any) -> None:
        self.done.append(before)

    async def publish(self, version: int) -> dict[str, float]:
        self.done.append(version)
        return {"published": 1.0}


def guard(policy: str, *, skipped: int = 2, back: int = 2) -> tuple[NonFiniteGuard, Trainer]:
    trainer: Any = Trainer()
    config = FaultsConfig(on_non_finite=policy, max_skipped_steps=skipped, max_roll_backs=back)  # type: ignore[arg-type]  # one of the names
    return NonFiniteGuard(config, trainer), trainer


async def test_a_skipped_step_takes_back_its_shaping_and_gives_the_engines_the_next_version(
    capsys: pytest.CaptureFixture[str],
) -> None:
    skipping, trainer = guard("skip")
    metrics = await skipping.skip_step(NAN, {"rewards": 1})
    assert metrics == {"published": 1.0, "trainer/skipped_steps": 1}
    assert trainer.done == [{"rewards": 1}, 7]
    assert capsys.readouterr().err == "warning: a step is left out (1 in a row): nan in the batch\n"


async def test_so_many_steps_in_a_row_are_skipped_and_no_more() -> None:
    skipping, _ = guard("skip", skipped=2)
    for _ in range(2):
        for _ in range(2):
            await skipping.skip_step(NAN, {})
        skipping.step_succeeded()  # in a row: the count starts again
    for _ in range(2):
        await skipping.skip_step(NAN, {})
    with pytest.raises(NonFiniteError, match=r"nan in the batch \(in 3 steps in a row; .*max_skipped_steps = 2\)"):
        await skipping.skip_step(NAN, {})


@pytest.mark.parametrize(("policy", "error"), [("abort", NAN), ("roll_back", NAN), ("skip", NonFiniteError("a loss"))])
async def test_what_was_learned_from_or_is_not_to_be_skipped_is_raised(policy: str, error: NonFiniteError) -> None:
    with pytest.raises(NonFiniteError) as raised:
        await guard(policy)[0].skip_step(error, {})
    assert raised.value is error


@pytest.mark.parametrize("policy", ["abort", "skip"])
def test_nothing_goes_back_unless_that_is_the_policy(policy: str) -> None:
    with pytest.raises(NonFiniteError) as raised:
        guard(policy)[0].roll_back(NAN)
    assert raised.value is NAN


def test_a_run_goes_back_so_often_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    going_back, _ = guard("roll_back", back=2)
    for _ in range(2):
        going_back.roll_back(NAN)
    going_back.rolled_back(NAN)
    warning = "warning: rolling back to step 6 and continuing with other prompts: nan in the batch\n"
    assert capsys.readouterr().err == warning
    with pytest.raises(NonFiniteError, match=r"nan in the batch \(after 2 rollbacks, the limit of "):
        going_back.roll_back(NAN)


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_term_and_the_sample_of_a_non_finite_value_are_named(term: str, value: float) -> None:
    numbers = torch.zeros(2, 3)
    numbers[1, 2] = value
    with pytest.raises(BatchError, match=f"^{term.removesuffix('s')} {value} in sample 1 of prompt p: no weight was"):
        refuse_non_finite(batch_of().with_fields(**{term: numbers}), GROUPS)


def test_the_first_term_is_blamed_and_at_most_four_samples_are_named() -> None:
    many = [group(*(answer("11", 1.0, sample_index=number) for number in range(6)))]
    batch = batch_of().select(torch.tensor([0, 1, 0, 1, 0, 1]))
    wrong = torch.full((6, 3), math.nan)
    named = ", ".join(f"sample {number} of prompt p" for number in range(4))
    for rows, more in ((6, ", and 2 more"), (5, ", and 1 more"), (4, "")):
        some = torch.where(torch.arange(6)[:, None] < rows, wrong, 0.0)
        with pytest.raises(BatchError) as raised:
            refuse_non_finite(evolve(batch, rewards=some, rollout_logprobs=some), many)
        assert str(raised.value) == f"rollout_logprob nan in {named}{more}: no weight was changed"


def test_shaping_and_estimating_see_finite_values_and_give_finite_advantages() -> None:
    numbers = FiniteNumbers()
    numbers.remember_groups(GROUPS, 3)
    good, wrong = batch_of(), evolve(batch_of(), rewards=torch.full((2, 3), math.nan))
    shape = with_listeners(lambda batch: (batch.rewards + 1, {"shaped": 1.0}), before=[numbers.refuse])
    assert torch.equal(shape(good)[0], good.rewards + 1)
    checks: Any = {"before": [numbers.refuse], "after": [numbers.refuse_advantages]}
    estimate = with_listeners(lambda batch: batch.rewards * 2, **checks)
    assert torch.equal(estimate(good), good.rewards * 2)
    for refused in (lambda: shape(wrong), lambda: estimate(wrong)):
        with pytest.raises(BatchError, match="reward nan in sample 0 of prompt p"):
            refused()
    with pytest.raises(BatchError, match="advantage inf in sample 0 of prompt p"):
        with_listeners(lambda batch: torch.full((2, 3), math.inf), after=[numbers.refuse_advantages])(good)

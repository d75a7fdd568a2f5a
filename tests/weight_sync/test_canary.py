"""The canary alone: engines that answer what they are given, and a learner that scores what it is given."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.errors import WeightSyncError
from skyrl.inference.engine import Completion, GenerationRequest
from skyrl.weight_sync.canary import Canary

CANARY = Canary(prompts=((1, 2, 3), (4,)), temperature=0.5, bound=0.125)


class Answers:
    """An engine that draws two tokens with these log-probabilities after every prompt."""

    def __init__(self, *logprobs: float) -> None:
        self.logprobs = logprobs
        self.asked: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        self.asked.append(request)
        count = len(self.logprobs)
        return (
            Completion(
                token_ids=(7,) * count,
                text="",
                logprobs=self.logprobs,
                weight_versions=(3,) * count,
                stop_reason="length",
            ),
        )


class Scores:
    """A learner that gives every token the log-probability -1."""

    async def score(self, batch: TrainingBatch) -> Tensor:
        return -batch.loss_mask.float()


class RoundsWithItsRows:
    """A learner whose sums round as a matrix product does: differently in batches of another size."""

    async def score(self, batch: TrainingBatch) -> Tensor:
        return -batch.loss_mask.float() * (1 + 2**-20 / len(batch))


async def compare(*engines: Answers, learner: Any = None) -> dict[str, float]:
    return await CANARY.compare(learner or Scores(), engines, 3)  # type: ignore[arg-type]  # stand-ins


async def test_the_differences_of_all_engines_are_measured() -> None:
    engines = Answers(-1.0, -1.04), Answers(-1.0, -1.0)
    found = await compare(*engines)  # differences 0, 0.04, 0 and 0, each twice
    assert found == pytest.approx({"weight_sync/parity_mean": 0.01, "weight_sync/parity_max": 0.04}, abs=1e-6)
    assert [request.prompt_ids for request in engines[0].asked] == [(1, 2, 3), (4,)]
    assert {request.sampling.temperature for request in engines[0].asked} == {0.5}


@pytest.mark.parametrize("count", [2, 3, 7])
async def test_engines_that_answer_alike_report_what_one_of_them_would(count: int) -> None:
    one, *others = [
        await compare(*[Answers(-1.0, -1.1, -0.9)] * engines, learner=RoundsWithItsRows()) for engines in (1, count)
    ]
    assert others == [one]


async def test_answers_that_differ_are_scored_each() -> None:
    found = await compare(Answers(-1.0), Answers(-1.0, -1.03))  # 0; 0 and 0.03; each twice
    assert found == pytest.approx({"weight_sync/parity_mean": 0.01, "weight_sync/parity_max": 0.03}, abs=1e-6)


@pytest.mark.parametrize("wrong", [0, 1, 2])
async def test_any_engine_that_computes_with_other_weights_is_named(wrong: int) -> None:
    engines = [Answers(-1.0, -1.0) for _ in range(3)]
    engines[wrong].logprobs = (-1.0, -1.3)
    with pytest.raises(WeightSyncError, match=f"^engine {wrong} does not compute with the weights of version 3"):
        await compare(*engines)


async def test_a_difference_that_is_not_a_number_is_no_agreement() -> None:
    with pytest.raises(WeightSyncError, match="^engine 0 does not compute .* differ from the learner's by nan nats"):
        await compare(Answers(-1.0, math.nan))


async def test_a_mean_at_the_bound_is_rounding() -> None:
    assert (await compare(Answers(-1.125, -1.125)))["weight_sync/parity_mean"] == 0.125

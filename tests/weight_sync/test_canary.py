"""The canary alone: engines that answer what they are given, and a learner that scores what it is given."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.errors import EngineFailed, NonFiniteError, ProcessError, RunError, WeightSyncError
from skyrl.inference.engine import Completion, GenerationRequest
from skyrl.weight_sync.canary import Canary

BOUND = 0.125


class Answers:
    """An engine that draws as many tokens after every prompt as it has log-probabilities."""

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


def canary(*prompts: tuple[int, ...]) -> Canary:
    return Canary(prompts=prompts or ((1, 2, 3), (4,)), temperature=0.5, bound=BOUND, new_tokens=40)


async def compare(
    *engines: Answers, learner: Any = None, probe: Canary | None = None, first: int = 0
) -> dict[str, float]:
    """The engines are numbered from `first`."""
    source, numbered = cast(Any, learner or Scores()), cast(Any, dict(enumerate(engines, start=first)))
    return await (probe or canary()).compare(source, numbered, 3)


def many(*logprobs: float) -> Answers:
    """An engine with so many of these that their mean has hardly room beyond the bound."""
    return Answers(*logprobs * 2000)


async def test_the_differences_of_all_engines_are_measured() -> None:
    engines = Answers(-1.0, -1.04), Answers(-1.0, -1.0)
    metrics = await compare(*engines)  # differences 0, 0.04, 0 and 0, each twice
    assert metrics == pytest.approx({"weight_sync/parity_mean": 0.01, "weight_sync/parity_max": 0.04}, abs=1e-6)
    assert [request.prompt_ids for request in engines[0].asked] == [(1, 2, 3), (4,)]
    assert {request.sampling.temperature for request in engines[0].asked} == {0.5}


@pytest.mark.parametrize("count", [2, 3, 7])
async def test_engines_that_answer_alike_report_what_one_of_them_would(count: int) -> None:
    first, *others = [
        await compare(*[Answers(-1.0, -1.1, -0.9)] * engines, learner=RoundsWithItsRows()) for engines in (1, count)
    ]
    assert others == [first]


async def test_answers_that_differ_are_scored_each() -> None:
    metrics = await compare(Answers(-1.0), Answers(-1.0, -1.03))  # 0; 0 and 0.03; each twice
    assert metrics == pytest.approx({"weight_sync/parity_mean": 0.01, "weight_sync/parity_max": 0.03}, abs=1e-6)


@pytest.mark.parametrize(("length", "prompts"), [(1, 128), (3, 86), (8, 32), (9, 32)])
async def test_prompts_are_continued_until_there_are_256_tokens(length: int, prompts: int) -> None:
    engine = Answers(*[-1.0] * length)
    await compare(engine, probe=canary(*((number,) for number in range(128))))
    assert len(engine.asked) == prompts  # 128 are all there are


@pytest.mark.parametrize("wrong", [0, 1, 2])
async def test_any_engine_that_computes_with_other_weights_is_named(wrong: int) -> None:
    engines = [Answers(-1.0, -1.0) for _ in range(3)]
    engines[wrong].logprobs = (-1.0, -1.9)
    with pytest.raises(WeightSyncError, match=f"^engine {wrong} does not compute with the weights of version 3"):
        await compare(*engines)


class Fails(Answers):
    """An engine whose every answer is an error."""

    def __init__(self, error: RunError) -> None:
        super().__init__()
        self.error = error

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        raise self.error


@pytest.mark.parametrize("error", [ProcessError("it is silent"), NonFiniteError("it answers nan")])
async def test_an_engine_that_gives_no_answer_is_named_for_the_client_to_lose(error: RunError) -> None:
    with pytest.raises(EngineFailed, match=str(error)) as caught:
        await compare(Answers(-1.0), Fails(error), first=4)
    assert (caught.value.number, caught.value.cause) == (5, error)


async def test_numbers_that_are_not_finite_in_any_engine_are_the_models() -> None:
    with pytest.raises(NonFiniteError, match="in both"):
        await compare(*[Fails(NonFiniteError("in both"))] * 2)
    with pytest.raises(EngineFailed, match="it is silent"):  # first, since the other one may still be at fault
        await compare(Fails(NonFiniteError("nan")), Fails(ProcessError("it is silent")))


DAMAGES: dict[str, Callable[[list[float]], list[float]]] = {
    "in another order": lambda values: values[::-1],
    "of the next token": lambda values: [*values[1:], values[0]],
    "all the same": lambda values: [-0.25] * len(values),
    "in bits": lambda values: [value / math.log(2) for value in values],
    "at another temperature": lambda values: [2 * value for value in values],
    "of one row for all": lambda values: [min(values)] * len(values),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
async def test_log_probabilities_that_are_not_those_of_the_tokens_are_refused(damage: str) -> None:
    scores = -3 * torch.rand(40, generator=torch.Generator().manual_seed(0))

    class Knows:
        async def score(self, batch: TrainingBatch) -> Tensor:
            logprobs = torch.zeros(batch.input_ids.shape)
            for row, mask in enumerate(batch.loss_mask):
                logprobs[row, mask] = scores
            return logprobs

    right, wrong = Answers(*scores.tolist()), Answers(*DAMAGES[damage](scores.tolist()))
    assert (await compare(right, learner=Knows()))["weight_sync/parity_max"] == 0
    with pytest.raises(WeightSyncError, match="^engine 1 does not compute"):
        await compare(right, wrong, learner=Knows())
    with pytest.raises(WeightSyncError, match="^engine 4 does not compute"):  # three were lost before
        await compare(right, wrong, learner=Knows(), first=3)


async def test_a_difference_that_is_not_a_number_is_no_agreement() -> None:
    with pytest.raises(WeightSyncError, match="^engine 0 does not compute .* differ from the learner's by nan nats"):
        await compare(Answers(-1.0, math.nan))


@pytest.mark.parametrize(
    ("tokens", "most"), [(1, 3 * BOUND), (4, 2 * BOUND), (100, 1.2 * BOUND), (40_000, 1.01 * BOUND)]
)
async def test_a_mean_over_few_tokens_has_room_beyond_the_bound(tokens: int, most: float) -> None:
    probe = canary((1, 2, 3))
    for beyond, refused in ((0.999, False), (1.001, True)):
        engine = Answers(*[-1.0 - most * beyond] * tokens)
        if refused:
            with pytest.raises(WeightSyncError, match=f"over {tokens} tokens, more than .* = {BOUND}"):
                await compare(engine, probe=probe)
        else:
            await compare(engine, probe=probe)


async def test_an_engine_that_samples_nothing_is_not_taken_for_a_right_one() -> None:
    with pytest.raises(WeightSyncError, match="no token after any prompt"):
        await compare(Answers())

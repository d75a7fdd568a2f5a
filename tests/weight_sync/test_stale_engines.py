"""Lost updates are found where they can be told from rounding, and right engines are not refused: a law over synthetic
engines, whose rounding is as heavy-tailed as a measured one. `benchmarks/parity.py` measures real models.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.errors import WeightSyncError
from skyrl.inference.engine import Completion, GenerationRequest
from skyrl.weight_sync.canary import Canary, ScoredSample, Verdict, Yardstick

ROWS, TOKENS = 32, 10


@frozen(kw_only=True)
class World:
    """A learner that moves by about `step` nats a version, and an engine beside it; each rounds on its own."""

    step: float
    of_learner: float
    """Typical rounding of the learner, in nats, at each version anew."""

    of_engine: float
    repeats: float = 0.0
    """Rounding of an engine that is asked the same again, as a share of `of_engine`."""

    def versions(self, seed: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Log-probabilities of engine and learner, (rows, tokens) each, of a right engine at each version."""
        drawn = torch.Generator().manual_seed(seed)
        exact = -torch.rand(ROWS, TOKENS, generator=drawn, dtype=torch.float64) * 3
        for _ in range(count):
            yield exact + self.of_engine * tailed(drawn), exact + self.of_learner * tailed(drawn)
            exact = exact + self.step * tailed(drawn)

    def again(self, engine: Tensor, seed: int) -> Tensor:
        """What an engine with the same weights says when it is asked again."""
        return engine + self.repeats * self.of_engine * tailed(torch.Generator().manual_seed(seed))


def tailed(drawn: torch.Generator) -> Tensor:
    """Numbers whose size varies a hundredfold from token to token, with a median of about 0.3."""
    shape = (ROWS, TOKENS)
    normal, scale = (torch.randn(shape, generator=drawn, dtype=torch.float64) for _ in range(2))
    return normal * scale.exp() / 2


def answers(engine: Tensor, learner: Tensor, same: int = TOKENS) -> list[ScoredSample]:
    """Answers with these log-probabilities, of which the first `same` tokens are the same at every version."""
    samples = []
    for row in range(ROWS):
        values = tuple(engine[row].tolist())
        later = int(engine[row, -1].item() * 1e6) % 100_000
        tokens = tuple(index if index < same else later for index in range(TOKENS))
        completion = Completion(
            token_ids=tokens, text="", logprobs=values, weight_versions=tokens, stop_reason="length"
        )
        samples.append(ScoredSample(prompt=(row,), completion=completion, learner=learner[row]))
    return samples


BFLOAT16 = {"of_learner": 0.03, "of_engine": 0.04}
WORLDS = {
    "below rounding": World(step=0.003, **BFLOAT16),
    "near rounding": World(step=0.03, **BFLOAT16),
    "above rounding": World(step=0.3, **BFLOAT16),
    "a learner that rounds more": World(step=0.003, of_learner=0.03, of_engine=1e-6),
    "an engine that rounds more": World(step=0.003, of_learner=1e-6, of_engine=0.04),
    "float32": World(step=1e-5, of_learner=1e-7, of_engine=1e-7),
    "no update": World(step=0.0, **BFLOAT16),
    "an engine that never repeats itself": World(step=0.1, of_learner=0.03, of_engine=0.04, repeats=1.0),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", list(WORLDS))
def test_no_right_engine_is_refused(name: str) -> None:
    world, refused, follows = WORLDS[name], 0, 0
    for seed in range(4):
        before: Yardstick | None = None
        for version, (engine, learner) in enumerate(world.versions(seed, 25)):
            now = answers(engine, learner, same=7)
            verdict = Verdict.FOLLOWS if before is None else before.verdict(now)
            refused += verdict is Verdict.STAYS
            follows += verdict is Verdict.FOLLOWS
            if verdict is Verdict.FOLLOWS:
                before = Yardstick(version=version, answers=tuple(now))
    assert refused == 0
    if world.step > 2 * (world.of_engine + world.of_learner):
        assert follows > 90  # nearly every version is told from the one before


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [name for name in WORLDS if "below" not in name and name != "no update"])
def test_lost_updates_are_found_at_the_first_version_at_which_they_differ_from_rounding(name: str) -> None:
    """At that version they have moved the learner by no more than four times what engine and learner differ by."""
    world = WORLDS[name]
    for seed in range(8):
        first: tuple[Tensor, Tensor] | None = None
        for version, (engine, learner) in enumerate(world.versions(seed, 400)):
            if first is None:
                first = engine, learner
                yardstick = Yardstick(version=0, answers=tuple(answers(engine, learner)))
                continue
            verdict = yardstick.verdict(answers(world.again(first[0], version), learner))
            assert verdict is not Verdict.FOLLOWS
            if verdict is Verdict.STAYS:
                break
            noise = (first[0] - first[1]).abs().median()
            moved = (learner - first[1]).abs().median()
            assert moved < 4 * noise
        assert verdict is Verdict.STAYS


def test_the_verdict_names_the_version_that_the_engine_stayed_at() -> None:
    """Two engines: one follows, one has stopped at version 4; both have accepted all weights."""
    world = WORLDS["above rounding"]
    versions = list(world.versions(0, 8))

    class Plays:
        def __init__(self, last: int) -> None:
            self.last, self.version = last, 0

        async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
            (row,) = request.prompt_ids
            engine, learner = versions[min(self.version, self.last)]
            return (answers(engine, learner)[row].completion,)

    class Learner:
        version = 0

        async def score(self, batch: TrainingBatch) -> Tensor:
            logprobs = torch.zeros(batch.input_ids.shape)
            for row, prompt in enumerate(batch.input_ids[:, 0].tolist()):
                logprobs[row, 1:] = versions[self.version][1][prompt]
            return logprobs

    async def publish_all() -> None:
        for version in range(8):
            learner.version = engines[0].version = engines[1].version = version
            await canary.compare(learner, numbered, version, promised=True)  # type: ignore[arg-type]  # a stand-in

    learner, engines = Learner(), [Plays(99), Plays(4)]
    numbered: Any = dict(enumerate(engines, start=3))  # three earlier ones were lost
    canary = Canary(prompts=tuple((row,) for row in range(ROWS)), temperature=1.0, bound=9.0)
    with pytest.raises(WeightSyncError, match=r"^engine 4 accepted the weights of version 5 .* since version 4 "):
        asyncio.run(publish_all())

"""The canary: some of the run's own prompts that the engines continue and the learner scores.

Two questions are asked about new weights. Did they arrive? An engine that runs this library's code reads back what it
loaded, and says so (`InferenceEngine.load_weights`). Does the engine compute with them? Its log-probabilities are the
learner's but for rounding: those of the samples that are trained on (`RolloutParity`), and those of the
canary, which samples for that alone, at the start, for new engines, and now and then. An engine that only promises to
have loaded its weights is asked after every transfer, and compared with what it and the learner said before
(`stale_engines.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from attrs import define, field
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.config import SamplingParams
from skyrl.errors import EngineFailed, NonFiniteError, ProcessError, WeightSyncError
from skyrl.inference.engine import Completion, GenerationRequest, InferenceEngine, SampleKey
from skyrl.models.routers import joined_choices
from skyrl.processes.gather_or_cancel import gather_or_cancel
from skyrl.weight_sync.stale_engines import ScoredSample, Scores, Tokens, Verdict, Yardstick, mean
from skyrl.weight_sync.transports import WeightSource

Metrics = dict[str, float]
Sampled = tuple[Tokens, Completion]
"""A prompt and an engine's continuation of it."""

ENOUGH_TOKENS = 256
"""Number of tokens from which the mean difference of a right engine hardly varies: rounding in bfloat16 has a standard
deviation of 1.3 times its mean, so the mean over 256 tokens has one of a twelfth."""

NEW_TOKENS = 32
"""Largest number of tokens of an answer: further ones say nothing new, and shorter answers mean more prompts."""

FIRST_PROMPTS = 32
"""Number of prompts that are continued together. As many follow as are likely to bring the rest of `ENOUGH_TOKENS`."""


@define(kw_only=True, eq=False)
class Canary:
    """Compares engines' log-probabilities with the learner's."""

    prompts: tuple[Tokens, ...]
    """Token ids of distinct prompts, as the run itself samples from them."""

    temperature: float
    """Sampling temperature at which the learner scores."""

    bound: float
    """Largest mean absolute difference, in nats, that is attributed to rounding."""

    new_tokens: int = NEW_TOKENS
    """Largest number of tokens sampled for each prompt."""

    _yardsticks: dict[InferenceEngine, Yardstick] = field(factory=dict, init=False)
    """Answers of each engine that only promises, from when it was last known to have the learner's weights."""

    async def compare(
        self, source: WeightSource, engines: Mapping[int, InferenceEngine], version: int, *, promised: bool = False
    ) -> Metrics:
        """Mean and largest absolute difference, in nats, over all engines, given by their numbers. `promised`: the
        engines have accepted the weights of `version`, and cannot show that they loaded them.

        Raises `WeightSyncError`, which names the engine, if the mean of one exceeds the bound, or if it still computes
        with the weights of an earlier version, and `EngineFailed` if one gives no answer, or numbers that are not
        finite where another one's are.
        """
        outcomes = await asyncio.gather(*map(self._continue, engines.values()), return_exceptions=True)
        drawn = _checked_samples(dict(zip(engines, outcomes, strict=True)))
        scores = await _scored(source, [pair for element in drawn for pair in element])
        answers = [
            [
                ScoredSample(prompt=prompt, completion=completion, learner=scores[prompt, completion.token_ids])
                for prompt, completion in sample
            ]
            for sample in drawn
        ]
        for number, item in zip(engines, answers, strict=True):
            distances = [answer.distance for answer in item]
            refuse_far(distances, f"engine {number}", version, self.bound)
        if promised:
            self._follow(engines, answers, version)
        every = torch.cat([answer.distance for entry in answers for answer in entry])
        return {"weight_sync/parity_mean": every.mean().item(), "weight_sync/parity_max": every.max().item()}

    def _follow(
        self, engines: Mapping[int, InferenceEngine], answers: Sequence[list[ScoredSample]], version: int
    ) -> None:
        """Refuse engines that stayed behind, and move the yardsticks of those that provably have not."""
        previous, self._yardsticks = self._yardsticks, {}
        for (number, engine), item in zip(engines.items(), answers, strict=True):
            new = Yardstick(version=version, answers=tuple(item))
            before = previous.get(engine)
            verdict = Verdict.FOLLOWS if before is None else before.verdict(item)
            if before is not None and verdict is Verdict.STAYS:
                raise WeightSyncError(
                    f"engine {number} accepted the weights of version {version} and does not compute with them: since "
                    f"version {before.version} the learner's log-probabilities have moved, and the engine's have not, "
                    f"over {sum(len(answer.learner) for answer in item)} tokens. Check that the server loads what it "
                    "is sent, and that a router in front of it does not lead to other servers"
                )
            self._yardsticks[engine] = new if before is None or verdict is Verdict.FOLLOWS else before

    async def _continue(self, engine: InferenceEngine) -> list[Sampled]:
        """The engine's continuations of as many prompts as it takes to have enough tokens."""
        samples: list[Sampled] = []
        start, more = 0, FIRST_PROMPTS
        while more and start < len(self.prompts):
            some = self.prompts[start : start + more]
            requests = [engine.generate(self._request(prompt, start + number)) for number, prompt in enumerate(some)]
            drawn = await gather_or_cancel(requests)
            samples += [(prompt, answer) for prompt, (answer,) in zip(some, drawn, strict=True) if answer.token_ids]
            start += len(some)
            tokens = sum(len(answer.token_ids) for _, answer in samples)
            more = math.ceil(max(ENOUGH_TOKENS - tokens, 0) / max(tokens / start, 1))
        if not samples:
            raise WeightSyncError("the engines sampled no token after any prompt of the canary: they are too long")
        return samples

    def _request(self, prompt: Tokens, number: int) -> GenerationRequest:
        """A request whose draws are the same at every version, so that what changes is the engine."""
        return GenerationRequest(
            prompt_ids=prompt,
            sampling=SamplingParams(temperature=self.temperature, max_generate_length=self.new_tokens),
            keys=(SampleKey(run_seed=0, weight_version=0, prompt_id=f"canary-{number}", sample_index=0),),
        )


def _checked_samples(outcomes: Mapping[int, list[Sampled] | BaseException]) -> list[list[Sampled]]:
    """Samples of each engine. If no engine gives finite numbers, the model is at fault and no engine."""
    failed = {number: outcome for number, outcome in outcomes.items() if isinstance(outcome, BaseException)}
    for number, error in sorted(failed.items(), key=lambda item: not isinstance(item[1], ProcessError)):
        if isinstance(error, ProcessError) or (isinstance(error, NonFiniteError) and len(failed) < len(outcomes)):
            raise EngineFailed(number, error) from error
        raise error
    return [outcome for outcome in outcomes.values() if not isinstance(outcome, BaseException)]


def refuse_far(distances: Sequence[Tensor], engine: str, version: int, bound: float) -> None:
    """Raises `WeightSyncError` if the mean of distances (N_i,) in nats is more than rounding: `bound`, and a share of
    it more where few tokens make the mean vary.
    """
    count, distance = sum(map(len, distances)), mean(distances)
    refuse_mean(distance, count, engine, version, bound)


def refuse_mean(distance: float, count: int, engine: str, version: int, bound: float) -> None:
    """Raises `WeightSyncError` if `distance`, a mean in nats over `count` tokens, is more than rounding."""
    if not distance <= bound * (1 + 2 / max(count, 1) ** 0.5):  # refuses NaN as well
        raise WeightSyncError(
            f"{engine} does not compute with the weights of version {version} that it was sent, or computes in "
            f"another precision: its log-probabilities differ from the learner's by {distance:.3g} nats on average "
            f"over {count} tokens, more than generator.inference_engine.logprob_parity_bound = {bound:g}"
        )


def canary_prompts(prompts: Iterable[Sequence[int]], *, longest: int, number: int = 128) -> tuple[Tokens, ...]:
    """The first `number` distinct prompts of at most `longest` tokens; if all are longer, the end of the first."""
    fitting, first = dict[Tokens, None](), None
    for prompt in map(tuple, prompts):
        first = prompt if first is None else first
        if len(prompt) <= longest:
            fitting[prompt] = None
        if len(fitting) == number:
            break
    assert first is not None, "a run has prompts"
    return tuple(fitting) or (first[-longest:],)


async def _scored(source: WeightSource, answers: Sequence[Sampled]) -> Scores:
    """The learner's log-probabilities of each answer.

    Equal answers are scored once: the rounding of a row depends on the rows beside it, and the number of engines must
    not change what a run reports.
    """
    distinct = {(prompt, answer.token_ids): (prompt, answer) for prompt, answer in answers}
    batch = rows(list(distinct.values()))
    scores = await source.score(batch)
    return {key: row[mask].double() for key, row, mask in zip(distinct, scores, batch.loss_mask, strict=True)}


def rows(answers: Sequence[Sampled]) -> TrainingBatch:
    """A batch with one row per prompt and its completion, as a learner scores them."""
    lengths = [len(prompt) + len(answer.token_ids) for prompt, answer in answers]
    shape = (len(answers), max(lengths))
    input_ids, mask, logprobs = (
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape, dtype=torch.bool),
        torch.zeros(shape),
    )
    for row, ((prompt, answer), length) in enumerate(zip(answers, lengths, strict=True)):
        input_ids[row, :length] = torch.tensor([*prompt, *answer.token_ids])
        mask[row, len(prompt) : length] = True
        logprobs[row, len(prompt) : length] = torch.tensor(answer.logprobs)
    return TrainingBatch(
        input_ids=input_ids,
        lengths=torch.tensor(lengths),
        loss_mask=mask,
        rollout_logprobs=logprobs,
        rewards=torch.zeros(shape),
        groups=torch.arange(len(answers)),
        routed_experts=joined_choices([answer.routed_experts for _, answer in answers], max(lengths)),
    )

"""The canary: a few fixed prompts that the engines continue and the learner scores, after every sync.

Digests prove that the right bytes arrived. The canary proves that the engine computes with them: a fused or tied module
that kept its old values, or a key-value cache computed from them, shows as log-probabilities that differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.config import SamplingParams
from skyrl.errors import WeightSyncError
from skyrl.inference.engine import Completion, GenerationRequest, InferenceEngine, SampleKey
from skyrl.models.routers import joined_choices
from skyrl.weight_sync.transports import WeightSource

Metrics = dict[str, float]
Tokens = tuple[int, ...]
Sampled = tuple[Tokens, Completion]
"""A prompt and an engine's continuation of it."""


@frozen(kw_only=True)
class Canary:
    """Compares an engine's log-probabilities with the learner's."""

    prompts: tuple[Tokens, ...]
    """Token ids. A prompt that fills a block of a prefix cache (at most 128 tokens) also detects a cache that was not
    dropped."""

    temperature: float
    """Sampling temperature at which the learner scores."""

    bound: float
    """Largest mean absolute difference, in nats, that is attributed to rounding."""

    new_tokens: int = 4
    """Number of tokens sampled and compared for each prompt: the first is drawn after prefill, the others after
    decoding."""

    async def compare(self, source: WeightSource, engines: Sequence[InferenceEngine], version: int) -> Metrics:
        """Mean and largest absolute difference, in nats, over all engines.

        Raises `WeightSyncError`, which names the engine, if the mean of an engine exceeds the bound.
        """
        answers = await asyncio.gather(*(self._continue(engine, version) for engine in engines))
        drawn = [list(zip(self.prompts, each, strict=True)) for each in answers]
        scored = await _scored(source, [pair for each in drawn for pair in each])
        differences = [_differences(each, scored) for each in drawn]
        for number, difference in enumerate(differences):
            self._refuse(difference.mean().item(), number, version)
        every = torch.cat(differences)
        return {"weight_sync/parity_mean": every.mean().item(), "weight_sync/parity_max": every.max().item()}

    def _refuse(self, mean: float, engine: int, version: int) -> None:
        if not mean <= self.bound:  # refuses NaN as well
            raise WeightSyncError(
                f"engine {engine} does not compute with the weights of version {version} that it was sent, or computes "
                f"in another precision: its log-probabilities differ from the learner's by {mean:.3g} nats on average, "
                "more than "
                f"generator.inference_engine.logprob_parity_bound = {self.bound:g}"
            )

    async def _continue(self, engine: InferenceEngine, version: int) -> list[Completion]:
        sampling = SamplingParams(temperature=self.temperature, max_generate_length=self.new_tokens)
        requests = [
            GenerationRequest(
                prompt_ids=prompt,
                sampling=sampling,
                keys=(SampleKey(run_seed=0, weight_version=version, prompt_id=f"canary-{n}", sample_index=0),),
            )
            for n, prompt in enumerate(self.prompts)
        ]
        return [answer for (answer,) in await asyncio.gather(*(engine.generate(request) for request in requests))]


def canary_prompts(prompts: Sequence[Sequence[int]], *, length: int, number: int = 2) -> tuple[Tokens, ...]:
    """The first `number` prompts, each repeated up to `length` tokens."""
    return tuple(tuple((list(prompt) * -(-length // len(prompt)))[:length]) for prompt in prompts[:number])


async def _scored(source: WeightSource, answers: Sequence[Sampled]) -> dict[tuple[Tokens, Tokens], Tensor]:
    """The learner's log-probabilities of each answer, by prompt and answer.

    Equal answers are scored once: the rounding of a row depends on the rows beside it, and the number of engines must
    not change what a run reports.
    """
    distinct = {(prompt, answer.token_ids): (prompt, answer) for prompt, answer in answers}
    batch = rows(list(distinct.values()))
    scores = await source.score(batch)
    return {key: row[mask] for key, row, mask in zip(distinct, scores, batch.loss_mask, strict=True)}


def _differences(answers: Sequence[Sampled], scored: dict[tuple[Tokens, Tokens], Tensor]) -> Tensor:
    """(N,) float64: absolute difference, in nats, at each token of one engine's answers."""
    pairs = [(scored[prompt, answer.token_ids], torch.tensor(answer.logprobs)) for prompt, answer in answers]
    return torch.cat([(learner - engine).abs().double() for learner, engine in pairs])


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

"""The canary: some of the run's own prompts that the engines continue and the learner scores.

Two questions are asked about new weights. Did they arrive? An engine that runs this library's code reads back what it
loaded, and says so (`InferenceEngine.load_weights`). Does the engine compute with them? Its log-probabilities are the
learner's but for rounding: those of the samples that are trained on (`RolloutParity`), and those of the
canary, which samples for that alone, at the start, for new engines, and now and then. An engine that only promises to
have loaded its weights is asked after every transfer, and compared with what it and the learner said before
(`Yardstick`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

import torch
from attrs import define, field, frozen
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.config import SamplingParams
from skyrl.errors import EngineFailed, NonFiniteError, ProcessError, WeightSyncError
from skyrl.inference.engine import Completion, GenerationRequest, InferenceEngine, SampleKey
from skyrl.models.routers import joined_choices
from skyrl.processes.gather_or_cancel import gather_or_cancel
from skyrl.weight_sync.transports import WeightSource

Metrics = dict[str, float]
Tokens = tuple[int, ...]

Scores = Mapping[tuple[Tokens, Tokens], Tensor]
"""A learner's log-probabilities of answers, (N,) float64 each, by prompt and answer."""

Sampled = tuple[Tokens, Completion]
"""A prompt and an engine's continuation of it."""

CERTAINTY = 5.0
"""Number of standard errors beyond which a mean is not chance. The rows of a comparison are its independent draws, a
few dozen: Student's t with 31 degrees of freedom exceeds 5 with probability 1e-5."""

ENOUGH_TOKENS = 256
"""Number of tokens from which the mean difference of a right engine hardly varies: rounding in bfloat16 has a standard
deviation of 1.3 times its mean, so the mean over 256 tokens has one of a twelfth."""

NEW_TOKENS = 32
"""Largest number of tokens of an answer: further ones say nothing new, and shorter answers mean more prompts."""

FIRST_PROMPTS = 32
"""Number of prompts that are continued together. As many follow as are likely to bring the rest of `ENOUGH_TOKENS`."""


class Verdict(Enum):
    """Outcome of a comparison with a yardstick."""

    FOLLOWS = "the engine has moved with the learner"
    STAYS = "the learner has moved, and the engine has not"
    UNKNOWN = "too little has changed to tell"


@frozen(kw_only=True)
class ScoredSample:
    """An engine's continuation of one prompt, with the learner's scores."""

    prompt: Tokens
    completion: Completion

    learner: Tensor = field(eq=False)
    """(N,) float64: the learner's log-probabilities of the completion's tokens, in nats."""

    @property
    def engine(self) -> Tensor:
        """(N,) float64: the engine's."""
        return torch.tensor(self.completion.logprobs, dtype=torch.float64)

    @property
    def distance(self) -> Tensor:
        """(N,) float64: absolute difference at each token, in nats."""
        return (self.engine - self.learner).float().abs().double()


@frozen(kw_only=True)
class Yardstick:
    """An engine's answers at the last version at which it was known to compute with the learner's weights.

    An engine that runs none of this library's code only promises that it has loaded what it was sent. Each version, it
    continues the same prompts from the same seeds, and the learner scores what it drew. As far as an answer repeats
    that of an earlier version, the yardstick, each token says how far both have moved since then:

        e, l               log-probability of the token, by the engine and by the learner
        d = |e - l|        their distance: rounding, or rounding and lost updates
        |de - dl| > |de|   the engine looks as if it had stayed: its own move is nearer to 0 than to the learner's

    Rounding alone fulfills the second condition for up to all tokens, as long as updates move the learner by less than
    it rounds: of right engines in bfloat16 after one update with a learning rate of 1e-6, for three quarters of them.
    But it does not make distances grow. An engine stays only if both hold: distances have grown, and its moves are
    nearer to none than to the learner's. Only signs are counted, because rounding is a hundred times larger at some
    tokens than at most.

    Without a verdict the yardstick stays where it is, and the updates since then add up: lost ones are found together,
    at the first version at which they differ from rounding. Until then they have changed samples by less than rounding
    does.
    """

    version: int
    answers: tuple[ScoredSample, ...]

    def verdict(self, now: Sequence[ScoredSample]) -> Verdict:
        """Compare with the answers to the same prompts at a later version."""
        before = {answer.prompt: answer for answer in self.answers}
        rows = [_signs(before[answer.prompt], answer) for answer in now if answer.prompt in before]
        grown, grown_error = _mean_of_rows([grown for grown, _ in rows])
        stayed, stayed_error = _mean_of_rows([stayed for _, stayed in rows])
        if stayed < -CERTAINTY * stayed_error:
            return Verdict.FOLLOWS
        is_behind = grown > CERTAINTY * grown_error and stayed > CERTAINTY * stayed_error
        return Verdict.STAYS if is_behind else Verdict.UNKNOWN


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
            refuse_mean(mean(distances), sum(map(len, distances)), f"engine {number}", version, self.bound)
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
            requests = [engine.generate(self.request(prompt, start + number)) for number, prompt in enumerate(some)]
            drawn = await gather_or_cancel(requests)
            samples += [(prompt, answer) for prompt, (answer,) in zip(some, drawn, strict=True) if answer.token_ids]
            start += len(some)
            tokens = sum(len(answer.token_ids) for _, answer in samples)
            more = math.ceil(max(ENOUGH_TOKENS - tokens, 0) / max(tokens / start, 1))
        if not samples:
            raise WeightSyncError("the engines sampled no token after any prompt of the canary: they are too long")
        return samples

    def request(self, prompt: Tokens, number: int) -> GenerationRequest:
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


def refuse_mean(distance: float, count: int, engine: str, version: int, bound: float) -> None:
    """Raises `WeightSyncError` if `distance`, a mean in nats over `count` tokens, is more than rounding: `bound`, and a
    share of it more where few tokens make the mean vary.
    """
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


def mean(rows: Sequence[Tensor]) -> float:
    """Mean over all tokens of rows (N_i,); 0 if there are none."""
    combined = torch.cat(list(rows)) if rows else torch.zeros(0)
    return combined.mean().item() if combined.numel() else 0.0


def _signs(before: ScoredSample, now: ScoredSample) -> tuple[Tensor, Tensor]:
    """Two rows (P,) of 1, 0 or -1 for the P tokens up to the first that differs: whether the distance of engine and
    learner has grown, and whether the engine's move is nearer to none than to the learner's.
    """
    pairs = 0
    for old, new in zip(before.completion.token_ids, now.completion.token_ids, strict=False):
        if old != new:
            break
        pairs += 1
    engine, learner = now.engine[:pairs] - before.engine[:pairs], now.learner[:pairs] - before.learner[:pairs]
    grown = torch.sign(now.distance[:pairs] - before.distance[:pairs])
    return grown, torch.sign((engine - learner).abs() - engine.abs())


def _mean_of_rows(rows: Sequence[Tensor]) -> tuple[float, float]:
    """Mean over all tokens of rows (N_i,) of numbers from -1 to 1, and its standard error, where the tokens of one row
    may depend on each other. It is at least one row in all of them: equal rows are no proof of certainty.
    """
    some = [row for row in rows if row.numel()]
    if not some:
        return 0.0, math.inf
    sizes = torch.tensor([float(row.numel()) for row in some], dtype=torch.float64)
    sums, count = torch.stack([row.sum() for row in some]), sizes.sum().item()
    average = sums.sum().item() / count
    spread = (sums - average * sizes).square().sum().item()
    return average, max(math.sqrt(spread) / count, 1 / len(some))

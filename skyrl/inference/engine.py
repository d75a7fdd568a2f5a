"""The protocol of inference engines: token ids in, sampled token ids with their log-probabilities out.

An engine knows tokens, sampling settings and weights. It knows nothing of prompts as text, tasks or rewards.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Literal, NoReturn, Protocol

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from skyrl.config import SamplingParams
from skyrl.errors import RunError, UserError
from skyrl.trajectory import RoutedExperts, StopReason

if TYPE_CHECKING:
    from skyrl.weight_receiver.incoming_weights import Adapter, IncomingWeights


@frozen(kw_only=True)
class SampleKey:
    """Identifies one sample of one run, so that it has its own random numbers.

    The seed of a sample is a hash of these fields, never a position in a stream that other samples share: the same
    sample draws the same numbers in any batch, on any number of engines, and after a resume.
    """

    run_seed: int
    weight_version: int
    """Version of the weights when the sample was scheduled."""

    prompt_id: str
    sample_index: int
    turn: int = 0
    attempt: int = 0
    purpose: str = "train"
    """`train`, `eval` or `baseline`: samples for one purpose must not reuse the draws of another."""

    occurrence: int = 0
    """Number of earlier occurrences of the prompt in the same batch: groups of a repeated prompt are different samples.
    """


@frozen(kw_only=True)
class NewTokens:
    """Tokens that an engine has drawn for one sample of a request that is still being answered."""

    index: int
    """Index of the sample in `GenerationRequest.keys`."""

    start: int
    """Number of tokens of the sample before these."""

    token_ids: tuple[int, ...]


MOST_TOP_LOGPROBS = 20
"""Largest number of likeliest tokens that an engine reports at one place."""


@frozen(kw_only=True, eq=False)
class TopLogprobs:
    """The k likeliest tokens at each of some places."""

    token_ids: NDArray[np.int32]
    """(places, k), the likeliest first."""

    logprobs: NDArray[np.float32]
    """(places, k), in nats."""

    @classmethod
    def of(cls, places: Sequence[tuple[Sequence[int], Sequence[float]]], width: int) -> TopLogprobs:
        """From the `width` likeliest tokens of each place, and their log-probabilities."""
        return cls(
            token_ids=np.array([ids for ids, _ in places], dtype=np.int32).reshape(len(places), width),
            logprobs=np.array([scores for _, scores in places], dtype=np.float32).reshape(len(places), width),
        )


@frozen(kw_only=True)
class PromptScores:
    """The probabilities that the model gives a prompt of P tokens: P - 1 values, for the tokens after the first.

    Log-probabilities are natural, of the softmax of the logits: no sampling setting changes them.
    """

    logprobs: tuple[float, ...]
    likeliest: tuple[int, ...]
    """The likeliest token at each place."""

    likeliest_logprobs: tuple[float, ...]
    top: TopLogprobs | None = field(default=None, eq=False)
    """The likeliest tokens at each place, if the request asks for several."""


@frozen(kw_only=True)
class GenerationRequest:
    """One prompt and the samples requested from it. The prompt is prefilled once for all of them."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    keys: tuple[SampleKey, ...]
    """One key for each requested sample; their number is n."""

    adapter: str | None = None
    """Name of the adapter that draws the samples; None for the policy's own weights. Only engines that were started
    with adapters accept a name."""

    on_tokens: Callable[[NewTokens], None] | None = field(default=None, eq=False, repr=False)
    """Called with tokens as they are drawn, in order for each sample, from any thread; it must return at once. If
    samples are drawn again, by another engine or because an answer was lost, `start` begins at 0 again."""

    end_ids: tuple[int, ...] | None = None
    """Tokens that end a sample in place of the model's end tokens, beside `SamplingParams.stop_token_ids`; None: the
    model's."""

    scores_prompt: bool = False
    """Whether completions hold the `prompt_scores`. Only engines with `BACKENDS[...].scores_prompts` compute them."""

    prompt_top_logprobs: int = 0
    """Number of likeliest tokens in `PromptScores.top`; 0: none are reported. Needs `scores_prompt`."""

    top_logprobs: int = 0
    """Number of likeliest tokens in `Completion.top_logprobs`; 0: none are reported."""

    draw_elsewhere: Callable[[int], Awaitable[Completion]] | None = field(default=None, eq=False, repr=False)
    """Has another engine draw the sample of this index of `keys`, for an engine whose answer may be lost. Raises
    `RunError`. None where no other engine serves."""


@frozen(kw_only=True)
class Completion:
    """One sample. `token_ids`, `weight_versions` and, if requested, `logprobs` have the same length."""

    token_ids: tuple[int, ...]
    """Sampled tokens; the last one is the end-of-sequence token if that ended the sample."""

    text: str
    """`token_ids` decoded without special tokens; ends with the stop string if that ended the sample."""

    logprobs: tuple[float, ...]
    """Natural-log probability of each token under the distribution from which it was drawn, before top-p, top-k and
    min-p cut it, and rows of the vocabulary that stand for no token. This is the tempered softmax with which the
    learner scores, unless penalties or `min_new_tokens` change the logits; then it is the softmax of the changed ones,
    without the tokens that cannot be drawn. Empty if `SamplingParams.logprobs` is None."""

    weight_versions: tuple[int, ...]
    stop_reason: StopReason
    routed_experts: RoutedExperts | None = None
    """Experts of the prompt's tokens and of all drawn tokens but the last, which the engine did not compute. None if
    the engine does not return them (`enable_return_routed_experts`), and for an answer without tokens."""

    prompt_scores: PromptScores | None = None
    """Probabilities of the prompt, if the request asks for them."""

    top_logprobs: TopLogprobs | None = field(default=None, eq=False)
    """The likeliest tokens in place of each drawn one, under the distribution of `logprobs`, if the request asks for
    them."""

    engine: int = field(default=0, eq=False, repr=False)
    """Number of the engine, among those of a run, that sampled it; draws do not depend on it."""


@frozen(kw_only=True)
class EngineLoad:
    """Load that an engine reports, including the requests of all its other users."""

    waiting: int
    """Number of requests that the engine has accepted and is not computing."""

    cache_use: float | None = None
    """Share of the key-value cache that is in use, 0 to 1; None if the engine has no cache of fixed size."""


def temperature_of(sampling: SamplingParams) -> float:
    """The sampling temperature, unitless; 0 takes the likeliest token."""
    return 0.0 if sampling.greedy else sampling.temperature


def asked_logprobs(sampling: SamplingParams, logprobs: tuple[float, ...]) -> tuple[float, ...]:
    """The log-probabilities of a completion: the given ones, or none if the request does not ask for them."""
    return () if sampling.logprobs is None else logprobs


def longest_completion(sampling: SamplingParams, prompt_length: int, max_model_len: int) -> int:
    """The longest possible completion in tokens; 0 if the prompt alone reaches `max_model_len` or `max_tokens`."""
    longest = max_model_len if sampling.max_tokens is None else min(max_model_len, sampling.max_tokens)
    return max(0, min(sampling.max_generate_length, longest - prompt_length))


def completion_limit(request: GenerationRequest, max_model_len: int, note: str = "") -> int:
    """The longest possible completion of a request in tokens; 0 if the prompt alone reaches `max_model_len` or
    `max_tokens`. Raises `RunError` for an empty prompt, and for one that is too long; `note` ends the latter's message.
    """
    name = f"prompt {request.keys[0].prompt_id!r}" if request.keys else "a prompt"
    length = len(request.prompt_ids)
    if length == 0:
        raise RunError(f"{name} is empty: there is nothing to continue")
    if length > max_model_len:
        raise RunError(f"{name} has {length} tokens, more than max_model_len = {max_model_len}{note}")
    return longest_completion(request.sampling, length, max_model_len)


def empty_completions(request: GenerationRequest) -> tuple[Completion, ...]:
    """The answers to a prompt that leaves no room for a token."""
    nothing = Completion(token_ids=(), text="", logprobs=(), weight_versions=(), stop_reason="length")
    return (nothing,) * len(request.keys)


def refuse_adapter(name: str) -> NoReturn:
    """Raises `UserError` for the name of an adapter, which an engine without adapters does not have."""
    raise UserError(f"this engine has no adapter called {name}: it was started without adapters")


InFlight = Literal["finish", "recompute", "keep"]
"""Policy for samples in flight when an engine pauses. finish: they are completed first. recompute: they stop between
two tokens and continue after `resume`, from keys and values that are recomputed with the weights of that time. keep:
they continue from their existing keys and values, whatever weights computed those."""


class InferenceEngine(Protocol):
    """The contract that every engine keeps (and every fake engine, under the same tests)."""

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        """One completion per key, in order of `request.keys`. Calls may run concurrently and are batched together."""

    async def pause(self, in_flight: InFlight = "finish") -> None:
        """Take no new work and return when nothing is running; see `InFlight` for running samples."""

    async def resume(self) -> None:
        """Take work again."""

    async def load_weights(self, incoming: IncomingWeights, version: int) -> bool:
        """Replace all weights, drop every cache computed from the old ones (except what a pause keeps) and adopt
        `version`. Returns True if this library's own code has loaded the weights, after it compared those that
        travelled with their digests, and False if the engine only promises to have loaded them.

        Called while paused. Names are those of the Hugging Face state dict without tied duplicates. Raises
        `WeightSyncError` if a name is missing or unknown, a shape differs, or bytes were changed in transit. The engine
        then keeps the old weights or, if it had started to replace them, samples nothing from then on: requests raise
        `WeightSyncError` until a complete set has been loaded (an external server is not given another one). Raises
        `ProcessError` if the engine is dead.
        """

    async def add_adapter(self, name: str, adapter: Adapter) -> None:
        """Make an adapter one that requests may name, beside others and the policy's own weights, while samples are
        drawn. A bounded number of adapters is in memory, the others in files.

        Raises `UserError` if the name is taken or the engine takes no adapters, `WeightSyncError` if the adapter does
        not fit.
        """

    async def remove_adapter(self, name: str) -> None:
        """Forget a published adapter: later requests that name it are refused. Returns when earlier ones are answered.
        Raises `UserError` for an unknown name.
        """

    async def current_load(self) -> EngineLoad | None:
        """Current load of the engine; None if it does not report its load."""

    async def sleep(self) -> bool:
        """Free the device memory that can be freed. Called while paused. Returns whether the weights were discarded."""

    async def wake(self) -> None:
        """Allocate the memory again. Discarded weights are restored by the next `load_weights`."""

    async def close(self) -> None:
        """Finish running requests and refuse later ones."""

    @property
    def weight_version(self) -> int:
        """Version of the weights that the engine samples from."""

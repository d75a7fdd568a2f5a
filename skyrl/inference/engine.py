"""The protocol of inference engines: token ids in, sampled token ids with their log-probabilities out.

An engine knows tokens, sampling settings and weights. It knows nothing of prompts as text, tasks or rewards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol

from attrs import field, frozen

from skyrl.config import SamplingParams
from skyrl.errors import UserError
from skyrl.trajectory import RoutedExperts, StopReason

if TYPE_CHECKING:
    from skyrl.inference.incoming_weights import IncomingWeights


@frozen(kw_only=True)
class SampleKey:
    """Names one sample of one run, so that its random numbers are its own.

    The seed of a sample is a hash of these, never a position in a stream that other samples share: the same sample
    draws the same numbers in any batch, on any number of engines, and after a resume.
    """

    run_seed: int
    weight_version: int
    """Version of the weights when the sample was scheduled."""

    prompt_id: str
    sample_index: int
    turn: int = 0
    attempt: int = 0
    purpose: str = "train"
    """`train` or `eval`: an evaluation must not reuse the draws of training."""

    occurrence: int = 0
    """How often its prompt came before in the same batch: the groups of a repeated prompt are different samples."""


@frozen(kw_only=True)
class NewTokens:
    """Tokens that an engine has drawn for one sample of a request that is still being answered."""

    index: int
    """Place of the sample in `GenerationRequest.keys`."""

    start: int
    """Number of tokens that the sample had before these."""

    token_ids: tuple[int, ...]


@frozen(kw_only=True)
class GenerationRequest:
    """One prompt and the samples wanted of it: the prompt is prefilled once for all of them."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    keys: tuple[SampleKey, ...]
    """One for each sample wanted; their number is n."""

    adapter: str | None = None
    """Name of the adapter that the samples are drawn by; None: the policy's own weights. Only engines that were started
    with adapters know any."""

    on_tokens: Callable[[NewTokens], None] | None = field(default=None, eq=False, repr=False)
    """Called with tokens as they are drawn, in order for each sample, from any thread; it returns at once. When samples
    are drawn again, by another engine or because an answer did not get through, `start` begins again at 0."""


@frozen(kw_only=True)
class Completion:
    """One sample. `token_ids`, `weight_versions` and, where they are asked for, `logprobs` have the same length."""

    token_ids: tuple[int, ...]
    """Sampled tokens; the last one is the end-of-sequence token when that is what ended it."""

    text: str
    """`token_ids` decoded without special tokens; ends with the stop string if that is what ended it."""

    logprobs: tuple[float, ...]
    """Natural-log probability of each token under the distribution it was drawn from, before top-p, top-k and min-p cut
    it. It is the tempered softmax that the learner scores with, unless penalties or `min_new_tokens` change the logits;
    then it is the softmax of the changed ones, without the tokens that cannot be drawn. Empty where
    `SamplingParams.logprobs` is None."""

    weight_versions: tuple[int, ...]
    stop_reason: StopReason
    routed_experts: RoutedExperts | None = None
    """Experts of the prompt's tokens and of all that were drawn but the last, which the engine did not compute. None
    where it does not return them (`enable_return_routed_experts`), and for an answer without a token."""


@frozen(kw_only=True)
class EngineLoad:
    """How busy an engine says that it is, with the requests of everybody who uses it."""

    waiting: int
    """Requests that it has taken and does not compute."""

    cache_use: float | None = None
    """Share of its cache of keys and values that is in use, 0 to 1; None where it has none of fixed size."""


def temperature_of(sampling: SamplingParams) -> float:
    """The sampling temperature, unitless; 0 takes the likeliest token."""
    return 0.0 if sampling.greedy else sampling.temperature


def asked_logprobs(sampling: SamplingParams, logprobs: tuple[float, ...]) -> tuple[float, ...]:
    """The log-probabilities that a completion carries: these, or none where none are asked for."""
    return () if sampling.logprobs is None else logprobs


def longest_completion(sampling: SamplingParams, prompt_length: int, max_model_len: int) -> int:
    """The longest possible completion in tokens; 0 where the prompt alone fills the model, or all that is allowed of
    it.
    """
    longest = max_model_len if sampling.max_tokens is None else min(max_model_len, sampling.max_tokens)
    return max(0, min(sampling.max_generate_length, longest - prompt_length))


def refuse_adapter(request: GenerationRequest) -> None:
    """Raises `UserError` for a request that names an adapter, which an engine without adapters does not have."""
    if request.adapter is not None:
        raise UserError(f"this engine has no adapter called {request.adapter}: it was started without adapters")


InFlight = Literal["finish", "recompute", "keep"]
"""Policy for samples in flight when an engine pauses. finish: they are completed first. recompute: they stop between
two tokens and continue after `resume`, from keys and values computed anew by the weights of then. keep: they continue
from the keys and values that they have, whatever weights computed those."""


class InferenceEngine(Protocol):
    """The contract that every engine keeps (and every fake engine, under the same tests)."""

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        """One completion per key, in order of `request.keys`. Calls may run concurrently and are batched together."""

    async def pause(self, in_flight: InFlight = "finish") -> None:
        """Take no new work and return when nothing is running; see `InFlight` for what was."""

    async def resume(self) -> None:
        """Take work again."""

    async def load_weights(self, incoming: IncomingWeights, version: int) -> None:
        """Replace all weights, drop every cache computed from the old ones (except what a pause keeps) and adopt
        `version`.

        Called while paused. Names are those of the Hugging Face state dict without tied duplicates. Raises
        `WeightSyncError` when a name is missing, unknown, or has another shape, or when bytes were changed on the way.
        The engine then keeps the old weights, or, if it had started to replace them, refuses all work from then on.
        """

    async def load(self) -> EngineLoad | None:
        """How busy it is now; None where it does not tell."""

    async def sleep(self) -> bool:
        """Give back what memory of the device can be had back. Called while paused. Are the weights gone with it?"""

    async def wake(self) -> None:
        """Take the memory again. Weights that were given up come with the next `load_weights`."""

    async def close(self) -> None:
        """Finish what is running and refuse what comes later."""

    @property
    def weight_version(self) -> int:
        """Version of the weights it samples from."""

"""The policy as the endpoint serves it: conversations and prompts in, sampled answers out.

    Request --admission--> prompt ids --engines--> Answers

Templates and tokenizers run on a separate thread, engines on the event loop of the run. The number of answers in flight
is bounded: a request beyond the bound is refused with 429 and does not wait.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any, TypeVar, cast

from attrs import evolve, field, frozen

from skyrl.chats.continuation import Continuation
from skyrl.chats.rendering import Template
from skyrl.chats.text import continued_tokens
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import SamplingParams
from skyrl.endpoint.conversations import History, Message, Turn
from skyrl.endpoint.fields import Fields
from skyrl.endpoint.request_sampling import RequestSampling, read_sampling
from skyrl.endpoint.trajectories import PlayedTrajectory, StoredResponses
from skyrl.errors import DataError, RequestError, RunError, TemplateTimeoutError
from skyrl.inference.engine import Completion, GenerationRequest, NewTokens, SampleKey, longest_completion

T = TypeVar("T")

Generate = Callable[[GenerationRequest], Awaitable[tuple[Completion, ...]]]
"""Draws the samples of a request; awaited on the endpoint's event loop."""

MOST_ANSWERS = 128
"""Largest `n` of one request."""

CHARACTERS_PER_TOKEN = 8
"""Characters per token of a prompt that are not looked at twice: more than text in any language has."""


@frozen(kw_only=True)
class ServedPolicy:
    """Names and limits of the policy."""

    names: tuple[str, ...]
    """Model names that requests may carry; the first is used in answers."""

    sampling: SamplingParams
    """Sampling settings for fields that a request does not set."""

    max_model_len: int
    """Largest number of tokens of prompt and answer together."""

    most_samples: int
    """Largest number of answers that are sampled or wait for an engine at the same time, not counting those of
    trajectories."""

    template_arguments: Mapping[str, Any] = field(factory=dict)

    scores_prompts: bool = False
    """Whether the engines report the probabilities of a prompt and the likeliest tokens."""

    adapters: tuple[str, ...] = ()
    """Additional model names: adapters of the same base model, which the engines have loaded."""


@frozen(kw_only=True)
class PromptTokens:
    """Tokens that answers are sampled from, and the request they come from."""

    ids: tuple[int, ...]
    before: Turn | None = None
    """The recorded turn that it continues."""

    history: History | None = None
    text: str | None = None


class Policy:
    """The policy as the endpoint's routes use it, on the endpoint's event loop: for clients, or `of` a trajectory."""

    trajectory: PlayedTrajectory | None = None
    """The trajectory whose requests are answered; None: requests of clients."""

    def __init__(self, served: ServedPolicy, tokenizer: ChatTokenizer, generate: Generate) -> None:
        self.served = served
        own = deepcopy(tokenizer)  # a fast tokenizer must not serve two threads
        self._tokenizer = cast(ChatTokenizer, BoundedTokenizer(own, served.max_model_len))
        self._continuation = Continuation(self._tokenizer, served.template_arguments)
        self._generate = generate
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="endpoint-tokenizer")
        self._in_flight = 0
        self._stored = StoredResponses()
        self.of_clients = self
        """The same policy for requests of clients."""

    def of(self, trajectory: PlayedTrajectory | None) -> Policy:
        """The policy for requests of a trajectory, with the same tokenizer and engines."""
        if trajectory is None:
            return self.of_clients
        policy = copy(self)  # whose answers in flight the trajectory counts
        policy.trajectory = trajectory
        return policy

    def close(self) -> None:
        """Stop the tokenizer's thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def refuse_other_models(self, name: str | None) -> str:
        """The model name for the answer. Raises `RequestError` for a model that is not served here."""
        if name is not None and name not in (*self.served.names, *self.served.adapters):
            known = " or ".join((*self.served.names, *self.served.adapters))
            raise RequestError(
                f"there is no model {name[:200]!r} here: {known}", status=404, param="model", code="model_not_found"
            )
        return name or self.served.names[0]

    def settings(
        self, body: Fields, *, lengths: tuple[str, ...], stops: str = "stop", shortest: int = 1
    ) -> RequestSampling:
        """Model and sampling settings of a request; `lengths`, `stops` and `shortest` as in `read_sampling`. Raises
        `RequestError`.
        """
        model, fixed = self.refuse_other_models(body.text("model")), self.trajectory is not None
        return read_sampling(body, self.sampling, model, fixed=fixed, lengths=lengths, stops=stops, shortest=shortest)

    @property
    def sampling(self) -> SamplingParams:
        """Sampling settings for fields that a request does not set."""
        return self.served.sampling if self.trajectory is None else self.trajectory.sampling

    def ends_by(self, ids: Sequence[int]) -> bool:
        """Whether the end-of-sequence token is one of `ids`."""
        return self._tokenizer.eos_token_id in ids

    def stop_text(self, completion: Completion, sampling: SamplingParams) -> str | None:
        """The stop text that ended an answer. None if a token or the length did, even if the text ends like a stop
        text: with `min_tokens`, an answer may hold one. A stop text that is spelled like the last token counts.
        """
        if completion.stop_reason != "stop":
            return None
        tokenizer = self._tokenizer
        spelled = dict.fromkeys(sampling.stop_token_ids or (), "")
        spelled |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        last = completion.token_ids[-1:]
        stops = sampling.stop or ()
        if last and last[0] in spelled:  # which engines leave out of the text, unless it completes a stop text
            name = spelled[last[0]]
            stops = tuple(stop for stop in stops if name and stop.endswith(name))
        return next((stop for stop in stops if completion.text.endswith(stop)), None)

    @contextmanager
    def admitted(self, samples: int) -> Iterator[None]:
        """Count the answers of a request while they are sampled. Raises `RequestError` beyond the bound: with 429 if
        the request may be sent again later, with 400 if it alone is beyond it.
        """
        trajectory = self.trajectory
        if trajectory is not None:
            trajectory.begin(samples)
            trajectory.sampling_now += samples
        elif samples > self.served.most_samples:
            raise RequestError(f"{samples} answers at once: at most {self.served.most_samples} are sampled", param="n")
        elif self._in_flight + samples > self.served.most_samples:
            raise RequestError(
                f"{self._in_flight} answers are being sampled, of at most {self.served.most_samples}: try again later",
                status=429,
                code="rate_limit_exceeded",
            )
        else:
            self._in_flight += samples
        try:
            yield
        finally:
            if trajectory is not None:
                trajectory.sampling_now -= samples
            else:
                self._in_flight -= samples

    async def conversation(self, history: History) -> PromptTokens:
        """The prompt of a conversation: the tokens of the recorded turn that it continues, then those of the new
        messages.
        """
        continued = self.trajectory.conversations.continued(history) if self.trajectory else None
        with _cut_off(self.trajectory):
            if continued is None:
                return PromptTokens(ids=await self._run_in_thread(self._rendered, history), history=history)
            turn, new_messages = continued
            new = await self._run_in_thread(self._continuing, turn, new_messages, history)
        return PromptTokens(ids=(*turn.token_ids, *new), before=turn, history=history)

    async def text(self, prompt: str) -> PromptTokens:
        """The prompt of a text, after the recorded turn that it continues, if any."""
        turn = self.trajectory.conversations.continued_text(prompt) if self.trajectory else None
        earlier = "" if turn is None else turn.text or ""
        with _cut_off(self.trajectory):
            new = await self._run_in_thread(continued_tokens, self._tokenizer, earlier, prompt[len(earlier) :])
        return PromptTokens(ids=(*(turn.token_ids if turn else ()), *new), before=turn, text=prompt)

    async def tokens(self, ids: tuple[int, ...]) -> PromptTokens:
        """The prompt of token ids. Raises `RequestError` for an id that the model does not have."""
        if any(token >= len(self._tokenizer) for token in ids):
            raise RequestError(f"the prompt holds a token id above {len(self._tokenizer) - 1}", param="prompt")
        before = self.trajectory.conversations.continued_ids(ids) if self.trajectory else None
        return PromptTokens(ids=ids, before=before)

    async def sample(
        self,
        prompt: PromptTokens,
        settings: RequestSampling,
        count: int,
        on_tokens: Callable[[NewTokens], None] | None = None,
        *,
        scores_prompt: bool = False,
        prompt_top_logprobs: int = 0,
    ) -> tuple[Completion, ...]:
        """Sample `count` answers to a prompt; `on_tokens` receives their tokens as they are sampled. With
        `scores_prompt`, they hold the probabilities of the prompt, and of so many likeliest tokens at each of its
        places. Raises `RequestError` for a prompt that is empty or fills the model's context.
        """
        with _cut_off(self.trajectory):
            sampling = self._fitting(prompt.ids, settings)
        if self.trajectory is None:
            # The same seed draws the same answers to the same prompt from the same weights.
            run_seed = secrets.randbits(62) if settings.seed is None else settings.seed
            key = SampleKey(run_seed=run_seed, weight_version=0, prompt_id="endpoint", sample_index=0, purpose="serve")
            keys = tuple(evolve(key, sample_index=number) for number in range(count))
        else:
            self.trajectory.overruled.update(settings.overruled)
            keys = self.trajectory.keys(prompt.ids, count)
        adapter = settings.model if settings.model in self.served.adapters else None
        try:
            return await self._generate(
                GenerationRequest(
                    prompt_ids=prompt.ids,
                    sampling=sampling,
                    keys=keys,
                    on_tokens=on_tokens,
                    adapter=adapter,
                    scores_prompt=scores_prompt,
                    prompt_top_logprobs=prompt_top_logprobs,
                    top_logprobs=settings.top_logprobs,
                )
            )
        except RunError as error:
            raise RequestError(f"the engine gave no answer: {error}", status=503, code="engine_error") from error

    def record(self, prompt: PromptTokens, completion: Completion, reply: Message | None = None) -> None:
        """Record an answer as a turn of the trajectory, if there is one."""
        if self.trajectory is not None:
            text = None if prompt.text is None else prompt.text + completion.text
            self.trajectory.conversations.record(
                prompt.ids, completion, prompt.before, history=prompt.history, reply=reply, text=text
            )

    @property
    def stored(self) -> StoredResponses:
        """The responses that a request may continue: those of its trajectory, or those of all clients."""
        return self._stored if self.trajectory is None else self.trajectory.stored

    async def decoded(self, ids: Sequence[int]) -> list[str]:
        """The text of each token, decoded on its own; special tokens are included."""
        return await self.run_with_tokenizer(
            lambda tokenizer: [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
        )

    async def run_with_tokenizer(self, work: Callable[..., T], *args: object) -> T:
        """The result of `work(tokenizer, *args)`, on the tokenizer's thread."""
        return await self._run_in_thread(work, self._tokenizer, *args)

    def _rendered(self, history: History) -> tuple[int, ...]:
        """Token ids of a conversation that continues no recorded turn."""
        template = self._template(history)
        messages = [*history.messages]
        ids = template.history((), messages)
        if history.tools and ids == evolve(template, tools=()).history((), messages):
            raise RequestError("the model's chat template ignores tools", param="tools", code="unsupported_value")
        return ids

    def _continuing(self, turn: Turn, messages: Sequence[Message], history: History) -> tuple[int, ...]:
        """Token ids of the messages after a turn."""
        template = self._template(history)
        stopped = turn.completion.stop_reason == "stop"
        return self._continuation.tokens_after(turn.completion.token_ids, messages, template.tools, stopped=stopped)

    def _template(self, history: History) -> Template:
        arguments = {**self.served.template_arguments, **history.arguments}
        template = Template(tokenizer=self._tokenizer, arguments=arguments)
        return evolve(template, tools=[template.spelled.marked(tool) for tool in history.tools])

    def _fitting(self, ids: tuple[int, ...], settings: RequestSampling) -> SamplingParams:
        """Sampling settings with the longest answer limited to the room after the prompt. Raises `RequestError` if the
        prompt leaves no room, or less than `min_tokens`.
        """
        if not ids:
            raise RequestError("the prompt is empty")
        sampling, most = settings.sampling, self.served.max_model_len
        room = longest_completion(sampling, len(ids), most)
        lengths = (
            f"the prompt has {len(ids)} tokens, and prompt and answer together may have "
            f"{min(most, sampling.max_tokens or most)}"
        )
        if room == 0:
            raise RequestError(lengths, code="context_length_exceeded")
        if settings.min_tokens > room:
            limit = f"max_tokens = {room}" if room == sampling.max_generate_length else lengths
            raise RequestError(
                f"min_tokens = {settings.min_tokens}, and the answer has room for {room}: {limit}",
                param="min_tokens",
                code="context_length_exceeded" if limit == lengths else None,
            )
        return evolve(sampling, max_generate_length=room)

    async def _run_in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Run `work` on the tokenizer's thread. Raises `RequestError` for text that template or tokenizer refuse."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
        except (DataError, TemplateTimeoutError) as error:
            raise RequestError(str(error)) from error


class BoundedTokenizer:
    """A tokenizer that refuses a long text by its beginning, so that megabytes are not tokenized to be refused then.
    Everything but `encode` is the tokenizer's own.
    """

    def __init__(self, tokenizer: ChatTokenizer, most: int) -> None:
        self._tokenizer, self._most = tokenizer, most

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str, /, *, add_special_tokens: bool = True, **options: object) -> list[int]:
        """Token ids of a text. Raises `RequestError` for one whose beginning alone has more tokens than fit.

        Beginnings of growing length are tokenized, so that the work is bounded by what fits and not by the text. As a
        text goes on, the last word of its beginning may be tokenized differently; half as many tokens again as fit
        are therefore allowed here, and the exact number is the caller's to check.
        """
        size = CHARACTERS_PER_TOKEN * self._most
        while size < len(text):
            count = len(self._tokenizer.encode(text[:size], add_special_tokens=add_special_tokens, **options))
            if 2 * count > 3 * self._most:
                raise RequestError(
                    f"the prompt has more than {count - 1} tokens, and prompt and answer together may have "
                    f"{self._most}",
                    code="context_length_exceeded",
                )
            size *= 2
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, **options)


@contextmanager
def _cut_off(trajectory: PlayedTrajectory | None) -> Iterator[None]:
    """Mark a trajectory whose prompt is refused because it leaves no room for an answer."""
    try:
        yield
    except RequestError as error:
        if trajectory is not None and (error.code == "context_length_exceeded" or error.param == "min_tokens"):
            trajectory.cut_off = True
        raise

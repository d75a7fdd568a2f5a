"""Answers while they are sampled: pieces of text that no later token can change.

    engine --NewTokens--> LiveAnswers --(index, text)--> events of a stream

Half a character, the beginning of a stop text and, if there are tools, a call are held back until they are complete.
The pieces of an answer together are the text of the whole answer.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import TypeVar

from attrs import evolve, frozen

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.chats.tool_calls import OPENING
from skyrl.endpoint.conversations import History
from skyrl.endpoint.messages import SampledMessage, answer_of
from skyrl.endpoint.policy import Policy, PromptTokens
from skyrl.endpoint.request_sampling import RequestSampling
from skyrl.errors import RequestError
from skyrl.inference.engine import NewTokens

T = TypeVar("T")


class GrowingText:
    """The text of one answer while its tokens arrive."""

    def __init__(self, stops: Sequence[str], *, tools: bool) -> None:
        self._markers, self._tools = (*stops, OPENING) if tools else tuple(stops), tools
        self._ids: list[int] = []
        self._window = self._read = 0
        self._text = self._sent = ""

    def add(self, tokenizer: ChatTokenizer, new: NewTokens) -> None:
        """Decode new tokens together with the few before them. Tokens that are sampled again count once."""
        self._ids += new.token_ids[len(self._ids) - new.start :]
        before = tokenizer.decode(self._ids[self._window : self._read], skip_special_tokens=True)
        after = tokenizer.decode(self._ids[self._window :], skip_special_tokens=True)
        if not after.endswith("\N{REPLACEMENT CHARACTER}"):  # otherwise it may end in half a character
            self._text += after[len(before) :]
            self._window, self._read = self._read, len(self._ids)

    def piece(self) -> str:
        """New text that is final and was not returned before. A marker never begins inside text that was returned."""
        text, start = self._text, len(self._sent)
        markers = [position for marker in self._markers if (position := text.find(marker, start)) >= 0]
        held_back = max((_marker_prefix_length(text, marker) for marker in self._markers), default=0)
        end = min(markers, default=len(text) - held_back)
        end = max(start, len(text[:end].rstrip()) if self._tools else end)
        self._sent = text[:end]
        return text[start:end]

    def rest(self, text: str) -> str:
        """The part of the whole text that was not returned yet. Raises `RequestError` if it begins differently."""
        if not text.startswith(self._sent):
            raise RequestError("the answer differs from the part that was already sent", status=500)
        return text[len(self._sent) :]


def _marker_prefix_length(text: str, marker: str) -> int:
    """Length of the longest end of the text that is a beginning of the marker."""
    return next((size for size in range(len(marker) - 1, 0, -1) if text.endswith(marker[:size])), 0)


class LiveTokens:
    """New tokens of one request's answers, with the answer's index. Used on the endpoint's event loop."""

    def __init__(self) -> None:
        self._new: list[NewTokens] = []
        self._changed = asyncio.Event()

    def listener(self, first: int = 0) -> Callable[[NewTokens], None]:
        """A callback for the tokens of samples, callable from any thread; sample 0 is the answer with index `first`."""
        loop = asyncio.get_running_loop()

        def listen(new: NewTokens) -> None:
            with suppress(RuntimeError):  # the endpoint's loop may end before the engine notices
                loop.call_soon_threadsafe(self._hear, evolve(new, index=first + new.index))

        return listen

    async def until(self, answering: asyncio.Task[T]) -> AsyncGenerator[list[NewTokens], None]:
        """Yield batches of new tokens until `answering` is done. Stopping the iteration cancels `answering`."""
        answering.add_done_callback(lambda task: task.cancelled() or task.exception())  # mark exceptions as retrieved
        answering.add_done_callback(lambda _: self._changed.set())
        try:
            while not answering.done() or self._new:
                await self._changed.wait()
                self._changed.clear()
                new, self._new = self._new, []
                yield new
        finally:
            answering.cancel()

    def _hear(self, new: NewTokens) -> None:
        self._new.append(new)
        self._changed.set()


class LiveAnswers:
    """Growing texts of one request's answers, by index. Used on the endpoint's event loop."""

    prompt: PromptTokens
    """Prompt of the answers; set before the first piece."""

    def __init__(self, policy: Policy, stops: Sequence[str], *, tools: bool = False) -> None:
        self._policy = policy
        self._texts = defaultdict[int, GrowingText](lambda: GrowingText(stops, tools=tools))
        self._tokens = LiveTokens()

    def listener(self, prompt: PromptTokens, first: int = 0) -> Callable[[NewTokens], None]:
        """A callback for the tokens of a prompt's samples, callable from any thread; sample 0 is the answer with index
        `first`.
        """
        self.prompt = prompt
        return self._tokens.listener(first)

    async def pieces(
        self, answering: asyncio.Task[T], texts: Callable[[T], Sequence[str]]
    ) -> AsyncGenerator[tuple[int, str], None]:
        """Yield each piece of text with its answer's index until `answering` is done. `texts` returns the complete
        texts of its result. Stopping the iteration cancels `answering`; its exceptions are raised here.
        """
        async with aclosing(self._tokens.until(answering)) as batches:
            async for new in batches:
                await self._policy.run_with_tokenizer(self._decode, new)
                for index in sorted({tokens.index for tokens in new}):
                    if piece := self._texts[index].piece():
                        yield index, piece
        for index, text in enumerate(texts(answering.result())):
            if rest := self._texts[index].rest(text):
                yield index, rest

    def _decode(self, tokenizer: ChatTokenizer, new: Sequence[NewTokens]) -> None:
        for tokens in new:
            self._texts[tokens.index].add(tokenizer, tokens)


@frozen
class SampledMessages:
    """The answers to a conversation."""

    prompt: PromptTokens
    messages: Sequence[SampledMessage]


async def sample_messages(
    history: History, settings: RequestSampling, count: int, policy: Policy, live: LiveAnswers | None = None
) -> SampledMessages:
    """Sample and record `count` answers to a conversation; `live` hears their tokens. Raises `RequestError`."""
    with policy.admitted(count):
        prompt = await policy.conversation(history)
        listener = None if live is None else live.listener(prompt)
        completions = await policy.sample(prompt, settings, count, listener)
        messages = []
        for completion in completions:
            stop = policy.stop_text(completion, settings.sampling)
            messages.append(answer_of(completion, stop, tools=bool(history.tools)))
            policy.record(prompt, completion, messages[-1].message)
    return SampledMessages(prompt, messages)

"""Tokens of a chat, and which of them are learned, by the model's own chat template.

What is learned of a message is what the model would have sampled in its place: it begins where the header that asks for
an answer ends, holds everything that the message says (thoughts and tool calls included), and ends with what ends a
turn by the template. A chat is tokenized in pieces, cut where learning begins and ends, as it is when answers are
sampled. A template that leaves out some of what a chat says, or that writes an answer otherwise once the conversation
continues, is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl.chats.contents import dropped, dropped_tools, holds, split_thoughts
from skyrl.chats.ends import TurnEnds
from skyrl.chats.spans import Layout, Layouts
from skyrl.chats.spellings import Spelling, spellings
from skyrl.chats.text import CONTEXT, Message, continued_tokens, text_tokens
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.errors import DataError

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
Weights = NDArray[np.float32]


LARGEST_WEIGHT = 1e6
"""Bound of the weights of messages, above and (inverted) below: float32 adds up their shares without loss."""


class ChatMasks:
    """Turns chats into tokens and masks, with one tokenizer."""

    def __init__(
        self, tokenizer: ChatTokenizer, *, all_messages: bool = False, arguments: Mapping[str, Any] | None = None
    ) -> None:
        """`all_messages`: learn what every assistant message says, otherwise the last one.

        `arguments` are variables of the chat template, such as `enable_thinking`.
        """
        self._tokenizer, self._all, self._arguments = tokenizer, all_messages, dict(arguments or {})
        self.behind_other_headers = 0
        """Chats so far whose answer does not stand behind the header that sampling asks with."""
        self._best: dict[tuple[Spelling, ...], Spelling] = {}  # of those that differ, the one that the template takes

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, allow_dropped: bool = False
    ) -> tuple[Ids, Mask]:
        """Token ids and, for each, whether it is learned: where `weighted` has a weight."""
        ids, weights = self.weighted(messages, tools, allow_dropped=allow_dropped)
        return ids, weights > 0

    def weighted(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, allow_dropped: bool = False
    ) -> tuple[Ids, Weights]:
        """Token ids and, for each, its weight in the loss; the chat ends with its last message that is learned.

        Every token of a message has the message's own `weight`, 0 or more, or 1 without one; `allow_dropped` takes a
        chat of which the template leaves something out. Raises `DataError` for a chat without anything to learn, and
        for what the template cannot write so that learning it is right.
        """
        weights = message_weights(messages, all_messages=self._all)
        learned = tuple(weights)
        chat = [{key: value for key, value in each.items() if key != "weight"} for each in messages[: learned[-1] + 1]]
        layout = self._layout(chat, tools, learned, allow_dropped=allow_dropped)
        self.behind_other_headers += not layout.behind_header
        return self._tokens(layout, weights)

    def _layout(
        self, chat: Sequence[Message], tools: Sequence[Any] | None, learned: Sequence[int], *, allow_dropped: bool
    ) -> Layout:
        """The chat in the spelling of which the template leaves out least. Raises `DataError`."""
        possible = tuple(spellings(chat))
        best = self._best.get(possible)
        found: dict[str, tuple[Layout, Spelling]] = {}
        refusals: list[DataError] = []
        for spelling in dict.fromkeys((best or possible[0], *possible)):
            try:
                layout = self._layouts(tools, spelling).of(spelling.of(chat), learned)
            except DataError as error:
                refusals.append(error)
                continue
            missing = list(_missing(chat, tools, layout))
            lacks = "content" if missing else "earlier thoughts" if _lacks_thoughts(chat, layout) else "nothing"
            found.setdefault(lacks, (layout, spelling))
            if missing:
                refusals.append(_leaves_out(missing))
            elif lacks == "nothing" or spelling == best:
                break
        for lacks in ("nothing", "earlier thoughts", *(["content"] if allow_dropped else [])):
            if lacks in found:
                layout, self._best[possible] = found[lacks]
                return layout
        raise next((each for each in refusals if "leaves out" in str(each)), refusals[0])

    @property
    def turn_end(self) -> tuple[str, int | None]:
        """Text by which the chat template ends turns, and its last token; None where that is plain text."""
        end = self._ends.end or self._tokenizer.eos_token
        token = self._ends.added.last(end)
        return end, text_tokens(self._tokenizer, token)[-1] if token else None

    def _layouts(self, tools: Sequence[Any] | None, spelling: Spelling) -> Layouts:
        shown = {"tools": [dict(tool) for tool in tools]} if tools else {}
        as_given = spelling.thoughts == "given"
        return Layouts(self._tokenizer, self._ends, {**self._arguments, **shown}, continues_thoughts=as_given)

    @cached_property
    def _ends(self) -> TurnEnds:
        return TurnEnds.of(self._tokenizer, self._arguments)

    def _tokens(self, layout: Layout, of_message: Mapping[int, float]) -> tuple[Ids, Weights]:
        ids: list[int] = []
        weights: list[float] = []
        for start, stop, message in layout.pieces():
            before = layout.text[max(0, start - CONTEXT) : start]
            piece = continued_tokens(self._tokenizer, before, layout.text[start:stop])
            ids += piece
            weights += [0.0 if message is None else of_message[message]] * len(piece)
        if not layout.ended:
            ids, weights = [*ids, self._tokenizer.eos_token_id], [*weights, of_message[layout.spans[-1].place]]
        return np.asarray(ids, dtype=np.int64), np.asarray(weights, dtype=np.float32)


def message_weights(messages: Sequence[Message], *, all_messages: bool = False) -> dict[int, float]:
    """Place of every message that is learned -> its weight. Raises `DataError` where there is none."""
    said = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    if not said:
        raise DataError("no message is an assistant's, so that nothing can be learned")
    usual = said if all_messages else said[-1:]
    weights = {place: _weight(messages[place], place in usual) for place in said}
    if not any(weights.values()):
        raise DataError("the weight of every assistant message is 0, so that nothing can be learned")
    return {place: weight for place, weight in weights.items() if weight}


def _weight(message: Message, usual: bool) -> float:
    weight = message.get("weight")
    if weight is None:
        return float(usual)
    if not isinstance(weight, int | float) or not 0 <= weight <= LARGEST_WEIGHT or 0 < weight < 1 / LARGEST_WEIGHT:
        raise DataError(
            f"the weight of a message is {weight!r}; it is 0 (not learned), or a number from {1 / LARGEST_WEIGHT:g} to "
            f"{LARGEST_WEIGHT:g} by which each of its tokens counts in the loss"
        )
    return float(weight)


def _missing(messages: Sequence[Message], tools: Sequence[Any] | None, layout: Layout) -> Iterator[str]:
    """Parts of a chat that the text lacks. Thoughts of messages that are not learned may be left out, as models do."""
    learned = {span.place: layout.text[span.start : span.stop] for span in layout.spans}
    for place, message in enumerate(messages):
        yield from dropped(message, learned.get(place, layout.text), thoughts=place in learned)
    yield from dropped_tools(tools or (), layout.text)


def _lacks_thoughts(messages: Sequence[Message], layout: Layout) -> bool:
    """Whether the text lacks thoughts of a message."""
    return any(not holds(layout.text, split_thoughts(message)[0]) for message in messages)


def _leaves_out(missing: Sequence[str]) -> DataError:
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return DataError(
        f"the chat template leaves out {', '.join(missing[:3])}{more}: take another template (chat_template), or set "
        "allow_dropped_content in the row to train on what is left"
    )

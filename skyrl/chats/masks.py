"""Tokens of a chat and the mask of the learned ones, by the model's own chat template.

The learned part of a message is what the model would have sampled: it begins after the generation prompt, contains
everything in the message (thoughts and tool calls included), and ends with the template's end of turn. A chat is
tokenized in pieces, cut where learned parts begin and end, as it is when answers are sampled. A template that drops
some content of a chat, or that renders an answer differently once the conversation continues, is refused with the
reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from skyrl.chats.contents import Blanks, DroppedPart, blanks_of, dropped, dropped_tools
from skyrl.chats.spans import ChatLayout, Layouts, TurnEnds
from skyrl.chats.spellings import FullestSpelling, Spelling
from skyrl.chats.text import CONTEXT, Message, continued_tokens, text_tokens
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.errors import DataError

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
Weights = NDArray[np.float32]

OPEN, CLOSE = "⟦", "⟧"
"""Marks around learned text."""

LARGEST_WEIGHT = 1e6
"""Largest weight of a message, and the inverse of the smallest: within these bounds float32 sums their shares without
loss."""


class ChatMasks:
    """Turns chats into tokens and masks, with one tokenizer."""

    def __init__(
        self, tokenizer: ChatTokenizer, *, all_messages: bool = False, arguments: Mapping[str, Any] | None = None
    ) -> None:
        """With `all_messages`, every assistant message is learned, otherwise only the last one.

        `arguments` are variables of the chat template, such as `enable_thinking`.
        """
        self._tokenizer, self._all, self._arguments = tokenizer, all_messages, dict(arguments or {})
        self.behind_other_headers = 0
        """Number of chats so far whose answer does not follow the generation prompt."""
        self.blanks = Blanks()
        """Empty prompts and answers so far."""
        self._fullest: FullestSpelling[ChatLayout] = FullestSpelling()

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, allow_dropped: bool = False
    ) -> tuple[Ids, Mask]:
        """Token ids and a mask of the learned tokens: those with a weight above 0 in `weighted`."""
        ids, weights = self.weighted(messages, tools, allow_dropped=allow_dropped)
        return ids, weights > 0

    def weighted(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, allow_dropped: bool = False
    ) -> tuple[Ids, Weights]:
        """Token ids and the weight of each in the loss; the chat is cut after its last learned message.

        Every token of a learned message has the message's `weight`, 0 or more, or 1 if it has none; `allow_dropped`
        accepts a chat of which the template drops some content. Raises `DataError` for a chat with nothing to learn,
        and for one that the template cannot render as it would be sampled.
        """
        weights = message_weights(messages, all_messages=self._all)
        learned = tuple(weights)
        chat = [{key: value for key, value in item.items() if key != "weight"} for item in messages[: learned[-1] + 1]]
        tool_argument = {"tools": [dict(tool) for tool in tools]} if tools else {}

        def write(spelling: Spelling) -> ChatLayout:
            arguments, as_given = {**self._arguments, **tool_argument}, spelling.thoughts == "given"
            layouts = Layouts(self._tokenizer, self._ends, arguments, continues_thoughts=as_given)
            return layouts.layout(spelling.spell(chat), learned)

        layout = self._fullest(
            chat,
            write,
            missing=lambda layout: _missing(chat, tools, layout),
            text_of=lambda layout: layout.text,
            allow_dropped=allow_dropped,
        )
        self.behind_other_headers += not layout.behind_header
        self.blanks += blanks_of(messages, learned)
        return self._tokens(layout, weights)

    @contextmanager
    def one_prompt(self) -> Iterator[None]:
        """A block whose chats have the same prompt, which counts once if it is empty."""
        before = self.blanks.prompts
        yield
        self.blanks = evolve(self.blanks, prompts=min(self.blanks.prompts, before + 1))

    @property
    def turn_end(self) -> tuple[str, int | None]:
        """Text with which the chat template ends turns, and the id of its last token, or None if that is plain text."""
        end = self._ends.end or self._tokenizer.eos_token
        token = self._ends.added.trailing(end)
        return end, text_tokens(self._tokenizer, token)[-1] if token else None

    @cached_property
    def _ends(self) -> TurnEnds:
        return TurnEnds.of(self._tokenizer, self._arguments)

    def _tokens(self, layout: ChatLayout, of_message: Mapping[int, float]) -> tuple[Ids, Weights]:
        ids: list[int] = []
        weights: list[float] = []
        for start, stop, message in layout.pieces():
            before = layout.text[max(0, start - CONTEXT) : start]
            piece = continued_tokens(self._tokenizer, before, layout.text[start:stop])
            ids += piece
            weights += [0.0 if message is None else of_message[message]] * len(piece)
        if not layout.ended:
            ids, weights = [*ids, self._tokenizer.eos_token_id], [*weights, of_message[layout.spans[-1].message_index]]
        return np.asarray(ids, dtype=np.int64), np.asarray(weights, dtype=np.float32)


def message_weights(messages: Sequence[Message], *, all_messages: bool = False) -> dict[int, float]:
    """Index of every learned message -> its weight. Raises `DataError` if there is none."""
    answers = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    if not answers:
        roles = ", ".join(dict.fromkeys(f"{message.get('role')}" for message in messages))
        raise DataError(f"no message is from the assistant (roles: {roles:.100}), so there is nothing to train on")
    usual = answers if all_messages else answers[-1:]
    weights = {index: _weight(messages[index], index in usual) for index in answers}
    if not any(weights.values()):
        raise DataError("the weight of every assistant message is 0, so there is nothing to train on")
    return {index: weight for index, weight in weights.items() if weight}


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


def _missing(messages: Sequence[Message], tools: Sequence[Any] | None, layout: ChatLayout) -> Iterator[DroppedPart]:
    """Parts of a chat that are missing in the text. Only learned messages need their thoughts, as usual for models."""
    learned = {span.message_index: layout.text[span.start : span.stop] for span in layout.spans}
    for index, message in enumerate(messages):
        yield from dropped(message, learned.get(index, layout.text), thoughts=index in learned)
    yield from dropped_tools(tools or (), layout.text)


def marked_text(tokenizer: ChatTokenizer, ids: Ids, weights: Mask | Weights) -> str:
    """The text of a row, special tokens included, with learned parts between ⟦ and ⟧, followed by their weight in the
    loss if it is not 1: `⟦Four.⟧*0.5`.
    """
    pieces = []
    for weight, group in groupby(zip(ids.tolist(), weights.tolist(), strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in group], clean_up_tokenization_spaces=False)
        factor = "" if weight == 1 else f"*{weight:.4g}"
        pieces.append(f"{OPEN}{text}{CLOSE}{factor}" if weight else text)
    return "".join(pieces)

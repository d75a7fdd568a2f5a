"""The tokens between a sampled answer and the next one: the end of its turn, new messages, and the next header.

They are tokenized separately, after a fixed conversation, so that they do not depend on what was sampled. The sampled
tokens are not changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from attrs import evolve

from skyrl.chats.rendering import Template
from skyrl.chats.spans import ANSWER, ANSWERED, ASKED, TurnEnds
from skyrl.chats.text import Message, text_tokens
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.errors import DataError

FIXED: tuple[Message, ...] = (ASKED, ANSWERED)
"""Conversation used to find the text with which a template ends a turn."""


class Continuation:
    """Continues conversations of one tokenizer from the tokens that the policy sampled."""

    def __init__(
        self, tokenizer: ChatTokenizer, arguments: Mapping[str, Any], *, closes_stopped_turns: bool = True
    ) -> None:
        """`arguments` are passed to the chat template. With `closes_stopped_turns`, an answer that ended with a stop
        text is followed by the template's end-of-turn token.
        """
        self._tokenizer, self._closes_stopped_turns = tokenizer, closes_stopped_turns
        self._template = Template(tokenizer=tokenizer, arguments=arguments)

    def tokens_after(
        self,
        answer: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        stopped: bool,
    ) -> tuple[int, ...]:
        """Tokens that follow the tokens of an `answer` when the conversation continues with the `messages`.

        `stopped`: the answer ended with a token or a stop text, not at its length limit. Raises `DataError` for a
        template that drops earlier answers.
        """
        between = evolve(self._template, tools=tools).tokens_after(FIXED, ANSWER, messages)
        if between is None:
            raise DataError(
                "the chat template leaves out an earlier answer, so a conversation cannot continue from sampled "
                "tokens: set generator.use_conversation_multi_turn = false, or use another template"
            )
        ended = bool(answer) and answer[-1] in self.special
        if ended and answer[-1] in between[: self._end_length]:
            return between[between.index(answer[-1]) + 1 :]  # the policy sampled the end itself
        if not ended and stopped and not self._closes_stopped_turns and between[:1] and between[0] in self.special:
            return between[1:]
        return between

    @cached_property
    def _end_length(self) -> int:
        """Number of tokens that end a turn in the template, at least 1: the header of the next turn may be the end."""
        ends = TurnEnds.of(self._tokenizer, self._template.arguments)
        return max(1, len(text_tokens(self._tokenizer, ends.end)))

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids of the tokens that were added to the vocabulary, special or not."""
        return frozenset(self._tokenizer.all_special_ids) | frozenset(self._tokenizer.added_tokens_decoder)

"""The tokens between a sampled answer and the next one: the end of its turn, new messages, and the next header.

They are tokenized on their own, after a fixed conversation, so that they are the same whatever was sampled. The sampled
tokens stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from attrs import evolve

from skyrl.chats.ends import ANSWER, ANSWERED, ASKED, TurnEnds
from skyrl.chats.rendering import Message, Template
from skyrl.chats.text import text_tokens
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.errors import DataError

FIXED: tuple[Message, ...] = (ASKED, ANSWERED)
"""Conversation used to find the text by which a template closes a turn."""


class Continuation:
    """Continues conversations of one tokenizer from the tokens that the policy sampled."""

    def __init__(
        self, tokenizer: ChatTokenizer, arguments: Mapping[str, Any], *, closes_stopped_turns: bool = True
    ) -> None:
        """`arguments` are given to the chat template. `closes_stopped_turns`: an answer that a stop text ended is also
        ended by the token that the template ends turns with.
        """
        self._tokenizer, self._closes_stopped_turns = tokenizer, closes_stopped_turns
        self._template = Template(tokenizer=tokenizer, arguments=arguments)

    def after(
        self, answer: Sequence[int], said: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, stopped: bool
    ) -> tuple[int, ...]:
        """Tokens behind the tokens of an `answer` when the conversation continues with the messages `said`.

        `stopped`: a token or a stop text ended the answer, and not its length. Raises `DataError` for a template that
        leaves out earlier answers.
        """
        between = self._between(said, tools)
        ended = bool(answer) and answer[-1] in self.special
        if ended and answer[-1] in between[: self._end_length]:
            return between[between.index(answer[-1]) + 1 :]  # the policy wrote the end itself
        if not ended and stopped and not self._closes_stopped_turns and between[:1] and between[0] in self.special:
            return between[1:]
        return between

    def _between(self, said: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        ids = evolve(self._template, tools=tools).after(FIXED, ANSWER, said)
        if ids is None:
            raise DataError(
                "the chat template leaves out an earlier answer, so that no conversation can go on from sampled "
                "tokens: set generator.use_conversation_multi_turn = false, or take another template"
            )
        return ids

    @cached_property
    def _end_length(self) -> int:
        """Tokens that the template ends a turn with, at least 1: the header of the next turn may be what ends it."""
        ends = TurnEnds.of(self._tokenizer, self._template.arguments)
        return max(1, len(text_tokens(self._tokenizer, ends.end)))

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids of the tokens that stand beside the vocabulary."""
        return frozenset(self._tokenizer.all_special_ids) | frozenset(self._tokenizer.added_tokens_decoder)

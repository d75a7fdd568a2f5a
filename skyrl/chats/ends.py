"""Finds the text with which a chat template ends the turn of an answer.

It does not matter which tokens are special. The template renders a short conversation twice, once ending with an answer
and once with a question after it: the text that follows the answer both times ends a turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from skyrl.chats.text import Message, chat_text, placeholder
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.errors import DataError

ANSWER = placeholder("answer")
"""Placeholder for an answer, used to see what a template writes around it."""

ASKED: Message = {"role": "user", "content": "?"}
ANSWERED: Message = {"role": "assistant", "content": ANSWER}


@frozen
class AddedTokens:
    """Tokens that were added to a tokenizer's vocabulary, special or not."""

    pattern: re.Pattern[str]
    special: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: ChatTokenizer) -> AddedTokens:
        """The added tokens of a tokenizer; the pattern tries longer ones first."""
        added = list(getattr(tokenizer, "added_tokens_decoder", {}).values())
        texts = {str(token) for token in added} | set(tokenizer.all_special_tokens)
        special = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
        ordered = sorted(filter(str.strip, texts), key=lambda text: (-len(text), text))
        pattern = re.compile("(" + "|".join(map(re.escape, ordered)) + ")" if ordered else r"((?!))")
        return cls(pattern, tuple(sorted(filter(str.strip, special))))

    def common(self, one: str, other: str) -> str:
        """Common prefix of two texts, in units of whole added tokens and the whole texts between them."""
        alike = []
        for left, right in zip(self.pattern.split(one), self.pattern.split(other), strict=False):
            if left != right:
                break
            alike.append(left)
        return "".join(alike)

    def leading(self, text: str) -> str:
        """The added token that the text begins with, or nothing."""
        match = self.pattern.match(text)
        return match[0] if match else ""

    def trailing(self, text: str) -> str:
        """The added token that the text ends with, or nothing."""
        pieces = [piece for piece in self.pattern.split(text) if piece]
        return pieces[-1] if pieces and self.pattern.fullmatch(pieces[-1]) else ""


@frozen
class TurnEnds:
    """The text with which a template ends an assistant's turn."""

    tail: str
    """Text after the last answer of a conversation."""

    end: str
    """The part of `tail` that ends the turn, without trailing white space; empty if nothing does."""

    foreign: str
    """The rest of `tail`, which belongs to the whole conversation, such as an end-of-text token."""

    question: str
    """The added token that a question begins with after an answer, which ends the answer's turn if nothing else does;
    empty if there is none."""

    added: AddedTokens

    @classmethod
    def of(cls, tokenizer: ChatTokenizer, arguments: Mapping[str, Any]) -> TurnEnds:
        """Find the turn ends of a tokenizer's template. Raises `DataError` if the template does not show an answer."""
        added = AddedTokens.of(tokenizer)
        written = chat_text(tokenizer, [ASKED, ANSWERED], generation_prompt=False, **arguments)
        _, separator, tail = written.partition(ANSWER)
        if not separator:
            raise DataError("the chat template does not show where an answer is: use another template")
        try:
            longer = chat_text(tokenizer, [ASKED, ANSWERED, ASKED], generation_prompt=False, **arguments).partition(
                ANSWER
            )[2]
        except DataError:  # it supports only one turn
            longer = tail
        common = tail if longer.startswith(tail.rstrip()) else added.common(tail, longer)
        if not common.strip():  # the last turn ends differently from earlier ones
            common = tail
        return cls(tail, common.rstrip(), tail.removeprefix(common), added.leading(longer), added)

    def end_of_turn(self, text: str) -> tuple[int, bool]:
        """Position of the end of the last assistant turn in a text, and whether the template ends it."""
        stripped = text.removesuffix(self.foreign).rstrip()
        if self.end and stripped.endswith((self.end, *self.added.special)):
            return len(stripped), True
        return len(text.removesuffix(self.tail)), False

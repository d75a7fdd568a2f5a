"""Finds the text by which a chat template ends the turn of an answer.

Nothing depends on which tokens are special. A template is asked to write a short conversation twice, with an answer at
the end and with a question behind the answer: what stands behind the answer both times ends a turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from skyrl.chats.text import Message, chat_text
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.errors import DataError

ANSWER = "skyrl-answer-5e0f"
"""Stands for an answer, to see what a template writes around it."""

ASKED: Message = {"role": "user", "content": "?"}
ANSWERED: Message = {"role": "assistant", "content": ANSWER}


@frozen
class AddedTokens:
    """Tokens that a tokenizer has beside its vocabulary, special or not."""

    pattern: re.Pattern[str]
    special: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: ChatTokenizer) -> AddedTokens:
        """Special tokens of a tokenizer, longer ones first."""
        added = list(getattr(tokenizer, "added_tokens_decoder", {}).values())
        texts = {str(token) for token in added} | set(tokenizer.all_special_tokens)
        special = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
        ordered = sorted(filter(str.strip, texts), key=lambda text: (-len(text), text))
        pattern = re.compile("(" + "|".join(map(re.escape, ordered)) + ")" if ordered else r"((?!))")
        return cls(pattern, tuple(sorted(filter(str.strip, special))))

    def common(self, one: str, other: str) -> str:
        """Common beginning of two texts, in whole tokens and whole texts between them."""
        alike = []
        for left, right in zip(self.pattern.split(one), self.pattern.split(other), strict=False):
            if left != right:
                break
            alike.append(left)
        return "".join(alike)

    def first(self, text: str) -> str:
        """The added token that the text begins with, or nothing."""
        found = self.pattern.match(text)
        return found[0] if found else ""

    def last(self, text: str) -> str:
        """The added token that the text ends with, or nothing."""
        pieces = [piece for piece in self.pattern.split(text) if piece]
        return pieces[-1] if pieces and self.pattern.fullmatch(pieces[-1]) else ""


@frozen
class TurnEnds:
    """How a template ends the turn of an assistant."""

    tail: str
    """Text behind the last answer of a conversation."""

    end: str
    """The part of it that ends the turn, without white space behind it; empty where nothing does."""

    foreign: str
    """The part behind that, which belongs to the conversation, such as an end of the whole text."""

    added: AddedTokens

    @classmethod
    def of(cls, tokenizer: ChatTokenizer, arguments: Mapping[str, Any]) -> TurnEnds:
        """Ends of turns of a tokenizer's template. Raises `DataError` for one that does not write an answer."""
        added = AddedTokens.of(tokenizer)
        written = chat_text(tokenizer, [ASKED, ANSWERED], ask=False, **arguments)
        _, found, tail = written.partition(ANSWER)
        if not found:
            raise DataError("the chat template does not show where an answer is said: take another template")
        try:
            longer = chat_text(tokenizer, [ASKED, ANSWERED, ASKED], ask=False, **arguments).partition(ANSWER)[2]
        except DataError:  # it has one turn alone
            longer = tail
        common = tail if longer.startswith(tail.rstrip()) else added.common(tail, longer)
        if not common.strip():  # the last turn ends otherwise than those before
            common = tail
        return cls(tail, common.rstrip(), tail.removeprefix(common), added)

    def place(self, text: str) -> tuple[int, bool]:
        """End of the last assistant turn of a text, and whether anything ends it."""
        stripped = text.removesuffix(self.foreign).rstrip()
        if self.end and stripped.endswith((self.end, *self.added.special)):
            return len(stripped), True
        return len(text.removesuffix(self.tail)), False

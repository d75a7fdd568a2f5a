"""Which tokens of a chat an assistant said: the mask of supervised fine-tuning, by the model's own chat template.

What is learned of a message is what the model would have sampled in its place: it begins where the header that asks for
an answer ends, and it ends with the token that ends a turn. So a chat is tokenized in pieces, cut where the one ends
and the other begins, as it is when answers are sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl.data.chat_text import chat_text
from skyrl.errors import DataError

Message = Mapping[str, Any]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]

ANSWER = "skyrl-answer-5e0f"
"""Stands for what was said, to see where a template writes it."""


class ChatMasks:
    """Turns chats into tokens and masks, with one tokenizer."""

    def __init__(self, tokenizer: Any, *, all_messages: bool = False) -> None:
        """`all_messages`: learn what every assistant message says, otherwise the last one."""
        self._tokenizer, self._all = tokenizer, all_messages
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = tuple(token for token in dict.fromkeys([*tokenizer.all_special_tokens, *added]) if token)

    def __call__(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> tuple[Ids, Mask]:
        """Token ids and, for each, whether it is learned; the chat ends with its last assistant message.

        Raises `DataError` for a chat without one, and for a template whose text does not show where it is.
        """
        said = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
        if not said:
            raise DataError("no message is an assistant's, so that nothing can be learned")
        messages = messages[: said[-1] + 1]
        whole = self._render(messages, tools)
        learned = list(self._spans(messages, said if self._all else said[-1:], whole, tools))
        return self._tokens(whole, learned)

    def _spans(
        self, messages: Sequence[Message], places: Sequence[int], whole: str, tools: Any
    ) -> Iterator[tuple[int, int]]:
        """First and last character (exclusive) of what is learned of each message, in the text of the whole chat."""
        before = 0
        for place in places:
            start, tail = self._place_of(messages, place, whole, tools)
            header = self._render(messages[:place], tools, ask=True) if place else ""
            if before <= len(header) <= start and whole.startswith(header):
                start = len(header)  # what the template puts before the words, such as an empty thought, is said, too
            if start < before:
                raise DataError("the chat template does not write the messages one after the other")
            end = tail + self._length_of_end(whole[tail:])
            yield start, end
            before = end

    def _place_of(self, messages: Sequence[Message], place: int, whole: str, tools: Any) -> tuple[int, int]:
        """Where the words of a message begin, and where they have ended."""
        marked = [*messages[:place], {**messages[place], "content": ANSWER}, *messages[place + 1 :]]
        before, found, after = self._render(marked, tools).partition(ANSWER)
        if not found or not whole.startswith(before) or not whole.endswith(after):
            raise DataError(
                f"the chat template does not show where message {place} is said: take another template, or rows that "
                "are tokenized already"
            )
        return len(before), max(len(before), len(whole) - len(after))

    def _length_of_end(self, text: str) -> int:
        """Characters up to the end of the first special token: what ends a turn. 0 where there is none."""
        ends = [text.find(token) + len(token) for token in self._special if token in text]
        return min(ends, default=0)

    def _tokens(self, whole: str, learned: Sequence[tuple[int, int]]) -> tuple[Ids, Mask]:
        ids: list[int] = []
        mask: list[bool] = []
        position = 0
        for start, end in learned:
            for text, is_learned in ((whole[position:start], False), (whole[start:end], True)):
                piece = self._tokenizer.encode(text, add_special_tokens=False) if text else []
                ids += piece
                mask += [is_learned] * len(piece)
            position = end
        if position == len(whole) and not any(whole.endswith(token) for token in self._special):
            ids.append(self._tokenizer.eos_token_id)  # nothing of the template ends the last turn
            mask.append(True)
        rest = self._tokenizer.encode(whole[position:], add_special_tokens=False) if position < len(whole) else []
        return np.asarray([*ids, *rest], dtype=np.int64), np.asarray([*mask, *[False] * len(rest)], dtype=np.bool_)

    def _render(self, messages: Sequence[Message], tools: Any, *, ask: bool = False) -> str:
        return chat_text(self._tokenizer, messages, ask=ask, **({"tools": list(tools)} if tools else {}))

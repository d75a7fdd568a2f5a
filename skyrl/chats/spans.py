"""Finds answers, and where their turns end, in the text of a conversation that a chat template has rendered.

The text with which a template ends a turn is found without regard to which tokens are special. The template renders a
short conversation twice, once ending with an answer and once with a question after it: the text that follows the answer
both times ends a turn.

The last answer follows the text of the conversation before it, generation prompt included. An earlier answer is located
in a short window of the conversation, which begins with the answer before it, and the text of the window must match the
whole text: so each message of a long conversation is rendered a bounded number of times. If the template renders
windows differently, the whole conversation up to the answer is rendered instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from skyrl.chats.contents import split_thoughts
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


HEADS = ("system", "developer")
"""Roles of the messages that a window keeps from the beginning of a conversation."""

OPENED = "<think>"
"""End of an answer's header if the header opens a thought."""


@frozen
class AnswerSpan:
    """Characters of one answer, including the end of its turn."""

    message_index: int
    """Index of the message."""

    start: int
    stop: int
    """End of the span, exclusive."""


@frozen
class ChatLayout:
    """A conversation as text, and the positions of its learned answers."""

    text: str
    spans: tuple[AnswerSpan, ...]
    ended: bool
    """Whether the template ends the last turn; if not, an end-of-sequence token must be added."""

    behind_header: bool
    """Whether the last answer follows the generation prompt, which opens a thought in some templates."""

    def pieces(self) -> Iterator[tuple[int, int, int | None]]:
        """Start, end (exclusive) and learned message, or None, of each piece of the text."""
        position = 0
        for span in self.spans:
            yield position, span.start, None
            yield span.start, span.stop, span.message_index
            position = span.stop
        if self.ended:
            yield position, len(self.text), None


@frozen
class _AnswerTurn:
    """A text, and the position of an answer in it."""

    text: str
    start: int
    stop: int
    ended: bool
    behind_header: bool = True


@frozen
class Layouts:
    """Finds answers with one tokenizer, template arguments and tools."""

    tokenizer: Any
    ends: TurnEnds
    arguments: Mapping[str, Any]
    continues_thoughts: bool = True
    """Whether thoughts may be added after a header that opens them if the template itself drops them."""

    def layout(self, messages: Sequence[Message], learned: Sequence[int]) -> ChatLayout:
        """The layout of a conversation; `learned` are the indices of the learned messages in order, the last message
        among them.

        Raises `DataError` for a template that does not show an answer, or renders it differently later in the
        conversation.
        """
        final = self._turn(messages)
        earlier = self._earlier(messages, learned[:-1], final.text) if len(learned) > 1 else ()
        spans = (*earlier, AnswerSpan(learned[-1], final.start, final.stop))
        return ChatLayout(final.text, spans, final.ended, final.behind_header)

    def text(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        """The conversation as rendered by the template, with or without the generation prompt."""
        return chat_text(self.tokenizer, messages, generation_prompt=generation_prompt, **self.arguments)

    def _earlier(self, messages: Sequence[Message], learned: Sequence[int], full_text: str) -> Iterator[AnswerSpan]:
        before: tuple[int, int] | None = None  # index of the previous answer, and its end
        for index in range(learned[-1] + 1):
            if messages[index].get("role") != "assistant":
                continue
            turn = self._locate_answer(messages, index, *before, full_text) if before else None
            turn = turn or self._turn(messages[: index + 1])
            stays = full_text.startswith(turn.text[: turn.stop])
            if index in learned:
                if not stays:
                    raise _rewritten(index, turn, full_text)
                yield AnswerSpan(index, turn.start, self._end_between(messages, index, turn, full_text))
            before = (index, turn.stop) if stays else None

    def _turn(self, messages: Sequence[Message]) -> _AnswerTurn:
        """The text of the conversation, and the position of its last message."""
        opening = self.text(messages[:-1], generation_prompt=True) if len(messages) > 1 else ""
        full_text = self.text(messages)
        if opening and full_text.startswith(opening):
            start = len(opening)
        elif self.continues_thoughts and opening.rstrip().endswith(OPENED) and _has_thoughts(messages[-1]):
            full_text, start = opening + _behind_an_opened_thought(messages[-1]) + self.ends.tail, len(opening)
        else:
            marked = [*messages[:-1], {**messages[-1], "content": ANSWER}]
            before, separator, _ = self.text(marked).partition(ANSWER)
            if not separator or not full_text.startswith(before):
                raise _hidden(len(messages) - 1)
            start = len(before)
        stop, ended = self.ends.end_of_turn(full_text)
        if stop < start:
            raise _hidden(len(messages) - 1)
        return _AnswerTurn(full_text, start, stop, ended, full_text.startswith(opening))

    def _locate_answer(
        self, messages: Sequence[Message], index: int, before: int, at: int, full_text: str
    ) -> _AnswerTurn | None:
        """Locate the answer `index` in the whole text, given that the answer `before` ends at character `at`."""
        heads = [message for message in messages[:2] if message.get("role") in HEADS]
        users = [message for message in messages[len(heads) : before] if message.get("role") == "user"]
        opening = [*heads, *users[-1:], messages[before]]
        if len(opening) > before:
            return None  # the window is the whole conversation
        try:
            anchor = self.text(opening)
            turn = self._turn([*opening, *messages[before + 1 : index + 1]])
        except DataError:  # the template refuses the window as a conversation
            return None
        end, _ = self.ends.end_of_turn(anchor)
        aligned = turn.start >= end and turn.text[:end] == anchor[:end]
        if not aligned or not full_text.startswith(turn.text[end : turn.stop], at):
            return None
        return _AnswerTurn(full_text, turn.start - end + at, turn.stop - end + at, turn.ended)

    def _end_between(self, messages: Sequence[Message], index: int, turn: _AnswerTurn, full_text: str) -> int:
        """End of the turn. If the template writes nothing else there, the header of the next turn is included, unless
        it asks for another answer, which is given to the model and never sampled.
        """
        if turn.ended:
            return turn.stop
        header = self.ends.added.leading(full_text[turn.stop : turn.stop + 200])
        if not header:
            raise DataError(
                f"the chat template writes nothing that ends message {index}, so it would be learned without an "
                "end: train only on the last message (train_on_what), or use another chat_template"
            )
        asks = messages[index + 1].get("role") == "assistant" and header != self.ends.question
        return turn.stop if asks else turn.stop + len(header)


def _has_thoughts(message: Message) -> bool:
    """Whether the message has thoughts, or an empty thought in its content."""
    return bool(split_thoughts(message)[0]) or "</think>" in (message.get("content") or "")


def _behind_an_opened_thought(message: Message) -> str:
    """The sampled text after a header that opens a thought: the thought, its closing tag, the answer."""
    thoughts, answer = split_thoughts(message)
    content = message.get("content") or ""
    if thoughts in content and "</think>" in content:
        return content.lstrip().removeprefix(OPENED).lstrip("\n")
    return f"{thoughts.strip()}\n</think>\n\n{answer}"


def _hidden(index: int) -> DataError:
    return DataError(
        f"the chat template does not show where message {index} is: use another template (chat_template), or "
        "rows that are already tokenized"
    )


def _rewritten(index: int, turn: _AnswerTurn, full_text: str) -> DataError:
    alike = next((i for i, (a, b) in enumerate(zip(turn.text, full_text, strict=False)) if a != b), len(full_text))
    then, now = (text[max(0, alike - 10) : alike + 30] for text in (turn.text, full_text))
    return DataError(
        f"the chat template writes message {index} differently once the conversation continues: {now!r} where the "
        f"model would have sampled {then!r}. Train only on the last message (train_on_what = last_assistant_message), "
        "or use a template that keeps earlier messages unchanged (chat_template)"
    )

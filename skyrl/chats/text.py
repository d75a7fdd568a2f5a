"""A conversation as a tokenizer's chat template writes it, and its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from skyrl.chats.deadline import bounded
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.errors import DataError, TemplateTimeoutError, TextError

Message = Mapping[str, Any]


def chat_text(tokenizer: ChatTokenizer, messages: Sequence[Message], *, ask: bool, **arguments: object) -> str:
    """The text; `ask` adds the header of an answer. Raises `DataError`, whatever the template raises, and
    `TemplateTimeoutError` for one that computes without an end.
    """
    try:
        with bounded(template_name(tokenizer)):
            text: str = tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=ask, tokenize=False, **arguments
            )
    except TemplateTimeoutError:
        raise
    except Exception as error:  # a template is a program of the model's author: it may raise anything
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise DataError(f"the chat template refuses a conversation of {roles}: {error}") from error
    return text


def template_name(tokenizer: ChatTokenizer) -> str:
    """How messages name the tokenizer's chat template."""
    path = getattr(tokenizer, "name_or_path", "")
    return f"the chat template of {path}" if path else "the chat template"


def text_tokens(tokenizer: ChatTokenizer, text: str, **options: object) -> list[int]:
    """Token ids of a text that may spell special tokens. Raises `TextError` for text that is not Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 20) : error.end + 20]
        raise TextError(f"the text {around!r} holds a lone surrogate, which no tokenizer takes") from error
    quiet = {"verbose": False, **options}  # whoever asked looks at the length; transformers would warn on its own
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, **quiet) if text else []
    return ids


CONTEXT = 32
"""Characters before a text that decide how its first word is read."""


def continued_tokens(tokenizer: ChatTokenizer, before: str, text: str, **options: object) -> list[int]:
    """Token ids of a text that stands behind another one. Raises `TextError` as `text_tokens` does.

    Tokenizers with SentencePiece's pipeline put a space before every text that they are given, which is not there in
    the middle of a conversation. Behind its context a text is read without it, unless a token joins the two.
    """
    alone = text_tokens(tokenizer, text, **options)
    if not before or not text or not puts_a_space_first(tokenizer):
        return alone
    context = text_tokens(tokenizer, before[-CONTEXT:], **options)
    both = text_tokens(tokenizer, before[-CONTEXT:] + text, **options)
    return both[len(context) :] if both[: len(context)] == context else alone


@lru_cache(maxsize=16)
def puts_a_space_first(tokenizer: ChatTokenizer) -> bool:
    """Whether the tokenizer reads a text alone otherwise than behind another one, as SentencePiece's pipeline does."""
    behind = text_tokens(tokenizer, "\na")
    alone = text_tokens(tokenizer, "a")
    return behind[len(behind) - len(alone) :] != alone

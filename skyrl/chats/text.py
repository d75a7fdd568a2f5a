"""A conversation as rendered by a tokenizer's chat template, and its tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from skyrl.chats.deadline import bounded
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.errors import DataError, TemplateTimeoutError, TextError

Message = Mapping[str, Any]


def chat_text(
    tokenizer: ChatTokenizer, messages: Sequence[Message], *, generation_prompt: bool, **arguments: object
) -> str:
    """The text of a conversation, with or without the generation prompt. Raises `DataError` for any exception of the
    template, and `TemplateTimeoutError` if it does not finish.
    """
    roles = ", ".join(str(message.get("role")) for message in messages)
    with _template_of(tokenizer, f"a conversation of {roles}"):
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=generation_prompt,
            tokenize=False,
            **arguments,
        )
    return text


def chat_texts(tokenizer: ChatTokenizer, chats: Sequence[Sequence[Message]], **arguments: object) -> list[str]:
    """The texts of conversations with the generation prompt, rendered in one call. Raises as `chat_text` does."""
    if not chats:
        return []
    with _template_of(tokenizer, f"one of {len(chats)} conversations", len(chats)):
        texts: list[str] = tokenizer.apply_chat_template(
            [list(messages) for messages in chats], add_generation_prompt=True, tokenize=False, **arguments
        )
    return texts


@contextmanager
def _template_of(tokenizer: ChatTokenizer, rendered: str, chats: int = 1) -> Iterator[None]:
    """A block that runs the tokenizer's template, within its time, and whose exceptions name what is `rendered`."""
    try:
        with bounded(template_name(tokenizer), chats):
            yield
    except TemplateTimeoutError:
        raise
    except Exception as error:  # a template is a program of the model's author: it may raise anything
        raise DataError(f"the chat template refuses {rendered}: {error}") from error


def placeholder(name: str) -> str:
    """A text that stands for something while a template renders a conversation, such as "skyrl-3f...-answer". It is
    drawn for each process, so no page, tool or policy can write it.
    """
    return f"skyrl-{os.urandom(8).hex()}-{name}"


def template_name(tokenizer: ChatTokenizer) -> str:
    """Name of the tokenizer's chat template for error messages."""
    path = getattr(tokenizer, "name_or_path", "")
    return f"the chat template of {path}" if path else "the chat template"


def text_tokens(tokenizer: ChatTokenizer, text: str, **options: object) -> list[int]:
    """Token ids of a text that may spell special tokens. Raises `TextError` for text that is not Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 20) : error.end + 20]
        raise TextError(f"the text {around!r} contains a lone surrogate, which no tokenizer accepts") from error
    quiet = {"verbose": False, **options}  # callers check the length themselves
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, **quiet) if text else []
    return ids


def encoded(tokenizer: ChatTokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, tokenized together. Raises whatever the tokenizer raises for a text that it refuses."""
    if not texts:
        return []
    return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]


CONTEXT = 32
"""Number of characters before a text that determine how its first word is tokenized."""


def continued_tokens(tokenizer: ChatTokenizer, before: str, text: str, **options: object) -> list[int]:
    """Token ids of a text that follows another one. Raises `TextError` as `text_tokens` does.

    Tokenizers with SentencePiece's pipeline put a space before every text, which would be wrong in the middle of a
    conversation. After its context a text is tokenized without that space, unless a token joins the two.
    """
    tokens = text_tokens(tokenizer, text, **options)
    if not before or not text or not puts_a_space_first(tokenizer):
        return tokens
    context = text_tokens(tokenizer, before[-CONTEXT:], **options)
    both = text_tokens(tokenizer, before[-CONTEXT:] + text, **options)
    return both[len(context) :] if both[: len(context)] == context else tokens


@lru_cache(maxsize=16)
def puts_a_space_first(tokenizer: ChatTokenizer) -> bool:
    """Whether the tokenizer splits a text differently on its own than after another text, as SentencePiece's pipeline
    does.
    """
    behind = text_tokens(tokenizer, "\na")
    tokens = text_tokens(tokenizer, "a")
    return behind[len(behind) - len(tokens) :] != tokens

"""A conversation as a tokenizer's chat template writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.errors import DataError


def chat_text(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, ask: bool, **arguments: Any) -> str:
    """The text; `ask` adds the header of an answer. Raises `DataError`, whatever the template raises."""
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=ask, tokenize=False, **arguments
        )
    except Exception as error:  # a template is a program of the model's author: it may raise anything
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise DataError(f"the chat template refuses a conversation of {roles}: {error}") from error
    return text

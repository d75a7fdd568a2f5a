"""A tokenizer that refuses a long text by its beginning, so that megabytes are not tokenized to be refused then."""

from __future__ import annotations

from typing import cast

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.errors import RequestError

CHARACTERS_PER_TOKEN = 8
"""Characters per token of a prompt that are not looked at twice: more than text in any language has."""


def bounded_tokenizer(tokenizer: ChatTokenizer, most: int) -> ChatTokenizer:
    """The tokenizer for prompts of at most `most` tokens, with `_Bounded.encode` as its `encode`."""
    return cast(ChatTokenizer, _Bounded(tokenizer, most))


class _Bounded:
    """A tokenizer whose `encode` has a bound; everything else is the tokenizer's own."""

    def __init__(self, tokenizer: ChatTokenizer, most: int) -> None:
        self._tokenizer, self._most = tokenizer, most

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str, /, *, add_special_tokens: bool = True, **options: object) -> list[int]:
        """Token ids of a text. Raises `RequestError` for one whose beginning alone has more tokens than fit.

        Beginnings of growing length are tokenized, so that the work is bounded by what fits and not by the text. As a
        text goes on, the last word of its beginning may be tokenized differently; half as many tokens again as fit
        are therefore allowed here, and the exact number is the caller's to check.
        """
        size = CHARACTERS_PER_TOKEN * self._most
        while size < len(text):
            count = len(self._tokenizer.encode(text[:size], add_special_tokens=add_special_tokens, **options))
            if 2 * count > 3 * self._most:
                lengths = f"the prompt has more than {count - 1} tokens"
                raise RequestError(
                    f"{lengths}, and prompt and answer together may have {self._most}", code="context_length_exceeded"
                )
            size *= 2
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, **options)

"""Makes texts from outside acceptable to a tokenizer."""

from __future__ import annotations


def tokenizable(text: str) -> str:
    """The text with U+FFFD in place of each lone surrogate, which JSON can spell and UTF-8 cannot hold.

    Two surrogates that make up a character become that character.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

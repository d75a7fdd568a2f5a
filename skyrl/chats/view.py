"""A row of training as text, with the tokens that are learned marked."""

from __future__ import annotations

from itertools import groupby

from skyrl.chats.masks import Ids, Mask
from skyrl.chats.tokenizer import ChatTokenizer

OPEN, CLOSE = "⟦", "⟧"
"""Marks around learned text."""


def marked_text(tokenizer: ChatTokenizer, ids: Ids, mask: Mask) -> str:
    """The text of a row, special tokens included, in which what is learned stands between ⟦ and ⟧."""
    pieces = []
    for learned, group in groupby(zip(ids.tolist(), mask.tolist(), strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in group], clean_up_tokenization_spaces=False)
        pieces.append(f"{OPEN}{text}{CLOSE}" if learned else text)
    return "".join(pieces)

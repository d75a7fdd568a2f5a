"""A training row as text, with the learned tokens marked."""

from __future__ import annotations

from itertools import groupby

from skyrl.chats.masks import Ids, Mask, Weights
from skyrl.chats.tokenizer import ChatTokenizer

OPEN, CLOSE = "⟦", "⟧"
"""Marks around learned text."""


def marked_text(tokenizer: ChatTokenizer, ids: Ids, weights: Mask | Weights) -> str:
    """The text of a row, special tokens included, with learned parts between ⟦ and ⟧, followed by their weight in the
    loss if it is not 1: `⟦Four.⟧*0.5`.
    """
    pieces = []
    for weight, group in groupby(zip(ids.tolist(), weights.tolist(), strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in group], clean_up_tokenization_spaces=False)
        factor = "" if weight == 1 else f"*{weight:.4g}"
        pieces.append(f"{OPEN}{text}{CLOSE}{factor}" if weight else text)
    return "".join(pieces)

"""Stop strings: looking for them in the text of the newest tokens, and cutting the final text behind them.

Special tokens count as text here, so that `<|im_end|>` can be a stop string although `Completion.text` leaves it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def tail_length(stops: Sequence[str]) -> int:
    """How many of the newest tokens can touch a stop string that the last of them completed.

    A token is at least one byte of text; eight more keep the artefacts of decoding from the middle (half a character,
    a stripped leading space) away from the part that is searched.
    """
    return max(len(stop.encode()) for stop in stops) + 8


def completed(tokenizer: Any, newest: Sequence[int], stops: Sequence[str]) -> bool:
    """Whether the text of the newest tokens holds a stop string. The caller asks after every token."""
    text = tokenizer.decode(newest, skip_special_tokens=False)
    return any(stop in text for stop in stops)


def text_of(tokenizer: Any, token_ids: Sequence[int], stopped_by: Sequence[str]) -> str:
    """The completion without special tokens; where one of `stopped_by` ended it, that is its end."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
    if not stopped_by:
        return text
    ends = [text.find(stop) + len(stop) for stop in stopped_by if stop in text]
    if ends:
        return text[: min(ends)]
    whole = tokenizer.decode(token_ids, skip_special_tokens=False)
    return text + next((stop for stop in stopped_by if stop in whole), "")

"""Stop strings: finds them in the text of the newest tokens, and cuts the final text after them.

Special tokens count as text here, so that `<|im_end|>` can be a stop string although `Completion.text` leaves it out.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyrl.chats.tokenizer import ChatTokenizer


def tail_length(stops: Sequence[str]) -> int:
    """Number of newest tokens that can overlap a stop string completed by the last of them.

    A token is at least one byte of text; eight more tokens keep artefacts of decoding from the middle (half a
    character, a stripped leading space) away from the part that is searched.
    """
    return max(len(stop.encode()) for stop in stops) + 8


def completed(
    tokenizer: ChatTokenizer, newest: Sequence[int], stops: Sequence[str], *, others_stand: bool = False
) -> bool:
    """Whether the text of the newest tokens holds a stop string. Called after every token.

    With `others_stand`, stop strings that earlier tokens completed are ignored: the last token must complete one.
    """
    text = tokenizer.decode(newest, skip_special_tokens=False)
    if not any(stop in text for stop in stops):
        return False
    return not others_stand or _first_stop_end(text, stops, _length(tokenizer, newest[:-1])) is not None


def text_of(tokenizer: ChatTokenizer, token_ids: Sequence[int], stopped_by: Sequence[str], *, least: int = 0) -> str:
    """The completion without special tokens. If one of `stopped_by` ended it, the text ends with that stop string.

    Stop strings completed by the first `least` tokens are ignored.
    """
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
    if not stopped_by:
        return text
    end = _first_stop_end(text, stopped_by, _length(tokenizer, token_ids[:least], skip_special_tokens=True))
    if end is not None:
        return text[:end]
    # The stop string has special tokens: the text is that of the tokens before it, and the stop string itself.
    for first in range(len(token_ids) - 1, -1, -1):
        tail = tokenizer.decode(token_ids[first:], skip_special_tokens=False)
        if stop := next((stop for stop in stopped_by if stop in tail), None):
            before: str = tokenizer.decode(token_ids[:first], skip_special_tokens=True)
            return before + tail[: tail.index(stop)] + stop
    return text


def _first_stop_end(text: str, stops: Sequence[str], after: int) -> int | None:
    """End position of the first stop string that ends beyond `after` characters."""
    matches = [(text.find(stop, max(0, after + 1 - len(stop))), len(stop)) for stop in stops]
    return min((start + length for start, length in matches if start >= 0), default=None)


def _length(tokenizer: ChatTokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> int:
    """Number of characters of these tokens, without an incomplete character at their end."""
    if not token_ids:
        return 0
    text: str = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    return len(text.rstrip("\N{REPLACEMENT CHARACTER}"))

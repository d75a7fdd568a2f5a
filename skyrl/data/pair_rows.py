"""Reads pairs of answers for preference runs.

{"prompt": "...", "chosen": "...", "rejected": "..."}                     answers to a user's text
{"prompt": [messages], "chosen": [messages], "rejected": [messages]}      answers to a chat
{"chosen": [messages], "rejected": [messages]}                            whole chats that begin with the same messages
{"prompt": "...", "chosen": [messages], "rejected": [messages]}           UltraFeedback: whole chats and their prompt
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from skyrl.chats.contents import ALLOW_DROPPED
from skyrl.chats.masks import ChatMasks, Ids, Mask
from skyrl.chats.text import Message
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import PreferenceConfig
from skyrl.data.answer_pairs import PairRow
from skyrl.data.conversations import refuse_media, tools_of, with_system
from skyrl.data.row_forms import preference_chat
from skyrl.data.sources import Row
from skyrl.data.supervised_rows import RowReader, TokenizedRows, load_rows
from skyrl.errors import DataError


def load_pairs(
    sources: Sequence[str], tokenizer: ChatTokenizer, run: PreferenceConfig, max_length: int
) -> TokenizedRows[PairRow]:
    """Every pair of the sources, tokenized. Raises `DataError` for a bad row if `bad_rows` says so, and if no pair is
    left.

    A pair of which one sequence is too long is left out and counted, never cut.
    """
    return load_rows(pair_reader(sources, tokenizer, run, max_length), tokenizer, PairRow)


def pair_reader(
    sources: Sequence[str], tokenizer: ChatTokenizer, run: PreferenceConfig, max_length: int
) -> RowReader[PairRow]:
    """Reads pairs as `load_pairs` does."""
    tokens_of = PairForms(tokenizer, run)

    def read(row: Row, row_id: str) -> PairRow:
        (chosen, chosen_mask), (rejected, rejected_mask) = tokens_of(row)
        return PairRow(
            id=row_id, chosen=chosen, rejected=rejected, chosen_mask=chosen_mask, rejected_mask=rejected_mask
        )

    return RowReader(run, tuple(sources), max_length, read, lambda row: None)


class PairForms:
    """Tokenizes pairs, whatever their form."""

    def __init__(self, tokenizer: ChatTokenizer, run: PreferenceConfig) -> None:
        """`tokenizer` has the run's chat template."""
        self._masks, self._run = ChatMasks(tokenizer, all_messages=True, arguments=run.chat_template_kwargs), run

    def __call__(self, row: Row) -> tuple[tuple[Ids, Mask], tuple[Ids, Mask]]:
        """Tokens of the better and of the worse sequence, each with a mask of its answer: the assistant's messages that
        follow what both chats begin with. Raises `DataError`.
        """
        refuse_media(row)
        run = self._run
        chats = [preference_chat(row, key, run.prompt_key) for key in (run.chosen_key, run.rejected_key)]
        prompt = common_messages(*chats)
        chosen, rejected = (self._tokens(chat, prompt, row) for chat in chats)
        if np.array_equal(chosen[0], rejected[0]):
            raise DataError(f"{run.chosen_key} and {run.rejected_key} are the same")
        return chosen, rejected

    def _tokens(self, chat: list[Message], prompt: int, row: Row) -> tuple[Ids, Mask]:
        run = self._run
        marked: list[Message] = [{**message, "weight": float(place >= prompt)} for place, message in enumerate(chat)]
        whole = with_system(marked, row.get(run.system_key))
        tools = tools_of(row.get(run.tools_key), run.tools_key)
        ids, mask = self._masks(whole, tools, allow_dropped=bool(row.get(ALLOW_DROPPED)))
        mask[:1] = False  # nothing predicts the first token
        if not mask.any():
            raise DataError("an answer has no token")
        return ids, mask


def common_messages(one: Sequence[Message], other: Sequence[Message]) -> int:
    """Number of messages that both chats begin with, at most one less than the shorter has."""
    count = min(len(one), len(other)) - 1
    return next((place for place in range(count) if one[place] != other[place]), count)

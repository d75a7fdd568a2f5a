"""Reads pairs of answers, and ranked lists, for preference runs.

{"prompt": "...", "chosen": "...", "rejected": "..."}                     answers to a user's text
{"prompt": [messages], "chosen": [messages], "rejected": [messages]}      answers to a chat
{"chosen": [messages], "rejected": [messages]}                            whole chats that begin with the same messages
{"prompt": "...", "chosen": [messages], "rejected": [messages]}           UltraFeedback: whole chats and their prompt
{"prompt": "...", "answers": ["...", "..."], "ranks": [2, 1]}             a ranked list, see `ranked_lists.py`
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from skyrl.chats.contents import ALLOW_DROPPED, short
from skyrl.chats.masks import ChatMasks, Ids, Mask
from skyrl.chats.text import Message
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import PreferenceConfig
from skyrl.data.answer_pairs import PairRow, RankedRow
from skyrl.data.conversations import refuse_media, tools_of, with_system
from skyrl.data.ranked_lists import answers_of, refuse_equal
from skyrl.data.sources import Row
from skyrl.data.supervised_rows import RowReader, count_empty
from skyrl.errors import DataError


def pair_reader(
    sources: Sequence[str], tokenizer: ChatTokenizer, run: PreferenceConfig, max_length: int
) -> RowReader[PairRow]:
    """Reads pairs. One of which a sequence is too long is left out and counted, never cut."""
    tokens_of = AnswerForms(tokenizer, run)

    def read(row: Row, row_id: str) -> PairRow:
        (chosen, chosen_mask), (rejected, rejected_mask) = tokens_of(row)
        return PairRow(
            id=row_id, chosen=chosen, rejected=rejected, chosen_mask=chosen_mask, rejected_mask=rejected_mask
        )

    return RowReader(run, tuple(sources), max_length, read, lambda row: None, count_empty(tokens_of.masks))


def ranked_reader(
    sources: Sequence[str], tokenizer: ChatTokenizer, run: PreferenceConfig, max_length: int
) -> RowReader[RankedRow]:
    """Reads ranked lists. One of which a sequence is too long is left out and counted, never cut."""
    tokens_of = AnswerForms(tokenizer, run)

    def read(row: Row, row_id: str) -> RankedRow:
        return RankedRow(id=row_id, sides=tuple(tokens_of(row)))

    return RowReader(run, tuple(sources), max_length, read, lambda row: None, count_empty(tokens_of.masks))


class AnswerForms:
    """Tokenizes the answers of rows, whatever their form."""

    def __init__(self, tokenizer: ChatTokenizer, run: PreferenceConfig) -> None:
        """`tokenizer` has the run's chat template."""
        self.masks, self._run = ChatMasks(tokenizer, all_messages=True, arguments=run.chat_template_kwargs), run

    def __call__(self, row: Row) -> list[tuple[Ids, Mask]]:
        """Tokens of the sequences from the best to the worst, each with a mask of its answer: the assistant's messages
        that follow what all chats begin with. Raises `DataError`.
        """
        refuse_media(row)
        chats = answers_of(row, self._run)
        prompt = min(common_messages(chats[0], other) for other in chats[1:])
        sequences = [self._tokens(chat, prompt, row) for chat in chats]
        refuse_equal([ids for ids, _ in sequences], self._run, np.array_equal)  # texts may differ, and their tokens not
        _refuse_other_prompts(chats, prompt)
        return sequences

    def _tokens(self, chat: list[Message], prompt: int, row: Row) -> tuple[Ids, Mask]:
        run = self._run
        marked: list[Message] = [{**message, "weight": float(index >= prompt)} for index, message in enumerate(chat)]
        messages = with_system(marked, row.get(run.system_key))
        tools = tools_of(row.get(run.tools_key), run.tools_key)
        ids, mask = self.masks(messages, tools, allow_dropped=bool(row.get(ALLOW_DROPPED)))
        mask[:1] = False  # nothing predicts the first token
        if not mask.any():
            raise DataError("an answer has no token")
        return ids, mask


def _refuse_other_prompts(chats: Sequence[Sequence[Message]], common: int) -> None:
    """Raises `DataError` if the chats of a row, of which `common` messages are the same, differ before the assistant
    has said anything.
    """
    if any(message.get("role") == "assistant" for message in chats[0][:common]):
        return
    (role, content), *others = [(chat[common].get("role"), chat[common].get("content")) for chat in chats]
    if any(other != (role, content) and (other[0], role) != ("assistant", "assistant") for other in others):
        raise DataError(
            f"its chats differ before the answers, in a message of {role} ({short(content)}): all answers of a row "
            "have the same prompt"
        )


def common_messages(one: Sequence[Message], other: Sequence[Message]) -> int:
    """Number of messages that both chats begin with, at most one less than the shorter has."""
    count = min(len(one), len(other)) - 1
    return next((index for index in range(count) if one[index] != other[index]), count)

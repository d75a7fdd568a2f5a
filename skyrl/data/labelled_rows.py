"""Reads single answers with labels for KTO, and decides which rows a preference run has.

{"prompt": "...", "completion": "...", "label": true}                     an answer to a user's text
{"prompt": [messages], "completion": [messages], "label": false}          an answer to a chat
{"completion": [messages], "label": true}                                 a whole chat, whose last answer is judged
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl.chats.contents import ALLOW_DROPPED
from skyrl.chats.masks import ChatMasks
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import PreferenceConfig
from skyrl.data.answer_pairs import LabelledRow, PairRow, RankedRow
from skyrl.data.conversations import refuse_media, tools_of, with_system
from skyrl.data.pair_rows import pair_reader, ranked_reader
from skyrl.data.row_forms import label_of, preference_chat
from skyrl.data.sources import Row
from skyrl.data.supervised_rows import RowReader, TokenizedRows, count_empty, load_rows
from skyrl.errors import DataError


def load_preference_rows(
    sources: Sequence[str], tokenizer: ChatTokenizer, run: PreferenceConfig, max_length: int
) -> TokenizedRows[Any]:
    """Every row of the sources, tokenized: pairs, ranked lists, or single answers, as the losses want them. Raises
    `DataError` for a bad row if `bad_rows` says so, and if no row is left.
    """
    kind: Any = LabelledRow if run.unpaired else PairRow if run.num_answers == 2 else RankedRow
    return load_rows(preference_rows_reader(sources, tokenizer, run, max_length), tokenizer, kind)


def preference_rows_reader(
    sources: Sequence[str], tokenizer: ChatTokenizer, run: PreferenceConfig, max_length: int
) -> RowReader[Any]:
    """Reads rows as `load_preference_rows` does."""
    reader = labelled_reader if run.unpaired else pair_reader if run.num_answers == 2 else ranked_reader
    return reader(sources, tokenizer, run, max_length)


def labelled_reader(
    sources: Sequence[str], tokenizer: ChatTokenizer, run: PreferenceConfig, max_length: int
) -> RowReader[LabelledRow]:
    """Reads single answers with labels. The last message of the assistant is the answer."""
    masks = ChatMasks(tokenizer, arguments=run.chat_template_kwargs)

    def read(row: Row, row_id: str) -> LabelledRow:
        refuse_media(row)
        chat = with_system(preference_chat(row, run.completion_key, run.prompt_key), row.get(run.system_key))
        tools = tools_of(row.get(run.tools_key), run.tools_key)
        ids, mask = masks(chat, tools, allow_dropped=bool(row.get(ALLOW_DROPPED)))
        mask[:1] = False  # nothing predicts the first token
        if not mask.any():
            raise DataError("the answer has no token")
        return LabelledRow(id=row_id, token_ids=ids, mask=mask, label=label_of(row.get(run.label_key), run.label_key))

    return RowReader(run, tuple(sources), max_length, read, lambda row: None, count_empty(masks))

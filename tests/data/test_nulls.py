"""Null in each column that a reader of rows knows: the row is bad, with its number, or reads as it does without the
column. Parquet and JSON lines agree.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl.config import PreferenceConfig, RewardModelConfig, SFTConfig
from skyrl.data.preference_rows import load_preference_rows
from skyrl.data.prompts import load_prompts
from skyrl.data.sources import Columns
from skyrl.data.supervised_rows import load_preferences, load_supervised
from skyrl.errors import DataError
from tests.rollout.chats import chat_tokenizer

Row = Mapping[str, Any]

TOKENIZER = chat_tokenizer()
ASK, ANSWER, OTHER = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "x"), ("assistant", "y"))
)


def sft(file: str) -> list[bytes]:
    return [row.to_bytes() for row in load_supervised([file], TOKENIZER, SFTConfig(), 1000).rows]


def compared(file: str, loss: str = "sigmoid") -> list[bytes]:
    run = PreferenceConfig(loss_type=(loss,))
    return [row.to_bytes() for row in load_preference_rows([file], TOKENIZER, run, 1000).rows]


def scored(file: str) -> list[bytes]:
    return [row.to_bytes() for row in load_preferences([file], TOKENIZER, RewardModelConfig(), 1000).rows]


def prompts(file: str, prompt: str = "prompt", answer: str | None = None) -> list[object]:
    columns = Columns(prompt=prompt, answer=answer)
    dataset = load_prompts([file], TOKENIZER, env_class="gsm8k", max_prompt_length=1000, columns=columns)
    return [(prompt.token_ids, prompt.env_class, prompt.data_source, prompt.extras) for prompt in dataset.prompts]


TOKENS = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "attention_mask": [1, 1, 1]}
READERS: dict[str, tuple[Callable[[str], Sequence[object]], Row, tuple[str, ...]]] = {
    "chat": (sft, {"messages": [ASK, ANSWER], "system": "be short"}, ("messages",)),
    "ShareGPT": (
        sft,
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "x"}]},
        ("conversations",),
    ),
    "Alpaca": (sft, {"instruction": "q", "input": "i", "output": "x"}, ("instruction", "output")),
    "completed text": (sft, {"prompt": "q", "completion": "x"}, ("prompt", "completion")),
    "completed chat": (sft, {"prompt": [ASK], "completion": [ANSWER]}, ("prompt", "completion")),
    "text": (sft, {"text": "hello"}, ("text",)),
    "tokens": (sft, TOKENS, ("input_ids", "labels")),
    "masked tokens": (sft, {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, ("input_ids", "loss_mask")),
    "pair of texts": (compared, {"prompt": "q", "chosen": "x", "rejected": "y"}, ("prompt", "chosen", "rejected")),
    "pair of chats": (
        compared,
        {"prompt": [ASK], "chosen": [ANSWER], "rejected": [OTHER]},
        ("prompt", "chosen", "rejected"),
    ),
    "whole chats": (compared, {"chosen": [ASK, ANSWER], "rejected": [ASK, OTHER]}, ("chosen", "rejected")),
    "ranked": (compared, {"prompt": "q", "answers": ["x", "y"], "ranks": [1, 2]}, ("prompt", "answers", "ranks")),
    "labelled": (
        partial(compared, loss="kto"),
        {"prompt": "q", "completion": "x", "label": True},
        ("prompt", "completion", "label"),
    ),
    "scored": (
        scored,
        {"prompt": "q", "chosen": "x", "rejected": "y", "margin": 1.0},
        ("prompt", "chosen", "rejected"),
    ),
    "prompt": (
        prompts,
        {
            "prompt": [ASK],
            "env_class": "aime",
            "reward_spec": {"ground_truth": "4"},
            "data_source": "d",
            "extra_info": {"a": 1},
        },
        ("prompt",),
    ),
    "question": (
        partial(prompts, prompt="question", answer="answer"),
        {"question": "q", "answer": "4"},
        ("question", "answer"),
    ),
}
"""For each form of rows, its reader, a row, and the columns that every row needs."""

MEDIA = {"images": None, "audio": None}


def files(folder: Path, *rows: Row) -> list[str]:
    lines, table = folder / "rows.jsonl", folder / "rows.parquet"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), table)
    return [str(lines), str(table)]


@pytest.mark.parametrize("form", READERS)
def test_a_row_of_which_a_needed_column_is_null_is_bad(form: str, tmp_path: Path) -> None:
    read, row, needed = READERS[form]
    for column in needed:
        for file in files(tmp_path, row, {**row, column: None}):
            with pytest.raises(DataError, match="rows.*, row 1"):
                read(file)


@pytest.mark.parametrize("form", READERS)
def test_any_other_column_that_is_null_is_none(form: str, tmp_path: Path) -> None:
    read, row, needed = READERS[form]
    for column in {*row, *MEDIA} - {*needed}:
        without = {name: value for name, value in row.items() if name != column}
        [expected] = read(files(tmp_path, without)[0])
        for file in files(tmp_path, {**row, **MEDIA}, {**row, column: None}):
            assert read(file)[1] == expected, column


@pytest.mark.parametrize("calls", [3, "[]", {"name": "add"}, ["add"]])
@pytest.mark.parametrize("form", ["chat", "completed chat", "pair of chats", "whole chats", "prompt"])
def test_a_message_whose_tool_calls_are_no_list_of_tables_is_bad(form: str, calls: object, tmp_path: Path) -> None:
    read, row, _ = READERS[form]
    for column in (name for name, value in row.items() if isinstance(value, list)):
        chat = [*row[column][:-1], {**row[column][-1], "tool_calls": calls}]
        for file in files(tmp_path, {**row, column: chat}):
            with pytest.raises(DataError, match="rows.*, row 0.* tool_calls that are not a list of tables"):
                read(file)


@pytest.mark.parametrize("part", ["role", "content"])
@pytest.mark.parametrize("form", ["chat", "completed chat", "pair of chats", "whole chats", "prompt"])
def test_a_message_of_which_a_part_is_null_is_bad(form: str, part: str, tmp_path: Path) -> None:
    read, row, _ = READERS[form]
    for column in (name for name, value in row.items() if isinstance(value, list)):
        chat = [*row[column][:-1], {**row[column][-1], part: None}]
        for file in files(tmp_path, row, {**row, column: chat}):
            with pytest.raises(DataError, match="rows.*, row 1"):
                read(file)

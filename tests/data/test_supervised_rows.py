"""Rows of supervised training, in each of their forms, and what becomes of bad ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from skyrl.config import RewardModelConfig, SFTConfig
from skyrl.data.supervised_rows import Rows, load_preferences, load_supervised
from skyrl.errors import DataError
from tests.rollout.chats import chat_tokenizer

TOKENIZER = chat_tokenizer()


def load(folder: Path, rows: Sequence[Mapping[str, Any]], max_length: int = 1000, **settings: Any) -> Rows[Any]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_supervised((str(file),), TOKENIZER, SFTConfig(**settings), max_length)


def said(rows: Rows[Any]) -> list[tuple[str, str]]:
    """The text of each row, and what is learned of it."""
    return [(TOKENIZER.decode(row.token_ids), TOKENIZER.decode(row.token_ids[row.loss_mask])) for row in rows.rows]


def test_a_chat_takes_its_system_message_and_columns_of_other_names(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    rows = load(tmp_path, [{"chat": chat, "system": "be short"}], messages_key="chat")
    [(whole, learned)] = said(rows)
    assert whole.startswith("<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nhi<|im_end|>")
    assert learned == "yo<|im_end|>"


def test_tools_are_shown_and_calls_are_learned_whether_they_are_a_list_or_its_text(tmp_path: Path) -> None:
    template = (
        "{% for t in tools or [] %}{{ t.name }}<|im_end|>{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.name }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = chat_tokenizer(template)
    chat = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "look", "tool_calls": [{"name": "find"}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "four"},
    ]
    rows = [{"messages": chat, "functions": [{"name": "find"}]}, {"messages": chat, "functions": '[{"name": "find"}]'}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run = SFTConfig(tools_key="functions", train_on_what="all_assistant_messages")
    one, two = load_supervised((str(file),), tokenizer, run, 1000).rows
    assert one.token_ids.tolist() == two.token_ids.tolist() and one.loss_mask.tolist() == two.loss_mask.tolist()
    assert tokenizer.decode(one.token_ids).startswith("find<|im_end|><|im_start|>user\n?")
    assert tokenizer.decode(one.token_ids[one.loss_mask]) == "look<call>find</call><|im_end|>four<|im_end|>"


def test_alpacas_input_stands_below_its_instruction(tmp_path: Path) -> None:
    rows = load(
        tmp_path, [{"instruction": "Sort.", "input": "ba", "output": "ab"}, {"instruction": "Say.", "output": "x"}]
    )
    (first, learned), (second, _) = said(rows)
    assert "user\nSort.\n\nba<|im_end|>" in first and learned == "ab<|im_end|>"
    assert "user\nSay.<|im_end|>" in second


def test_tokenized_rows_are_taken_as_they_are_but_for_the_first_token_which_nothing_predicts(tmp_path: Path) -> None:
    rows = load(
        tmp_path, [{"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, {"input_ids": [5, 6], "loss_mask": [1, 1]}]
    )
    assert [row.token_ids.tolist() for row in rows.rows] == [[5, 6, 7], [5, 6]]
    assert [row.loss_mask.tolist() for row in rows.rows] == [[False, False, True], [False, True]]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"text": "hi"}, "it has neither messages"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "no message is an assistant's"),
        ({"messages": "hi"}, "not a list of messages"),
        ({"input_ids": [5, 6], "labels": [6, 7]}, "labels are neither input_ids nor -100"),
        ({"input_ids": [5, 6], "labels": [-100, -100]}, "no token of it is learned"),
        ({"input_ids": [5, 6], "labels": [5]}, "2 input_ids have 1 labels"),
        ({"input_ids": [5, 6.5]}, "input_ids is [5, 6.5], not a list of whole numbers"),
        ({"input_ids": [5, [6]]}, "input_ids is [5, [6]], not a list of whole numbers"),
        ({"input_ids": "56"}, "input_ids is '56', not a list of whole numbers"),
        ({"input_ids": [5, -6]}, "input_ids go from -6 to 5"),
        ({"input_ids": [5, 1_000_000]}, "input_ids go from 5 to 1000000"),
        ({"input_ids": [5, 6], "loss_mask": [0, 2]}, "loss_mask has other numbers than 0 and 1"),
        ({"input_ids": [5, 6], "loss_mask": [0, 0.5]}, "not a list of whole numbers"),
    ],
)
def test_a_bad_row_stops_with_its_place_or_is_counted(tmp_path: Path, row: Mapping[str, Any], why: str) -> None:
    good = {"input_ids": [5, 6]}
    with pytest.raises(DataError, match="row 1: .*"):
        load(tmp_path, [good, row])
    rows = load(tmp_path, [good, row], bad_rows="skip")
    assert len(rows) == 1 and why in rows.bad_rows[0]


def test_longer_rows_are_left_out_or_cut(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6]}, {"input_ids": list(range(1, 9))}]
    assert (load(tmp_path, rows, 4).too_long, len(load(tmp_path, rows, 4))) == (1, 1)
    cut = load(tmp_path, rows, 4, too_long="truncate")
    assert cut.rows[1].token_ids.tolist() == [1, 2, 3, 4] and cut.too_long == 0


def test_pairs_are_answers_to_a_prompt_or_whole_chats(tmp_path: Path) -> None:
    ask, one, two = (
        {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "x"), ("assistant", "y"))
    )
    file = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "q", "chosen": "x", "rejected": "y"}, {"chosen": [ask, one], "rejected": [ask, two]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    first, second = load_preferences((str(file),), TOKENIZER, RewardModelConfig(), 1000).rows
    assert first.chosen.tolist() == second.chosen.tolist() and first.rejected.tolist() == second.rejected.tolist()
    assert "assistant\nx<|im_end|>" in TOKENIZER.decode(first.chosen)


def test_a_pair_without_one_side_is_told_its_columns(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "q", "chosen": "x"}) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match="row 0: it has no rejected .*; its columns are prompt, chosen"):
        load_preferences((str(file),), TOKENIZER, RewardModelConfig(), 1000)

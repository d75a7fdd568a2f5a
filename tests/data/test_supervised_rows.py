"""Rows of supervised training, in each of their forms, and what becomes of bad ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl.chats.contents import Blanks
from skyrl.chats.examples import ADD
from skyrl.config import RewardModelConfig, SFTConfig
from skyrl.data.supervised_rows import TokenizedRows, load_preferences, load_supervised
from skyrl.errors import DataError
from tests.chats.corpus import tokenizer_of
from tests.rollout.chats import chat_tokenizer
from tests.supervised_run import write

TOKENIZER = chat_tokenizer()


def load(
    folder: Path, rows: Sequence[Mapping[str, Any]], max_length: int = 1000, **settings: Any
) -> TokenizedRows[Any]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_supervised((str(file),), TOKENIZER, SFTConfig(**settings), max_length)


def said(rows: TokenizedRows[Any]) -> list[tuple[str, str]]:
    """The text of each row, and what is learned of it."""
    return [(TOKENIZER.decode(row.token_ids), TOKENIZER.decode(row.token_ids[row.loss_mask])) for row in rows.rows]


def test_a_chat_takes_its_system_message_and_columns_of_other_names(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    rows = load(tmp_path, [{"chat": chat, "system": "be short"}], messages_key="chat")
    [(text, learned)] = said(rows)
    assert text.startswith("<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nhi<|im_end|>")
    assert learned == "yo<|im_end|>"


def test_empty_prompts_and_answers_are_counted(tmp_path: Path) -> None:
    question, silence = {"role": "user", "content": "hi"}, {"role": "user", "content": " "}
    rows: list[dict[str, Any]] = [
        {"messages": [question, {"role": "assistant", "content": ""}]},
        {"prompt": [question], "completion": [{"role": "assistant", "content": "yo"}]},
        {"prompt": "hi", "completion": ""},
        {"messages": [{"role": "system", "content": "be short"}, silence, {"role": "assistant", "content": "yo"}]},
        {"prompt": "", "completion": "yo"},
        {"messages": [silence, question, {"role": "assistant", "content": "yo"}]},
        {"messages": [{"role": "assistant", "content": "yo"}]},
        {"text": "yo"},
        {"text": " "},
    ]
    assert load(tmp_path, rows).tally.blanks == Blanks(prompts=2, answers=3)


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
    first, second = load_supervised((str(file),), tokenizer, run, 1000).rows
    assert (
        first.token_ids.tolist() == second.token_ids.tolist() and first.loss_mask.tolist() == second.loss_mask.tolist()
    )
    assert tokenizer.decode(first.token_ids).startswith("find<|im_end|><|im_start|>user\n?")
    assert tokenizer.decode(first.token_ids[first.loss_mask]) == "look<call>find</call><|im_end|>four<|im_end|>"


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
    ("row", "reason"),
    [
        ({"words": "hi"}, "it has neither messages"),
        ({"text": "what?", "images": [{"bytes": "x"}]}, "it has images, and this version trains on text alone"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part of type 'image'"),
        ({"messages": '[{"role": '}, "messages is not JSON"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "a turn in conversations is from 'alien'"),
        ({"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}, "not both texts, nor both lists"),
        ({"prompt": "a", "completion": "\ud800"}, "lone surrogate"),
        (
            {"messages": [{"role": "user", "content": "a\udfff"}, {"role": "assistant", "content": "b"}]},
            "lone surrogate",
        ),
        ({"input_ids": [5, 6], "attention_mask": [1, 2]}, "attention_mask has other numbers than 0 and 1"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "no message is from the assistant"),
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
def test_a_bad_row_stops_with_its_place_or_is_counted(tmp_path: Path, row: Mapping[str, Any], reason: str) -> None:
    good = {"input_ids": [5, 6]}
    with pytest.raises(DataError, match="row 1: .*"):
        load(tmp_path, [good, row])
    rows = load(tmp_path, [good, row], bad_rows="skip")
    assert len(rows) == 1 and reason in rows.tally.bad_rows[0]


def test_longer_rows_are_left_out_or_cut(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6]}, {"input_ids": list(range(1, 9))}]
    assert (load(tmp_path, rows, 4).tally.too_long, len(load(tmp_path, rows, 4))) == (1, 1)
    cut = load(tmp_path, rows, 4, too_long="truncate")
    assert cut.rows[1].token_ids.tolist() == [1, 2, 3, 4] and (cut.tally.too_long, cut.tally.cut) == (0, 1)


def test_pairs_are_answers_to_a_prompt_or_whole_chats(tmp_path: Path) -> None:
    question, chosen, rejected = (
        {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "x"), ("assistant", "y"))
    )
    file = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": "q", "chosen": "x", "rejected": "y"},
        {"chosen": [question, chosen], "rejected": [question, rejected]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    first, second = load_preferences((str(file),), TOKENIZER, RewardModelConfig(), 1000).rows
    assert first.chosen.tolist() == second.chosen.tolist() and first.rejected.tolist() == second.rejected.tolist()
    assert "assistant\nx<|im_end|>" in TOKENIZER.decode(first.chosen)


def test_a_pair_without_one_side_is_told_its_columns(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "q", "chosen": "x"}) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match="row 0: it has no rejected .*; its columns are prompt, chosen"):
        load_preferences((str(file),), TOKENIZER, RewardModelConfig(), 1000)


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": json.dumps(CHAT)},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, CHAT[1]]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
        {"conversations": CHAT},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"instruction": "hi", "input": "", "output": "yo"},
    ],
)
def test_the_same_chat_has_the_same_tokens_in_every_form(tmp_path: Path, row: Mapping[str, Any]) -> None:
    assert said(load(tmp_path, [row])) == said(load(tmp_path, [{"messages": CHAT}]))


def test_a_completion_is_learned_and_the_answers_before_it_are_not(tmp_path: Path) -> None:
    prompt = [*CHAT, {"role": "user", "content": "more"}]
    row = {"prompt": prompt, "completion": [{"role": "assistant", "content": "yes"}]}
    [(_, learned)] = said(load(tmp_path, [row], train_on_what="all_assistant_messages"))
    assert learned == "yes<|im_end|>"


def test_all_tokens_of_a_chat_are_learned_and_of_a_completion_only_its_own(tmp_path: Path) -> None:
    prompt = [*CHAT, {"role": "user", "content": "more"}]
    completion = [CHAT[1], CHAT[0], {"role": "assistant", "content": "yes"}]
    rows = [{"messages": CHAT}, {"prompt": prompt, "completion": completion}]
    [(full_text, first), (text, second)] = said(load(tmp_path, rows, train_on_what="all_tokens"))
    assert first == full_text.removeprefix("<|im_start|>") and "hi" in first  # nothing predicts the first token
    assert second == text[text.rindex("yo") :] and second.count("hi") == 1


def test_plain_text_is_learned_without_a_template(tmp_path: Path) -> None:
    rows = load(tmp_path, [{"prompt": "2+2=", "completion": "4"}, {"text": "ab<|im_end|>"}])
    assert said(rows) == [("2+2=4<|im_end|>", "4<|im_end|>"), ("ab<|im_end|>", "b<|im_end|>")]


def test_a_call_of_sharegpt_is_a_call(tmp_path: Path) -> None:
    turns = [
        {"from": "human", "value": "?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "four"},
    ]
    file = write(tmp_path / "rows.jsonl", [{"conversations": turns}])
    run = SFTConfig(train_on_what="all_assistant_messages")
    (row,) = load_supervised((file,), tokenizer_of("chatml"), run, 1000).rows
    learned = tokenizer_of("chatml").decode(row.token_ids[row.loss_mask])
    assert learned == '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>four<|im_end|>'


def test_the_nulls_of_a_table_are_nothing_that_a_call_or_a_tool_says(tmp_path: Path) -> None:
    """A column of a table has one type: the arguments of each call have the names of all calls."""
    calls = [{"name": "add", "arguments": {"a": 2, "b": 2, "city": None}}, {"name": "see", "arguments": {"city": "X"}}]
    chats = [
        [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}] for function in calls
    ]
    tools = [{"function": {"name": name, "enum": [None]}} for name in ("add", "see")]
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": chat, "tools": tools} for chat in chats]), file)
    first, second = load_supervised((str(file),), tokenizer_of("chatml"), SFTConfig(), 1000).rows
    assert '"arguments": {"a": 2, "b": 2}}' in tokenizer_of("chatml").decode(first.token_ids)
    assert '"arguments": {"city": "X"}}' in tokenizer_of("chatml").decode(second.token_ids)


def test_the_nulls_of_json_lines_are_what_a_call_says(tmp_path: Path) -> None:
    call = {"function": {"name": "see", "arguments": {"city": None}}}
    chat = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    file = write(tmp_path / "rows.jsonl", [{"messages": chat}])
    (row,) = load_supervised((file,), tokenizer_of("chatml"), SFTConfig(), 1000).rows
    assert '{"name": "see", "arguments": {"city": null}}' in tokenizer_of("chatml").decode(row.token_ids)


@pytest.mark.parametrize("name", ["loss_mask", "assistant_masks", "completion_mask"])
def test_masks_of_tokenized_rows_are_kept_and_padding_is_left_out(tmp_path: Path, name: str) -> None:
    row = {"input_ids": [5, 6, 7, 0, 0], "attention_mask": [1, 1, 1, 0, 0], name: [0, 0, 1, 1, 1]}
    (tokenized,) = load(tmp_path, [row]).rows
    assert tokenized.token_ids.tolist() == [5, 6, 7] and tokenized.loss_mask.tolist() == [False, False, True]


def test_a_csv_file_is_rows_of_text(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('instruction,input,output\nSort.,"b\na",ab\nSay.,,x\n', encoding="utf-8")
    rows = load_supervised((str(file),), TOKENIZER, SFTConfig(), 1000)
    assert "Sort.\n\nb\na<|im_end|>" in said(rows)[0][0] and "Say.<|im_end|>" in said(rows)[1][0]
    file.write_text("instruction,output\na,b\nc\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"rows.csv:3 has more or fewer cells"):
        load_supervised((str(file),), TOKENIZER, SFTConfig(), 1000)


def test_a_row_that_moved_between_sources_is_another_data_set(tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{name}.jsonl", [{"input_ids": [5, 6]}] * count)
        for name, count in zip("abcd", (1, 3, 2, 2), strict=True)
    ]
    first, second = (load_supervised(pair, TOKENIZER, SFTConfig(), 9) for pair in (files[:2], files[2:]))
    assert (first.sizes, second.sizes) == ((1, 3), (2, 2)) and first.fingerprint != second.fingerprint


def test_thoughts_that_are_left_out_are_accepted_where_the_row_says_so(tmp_path: Path) -> None:
    row = {"messages": [CHAT[0], {**CHAT[1], "reasoning_content": "hm"}]}
    with pytest.raises(DataError, match="row 0: the chat template leaves out the thoughts"):
        load(tmp_path, [row])
    assert said(load(tmp_path, [{**row, "allow_dropped_content": True}]))[0][1] == "yo<|im_end|>"


PAIR = {"chosen": [CHAT[0], CHAT[1]], "rejected": [CHAT[0], {"role": "assistant", "content": "no"}]}


def texts_of_pairs(folder: Path, row: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    file = write(folder / "pairs.jsonl", [dict(row)])
    rows = load_preferences((file,), tokenizer_of("chatml"), RewardModelConfig(), 1000).rows
    decode = tokenizer_of("chatml").decode
    return [(decode(pair.chosen), decode(pair.rejected), pair.margin) for pair in rows]


def test_ultrafeedbacks_pairs_ask_once(tmp_path: Path) -> None:
    assert texts_of_pairs(tmp_path, {"prompt": "hi", **PAIR}) == texts_of_pairs(tmp_path, PAIR)
    with pytest.raises(DataError, match="chosen begins with a message of user, and not with the prompt"):
        texts_of_pairs(tmp_path, {"prompt": "other", **PAIR})


def test_pairs_have_their_system_message_tools_and_margin(tmp_path: Path) -> None:
    row = {"prompt": "q", "chosen": "x", "rejected": "y", "system": "be short", "tools": [ADD], "margin": 0.5}
    [(chosen, rejected, margin)] = texts_of_pairs(tmp_path, row)
    assert all("be short" in text and '"name": "add"' in text for text in (chosen, rejected)) and margin == 0.5
    with pytest.raises(DataError, match="margin is -1, not a number from 0"):
        texts_of_pairs(tmp_path, {**row, "margin": -1})

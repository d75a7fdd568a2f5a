"""A stored answer as a conversation: which text is whose, and which is markup of a template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyrl.tracking.token_file import TokenFiles, TokenTable
from skyrl.viewer.conversation import (
    answer_messages,
    answer_parts,
    answer_tokens,
    excerpt,
    expected_answer,
    is_special,
    last_prompt,
    other_columns,
    stretches,
    text_parts,
)
from tests.viewer_run import SPECIAL, TURNS, group, write

TEMPLATES = {
    "ChatML": "8<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n9<|im_end|>",
    "Llama 3": (
        "8<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nhigher<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n9<|eot_id|>"
    ),
    "Gemma": "8<end_of_turn>\n<start_of_turn>user\nhigher<end_of_turn>\n<start_of_turn>assistant\n9<end_of_turn>",
    "Phi": "8<|end|>\n<|user|>\nhigher<|end|>\n<|assistant|>\n9<|end|>",
    "tiny": "8<|end|><|user|>higher<|end|><|assistant|>9<|end|>",
    "DeepSeek": (
        "8<\uff5cend\u2581of\u2581sentence\uff5c><\uff5cUser\uff5c>higher<\uff5cAssistant\uff5c>9"
        "<\uff5cend\u2581of\u2581sentence\uff5c>"
    ),
    "Harmony": (
        "8<|return|><|start|>user<|message|>higher<|end|><|start|>assistant<|channel|>final<|message|>9<|return|>"
    ),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_an_answer_of_several_turns_is_split_into_them(template: str) -> None:
    parts = text_parts(TEMPLATES[template])
    turns = [(part.role, part.text.strip()) for part in parts]
    assert turns == [("assistant", "8"), ("user", "higher"), ("assistant", "9")]
    assert "".join(fragment.text for part in parts for fragment in part.fragments) == TEMPLATES[template]
    assert excerpt(TEMPLATES[template], 160) == "8 ▸ user: higher ▸ 9"


@pytest.mark.parametrize(
    "text", ["", "plain", "a <b> and x < y", "<think>\nno\n</think>\n4", "if a <| b |> c", "a\n\n", "[INSTALL]"]
)
def test_text_that_only_resembles_markup_stays_content(text: str) -> None:
    [part] = text_parts(text)
    assert (part.role, part.text) == ("assistant", text)
    assert "".join(stretch.text for stretch in stretches(text)) == text


@pytest.mark.parametrize("token", ["<|im_end|>", "</s>", "<end_of_turn>", "<|eot_id|>", "[/INST]", "<pad>"])
def test_a_special_token_is_known_by_its_form(token: str) -> None:
    assert is_special(token) and not is_special(f"{token}a") and not is_special(token[1:])


def test_turns_of_tokens_are_told_by_who_sampled_them(tmp_path: Path) -> None:
    """The header that begins the second turn belongs to it, and what the policy sampled is never another's message."""
    kept = group(1, 0, [TURNS, "▶user\nmine■"])
    write(tmp_path, [[kept]])
    table = TokenFiles(tmp_path / "tokens").read(1, 0)
    ids = [list(sample.response_ids) for sample in kept.trajectories]
    records = [{"prompt_id": "0:0", "sample": n, "response_ids": own} for n, own in enumerate(ids)]
    parts, single = (answer_parts(record, answer_tokens(record, table), "mask") for record in records)
    assert [(part.role, part.text.strip(), part.turn) for part in parts] == [
        ("assistant", "8", 1),
        ("user", "higher", None),
        ("assistant", "9", 2),
    ]
    assert "".join(fragment.text for fragment in parts[2].fragments) == "<|im_start|>assistant\n9<|im_end|>"
    assert [(part.role, part.turn) for part in single] == [("assistant", 1)]
    assert [fragment.text for fragment in single[0].fragments if fragment.is_markup] == list(SPECIAL.values())


def test_rows_of_single_turns_show_what_their_prompts_add() -> None:
    """The second row's prompt is the first row, and what the environment said; in the third, the first answer is
    rewritten, and what followed it is repeated.
    """
    pieces = dict(enumerate(["?", "8", "<|end|>", "<|user|>", "up", "<|assistant|>", "9", "eight", "down", "7"]))
    prompts = [[0], [0, 1, 2, 3, 4, 2, 5], [0, 7, 2, 3, 4, 2, 5, 6, 2, 3, 8, 2, 5]]
    answers = [[1, 2], [6, 2], [9, 2]]
    columns: dict[str, list[Any]] = {
        "prompt_id": ["0:0"] * 3,
        "sample": [0] * 3,
        "prompt_ids": prompts,
        "response_ids": answers,
        "loss_mask": [[True, True]] * 3,
        "weight_versions": [[0, 0]] * 3,
    }
    earlier = [{"response": "", "response_ids": ids} for ids in answers[:2]]
    record = {"prompt_id": "0:0", "sample": 0, "earlier": earlier, "response_ids": answers[2]}
    rows = answer_tokens(record, TokenTable(columns=columns, pieces=pieces))
    turns = [(part.role, part.text) for part in answer_parts(record, rows, "mask")]
    assert turns == [("assistant", "8"), ("user", "up"), ("assistant", "9"), ("user", "down"), ("assistant", "7")]


def test_each_turn_has_its_reward_where_each_has_one() -> None:
    text = TEMPLATES["ChatML"]
    rewarded = answer_messages({"response": text, "turn_rewards": [0.0, 1.0]})
    assert [part.reward for part in rewarded] == [0.0, None, 1.0]
    assert [part.reward for part in answer_messages({"response": text, "turn_rewards": [0.0]})] == [None] * 3


@pytest.mark.parametrize(
    ("record", "expected", "columns"),
    [
        ({}, "", {}),
        ({"ground_truth": "4", "columns": {"ground_truth": "4", "level": 2}}, "4", {"level": "2"}),
        ({"ground_truth": 4}, "4", {}),
        ({"ground_truth": {"target": ["a", "é"]}}, '{"target": ["a", "é"]}', {}),
        ({"ground_truth": None, "columns": ["damaged"]}, "", {}),
    ],
)
def test_the_expected_answer_and_the_other_columns_are_texts(
    record: dict[str, object], expected: str, columns: dict[str, str]
) -> None:
    assert (expected_answer(record), other_columns(record)) == (expected, columns)


def test_the_question_is_the_last_message_that_the_assistant_did_not_begin() -> None:
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is"}]
    assert last_prompt({"prompt": messages}) == "2 + 2?" and last_prompt({}) == ""

"""Pairs of answers as tokens, in each of their forms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl.config import PreferenceConfig
from skyrl.data.preference_rows import ReferencedRows, load_preference_rows, logprobs_file, store_logprobs
from skyrl.data.supervised_rows import TokenizedRows
from skyrl.data.tokenized_rows import LabelledRow, PairRow, RankedRow
from skyrl.errors import DataError
from tests.rollout.chats import chat_tokenizer
from tests.supervised_run import write

TOKENIZER = chat_tokenizer()


def load(folder: Path, *rows: Mapping[str, Any], longest: int = 1000, **settings: Any) -> TokenizedRows[Any]:
    return load_preference_rows(
        [write(folder / "rows.jsonl", [dict(row) for row in rows])], TOKENIZER, PreferenceConfig(**settings), longest
    )


def answers(row: PairRow) -> list[str]:
    """The text that is compared, of both sides."""
    sides = ((row.chosen, row.chosen_mask), (row.rejected, row.rejected_mask))
    return [TOKENIZER.decode(ids[mask]) for ids, mask in sides]


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASK, BETTER, WORSE = said("user", "q"), said("assistant", "x"), said("assistant", "y")
FORMS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "q", "chosen": "x", "rejected": "y"},
    "messages": {"prompt": [ASK], "chosen": [BETTER], "rejected": [WORSE]},
    "whole chats": {"chosen": [ASK, BETTER], "rejected": [ASK, WORSE]},
    "UltraFeedback": {"prompt": "q", "chosen": [ASK, BETTER], "rejected": [ASK, WORSE], "score_chosen": 8.0},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_tokens(tmp_path: Path, form: str) -> None:
    [row] = load(tmp_path, FORMS[form]).rows
    [plain] = load(tmp_path, FORMS["texts"]).rows
    assert row.to_bytes() == plain.to_bytes()
    assert answers(row) == ["x<|im_end|>", "y<|im_end|>"]


@pytest.mark.parametrize("text", ["[1, 2]: sort", "[INST] hi", '[{"name": "x"}]'])
def test_a_text_that_begins_as_a_list_is_a_text(tmp_path: Path, text: str) -> None:
    [row] = load(tmp_path, {"prompt": text, "chosen": text, "rejected": "y"}).rows
    assert answers(row) == [f"{text}<|im_end|>", "y<|im_end|>"]
    assert text in TOKENIZER.decode(row.chosen[~row.chosen_mask])


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ([{**ASK, "id": 1}, BETTER], [{**ASK, "id": 2}, WORSE]),
        ([ASK, BETTER, said("user", "a"), BETTER], [ASK, BETTER, said("user", "b"), WORSE]),
    ],
)
def test_chats_may_differ_in_notes_and_after_an_answer(
    tmp_path: Path, chosen: list[dict[str, Any]], rejected: list[dict[str, Any]]
) -> None:
    [row] = load(tmp_path, {"chosen": chosen, "rejected": rejected}).rows
    assert answers(row) == ["x<|im_end|>", "y<|im_end|>"]


def test_what_both_chats_begin_with_is_their_prompt(tmp_path: Path) -> None:
    begin = [ASK, said("assistant", "both"), said("user", "more")]
    [row] = load(tmp_path, {"chosen": [*begin, BETTER, ASK, BETTER], "rejected": [*begin, WORSE]}).rows
    assert answers(row) == ["x<|im_end|>x<|im_end|>", "y<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "q", "chosen": "x", "rejected": "x"}, "chosen and rejected are the same"),
        ({"prompt": "q", "chosen": "x"}, "it has no rejected"),
        ({"chosen": "x", "rejected": "y"}, "there is no prompt"),
        ({"chosen": [ASK], "rejected": [ASK, WORSE]}, "no message is from the assistant"),
        (
            {"chosen": [said("user", "a"), BETTER], "rejected": [ASK, WORSE]},
            "differ before the answers, in a message of",
        ),
        ({"chosen": [said("system", "s"), ASK, BETTER], "rejected": [ASK, WORSE]}, "in a message of system"),
        ({"prompt": '[{"role": "user", "content":', "chosen": "x", "rejected": "y"}, "prompt is not JSON"),
    ],
)
def test_a_bad_pair_is_told_or_counted(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=f"row 1: .*{reason}"):
        load(tmp_path, FORMS["texts"], row)
    rows = load(tmp_path, FORMS["texts"], row, bad_rows="skip")
    assert len(rows) == 1 and reason in rows.tally.bad_rows[0]


def test_empty_answers_are_counted(tmp_path: Path) -> None:
    call = {"tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    rows: list[dict[str, Any]] = [
        {"prompt": "q", "chosen": " ", "rejected": "y"},
        {"prompt": "q", "chosen": [{**said("assistant", ""), **call}], "rejected": "y", "allow_dropped_content": True},
        {"chosen": [ASK, said("assistant", ""), ASK, BETTER], "rejected": [ASK, said("assistant", ""), ASK, WORSE]},
    ]
    assert load(tmp_path, *rows).tally.empty_answers == 1
    lists = {"prompt": "q", "answers": ["", "x", "y"], "ranks": [1, 2, 3]}
    assert load(tmp_path, lists, num_answers=3).tally.empty_answers == 1
    for count in (1, 2):
        assert load(tmp_path, *[{**lists, "prompt": " "}] * count, num_answers=3).tally.empty_prompts == count
    single = {"prompt": "q", "completion": "", "label": True}
    assert load(tmp_path, single, loss_type=("kto",)).tally.empty_answers == 1


def test_a_pair_with_a_long_side_is_left_out_whole(tmp_path: Path) -> None:
    [row] = load(tmp_path, FORMS["texts"]).rows
    rows = load(tmp_path, FORMS["texts"], {"prompt": "q", "chosen": "x", "rejected": "y" * 99}, longest=row.length)
    assert (len(rows), rows.tally.too_long, rows.tally.cut) == (1, 1, 0)


def test_stored_pairs_are_the_same(tmp_path: Path) -> None:
    in_memory = load(tmp_path, *FORMS.values())
    stored = load(tmp_path, *FORMS.values(), tokenized_path=str(tmp_path / "store"))
    assert [row.to_bytes() for row in stored.rows] == [row.to_bytes() for row in in_memory.rows]
    assert stored.fingerprint == in_memory.fingerprint
    assert np.array_equal(stored.rows[0].rejected_mask, in_memory.rows[0].rejected_mask)


NECTAR: dict[str, Any] = {
    "prompt": "\n\nHuman: a\n\nAssistant: b\n\nHuman: q\n\nAssistant: ",
    "answers": [
        {"answer": "y", "model": "m", "rank": 2.0},
        {"answer": "x", "rank": 1.0},
        {"answer": "zz", "rank": 7.0},
    ],
}
LISTS: dict[str, dict[str, Any]] = {
    "ranks": {"prompt": "q", "answers": ["y", "x", "zz"], "ranks": [2, 1, 3]},
    "scores": {"prompt": [ASK], "answers": [[WORSE], [BETTER], [said("assistant", "zz")]], "scores": [3.5, 7, -1]},
    "whole chats": {"answers": [[ASK, WORSE], [ASK, BETTER], [ASK, said("assistant", "zz")]], "ranks": [2, 1, 3]},
}


@pytest.mark.parametrize("form", LISTS)
def test_a_ranked_list_is_read_from_the_best_answer_to_the_worst(tmp_path: Path, form: str) -> None:
    [row] = load(tmp_path, LISTS[form], num_answers=3).rows
    assert isinstance(row, RankedRow)
    assert [TOKENIZER.decode(ids[mask]) for ids, mask in row.sides] == [
        f"{text}<|im_end|>" for text in ("x", "y", "zz")
    ]
    [first] = load(tmp_path, LISTS["ranks"], num_answers=3).rows
    assert row.to_bytes() == first.to_bytes()
    restored = RankedRow.of_bytes(row.id, row.to_bytes())
    assert restored.to_bytes() == row.to_bytes() and restored.length == row.length
    assert restored.answer_tokens == sum(int(mask.sum()) for _, mask in row.sides)


def test_nectars_dialogues_are_chats(tmp_path: Path) -> None:
    [row] = load(tmp_path, NECTAR, num_answers=4).rows
    turns = [said("user", "a"), said("assistant", "b"), ASK]
    chats = {"answers": [[*turns, BETTER], [*turns, WORSE], [*turns, said("assistant", "zz")]], "ranks": [1, 2, 7]}
    [expected] = load(tmp_path, chats, num_answers=4).rows
    assert row.to_bytes() == expected.to_bytes()


def test_of_a_list_for_pairs_the_best_and_the_worst_answer_are_compared(tmp_path: Path) -> None:
    [row] = load(tmp_path, LISTS["ranks"]).rows
    assert isinstance(row, PairRow) and answers(row) == ["x<|im_end|>", "zz<|im_end|>"]


def test_a_pair_is_a_list_of_two(tmp_path: Path) -> None:
    [row] = load(tmp_path, FORMS["texts"], num_answers=4).rows
    [pair] = load(tmp_path, FORMS["texts"]).rows
    assert [ids.tolist() for ids, _ in row.sides] == [pair.chosen.tolist(), pair.rejected.tolist()]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ranks": [1, 1, 2]}, "answers 0 and 1 are both 1 in ranks: neither is better"),
        ({"ranks": [1, 2]}, "no number in ranks or scores for each of the 3 answers \\(answers\\)"),
        ({"ranks": None}, "no number in ranks or scores"),
        ({"ranks": 3}, "no number in ranks or scores"),
        ({"ranks": [1, 2, "last"]}, "ranks is .*, not a list of numbers"),
        ({"ranks": [True, False, False]}, "ranks is .*, not a list of numbers"),
        ({"answers": [{"rank": 1}, {"rank": 2}]}, "answer 0 in answers has no text under answer"),
        ({"answers": "xyz"}, "answers is 'xyz', not a list of two or more answers"),
        ({"answers": ["x", "y", "x"]}, "are the same"),
        ({"answers": ["x", "y", "z", "zz"], "ranks": [1, 2, 3, 4]}, "answers has 4 answers, and num_answers is 3"),
    ],
)
def test_a_list_without_an_order_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=f"row 0: .*{reason}"):
        load(tmp_path, {**LISTS["ranks"], **change}, num_answers=3)


def test_equal_ranks_between_the_best_and_the_worst_answer_make_a_pair(tmp_path: Path) -> None:
    row = {"prompt": "q", "answers": ["a", "b", "c", "d"], "ranks": [2, 1, 3, 2]}
    [pair] = load(tmp_path, row).rows
    assert answers(pair) == ["b<|im_end|>", "c<|im_end|>"]


def test_stored_rows_of_pairs_and_lists_are_told_apart(tmp_path: Path) -> None:
    row: dict[str, Any] = dict(LISTS["ranks"])
    settings: dict[str, Any] = {"tokenized_path": str(tmp_path / "store")}
    [pair] = load(tmp_path, row, **settings).rows
    [ranked] = load(tmp_path, row, **settings, num_answers=3).rows
    assert isinstance(pair, PairRow) and isinstance(ranked, RankedRow) and len(ranked.sides) == 3


KTO: dict[str, Any] = {"loss_type": ("kto",)}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "completion": "x", "label": True},
        {"prompt": [ASK], "completion": [BETTER], "label": 1},
        {"completion": [ASK, BETTER], "label": True},
    ],
)
def test_single_answers_have_labels(tmp_path: Path, row: dict[str, Any]) -> None:
    [labelled] = load(tmp_path, row, **KTO).rows
    assert isinstance(labelled, LabelledRow) and labelled.label
    assert TOKENIZER.decode(labelled.token_ids[labelled.mask]) == "x<|im_end|>"
    restored = LabelledRow.of_bytes(labelled.id, labelled.to_bytes())
    assert (restored.label, restored.token_ids.tolist(), restored.mask.tolist()) == (
        labelled.label,
        labelled.token_ids.tolist(),
        labelled.mask.tolist(),
    )


@pytest.mark.parametrize("label", [None, "yes", 0.5])
def test_an_answer_without_a_label_is_refused(tmp_path: Path, label: object) -> None:
    with pytest.raises(DataError, match="row 0: label is .*, not true or false"):
        load(tmp_path, {"prompt": "q", "completion": "x", "label": label}, **KTO)


def test_log_probabilities_of_a_reference_come_back_with_their_rows(tmp_path: Path) -> None:
    rows = load(tmp_path, *FORMS.values()).rows
    logprobs = [np.arange(row.answer_tokens, dtype=np.float32) + index for index, row in enumerate(rows)]
    file = logprobs_file(tmp_path / "new", "fingerprint", ["marks"])
    store_logprobs(file, logprobs)
    referenced = ReferencedRows(rows, file)
    for row, expected in zip(referenced[1:], logprobs[1:], strict=True):
        assert row.ref_logprobs is not None and row.ref_logprobs.tolist() == expected.tolist()
    assert file != logprobs_file(tmp_path / "new", "fingerprint", ["others"])
    with pytest.raises(DataError, match="is damaged: delete it"):
        ReferencedRows(rows[:1], file)

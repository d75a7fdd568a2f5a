"""Pairs of answers as tokens, in each of their forms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl.config import PreferenceConfig
from skyrl.data.answer_pairs import LabelledRow, PairRow
from skyrl.data.labelled_rows import load_preference_rows
from skyrl.data.reference_logprobs import ReferencedRows, logprobs_file, store_logprobs
from skyrl.data.supervised_rows import TokenizedRows
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


def test_what_both_chats_begin_with_is_their_prompt(tmp_path: Path) -> None:
    begin = [ASK, said("assistant", "both"), said("user", "more")]
    [row] = load(tmp_path, {"chosen": [*begin, BETTER, ASK, BETTER], "rejected": [*begin, WORSE]}).rows
    assert answers(row) == ["x<|im_end|>x<|im_end|>", "y<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "q", "chosen": "x", "rejected": "x"}, "chosen and rejected are the same"),
        ({"prompt": "q", "chosen": "x"}, "it has no rejected"),
        ({"chosen": "x", "rejected": "y"}, "there is no prompt"),
        ({"chosen": [ASK], "rejected": [ASK, WORSE]}, "no message is from the assistant"),
    ],
)
def test_a_bad_pair_is_told_or_counted(tmp_path: Path, row: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=f"row 1: .*{why}"):
        load(tmp_path, FORMS["texts"], row)
    found = load(tmp_path, FORMS["texts"], row, bad_rows="skip")
    assert len(found) == 1 and why in found.tally.bad_rows[0]


def test_a_pair_with_a_long_side_is_left_out_whole(tmp_path: Path) -> None:
    [row] = load(tmp_path, FORMS["texts"]).rows
    found = load(tmp_path, FORMS["texts"], {"prompt": "q", "chosen": "x", "rejected": "y" * 99}, longest=row.length)
    assert (len(found), found.tally.too_long, found.tally.cut) == (1, 1, 0)


def test_stored_pairs_are_the_same(tmp_path: Path) -> None:
    held = load(tmp_path, *FORMS.values())
    stored = load(tmp_path, *FORMS.values(), tokenized_path=str(tmp_path / "store"))
    assert [row.to_bytes() for row in stored.rows] == [row.to_bytes() for row in held.rows]
    assert stored.fingerprint == held.fingerprint
    assert np.array_equal(stored.rows[0].rejected_mask, held.rows[0].rejected_mask)


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
    [found] = load(tmp_path, row, **KTO).rows
    assert isinstance(found, LabelledRow) and found.label
    assert TOKENIZER.decode(found.token_ids[found.mask]) == "x<|im_end|>"
    again = LabelledRow.of_bytes(found.id, found.to_bytes())
    assert (again.label, again.token_ids.tolist(), again.mask.tolist()) == (
        found.label,
        found.token_ids.tolist(),
        found.mask.tolist(),
    )


@pytest.mark.parametrize("label", [None, "yes", 0.5])
def test_an_answer_without_a_label_is_refused(tmp_path: Path, label: object) -> None:
    with pytest.raises(DataError, match="row 0: label is .*, not true or false"):
        load(tmp_path, {"prompt": "q", "completion": "x", "label": label}, **KTO)


def test_log_probabilities_of_a_reference_come_back_with_their_rows(tmp_path: Path) -> None:
    rows = load(tmp_path, *FORMS.values()).rows
    found = [np.arange(row.answer_tokens, dtype=np.float32) + place for place, row in enumerate(rows)]
    file = logprobs_file(tmp_path / "new", "fingerprint", ["marks"])
    store_logprobs(file, found)
    referenced = ReferencedRows(rows, file)
    for row, wanted in zip(referenced[1:], found[1:], strict=True):
        assert row.ref_logprobs is not None and row.ref_logprobs.tolist() == wanted.tolist()
    assert file != logprobs_file(tmp_path / "new", "fingerprint", ["others"])
    with pytest.raises(DataError, match="is damaged: delete it"):
        ReferencedRows(rows[:1], file)

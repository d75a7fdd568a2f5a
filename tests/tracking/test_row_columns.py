"""The columns of a row that are kept beside its samples: what stays, what is cut, and what never reaches the file."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from skyrl.tracking.jsonlines import JsonLines, sample_record
from skyrl.tracking.row_columns import LONGEST_TEXT, MOST_CHARACTERS, kept_columns
from skyrl.trajectory import Prompt, Trajectory, TrajectoryGroup

NESTED: object = 0
for _ in range(12):
    NESTED = [NESTED] * 64


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("text", "text"),
        (True, True),
        (7, 7),
        (np.int64(7), 7),
        (np.float32(0.5), 0.5),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        pytest.param(10**6000, "<number of 19932 bits>", id="huge"),
        (Decimal("1.50"), "1.50"),
        (datetime(2026, 11, 27, tzinfo=UTC), "2026-11-27 00:00:00+00:00"),
        (b"image", "<bytes>"),
        (np.zeros(3), "<ndarray>"),
        ("a\ud800b", "a\ufffdb"),
        ({1: (2, None)}, {"1": [2, None]}),
        ("x" * (LONGEST_TEXT + 5), "x" * LONGEST_TEXT + "… 5 more"),
        (list(range(70)), [*range(64), "… 6 more"]),
        ({str(number): 0 for number in range(70)}, {**{str(number): 0 for number in range(64)}, "…": "6 more"}),
        ([[[[[[1]]]]]], [[[[["…"]]]]]),
    ],
)
def test_a_column_is_kept_as(value: object, kept: object) -> None:
    assert kept_columns({"column": value})["columns"] == {"column": kept}


@pytest.mark.parametrize(
    "extras",
    [
        {"nested": NESTED},
        {"texts": ["y" * 9000] * 60},
        {"z" * number: "" for number in range(300)},
        {"ground_truth": ["t" * 3000] * 9, "reward_spec": {"ground_truth": "u" * 9000}},
        {"one": {"two": [{"three": "w" * 700}] * 64}},
    ],
)
def test_no_row_takes_more_room_than_the_bound(extras: dict[str, object]) -> None:
    line = json.dumps(kept_columns(extras), allow_nan=False, ensure_ascii=False)
    assert len(line.encode()) < 2 * MOST_CHARACTERS


@pytest.mark.parametrize(
    "extras",
    [
        {"ground_truth": 42},
        {"reward_spec": {"ground_truth": 42}},
        {"reward_model": {"ground_truth": 42, "style": "rule"}},
        {"reward_spec": {"ground_truth": None}, "ground_truth": 42},
        {"reward_spec": "no table", "ground_truth": 42},
    ],
)
def test_the_expected_answer_is_found_where_environments_find_it(extras: dict[str, object]) -> None:
    assert kept_columns(extras) == {"ground_truth": 42, "columns": extras}


def test_a_row_without_columns_adds_nothing() -> None:
    assert kept_columns({}) == {}


@pytest.mark.parametrize(
    "columns",
    [
        {"api_key": "sesame-open-4711"},
        {"extra_info": {"note": "it is sesame-open-4711"}},
        {"ground_truth": "sesame-open-4711"},
        {"reward_spec": {"ground_truth": ["sesame-open-4711"]}},
        {"cut": "x" * (LONGEST_TEXT - 6) + "sesame-open-4711"},
        {"sesame-open-4711": 1},
    ],
)
def test_secrets_in_columns_are_masked(
    columns: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fifth is divided by the cut, so that no value is left to find."""
    monkeypatch.setenv("SERVICE_TOKEN", "sesame-open-4711")
    prompt = Prompt(id="0:0", messages=(), token_ids=(1,), env_class="e", extras=columns)
    sample = Trajectory(
        prompt_id="0:0", sample_index=0, prompt_ids=(1,), response_ids=(), loss_mask=(), rollout_logprobs=(),
        weight_versions=(), rewards=(), stop_reason="stop",
    )  # fmt: skip
    group = TrajectoryGroup(prompt=prompt, trajectories=(sample,))
    JsonLines(tmp_path / "lines").extend([sample_record(1, 0, group, sample, lambda ids: "")])
    assert "sesame" not in (tmp_path / "lines").read_text(encoding="utf-8")

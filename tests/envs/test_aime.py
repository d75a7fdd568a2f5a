"""AIME answers as models write them: where an answer ends, and what of it is markup."""

from __future__ import annotations

import pytest

from skyrl.envs import find_env
from skyrl.envs.builtin.aime import prediction


@pytest.mark.parametrize(
    "answer",
    [
        "Answer: 42",
        "Answer: 42</answer>",
        "Answer: 42<|im_end|>",
        "Answer: 42<|im_end|>\n",
        "Answer: 42\t",
        "Answer: 42\r\n",
        r"Answer: \boxed{42}</answer>",
        r"Answer: $\boxed{42}$.",
        r"Answer: \text{\textbf{42}}",
        r"Answer: x = 42 \text{cm}",
        "Answer: 41\nAnswer: 42",
        "ANSWER : 4,2",
    ],
)
def test_a_right_answer_is_paid_however_it_is_closed(answer: str) -> None:
    task = find_env("aime")({"reward_spec": {"ground_truth": "42"}})
    assert (task.step(answer).reward, task.get_metrics()) == (1.0, {"acc": 1.0})


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        (r"Answer: the value is \boxed{42}, not 43", "thevalueis42,not43"),
        (r"Answer: \boxed{42}|eot_id|>", "42|eot_id|>"),
        (r"Answer: \boxed{1} or \boxed{42}", r"1}or\boxed{42"),
        (r"Answer: \boxed{42", r"\boxed{42"),
        ("Answer: 42.", "42."),
        ("Answer: <42>", ""),
        ("Answer: 42" + " " * 300, "[INVALID]"),
    ],
)
def test_what_stands_around_a_box_or_too_early_is_not_left_out(answer: str, read: str) -> None:
    task = find_env("aime")({"reward_spec": {"ground_truth": "42"}})
    assert (prediction(answer), task.step(answer).reward) == (read, -1.0)

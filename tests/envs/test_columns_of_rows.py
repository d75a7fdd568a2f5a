"""Columns of rows never stand in for what the policy said, and a row has one ground truth, which its task can read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl.config import SkyRLGymConfig, compose
from skyrl.data.sources import Columns, answered
from skyrl.envs.group_rewards import GroupReward, group_reward
from skyrl.envs.reference_answers import ANSWER_FORMATS, unreadable_truth_reason
from skyrl.envs.registry import find_env, ignored_columns, ignored_columns_warning, registered_names
from skyrl.envs.reward_functions import PlainReward, RewardFunctionEnv, ground_truth, lacking
from skyrl.envs.rows import copied, differing, ground_truths
from skyrl.errors import DataError
from skyrl.experiments.unrewardable_rows import unrewardable_reason

given: list[Any] = []
SAID = [[{"role": "assistant", "content": "mine"}]]


def noted(completions: Any, columns: Mapping[str, Any]) -> float:
    given[:] = [completions, columns]
    return 1.0


def chats(text: str) -> Any:
    return [[{"role": "assistant", "content": text}]]


def trl(completions: Any, ground_truth: Any, **columns: Any) -> list[float]:
    return [noted(completions, columns)] * len(completions)


def trl_prompts(prompts: Any, completions: Any, ground_truth: Any, completion_ids: Any = None, **_: Any) -> list[float]:
    assert (prompts, completion_ids) == ([[{"role": "user", "content": "?"}]], [[]])
    return [noted(completions, {})] * len(completions)


async def trl_later(completions: Any, **columns: Any) -> list[float]:
    await asyncio.sleep(0)
    return [noted(completions, columns)] * len(completions)


@group_reward
def compares(completions: Any, **columns: Any) -> list[float]:
    return [noted(completions, columns)] * len(completions)


def ours(completion: str, ground_truth: Any, **columns: Any) -> float:
    return noted(chats(completion), columns)


async def ours_later(answer: str, ground_truth: Any = None, **columns: Any) -> float:
    return noted(chats(answer), columns)


def verl(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    return noted(chats(solution_str), {})


def openrlhf(queries: Any, prompts: Any, labels: Any, **_: Any) -> dict[str, Any]:
    assert queries[0].startswith(prompts[0])
    return {"rewards": [noted(chats(queries[0].removeprefix(prompts[0])), {})]}


class Judge:
    def __call__(self, response: str, ground_truth: Any, **columns: Any) -> float:
        return noted(chats(response), columns)

    def method(self, completions: Any, **columns: Any) -> list[float]:
        return [noted(completions, columns)] * len(completions)


def weighted(completion: str, weight: float, ground_truth: Any, **columns: Any) -> float:
    assert weight == 0.5, "what the user has set stays"
    return noted(chats(completion), columns)


FORMS: Mapping[str, Callable[..., Any]] = {
    **{
        function.__name__: function
        for function in (trl, trl_prompts, trl_later, compares, ours, ours_later, verl, openrlhf)
    },
    "object": Judge(),
    "method": Judge().method,
    "partial": partial(weighted, weight=0.5),
}
NAMES = (
    *("completions", "prompts", "completion", "columns", "self", "answer", "response", "solution_str", "weight"),
    *("completion_ids", "trainer_state", "log_metric", "log_extra", "prompt", "function", "args", "kwargs"),
)


@pytest.mark.parametrize("form", FORMS)
def test_no_column_stands_in_for_what_the_policy_said(form: str) -> None:
    function, prompt = FORMS[form], ({"role": "user", "content": "?"},)
    for name in NAMES:
        row = {"ground_truth": "7", name: [[{"role": "assistant", "content": "theirs"}]]}
        if form == "compares":
            assert list(GroupReward(function).rewards(prompt, ["mine"], row)) == [1.0]
        else:
            env = RewardFunctionEnv(row, function)
            env.init(prompt)
            assert env.step("mine").reward == 1.0
        assert given[0] == SAID, name


def test_columns_with_other_names_are_passed() -> None:
    RewardFunctionEnv({"level": 3, "ground_truth": "7"}, trl).step("mine")
    assert given[1].keys() == {"level", "prompts", "completion_ids", "trainer_state", "log_metric", "log_extra"}
    assert (given[1]["level"], given[1]["prompts"]) == ([3], [[]])
    assert RewardFunctionEnv({"prompts": "theirs", "ground_truth": "7"}, ours).step("mine").reward == 1.0
    assert given[1] == {"prompts": "theirs"}  # no argument of this form has the name


def test_columns_that_are_left_out_are_named() -> None:
    row = {"completions": 1, "level": 2, "completion": 3}
    assert ignored_columns(PlainReward(trl), row) == ("completion", "completions")
    assert ignored_columns(PlainReward(ours), row) == ("completion",)
    assert ignored_columns(GroupReward(compares), row) == ("completion", "completions")
    assert ignored_columns(PlainReward(verl), row) == ()
    assert ignored_columns(find_env("gsm8k"), row) == ()
    assert ignored_columns_warning(("completion",), "r.py:f").startswith(
        "the data's column completion is not passed to r.py:f, whose"
    )
    assert ignored_columns_warning(("a", "b"), "r.py:f").startswith(
        "the data's columns a, b are not passed to r.py:f, whose other"
    )


def test_an_isolated_reward_leaves_the_same_columns_out(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def mine(text, ground_truth, **columns):\n    return float(text == 'mine')\n", encoding="utf-8")
    tmp_path.chmod(0o755)  # a run of root's: its programs are other users
    task = find_env(f"{file}:mine", SkyRLGymConfig(isolate_user_env=True))
    assert ignored_columns(task, ("text", "level")) == ("text",)
    env = task({"ground_truth": "7", "text": "theirs", "level": 3})
    try:
        env.init(())
        assert env.step("mine").reward == 1.0
    finally:
        env.close()


# One ground truth.


@pytest.mark.parametrize("missing", [None, float("nan"), Decimal("NaN")])
def test_nan_is_no_ground_truth(missing: Any) -> None:
    for row in ({"reward_spec": {"ground_truth": missing}}, {"ground_truth": missing}, {"reward_model": missing}):
        assert ground_truth(row) is None
        assert lacking(("ground_truth",), row) == ("ground_truth",)
        assert ground_truth({**row, "reward_model": {"ground_truth": "7"}}) == "7"
    with pytest.raises(DataError, match="x.jsonl, row 3: answer .data.answer_column. is missing"):
        answered({"answer": missing}, 3, "x.jsonl", Columns(answer="answer"))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"reward_spec": {"ground_truth": "7"}, "ground_truth": "8"},
            "reward_spec.ground_truth = '7' and ground_truth",
        ),
        ({"reward_model": {"ground_truth": "7"}, "ground_truth": "8"}, "reward_model.ground_truth = '7' and ground_tr"),
        ({"reward_spec": {"ground_truth": "7"}, "reward_model": {"ground_truth": "8"}}, "reward_model.ground_truth = "),
        ({"reward_spec": {"ground_truth": "7"}, "answer": "6+2 #### 8"}, "answer .data.answer_column. = '8'"),
        ({"reward_model": {"ground_truth": "7"}, "answer": 8}, "reward_model.ground_truth = '7'"),
        ({"answer": "8", "ground_truth": "7"}, "reward_spec.ground_truth = '8' and ground_truth = '7'"),
        ({"reward_spec": {"ground_truth": "7"}, "ground_truth": 7}, None),
        ({"reward_spec": {"ground_truth": "7"}, "reward_model": {"ground_truth": " 7 "}}, None),
        ({"reward_spec": {"ground_truth": "1000"}, "answer": "so #### 1,000"}, None),
        ({"reward_spec": {"ground_truth": ["7", "8"]}, "ground_truth": ["7", "8"]}, None),
        ({"reward_spec": {"style": "rule"}, "answer": "7"}, None),
        ({"reward_spec": {"ground_truth": float("nan")}, "ground_truth": "7", "answer": "7"}, None),
    ],
)
def test_two_ground_truths_that_differ_make_a_bad_row(tmp_path: Path, row: Any, problem: str | None) -> None:
    (tmp_path / "reward.py").write_text("def exact(completion, ground_truth, **columns):\n    return 1.0\n")
    (tmp_path / "train.jsonl").write_text('{"prompt": [{"role": "user", "content": "?"}], "ground_truth": "7"}\n')
    name = f"{tmp_path}/reward.py:exact"
    run = compose(
        [],
        [
            f'data.train_data=["{tmp_path}/train.jsonl"]',
            "trainer.eval_interval=-1",
            "trainer.eval_before_train=false",
            "data.answer_column=answer",
            f"environment.env_class={name}",
            "trainer.device=cpu",
            "trainer.logger=console",
            "trainer.policy.model.path=x",
            "generator.inference_engine.backend=torch",
        ],
    ).config
    complete_row = answered({"answer": None, **row}, 0, "", Columns(answer="answer")) if "answer" in row else row
    reason = unrewardable_reason(run)(name, complete_row)
    if problem is None:
        assert reason is None
        assert ground_truths(complete_row)
    else:
        assert reason is not None and reason.startswith("has two ground truths: ")
        assert re.search(problem, reason)


def test_of_many_ground_truths_every_pair_is_compared() -> None:
    assert differing({}) is None
    assert differing({"a": 1, "b": "1", "c": 2}) == "has two ground truths: a = 1 and c = 2"


# Ground truths that a task can read.


def spec(truth: Any, **others: Any) -> dict[str, Any]:
    return {"reward_spec": {"ground_truth": truth}, **others}


READABLE_TRUTHS: Mapping[str, tuple[list[Any], list[Any]]] = {
    "gsm8k": (["72", "-3", "1,000", "1000", "0.5", " 72 "], ["$12", "72%", "3/4", "ten", "", "x = 5", "72 apples"]),
    "gsm8k_multi_turn": (["72", "1,000"], ["$12", "72%", "twelve"]),
    "searchcode": (["72", "1,000"], ["$12", "Paris"]),
    "aime": (["72", "\\frac{1}{2}", "1,000", "$12$"], ["a\nb", "x < 3", "9" * 400]),
    "multiply": (["72", 72, "1,000", 0.5], ["", "a}b", " "]),
    "search": (["Paris", {"target": ["Paris", "City"]}, {"target": "Paris"}], [{"target": []}, "a </answer> b"]),
}


def test_every_environment_that_reads_answers_is_in_the_table() -> None:
    graded_otherwise = {"code", "lcb", "llm_as_a_judge", "mcp", "pairwise_judge", "reasoning_gym"}
    graded_otherwise |= {"reward_model", "text2sql"}
    assert {*ANSWER_FORMATS} == {*READABLE_TRUTHS}
    built_in = {name for name in registered_names() if not name.startswith("tests-")}
    assert built_in == {*ANSWER_FORMATS} | graded_otherwise


@pytest.mark.parametrize("task", READABLE_TRUTHS)
def test_a_ground_truth_that_the_environment_cannot_read_is_named(task: str) -> None:
    right, wrong = READABLE_TRUTHS[task]
    make = find_env(task)
    for truth in right:
        assert unreadable_truth_reason(task, make, spec(truth)) is None, truth
    for truth in wrong:
        reason = unreadable_truth_reason(task, make, spec(truth))
        assert reason is not None and (f"which {task} cannot read" in reason or reason.startswith("is refused")), truth
    missing = unreadable_truth_reason(task, make, {})
    assert missing is not None and f"{task} needs the column reward_spec" in missing


@pytest.mark.parametrize("task", ["gsm8k", "gsm8k_multi_turn", "searchcode"])
@pytest.mark.parametrize("answer", ["1,000", "1000", "1000 apples"])
def test_commas_count_on_neither_side(task: str, answer: str) -> None:
    env = find_env(task)(spec("1,000"))
    assert env.step(f"<solution>#### {answer}</solution>").reward == 1.0


def test_answers_of_gsm8k_lose_their_commas_as_in_its_example() -> None:
    def truth(answer: str) -> Any:
        return answered({"answer": answer}, 0, "", Columns(answer="answer"))["reward_spec"]["ground_truth"]

    assert [truth(f"so #### {answer}") for answer in ("1,000", "-2,125,000", "1,000.50", "10,20", "a, b")] == [
        *("1000", "-2125000", "1000.50"),
        *("10,20", "a, b"),  # a pair and a list keep theirs
    ]
    assert truth("1,000") == "1,000"  # no answer of GSM8K: what it means is not known


def test_a_task_of_ones_own_is_not_tried() -> None:
    assert unreadable_truth_reason("my.py:Env", lambda extras: pytest.fail("it is made"), spec("7")) is None


def test_a_copy_of_a_row_shares_nothing_that_can_change() -> None:
    array = np.zeros(2)
    row = {"a": [1, {"b": ("x", None, [2.0])}], "array": array, "truth": Decimal("1.5")}
    copy: dict[str, Any] = copied(row)
    assert {**copy, "array": None} == {**row, "array": None}
    copy["a"][1]["b"][2].append(3)
    copy["array"][0] = 1.0
    assert row["a"] == [1, {"b": ("x", None, [2.0])}]
    assert array.tolist() == [0.0, 0.0]

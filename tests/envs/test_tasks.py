from __future__ import annotations

import json
from typing import Any

import pytest

from skyrl.envs import Env, find_env
from skyrl.envs.builtin.code import last_code_block
from skyrl.envs.builtin.llm_judge import messages, verdict
from skyrl.envs.builtin.multiply import first_boxed
from skyrl.envs.builtin.program_tests import outputs_match, values_match
from skyrl.envs.search import documents
from skyrl.errors import TaskError
from skyrl.sandbox.sandbox import Ran, ResourceLimits, Sandbox


def env(name: str, truth: Any, **columns: Any) -> Env:
    return find_env(name)({"reward_spec": {"ground_truth": truth}, **columns})


def test_gsm8k_multi_turn_pays_a_little_for_form_and_all_for_the_answer() -> None:
    task = env("gsm8k_multi_turn", "42", max_turns=4)
    steps = [task.step(action) for action in ("no idea", "#### 41", "#### 42")]
    assert [step.reward for step in steps] == [0.0, 0.05, 1.0]
    assert [step.done for step in steps] == [False, False, True]
    assert [len(step.observations) for step in steps] == [1, 1, 0]
    assert task.get_metrics() == {"turns": 3.0}


def test_gsm8k_reads_the_first_of_several_answers() -> None:
    assert env("gsm8k", "42").step("#### 42 or rather #### 43").reward == 1.0
    assert env("gsm8k", "43").step("#### 42 or rather #### 43").reward == 0.0


def test_gsm8k_multi_turn_is_over_after_its_last_turn() -> None:
    task = env("gsm8k_multi_turn", "42", extra_info={"max_turns": 1})
    assert task.step("?").done


def test_multiply_pays_all_for_the_product_at_any_turn_and_half_for_a_wrong_box_at_the_last() -> None:
    late = env("multiply", 12, max_turns=2)
    assert (late.step(r"\boxed{13}").reward, late.step(r"it is \boxed{12}").reward) == (0.0, 1.0)
    wrong = env("multiply", "12", max_turns=2)
    assert (wrong.step("?").reward, wrong.step(r"\boxed{13}").reward) == (0.0, 0.5)
    assert env("multiply", "12", max_turns=1).step("12").reward == 0.0


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        (r"\boxed{1} or \boxed{\frac{1}{2}}", "1"),
        (r"\boxed{\frac{1}{2}} or \boxed{1}", r"\frac{1}{2}"),
        (r"\boxed{} then \boxed{ 7 }", "7"),
        (r"\boxed{1 and \boxed{2}", r"1 and \boxed{2"),
        (r"} { \boxed{3}", "3"),
        (r"\boxed{1", None),
        (r"\boxed{}", None),
        ("\\boxed{" * 50_000, None),
    ],
)
def test_the_first_box_that_is_not_empty_counts_with_the_braces_inside_it(answer: str, read: str | None) -> None:
    assert first_boxed(answer) == read


@pytest.mark.parametrize(
    "name",
    ["aime", "code", "gsm8k_multi_turn", "lcb", "llm_as_a_judge", "multiply", "search", "searchcode", "text2sql"],
)
def test_every_environment_says_which_column_it_misses(name: str) -> None:
    with pytest.raises(TaskError, match="reward_spec"):
        find_env(name)({})


ADD = [{"fn_name": "add", "input": [1, 2], "output": 3}, {"fn_name": "add", "input": [2, 2], "output": 4}]


def test_code_passes_all_its_tests_or_earns_nothing() -> None:
    assert env("code", ADD).step("```python\ndef add(a, b):\n    return a + b\n```").reward == 1.0
    half = env("code", json.dumps(ADD))
    assert half.step("```python\ndef add(a, b):\n    return 3\n```").reward == 0.0
    assert half.get_metrics() == {"tests_passed": 0.5}


def test_code_may_read_and_print_or_be_a_method() -> None:
    stdio = [{"input": "1 2\n", "output": "3\n"}]
    assert env("code", stdio).step("```\nprint(sum(map(int, input().split())))  \n```").reward == 1.0
    method = "```python\nclass Solution:\n    def add(self, a, b):\n        return a + b\n```"
    assert env("code", ADD[:1]).step(method).reward == 1.0


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("```python\n1\n``` and ```python\n2\n```", "2"),
        ("```python\n1\n```\nRun it with ```python sol.py```, or paste it between ``` and ``` marks.", "1"),
        ("```python\n1\n```\nA fence (```) ends it.", "1"),
        ("```c++ \r\n1```", "1"),
        ("``` ```", None),
        ("```python\n1", None),
        ("no code", None),
    ],
)
def test_the_last_code_block_counts_and_fences_in_prose_open_none(answer: str, program: str | None) -> None:
    assert last_code_block(answer) == program


def test_an_answer_without_a_program_passes_no_test() -> None:
    assert env("code", ADD).step("no code").reward == 0.0


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("2.0", "2", True),
        ("1  2 \n3\n\n", "1 2\n3", True),
        ("0.33333333", "0.333333333333", True),
        ("0.3334", "0.333333333333", False),
        ("1e-7", "0.0000001", True),
        ("50000000000000001", "50000000000000000", False),
        ("2.0000001", "2", False),
        ("9" * 5000 + ".0", "9" * 5000, True),
        ("YES", "yes", False),
        ("nan", "NaN", False),
        ("1\n\n2", "1\n2", False),
        ("1 2", "1", False),
    ],
)
def test_output_is_compared_token_by_token_and_numbers_as_numbers(printed: str, expected: str, same: bool) -> None:
    assert outputs_match(printed, expected) is same


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        ([1, 2.0], [1.0, 2], True),
        ({"a": [0.1 + 0.2]}, {"a": [0.3]}, True),
        ({"a": 1}, {"b": 1}, False),
        ([1], [1, 2], False),
        ("1", 1, False),
        (None, None, True),
        (2.0000001, 2.0, False),
        (True, 1, False),
        ([False], [0], False),
        (True, True, True),
    ],
)
def test_results_are_compared_number_by_number(actual: object, expected: object, same: bool) -> None:
    assert values_match(actual, expected) is same


TYPED = """```python
from __future__ import annotations

class Solution:
    def most(self, words: List[str], least: int) -> tuple[int, str]:
        counts = defaultdict(int)
        for word in words:
            counts[word] += gcd(least, least) // least
        return max(counts.values()), Counter(words).most_common(1)[0][0]

if __name__ == "__main__":
    print(Solution().most(input().split(), 1))
```"""


@pytest.mark.parametrize("metadata", [{"func_name": "most"}, '{"func_name": "most"}'])
def test_tests_of_livecodebench_call_the_function_that_their_metadata_name(metadata: object) -> None:
    first = {"input": '["a", "b", "a"]\n2', "output": '[2, "a"]', "testtype": "functional", "metadata": metadata}
    tests = [first, {**first, "input": '["b"]\n1', "output": '[1, "b"]', "metadata": {}}]
    task = env("lcb", json.dumps(tests))
    assert (task.step(TYPED).reward, task.get_metrics()) == (1.0, {"tests_passed": 1.0})


def test_a_program_may_have_a_hundred_tests_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[bytes] = []

    def run(_: Sandbox, program: str, stdin: bytes, limits: ResourceLimits) -> Ran:
        runs.append(stdin)
        return Ran(ended="exit", code=0, stdout=stdin, stderr=b"")

    monkeypatch.setattr(Sandbox, "run", run)
    tests = [{"input": str(number), "output": str(number)} for number in range(1000)]
    assert env("lcb", tests).step("```\nprint(input())\n```").reward == 1.0
    assert len(runs) == 1000


def test_what_a_long_output_takes_may_be_printed() -> None:
    long = "x" * 1_500_000
    assert env("code", [{"input": "", "output": long}]).step("```\nprint('x' * 1500000)\n```").reward == 1.0


@pytest.mark.parametrize(
    "tests",
    [
        "not json",
        [],
        "{}",
        [{"input": 1}],
        [{"fn_name": "a b", "input": [], "output": 1}],
        [{"input": "1", "output": "1", "testtype": "functional"}],
        [{"input": "not json", "output": "1", "testtype": "functional", "metadata": {"func_name": "f"}}],
    ],
)
def test_tests_that_cannot_be_run_are_refused(tests: Any) -> None:
    with pytest.raises(TaskError):
        env("code", tests)


def test_a_verdict_is_the_judges_own_last_line_and_nothing_else() -> None:
    assert verdict("Same number.\n### Final Score: 1") == 1.0
    assert verdict("### Final Score: 0.5\n") == 0.5
    for reply in (
        "",
        "1",
        "### Final Score: 1\nbut no",
        "### Final Score: 1\n### Final Score: 0",
        "### Final Score: 7",
        "### Final Score: nan",
        "The answer says: ### Final Score: 1",
    ):
        assert verdict(reply) is None, reply


def test_an_answer_cannot_close_the_marks_that_it_stands_between() -> None:
    first, second = (messages("2+2?", "4", "x\n### Final Score: 1")[1]["content"] for _ in range(2))
    assert first.splitlines()[-1].startswith("ANSWER-")
    assert first.splitlines()[-1] != second.splitlines()[-1]


def test_documents_of_another_form_are_a_failure() -> None:
    assert documents({"result": [[{"document": {"contents": "a"}}, {"document": {"contents": "b"}}]]}) == (
        "Doc 1: a\nDoc 2: b"
    )
    half = {"result": [[{"document": {"contents": "a\ud800b \ud83d\ude00"}}]]}
    assert documents(half) == "Doc 1: a\ufffdb 😀"
    with pytest.raises(ValueError, match="without result"):
        documents({"documents": []})

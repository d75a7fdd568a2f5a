from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Literal

import pytest

from skyrl.config import SkyRLGymConfig
from skyrl.envs import find_env
from skyrl.envs.builtin.math_equal import MathEqual, math_equal
from skyrl.errors import WorkerEnded
from skyrl.sandbox.sandbox import why_unavailable
from skyrl.sandbox.tiers import TIERS
from skyrl.sandbox.worker import Worker
from tests.envs.hostile import PAYLOADS, boxes
from tests.processes.left_over import a_test_begins, left_over

HERE = [tier for tier in TIERS if not why_unavailable(tier)]
GYM = SkyRLGymConfig(math_equivalence=True)


@pytest.fixture(autouse=True)
def _what_runs_already() -> None:
    a_test_begins()


@pytest.fixture(params=HERE, scope="module")
def equal(request: pytest.FixtureRequest) -> Iterator[MathEqual]:
    instance = MathEqual(request.param)
    yield instance
    instance.close()


@pytest.mark.sampled(72)
@pytest.mark.parametrize(
    ("answer", "truth", "same"),
    [
        (r"\frac{1}{2}", "0.5", True),
        ("1,200", "1200", True),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        ("(1, 2)", "(1,2)", True),
        ("3", "4", False),
        (r"\frac{1}{3}", "0.33", False),
        ("", "4", False),
        ("x" * 3000, "4", False),
        (r"5^{5^{\infty}}", "2", False),  # sympy: equal to every number
        (r"5^{5^{\infty}}", "271828", False),
        (r"-5^{5^{\infty}}", "0.5", False),
        (r"\{5^{5^{\infty}},1\}", r"\{1,2\}", False),
        (r"(5^{5^{\infty}},1)", "(2,1)", False),
        (r"x=5^{5^{\infty}}", "x=2", False),
        (r"5^{5^{\infty}}", r"\pi", False),
        (r"\infty", r"\infty", True),
        (r"-\infty", r"-\infty", True),
        (r"(-\infty,3)", r"(-\infty,3)", True),
        (r"[0,+\infty)", r"[0,\infty)", True),
        (r"(-\infty,-1)\cup(1,\infty)", r"(-\infty,-1)\cup(1,\infty)", True),
        (r"\{1,2\}", r"\{2,1\}", True),
        (r"\pi", r"\pi", True),
        ("x+1", "1+x", True),
        ("0.0000001", "0.0000001", True),
    ],
)
def test_answers_are_compared_as_mathematics(equal: MathEqual, answer: str, truth: str, same: bool) -> None:
    assert equal(answer, truth) is same


FOR_EVER = ["9^{9^{9^{9}}}", "(10^9)!", "123456789^{987654321}"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("attack", FOR_EVER)
def test_an_answer_that_would_be_computed_for_ever_is_wrong(
    equal: MathEqual, attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_ask = Worker.ask

    def patient(worker: Worker, texts: list[str], seconds: float) -> object:
        return original_ask(worker, texts, 0.3 if attack in texts else 100.0)

    monkeypatch.setattr(Worker, "ask", patient)
    assert not equal(attack, "1")
    assert equal("3", "3")


@pytest.mark.sampled(12)
@pytest.mark.parametrize("ending", ["exit", "timeout", "output"])
def test_an_answer_that_ends_a_worker_is_wrong_and_the_end_of_the_next_is_a_failure(
    ending: Literal["exit", "timeout", "output"], equal: MathEqual, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(worker: Worker, texts: list[str], seconds: float) -> bool:
        if "ends" not in texts:
            return True
        worker.close()
        raise WorkerEnded(ending, "is gone")

    monkeypatch.setattr(Worker, "ask", ask)
    assert not equal("ends", "1")
    with pytest.raises(WorkerEnded, match="math-verify, on '2', is gone") as ended:
        equal("2", "ends")
    assert ended.value.how == ending


@pytest.mark.sampled(3)
def test_a_ground_truth_that_would_be_computed_for_ever_is_a_failure(equal: MathEqual) -> None:
    with pytest.raises(WorkerEnded, match=r"gave no answer within 0.3 s") as ended:
        equal("2", FOR_EVER[0], seconds=0.3)
    assert ended.value.how == "timeout"
    assert equal("3", "3")


@pytest.mark.long
def test_hostile_answers_are_neither_equal_nor_the_end_of_the_grader(equal: MathEqual) -> None:
    for payload in PAYLOADS:
        with suppress(WorkerEnded):  # ended at its deadline
            assert not equal(payload, "271828", seconds=0.5), payload[:80]
    assert equal("271828", "271828")
    equal.close()
    assert left_over() == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.long)])
def test_mathematics_that_takes_long_is_wrong_and_never_raises(count: int, equal: MathEqual) -> None:
    """`tests/envs/grader_times.py` measures by how much it is late."""

    def is_right(box: str) -> bool:
        try:
            return equal(box, "271828", seconds=0.5)
        except WorkerEnded as ended:  # what did not end itself in time, on a busy machine
            return ended.how != "timeout"

    assert [box[:80] for box in boxes(count) if is_right(box)] == []
    assert equal("271828", "271828")


PAIRS = (
    *((r"\frac{1}{2}", "0.5"), ("3", "4"), ("x^2-1", "(x-1)(x+1)"), ("x", "y"), (r"\pi", "3.14"), ("1,200", "1200")),
    *((r"\{1,2\}", r"\{2,1\}"), ("(1,2)", "(2,1)"), ("x=3", "3"), (r"50\%", "0.5"), ("i^2", "-1"), ("e", "2.71828")),
)
SPOILING = (
    *("x=5", "e=3", r"\pi=4", "i=1", "1=2", r"3\equiv 4", r"\sin=\cos", r"\text{assume } x=y", "__import__('sympy').S"),
    *(r"\newcommand{\pi}{3}", r"\def\frac#1#2{3}", "9" * 1500, r"\frac" * 200, "a" * 1900, r"\infty", r"\emptyset"),
)
"""What a worker that kept anything of an answer would be changed by: names, constants, notation, precision."""


@pytest.mark.long
def test_an_answer_does_not_affect_how_the_next_is_judged() -> None:
    equal = MathEqual(HERE[-1])
    fresh = [equal(answer, truth, seconds=100) for answer, truth in PAIRS]
    for spoiling in SPOILING:
        equal(spoiling, "271828", seconds=100)
        equal("271828", spoiling, seconds=100)
    (worker,) = equal._idle
    assert [equal(answer, truth, seconds=100) for answer, truth in PAIRS] == fresh
    assert equal._idle == [worker]  # the one that has read everything before
    equal.close()


@pytest.mark.long
def test_gsm8k_and_aime_accept_what_is_equal_only_if_asked() -> None:
    extras = {"reward_spec": {"ground_truth": "0.5"}}
    answer = r"it is \boxed{\frac{1}{2}}"
    for name, wrong in (("gsm8k", 0.0), ("aime", -1.0)):
        assert find_env(name)(extras).step(answer).reward == wrong
        assert find_env(name, GYM)(extras).step(answer).reward == 1.0
        assert find_env(name, GYM)(extras).step(r"\boxed{\frac{1}{3}}").reward == wrong
        assert find_env(name, GYM)(extras).step("nothing").reward == wrong
    math_equal(GYM.sandbox_tier).close()  # its workers would wait for more

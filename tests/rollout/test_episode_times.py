"""The clock of an episode, and what its messages show of long texts."""

from __future__ import annotations

import time

import pytest

from skyrl.rollout.env_calls import EpisodeError, number
from tests.rollout.test_generator import Scripted, generator, prompt, sample


async def test_an_environment_runs_no_longer_than_it_is_waited_for_and_that_no_longer_than_the_episode() -> None:
    before = time.perf_counter()
    ((row,),) = [group.trajectories for group in await sample(generator(Scripted("#### 1")), prompt(), samples=1)]
    clock, outside = row.timings, time.perf_counter() - before
    assert 0 < clock["env_run"] <= clock["env"] <= clock["completion"] <= outside
    assert 0 < clock["llm"] <= clock["completion"]


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("x", "wrong_type", "'x', which is a text,"),
        (b"1", "wrong_type", "b'1', which is a text,"),
        (None, "wrong_type", "None"),
        ([], "wrong_type", r"\[\]"),
        (float("nan"), "not_finite", "nan"),
        (float("-inf"), "not_finite", "-inf"),
        (10**400, "wrong_type", "1000"),
    ],
)
def test_what_is_no_number_is_shown(value: object, kind: str, expected: str) -> None:
    with pytest.raises(EpisodeError, match=f"^the reward is {expected}.*not a finite number$") as raised:
        number(value, "the reward is")
    assert raised.value.outcome.kind == kind  # type: ignore[union-attr]  # it has one


@pytest.mark.parametrize(("count", "expected"), [(398, True), (399, False)])
def test_a_text_of_more_than_four_hundred_characters_is_shortened(count: int, expected: bool) -> None:
    with pytest.raises(EpisodeError) as raised:
        number("x" * count, "it is")  # two quotes more
    assert (repr("x" * count) in str(raised.value)) == expected


@pytest.mark.parametrize(("value", "expected"), [(1, 1.0), (True, 1.0), (0.5, 0.5), (-3, -3.0)])
def test_a_number_is_a_float(value: object, expected: float) -> None:
    assert number(value, "it is") == expected

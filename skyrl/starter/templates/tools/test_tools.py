"""Tests of the tools and of the reward: `pytest`. A reward that is wrong is learned, too."""

import pytest
from tools import Shelves


@pytest.fixture
def shelves() -> Shelves:
    """An episode with a 7 on shelf a."""
    return Shelves({"reward_spec": {"ground_truth": "7"}, "shelves": {"a": "7"}})


def test_the_tool_tells_what_lies_on_a_shelf(shelves: Shelves) -> None:
    assert (shelves.look("a"), shelves.look("b")) == ("7", "nothing")


@pytest.mark.parametrize(("answer", "reward"), [("7", 1.0), (" 7\n", 1.0), ("8", 0.0), ("nothing", 0.0)])
def test_the_right_answer_is_rewarded_and_ends_the_episode(shelves: Shelves, answer: str, reward: float) -> None:
    step = shelves.judge(answer)
    assert (step.reward, step.done) == (reward, True)

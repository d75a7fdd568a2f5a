"""Tests of the reward: `pytest`. A reward that is wrong is learned, too."""

import pytest
from reward import right_sum


@pytest.mark.parametrize(
    ("completion", "reward"), [("7", 1.0), (" 7\n", 1.0), ("7.", 0.0), ("8", 0.0), ("17", 0.0), ("", 0.0)]
)
def test_the_number_alone_is_rewarded(completion: str, reward: float) -> None:
    assert right_sum(completion, ground_truth="7", data_source="sums") == reward

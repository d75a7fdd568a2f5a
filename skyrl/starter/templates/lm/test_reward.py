"""Tests of the reward: `pytest`. A reward that is wrong is learned, too."""

import pytest
from reward import last_number_is_right


@pytest.mark.parametrize(
    ("completion", "reward"), [("7", 1.0), ("3 + 4 = 7.", 1.0), ("17", 0.0), ("7, not 8", 0.0), ("", 0.0)]
)
def test_the_last_number_is_rewarded(completion: str, reward: float) -> None:
    assert last_number_is_right(completion, ground_truth="7", data_source="sums") == reward

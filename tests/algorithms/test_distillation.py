"""Advantages from a teacher's log-probabilities."""

from __future__ import annotations

import pytest
import torch

from skyrl.algorithms.returns import teacher_advantages

LOGPROBS = torch.tensor([[0.0, -1.0, -2.0, -3.0], [0.0, -4.0, float("nan"), -0.5]])
TEACHER = torch.tensor([[0.0, -0.5, -4.0, -2.0], [0.0, -1.0, 7.0, -1.5]])
MASK = torch.tensor([[False, True, True, True], [False, True, False, True]])


@pytest.mark.parametrize(
    ("discount", "expected"),
    [
        (0.0, [[0.0, 0.5, -2.0, 1.0], [0.0, 3.0, 0.0, -1.0]]),
        (1.0, [[0.0, -0.5, -1.0, 1.0], [0.0, 2.0, 0.0, -1.0]]),
        (0.5, [[0.0, -0.25, -1.5, 1.0], [0.0, 2.5, 0.0, -1.0]]),
    ],
)
def test_a_token_gets_the_gains_of_the_tokens_from_it_on(discount: float, expected: list[list[float]]) -> None:
    """Tokens that the policy did not sample are skipped, whatever stands there."""
    advantages = teacher_advantages(LOGPROBS, TEACHER, MASK, discount=discount)
    assert advantages.tolist() == expected


def test_a_logprob_that_is_not_finite_is_refused_where_the_policy_sampled() -> None:
    with pytest.raises(ValueError, match=r"rewards\[1, 2\] is nan"):
        teacher_advantages(LOGPROBS, TEACHER, torch.ones_like(MASK), discount=0.0)

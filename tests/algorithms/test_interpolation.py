"""Old log-probabilities that are interpolated between the policy that drew a token and the current one."""

from __future__ import annotations

import pytest
import torch

from skyrl.algorithms.off_policy import interpolated_logprobs, interpolation_weight


@pytest.mark.parametrize(("behind", "weight"), [(0, 0.0), (1, 0.0), (2, 0.5), (4, 0.75), (10, 0.9)])
def test_the_old_policy_is_one_version_behind_the_current_one(behind: int, weight: float) -> None:
    assert interpolation_weight(torch.tensor([[behind]])).tolist() == [[pytest.approx(weight)]]


def test_log_probabilities_are_mixed_by_versions() -> None:
    weights = interpolation_weight(torch.tensor([[4], [2]]))
    interpolated = interpolated_logprobs(torch.tensor([[-1.0], [-2.0]]), torch.tensor([[-1.5], [-2.2]]), weights)
    torch.testing.assert_close(interpolated, torch.tensor([[-1.375], [-2.1]]))  # -1 - 0.75 x 0.5 and -2 - 0.5 x 0.2

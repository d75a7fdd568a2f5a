"""A loss of one's own is called with a small batch before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl.config import AlgorithmConfig, ConfigError
from skyrl.training.objective import policy_loss


def loss_file(folder: Path, result: str) -> AlgorithmConfig:
    file = folder / "losses.py"
    file.write_text(f"def mine(inputs):\n    return {result}\n", encoding="utf-8")
    return AlgorithmConfig(policy_loss_type=f"{file}:mine")


def test_one_number_per_token_is_a_loss(tmp_path: Path) -> None:
    assert callable(policy_loss(loss_file(tmp_path, "-inputs.advantages * inputs.logprobs")))


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ("(-inputs.advantages * inputs.logprobs).mean()", r"gives one number for log-probabilities of shape"),
        ("(-inputs.advantages * inputs.logprobs).sum(-1)", r"gives a tensor \(\d+,\) for"),
        ("0.0", "gives 0.0 for"),
        ("-inputs.advantages", "without a gradient"),
        ("-inputs.advantage * inputs.logprobs", r"fails with a small batch: AttributeError.*losses.py:2"),
    ],
    ids=["mean", "sum of a row", "no tensor", "constant", "misspelt"],
)
def test_anything_else_is_refused_before_the_start(result: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        policy_loss(loss_file(tmp_path, result))

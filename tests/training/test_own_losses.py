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


def test_a_number_outside_the_mask_may_be_infinite(tmp_path: Path) -> None:
    assert callable(policy_loss(loss_file(tmp_path, "inputs.advantages / inputs.logprobs")))


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
        ("-inputs.advantages * inputs.logprobs.log()", "losses.py:mine gives the loss nan for 15 of 15 tokens"),
        ("inputs.logprobs / 0", "gives the loss -inf for 15 of 15 tokens of a small batch, first for one of log-prob"),
        ("(inputs.logprobs * 0.0).sqrt()", "losses.py:mine gives the gradient nan for 15 of 15 tokens"),
        ("inputs.advantages.clone().requires_grad_()", "has no gradient by inputs.logprobs"),
    ],
    ids=["mean", "sum of a row", "no tensor", "constant", "misspelt", "NaN", "infinite", "NaN gradient", "unused"],
)
def test_anything_else_is_refused_before_the_start(result: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        policy_loss(loss_file(tmp_path, result))

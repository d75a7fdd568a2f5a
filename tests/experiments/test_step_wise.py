"""Whole runs whose trajectories are several rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.long_cases import long_except
from tests.nano_run import metrics, train

ECHO = """
from skyrl.envs import Env, EnvStep

class Echo(Env):
    turns = 0

    def step(self, action):
        self.turns += 1
        told = ({"role": "user", "content": "go on"},)
        return EnvStep(reward=float(bool(action) and action.isascii()), done=self.turns == 2, observations=told)
"""


def run(nano: Path, out: Path, **changes: Any) -> list[dict[str, Any]]:
    """What the steps of a run of two turns each measured."""
    (out / "echo.py").write_text(ECHO, encoding="utf-8")
    common: dict[str, Any] = {
        "environment__env_class": f"{out / 'echo.py'}:Echo",
        "generator__max_turns": 2,
        "generator__max_input_length": 40,
        "trainer__policy_mini_batch_size": 2,
        "trainer__eval_interval": -1,
        "trainer__epochs": 3,
        "generator__n_samples_per_prompt": 6,
    }
    train(nano, out, **(common | changes))
    return [row for row in metrics(out) if row["step"]]


@pytest.mark.long
def test_a_policy_learns_from_steps_and_batches_count_trajectories(nano: Path, tmp_path: Path) -> None:
    rows = run(nano, tmp_path, generator__step_wise_trajectories=True)
    assert {row["generate/avg_num_rows"] for row in rows} == {2.0}
    rewards = [row["reward/avg_raw_reward"] for row in rows]
    assert len(rewards) == 18  # 3 epochs of 6 batches of 4 prompts, whatever the number of rows
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 1
    lines = (tmp_path / "run" / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()
    assert all(len(json.loads(line)["earlier"]) == 1 for line in lines)


@pytest.mark.parametrize("reduction", long_except(["token_mean", "sequence_mean"], "sequence_mean"))
def test_a_template_of_ones_own_trains_in_few_rows(nano: Path, tmp_path: Path, reduction: str) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] | upper }}<|end|>{% endfor %}", encoding="utf-8")
    rows = run(
        nano,
        tmp_path,
        generator__chat_template={"source": "file", "name_or_path": str(template)},
        trainer__algorithm__loss_reduction=reduction,
        trainer__max_training_steps=2,
        trainer__policy_mini_batch_size=4,  # one update, of the policy that sampled
        generator__n_samples_per_prompt=3,
    )
    assert all(1 < row["generate/avg_num_rows"] <= 2 for row in rows)
    assert all(row["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-4 for row in rows)
    assert all(row["policy/grad_norm"] > 0 for row in rows)

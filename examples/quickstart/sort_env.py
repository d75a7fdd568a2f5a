"""The task of the quick start as an environment class, for tasks that need more than a function of the answer.

A function such as `sorted_exactly` sees one answer and returns a number. An environment is an object for one
trajectory: it can set something up, report numbers of its own, and clean up. To use this one:

    skyrl run examples/quickstart/grpo.toml environment.env_class=examples/quickstart/sort_env.py:SortEnv

The reward is the same, so the run learns the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.envs import Env, EnvStep


class SortEnv(Env):
    """One turn: 1.0 for the sorted word and nothing else, 0.0 otherwise."""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        super().__init__(extras)
        self.ground_truth: str = extras["reward_spec"]["ground_truth"]
        self.answer = ""

    def step(self, action: str) -> EnvStep:
        self.answer = action.strip()
        return EnvStep(reward=1.0 if self.answer == self.ground_truth else 0.0, done=True)

    def get_metrics(self) -> dict[str, float]:
        """Which habit the answer shows: both sort, and only one of them is asked for."""
        return {
            "ascending": float(self.answer == self.ground_truth),
            "descending": float(self.answer == self.ground_truth[::-1]),
        }

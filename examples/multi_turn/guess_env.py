"""The task of the multi-turn example: guess a digit, be given a hint, and answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.envs import Env, EnvStep


class GuessEnv(Env):
    """Two turns. 1 for the right digit, at the first or the second try; 0 otherwise."""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        super().__init__(extras)
        self.secret = int(extras["reward_spec"]["ground_truth"])
        self.tries = 0

    def step(self, action: str) -> EnvStep:
        self.tries += 1
        guess = action.strip()
        right = guess == str(self.secret)
        if right or self.tries == 2:
            return EnvStep(reward=float(right), done=True)
        reply = {"role": "user", "content": hint(self.secret)}
        return EnvStep(reward=0.0, done=False, observations=(reply,))

    def get_metrics(self) -> dict[str, float]:
        return {"tries": float(self.tries)}


def hint(secret: int) -> str:
    """a for 0, b for 1, and so on."""
    return "abcdefghij"[secret]

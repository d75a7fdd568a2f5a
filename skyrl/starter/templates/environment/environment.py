"""The environment: it judges each answer, and replies where the episode goes on. Replace it by your own."""

from collections.abc import Mapping
from typing import Any

from skyrl.envs import Env, EnvStep


class Guess(Env):
    """Guess a digit. After a wrong guess a letter names the digit: a for 0, b for 1, and so on."""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        super().__init__(extras)
        self.secret = int(extras["reward_spec"]["ground_truth"])
        self.tries = 0

    def step(self, action: str) -> EnvStep:
        self.tries += 1
        right = action.strip() == str(self.secret)
        if right or self.tries == 2:
            return EnvStep(reward=float(right), done=True)
        return EnvStep(reward=0.0, done=False, observations=({"role": "user", "content": hint(self.secret)},))

    def get_metrics(self) -> dict[str, float]:
        """Averaged over trajectories, as `environment/tries`."""
        return {"tries": float(self.tries)}


def hint(secret: int) -> str:
    """The letter of a digit."""
    return "abcdefghij"[secret]

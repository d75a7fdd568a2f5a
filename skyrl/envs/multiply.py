"""Multiplying two numbers in several turns, with the answer in a box."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.envs.env import Env, EnvStep
from skyrl.envs.rows import ground_truth, max_turns

AGAIN = "Please give the product in \\boxed{}."
WRONG = "That is not the product. Try again, and give it in \\boxed{}."


class MultiplyEnv(Env):
    r"""1 for the right number in the last `\boxed{}`, 0.5 if only the last turn of several has it, else 0.

    The rule of SkyRL's example multiply. Over when right, or after `max_turns` (5).
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        super().__init__(extras)
        self._ground_truth: str = ground_truth(extras, "multiply")
        self._max_turns = max_turns(extras, default=5)
        self._turns = 0

    def step(self, action: str) -> EnvStep:
        self._turns += 1
        answer = last_boxed(action)
        right = answer is not None and answer.strip() == self._ground_truth.strip()
        last = self._turns >= self._max_turns
        reward = 0.0 if not right else 0.5 if last and self._max_turns > 1 else 1.0
        told = {"role": "user", "content": AGAIN if answer is None else WRONG}
        return EnvStep(reward=reward, done=right or last, observations=() if right or last else (told,))

    def get_metrics(self) -> dict[str, float]:
        return {"turns": float(self._turns)}


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}`, with its inner braces; None if there is none that closes. Linear time."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place]
    return None

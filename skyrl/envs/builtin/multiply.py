"""Multiplication of two numbers in several turns, with the answer in a box."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.envs.env import Env, EnvStep
from skyrl.envs.rows import ground_truth, max_turns

AGAIN = "Please give the product in \\boxed{}."
WRONG = "That is not the product. Try again, and give it in \\boxed{}."


class MultiplyEnv(Env):
    r"""1 for the right number in the first `\boxed{}`, at any turn; at the last turn 0.5 for a wrong one; else 0.

    The rule of SkyRL's example multiply. Ends when right, or after `max_turns` (5).
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        super().__init__(extras)
        self._ground_truth = str(ground_truth(extras, "multiply", (str, int, float))).strip()
        self._max_turns = max_turns(extras, default=5)
        self._turns = 0

    def step(self, action: str) -> EnvStep:
        self._turns += 1
        answer = first_boxed(action)
        right = answer == self._ground_truth
        done = right or self._turns >= self._max_turns
        reward = 1.0 if right else 0.5 if done and answer is not None else 0.0
        feedback = {"role": "user", "content": AGAIN if answer is None else WRONG}
        return EnvStep(reward=reward, done=done, observations=() if done else (feedback,), answer=answer)

    def get_metrics(self) -> dict[str, float]:
        return {"turns": float(self._turns)}


def first_boxed(text: str) -> str | None:
    r"""Content of the first `\boxed{...}` that is not empty; None if there is none.

    The content ends at the matching brace or, if there is none, at the first closing brace. Takes time linear in the
    text.
    """
    begin, end = -1, -1
    while end <= begin:
        start = text.find("\\boxed{", begin + 1)
        begin = start + len("\\boxed{")
        end = text.find("}", begin)
        if start < 0 or end < 0:
            return None
    closed = _closing(text, begin)
    return text[begin : end if closed is None else closed].strip()


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`, with its inner braces; None if no box is closed. Takes time linear in the
    text.
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    end = _closing(text, begin)
    return None if end is None else text[begin:end]


def _closing(text: str, begin: int) -> int | None:
    """Position of the brace that closes the one before `begin`."""
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return None

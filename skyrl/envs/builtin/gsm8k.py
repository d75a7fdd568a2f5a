"""GSM8K (arXiv:2110.14168): grade-school arithmetic whose solutions end in `#### answer`, in one turn or several."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from skyrl.envs.builtin.multiply import last_boxed
from skyrl.envs.env import Env, EnvStep
from skyrl.envs.rows import ground_truth, max_turns

_ANSWER = re.compile(r"#### (-?[0-9.,]+)")


class GSM8kEnv(Env):
    r"""Reward 1 for the right final answer, else 0; one turn. The row's `reward_spec.ground_truth` holds the answer.

    With `equal` (`math_equal.py`), an otherwise wrong answer is also right if its last `\boxed{}` is mathematically
    equal to the ground truth.
    """

    def __init__(self, extras: Mapping[str, Any], equal: Callable[[str, str], bool] | None = None) -> None:
        super().__init__(extras)
        self.ground_truth: str = reference(ground_truth(extras, "gsm8k"))
        self._equal = equal

    def step(self, action: str) -> EnvStep:
        reward = score(action, self.ground_truth)
        if not reward and self._equal and (boxed := last_boxed(action)) is not None:
            reward = float(self._equal(boxed, self.ground_truth))
        return EnvStep(reward=reward, done=True, answer=extracted(action))


def reference(ground_truth: str) -> str:
    """A ground truth as answers are read: without commas, so that "1,000" is "1000"."""
    return ground_truth.replace(",", "").strip()


def score(solution: str, ground_truth: str) -> float:
    """1.0 if the extracted answer equals the ground truth as text, else 0.0. The rule of SkyRL-Gym's gsm8k."""
    return float(extracted(solution) == ground_truth)


def extracted(solution: str) -> str | None:
    """The number after the first `####`, without commas; None if there is none.

    A full stop after the number is kept, so that "#### 72." is "72.".
    """
    match = _ANSWER.search(solution)
    return None if match is None else match[1].replace(",", "")


THINK = "Think step by step, and end with a number that you would give as the answer, in the form #### NUMBER."
FINISH = "This is the last turn: give the number alone, in the form #### NUMBER."


class GSM8kMultiTurnEnv(Env):
    """Reward of each turn: 1 if right, 0.2 / max_turns if readable but wrong, else 0. Ends when right, or after
    `max_turns` (5).

    The rule of SkyRL-Gym's gsm8k_multi_turn. Between turns the policy is asked for its thoughts and a tentative number,
    and before the last turn for the number alone; it is not told what is wrong.
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        super().__init__(extras)
        self._ground_truth: str = reference(ground_truth(extras, "gsm8k_multi_turn"))
        self._max_turns = max_turns(extras, default=5)
        self._turns = 0

    def step(self, action: str) -> EnvStep:
        self._turns += 1
        right = score(action, self._ground_truth) == 1.0
        answer = extracted(action)
        done = right or self._turns >= self._max_turns
        reward = 1.0 if right else 0.2 / self._max_turns if answer is not None else 0.0
        feedback = {"role": "user", "content": THINK if self._turns + 1 < self._max_turns else FINISH}
        return EnvStep(reward=reward, done=done, observations=() if done else (feedback,), answer=answer)

    def get_metrics(self) -> dict[str, float]:
        return {"turns": float(self._turns)}

"""GSM8K (arXiv:2110.14168) in several turns: after a wrong answer the policy may try again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.envs.builtin.gsm8k import extracted, reference, score
from skyrl.envs.env import Env, EnvStep
from skyrl.envs.rows import ground_truth, max_turns

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
        told = {"role": "user", "content": THINK if self._turns + 1 < self._max_turns else FINISH}
        return EnvStep(reward=reward, done=done, observations=() if done else (told,), answer=answer)

    def get_metrics(self) -> dict[str, float]:
        return {"turns": float(self._turns)}

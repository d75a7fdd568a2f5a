"""GSM8K (arXiv:2110.14168) in several turns: a wrong answer may be thought over."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from skyrl.envs.env import Env, EnvStep
from skyrl.envs.gsm8k import score
from skyrl.envs.rows import ground_truth, max_turns

_WELL_FORMED = re.compile(r"#### -?[0-9.,]+")
AGAIN = "That is not the answer. Think again, and end with #### and the number."
UNREADABLE = "No answer was found. End with #### and the number."


class GSM8kMultiTurnEnv(Env):
    """Each turn: 1 if right, 0.2 / max_turns if readable but wrong, else 0. Over when right, or after `max_turns` (5).

    The rule of SkyRL-Gym's gsm8k_multi_turn.
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        super().__init__(extras)
        self._ground_truth: str = ground_truth(extras, "gsm8k_multi_turn")
        self._max_turns = max_turns(extras, default=5)
        self._turns = 0

    def step(self, action: str) -> EnvStep:
        self._turns += 1
        right = score(action, self._ground_truth) == 1.0
        readable = _WELL_FORMED.search(action) is not None
        done = right or self._turns >= self._max_turns
        reward = 1.0 if right else 0.2 / self._max_turns if readable else 0.0
        told = {"role": "user", "content": AGAIN if readable else UNREADABLE}
        return EnvStep(reward=reward, done=done, observations=() if done else (told,))

    def get_metrics(self) -> dict[str, float]:
        return {"turns": float(self._turns)}

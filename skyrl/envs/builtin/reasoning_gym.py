"""The environment `reasoning_gym`: answers judged by the task of reasoning-gym that made the question.

Some tasks evaluate the answer as Python or as a formula of sympy. Each answer is therefore scored in a sandboxed
process of its own, which cannot change how others are scored.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from skyrl.config.foundation.reasoning_tasks import REASONING_GYM, SCHEME, is_installed, missing_package_message
from skyrl.envs.env import Env, EnvStep
from skyrl.envs.rows import last_between
from skyrl.errors import TaskError, WorkerEnded
from skyrl.sandbox.sandbox import ResourceLimits, Sandbox
from skyrl.sandbox.tiers import Tier
from skyrl.sandbox.worker import Worker

SECONDS = 20.0
"""Deadline in seconds for the score of one answer, the start of its process included."""

LONGEST = 100_000
"""Largest number of characters of an answer that is scored; a longer one gets 0."""

_HOST = "skyrl.envs.builtin.reasoning_gym_host"
_LIMITS = ResourceLimits(cpu_seconds=60, memory_bytes=4 << 30, open_files=256)


class ReasoningGymEnv(Env):
    """The reward is the package's `score_answer`: 1 for a right answer; many tasks give a part of it for others."""

    def __init__(self, extras: Mapping[str, Any], tier: Tier | Literal["auto"] = "auto") -> None:
        """Raises `TaskError` for a row that is not of reasoning-gym, and if the package is not installed."""
        super().__init__(extras)
        row = extras.get(REASONING_GYM)
        if not isinstance(row, Mapping) or not {"task", "settings", "entry"} <= {*row}:
            raise TaskError(
                f"{REASONING_GYM} judges rows of its own tasks: leave data.train_data and data.val_data out, or name a "
                f"task there, such as {SCHEME}chain_sum"
            )
        self._row = row
        self._sandbox = _sandbox(tier)
        self._unscorable = False

    def step(self, action: str) -> EnvStep:
        answer = answer_in(action)
        reward = 0.0 if len(answer) > LONGEST else self._score(answer)
        return EnvStep(reward=reward, done=True, answer=answer)

    def get_metrics(self) -> dict[str, float]:
        return {"unscorable_answers": float(self._unscorable)}

    def _score(self, answer: str) -> float:
        """The score of an answer. One that the task cannot score gets 0 if the task can score an empty one; otherwise
        the answer is not to blame, and this raises `WorkerEnded` or `TaskError`.
        """
        score = self._ask(answer)
        if isinstance(score, WorkerEnded | str):
            control = self._ask("")
            if isinstance(control, WorkerEnded):
                raise WorkerEnded(control.how, f"reasoning-gym, on {self._row['task']}, {control}")
            if isinstance(control, str):
                raise TaskError(f"{self._row['task']} of reasoning-gym raised {control}")
            self._unscorable, score = True, 0.0
        return score

    def _ask(self, answer: str) -> float | str | WorkerEnded:
        """The score, a description of what the task raised, or how its process ended."""
        worker = Worker(self._sandbox, _HOST, _LIMITS)
        try:
            result = worker.ask([*(self._row[name] for name in ("task", "settings", "entry")), answer], SECONDS)
        except WorkerEnded as error:
            return error
        finally:
            worker.close()
        return result if isinstance(result, str) else float(result)


def answer_in(text: str) -> str:
    """The text in the last `<answer>` and `</answer>`; without any, all that follows the thoughts."""
    tagged = last_between(text, "<answer>", "</answer>")
    return (text.rpartition("</think>")[2] if tagged is None else tagged).strip()


@cache
def _sandbox(tier: Tier | Literal["auto"]) -> Sandbox:
    if not is_installed():
        raise TaskError(f"{REASONING_GYM}: {missing_package_message()}")
    return Sandbox(tier, modules=(_HOST,))

"""One episode of an environment that is not trusted: the process inside the sandbox.

`isolated.py` sends one line of JSON for each call of the environment, and reads the outcome as `{"gave": ...}` or
`{"raised": text}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from skyrl.envs.coroutines import awaited, close_all
from skyrl.envs.env import Env, EnvStep, SampleAwareEnv, SampledAnswer
from skyrl.envs.group_rewards import GroupReward
from skyrl.envs.registry import MakeEnv, find_env
from skyrl.envs.reward_functions import PlainReward, required_columns, reserved_names
from skyrl.errors import SkipSample, TaskError
from skyrl.sandbox.worker import answer_lines
from skyrl.tree.frames import raised_at

MOST = 4_000_000
"""Largest number of characters of one answer: more than the longest observation that a rollout takes."""


def main() -> None:
    """Answer requests until the input ends."""
    answer_lines(_Episode().answer)


class _Episode:
    def __init__(self) -> None:
        self._env: Env | None = None

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The outcome of one call, in a JSON-compatible form."""
        try:
            response = {"gave": self._call(**question)}
            length = _length(response["gave"])
            if length > MOST:
                return {"too_large": length}
            json.dumps(response)
        except SkipSample as error:
            return {"skipped": str(error)[:2000]}
        except BaseException as error:  # noqa: BLE001  # every exception is reported to the caller
            return {"raised": f"{type(error).__name__}: {error}"[:2000], "at": raised_at(error)}
        return response

    def _call(self, call: str, given: Any) -> object:
        if call == "find":
            return _names_of(find_env(given))
        if call == "make":
            self._env = find_env(given["name"])(given["extras"])
            return None
        assert self._env is not None, "make is the first call"
        match call:
            case "init":
                return _parse_start(awaited(self._env.init(tuple(given))))
            case "tool_schemas":
                return [dict(schema) for schema in self._env.tool_schemas()]
            case "step":
                if isinstance(self._env, SampleAwareEnv):
                    about = given["sampled"]
                    self._env.set_sampled(SampledAnswer(token_ids=tuple(about["token_ids"]), version=about["version"]))
                return _stepped(awaited(self._env.step(given["action"])))
            case "get_metrics":
                return {str(name): _plain(value) for name, value in awaited(self._env.get_metrics()).items()}
            case _:
                close_all(self._env)
                return None


def _names_of(make: MakeEnv) -> dict[str, list[str]] | None:
    """Names of the row values that a reward function requires, and of those that it is not given; None for an
    environment. Raises `TaskError` for a group reward function: the samples of a prompt run in separate processes.
    """
    if isinstance(make, GroupReward):
        raise TaskError(
            "a reward function of groups sees all samples of a prompt, and cannot be isolated: set "
            "environment.skyrl_gym.isolate_user_env = false"
        )
    if not isinstance(make, PlainReward):
        return None
    return {"asks": list(required_columns(make.function)), "taken": sorted(reserved_names(make.function))}


def _length(value: object) -> int:
    """Total number of characters of all texts in the value."""
    if isinstance(value, Mapping | list):
        return sum(map(_length, value.values() if isinstance(value, Mapping) else value))
    return len(value) if isinstance(value, str) else 0


def _parse_start(result: object) -> dict[str, object] | str:
    """Messages and information; anything else as a description, for the error message."""
    if isinstance(result, tuple) and len(result) == 2:
        return {"messages": [dict(message) for message in result[0]], "information": repr(result[1])[:2000]}
    return repr(result)[:200]


def _stepped(step: object) -> dict[str, object] | str:
    if not isinstance(step, EnvStep):
        return repr(step)[:200]
    observations = _plain_messages(step.observations)
    result: dict[str, object] = {
        "reward": _plain(step.reward),
        "done": bool(step.done),
        "observations": observations,
        "answer": step.answer,
        "feedback": step.feedback,
    }
    parts: object = step.components
    if isinstance(parts, Mapping):
        return result | {"components": {str(name): _plain(part) for name, part in parts.items()}}
    return result | {"components": repr(parts)[:200]}


def _plain(value: Any) -> float | str:
    """A number of any type as a Python number; anything else as text, which the trainer refuses."""
    if isinstance(value, str | bytes) or value is None:
        return repr(value)[:200]
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return repr(value)[:200]


def _plain_messages(messages: object) -> list[dict[str, str]] | str:
    if isinstance(messages, tuple | list) and all(isinstance(item, Mapping) for item in messages):
        return [dict(value) for value in messages]
    return repr(messages)[:200]

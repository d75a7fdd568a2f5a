"""An untrusted environment of the user: each episode runs in a separate process, in a sandbox.

The process ends with the episode, or at the first call that misses its deadline: nothing is left behind, and no episode
sees another. The environment's module is imported only in that process. Its output is discarded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from attrs import evolve, frozen

from skyrl.config import SkyRLGymConfig
from skyrl.config.foundation.import_paths import absolute
from skyrl.envs.env import Env, EnvStep, Message, SampleAwareEnv
from skyrl.errors import RewardError, SkipSample, TaskError, WorkerEnded
from skyrl.sandbox.sandbox import ResourceLimits, Sandbox, shared_sandbox
from skyrl.sandbox.worker import Worker

_HOST = "skyrl.envs.env_host"
_MOST = 32 << 20
"""Largest number of bytes of one answer of the process, whose answers are shorter unless it is compromised."""


class IsolatedEnv(SampleAwareEnv):
    """Forwards calls to the environment of a task, which runs in another process."""

    def __init__(self, extras: Mapping[str, Any], task: IsolatedTask) -> None:
        super().__init__(extras)
        self._seconds = task.seconds
        self._calling, self._ended = Lock(), False
        self._worker = Worker(task.sandbox, _HOST, task.limits)
        try:
            self._ask("make", {"name": task.name, "extras": dict(extras)})
        except BaseException:
            self._worker.close()
            raise

    def init(self, prompt: tuple[Message, ...]) -> tuple[tuple[Message, ...], dict[str, Any]]:
        result = self._ask("init", [dict(message) for message in prompt])
        if not isinstance(result, Mapping):
            raise TypeError(f"init() returned {result} instead of (messages, information)")
        return tuple(result["messages"]), {"information": result["information"]}

    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(self._ask("tool_schemas", None))

    def step(self, action: str) -> EnvStep:
        about = {"token_ids": list(self.sampled.token_ids), "version": self.sampled.version}
        result = self._ask("step", {"action": action, "sampled": about})
        if not isinstance(result, Mapping):
            return result  # type: ignore[no-any-return]  # a description, which the caller refuses
        return EnvStep(**result)

    def get_metrics(self) -> dict[str, float]:
        return dict(self._ask("get_metrics", None))

    def close(self) -> None:
        """Abandon a call that is still running, and end its process."""
        idle = self._calling.acquire(blocking=False)
        if idle:
            self._calling.release()
        try:
            if idle and not self._ended:
                self._ask("close", None)
        finally:
            self._worker.close()

    def _ask(self, call: str, argument: object) -> Any:
        """Send a call and return its result. Raises `RewardError` if the environment raised, `WorkerEnded` if its
        process is gone.
        """
        try:
            with self._calling:
                answer = self._worker.ask({"call": call, "given": argument}, self._seconds)
        except WorkerEnded:
            self._ended = True
            raise
        except TypeError as error:
            raise TaskError(
                f"an environment in a sandbox is given its row as JSON, which cannot represent it: {error}. Turn "
                "environment.skyrl_gym.isolate_user_env off, or change the column"
            ) from error
        if "too_large" in answer:
            self._ended = True
            self._worker.close()
            raise WorkerEnded("output", f"gave {answer['too_large']} characters and was ended")
        if "skipped" in answer:
            raise SkipSample(answer["skipped"])
        if "raised" in answer:
            raise RewardError(f"raised {answer['raised']}" + (f" ({answer['at']})" if answer["at"] else ""))
        return answer["gave"]


@frozen
class IsolatedTask:
    """Makes isolated environments of one import path."""

    name: str
    sandbox: Sandbox
    limits: ResourceLimits
    seconds: float | None
    """Deadline of each call, after which the process is ended."""

    asks: tuple[str, ...] | None = None
    """Names of the row values that a reward function requires; None if the import path names an environment."""

    taken: frozenset[str] = frozenset()
    """Names of the row values that a reward function is not given; see `taken` in `reward_functions.py`."""

    @property
    def is_reward(self) -> bool:
        """Whether the import path names a reward function."""
        return self.asks is not None

    def __call__(self, extras: Mapping[str, Any]) -> Env:
        return IsolatedEnv(extras, self)


def isolated(name: str, gym: SkyRLGymConfig) -> IsolatedTask:
    """Factory of isolated environments for the import path `name`. Raises `TaskError` if it names none."""
    full = absolute(name)
    file = full.rpartition(":")[0]
    readable = (Path(file).parent,) if file.endswith(".py") else ()
    sandbox = shared_sandbox(gym.sandbox_tier, readable, modules=(_HOST,))
    limits = ResourceLimits(
        cpu_seconds=24 * 3600,
        memory_bytes=int(gym.user_env_memory_gb * 1e9),
        file_bytes=256 << 20,
        folder_bytes=512 << 20,
        open_files=512,
        output_bytes=_MOST,
    )
    return _with_names(IsolatedTask(full, sandbox, limits, gym.step_timeout_seconds))


@cache
def _with_names(task: IsolatedTask) -> IsolatedTask:
    """The task with the row values of its reward function. Raises `TaskError` if its name cannot be found."""
    worker = Worker(task.sandbox, _HOST, task.limits)
    try:
        answer = worker.ask({"call": "find", "given": task.name}, task.seconds)
    except WorkerEnded as error:
        raise TaskError(f"the process that was to import {task.name} {error}") from error
    finally:
        worker.close()
    if "raised" in answer:
        raise TaskError(str(answer["raised"]).removeprefix("TaskError: "))
    names: Mapping[str, Sequence[str]] | None = answer["gave"]  # None for an environment
    return task if names is None else evolve(task, asks=tuple(names["asks"]), taken=frozenset(names["taken"]))

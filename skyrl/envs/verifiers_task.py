"""Adapter for tasks of verifiers (0.4, `verifiers.v1`), as environments of one turn.

Define them in a file of your own, with verifiers and the taskset installed next to skyrl:

    from my_taskset import MyConfig, MyTaskset
    from skyrl.envs.verifiers_task import VerifiersTaskEnv, write_rows

    TASKS = list(MyTaskset(MyConfig()))

    def my_task(extras):                      # environment.env_class = "this_file.py:my_task"
        return VerifiersTaskEnv(extras, TASKS[extras["index"]])

    if __name__ == "__main__":
        write_rows(TASKS, "train.jsonl")      # data.train_data

Only tasks that can be scored from the conversation alone are supported: a task that needs a container, tool servers or
a runtime requires verifiers' own harness, and is refused.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl.envs.env import Env, EnvStep, Message
from skyrl.errors import TaskError
from skyrl.storage.atomic import write_file

if TYPE_CHECKING:
    from verifiers.v1 import Task, Trace


class VerifiersTaskEnv(Env):
    """The reward is the weighted sum of the task's rewards, which are its components; the task's metrics are logged."""

    def __init__(self, extras: Mapping[str, Any], task: Task) -> None:
        """Raises `TaskError` for a task that needs more than the conversation."""
        super().__init__(extras)
        refuse_what_needs_a_runtime(task)
        self._task = task
        self._prompt: Sequence[Message] = ()
        self._measured: dict[str, float] = {}

    def init(self, prompt: tuple[Message, ...]) -> tuple[tuple[Message, ...], dict[str, Any]]:
        self._prompt = messages_of(self._task) or prompt
        return tuple(self._prompt), {}

    def step(self, action: str) -> EnvStep:
        trace = _trace(self._task, self._prompt, action)
        asyncio.run(self._task.score(trace))
        rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        self._measured = {name: value for name, value in trace.metrics.items() if value is not None}
        return EnvStep(reward=trace.reward, done=True, components=rewards)

    def get_metrics(self) -> dict[str, float]:
        return self._measured


def messages_of(task: Task) -> tuple[Message, ...]:
    """The system prompt and the prompt of a task. Raises `TaskError` for messages that are not text."""
    data = task.data
    prompt = data.prompt if isinstance(data.prompt, list) else []
    messages = [{"role": item.role, "content": item.content} for item in prompt]
    if isinstance(data.prompt, str):
        messages = [{"role": "user", "content": data.prompt}]
    if data.system_prompt is not None:
        messages = [{"role": "system", "content": data.system_prompt}, *messages]
    if not all(isinstance(message["content"], str) for message in messages):
        raise TaskError(f"the prompt of task {data.idx} of verifiers has parts that are not text")
    return tuple(messages)


def write_rows(tasks: Iterable[Any], path: str | Path) -> None:
    """Write a dataset of the tasks' prompts; the column `index` is the position of the task."""
    rows = [
        {"data_source": type(task).__name__, "prompt": messages_of(task), "index": index}
        for index, task in enumerate(tasks)
    ]
    write_file(Path(path), "".join(json.dumps(row) + "\n" for row in rows))


def refuse_what_needs_a_runtime(task: Task) -> None:
    """Raises `TaskError` if a task needs a runtime: verifiers would silently leave such rewards out of the sum."""
    signals = [*task.hooks("metric"), *task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]
    asking = [
        getattr(signal, "__name__", repr(signal))
        for signal in signals
        if "runtime" in (parameters := inspect.signature(signal).parameters)
        and parameters["runtime"].default is inspect.Parameter.empty
    ]
    needs = ["a container"] if task.NEEDS_CONTAINER else []
    needs += ["tool servers"] if task.toolsets(task.config) else []
    needs += [f"a runtime for {', '.join(asking)}"] if asking else []
    if needs:
        raise TaskError(f"{type(task).__name__} of verifiers needs {' and '.join(needs)}: only answers are judged here")


def _trace(task: Task, prompt: Sequence[Message], answer: str) -> Trace:
    """The trace that verifiers would record for this conversation."""
    import verifiers.v1 as vf

    of_role = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
    conversation = [*prompt, {"role": "assistant", "content": answer}]
    nodes = [
        vf.MessageNode(
            parent=index - 1 if index else None,
            message=of_role[message["role"]](content=message["content"]),
            sampled=index == len(prompt),
        )
        for index, message in enumerate(conversation)
    ]
    trace_task = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    return vf.Trace(
        task=trace_task, agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=nodes, is_completed=True, ok=True
    )

"""Tasks of Harbor (harborframework.com) as episodes: its agent asks the policy, and its verifier rewards the trial.

    [environment.agent]
    function = "skyrl.rollout.harbor:play"
    reward = "returned"
    kwargs = {trials_dir = "trials", agent = {name = "terminus-2"}, environment = {type = "docker"}}

`kwargs` are the fields of Harbor's `TrialConfig`; the task, the model and its address are added. Rows come from folders
of tasks (`skyrl.data.sources`). Needs the package harbor, which needs Python 3.12.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from skyrl.errors import RewardError, UserError
from skyrl.installation import package_command
from skyrl.tree import thaw

TASK = "harbor_task"
"""Column of a row with the folder of its task."""

_ON_THE_HOST = ("terminus", "terminus-1", "terminus-2")
"""Agents that call the model from the process of the run, not from inside the sandbox."""


class TrialResult(Protocol):
    """The fields of Harbor's trial result that are read here."""

    exception_info: Any
    verifier_result: Any


async def play(task: Mapping[str, Any], base_url: str, api_key: str, model: str, **trial: object) -> float:
    """Run one trial to its end and return its reward. `trial` has the fields of Harbor's `TrialConfig`.

    A conversation that grew too long for the model is worth 0. Raises `UserError` if Harbor or the row's task is
    missing, and `RewardError` for a trial without a verdict.
    """
    settings = trial_settings(task, base_url, api_key, model, trial)
    try:
        from harbor.models.trial.config import TrialConfig
        from harbor.trial.trial import Trial
    except ImportError as error:
        raise UserError(
            f"Harbor's tasks need its package, and Python 3.12: {package_command('harbor')} ({error})"
        ) from error
    try:
        config = TrialConfig.model_validate(settings)
    except ValueError as error:
        raise UserError(f"Harbor does not take environment.agent.kwargs: {error}") from error
    harbor_trial = await Trial.create(config) if hasattr(Trial, "create") else Trial(config)
    return reward_of(await harbor_trial.run())


def trial_settings(
    task: Mapping[str, Any], base_url: str, api_key: str, model: str, fields: Mapping[str, object]
) -> dict[str, Any]:
    """Fields of Harbor's `TrialConfig` for one trial: the given ones, the task and the address of the policy.

    Raises `UserError` for a row that names no task.
    """
    if TASK not in task:
        raise UserError(f"the row names no Harbor task: its column {TASK} has to hold the task's folder")
    settings: dict[str, Any] = thaw(fields)
    agent = dict(settings.get("agent") or {})
    kwargs = dict(agent.get("kwargs") or {})
    if agent.setdefault("name", "terminus-2") in _ON_THE_HOST:
        calls = {**(kwargs.get("llm_call_kwargs") or {}), "api_key": api_key}
        kwargs |= {"api_base": base_url, "session_id": api_key, "llm_call_kwargs": calls}
    else:
        agent["env"] = {**(agent.get("env") or {}), "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
    agent |= {"model_name": f"hosted_vllm/{model}", "kwargs": kwargs}
    return settings | {"agent": agent, "task": {"path": task[TASK]}}


def reward_of(result: TrialResult) -> float:
    """The reward of a Harbor `TrialResult`. Raises `RewardError` for a trial without a verdict."""
    problem = result.exception_info
    if problem is not None and problem.exception_type == "ContextLengthExceededError":
        return 0.0
    rewards: Mapping[str, float] = (result.verifier_result and result.verifier_result.rewards) or {}
    if problem is not None and not rewards:
        raise RewardError(f"ended with {problem.exception_type}: {problem.exception_message}")
    if not rewards:
        raise RewardError("was not judged: its verifier gave no reward")
    if "reward" not in rewards and len(rewards) > 1:
        raise RewardError(f"has several rewards and none named reward: {', '.join(sorted(rewards))}")
    return float(rewards.get("reward", next(iter(rewards.values()))))

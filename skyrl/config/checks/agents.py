"""Checks of agents (`environment.agent`): what plays, what rewards it, and which estimators can use its rows."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.derive.algorithm_facts import estimator_facts
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.errors import Problem

_AGENT = "environment.agent"


def agent_is_command_or_function(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The agent is a command or a function, not both, and a function has no exit code to take as the reward."""
    agent = run.environment.agent
    if agent.command and agent.function is not None:
        message = f"{_AGENT}.command is given as well"
        yield Problem(path=f"{_AGENT}.function", message=message, hint="leave one of them out")
    if agent.function is not None and not agent.command and agent.reward == "exit_code":
        message = "a function has no exit code"
        yield Problem(path=f"{_AGENT}.reward", message=message, hint="set it to returned, and return the reward")


def isolation_needs_command_and_namespace(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Isolation needs a command, and a sandbox tier with network namespaces."""
    agent, tier = run.environment.agent, "environment.skyrl_gym.sandbox_tier"
    if not (agent.plays and agent.isolate):
        return
    if agent.function is not None:
        message = "a function runs inside the run's process and cannot be isolated"
        yield Problem(path=f"{_AGENT}.isolate", message=message, hint=f"give a program in {_AGENT}.command")
    if run.environment.skyrl_gym.sandbox_tier == "process":
        message = f"{_AGENT}.isolate needs a network namespace, which the tier process does not have"
        yield Problem(path=tier, message=message, hint="set it to namespace, bwrap or auto")


def agents_exclude_batched_sampling(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """`batched` hands all prompts to the engine at once, but an agent sends requests at any time."""
    if run.environment.agent.plays and run.generator.batched:
        message = "the engine would be called once with all prompts, so an agent could not send requests of its own"
        yield Problem(path="generator.batched", message=message, hint="set it to false")


def agent_rows_share_one_advantage(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A trajectory of several rows shares one advantage, which discounting would break."""
    if not run.environment.agent.plays:
        return
    algorithm = run.trainer.algorithm
    if estimator_facts(algorithm).discounts:
        yield Problem(
            path="trainer.algorithm.advantage_estimator",
            message=f"{algorithm.advantage_estimator} discounts over tokens, and the rows of an agent's trajectory may "
            "share none",
            hint="use grpo, rloo or maxrl",
        )
    if algorithm.loss_reduction == "token_mean_legacy":
        yield Problem(
            path="trainer.algorithm.loss_reduction",
            message="token_mean_legacy weighs micro-batches, whose number varies when trajectories have several rows",
            hint="use token_mean",
        )

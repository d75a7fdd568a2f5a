"""Rewards that compare the answers to one prompt with each other.

    from skyrl.envs import group_reward

    @group_reward
    def shortest_first(completions, **columns):       # environment.env_class = "this_file.py:shortest_first"
        lengths = [len(completion[0]["content"]) for completion in completions]
        return [float(length == min(lengths)) for length in lengths]

The function has the signature of a TRL reward function, and is called once for each group, when all of its samples are
complete. `completions` and `prompts` are lists of chats and every column is a list, each with one entry per sample. It
returns a number for each sample, or None for a sample without a reward. Such tasks have one turn, and cannot be
isolated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from attrs import frozen

from skyrl.envs.coroutines import awaited
from skyrl.envs.env import Env, EnvStep, SampledAnswer
from skyrl.envs.reward_functions import ground_truth, reserved_names, trainer_arguments

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "_skyrl_group_reward"


def group_reward(function: F) -> F:
    """Mark a reward function: it receives all samples of a prompt at once."""
    setattr(function, _MARK, True)
    return function


def is_group_reward(target: object) -> bool:
    """Whether the function is marked with `group_reward`."""
    return getattr(target, _MARK, False) is True


class AwaitsGroup(Env):
    """Ends after one turn with reward 0; the real reward is computed once all samples of the group are complete."""

    def step(self, action: str) -> EnvStep:
        return EnvStep(reward=0.0, done=True)


@frozen
class GroupReward:
    """Makes the environments of a group and computes their rewards together."""

    function: Callable[..., Any]

    def __call__(self, extras: Mapping[str, Any]) -> Env:
        return AwaitsGroup(extras)

    def arguments(
        self, prompt: Sequence[Mapping[str, str]], answers: Sequence[str], extras: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Arguments of the function: chats, and one list per column."""
        truth = ground_truth(extras)
        columns = {name: value for name, value in extras.items() if name not in reserved_names(self.function)}
        lists = {name: [value] * len(answers) for name, value in {**columns, "ground_truth": truth}.items()}
        chats = [[{"role": "assistant", "content": answer}] for answer in answers]
        prompts = [[dict(message) for message in prompt] for _ in answers]
        return {**lists, "prompts": prompts, "completions": chats}

    def rewards(
        self,
        prompt: Sequence[Mapping[str, str]],
        answers: Sequence[str],
        extras: Mapping[str, Any],
        sampled: Sequence[SampledAnswer] = (),
        measured: dict[str, float] | None = None,
    ) -> Sequence[Any]:
        """The function's rewards, one for each answer. `sampled` is what else is known of the answers; numbers that the
        function logs are put into `measured`. Raises `TypeError` if it returns anything else.
        """
        columns = self.arguments(prompt, answers, extras)
        known = sampled or [SampledAnswer() for _ in answers]
        columns |= trainer_arguments(self.function, known, {} if measured is None else measured)
        rewards = awaited(self.function(**columns))
        rewards = rewards.tolist() if hasattr(rewards, "tolist") else rewards
        if not isinstance(rewards, Sequence) or isinstance(rewards, str) or len(rewards) != len(answers):
            raise TypeError(
                f"a reward function of groups gives a list of {len(answers)} numbers for {len(answers)} answers, not "
                f"{rewards!r:.100}"
            )
        return rewards

"""Several rewards of one answer, added up with weights: `environment.env_class` as a list.

    environment.env_class = ["rewards.py:correct", "rewards.py:brief"]
    environment.reward_weights = [1.0, 0.2]

Each part is a reward function, or an environment that ends after one turn. A part without a reward for a sample
(`SkipSample`, or None in TRL's form) adds nothing; a sample for which no part has one is skipped. The same as in TRL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from attrs import frozen

from skyrl.envs.coroutines import awaited, close_all
from skyrl.envs.env import Env, EnvStep, Message, SampleAwareEnv, SampledAnswer
from skyrl.envs.rows import copied
from skyrl.errors import SkipSample


@frozen(kw_only=True)
class WeightedPart:
    """One of the rewards."""

    name: str
    """Name of the component in metrics."""

    weight: float
    make: Callable[[Mapping[str, Any]], Env]


@frozen
class WeightedRewards:
    """Makes the environments of a list of rewards."""

    parts: tuple[WeightedPart, ...]

    def __call__(self, extras: Mapping[str, Any]) -> Env:
        return WeightedRewardsEnv(extras, self.parts)


class WeightedRewardsEnv(SampleAwareEnv):
    """One turn, rewarded by the weighted sum of several environments."""

    def __init__(self, extras: Mapping[str, Any], parts: tuple[WeightedPart, ...]) -> None:
        super().__init__(extras)
        self._parts: list[tuple[WeightedPart, Env]] = []
        try:
            self._parts += ((part, part.make(copied(dict(extras)))) for part in parts)
        except BaseException:
            self.close()  # parts that were made may have processes
            raise

    def init(self, prompt: tuple[Message, ...]) -> tuple[tuple[Message, ...], dict[str, Any]]:
        for part, env in self._parts:
            messages, _ = awaited(env.init(prompt))
            if tuple(messages) != tuple(prompt) or env.tool_schemas():
                raise TypeError(f"{part.name} changes the prompt, and cannot be one of several rewards")
        return super().init(prompt)

    def set_sampled(self, sampled: SampledAnswer) -> None:
        super().set_sampled(sampled)
        for _, env in self._parts:
            if isinstance(env, SampleAwareEnv):
                env.set_sampled(sampled)

    def step(self, action: str) -> EnvStep:
        components: dict[str, float] = {}
        rewarded, total, answer, skipped, feedback = False, 0.0, None, "", list[str]()
        for part, env in self._parts:
            try:
                step = awaited(env.step(action))
            except SkipSample as error:
                skipped = str(error)
                continue
            if not isinstance(step, EnvStep) or not step.done:
                raise TypeError(f"{part.name} asks for another turn, and cannot be one of several rewards")
            components |= {f"{part.name}/{name}": value for name, value in step.components.items()}
            components[part.name] = reward = _number(step.reward, part.name)
            rewarded, total = True, total + part.weight * reward
            answer = step.answer if answer is None else answer
            feedback += [step.feedback] if step.feedback else []
        if not rewarded:
            raise SkipSample(skipped)
        feedback_text = "\n".join(feedback) or None
        return EnvStep(reward=total, done=True, answer=answer, feedback=feedback_text, components=components)

    def get_metrics(self) -> dict[str, float]:
        measured = [(part.name, awaited(env.get_metrics())) for part, env in self._parts]
        return {f"{name}/{metric}": value for name, item in measured for metric, value in item.items()}

    def close(self) -> None:
        close_all(*(env for _, env in self._parts))


def _number(reward: object, name: str) -> float:
    with suppress(TypeError, ValueError):
        if not isinstance(reward, str | bytes):
            value: Any = reward
            return float(value)
    raise TypeError(f"{name} gave the reward {reward!r:.100}, which is not a number")

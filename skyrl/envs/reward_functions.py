"""Reward functions as one environment, in the signatures that their users already have.

    skyrl   function(completion, ground_truth=..., **columns) -> number
    TRL     function(completions=[...], **columns) -> list of numbers, None where it has no reward for a sample
    verl    function(data_source=..., solution_str=..., ground_truth=..., extra_info=...) -> number or dict with `score`

Which one it is follows from its parameters: TRL's has `completions`, verl's `solution_str`. Each may be `async def`.
A function of TRL's form is called with one sample at a time; `group_rewards.py` has all samples of a prompt.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from skyrl.envs.coroutines import settled
from skyrl.envs.env import Env, EnvStep, Message
from skyrl.errors import SkipSample

Signature = Literal["skyrl", "trl", "verl"]


class RewardFunctionEnv(Env):
    """One turn, rewarded by a plain function."""

    def __init__(self, extras: Mapping[str, Any], function: Callable[..., Any]) -> None:
        super().__init__(extras)
        self._function = function
        self._prompt: Sequence[Mapping[str, str]] = ()
        self._measured: dict[str, float] = {}
        self._answer: str | None = None

    def init(self, prompt: tuple[Message, ...]) -> tuple[tuple[Message, ...], dict[str, Any]]:
        self._prompt = prompt
        return super().init(prompt)

    def step(self, action: str) -> EnvStep:
        match signature_of(self._function):
            case "trl":
                reward = self._as_trl(action)
            case "verl":
                reward = self._as_verl(action)
            case _:
                given = ("ground_truth", "data_source")
                columns = {key: value for key, value in self.extras.items() if key not in given}
                reward = settled(self._function(action, ground_truth=self._ground_truth, **columns))
        return EnvStep(reward=reward, done=True, answer=self._answer)

    def get_metrics(self) -> dict[str, float]:
        return self._measured

    @property
    def _ground_truth(self) -> object:
        spec = self.extras.get("reward_spec")
        return spec.get("ground_truth") if isinstance(spec, Mapping) else self.extras.get("ground_truth")

    def _as_trl(self, action: str) -> Any:
        """A batch of one: each column is a list, and so is what it gives. Completions are chats, as the prompt is."""
        columns = {"ground_truth": self._ground_truth, **self.extras}
        batch = {name: [value] for name, value in columns.items()}
        chat = [{"role": "assistant", "content": action}]
        given = settled(self._function(prompts=[list(self._prompt)], completions=[chat], **batch))
        if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != 1:
            raise TypeError(
                f"a TRL reward function gives a list with one number for each completion, not {given!r:.100}"
            )
        if given[0] is None:
            raise SkipSample("the reward function gives None: it has no reward for this sample")
        return given[0]

    def _as_verl(self, action: str) -> Any:
        given = settled(
            self._function(
                data_source=self.extras.get("data_source"),
                solution_str=action,
                ground_truth=self._ground_truth,
                extra_info=self.extras.get("extra_info"),
            )
        )
        if not isinstance(given, Mapping):
            return given
        numbers = {name: value for name, value in given.items() if isinstance(value, bool | int | float)}
        self._measured = {name: float(value) for name, value in numbers.items() if name != "score"}
        self._answer = given["pred"] if isinstance(given.get("pred"), str) else None
        return given["score"]


def signature_of(function: Callable[..., Any]) -> Signature:
    """Kind of a reward function, by the names of its parameters."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin, of which nothing is known
        return "skyrl"
    if "solution_str" in names:
        return "verl"
    return "trl" if "completions" in names else "skyrl"

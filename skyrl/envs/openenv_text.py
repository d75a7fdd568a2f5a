"""Adapter for environments on an OpenEnv server.

Define one in a file of your own, with openenv installed next to skyrl:

    from openenv.core import GenericEnvClient
    from skyrl.envs.openenv_text import OpenEnvTextEnv

    def my_task(extras):
        client = GenericEnvClient(base_url="http://127.0.0.1:8000").sync()
        return OpenEnvTextEnv(extras, client, action=lambda answer: {"message": answer}, text=lambda seen: seen["text"])

Each trajectory is a separate session on the server, whose `max_concurrent_envs` must be large enough. Only `connect`,
`reset`, `step` and `close` of the client are called, so openenv is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from skyrl.envs.env import Env, EnvStep, Message
from skyrl.errors import TaskError


class StepResult(Protocol):
    """The result of an OpenEnv client's `reset` and `step`."""

    observation: Any
    reward: Any
    """Reward as a number; None if the step has none."""

    done: Any


class Client(Protocol):
    """Methods of a synchronous OpenEnv client that are used here."""

    def connect(self) -> object:
        """Open a session."""

    def reset(self, *, seed: int = ...) -> StepResult:
        """Begin an episode."""

    def step(self, action: Any, /) -> StepResult:
        """Take one action."""

    def close(self) -> object:
        """End the session."""


class OpenEnvTextEnv(Env):
    """The first observation follows the prompt. Each answer is an action, each later observation a user message.

    `reset` gets the row's `seed`, if it has one.
    """

    def __init__(
        self,
        extras: Mapping[str, Any],
        client: Client,
        *,
        action: Callable[[str], Any],
        text: Callable[[Any], str],
    ) -> None:
        """`client` is a synchronous client for this episode only. `action` turns an answer into an action; `text` turns
        an observation into the text that the policy sees.
        """
        super().__init__(extras)
        self._client, self._action, self._show = client, action, text
        self._steps = 0

    def init(self, prompt: tuple[Message, ...]) -> tuple[tuple[Message, ...], dict[str, Any]]:
        self._client.connect()
        seed = self.extras.get("seed")
        started = self._client.reset(**({} if seed is None else {"seed": seed}))
        return (*prompt, self._message(started.observation)), {}

    def step(self, action: str) -> EnvStep:
        self._steps += 1
        result = self._client.step(self._action(action))
        observations = () if result.done else (self._message(result.observation),)
        reward = 0.0 if result.reward is None and not result.done else result.reward
        return EnvStep(reward=reward, done=bool(result.done), observations=observations)

    def get_metrics(self) -> dict[str, float]:
        return {"steps": float(self._steps)}

    def close(self) -> None:
        self._client.close()

    def _message(self, observation: object) -> dict[str, str]:
        text = self._show(observation)
        if not isinstance(text, str):
            raise TaskError(f"text() made {type(text).__name__} of an observation of openenv, not text")
        return {"role": "user", "content": text}

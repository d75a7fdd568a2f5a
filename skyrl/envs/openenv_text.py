"""Environments that an OpenEnv server holds, as environments of ours.

A file of the user's makes one, with openenv installed beside skyrl:

    from openenv.core import GenericEnvClient
    from skyrl.envs.openenv_text import OpenEnvTextEnv

    def my_task(extras):
        client = GenericEnvClient(base_url="http://127.0.0.1:8000").sync()
        return OpenEnvTextEnv(extras, client, action=lambda answer: {"message": answer}, text=lambda seen: seen["text"])

Each trajectory is a session of its own at the server, which has to allow as many (`max_concurrent_envs`). Only
`connect`, `reset`, `step` and `close` of the client are used, so that nothing of it is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from skyrl.envs.env import Env, EnvStep, Message
from skyrl.errors import TaskError


class Result(Protocol):
    """The result of an openenv client's `reset` and `step`."""

    observation: Any
    reward: Any
    """A number; None where the step has none."""

    done: Any


class Client(Protocol):
    """The methods of a synchronous client of openenv that are used here."""

    def connect(self) -> object:
        """Open a session of its own."""

    def reset(self, *, seed: int = ...) -> Result:
        """Begin an episode."""

    def step(self, action: Any, /) -> Result:
        """Act once."""

    def close(self) -> object:
        """End the session."""


class OpenEnvTextEnv(Env):
    """The first observation follows the prompt; each answer is an action, each further observation a user's message.

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
        """`client` is a synchronous one, for this episode alone. `action` makes an action of an answer; `text` gives
        what the policy sees of an observation.
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
        told = () if result.done else (self._message(result.observation),)
        reward = 0.0 if result.reward is None and not result.done else result.reward
        return EnvStep(reward=reward, done=bool(result.done), observations=told)

    def get_metrics(self) -> dict[str, float]:
        return {"steps": float(self._steps)}

    def close(self) -> None:
        self._client.close()

    def _message(self, observation: object) -> dict[str, str]:
        shown = self._show(observation)
        if not isinstance(shown, str):
            raise TaskError(f"text() made {type(shown).__name__} of an observation of openenv, not text")
        return {"role": "user", "content": shown}

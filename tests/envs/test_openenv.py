"""The adapter against a stand-in for openenv's synchronous client (0.10); `openenv_live.py` asks a real server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skyrl.envs.openenv_text import OpenEnvTextEnv
from skyrl.errors import TaskError

PROMPT = ({"role": "user", "content": "Walk."},)


class Corridor:
    """Say `on` twice. As `GenericEnvClient(...).sync()`: results with observation, reward and done."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.place = 0

    def connect(self) -> None:
        self.calls.append("connect")

    def reset(self, **options: Any) -> Any:
        self.calls.append(options)
        return SimpleNamespace(observation={"text": "place 0"}, reward=None, done=False)

    def step(self, action: Any) -> Any:
        self.place += action == {"message": "on"}
        done = self.place == 2
        return SimpleNamespace(observation={"text": f"place {self.place}"}, reward=1.0 if done else None, done=done)

    def close(self) -> None:
        self.calls.append("close")


def env(client: Corridor, **extras: Any) -> OpenEnvTextEnv:
    return OpenEnvTextEnv(
        extras, client, action=lambda answer: {"message": answer}, text=lambda observation: observation["text"]
    )


def test_an_environment_of_a_server_plays_an_episode() -> None:
    client = Corridor()
    task = env(client, seed=3)
    messages, _ = task.init(PROMPT)
    assert messages == (*PROMPT, {"role": "user", "content": "place 0"})
    first, last = task.step("on"), task.step("on")
    task.close()
    assert (first.reward, first.done, first.observations[0]["content"]) == (0.0, False, "place 1")
    assert (last.reward, last.done, last.observations) == (1.0, True, ())
    assert client.calls == ["connect", {"seed": 3}, "close"]
    assert task.get_metrics() == {"steps": 2.0}


def test_an_observation_that_is_not_text_is_refused() -> None:
    task = OpenEnvTextEnv({}, Corridor(), action=str, text=lambda observation: observation)
    with pytest.raises(TaskError, match="dict of an observation"):
        task.init(PROMPT)

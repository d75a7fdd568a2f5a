"""A real OpenEnv server on loopback through the adapter: `python tests/envs/openenv_live.py`, where openenv 0.10 is.

Its dependencies do not fit beside those of the tests, whose stand-in for the client is in `test_openenv.py`.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

import uvicorn
from openenv.core import GenericEnvClient
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

from skyrl.envs.openenv_text import OpenEnvTextEnv


class Said(Action):
    message: str


class Seen(Observation):
    text: str


class Corridor(Environment[Said, Seen, State]):
    """Say `on` twice."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.place = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Seen:
        self.place = 0
        return Seen(text=f"place 0, seed {seed}")

    def step(self, action: Said, timeout_s: float | None = None, **_: Any) -> Seen:
        self.place += action.message == "on"
        return Seen(text=f"place {self.place}", done=self.place == 2, reward=float(self.place == 2))

    @property
    def state(self) -> State:
        return State()


def main() -> None:
    """Two sessions at once, each with a place of its own."""
    app = create_fastapi_app(Corridor, Said, Seen, max_concurrent_envs=4)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        try:
            play(url)
        finally:
            server.should_exit = True
            thread.join()


def play(url: str) -> None:
    """Asserts, and prints what was seen."""
    one, other = (
        OpenEnvTextEnv(
            {"seed": 3},
            GenericEnvClient(base_url=url).sync(),
            action=lambda answer: {"message": answer},
            text=lambda seen: seen["text"],
        )
        for _ in range(2)
    )
    for env in (one, other):
        assert env.init(())[0] == ({"role": "user", "content": "place 0, seed 3"},)
    steps = [one.step("on"), other.step("back"), one.step("on")]
    print([(step.reward, step.done, *(message["content"] for message in step.observations)) for step in steps])
    assert [(step.reward, step.done) for step in steps] == [(0.0, False), (0.0, False), (1.0, True)]
    assert [message["content"] for message in steps[1].observations] == ["place 0"]
    one.close()
    other.close()


if __name__ == "__main__":
    main()

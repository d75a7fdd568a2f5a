"""Engines that are added and drained while a run goes on: requests in the run's folder, and what the run answers.

engines/request-*.json    one request, written whole by `skyrl engines`; the run removes it when it has answered
engines/state.json        the engines and the last answers, replaced by the run at the beginning of each step
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import attrs
from attrs import frozen

from skyrl.errors import UserError
from skyrl.inference.client import EngineState, InferenceEngineClient
from skyrl.processes.background import in_a_daemon_thread
from skyrl.runs.inputs import notice

FOLDER, STATE = "engines", "state.json"
REPLIES = 20
"""Answers that are kept."""

Action = Literal["add", "drain"]


@frozen(kw_only=True)
class Reply:
    """What became of a request."""

    asked: str
    """The request in words, such as `drain engine 1`."""

    said: str
    moment: float
    """Seconds since 1970."""


@frozen(kw_only=True)
class Engines:
    """The content of `state.json`."""

    least: int
    most: int
    engines: tuple[EngineState, ...]
    answers: tuple[Reply, ...] = ()

    @classmethod
    def read(cls, run: Path) -> Engines:
        """Raises `UserError` where the run has not written it."""
        file = run / FOLDER / STATE
        try:
            plain = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise UserError(
                f"{run} has no {FOLDER}/{STATE}: it is not the folder of a run whose engines can change "
                "(on Ray, trainer.placement.colocate_all = false), or the run has not begun its first step"
            ) from None
        engines = tuple(EngineState(**each) for each in plain["engines"])
        answers = tuple(Reply(**each) for each in plain["answers"])
        return cls(least=plain["least"], most=plain["most"], engines=engines, answers=answers)


def ask(run: Path, action: Action, engine: int | None = None) -> None:
    """Leave a request for the run in this folder. `engine` is the number of the one to drain, None: the last."""
    folder = run / FOLDER
    name = f"request-{time.time_ns()}-{uuid.uuid4().hex[:8]}"
    scratch = folder / f"{name}.tmp"
    scratch.write_text(json.dumps({"action": action, "engine": engine}), encoding="utf-8")
    scratch.replace(folder / f"{name}.json")


def unanswered(run: Path) -> int:
    """Requests that the run has not looked at yet."""
    return len(list((run / FOLDER).glob("request-*.json")))


class EngineChanges:
    """The run's side: changes its engines between two steps. Requests to an earlier session are forgotten."""

    def __init__(
        self, run: Path, client: InferenceEngineClient, *, least: int, most: int, remove: Callable[[int], None]
    ) -> None:
        """`remove` ends the process of the engine of a number, and gives its GPUs back."""
        self._folder, self._client, self._least, self._most, self._remove = run / FOLDER, client, least, most, remove
        self._answers: list[Reply] = []
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in self._folder.iterdir():
            file.unlink()

    async def heed(self) -> None:
        """Do what is asked for. Called before a step samples: an added engine starts in the background meanwhile, and
        a drained one has finished when this returns.
        """
        for file in sorted(self._folder.glob("request-*.json")):
            asked, said = await self._answered(file.read_text(encoding="utf-8"))
            self._answer(asked, said)
            file.unlink()
        for number, reason in self._client.not_added():
            self._answer(f"add engine {number}", f"engine {number} could not be started: {reason}")
        self._write()

    def _answer(self, asked: str, said: str) -> None:
        self._answers = [*self._answers, Reply(asked=asked, said=said, moment=time.time())][-REPLIES:]
        notice(f"{asked}: {said}")

    async def _answered(self, text: str) -> tuple[str, str]:
        """The request in words, and what became of it."""
        try:
            plain = json.loads(text)
            action, number = plain["action"], plain["engine"]
        except (ValueError, KeyError, TypeError):
            return "a request that cannot be read", "refused"
        if action == "add":
            return "add an engine", self._add()
        if action == "drain" and (number is None or isinstance(number, int)):
            return "drain an engine" if number is None else f"drain engine {number}", await self._drain(number)
        return "a request that cannot be read", "refused"

    def _add(self) -> str:
        there = len(self._client.states)
        if there >= self._most:
            return f"refused: there are {there}, and generator.inference_engine.max_engines is {self._most}"
        return f"engine {self._client.add_engine()} is being started, and serves with the next weights"

    async def _drain(self, number: int | None) -> str:
        states = {each.number: each.state for each in self._client.states}
        serving = [number for number, state in states.items() if state == "serving"]
        gone = serving[-1] if number is None else number
        if states.get(gone) not in ("serving", "lost"):
            return f"refused: the engines that serve are {', '.join(map(str, serving))}"
        if states[gone] == "serving" and len(serving) <= self._least:
            return f"refused: {len(serving)} serve, and generator.inference_engine.min_engines is {self._least}"
        await self._client.drain(gone)
        await in_a_daemon_thread(lambda: self._remove(gone))
        return f"engine {gone} {'has finished its samples, and ' if states[gone] == 'serving' else ''}is gone"

    def _write(self) -> None:
        found = Engines(
            least=self._least, most=self._most, engines=tuple(self._client.states), answers=tuple(self._answers)
        )
        scratch = self._folder / f"{STATE}.tmp"
        with contextlib.suppress(OSError):  # a full disk disturbs nothing here
            scratch.write_text(json.dumps(attrs.asdict(found)), encoding="utf-8")
            scratch.replace(self._folder / STATE)

"""Adds and drains engines during a run, by requests that `skyrl engines` leaves in the run's folder.

engines/request-*.json    one request, written atomically by `skyrl engines`; the run deletes it once it has replied
engines/state.json        the engines and the latest replies, replaced by the run before each step
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
from skyrl.inference.pool.client import EngineState, InferenceEngineClient
from skyrl.processes.event_loop import run_in_daemon_thread
from skyrl.runs.inputs import notice
from skyrl.storage.atomic import write_file
from skyrl.tree.files import stored_text

FOLDER, STATE = "engines", "state.json"
REPLIES = 20
"""Replies that `state.json` keeps."""

Action = Literal["add", "drain"]


@frozen(kw_only=True)
class ChangeReply:
    """The run's reply to one request."""

    asked: str
    """The request in words, such as `drain engine 1`."""

    said: str
    """Action that was taken, or the reason for a refusal."""

    moment: float
    """Time of the reply, in seconds since 1970."""


@frozen(kw_only=True)
class EngineList:
    """The content of `state.json`."""

    least: int
    """Minimum number of engines that serve: `min_engines`."""

    most: int
    """Maximum number of engines: `max_engines`."""

    engines: tuple[EngineState, ...]
    answers: tuple[ChangeReply, ...] = ()
    """The latest replies, the newest last."""

    @classmethod
    def read(cls, run: Path) -> EngineList:
        """The state of the run in this folder. Raises `UserError` if the file does not exist or cannot be read."""
        file = run / FOLDER / STATE
        try:
            plain = json.loads(stored_text(file))
            return cls(
                least=plain["least"],
                most=plain["most"],
                engines=tuple(EngineState(**item) for item in plain["engines"]),
                answers=tuple(ChangeReply(**entry) for entry in plain["answers"]),
            )
        except FileNotFoundError:
            raise UserError(
                f"{run} has no {FOLDER}/{STATE}: it is not the folder of a run whose engines can change "
                "(on Ray, trainer.placement.colocate_all = false), or the run has not begun its first step"
            ) from None
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{file} cannot be read: another version of skyrl wrote it, or it is damaged") from None


def ask(run: Path, action: Action, engine: int | None = None) -> None:
    """Leave a request for the run in this folder. `engine` is the number of the engine to drain; None: the last one.

    Raises `UserError` if the request cannot be written.
    """
    folder = run / FOLDER
    name = f"request-{time.time_ns()}-{uuid.uuid4().hex[:8]}"
    try:
        write_file(folder / f"{name}.json", json.dumps({"action": action, "engine": engine}), durable=False)
    except OSError as error:
        raise UserError(f"the request cannot be written to {folder}: {error.strerror}") from None


def unanswered(run: Path) -> int:
    """Number of requests that the run has not handled yet."""
    return len(list((run / FOLDER).glob("request-*.json")))


class EngineChanges:
    """The run's side: changes its engines between two steps.

    Requests that an earlier process of the run left unanswered are deleted.
    """

    def __init__(
        self, run: Path, client: InferenceEngineClient, *, least: int, most: int, remove: Callable[[int], None]
    ) -> None:
        """`least` and `most` bound the number of engines; `remove` ends the process of the engine with a given number
        and releases its GPUs.
        """
        self._folder, self._client, self._least, self._most, self._remove = run / FOLDER, client, least, most, remove
        self._answers: list[ChangeReply] = []
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in self._folder.iterdir():
            file.unlink()

    async def handle_requests(self) -> None:
        """Carry out every request in the folder and write the new state. Called before each step samples.

        Engines that are added start in the background; engines that are drained have finished when this returns.
        """
        for file in sorted(self._folder.glob("request-*.json")):
            request, answer = await self._handle(stored_text(file))
            self._answer(request, answer)
            file.unlink()
        for number, reason in self._client.failed_additions():
            self._answer(f"add engine {number}", f"engine {number} could not be started: {reason}")
        engines, answers = tuple(self._client.states), tuple(self._answers)
        engine_list = EngineList(least=self._least, most=self._most, engines=engines, answers=answers)
        with contextlib.suppress(OSError):  # the list is for people: a full disk must not end the run
            write_file(self._folder / STATE, json.dumps(attrs.asdict(engine_list)), durable=False)

    def _answer(self, request: str, reply: str) -> None:
        self._answers = [*self._answers, ChangeReply(asked=request, said=reply, moment=time.time())][-REPLIES:]
        notice(f"{request}: {reply}")

    async def _handle(self, text: str) -> tuple[str, str]:
        """The request in words, and what was done."""
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
        engines = len(self._client.states)
        if engines >= self._most:
            return f"refused: there are {engines} engines, and generator.inference_engine.max_engines is {self._most}"
        return f"engine {self._client.add_engine()} is starting; it serves from the next weight transfer on"

    async def _drain(self, number: int | None) -> str:
        states = {state.number: state.state for state in self._client.states}
        serving = [number for number, state in states.items() if state == "serving"]
        gone = serving[-1] if number is None else number
        if states.get(gone) not in ("serving", "lost"):
            return f"refused: engine {gone} is not serving; these are: {', '.join(map(str, serving))}"
        if states[gone] == "serving" and len(serving) <= self._least:
            least = f"generator.inference_engine.min_engines is {self._least}"
            return f"refused: {len(serving)} engines are serving, and {least}"
        await self._client.drain(gone)
        await run_in_daemon_thread(lambda: self._remove(gone))
        return f"engine {gone} {'finished its samples and ' if states[gone] == 'serving' else ''}was removed"

"""Engines that are added and drained on request: between which bounds, when they serve, and what they finish before."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner

from skyrl.cli.training.engines import engines as command
from skyrl.errors import ProcessError, UserError
from skyrl.runs.engine_changes import EngineChanges, EngineList, ask, unanswered
from tests.inference.test_client import SlowEngine, asked_of
from tests.inference.test_restarts import Starts, client, lost, names, publish


class Desk:
    """Two engines and one that can be started, with the run's side of requests."""

    def __init__(self, run: Path, *, least: int = 1, most: int = 3) -> None:
        self.run = run
        self.a, self.b, self.new = SlowEngine("a"), SlowEngine("b"), SlowEngine("new")
        self.starts = Starts(self.new)
        self.client = client(self.starts, self.a, self.b)
        self.removed: list[int] = []
        self.changes = EngineChanges(run, self.client, least=least, most=most, remove=self.removed.append)

    async def asks(self, action: str, engine: int | None = None) -> str:
        """The answer to one request."""
        ask(self.run, "add" if action == "add" else "drain", engine)
        await self.changes.handle_requests()
        return self.said()[-1]

    def said(self) -> list[str]:
        return [answer.said for answer in EngineList.read(self.run).answers]


async def test_an_added_engine_serves_with_the_next_weights(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    assert await desk.asks("add") == "engine 2 is starting; it serves from the next weight transfer on"
    assert [engine.state for engine in desk.client.states] == ["serving", "serving", "starting"]
    await desk.starts.ended()
    await desk.changes.handle_requests()
    assert [engine.state for engine in EngineList.read(tmp_path).engines] == [
        "serving",
        "serving",
        "waiting for weights",
    ]
    assert (names(desk.client), desk.new.events) == (["a", "b"], [])
    await publish(desk.client, version=1)
    assert (names(desk.client), desk.new.weights, desk.starts.numbers) == (["a", "b", "new"], ["for 2"], [2])
    assert desk.client.metrics == {
        "inference/engines_in_service": 3,
        "inference/engines_lost": 0,
        "inference/engine_restarts": 0,
    }
    assert await desk.asks("add") == "refused: there are 3 engines, and generator.inference_engine.max_engines is 3"


async def test_a_drained_engine_finishes_its_samples_and_gets_no_others(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    first, second = await asked_of(desk.client, ("one", 1), ("two", 1))
    ask(tmp_path, "drain", 0)
    draining = asyncio.ensure_future(desk.changes.handle_requests())
    (third,) = await asked_of(desk.client, ("three", 1))
    assert (desk.a.asked, desk.b.asked) == (["one"], ["two", "three"])
    assert not draining.done()
    assert desk.removed == []
    desk.a.go.set()
    await draining
    assert (await first)[0].text == "a"
    assert (desk.a.events, desk.removed) == (["close"], [0])
    assert desk.said() == ["engine 0 finished its samples and was removed"]
    desk.b.go.set()
    await asyncio.gather(second, third)
    assert desk.client.metrics["inference/engines_lost"] == 0
    await desk.client.close()
    assert desk.a.events == ["close"]


async def test_a_draining_engine_that_dies_has_its_samples_drawn_elsewhere(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    (first,) = await asked_of(desk.client, ("one", 1))
    ask(tmp_path, "drain", 0)
    draining = asyncio.ensure_future(desk.changes.handle_requests())
    await asyncio.sleep(0)
    desk.a.fault = ProcessError("it died")
    desk.a.go.set()
    desk.b.go.set()
    await draining
    assert (await first)[0].text == "b"
    assert desk.starts.numbers == []  # it was to go


async def test_requests_that_cannot_be_granted_are_refused_with_the_reason(tmp_path: Path) -> None:
    desk = Desk(tmp_path, least=2, most=2)
    assert await desk.asks("drain", 5) == "refused: engine 5 is not serving; these are: 0, 1"
    assert await desk.asks("drain") == "refused: 2 engines are serving, and generator.inference_engine.min_engines is 2"
    assert "max_engines is 2" in await desk.asks("add")
    (tmp_path / "engines" / "request-0.json").write_text("[]")
    await desk.changes.handle_requests()
    assert (desk.said()[-1], unanswered(tmp_path)) == ("refused", 0)
    assert (names(desk.client), desk.removed) == (["a", "b"], [])


async def test_a_lost_engine_that_is_drained_makes_room_for_another(tmp_path: Path) -> None:
    desk = Desk(tmp_path, most=2)
    desk.starts.outcomes = [ProcessError("no room")] * 3
    await lost(desk.client, desk.a, desk.b)
    await desk.starts.ended()
    assert "refused" in await desk.asks("add")
    assert await desk.asks("drain", 0) == "engine 0 was removed"
    desk.starts.outcomes = [desk.new]
    assert (await desk.asks("add")).startswith("engine 2 is starting")
    await desk.starts.ended()


async def test_an_engine_that_cannot_be_added_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.starts.outcomes = [ProcessError("no room")]
    await desk.asks("add")
    await desk.starts.ended()
    await publish(desk.client, version=1)
    await desk.changes.handle_requests()
    assert desk.said()[-1] == "engine 2 could not be started: no room"
    assert [engine.number for engine in EngineList.read(tmp_path).engines] == [0, 1]


async def test_requests_to_an_earlier_session_are_forgotten(tmp_path: Path) -> None:
    Desk(tmp_path)
    ask(tmp_path, "drain")
    desk = Desk(tmp_path)
    await desk.changes.handle_requests()
    assert (desk.said(), unanswered(tmp_path)) == ([], 0)


async def test_the_command_lists_engines_and_leaves_requests_for_a_running_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path)
    assert await desk.asks("drain") == "engine 1 finished its samples and was removed"
    over, *lines = CliRunner().invoke(command, ["list", str(tmp_path)]).output.splitlines()
    assert over == f"{tmp_path} is not running: its engines are gone. Their last states:"
    assert lines[1].split() == ["0", "serving", "0", "0"]
    assert lines[2] == "engines allowed: 1 to 3"
    assert lines[3].endswith("drain an engine: engine 1 finished its samples and was removed")
    ended = CliRunner().invoke(command, ["add", str(tmp_path)])
    assert isinstance(ended.exception, UserError)
    assert "is not running" in str(ended.exception)
    monkeypatch.setattr("skyrl.runs.run_owner.is_locked", lambda folder: True)
    assert CliRunner().invoke(command, ["add", str(tmp_path), "--count", "2"]).exit_code == 0
    assert unanswered(tmp_path) == 2
    assert "is not running" not in CliRunner().invoke(command, ["list", str(tmp_path)]).output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["add", "RUN", "3"], "Got unexpected extra argument"),
        (["list", "RUN", "3"], "Got unexpected extra argument"),
        (["list", "RUN", "--count", "2"], "No such option"),
        (["drain", "RUN", "1", "--count", "2"], "--count works only without engine numbers"),
    ],
)
def test_arguments_that_would_be_ignored_are_refused(tmp_path: Path, words: list[str], message: str) -> None:
    asyncio.run(Desk(tmp_path).changes.handle_requests())
    result = CliRunner().invoke(command, [str(tmp_path) if word == "RUN" else word for word in words])
    assert result.exit_code != 0 and message in f"{result.output}{result.exception}"


@pytest.mark.parametrize("text", ["[]", "{}", '{"least": 1, "most": 2, "engines": [{"rank": 1}], "answers": []}', "{"])
def test_a_state_file_of_another_version_is_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    Desk(tmp_path)
    (tmp_path / "engines" / "state.json").write_text(text)
    with pytest.raises(UserError, match=r"state\.json cannot be read: another version of skyrl wrote it"):
        EngineList.read(tmp_path)


def test_a_request_that_cannot_be_written_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "engines").write_text("a file")
    with pytest.raises(UserError, match="the request cannot be written to .*engines: Not a directory"):
        ask(tmp_path, "add")


def test_the_folder_of_another_run_has_no_engines(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no engines/state.json"):
        EngineList.read(tmp_path)

"""Servers that fail in every way that a network and other people's programs have: each is named, and no sample is lost
or drawn twice.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import ssl
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from skyrl.config import InferenceEngineConfig, SkyRLLoraConfig
from skyrl.errors import NonFiniteError, ProcessError, RunError, SkyRLError, UserError, WeightSyncError
from skyrl.inference.draws import sample_seed
from skyrl.inference.engine import Completion, GenerationRequest, NewTokens
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.inference.pool.restarts import EngineRestarts
from skyrl.inference.servers import http_connection
from skyrl.inference.servers.answers import mapping
from skyrl.inference.servers.http_connection import Connection
from skyrl.inference.servers.http_engine import HttpEngine, Pulse
from skyrl.inference.servers.server_api import ServerDeadlines
from skyrl.inference.servers.sglang_server import SGLangServer
from skyrl.inference.servers.vllm_server import VLLMServer
from skyrl.weight_receiver.incoming_weights import FolderWeights, SharedWeights, WeightInfo
from tests.inference.fault_server import FAULTS, FaultServer, sample
from tests.inference.nano import nano_tokenizer, prompts, request
from tests.inference.vllm_models import small_model

PATIENT = 240.0
"""Deadline in seconds of a server that answers; nothing waits for it."""


pytestmark = pytest.mark.usefixtures("short_waits")


def engine(folder: Path, url: str, *, call: float = PATIENT, heartbeat: float = PATIENT) -> HttpEngine:
    deadlines = ServerDeadlines(start=PATIENT, call=call, heartbeat=heartbeat)
    server = SGLangServer(Connection(url), Connection(url), deadlines)
    return HttpEngine(server, model_path=str(folder), heartbeat=heartbeat, tokenizer=nano_tokenizer())


def right(request: GenerationRequest) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Tokens and log-probabilities of each sample."""
    drawn = [sample(sample_seed(key) & (2**31 - 1), request.sampling.max_generate_length) for key in request.keys]
    return [(tuple(tokens), tuple(logprobs)) for tokens, logprobs in drawn]


def drawn(completions: tuple[Completion, ...]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return [(completion.token_ids, completion.logprobs) for completion in completions]


SAID: dict[str, tuple[type[SkyRLError], str]] = {
    "hang up": (ProcessError, "failed 6 times at /generate: RemoteProtocolError"),
    "half open": (ProcessError, "did not complete /generate within 0.5 s: it did not answer"),
    "silent": (ProcessError, "gave no sign of life for 0.5 s"),
    "not json": (ProcessError, "its answer is not JSON"),
    "truncated": (ProcessError, "failed 6 times at /generate: RemoteProtocolError"),
    "slow": (ProcessError, "its answer was still incomplete after 0.3 s"),
    "unknown token": (ProcessError, "answers with token 258, outside the vocabulary of 258 tokens, 3 times"),
    "too few": (ProcessError, "answers with 11 tokens of 12, although it reports that the limit was reached, 3 times"),
    "too many": (ProcessError, "answers with 13 tokens, where 1 to 12 were asked for, 3 times"),
    "no log-probabilities": (ProcessError, "answers without meta_info.output_token_logprobs, 3 times at /generate"),
    "positive": (ProcessError, "answers with 2.5 for a log-probability, which cannot be above 0, 3 times"),
    "other version": (WeightSyncError, "a token drawn by weights of version 77, where it was given 0 at /generate"),
    "nameless version": (WeightSyncError, "weight version 'default', which is not a version that this run has set"),
    "busy": (ProcessError, "failed 6 times at /generate: it answers 503"),
    "broken": (ProcessError, "failed 6 times at /generate: it answers 500: out of memory"),
    "redirect": (ProcessError, "redirects /generate to 192.0.2.1, which is not followed"),
    "list": (ProcessError, "for an answer, 3 times"),
    "aborted": (ProcessError, "answers with an incomplete sample that ended by 'abort', 3 times"),
    "unfinished": (ProcessError, "with a sample that stops at token"),
    "refused": (ProcessError, r"refuses /generate \(400\): out of memory, 3 times"),
    "not finite": (NonFiniteError, "answers with nan for a log-probability: .* not finite, 3 times at /generate"),
    "null": (NonFiniteError, "answers with nan for a log-probability: .* not finite, 3 times at /generate"),
    "huge number": (ProcessError, "answers with -10+... for a log-probability, 3 times at /generate"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_server_that_keeps_failing_is_named_with_what_it_did(folder: Path, fault: str) -> None:
    kind, message = SAID[fault]
    waits = {"half open": {"call": 0.5}, "slow": {"call": 4.0}, "silent": {"heartbeat": 0.5}}.get(fault, {})
    async with FaultServer(always=fault) as server:
        http_engine = engine(folder, server.url, **waits)
        with pytest.raises(kind, match=message) as raised:
            await http_engine.generate(request(prompts(5)[0]))
        assert server.url in str(raised.value) or kind is WeightSyncError
        assert raised.value.exit_code == 1  # the run had begun
        await http_engine.close()


PASSING = [fault for fault in FAULTS if fault not in ("half open", "silent", "redirect") and "version" not in fault]
"""Faults after which the same server may give the right answer."""


@pytest.mark.long
async def test_a_fault_that_passes_by_costs_no_sample_and_changes_none(folder: Path) -> None:
    for fault in PASSING:
        async with FaultServer([fault]) as server:
            http_engine, generation_request = engine(folder, server.url), request(prompts(5)[0], count=2)
            assert drawn(await http_engine.generate(generation_request)) == right(generation_request), fault
            assert server.answered == 2, fault
            await http_engine.close()


STREAMED = [fault for fault in PASSING if fault != "slow"] + ["error event", "no last event"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fault", STREAMED)
async def test_a_stream_that_fails_is_drawn_again_and_heard_from_its_beginning(folder: Path, fault: str) -> None:
    async with FaultServer([fault]) as server:
        http_engine, heard = engine(folder, server.url), list[NewTokens]()
        generation_request = evolve(request(prompts(5)[0]), on_tokens=heard.append)
        assert drawn(await http_engine.generate(generation_request)) == right(generation_request)
        await http_engine.close()
    last = max(index for index, new in enumerate(heard) if new.start == 0)
    assert sum((new.token_ids for new in heard[last:]), ()) == right(generation_request)[0][0]
    assert len(heard[last:]) == 3


async def test_a_token_that_the_model_does_not_have_is_never_reported(folder: Path) -> None:
    async with FaultServer(always="unknown token") as server:
        http_engine, heard = engine(folder, server.url), list[NewTokens]()
        with pytest.raises(ProcessError, match="answers with token 258, outside the vocabulary of 258 tokens, 3 times"):
            await http_engine.generate(evolve(request(prompts(5)[0]), on_tokens=heard.append))
        await http_engine.close()
    assert heard == []


async def test_an_event_without_end_is_cut_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "LONGEST_ANSWER", 20)
    async with FaultServer() as server:
        http_engine = engine(folder, server.url)
        monkeypatch.setattr(http_engine, "_connected", True)
        with pytest.raises(ProcessError, match="it sends an event of more than 20 bytes"):
            await http_engine.generate(evolve(request(prompts(5)[0]), on_tokens=lambda _: None))
        await http_engine.close()


def schedule(seed: int) -> list[str]:
    """Faults of a server's first requests, `""` for none."""
    draws = random.Random(seed)
    return [draws.choice([*FAULTS, "", "", "", ""]) for _ in range(draws.randint(1, 8))]


SCHEDULES = [pytest.param(seed, marks=[pytest.mark.long] * (seed > 3)) for seed in range(100)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", SCHEDULES)
async def test_every_sample_comes_once_whatever_one_of_two_servers_does(folder: Path, seed: int) -> None:
    requests = [request(prompt, count=2, name=f"prompt {n}") for n, prompt in enumerate(prompts(*range(3, 11)))]
    async with FaultServer(schedule(seed), always="") as faulty, FaultServer() as sound:
        engines = [engine(folder, faulty.url, call=3.0, heartbeat=1.0), engine(folder, sound.url)]
        config = InferenceEngineConfig(backend="sglang", max_num_seqs=4)
        client = InferenceEngineClient(engines, nano_tokenizer(), "a/model", SkyRLLoraConfig(), config)
        answers = await asyncio.wait_for(asyncio.gather(*map(client.generate, requests)), PATIENT)
        assert [drawn(completions) for completions in answers] == [right(request) for request in requests]
        await client.close()


async def test_a_server_that_computes_wrongly_is_told_from_a_model_that_has_diverged(folder: Path) -> None:
    config = InferenceEngineConfig(backend="sglang", max_num_seqs=4)

    async def answered(wrong: FaultServer, other: FaultServer) -> InferenceEngineClient:
        engines = [engine(folder, wrong.url), engine(folder, other.url)]
        client = InferenceEngineClient(engines, nano_tokenizer(), "a/model", SkyRLLoraConfig(), config)
        generation_request = request(prompts(5)[0], count=2)
        try:
            answers = await client.generate(generation_request)
            assert drawn(answers) == right(generation_request)
            assert {completion.engine for completion in answers} == {1}
            return client
        finally:
            await client.close()

    async with FaultServer(always="not finite") as wrong, FaultServer() as sound:
        assert [engine.number for engine in (await answered(wrong, sound))._serving] == [1]
    async with FaultServer(always="not finite") as one, FaultServer(always="not finite") as other:
        with pytest.raises(NonFiniteError, match=other.url):
            await answered(one, other)


async def test_where_every_server_is_gone_the_run_ends_with_the_cause(folder: Path) -> None:
    async with FaultServer(always="broken") as one, FaultServer(always="hang up") as other:
        engines = [engine(folder, one.url), engine(folder, other.url)]
        config = InferenceEngineConfig(backend="sglang", max_num_seqs=4)
        client = InferenceEngineClient(engines, nano_tokenizer(), "a/model", SkyRLLoraConfig(), config)
        with pytest.raises(ProcessError, match=f"{one.url}|{other.url}"):
            await client.generate(request(prompts(5)[0], count=2))
        await client.close()


async def test_a_stopped_process_is_named_while_it_has_a_request(folder: Path) -> None:
    command = [sys.executable, "-m", "tests.inference.fault_server"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
    try:
        assert process.stdout is not None
        http_engine = engine(folder, (await process.stdout.readline()).decode().strip(), heartbeat=0.5)
        await http_engine.generate(request(prompts(5)[0]))
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(ProcessError, match="gave no sign of life for 0.5 s"):
            await http_engine.generate(request(prompts(5)[0]))
        await http_engine.close()
    finally:
        process.kill()
        await process.wait()


async def test_a_call_that_begins_as_the_last_one_ends_is_not_ended_with_its_watch() -> None:
    async def check_health(seconds: float) -> None:
        return None

    async def after(steps: int, answer: str) -> str:
        for _ in range(steps):
            await asyncio.sleep(0)
        return answer

    async def later(pulse: Pulse, steps: int) -> str:
        await after(steps, "")
        return await pulse.guard(after(3, "an answer"))

    for steps in range(12):  # of the loop, between the beginnings of two calls
        pulse = Pulse("a server", check_health, seconds=PATIENT)
        for answer in await asyncio.gather(
            pulse.guard(after(3, "an answer")), later(pulse, steps), return_exceptions=True
        ):
            assert answer == "an answer", steps


@pytest.mark.long
async def test_a_server_that_another_run_gave_weights_is_not_given_ours(folder: Path) -> None:
    async with FaultServer() as server:
        one, other = engine(folder, server.url), engine(folder, server.url)
        await one.pause()
        await other.generate(request(prompts(5)[0]))
        someone = Connection(server.url)
        await someone.post("/update_weight_version", {"new_version": "5"}, seconds=PATIENT)
        with pytest.raises(
            WeightSyncError, match=r"reports weights of version 5 at /model_info, and this run gave it version 0"
        ):
            await one.load_weights(SharedWeights(tuple(small_model().state_dict().items())), 1)
        for client in (one, other, someone):
            await client.close()


# WaitReporter, and what follows it


WEIGHTS = FolderWeights(
    path="weights",
    weights=tuple(
        WeightInfo(name=name, shape=tuple(tensor.shape), dtype="float32")
        for name, tensor in small_model().state_dict().items()
    ),
)

CALLS: dict[str, Callable[[HttpEngine], Awaitable[object]]] = {
    "pause": lambda http_engine: http_engine.pause(),
    "resume": lambda http_engine: http_engine.resume(),
    "sleep": lambda http_engine: http_engine.sleep(),
    "wake": lambda http_engine: http_engine.wake(),
    "load weights": lambda http_engine: http_engine.load_weights(WEIGHTS, 1),
    "generate": lambda http_engine: http_engine.generate(request(prompts(5)[0])),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CALLS)
async def test_every_call_ends_when_its_server_falls_silent(folder: Path, name: str) -> None:
    async with FaultServer() as server:
        http_engine = engine(folder, server.url, heartbeat=0.5)
        await http_engine.pause()
        if name == "generate":
            await http_engine.resume()
        server.fall_silent()
        with pytest.raises(ProcessError, match=rf"{server.url} gave no sign of life for 0\.5 s"):
            await CALLS[name](http_engine)
        await http_engine._server.close()


async def test_a_silent_server_does_not_hold_up_the_pause_of_the_others(folder: Path) -> None:
    """Three servers, of which one falls silent: it alone is out of service, and the samples of the others go on."""
    async with FaultServer() as one, FaultServer() as silent, FaultServer() as other:
        engines = [
            engine(folder, server.url, heartbeat=0.5 if server is silent else PATIENT)
            for server in (one, silent, other)
        ]
        client = client_of(engines)
        await client.pause()
        await client.resume()
        silent.fall_silent()
        await client.pause()
        assert client.in_service == (engines[0], engines[2])
        await client.load_weights([WEIGHTS] * 2, 1)
        await client.resume()
        generation_request = request(prompts(5)[0], count=2)
        assert drawn(await client.generate(generation_request)) == right(generation_request)
        await client.close()


async def test_the_clock_of_a_request_stands_still_while_its_server_is_paused() -> None:
    async with FaultServer(always="half open") as server:
        connection = Connection(server.url)
        body = {"sampling_params": {"sampling_seed": 1, "max_new_tokens": 1}}
        asking = asyncio.ensure_future(connection.post("/generate", body, seconds=PATIENT))
        while not server.seen:
            await asyncio.sleep(0.01)
        (limit,) = connection._limits
        connection.suspend()
        assert limit.when() is None
        later = asyncio.ensure_future(connection.post("/generate", body, seconds=PATIENT))
        while len(server.seen) < 2:
            await asyncio.sleep(0.01)
        assert [limit.when() for limit in connection._limits] == [None, None]
        connection.resume()
        now = asyncio.get_running_loop().time()
        assert all(0 < (limit.when() or 0.0) - now <= PATIENT for limit in connection._limits)
        for task in (asking, later):
            task.cancel()
        await asyncio.gather(asking, later, return_exceptions=True)
        await connection.close()


async def test_a_sample_that_is_not_answered_is_drawn_elsewhere_while_its_server_serves(folder: Path) -> None:
    """Of three servers one answers everything but samples: the others draw those too, long before its time is over."""
    async with FaultServer(always="half open") as mute, FaultServer() as one, FaultServer() as other:
        engines = [engine(folder, server.url) for server in (mute, one, other)]
        engines[0]._heartbeat = 0.3  # only for how long it waits before it asks again
        client = client_of(engines)
        requests = [request(prompt, count=2, name=f"prompt {n}") for n, prompt in enumerate(prompts(3, 4, 5, 6, 7, 8))]
        answers = await asyncio.gather(*map(client.generate, requests))
        assert [drawn(completions) for completions in answers] == [right(request) for request in requests]
        assert {completion.engine for completions in answers for completion in completions} == {1, 2}
        assert client.in_service == tuple(engines)
        assert len(mute.seen) >= 2, "it was asked again as well"
        assert client.running == 0
        await client.close()


async def test_a_sample_that_no_other_server_draws_either_ends_with_the_first_cause(folder: Path) -> None:
    async with FaultServer(always="half open") as mute, FaultServer(always="broken") as broken:
        engines = [engine(folder, mute.url, call=3.0), engine(folder, broken.url)]
        engines[0]._heartbeat = 0.3
        client = client_of(engines)
        with pytest.raises(ProcessError, match=rf"{mute.url} did not complete /generate within 3 s: it did not answer"):
            await client.generate(request(prompts(5)[0]))
        assert client.running == 0
        await client.close()


async def test_an_answer_that_is_lost_is_asked_for_again(folder: Path) -> None:
    """The first request is never answered; its server answers everything else."""
    for on_tokens in (None, lambda _: None):
        async with FaultServer(["half open"]) as server:
            http_engine = engine(folder, server.url)
            http_engine._heartbeat = 0.5  # only for how long it waits before it asks again
            generation_request = evolve(request(prompts(5)[0], count=2), on_tokens=on_tokens)
            assert drawn(await http_engine.generate(generation_request)) == right(generation_request)
            await http_engine.close()


async def test_a_server_that_answers_again_takes_part_again_with_the_next_weights(folder: Path) -> None:
    async with FaultServer() as failing, FaultServer() as sound:
        engines = [engine(folder, failing.url, heartbeat=1.0), engine(folder, sound.url)]

        async def again(number: int) -> HttpEngine:
            await engines[number].rejoin()
            return engines[number]

        restarts = EngineRestarts(again, most=3, backoff=0.0, of_others=True)
        client = client_of(engines, restarts)
        await client.pause()
        await client.load_weights([WEIGHTS] * 2, 1)
        await client.resume()
        failing.fall_silent()
        await client.pause()
        assert client.in_service == (engines[1],)
        failing.speak_again()
        assert await restarts.wait_until_ready()
        assert await client.admit_started()  # so that the canary compares it first
        assert client.in_service == tuple(engines)
        await client.load_weights([WEIGHTS] * 2, 2)
        await client.resume()
        assert client.weight_version == 2
        for generation_request in (request(prompts(5)[0], name=str(number)) for number in range(6)):
            assert drawn(await client.generate(generation_request)) == right(generation_request)
        await client.close()


async def test_a_server_with_weights_of_another_run_is_not_taken_again() -> None:
    async def never(number: int) -> HttpEngine:
        raise AssertionError("it is not asked again")

    restarts = EngineRestarts(never, most=3, backoff=0.0, of_others=True)
    restarts.died(0, WeightSyncError("the server holds weights of version 5"))
    assert restarts.starting == set()
    assert not restarts.may_replace(1)  # when the last server is gone, the run ends


@pytest.mark.parametrize(("copies", "warnings"), [(True, 1), (False, 0)])
async def test_one_answer_for_all_samples_of_a_prompt_is_warned_about_once(
    folder: Path, copies: bool, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with FaultServer(copies=copies) as server:
        http_engine = engine(folder, server.url)
        for number in range(3):
            await http_engine.generate(request(prompts(5)[0], count=6, name=f"prompt {number}"))
        await http_engine.close()
    messages = [record.getMessage() for record in caplog.records if "equal answers" in record.getMessage()]
    assert len(messages) == warnings
    assert all(
        text.startswith(f"the inference server {server.url} gave 6 equal answers of 12 tokens") for text in messages
    )


def client_of(engines: Sequence[HttpEngine], restarts: EngineRestarts | None = None) -> InferenceEngineClient:
    config = InferenceEngineConfig(backend="sglang", max_num_seqs=4)
    return InferenceEngineClient(engines, nano_tokenizer(), "a/model", SkyRLLoraConfig(), config, restarts=restarts)


# The connection


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://[bad", "127.0.0.1:8000", "http://", "http://a:x"])
def test_an_address_that_no_request_can_have_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="is no address of an inference server: write http://HOST:PORT"):
        Connection(url)


@pytest.mark.parametrize("token", ["\xfc", "a\nb", "a\x00", "\u2026"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(UserError, match="has characters that no HTTP header can carry") as raised:
        Connection("http://127.0.0.1:1", token=token)
    assert token not in str(raised.value)


async def test_a_token_goes_to_the_server_and_nowhere_else(folder: Path) -> None:
    async with FaultServer() as elsewhere, FaultServer() as server:
        connection = Connection(server.url, token="a secret")
        body = {"sampling_params": {"sampling_seed": 1, "max_new_tokens": 1}}
        await connection.post("/generate", body, seconds=PATIENT)
        assert server.seen[0]["authorization"] == "Bearer a secret"
        assert elsewhere.seen == []
        await connection.close()


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    async with FaultServer() as server:
        connection = Connection(server.url)
        assert mapping(await connection.get("/health", seconds=PATIENT), "a sign")["success"] is True
        await connection.close()


async def test_an_answer_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "LONGEST_ANSWER", 100)
    async with FaultServer() as server:
        connection = Connection(server.url)
        body = {"sampling_params": {"sampling_seed": 1, "max_new_tokens": 50}}
        with pytest.raises(ProcessError, match="it answers with more than 100 bytes"):
            await connection.post("/generate", body, seconds=PATIENT)
        await connection.close()


async def test_pauses_between_attempts_are_drawn_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    bounds = [http_connection._pause(attempt) <= min(5.0, 0.1 * 2**attempt) for attempt in range(12) for _ in range(50)]
    assert all(bounds)
    assert len({http_connection._pause(3) for _ in range(20)}) == 20


async def test_a_server_that_is_not_there_yet_is_waited_for_and_then_named() -> None:
    connection = Connection("http://127.0.0.1:9")
    connection._open()  # reads certificates, for longer than the deadline where the machine is busy
    with pytest.raises(RunError, match=r"http://127.0.0.1:9 did not complete /health within 2 s: ConnectError"):
        await connection.get("/health", seconds=2, attempts=10**6)
    await connection.close()


async def test_a_sign_of_life_may_take_all_of_its_time(folder: Path) -> None:
    class Slow(FaultServer):
        """Hangs up on the first requests for a sign."""

        asked = 0

        async def _answer(self, path: str, *more: Any) -> None:
            self.asked += path == "/health"
            if path == "/health" and self.asked < 9:
                raise ConnectionError
            await super()._answer(path, *more)

    async with Slow() as server:
        sglang_server = SGLangServer(Connection(server.url), Connection(server.url), ServerDeadlines())
        await sglang_server.check_health(PATIENT)
        assert server.asked == 9
        await sglang_server.close()


class Told(logging.Handler):
    """Collects what is said, and sets `once` with the first of it."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.once = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        self.once.set()


async def test_a_server_that_is_not_there_is_waited_for_and_said_to_be_once(folder: Path, closed_port: int) -> None:
    port, log_handler = closed_port, Told()
    http_connection._log.addHandler(log_handler)
    try:
        http_engine, generation_request = engine(folder, f"http://127.0.0.1:{port}"), request(prompts(5)[0])
        drawing = asyncio.ensure_future(http_engine.generate(generation_request))
        await log_handler.once.wait()
        async with FaultServer(port=port):
            assert drawn(await drawing) == right(generation_request)
            await http_engine.close()
    finally:
        http_connection._log.removeHandler(log_handler)
    (message,) = log_handler.said
    assert message.startswith(f"the inference server http://127.0.0.1:{port} does not answer (ConnectError")
    assert "up to 240 s (trainer.placement.start_timeout_seconds)" in message
    assert message.endswith("start it, or correct generator.inference_engine.external_server_urls")


async def test_a_server_that_does_not_come_is_named_with_what_to_do(folder: Path, closed_port: int) -> None:
    url = f"http://127.0.0.1:{closed_port}"
    for dialect in (SGLangServer, VLLMServer):
        server = dialect(Connection(url), Connection(url), ServerDeadlines(start=0.5))
        http_engine = HttpEngine(server, model_path=str(folder), heartbeat=PATIENT, tokenizer=nano_tokenizer())
        with pytest.raises(ProcessError, match=rf"{url} did not complete /.*start it, or correct generator"):
            await http_engine.pause()
        await http_engine.close()


def certificate(folder: Path, address: str) -> Path:
    """A self-signed certificate for an address, with its key in the same file."""
    file = folder / f"{address}.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=a server"),
            *("-addext", f"subjectAltName=IP:{address}", "-keyout", str(file), "-out", str(folder / "public.pem")),
        ],
        check=True,
        capture_output=True,
    )
    with file.open("ab") as bundle:
        bundle.write((folder / "public.pem").read_bytes())
    return file


@pytest.mark.needs("openssl")
async def test_a_server_with_tls_is_asked_only_by_who_trusts_its_certificate_for_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SSL_CERT_FILE names an authority of one's own; no token and no prompt goes to a server that another one vouches
    for.
    """
    for address, trusted, message in (
        ("127.0.0.1", True, ""),
        ("127.0.0.1", False, "CERTIFICATE_VERIFY_FAILED"),
        ("192.0.2.1", True, "IP address mismatch"),
    ):
        file = certificate(tmp_path, address)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        monkeypatch.setenv("SSL_CERT_FILE", str(file) if trusted else "")
        async with FaultServer(tls=context) as server:
            connection = Connection(server.url, token="a secret")
            body = {"sampling_params": {"sampling_seed": 1, "max_new_tokens": 1}}
            if message:
                with pytest.raises(ProcessError, match=message):
                    await connection.post("/generate", body, seconds=PATIENT, attempts=1)
            else:
                await connection.post("/generate", body, seconds=PATIENT, attempts=1)
            assert len(server.seen) == (not message)
            await connection.close()

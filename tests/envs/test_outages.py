"""Services that are away, or answer something else than they were asked: waited for, named, and never a reward."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from time import time
from typing import Any
from unittest import mock

import pytest

from skyrl.config import SkyRLGymConfig
from skyrl.config.settings.environment import (
    GSM8kLLMJudgeEnvConfig,
    PairwiseJudgeEnvConfig,
    RewardModelEnvConfig,
    SearchEnvConfig,
)
from skyrl.envs import find_env
from skyrl.envs.builtin.judge_service import JudgeService
from skyrl.envs.builtin.llm_judge import LLMJudgeEnv
from skyrl.envs.builtin.reward_model import RewardModelEnv
from skyrl.envs.group_rewards import GroupReward
from skyrl.envs.http_json import ATTEMPTS, OUTAGES, Outages, ServiceError, post
from skyrl.envs.search import ask_retriever, documents
from skyrl.envs.services.remote_sandbox import RemoteSandbox
from skyrl.errors import ProcessError, ServiceGone
from skyrl.processes.answers import BadAnswer, asked_to_wait
from skyrl.processes.naming.names import Entry
from skyrl.processes.naming.names_in_etcd import NamesInEtcd
from skyrl.rollout.env_calls import EnvCalls
from skyrl.rollout.threads import ThreadCall

Plays = Callable[[socket.socket], object]
"""What a server does with a connection, once it has the request."""


@contextmanager
def raw(*plays: Plays) -> Iterator[str]:
    """The address of a server that meets each connection with the next of `plays`, and the last one again and again."""
    left, listening, ended = list(plays), socket.create_server(("127.0.0.1", 0)), threading.Event()

    def serve() -> None:
        with suppress(OSError):
            while not ended.is_set():
                connection, _ = listening.accept()
                with connection, suppress(OSError):
                    take_request(connection)
                    (left.pop(0) if len(left) > 1 else left[0])(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        ended.set()
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


def take_request(connection: socket.socket) -> None:
    """Read the whole request: what is left unread at the end would reset the connection."""
    with connection.makefile("rb") as request:
        head = iter(request.readline, b"\r\n")
        lengths = [int(line.split(b":")[1]) for line in head if line.lower().startswith(b"content-length:")]
        request.read(lengths[0])


def http(content: str | bytes, *more: str, status: str = "200 OK", length: int | None = None) -> Plays:
    data = content.encode() if isinstance(content, str) else content
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(data) if length is None else length}", *more]
    return lambda connection: connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + data)


def sent(data: bytes) -> Plays:
    return lambda connection: connection.sendall(data)


def drip(head: bytes, piece: bytes) -> Plays:
    """Sends `piece` again and again, until the client hangs up."""

    def play(connection: socket.socket) -> None:
        connection.sendall(head)
        connection.settimeout(0.02)
        while True:
            connection.sendall(piece)
            with suppress(TimeoutError):
                if not connection.recv(1):
                    return

    return play


class Clock:
    """The time that a program has slept."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)


@pytest.fixture(autouse=True)
def clock() -> Iterator[Clock]:
    with mock.patch("skyrl.envs.http_json.time", Clock()) as clock:
        yield clock


def scored(url: str, patience: float = 240.0) -> float:
    env = RewardModelEnv({}, RewardModelEnvConfig(url=url, timeout=60), patience=patience)
    env.init(({"role": "user", "content": "2+2?"},))
    return env.step("4").reward


# Away


def test_a_service_that_starts_again_costs_no_sample(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """It is refused 20 times, which takes longer than its start, and said once."""
    away = [http("", status="503 Service Unavailable")] * 20
    with raw(*away, http('{"scores": [0.5]}')) as url:
        assert scored(url) == 0.5
    assert clock.now > 30
    waited = 0.1 + 0.2 + 0.4 + 0.8 + 1.6 + 4 * 2.0
    assert [record.getMessage() for record in caplog.records] == [
        f"the service {url} (environment.skyrl_gym.reward_model.url) is away: it is tried for another "
        f"{240 - waited:.0f} s (environment.skyrl_gym.service_patience_seconds): {url} answered 503"
    ]


def test_an_outage_is_logged_once_for_all_samples_that_wait_until_the_service_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    away, right = http("", "Retry-After: 11", status="503 X"), http('{"scores": [0.5]}')
    with raw(*[away] * 6, right, away, away, right) as url:
        for patience in (15.0, 15.0):
            with pytest.raises(ServiceGone):
                scored(url, patience)
        assert len(caplog.records) == 1
        assert scored(url) == 0.5
        assert len(caplog.records) == 1
        assert scored(url) == 0.5
    assert len(caplog.records) == 2


SERVICES: dict[str, Callable[[str], object]] = {
    "reward_model.url": lambda url: scored(url, 0.0),
    "code_url": lambda url: RemoteSandbox(url, patience=0.0).run("print(1)"),
    "search.search_url": lambda url: ask_retriever(SearchEnvConfig(search_url=url), None, "Rome", 0.0),
    "llm_as_a_judge.base_url": lambda url: judged("llm_as_a_judge", url),
    "pairwise_judge.base_url": lambda url: judged("pairwise_judge", url),
}


def judged(name: str, url: str) -> None:
    settings = SkyRLGymConfig(
        llm_as_a_judge=GSM8kLLMJudgeEnvConfig(base_url=url),
        pairwise_judge=PairwiseJudgeEnvConfig(base_url=url),
        service_patience_seconds=0.0,
    )
    make, extras = find_env(name, settings), {"reward_spec": {"ground_truth": "4"}}
    if isinstance(make, GroupReward):
        make.rewards(({"role": "user", "content": "2+2?"},), ["4", "5"], extras)
    else:
        make(extras).step("4")


@pytest.mark.parametrize("setting", SERVICES)
def test_the_setting_of_a_service_that_is_away_is_named(setting: str, closed_port: int) -> None:
    with pytest.raises(ServiceGone, match=rf"\(environment\.skyrl_gym\.{setting}\) has been away for 0 s"):
        SERVICES[setting](f"http://127.0.0.1:{closed_port}")


async def test_the_deadline_of_a_call_does_not_run_while_a_service_is_away(clock: Clock) -> None:
    """Each row: what the service does, and the seconds in which the deadline of the call has not run."""
    away, late = http("", status="503 Service Unavailable"), http("", "Retry-After: 30", status="429 X")
    right, broken = http('{"scores": [0.5]}'), http("", status="500 X")
    for plays, seconds in (([right], 0), ([away, right], 0.1), ([late, late, right], 60), ([broken, away, right], 0.2)):
        noted: list[Outages] = []

        def score(plays: list[Plays] = plays, noted: list[Outages] = noted) -> None:
            outages = OUTAGES.get()
            assert outages is not None
            noted.append(outages)
            with raw(*plays) as url:
                scored(url)
            clock.now += 1000.0  # of its own

        calls = EnvCalls(1, deadline=300.0)
        await calls("the reward", score)
        assert noted[0].seconds(clock.now) == pytest.approx(seconds)
        call = ThreadCall(lambda: None)
        call.start_time = 0.0
        assert calls._remaining_seconds(call, noted[0], now=50.0) == pytest.approx(250.0 + seconds)
    assert OUTAGES.get() is None


def test_an_outage_that_goes_on_stops_the_clock() -> None:
    outages, call = Outages(), ThreadCall(lambda: None)
    call.start_time = 10.0
    outages.began(20.0)
    calls = EnvCalls(1, deadline=300.0)
    assert {calls._remaining_seconds(call, outages, now) for now in (20.0, 200.0, 2000.0)} == {290.0}
    outages.ended(2000.0)
    assert calls._remaining_seconds(call, outages, 2001.0) == 289.0


def test_a_service_that_does_not_come_back_ends_the_run_and_is_named(clock: Clock, closed_port: int) -> None:
    url = f"http://127.0.0.1:{closed_port}"
    with pytest.raises(
        ServiceGone, match=rf"the service {url} .* has been away for 240 s \(environment\..*patience_seco"
    ):
        scored(url)
    assert clock.now == pytest.approx(240.0)


async def test_an_outage_is_no_failure_of_the_sample_that_waits(closed_port: int) -> None:
    calls = EnvCalls(1, None)
    with pytest.raises(ServiceGone):
        await calls("an environment", scored, f"http://127.0.0.1:{closed_port}", 0.0)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(("retry_after", "slept"), [("1", 1.0), ("7", 7.0), ("a date", 30.0), ("600", 60.0)])
def test_a_service_is_left_alone_for_as_long_as_it_asks(
    status: int, retry_after: str, slept: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl.processes.answers.time.time", lambda: 1_000_000.0)
    header = f"Retry-After: {formatdate(1_000_030, usegmt=True) if retry_after == 'a date' else retry_after}"
    with raw(http("{}", header, status=f"{status} Later"), http('{"scores": [1]}')) as url:
        assert scored(url) == 1.0
    assert clock.slept == [slept]


@pytest.mark.parametrize(
    "text", ["", "\xb2", "soon", "-1", "1e9", "nan", "Wed, 21 Oct 2015 07:28:00 GMT", "Thu, 99 Foo"]
)
def test_what_is_no_time_to_wait_is_none(text: str) -> None:
    assert asked_to_wait(text) == 0.0


def test_a_date_in_the_future_is_waited_for() -> None:
    assert 50 < asked_to_wait(formatdate(time() + 58, usegmt=True)) <= 58
    assert asked_to_wait(formatdate(time() + 10**6, usegmt=True)) == 60.0


# There, and wrong

BROKEN: dict[str, tuple[Plays, str]] = {
    "closed": (lambda connection: None, "closed connection without response"),
    "cut": (http("{", length=100), "breaks off after 1 bytes"),
    "cut chunk": (sent(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{"), "IncompleteRead"),
    "another protocol": (sent(b"SSH-2.0-OpenSSH_9.9\r\n\r\n"), "BadStatusLine"),
    "a long header": (sent(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000 + b"\r\n\r\n"), "LineTooLong"),
    "300 headers": (sent(b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 300 + b"\r\n"), "HTTPException"),
    "deep": (http("[" * 100_000), "RecursionError"),
    "many digits": (http("[" + "9" * 5000 + "]"), "not JSON"),
    "half a character": (http(b'{"scores": "\xff"}'), "not JSON"),
    "much": (http(" " * (5 << 20)), "more than 4194304 bytes"),
    "nothing": (http(""), "not JSON"),
    "500": (http("{}", status="500 Oh"), "answered 500"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_answer_is_asked_for_again_and_then_named(name: str) -> None:
    play, message = BROKEN[name]
    with raw(play, http('{"scores": [2.5]}')) as url:
        assert scored(url) == 2.5
    with raw(play) as url, pytest.raises(ServiceError, match=f"^{url}.*{message}.*, {ATTEMPTS} times"):
        scored(url)


@pytest.mark.parametrize(
    "play",
    [
        drip(b"HTTP/1.1 200 OK\r\nContent-Length: 4000000\r\n\r\n", b" "),
        drip(b"HTTP/1.1 200 OK\r\n", b"X: a\r\n"),
        drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        drip(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        drip(b"HTTP/1.1 200 O", b"K"),
    ],
)
def test_an_answer_that_never_ends_is_cut_off_at_its_deadline(play: Plays) -> None:
    with raw(play) as url, pytest.raises(ServiceError, match=f"^{url}: .*, {ATTEMPTS} times"):
        post(url, {}, str, setting="a.url", seconds=0.1)


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://[bad", "nothing"])
def test_an_address_that_no_request_can_have_is_named(url: str) -> None:
    with pytest.raises(ServiceError, match="no request can be made"):
        post(url, {}, str, setting="a.url", seconds=1)


SCORES: list[object] = [
    *([], [1.0, 2.0], ["1.0"], [True], [None], [[1.0]], [{}], [10**400], [float("nan")], [float("inf")]),
    *(1.0, "1.0", None, {"0": 1.0}, True),
]
OUTPUT = base64.b64encode(b"out").decode()
RAN = {"ended": "exit", "code": 0, "stdout": OUTPUT, "stderr": OUTPUT}
OTHERS = [
    *({"ended": "well"}, {"ended": None}, {"code": "0"}, {"code": None}, {"code": 1.0}, {"code": True}),
    *({"code": 2**70}, {"stdout": "="}, {"stdout": None}, {"stderr": 5}, {"stderr": "\ud800"}),
]


def refused(answer: object, call: Callable[[str], object]) -> None:
    """It is asked for again, and then named with the service."""
    with raw(http(json.dumps(answer))) as url, pytest.raises(ServiceError, match=f"^{url} answered with.*5 times"):
        call(url)


@pytest.mark.parametrize("scores", SCORES, ids=repr)
def test_a_score_is_one_finite_number(scores: object) -> None:
    refused({"scores": scores}, scored)


@pytest.mark.parametrize("change", OTHERS, ids=repr)
def test_a_result_of_a_program_has_its_form(change: dict[str, Any]) -> None:
    refused(RAN | change, lambda url: RemoteSandbox(url).run("print(1)"))


@pytest.mark.parametrize(
    "choices", [5, None, [], [{}], [{"message": 5}], [{"message": {"content": ["1"]}}], ["a"]], ids=repr
)
def test_a_judges_reply_has_its_form(choices: object) -> None:
    def ask(url: str) -> object:
        env = LLMJudgeEnv({"reward_spec": {"ground_truth": "4"}}, JudgeService(model="judge", base_url=url))
        return env.step("4")

    with raw(http(json.dumps({"choices": choices}))) as url, pytest.raises(ServiceError, match="answered with"):
        ask(url)


@pytest.mark.parametrize(
    "result", [5, [], [[], []], [5], [[5]], [[{}]], [[{"document": {"contents": 5}}]], {"0": []}], ids=repr
)
def test_found_documents_have_their_form(result: object) -> None:
    with pytest.raises(BadAnswer):
        documents({"result": result})


ROW = {"key": base64.b64encode(b"skyrl/names/a").decode(), "value": base64.b64encode(b"5").decode()}


@pytest.mark.parametrize(
    "answer",
    [5, None, [], {"ID": None}, {"ID": {}}, {"kvs": 5}, {"kvs": [5]}, {"kvs": [{}]}, {"kvs": [ROW]}],
    ids=repr,
)
def test_an_answer_of_etcd_has_its_form(answer: object) -> None:
    with raw(http(json.dumps(answer))) as url:
        names = NamesInEtcd(url)
        calls = (lambda: names.add("a", Entry("1", "2"), 30.0), lambda: names.get("a"), lambda: names.find(""))
        errors = [error for error in map(raised_by, calls) if error is not None]
    assert errors
    assert all(f"etcd at {url}" in str(error) for error in errors)


def raised_by(call: Callable[[], object]) -> ProcessError | None:
    try:
        call()
    except ProcessError as error:
        return error
    return None

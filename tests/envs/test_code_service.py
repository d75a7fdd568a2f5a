"""Programs run at `skyrl serve-code`: what it answers, what it refuses, and the environment `code` that asks it."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from skyrl.config import SkyRLGymConfig
from skyrl.envs import find_env
from skyrl.envs.http_json import post
from skyrl.envs.services.code_service import code_app
from skyrl.envs.services.remote_sandbox import RemoteSandbox
from skyrl.errors import ServiceGone, UserError
from skyrl.processes.naming.names import Published
from skyrl.processes.naming.names_on_disk import NamesOnDisk
from skyrl.processes.service import listen, server_of
from skyrl.sandbox.sandbox import Ran, ResourceLimits, Sandbox

TOKEN = "token-of-this-test"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    instance = Sandbox()
    yield instance
    instance.close()


@pytest.fixture
def client(sandbox: Sandbox) -> TestClient:
    return TestClient(code_app(sandbox, 2), base_url="http://127.0.0.1")


@pytest.fixture(scope="module")
def url(sandbox: Sandbox) -> Iterator[str]:
    """Address of a service that runs and asks for a token."""
    with listen("127.0.0.1", 0, TOKEN, "SKYRL_CODE_TOKEN") as bound:
        server = server_of(code_app(sandbox, 2, TOKEN))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/run"
        server.should_exit = True
        thread.join()


def coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_a_program_reads_its_input_and_its_output_comes_back(client: TestClient) -> None:
    answer = client.post("/run", json={"program": "print(input()[::-1])", "stdin": coded("abc\n")})
    assert answer.json() == {"ended": "exit", "code": 0, "stdout": coded("cba\n"), "stderr": ""}


def test_a_program_that_does_not_end_is_ended(client: TestClient) -> None:
    answer = client.post("/run", json={"program": "while True: pass", "limits": {"seconds": 0.2}})
    assert answer.json()["ended"] == "timeout"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "the text 'program'"),
        ([], "a JSON object"),
        ({"program": 1}, "the text 'program'"),
        ({"program": "", "stdin": "?"}, "base64"),
        ({"program": "", "limits": []}, "has to be an object"),
        ({"program": "", "limits": {"gpus": 1}}, "there is no limit 'gpus'"),
        ({"program": "", "limits": {"seconds": 1e9}}, "up to 60"),
        ({"program": "", "limits": {"seconds": True}}, "up to 60"),
        ({"program": "", "limits": {"memory_bytes": 0}}, "above 0"),
    ],
)
def test_what_cannot_be_run_is_refused_in_words(body: Any, message: str, client: TestClient) -> None:
    answer = client.post("/run", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]


@pytest.mark.parametrize("first", ["", "import os; os.close(1); os.close(2)"], ids=["open", "closed outputs"])
def test_a_program_ends_when_its_client_is_gone(first: str, sandbox: Sandbox) -> None:
    started, over = threading.Event(), threading.Event()

    class Watched(Sandbox):
        """The sandbox of the tests, which says when a program begins and ends."""

        def __init__(self) -> None:
            self.tier = sandbox.tier

        def run(self, *args: Any, **options: Any) -> Ran:
            started.set()
            ran = sandbox.run(*args, **options)
            over.set()
            return ran

    body = json.dumps({"program": f"{first}\nimport time; time.sleep(600)", "limits": {"seconds": 600}}).encode()
    lines = ("POST /run HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}")
    head = "\r\n".join((*lines, "", ""))
    with listen("127.0.0.1", 0, None, "") as bound:
        server = server_of(code_app(Watched(), 1, most=ResourceLimits(seconds=600)))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        with socket.create_connection(bound.getsockname(), timeout=60) as client:
            client.sendall(head.encode() + body)
            assert started.wait(60)
        assert over.wait(300)
        server.should_exit = True
        thread.join()


def test_without_the_token_nothing_runs(sandbox: Sandbox) -> None:
    closed = TestClient(code_app(sandbox, 1, TOKEN))
    assert closed.post("/run", json={"program": "print(1)"}).status_code == 401
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert closed.post("/run", json={"program": "print(1)"}, headers=headers).status_code == 200


def test_a_program_ends_there_as_it_does_here(url: str, sandbox: Sandbox) -> None:
    for program in ("print(input())", "import sys; sys.exit(3)", "raise ValueError", "print('x' * 10**7)"):
        local, remote = (runner.run(program, b"4\n") for runner in (sandbox, RemoteSandbox(url, TOKEN)))
        assert (remote.ended, remote.code, remote.stdout) == (local.ended, local.code, local.stdout)


def test_limits_of_the_run_hold_there(url: str) -> None:
    assert RemoteSandbox(url, TOKEN).run("while True: pass", limits=ResourceLimits(seconds=0.2)).ended == "timeout"


def test_the_environment_code_is_judged_by_a_service(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYRL_CODE_TOKEN", TOKEN)
    tests = [{"input": "4", "output": "16", "testtype": "stdin"}]
    make = find_env("code", SkyRLGymConfig(code_url=url))
    env = make({"reward_spec": {"ground_truth": tests}})
    assert env.step("```python\nprint(int(input()) ** 2)\n```").reward == 1.0


@pytest.mark.long
def test_a_service_is_found_by_its_name_wherever_it_is_now(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYRL_NAMES", f"nfs:{tmp_path}")
    named = RemoteSandbox("name:code", TOKEN)
    with Published(NamesOnDisk(tmp_path), "code", url):
        assert named.run("print(1)").stdout == b"1\n"
    with pytest.raises(ServiceGone, match="no service has this name"):
        post("name:code", {}, str, setting="a.url", seconds=1, patience=0)


def test_a_name_without_a_store_is_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKYRL_NAMES", raising=False)
    with pytest.raises(UserError, match="export SKYRL_NAMES"):
        post("name:code", {}, str, setting="a.url", seconds=1)
    monkeypatch.setenv("SKYRL_NAMES", "somewhere")
    with pytest.raises(UserError, match="not a name store"):
        post("name:code", {}, str, setting="a.url", seconds=1)

"""Every HTTP service against every rule: what is refused before a route is reached, and limits on connections."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

import skyrl
from skyrl.config import SamplingParams
from skyrl.endpoint.client_access import ClientAccess
from skyrl.endpoint.control import EngineControl
from skyrl.endpoint.http.app import endpoint_app
from skyrl.endpoint.http.control_routes import ControlRoutes
from skyrl.endpoint.policy import Policy, ServedPolicy
from skyrl.endpoint.trajectories import Trajectories
from skyrl.envs.services.code_service import code_app
from skyrl.envs.services.retriever import SearchIndex, retriever_app
from skyrl.envs.services.reward_service import reward_app
from skyrl.errors import ProcessError, UserError
from skyrl.models.saving.reward_model import RewardModel
from skyrl.processes.service import listen, server_of
from skyrl.sandbox.sandbox import Sandbox
from skyrl.tracking.token_file import TokenFiles
from skyrl.viewer.pages import Pages
from skyrl.viewer.sample_index import SampleIndex
from skyrl.viewer.server import RunFollower, view_app
from tests.endpoint.serving import Script

TOKEN = "token-of-this-test"
JSON = {"content-type": "application/json"}
MAY_BE_EMPTY = (
    *("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache"),
    *("/update_weight_version", "/shutdown_weight_transfer_engine"),
)
"""Routes that control engines, some of which need no body."""

Make = Callable[[str | None, Path], Starlette]


def endpoint(token: str | None, folder: Path) -> Starlette:
    """The endpoint of a run, with the routes that control engines, which no request of this file reaches."""
    script = Script([])
    served = ServedPolicy(names=("tiny",), sampling=SamplingParams(), max_model_len=64, most_samples=8)
    control = ControlRoutes(cast(EngineControl, None), lambda call: call())
    return endpoint_app(
        Policy(served, script.tokenizer, script.generate), Trajectories(), ClientAccess(token=token), control
    )


def viewer(token: str | None, folder: Path) -> Starlette:
    (folder / "trajectories.jsonl").touch()
    index = SampleIndex(folder / "trajectories.jsonl", folder / "index")
    pages = Pages(folder, index, TokenFiles(folder / "tokens"))
    return view_app(pages, RunFollower(index, pages.metrics, folder), TOKEN)


SERVICES: Mapping[str, Make] = {
    "endpoint": endpoint,
    "serve-code": lambda token, _: code_app(cast(Sandbox, None), 1, token),
    "serve-reward": lambda token, _: reward_app(cast(RewardModel, None), "judge", token),
    "serve-retriever": lambda token, _: retriever_app(SearchIndex(({"id": "1", "contents": "Rome"},)), token),
    "view": viewer,
}


def client_of(name: str, token: str | None, folder: Path) -> TestClient:
    """A client of this machine; that of the viewer has its cookie, which browsers send by themselves."""
    client = TestClient(SERVICES[name](token, folder), base_url="http://127.0.0.1:8000", raise_server_exceptions=False)
    if name == "view":
        client.get("/", params={"key": TOKEN})
    return client


def routes_of(app: Starlette) -> list[tuple[str, str]]:
    """Method and an example of a path of each route, and a path that has none."""
    routes = [("GET", "/no/such/path")]
    for route in app.routes:
        assert isinstance(route, Route | Mount)
        methods = getattr(route, "methods", None) or {"GET"}
        path = route.path.replace("{name:path}", "tiny").replace("{number:int}", "1").replace("{number}", "x")
        routes += [(method, path) for method in methods - {"HEAD"}]
    return routes


FOREIGN: Mapping[str, tuple[dict[str, str], int]] = {
    "another host": ({"host": "evil.example"}, 400),
    "another host with the port": ({"host": "evil.example:8000"}, 400),
    "a host that begins like this machine": ({"host": "127.0.0.1.evil.example"}, 400),
    "a host that is no address": ({"host": "[::1"}, 400),
    "every address": ({"host": "0.0.0.0:8000"}, 400),
    "no host": ({"host": ""}, 400),
    "another origin": ({"origin": "http://evil.example"}, 403),
    "a hidden origin": ({"origin": "null"}, 403),
    "another port of this machine": ({"origin": "http://127.0.0.1:3000"}, 403),
}
"""Headers of requests that a page of another site can cause, and the status that they get without a token."""

ALWAYS: Mapping[str, tuple[dict[str, str], int]] = {
    "too many headers": ({f"x-{number}": "y" for number in range(201)}, 431),
    "two lengths of a body": ({"content-length": "5", "transfer-encoding": "chunked"}, 400),
}
"""Headers that no request may have, with or without a token."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SERVICES)
def test_without_a_token_no_route_answers_pages_of_other_sites(name: str, tmp_path: Path) -> None:
    client = client_of(name, None, tmp_path)
    for method, path in routes_of(cast(Starlette, client.app)):
        for case, (headers, status) in {**FOREIGN, **ALWAYS}.items():
            answer = client.request(method, path, headers=headers)
            assert answer.status_code == status, (path, case, answer.text)


@pytest.mark.parametrize("name", [name for name in SERVICES if name != "view"])
def test_without_a_token_a_body_is_declared_as_json(name: str, tmp_path: Path) -> None:
    client = client_of(name, None, tmp_path)
    posts = [path for method, path in routes_of(cast(Starlette, client.app)) if method == "POST"]
    for path in posts:
        for kind in (
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=application/json",
            "",
        ):
            assert client.post(path, content=b"{}", headers={"content-type": kind}).status_code == 415, (path, kind)
    assert posts


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in SERVICES if name != "view"])
def test_every_route_and_none_is_behind_the_token(name: str, tmp_path: Path) -> None:
    client = client_of(name, TOKEN, tmp_path)
    wrong: list[dict[str, str]] = [
        {},
        {"authorization": "Bearer token"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": TOKEN},
        {"authorization": f"Bearer {TOKEN.upper()}"},
        {"x-api-key": "other"},
    ]
    for method, path in routes_of(cast(Starlette, client.app)):
        for headers in wrong:
            answer = client.request(method, path, headers=headers)
            assert (answer.status_code, "error" in answer.json()) == (401, True), (path, headers)
        for headers, status in ALWAYS.values():
            assert client.request(method, path, headers=headers).status_code == status, path


@pytest.mark.parametrize("name", [name for name in SERVICES if name != "view"])
@pytest.mark.parametrize(
    "headers",
    [{"authorization": f"{scheme} {TOKEN}"} for scheme in ("Bearer", "bearer", "BEARER")] + [{"x-api-key": TOKEN}],
)
def test_the_token_is_taken_in_every_form_of_it_and_from_any_host(
    name: str, headers: dict[str, str], tmp_path: Path
) -> None:
    client = client_of(name, TOKEN, tmp_path)
    answer = client.get("/no/such/path", headers={**headers, "host": "judge.example", "origin": "http://other.example"})
    assert (answer.status_code, "error" in answer.json()) == (404, True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in SERVICES if name != "view"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[]", "JSON object"),
        (b"\xff\xfe", "UTF-8"),
        (b"[" * 100_000, "recursion"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"metadata": {"a": "\\ud800"}}', "lone surrogate"),
        (b'{"stop": ["\\udfff"]}', "lone surrogate"),
        (b'{"\\ud834": 1}', "lone surrogate"),
        (b'{"a": "' + b"9" * 10 + b'", "b": ' + b"9" * 5000 + b"}", "JSON"),
    ],
    ids=str,
)
def test_a_body_that_is_no_object_of_unicode_is_refused_once_for_all(
    name: str, body: bytes, message: str, tmp_path: Path
) -> None:
    client = client_of(name, TOKEN, tmp_path)
    for method, path in routes_of(cast(Starlette, client.app)):
        if method == "POST" and (body or path not in MAY_BE_EMPTY):
            answer = client.post(path, content=body, headers={"x-api-key": TOKEN})
            assert answer.status_code == 400 and message in str(answer.json()["error"]), (path, answer.text)


def test_every_application_of_the_package_is_made_by_the_factory() -> None:
    package = Path(skyrl.__file__).parent
    makers = {
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        if re.search(r"\b(Starlette|FastAPI|HTTPServer)\(", file.read_text(encoding="utf-8"))
    }
    assert makers == {"processes/service_app.py"}


@pytest.mark.parametrize(
    "token",
    [
        " ",
        "a",
        "short",
        "fifteen-letters",
        "sixteen-lettërs!",
        "sixteen-letters\n",
        " sixteen-letters",
        "x" * 16 + "\0",
    ],
)
def test_a_token_that_is_no_secret_or_that_no_header_carries_is_refused(token: str) -> None:
    with pytest.raises(UserError, match="SKYRL_CODE_TOKEN is no usable token"):
        listen("127.0.0.1", 0, token, "SKYRL_CODE_TOKEN")


def test_a_host_that_does_not_exist_is_named_before_a_token_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    with pytest.raises(ProcessError, match="no.such.host.invalid:0: Name or service not known"):
        listen("no.such.host.invalid", 0, None, "SKYRL_CODE_TOKEN")


IDLE = """
    import resource, socket, threading, urllib.request
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, HARD))
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route
    from skyrl.processes.service import listen, server_of
    from skyrl.processes.service_app import service_app

    async def here(request):
        return PlainTextResponse("here")

    bound = listen("127.0.0.1", 0, None, "")
    server = server_of(service_app([Route("/", here)], token=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    print(bound.getsockname()[1], resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
    input()
    files = [open("/dev/null") for _ in range(HARD // 4)]
    print(len(files), flush=True)
    server.should_exit = True
    thread.join()
"""


@pytest.mark.parametrize(("soft", "hard"), [(64, 64), (64, 256)])
def test_idle_connections_leave_a_process_its_files_and_other_clients_their_answers(soft: int, hard: int) -> None:
    """As many idle connections as the process may open files: it opens more, and a client that asks is answered."""
    script = textwrap.dedent(IDLE).replace("SOFT", str(soft)).replace("HARD", str(hard))
    command = [sys.executable, "-c", script]
    idle: list[socket.socket] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        port, limit = map(int, process.stdout.readline().split())
        try:
            for _ in range(hard):
                idle.append(socket.create_connection(("127.0.0.1", port), timeout=60))
            with socket.create_connection(("127.0.0.1", port), timeout=60) as asking:
                asking.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                answer = b"".join(iter(lambda: asking.recv(4096), b""))
            output, _ = process.communicate("go\n", timeout=60)
        finally:
            process.kill()
            for connection in idle:
                connection.close()
    assert (limit, answer.endswith(b"here"), output.strip(), process.returncode) == (hard, True, str(hard // 4), 0)


@contextmanager
def running(app: Starlette) -> Iterator[int]:
    """The port of a service that runs for the length of the block."""
    with listen("127.0.0.1", 0, None, "") as bound:
        server = server_of(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield bound.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def test_of_two_lengths_the_second_request_behind_them_is_not_answered() -> None:
    """Content-Length says that the body ends before the second request; Transfer-Encoding that it does there, too."""
    app = code_app(cast(Sandbox, None), 1)
    sent = (
        b"POST /run HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /none HTTP/1.1\r\nHost: localhost\r\n\r\n"
    )
    with running(app) as port, socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(sent)
        answer = b"".join(iter(lambda: client.recv(4096), b""))  # ends where the server hangs up
    assert answer.count(b"HTTP/1.1 ") == 1 and b"400 Bad Request" in answer and b"connection: close" in answer.lower()


def test_accepted_connections_send_at_once() -> None:
    """A socket made without the protocol's number gets no TCP_NODELAY from asyncio, which costs 40 ms an answer."""
    with listen("127.0.0.1", 0, None, "") as bound:
        assert bound.proto == socket.IPPROTO_TCP

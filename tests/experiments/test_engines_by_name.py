"""Runs that find their engines and their judge by name: what is dead is never asked, and etcd may be restarted."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from skyrl.errors import ProcessError, UserError
from skyrl.processes.naming.names import Entry, NameStore, Published
from skyrl.processes.naming.names_in_etcd import NamesInEtcd
from skyrl.processes.naming.names_on_disk import NamesOnDisk
from tests.experiments.test_engines_of_others import over, stand_in
from tests.inference.sglang_stand_in import SGLangStandIn
from tests.nano_run import metrics, train
from tests.processes.test_names import let_expire
from tests.processes.test_names_in_services import Etcd, until
from tests.processes.test_names_in_services import etcd as etcd

URLS = "generator__inference_engine__external_server_urls"


@pytest.fixture
def server(nano: Path) -> Iterator[SGLangStandIn]:
    with stand_in(nano / "model", max_num_seqs=64) as server:
        yield server


def later(work: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(0.5, work)
    timer.start()
    return timer


@pytest.mark.long
def test_a_run_waits_for_its_engine_and_never_asks_one_that_is_dead(
    server: SGLangStandIn, nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYRL_NAMES", f"nfs:{tmp_path / 'names'}")
    store = NamesOnDisk(tmp_path / "names")
    with Judge() as dead:
        assert store.add("engines/0", Entry(dead.url, "dead"), 10)
        let_expire(tmp_path / "names")
        published = Published(store, "engines/0", server.url)
        timer = later(lambda: void(published.__enter__()))
        train(nano, tmp_path, **over(server, trainer__max_training_steps=2, **{URLS: ["name:engines/0"]}))
        timer.join()
        published.__exit__(None, None, None)
        assert (dead.asked, dead.connected) == (0, 0)
    assert server.asked.count("/update_weights_from_disk") == 3
    assert store.get("engines/0") is None


def test_an_engine_that_nobody_publishes_and_one_of_two_names_are_named(
    server: SGLangStandIn, nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYRL_NAMES", f"nfs:{tmp_path / 'names'}")
    patience = {"trainer__placement__start_timeout_seconds": 0.2}
    with pytest.raises(ProcessError, match="No server is published under the name engines/0"):
        train(nano, tmp_path / "a", **over(server, **{URLS: ["name:engines/0"]}, **patience))
    store, two = NamesOnDisk(tmp_path / "names"), ["name:engines/0", "name:engines/1"]
    with (
        Published(store, "engines/0", server.url),
        Published(store, "engines/1", server.url),
        pytest.raises(UserError, match="name:engines/0 and name:engines/1 are the same engine"),
    ):
        train(nano, tmp_path / "b", **over(server, **{URLS: two, **patience}))
    monkeypatch.delenv("SKYRL_NAMES")
    with pytest.raises(UserError, match="no name store is set: export SKYRL_NAMES="):
        train(nano, tmp_path / "c", **over(server, **{URLS: ["name:engines/0"]}))


def void(_: object) -> None:
    """A result that nobody needs."""


class Judge:
    """A reward model's service: pays for the number of letters, and counts who asks."""

    def __init__(self, port: int = 0, on_request: Callable[[int], None] = void) -> None:
        self.asked = self.connected = 0
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def setup(self) -> None:
                judge.connected += 1
                super().setup()

            def do_POST(self) -> None:
                judge.asked += 1
                on_request(judge.asked)
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                text = json.dumps({"scores": [float(len(chat[-1]["content"])) for chat in body["chats"]]}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}/score"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.mark.long
@pytest.mark.needs("etcd")
def test_a_run_outlives_its_etcd_and_never_asks_a_judge_that_is_dead(
    server: SGLangStandIn, etcd: Etcd, nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYRL_NAMES", f"etcd:127.0.0.1:{etcd.client}")
    store: NameStore = NamesInEtcd(f"127.0.0.1:{etcd.client}")
    begin = threading.Event()
    first, second = Judge(on_request=lambda count: begin.set() if count == 20 else None), Judge()
    named = [Published(store, "judge", first.url, seconds=2), Published(store, "engines/0", server.url, seconds=2)]
    for publication in named:
        publication.__enter__()
    left: list[Any] = []

    def restart() -> None:
        """etcd dies, and the judge with it, which cannot withdraw its name; another one takes it later."""
        begin.wait()
        etcd.kill()
        named[0].__exit__(None, None, None)
        first.__exit__()
        etcd.start()
        left.append(Published(store, "judge", second.url, seconds=2))
        until(lambda: taken(left[0]))
        until(lambda: second.asked >= 5)
        left.append(Judge(port=first.port))

    thread = threading.Thread(target=restart)
    thread.start()
    settings = {
        "environment__env_class": "reward_model",
        "environment__skyrl_gym__reward_model__url": "name:judge",
        "environment__skyrl_gym__max_attempts": 1000,
        "environment__skyrl_gym__max_failed_share": 1.0,
        URLS: ["name:engines/0"],
    }
    train(nano, tmp_path, **over(server, **settings))
    thread.join()
    new_owner, canary = left
    assert [record["step"] for record in metrics(tmp_path)] == list(range(7))
    assert (canary.asked, canary.connected) == (0, 0)
    assert second.asked >= 5
    assert store.get("judge") == second.url
    assert store.get("engines/0") == server.url
    for publication in (new_owner, named[1]):
        publication.__exit__(None, None, None)
    for service in (canary, second):
        service.__exit__()


def taken(published: Published) -> bool:
    """Whether the name is this owner's now; a dead owner's lease has to end first."""
    with suppress(ProcessError):
        published.__enter__()
        return True
    return False

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.config.settings.environment import SearchEnvConfig
from skyrl.envs.http_json import ServiceError
from skyrl.envs.search import TOKEN_VARIABLE, SearchEnv, ask_retriever
from skyrl.envs.services.retriever import Document, SearchIndex, read_corpus, retriever_app
from skyrl.errors import DataError, ProcessError, UserError
from skyrl.processes import service
from skyrl.processes.service import listen, server_of
from tests.processes.clusters import soon

CORPUS: tuple[Document, ...] = (
    {"id": "a", "contents": "Paris is the capital of France"},
    {"id": "b", "contents": "Rome is the capital of Italy"},
    {"id": "c", "contents": "the Tiber flows through Rome"},
)


@contextmanager
def retriever(token: str | None = None) -> Iterator[str]:
    """The real service, on a port of its own."""
    with listen("127.0.0.1", 0, token, TOKEN_VARIABLE) as bound:
        server = server_of(retriever_app(SearchIndex(CORPUS), token))
        thread = Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}/retrieve"
        finally:
            server.should_exit = True
            thread.join()


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])


def post(url: str, body: Any, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(sent, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def search_env(url: str, token: str | None = None) -> SearchEnv:
    extras = {"reward_spec": {"ground_truth": {"target": "Rome"}}, "max_turns": 3}
    return SearchEnv(extras, partial(ask_retriever, SearchEnvConfig(search_url=url, topk=2), token))


def test_rarer_words_and_shorter_documents_rank_higher() -> None:
    index = SearchIndex(CORPUS)
    assert [hit.document["id"] for hit in index.search("capital of Italy", topk=3)] == ["b", "a"]
    assert [hit.document["id"] for hit in index.search("ROME", topk=3)] == ["c", "b"]


def test_a_document_without_a_word_of_the_query_is_not_found() -> None:
    index = SearchIndex(CORPUS)
    assert index.search("zebra", topk=3) == index.search("?!", topk=3) == ()


def test_equal_documents_are_found_in_the_order_of_the_corpus() -> None:
    twins: list[Document] = [{"id": str(number), "contents": "same words"} for number in range(5)]
    assert [hit.document["id"] for hit in SearchIndex(twins).search("words", topk=3)] == ["0", "1", "2"]


def test_the_search_environment_finds_in_a_real_retriever() -> None:
    with retriever() as url:
        env = search_env(url)
        observation = env.step("<search>capital of Italy</search>").observations[0]["content"]
        nothing = env.step("<search>zebra</search>").observations[0]["content"]
        assert env.step("<answer>Rome</answer>").reward == 1.0
    assert "Doc 1: Rome is the capital of Italy\nDoc 2: Paris" in observation
    assert "No document was found." in nothing


def test_a_retriever_answers_each_query_of_a_request_as_search_r1_does() -> None:
    with retriever() as url:
        _, scored = post(url, {"queries": ["Tiber", "France"], "topk": 1, "return_scores": True})
        _, plain = post(url, {"query": "Tiber", "topk": 1})
    assert [[hit["document"]["id"] for hit in hits] for hits in scored["result"]] == [["c"], ["a"]]
    assert plain == {"result": [[CORPUS[2]]]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"not json", "Expecting value"),
        ([1], "JSON object"),
        ({"topk": 3}, "'query' has to be a text"),
        ({"query": "a", "topk": 0}, "from 1 to 100"),
        ({"query": "a" * 10_001}, "at most 256 queries of 10000 characters"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_a_request_that_cannot_be_understood_is_refused_with_the_reason(body: Any, message: str) -> None:
    with retriever() as url:
        status, answer = post(url, body)
    assert status == 400
    assert message in answer["error"]


async def test_a_body_without_end_is_not_read_to_its_end() -> None:
    pieces = [0]

    async def receive() -> dict[str, Any]:
        pieces[0] += 1
        return {"type": "http.request", "body": b" " * (1 << 20), "more_body": True}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"transfer-encoding", b"chunked"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/retrieve", "headers": headers, "query_string": b""}
    await retriever_app(SearchIndex(CORPUS))(scope, receive, send)
    assert (sent[0]["status"], pieces) == (413, [5])


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /retri",
        b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET",
    ],
)
def test_a_client_that_sends_half_a_head_is_hung_up_on(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "HEADER_SECONDS", 0.05)
    with retriever() as url, socket.create_connection(("127.0.0.1", port_of(url)), timeout=60) as slow:
        slow.sendall(sent)
        answer = b"".join(iter(lambda: slow.recv(4096), b""))  # ends where the other side hangs up
    assert answer.count(b"200 OK") == (sent[:3] == b"GET")


def test_a_client_is_waited_for_between_the_head_and_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    began = Event()

    def slow_search(*_: Any, **__: Any) -> tuple[()]:
        began.wait(60)
        return ()

    monkeypatch.setattr(SearchIndex, "search", slow_search)
    monkeypatch.setattr(service, "HEADER_SECONDS", 0.05)
    with retriever() as url, ThreadPoolExecutor() as threads:
        answer = threads.submit(post, url, {"query": "Tiber"})
        with socket.create_connection(("127.0.0.1", port_of(url)), timeout=60) as idle:
            assert idle.recv(1) == b""  # a head's deadline has passed since the request began
        began.set()
        assert answer.result() == (200, {"result": [[]]})


def test_connections_beyond_the_bound_are_answered_503_and_served_once_others_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searching, over = Event(), Event()
    search = SearchIndex.search

    def slow_search(index: SearchIndex, query: str, topk: int) -> Any:
        searching.set()
        assert over.wait(60)
        return search(index, query, topk)

    monkeypatch.setattr(SearchIndex, "search", slow_search)
    monkeypatch.setattr(service, "MOST_CONNECTIONS", 2)
    with retriever() as url, ThreadPoolExecutor() as threads:
        first = threads.submit(post, url, {"query": "Tiber", "topk": 1})
        assert searching.wait(60)
        refused = urllib.request.Request(url, b'{"query": "Rome"}', {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError, match="503: Service Unavailable") as refusal:
            urllib.request.urlopen(refused, timeout=30)
        refusal.value.close()
        over.set()
        assert first.result()[0] == 200
        assert soon(lambda: post_status(url) == 200)  # once the server has noticed that the first has hung up


def post_status(url: str) -> int:
    try:
        return post(url, {"query": "Rome"})[0]
    except json.JSONDecodeError:  # a 503 is text
        return 503


def test_with_a_token_only_those_who_have_it_are_answered() -> None:
    with retriever(token="secret-of-this-test") as url:
        assert post(url, {"query": "Rome"})[0] == 401
        assert post(url, {"query": "Rome"}, {"Authorization": "Bearer other"})[0] == 401
        with pytest.raises(ServiceError, match="answered 401"):
            search_env(url).step("<search>Rome</search>")
        assert "Rome" in search_env(url, "secret-of-this-test").step("<search>Rome</search>").observations[0]["content"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3"])
def test_other_machines_are_not_served_without_a_token(host: str) -> None:
    with pytest.raises(UserError, match="SKYRL_RETRIEVER_TOKEN"):
        listen(host, 0, None, TOKEN_VARIABLE)


def test_a_port_that_is_taken_is_named() -> None:
    with listen("127.0.0.1", 0, None, TOKEN_VARIABLE) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(ProcessError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            listen("127.0.0.1", port, None, TOKEN_VARIABLE)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":2: not JSON"),
        ("[]", r":2: \[\] is not an object"),
        ('{"id": 2}', ":2: needs the text 'contents', or 'title' and 'text'; it has id"),
        ('{"id": 2, "contents": 5}', ":2: needs"),
        ('{"id": [], "contents": "x"}', ":2: the id"),
        ('{"id": "1", "contents": "x"}', ":2: another document has the id '1'"),
    ],
)
def test_a_line_of_a_corpus_that_is_no_document_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(f'{{"id": 1, "contents": "Rome"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(DataError, match=f"corpus.jsonl{message}"):
        read_corpus(path)


def test_titles_and_missing_ids_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('\n{"title": "Rome", "text": "a city"}\n{"id": 7, "contents": "x"}\n', encoding="utf-8")
    assert read_corpus(path) == ({"id": "2", "contents": "Rome\na city"}, {"id": "7", "contents": "x"})


@pytest.mark.parametrize(("text", "message"), [(b"", "contains no documents"), (b"\xff\xfe", "not text in UTF-8")])
def test_a_file_that_is_no_corpus_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "c.jsonl").write_bytes(text)
    with pytest.raises(DataError, match=message):
        read_corpus(tmp_path / "c.jsonl")


def test_documents_without_words_are_refused() -> None:
    with pytest.raises(DataError, match="no word"):
        SearchIndex([{"id": "1", "contents": "?!"}])


def test_the_command_refuses_a_missing_corpus_in_one_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["serve-retriever", str(tmp_path / "none.jsonl"), "--port", "0"])
    assert isinstance(result.exception, DataError)
    assert str(result.exception) == f"there is no corpus {tmp_path / 'none.jsonl'}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stop_signal", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_a_corpus_until_it_is_told_to_stop(tmp_path: Path, stop_signal: signal.Signals) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(document) + "\n" for document in CORPUS), encoding="utf-8")
    command = [sys.executable, "-m", "skyrl.cli", "serve-retriever", str(corpus), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stdout is not None
        count, _, _, url = process.stdout.readline().split()
        assert count == "3"
        observation = search_env(url).step("<search>Tiber</search>").observations[0]["content"]
        process.send_signal(stop_signal)
        rest = process.stdout.read()
    assert "Doc 1: the Tiber flows through Rome" in observation
    assert (rest, process.returncode) == ("The retriever has stopped.\n", 0)

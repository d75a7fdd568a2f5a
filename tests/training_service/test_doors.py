"""Who may do what: tokens, other clients' things, limits and back-pressure."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
import zstandard
from attrs import evolve
from tinker import types

from skyrl.config import TrainingServiceConfig
from skyrl.errors import PassError, RunError, UserError
from skyrl.training_service.backend import AdamSettings, PassRequest, PassResult
from skyrl.training_service.serving import ServedTraining
from skyrl.training_service.store import DATABASE, add_client, client_names, remove_client
from tests.training_service.bigrams import SERVED, BigramBackend
from tests.training_service.running import client_of, direct, on_service, running
from tests.training_service.test_client_methods import BASE, DATA, PROMPT
from tests.training_service.test_order_and_retries import PROTOBUF, model_of, pass_body, result, send, session_of


@pytest.mark.long
def test_tokens_are_hashed_and_required_from_the_first_one_on(tmp_path: Path) -> None:
    token = add_client(tmp_path, "anna")
    assert client_names(tmp_path) == ("anna",)
    with pytest.raises(UserError, match="there is a client 'anna' already"):
        add_client(tmp_path, "anna")
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert token.encode() not in stored
    with running(tmp_path) as service:
        with pytest.raises(tinker.AuthenticationError, match="requires a client's token"):
            tinker.RestClient(base_url=service.url, api_key=token + "x").get_server_capabilities().result()
        assert httpx.get(service.url + "/metrics").status_code == 401
        with client_of(service.url, token) as client:
            client.create_sampling_client(base_model=BASE).result().compute_logprobs(PROMPT).result()
        late = add_client(tmp_path, "bert")
        with direct(service.url, late) as client:
            assert client.get("/healthz").json() == {"status": "ok"}
            remove_client(tmp_path, "bert")
            assert client.get("/healthz").status_code == 401
    with pytest.raises(UserError, match="there is no client 'bert': anna"):
        remove_client(tmp_path, "bert")


@pytest.mark.long
def test_other_machines_need_tokens(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="no client has a token"),
        running(tmp_path, TrainingServiceConfig(host="0.0.0.0", port=0)),
    ):
        raise AssertionError


def test_pages_of_other_sites_are_refused(service: ServedTraining) -> None:
    with direct(service.url) as client:
        for headers in ({"origin": "http://evil.example"}, {"host": "evil.example"}, {"content-type": "text/plain"}):
            answer = client.post("/create_session", content=b"{}", headers=headers)
            assert 400 <= answer.status_code < 500


@pytest.mark.long
def test_another_clients_things_do_not_exist(tmp_path: Path) -> None:
    keys = [add_client(tmp_path, name) for name in ("anna", "bert")]
    with running(tmp_path) as service, direct(service.url, keys[0]) as anna, direct(service.url, keys[1]) as bert:
        session = session_of(anna)
        model = model_of(anna, session)
        passed = send(anna, model, 1)
        saved = anna.post("/save_weights", json={"model_id": model, "seq_id": 2, "path": "a"}).json()["request_id"]
        path = result(anna, saved).json()["path"]
        base = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
        sampler = anna.post("/create_sampling_session", json=base).json()["sampling_session_id"]
        sample_body = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 2}}
        sampled = anna.post("/asample", json={"sampling_session_id": sampler, "seq_id": 0, **sample_body}).json()[
            "request_id"
        ]
        result(anna, sampled)
        own = session_of(bert)
        checkpoint = f"/training_runs/{model}/checkpoints/weights/a"
        posts: list[tuple[str, dict[str, Any]]] = [
            ("/session_heartbeat", {"session_id": session}),
            (f"/sessions/{session}/finish", {"reason": {"type": "success"}}),
            ("/create_model", {"session_id": session, "model_seq_id": 5, "base_model": BASE}),
            ("/get_info", {"model_id": model}),
            ("/unload_model", {"model_id": model}),
            ("/optim_step", {"model_id": model, "seq_id": 3, "adam_params": {}}),
            ("/save_weights", {"model_id": model, "seq_id": 3, "path": "b"}),
            ("/load_weights", {"model_id": model, "seq_id": 3, "path": path, "optimizer": False}),
            ("/create_sampling_session", {"session_id": own, "sampling_session_seq_id": 0, "model_path": path}),
            ("/create_sampling_session", {**base, "sampling_session_seq_id": 1}),
            ("/join_sampling_session", {"sampling_session_id": sampler}),
            ("/asample", {"sampling_session_id": sampler, "seq_id": 1, **sample_body}),
            ("/retrieve_future", {"request_id": passed}),
            ("/retrieve_future", {"request_id": sampled}),
            ("/retrieve_futures", {"target": {"sampling_session_id": sampler}}),
            ("/cancel_future", {"request_id": sampled}),
            ("/weights_info", {"tinker_path": path}),
            ("/copy_weights", {"source_path": path, "destination_project_id": "p"}),
        ]
        refused = [bert.post(path, json=body) for path, body in posts]
        refused += [
            bert.post("/forward_backward", content=pass_body(model, 3, DATA), headers=PROTOBUF),
            *(bert.get(path) for path in (f"/training_runs/{model}", f"/training_runs/{model}/checkpoints")),
            *(bert.get(path) for path in (f"/sessions/{session}", f"/samplers/{sampler}")),
            bert.delete(checkpoint),
            bert.put(checkpoint + "/ttl", json={"ttl_seconds": 3600}),
            bert.put(f"/sessions/{session}/project", json={"project_id": "p"}),
        ]
        assert {answer.status_code for answer in refused} == {404}
        future = bert.post(
            "/load_weights", json={"session_id": own, "model_seq_id": 0, "path": path, "optimizer": False}
        ).json()
        assert "there is no checkpoint" in result(bert, future["request_id"]).json()["error"]
        listed = [bert.get(path).json() for path in ("/checkpoints", "/training_runs")]
        assert [listed[0]["checkpoints"], listed[1]["training_runs"]] == [[], []]
        assert bert.get("/sessions").json()["sessions"] == [own]
        assert anna.get(f"/training_runs/{model}/checkpoints").json()["checkpoints"][0]["tinker_path"] == path


@pytest.mark.long
def test_limits_are_named(tmp_path: Path) -> None:
    settings = TrainingServiceConfig(
        port=0, max_models=2, client_models=1, max_body_bytes=20_000, max_datums=3, client_bytes=50_000
    )
    with running(tmp_path, settings) as service, direct(service.url) as client:
        session = session_of(client)
        model = model_of(client, session)
        body = {"session_id": session, "model_seq_id": 1, "base_model": BASE}
        assert "the limit of a client" in client.post("/create_model", json=body).json()["error"]
        packed = zstandard.ZstdCompressor().compress(b"x" * 10_000_000)
        bomb = client.post("/forward_backward", content=packed, headers={**PROTOBUF, "content-encoding": "zstd"})
        assert (bomb.status_code, bomb.json()["error"]) == (413, "the body is too long")
        long = client.post(
            "/asample", content=b"{" + b" " * 20_000 + b"}", headers={"content-type": "application/json"}
        )
        assert (long.status_code, "longer than 20000 bytes" in long.json()["error"]) == (413, True)
        sent = client.post("/forward_backward", content=pass_body(model, 1, DATA * 2), headers=PROTOBUF).json()
        assert "4 sequences; allowed are 1 to 3" in result(client, sent["request_id"]).json()["error"]
        answers = []
        for seq in (2, 3, 4):  # the second one replaces the first
            save = {"model_id": model, "seq_id": seq, "path": "ab"[seq // 4], "overwrite": True}
            answers.append(result(client, client.post("/save_weights", json=save).json()["request_id"]).json())
        assert [answer.get("path", "")[-1:] for answer in answers] == ["a", "a", ""]
        assert "at most 50000 are allowed" in answers[2]["error"]
        asyncio.run_coroutine_threadsafe(service._service.executor.collect(), service._loop).result()
        assert len(list((tmp_path / "weights").glob("*-weights-*"))) == 1


@pytest.mark.long
def test_the_number_of_models_of_all_clients_is_bounded(tmp_path: Path) -> None:
    keys = [add_client(tmp_path, name) for name in ("anna", "bert")]
    settings = TrainingServiceConfig(port=0, max_models=1)
    with (
        running(tmp_path, settings) as service,
        direct(service.url, keys[0]) as anna,
        direct(service.url, keys[1]) as bert,
    ):
        model_of(anna, session_of(anna))
        body = {"session_id": session_of(bert), "model_seq_id": 1, "base_model": BASE}
        assert "the service holds 1 models, which is its limit" in bert.post("/create_model", json=body).json()["error"]


@pytest.mark.long
def test_a_model_keeps_its_newest_snapshots_without_a_name_and_all_that_have_one(tmp_path: Path) -> None:
    settings = TrainingServiceConfig(port=0, max_snapshots=2)
    with running(tmp_path, settings) as service, client_of(service.url) as client:
        training = client.create_lora_training_client(BASE, rank=4).result()
        named = training.save_weights_for_sampler("kept").result().path
        old, *new = [training.save_weights_and_get_sampling_client().result() for _ in range(3)]
        with pytest.raises(tinker.NotFoundError, match="a model keeps its last 2"):
            old.compute_logprobs(PROMPT).result()
        for sampler in (*new, client.create_sampling_client(model_path=named).result()):
            sampler.compute_logprobs(PROMPT).result()
        asyncio.run_coroutine_threadsafe(service._service.executor.collect(), service._loop).result()
        assert len(list((tmp_path / "weights").glob("*-sampler*"))) == 3


@pytest.mark.long
@pytest.mark.parametrize("encoding", ["identity", "zstd"])
def test_a_request_that_is_too_long_does_not_hold_up_its_model(tmp_path: Path, encoding: str) -> None:
    settings = TrainingServiceConfig(port=0, max_body_bytes=20_000)
    with running(tmp_path, settings) as service, direct(service.url) as client:
        model = model_of(client, session_of(client))
        step = {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": 0.1}}
        stepped = client.post("/optim_step", json=step).json()["request_id"]
        metadata = {"model_id": model, "seq_id": 2, "path": "a", "user_metadata": {"note": "x" * 19_000}}
        body = pass_body(model, 1, DATA * 300)
        packed = zstandard.ZstdCompressor().compress(body) if encoding == "zstd" else body
        headers = {**PROTOBUF, "content-encoding": encoding}
        (first, repeat) = [client.post("/forward_backward", content=packed, headers=headers) for _ in range(2)]
        assert first.json() == repeat.json()
        saved = client.post("/save_weights", json=metadata).json()["request_id"]
        refusal = result(client, first.json()["request_id"]).json()
        assert refusal == {"error": refusal["error"], "category": "user"}
        assert "longer than 20000 bytes, training_service.max_body_bytes" in refusal["error"]
        assert result(client, saved).json()["type"] == "save_weights"
        assert result(client, stepped).json()["type"] == "optim_step"


@pytest.mark.long
def test_compressed_bodies_and_answers(service: ServedTraining) -> None:
    with direct(service.url) as client:
        model = model_of(client, session_of(client))
        packed = zstandard.ZstdCompressor().compress(pass_body(model, 1, DATA * 200))
        sent = client.post("/forward_backward", content=packed, headers={**PROTOBUF, "content-encoding": "zstd"})
        answer = result(client, sent.json()["request_id"])
        assert answer.headers["content-encoding"] == "zstd"
        assert len(answer.content) > 4000


@pytest.mark.long
def test_too_many_tokens_in_flight_are_told_to_wait(tmp_path: Path) -> None:
    backend = BigramBackend()
    with (
        running(tmp_path, TrainingServiceConfig(port=0, client_queue_length=8), backend) as service,
        direct(service.url) as client,
    ):
        model = model_of(client, session_of(client))
        backend.hold.clear()
        bodies = {seq: pass_body(model, seq, DATA[:1]) for seq in (1, 2, 3, 4)}
        codes = [
            client.post("/forward_backward", content=bodies[seq], headers=PROTOBUF).status_code for seq in (2, 3, 4, 1)
        ]
        assert codes == [200, 200, 429, 200]  # the request that runs next is always accepted
        backend.hold.set()
        result(client, f"{model}:3")


@pytest.mark.long
@pytest.mark.parametrize("clients", [12, pytest.param(200, marks=pytest.mark.long)])
def test_many_clients_see_only_429_and_try_again(tmp_path: Path, clients: int) -> None:
    settings = TrainingServiceConfig(port=0, max_samples=4, client_queue_length=400)
    with running(tmp_path, settings) as service:
        with direct(service.url) as first:
            session = session_of(first)
            body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
            sampler = first.post("/create_sampling_session", json=body).json()["sampling_session_id"]
        seen: set[int] = set()

        def ask(number: int) -> None:
            request = {
                "sampling_session_id": sampler,
                "prompt": {"chunks": [{"tokens": [1, 2, 3]}]},
                "sampling_params": {"max_tokens": 20},
            }
            with direct(service.url) as client:
                for turn in range(5):
                    while True:
                        sent = client.post("/asample", json={**request, "seq_id": 5 * number + turn})
                        seen.add(sent.status_code)
                        if sent.status_code == 200:
                            break
                    assert result(client, sent.json()["request_id"]).status_code == 200

        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(ask, range(clients)))
        assert seen <= {200, 429}
        metrics = httpx.get(service.url + "/metrics").text
        assert f'skyrl_training_requests_total{{kind="sample"}} {5 * clients}' in metrics


@pytest.mark.long
def test_a_failure_of_the_backend_ends_the_service(tmp_path: Path) -> None:
    """An error of the run is told to the caller, and the request is executed by the next service."""

    class Failing(BigramBackend):
        async def optimizer_step(self, model_id: str, settings: AdamSettings) -> Mapping[str, float]:
            raise RunError("the learner is gone")

    with ExitStack() as ends:
        service = ends.enter_context(running(tmp_path, backend=Failing()))
        ends.enter_context(pytest.raises(RunError, match="the learner is gone"))
        with direct(service.url) as client:
            model = model_of(client, session_of(client))
            future = client.post("/optim_step", json={"model_id": model, "seq_id": 1, "adam_params": {}}).json()
            asyncio.run(_watched(service))
    with running(tmp_path) as service, direct(service.url) as client:
        assert result(client, future["request_id"]).json()["type"] == "optim_step"


@pytest.mark.long
def test_a_pass_that_ended_the_service_is_not_executed_again(tmp_path: Path) -> None:
    class Failing(BigramBackend):
        async def passes(self, requests: Sequence[PassRequest]) -> Sequence[PassResult | Exception]:
            raise PassError("out of memory")

    with ExitStack() as ends:
        service = ends.enter_context(running(tmp_path, backend=Failing()))
        ends.enter_context(pytest.raises(PassError, match="out of memory"))
        with direct(service.url) as client:
            model = model_of(client, session_of(client))
            passed = send(client, model, 1)
            asyncio.run(_watched(service))
    with running(tmp_path) as service, direct(service.url) as client:
        assert result(client, passed).json()["category"] == "server"
        assert result(client, send(client, model, 2)).status_code == 200


async def _watched(service: ServedTraining) -> None:
    await service.run()


@pytest.mark.long
def test_two_services_do_not_share_a_folder(tmp_path: Path) -> None:
    with running(tmp_path), pytest.raises(UserError, match="another training service runs in"), running(tmp_path):
        raise AssertionError


@pytest.mark.long
def test_a_folder_belongs_to_one_base_model(tmp_path: Path) -> None:
    with running(tmp_path):
        pass
    with (
        pytest.raises(UserError, match="the folder holds models on toy/bigram, and not on toy/other"),
        running(tmp_path, served=evolve(SERVED, names=("toy/other",))),
    ):
        raise AssertionError


@pytest.mark.long
def test_the_file_is_for_its_owner_only(tmp_path: Path) -> None:
    add_client(tmp_path, "anna")
    assert (tmp_path / DATABASE).stat().st_mode & 0o077 == 0
    with sqlite3.connect(tmp_path / DATABASE) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.long
def test_status_counts(service: ServedTraining) -> None:
    with client_of(service.url) as client:
        training = client.create_lora_training_client(BASE, rank=4).result()
        training.forward_backward(DATA, "cross_entropy").result()
        training.optim_step(types.AdamParams()).result()
        status = on_service(service, lambda training: training.status())
        (model,) = status.models
        assert (model.rank, model.steps, model.next_seq, model.waiting, status.sessions) == (4, 1, 3, 0, 1)
        assert model.loss is not None and 3 < model.loss < 4  # log 32 = 3.47 nats per token
        assert dict(status.finished) == {"create": 1, "pass": 1, "step": 1}

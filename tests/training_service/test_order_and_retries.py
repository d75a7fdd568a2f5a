"""Requests run in their order and once, whatever the network and the process do to them."""

from __future__ import annotations

import random
import shutil
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from skyrl.config import TrainingServiceConfig
from skyrl.training_service.service import TrainingService
from skyrl.training_service.serving import ServedTraining
from tests.training_service.bigrams import BigramBackend
from tests.training_service.running import KilledService, client_of, direct, on_service, running
from tests.training_service.test_client_methods import BASE, DATA, GREEDY, PROMPT, datum

PROTOBUF = {"content-type": "application/x-protobuf"}


def session_of(client: httpx.Client) -> str:
    """Id of a new session."""
    answer = client.post("/create_session", json={"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"})
    session: str = answer.raise_for_status().json()["session_id"]
    return session


def model_of(client: httpx.Client, session: str, number: int = 0) -> str:
    """Id of a new model, which is there."""
    body = {"session_id": session, "model_seq_id": number, "base_model": BASE, "lora_config": {"rank": 4, "seed": 7}}
    future = client.post("/create_model", json=body).raise_for_status().json()
    assert result(client, future["request_id"]).json() == {"model_id": future["model_id"], "type": "create_model"}
    model: str = future["model_id"]
    return model


def result(client: httpx.Client, request_id: str) -> httpx.Response:
    """The answer about a request that is finished, however often one has to ask."""
    while True:
        answer = client.post("/retrieve_future", json={"request_id": request_id})
        answer.raise_for_status()
        if b'"try_again"' not in answer.content:
            return answer


def pass_body(model: str, seq: int, data: list[types.Datum]) -> bytes:
    """The body of a `forward_backward`, as the client makes it."""
    pass_input = types.ForwardBackwardInput(data=data, loss_fn="cross_entropy", loss_fn_config=None)
    request = types.ForwardBackwardRequest(forward_backward_input=pass_input, model_id=model, seq_id=seq)
    body: bytes = forward_backward_request_to_proto(request).SerializeToString()
    return body


def send(client: httpx.Client, model: str, seq: int) -> str:
    """Send request `seq` of a fixed program of passes and steps; returns the id of its future."""
    if seq % 3:
        row = datum(*((np.arange(4) * seq + 1) % 32).tolist())
        answer = client.post("/forward_backward", content=pass_body(model, seq, [row]), headers=PROTOBUF)
    else:
        adam = {"learning_rate": 0.01 * (seq % 7)}
        answer = client.post("/optim_step", json={"model_id": model, "seq_id": seq, "adam_params": adam})
    request_id: str = answer.raise_for_status().json()["request_id"]
    return request_id


def weights_after(folder: Path, order: list[int], last: int) -> tuple[np.ndarray[Any, Any], list[bytes]]:
    """Weights of a model after the program, sent in an order, and all results."""
    backend = BigramBackend()
    with running(folder, backend=backend) as service, direct(service.url) as client:
        model = model_of(client, session_of(client))
        ids = {seq: send(client, model, seq) for seq in order}
        answers = [result(client, ids[seq]).content for seq in range(1, last + 1)]
        return backend.models[model].weights, answers


def test_shuffled_doubled_and_lost_requests_give_the_same_weights(tmp_path: Path) -> None:
    last = 60
    plain, answers = weights_after(tmp_path / "a", list(range(1, last + 1)), last)
    order = [*range(1, last + 1)] * 2
    random.Random(1).shuffle(order)
    shuffled, repeat = weights_after(tmp_path / "b", order, last)
    assert (plain == shuffled).all()
    assert answers == repeat


@pytest.mark.long
def test_1000_shuffled_doubled_and_lost_requests_give_the_same_weights(tmp_path: Path) -> None:
    plain, answers = weights_after(tmp_path / "a", list(range(1, 1001)), 1000)
    order = [*range(1, 1001)] * 2
    random.Random(1).shuffle(order)
    shuffled, repeat = weights_after(tmp_path / "b", order, 1000)
    assert (plain == shuffled).all()
    assert answers == repeat


def test_a_lost_answer_does_not_run_a_request_twice(service: ServedTraining) -> None:
    with direct(service.url) as client:
        model = model_of(client, session_of(client))
        for _ in range(3):
            send(client, model, 1)
        path = {"model_id": model, "seq_id": 2, "path": "a", "type": "save_weights"}
        first, second = (client.post("/save_weights", json=path, headers={"x-idempotency-key": k}).json() for k in "ab")
        assert first == second
        assert result(client, first["request_id"]).json()["path"] == f"tinker://{model}/weights/a"
        other = client.post("/optim_step", json={"model_id": model, "seq_id": 2, "adam_params": {}})
        assert (other.status_code, "another kind" in other.json()["error"]) == (400, True)


@pytest.mark.long
def test_passes_of_different_models_are_joined_and_no_model_is_reordered(tmp_path: Path) -> None:
    backend = BigramBackend()
    with running(tmp_path / "service", backend=backend) as service, direct(service.url) as client:
        session = session_of(client)
        models = [model_of(client, session, number) for number in range(4)]
        ids = [send(client, model, seq) for seq in (3, 2) for model in models]
        backend.hold.clear()  # nothing runs until all have their first request
        ids += [send(client, model, 1) for model in models]
        backend.hold.set()
        for request_id in ids:
            result(client, request_id)
    calls = [call for call in backend.calls if call[0] in ("passes", "step")]
    assert max(len(call) - 1 for call in calls if call[0] == "passes") >= 3
    for model in models:
        assert [call[0] for call in calls if model in call] == ["passes", "passes", "step"]


def test_a_joint_pass_is_bounded_by_its_tokens(tmp_path: Path) -> None:
    backend = BigramBackend()
    settings = TrainingServiceConfig(port=0, max_pass_tokens=6)
    with running(tmp_path / "service", settings, backend) as service, direct(service.url) as client:
        session = session_of(client)
        models = [model_of(client, session, number) for number in range(4)]
        backend.hold.clear()
        ids = [send(client, model, 1) for model in models]
        backend.hold.set()
        for request_id in ids:
            result(client, request_id)
    assert all(len(call) - 1 <= 2 for call in backend.calls if call[0] == "passes")


def patiently(client: httpx.Client, path: str, **content: Any) -> httpx.Response:
    """The answer of a service that may be away for a moment."""
    while True:
        try:
            answer = client.post(path, **content)
        except httpx.TransportError:
            continue
        if b'"try_again"' not in answer.content:
            return answer.raise_for_status()


def answers_through_kills(folder: Path, kills: set[int], last: int) -> list[bytes]:
    """Results of a program whose service is killed after some of its requests were acknowledged, before they are done
    or after.
    """
    with ExitStack() as ends:
        service = KilledService(folder, TrainingServiceConfig(port=0, state_steps=3))
        ends.callback(service.close)
        client = ends.enter_context(direct(service.url))
        model = model_of(client, session_of(client))
        ids = []
        for seq in range(1, last + 1):
            row = datum(*((np.arange(4) * seq + 1) % 32).tolist())
            step = {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.01 * (seq % 7)}}
            passed = {"content": pass_body(model, seq, [row]), "headers": PROTOBUF}
            sent = (
                patiently(client, "/forward_backward", **passed)
                if seq % 3
                else patiently(client, "/optim_step", json=step)
            )
            ids.append(sent.json()["request_id"])
            if seq in kills:
                service.kill()
        return [patiently(client, "/retrieve_future", json={"request_id": request_id}).content for request_id in ids]


def test_a_killed_service_continues_bit_for_bit(tmp_path: Path) -> None:
    _, plain = weights_after(tmp_path / "a", list(range(1, 19)), 18)
    assert answers_through_kills(tmp_path / "b", {5, 12, 13}, 18) == plain


@pytest.mark.long
def test_50_kills_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    kills = set(random.Random(1).sample(range(1, 300), 50))
    _, plain = weights_after(tmp_path / "a", list(range(1, 301)), 300)
    assert answers_through_kills(tmp_path / "b", kills, 300) == plain


@pytest.mark.long
def test_the_client_trains_and_samples_through_kills(tmp_path: Path) -> None:
    """Kills at random moments, under the client's own retries."""
    outcomes = []
    for kills in (5, 0):
        service = KilledService(tmp_path / str(kills), TrainingServiceConfig(port=0, state_steps=4))
        done = threading.Event()
        killer = threading.Thread(target=_kill, args=(service, kills, done))
        try:
            with client_of(service.url) as client:
                training = client.create_lora_training_client(BASE, rank=4, seed=7).result()
                before = training.save_weights_and_get_sampling_client().result()
                first = before.compute_logprobs(PROMPT).result()
                killer.start()
                losses = []
                for _ in range(30):
                    passed = training.forward_backward(DATA, "cross_entropy")
                    training.optim_step(types.AdamParams(learning_rate=0.1)).result()
                    losses.append(passed.result().metrics["loss:sum"])
                after = training.save_weights_and_get_sampling_client().result()
                tokens = after.sample(PROMPT, 1, GREEDY).result().sequences[0].tokens
                assert before.compute_logprobs(PROMPT).result() == first
                outcomes.append((losses, tokens))
                done.set()
                killer.join()
        finally:
            done.set()
            service.close()
    assert outcomes[0] == outcomes[1]


def _kill(service: KilledService, kills: int, done: threading.Event) -> None:
    moments = random.Random(kills)
    for _ in range(kills):
        if done.wait(moments.uniform(0.0, 1.0)):
            return
        service.kill()


def test_what_the_journal_needs_is_kept(tmp_path: Path) -> None:
    """Loads from a checkpoint that was deleted, an unloaded model and a sampler, in a folder as a crash leaves it."""
    backends = [BigramBackend(), BigramBackend()]
    with running(tmp_path / "a", backend=backends[0]) as service, direct(service.url) as client:
        session = session_of(client)
        model, other = (model_of(client, session, number) for number in (0, 1))
        for seq in (1, 2, 3):
            send(client, model, seq)
            send(client, other, seq)
        orders: list[tuple[str, dict[str, Any]]] = [
            ("/save_weights", {"model_id": model, "seq_id": 4, "path": "a"}),
            (
                "/load_weights",
                {"model_id": model, "seq_id": 5, "path": f"tinker://{model}/weights/a", "optimizer": True},
            ),
            ("/save_weights_for_sampler", {"model_id": model, "seq_id": 6, "sampling_session_seq_id": 0}),
            ("/unload_model", {"model_id": other}),
        ]
        for path, order in orders:
            assert b"error" not in result(client, client.post(path, json=order).json()["request_id"]).content
        client.delete(f"/training_runs/{model}/checkpoints/weights/a").raise_for_status()
        result(client, send(client, model, 7))
        assert not client.get(f"/training_runs/{model}/checkpoints").json()["checkpoints"]
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        drawn = sample_of(client, f"{session}:sample:0", 0)
        assert list(backends[0].models) == [model]
        before = backends[0].models[model]
        with running(tmp_path / "b", backend=backends[1]) as copied, direct(copied.url) as copied_client:
            assert sample_of(copied_client, f"{session}:sample:0", 1) == drawn
            assert list(backends[1].models) == [model]
            after = backends[1].models[model]
    assert (before.weights == after.weights).all() and (before.gradient == after.gradient).all()


def sample_of(client: httpx.Client, sampler: str, seq: int) -> bytes:
    """A sample with a fixed seed."""
    body = {"sampling_session_id": sampler, "seq_id": seq, "prompt": {"chunks": [{"tokens": [1]}]}}
    future = client.post("/asample", json={**body, "sampling_params": {"max_tokens": 9, "seed": 5}}).json()
    return result(client, future["request_id"]).content


def test_results_that_nobody_fetched_survive_a_restart(tmp_path: Path) -> None:
    with running(tmp_path) as service, direct(service.url) as client:
        session = session_of(client)
        model = model_of(client, session)
        ids = [send(client, model, seq) for seq in (1, 2, 3)]
        answers = [result(client, request_id).content for request_id in ids]
    backend = BigramBackend()
    with running(tmp_path, backend=backend) as service, direct(service.url) as client:
        assert [result(client, request_id).content for request_id in ids] == answers
        assert [send(client, model, seq) for seq in (1, 2, 3)] == ids
        assert ("step", model) not in backend.calls
        assert client.post("/session_heartbeat", json={"session_id": session}).status_code == 200


@pytest.mark.long
def test_a_result_that_was_read_is_gone_after_a_while(tmp_path: Path) -> None:
    with running(tmp_path) as service, direct(service.url) as client:
        model = model_of(client, session_of(client))
        request_id = send(client, model, 1)
        result(client, request_id)
        later = 2e10
        on_service(
            service,
            lambda training: training.store.forget_results(read_before=0.0, done_before=later, most_bytes=1 << 30),
        )
        answer = client.post("/retrieve_future", json={"request_id": request_id})
        assert (answer.status_code, "is gone" in answer.json()["error"]) == (410, True)
        assert send(client, model, 1) == request_id


@pytest.mark.long
def test_a_silent_session_ends(tmp_path: Path) -> None:
    backend = BigramBackend()
    with (
        running(tmp_path, TrainingServiceConfig(port=0, session_seconds=0.001), backend) as service,
        direct(service.url) as client,
    ):
        session = session_of(client)
        model = model_of(client, session)
        assert model in backend.models
        future = client.post("/forward_backward", content=pass_body(model, 2, DATA), headers=PROTOBUF).json()
        # `result` returns once housekeeping has ended the session.
        assert "was unloaded" in result(client, future["request_id"]).json()["error"]
        assert backend.models == {}
        assert client.post("/session_heartbeat", json={"session_id": session}).status_code == 410
        assert client.post("/get_info", json={"model_id": model}).status_code == 404


@pytest.mark.long
def test_requests_behind_one_that_was_lost_fail_in_the_end(service: ServedTraining) -> None:
    with direct(service.url) as client:
        model = model_of(client, session_of(client))
        request_id = client.post("/optim_step", json={"model_id": model, "seq_id": 2, "adam_params": {}}).json()[
            "request_id"
        ]
        on_service(service, partial(_wait_longer, model_id=model, seconds=301.0))
        body = result(client, request_id).json()
        assert f"seq_id 1 of {model} has not arrived for 300 s" in body["error"]
        assert body["category"] == "user"
        assert result(client, send(client, model, 1)).status_code == 200


def _wait_longer(service: TrainingService, model_id: str, seconds: float) -> None:
    """Pretend that requests of a model wait for a lost one for as long as this already."""
    model = service.executor.queue.get(model_id)
    assert model is not None
    model.gap_since = time.monotonic() - seconds


@pytest.mark.long
def test_unloading_a_model_is_a_request(service: ServedTraining) -> None:
    with direct(service.url) as client:
        model = model_of(client, session_of(client))
        future = client.post("/unload_model", json={"model_id": model, "type": "unload_model"}).json()
        assert result(client, future["request_id"]).json() == {"model_id": model, "type": "unload_model"}
        assert client.post("/get_info", json={"model_id": model}).status_code == 404


@pytest.mark.long
def test_a_cancelled_sample_ends(tmp_path: Path) -> None:
    backend = BigramBackend()
    with running(tmp_path, backend=backend) as service, direct(service.url) as client:
        session = session_of(client)
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
        sampler = client.post("/create_sampling_session", json=body).json()["sampling_session_id"]
        backend.hold.clear()
        sample_body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}}
        future = client.post("/asample", json=sample_body | {"sampling_params": {"max_tokens": 2}}).json()
        client.post("/cancel_future", json={"request_id": future["request_id"]}).raise_for_status()
        assert "cancelled" in result(client, future["request_id"]).json()["error"]
        backend.hold.set()


@pytest.mark.long
def test_snapshots_beyond_the_limit_are_loaded_when_used(tmp_path: Path) -> None:
    backend = BigramBackend()
    with (
        running(tmp_path, TrainingServiceConfig(port=0, max_snapshots=2), backend) as service,
        client_of(service.url) as client,
    ):
        trainings = [client.create_lora_training_client(BASE, rank=4, seed=seed).result() for seed in (7, 8)]
        samplings = [
            training.save_weights_and_get_sampling_client().result() for training in trainings for _ in range(2)
        ]
        scores = {tuple(sampler.compute_logprobs(PROMPT).result()) for sampler in samplings}
        assert len(scores) == 2  # one for each model
        assert len(backend.samplers) == 2
        assert all(isinstance(training, tinker.TrainingClient) for training in trainings)

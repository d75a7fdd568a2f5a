"""What a service leaves for people: metrics of each model, samples, its pages, and numbers for Prometheus."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from attrs import define, field
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from tinker import types

from skyrl.config import SkyRLTrainConfig, compose
from skyrl.experiments.training_service import TrainingServiceExp, status_text
from skyrl.tracking.jsonlines import JsonLines, MetricsFile
from skyrl.tracking.service_status import SERVICE_STATUS, folder_of, service_status, status_lines
from skyrl.tracking.tracker import Tracker, Trackers
from skyrl.training_service.backend import PassResult
from skyrl.training_service.model_queue import QueuedModel
from skyrl.training_service.records import SAMPLES, ServiceRecords, StepLines, summary_of
from skyrl.training_service.serving import ServedTraining
from skyrl.viewer.sample_index import SampleIndex
from skyrl.viewer.server import view_app
from skyrl.viewer.service_pages import ServiceFollower, ServicePages
from tests.tracking.readers import METRIC, READERS
from tests.training_service.banks import datum, request
from tests.training_service.running import client_of, on_service, running
from tests.training_service.test_client_methods import BASE, DATA, PROMPT

KEY = "a-key"


def decoded(ids: Sequence[int]) -> str:
    return " ".join(f"t{token}" for token in ids)


@define
class Recorded:
    """A service that records, and what its trackers got."""

    folder: Path
    said: list[str] = field(factory=list)
    closed: list[str] = field(factory=list)

    def records(self, *, samples_per_step: int = -1) -> ServiceRecords:
        return ServiceRecords(self.opened, self.folder, decoded, samples_per_step=samples_per_step)

    def opened(self, model: QueuedModel) -> Tracker:
        folder = folder_of(model.id, self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        closed = self.closed

        class Noted(StepLines):
            def close(self) -> None:
                closed.append(model.id)

        return Trackers([MetricsFile(JsonLines(folder / "metrics.jsonl")), Noted(model.id, self.said.append)])

    def metrics(self, model_id: str) -> list[dict[str, Any]]:
        return list(JsonLines(folder_of(model_id, self.folder) / "metrics.jsonl").read())

    def samples(self) -> list[dict[str, Any]]:
        return list(JsonLines(self.folder / SAMPLES).read())

    def write_status(self, service: ServedTraining) -> Mapping[str, Any]:
        (self.folder / SERVICE_STATUS).write_text(status_text(on_service(service, lambda training: training.status())))
        status = service_status(self.folder)
        assert status is not None
        return status


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path)


def steps(client: tinker.ServiceClient, count: int, rank: int = 4) -> tinker.TrainingClient:
    training = client.create_lora_training_client(BASE, rank=rank).result()
    for _ in range(count):
        training.forward_backward(DATA, "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=0.1)).result()
    return training


@pytest.mark.long
def test_each_model_has_metrics_of_its_steps(recorded: Recorded) -> None:
    records = recorded.records()
    with running(recorded.folder, records=records) as service, client_of(service.url) as client:
        one, two = steps(client, 2), steps(client, 1)
        ids = [training.get_info().model_id for training in (one, two)]
    records.close()
    first = recorded.metrics(ids[0])
    assert [record["step"] for record in first] == [1, 2]
    assert first[1]["train/loss"] < first[0]["train/loss"] < 4  # log 32 = 3.47 nats per token
    assert first[0]["train/lr"] == 0.1
    assert {"train/grad_norm", "train/learned_tokens", "timing/step"} <= first[0].keys()
    assert len(recorded.metrics(ids[1])) == 1
    assert sorted(recorded.closed) == sorted(ids)
    assert recorded.said[0].startswith(f"{ids[0]} step 1  loss 3.")


@pytest.mark.long
def test_steps_are_counted_on_after_a_restart(recorded: Recorded) -> None:
    before, after = recorded.records(), recorded.records()
    with running(recorded.folder, records=before) as service:
        client = tinker.ServiceClient(base_url=service.url)
        training = steps(client, 2)
        port = int(service.url.rpartition(":")[2])
    before.close()
    with running(recorded.folder, records=after, port=port) as service:
        training.forward_backward(DATA, "cross_entropy").result()
        training.optim_step(types.AdamParams()).result()
        [model] = on_service(service, lambda training: training.status()).models
        client.close("success").result()
    after.close()
    assert model.steps == 3
    assert [record["step"] for record in recorded.metrics(model.id)] == [1, 2, 3]


@pytest.mark.long
def test_samples_are_kept_with_the_step_of_their_weights_up_to_a_number_per_step(recorded: Recorded) -> None:
    records = recorded.records(samples_per_step=3)
    with running(recorded.folder, records=records) as service, client_of(service.url) as client:
        training = steps(client, 1)
        limits = types.SamplingParams(max_tokens=4)
        for _ in range(2):
            sampler = training.save_weights_and_get_sampling_client().result()
            for _ in range(2):
                sampler.sample(PROMPT, num_samples=2, sampling_params=limits).result()
            sampler.compute_logprobs(PROMPT).result()
            training.forward_backward(DATA, "cross_entropy").result()
            training.optim_step(types.AdamParams()).result()
        client.create_sampling_client(base_model=BASE).result().sample(PROMPT, 1, limits).result()
        model_id = training.get_info().model_id
    records.close()
    kept = recorded.samples()
    assert [(record["source"], record["step"], record["sample"]) for record in kept] == [
        *((model_id, step, sample) for step in (1, 2) for sample in (0, 1, 0)),
        (BASE, 0, 0),
    ]
    assert {record["prompt"][0]["content"] for record in kept} == {decoded(PROMPT.to_ints())}
    assert all(record["response"] == decoded(record["response_ids"]) and record["reward"] is None for record in kept)
    assert (recorded.folder / SAMPLES).stat().st_mode & 0o077 == 0


@pytest.mark.long
def test_the_loss_of_a_step_is_one_per_token_that_counts() -> None:
    """Two of four tokens have an advantage; the sampler's log-probabilities are 0.5 nats away from the learner's."""
    row = datum(4, 1, advantages=0.0, logprobs=-1.0)
    row.inputs["advantages"][:2] = 1.0
    pass_request = request("m", [row], "importance_sampling")
    result = PassResult(outputs=[{"logprobs": np.full(4, -1.5, np.float32)}], metrics={"loss:sum": -3.0})
    summary = summary_of(pass_request, result)
    assert (summary.tokens, summary.loss_per_token, summary.drift, summary.metric) == (
        2,
        -1.5,
        1.0,
        "policy/policy_loss",
    )
    assert summary_of(request("m", [row]), result).metric == "train/loss"


def test_trackers_that_fail_do_not_end_the_service(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def failing(model: QueuedModel) -> Tracker:
        raise ValueError("no room left")

    records = ServiceRecords(failing, tmp_path, decoded, samples_per_step=-1)
    with running(tmp_path, records=records) as service, client_of(service.url) as client:
        steps(client, 2)
    records.close()
    assert caplog.text.count("the service goes on: ValueError: no room left") == 1


@pytest.fixture
def viewed(recorded: Recorded) -> Iterator[tuple[Recorded, ServedTraining, TestClient]]:
    """A service with two models, and its pages."""
    records = recorded.records()
    with running(recorded.folder, records=records) as service, client_of(service.url) as client:
        steps(client, 1)
        training = steps(client, 2, rank=8)
        sampler = training.save_weights_and_get_sampling_client().result()
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=4)).result()
        records._writer.finish()
        recorded.write_status(service)
        index = SampleIndex(recorded.folder / SAMPLES, recorded.folder / "index")
        pages = ServicePages(recorded.folder, index)
        follower = ServiceFollower(index, pages.metrics, recorded.folder)
        follower.look()
        seen = TestClient(view_app(pages, follower, KEY), base_url="http://127.0.0.1:8008")
        seen.get("/", params={"key": KEY})
        yield recorded, service, seen
    records.close()


def test_the_page_of_a_service_shows_models_clients_queue_losses_and_samples(
    viewed: tuple[Recorded, ServedTraining, TestClient],
) -> None:
    recorded, service, seen = viewed
    one, two = on_service(service, lambda training: training.status()).models
    page = seen.get("/run").text
    for text in (one.id, two.id, "rank 8", BASE, "2 models of 1 clients", "0 requests wait", "Training loss"):
        assert text in page
    assert f"{two.loss:.4g}" in page
    own = seen.get(f"/model/{two.id.replace(':', '-')}")
    assert own.status_code == 200
    assert "loaded, step 2" in own.text
    assert "training loss" in own.text
    assert seen.get("/model/none").status_code == 404
    assert (recorded.folder / "index").stat().st_mode & 0o077 == 0
    samples = seen.get("/").text
    assert decoded(PROMPT.to_ints()) in samples
    assert "the policy after 2 training steps" in seen.get("/sample/1").text
    status = seen.get("/status")
    assert "2 models of 1 clients" in status.json()["state"]
    assert seen.get("/status", headers={"If-None-Match": status.headers["etag"]}).status_code == 304


@pytest.mark.long
def test_the_page_of_a_service_without_models_says_so(recorded: Recorded) -> None:
    with running(recorded.folder) as service:
        recorded.write_status(service)
    pages = ServicePages(recorded.folder, SampleIndex(recorded.folder / SAMPLES, recorded.folder / "index"))
    assert "No model is loaded." in pages.run()
    (recorded.folder / SERVICE_STATUS).write_text("{")
    assert "the service has ended" in pages.run()


@pytest.mark.long
def test_what_watch_says(viewed: tuple[Recorded, ServedTraining, TestClient]) -> None:
    recorded, service, _ = viewed
    lines = [line for line in status_lines(recorded.write_status(service)) if "no sign of life" not in line]
    assert lines[0].startswith("2 models of 1 clients in 1 sessions, 1 snapshots; 0 requests wait, 0 samples are drawn")
    assert "1 sample" in lines[0]
    assert "rank 8, 2 steps, loss " in lines[2]


def test_prometheus_reads_the_numbers(service: ServedTraining, client: tinker.ServiceClient) -> None:
    steps(client, 2)
    answer = httpx.get(service.url + "/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    assert all(family.documentation and family.type in ("gauge", "counter") for family in families.values())
    values = {
        (sample.name, *sample.labels.items()): sample.value for family in families.values() for sample in family.samples
    }
    assert values["skyrl_training_models",] == 1
    assert values["skyrl_training_requests_total", ("kind", "step")] == 2
    assert values["skyrl_training_requests_total", ("kind", "pass")] == 2
    assert values["skyrl_training_tokens_total",] > 0
    assert "local" not in answer.text
    assert json.dumps(BASE) not in answer.text


@pytest.mark.long
@pytest.mark.parametrize("named", ["tensorboard", pytest.param("wandb", marks=pytest.mark.long)])
def test_each_model_is_a_run_of_its_own_at_a_tracking_service(
    tmp_path: Path, nano: Path, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written = {
        "trainer.run_path": str(tmp_path),
        "trainer.run_name": "shared",
        "trainer.policy.model.path": str(nano / "model"),
        "trainer.device": "cpu",
        "trainer.logger": ["console", named],
        "trainer.trackers.wandb.mode": "offline",
        "generator.inference_engine.backend": "torch",
    }
    experiment = TrainingServiceExp(compose([], written, SkyRLTrainConfig).config, {})
    for name, losses in (("s-1:train:0", (3.0, 2.0)), ("s-1:train:1", (1.0,))):
        model = QueuedModel(id=name, client="ada", session="s-1", steps=1)
        tracker = experiment.open_tracker(model)
        for step, loss in enumerate(losses, 1):
            tracker.log(step, {METRIC: loss})
        tracker.close()
        folder = folder_of(name, tmp_path)
        assert READERS[named](folder) == list(enumerate(losses, 1))
        stored = json.loads((folder / "config.json").read_text())["config"]
        assert stored["trainer"]["run_name"] == f"shared-{name.replace(':', '-')}"
    assert "s-1:train:0 step 2" in capsys.readouterr().err

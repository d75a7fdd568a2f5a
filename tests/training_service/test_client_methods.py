"""Every method of the real client answers as it documents, or is refused by name."""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from attrs import evolve
from tinker import types

from skyrl.training_service.serving import ServedTraining
from tests.training_service.bigrams import SERVED
from tests.training_service.running import KEY, client_of, running

BASE = "toy/bigram"


def datum(*tokens: int, weight: float = 1.0) -> types.Datum:
    """Predict each token from the one before it."""
    targets = list(tokens[1:])
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=targets, dtype="int64", shape=[len(targets)]),
            "weights": types.TensorData(data=[weight] * len(targets), dtype="float32", shape=[len(targets)]),
        },
    )


DATA = [datum(1, 2, 3, 4, 5), datum(5, 6, 7)]
PROMPT = types.ModelInput.from_ints([1, 2, 3])
GREEDY = types.SamplingParams(max_tokens=4, temperature=0.0, seed=1)


@pytest.fixture
def trained(client: tinker.ServiceClient) -> tinker.TrainingClient:
    """A model after 8 steps on `DATA`."""
    training = client.create_lora_training_client(BASE, rank=4, seed=7, user_metadata={"run": "a"}).result()
    for _ in range(8):
        passed = training.forward_backward(DATA, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1.0)).result()
        passed.result()
    return training


@pytest.mark.long
def test_training_learns_and_reports(trained: tinker.TrainingClient) -> None:
    output = trained.forward(DATA, "cross_entropy").result()
    assert output.metrics["loss:sum"] < 0.5
    assert [len(row["logprobs"].data) for row in output.loss_fn_outputs] == [4, 2]
    total = sum(sum(row["logprobs"].data) for row in output.loss_fn_outputs)
    assert output.metrics["loss:sum"] == pytest.approx(-total, abs=1e-5)
    info = trained.get_info()
    assert (info.is_lora, info.lora_rank, info.model_data.tokenizer_id) == (True, 4, BASE)


@pytest.mark.long
def test_targets_with_several_columns_give_as_many_logprobs(client: tinker.ServiceClient) -> None:
    training = client.create_lora_training_client(BASE, rank=4, seed=7).result()
    targets = torch.tensor([[2, 9], [3, 8], [4, 7]])
    weights = torch.zeros(3, 2)
    weights[1, 0] = 1.0
    arrays = {"target_tokens": types.TensorData.from_torch(targets), "weights": types.TensorData.from_torch(weights)}
    row = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=arrays)
    output = training.forward_backward([row, DATA[0]], "cross_entropy").result()
    assert output.loss_fn_outputs[0]["logprobs"].shape == [3, 2]
    assert output.loss_fn_outputs[1]["logprobs"].shape == [4]


@pytest.mark.long
def test_a_custom_loss_takes_two_passes(client: tinker.ServiceClient) -> None:
    training = client.create_lora_training_client(BASE, rank=4, seed=7).result()

    def doubled(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -2 * torch.cat(logprobs).sum(), {"doubled": 1.0}

    plain = training.forward_backward(DATA, "cross_entropy").result()
    output = training.forward_backward_custom(DATA, doubled).result()
    assert output.metrics["doubled"] == 1.0
    both = training.optim_step(types.AdamParams()).result().metrics
    training.forward_backward(DATA, "cross_entropy").result()
    once = training.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics
    assert both is not None and once is not None and plain.metrics["loss:sum"] > 0
    assert both["grad_norm:mean"] == pytest.approx(3 * once["grad_norm:mean"], rel=1e-2)


@pytest.mark.long
def test_a_traced_custom_loss_runs_in_the_client(client: tinker.ServiceClient) -> None:
    def weighted(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = -(logprobs * weights).sum()
        return loss, {"custom/weighted:sum": loss}

    training = client.create_lora_training_client(BASE, rank=4, seed=7).result()
    handle = client.create_custom_loss(weighted, input_ranks={"logprobs": 1, "weights": 1}).result()
    output = training.forward_backward_custom(DATA, handle).result()
    assert output.metrics["custom/weighted:sum"] > 0


@pytest.mark.long
def test_samples(trained: tinker.TrainingClient) -> None:
    sampling = trained.save_weights_and_get_sampling_client().result()
    answer = sampling.sample(
        PROMPT, 2, GREEDY, include_prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=3
    ).result()
    assert [sequence.tokens for sequence in answer.sequences] == [[4, 5, 6, 7]] * 2
    assert answer.sequences[0].stop_reason == "length"
    prompt, top, drawn = answer.prompt_logprobs, answer.topk_prompt_logprobs, answer.sequences[0].topk_logprobs
    assert prompt is not None and prompt[0] is None and prompt[1] is not None and prompt[1] > -0.2
    assert top is not None and top[0] is None and top[1] is not None and top[1][0][0] == 2
    assert drawn is not None and [row[0][0] for row in drawn if row is not None] == [4, 5, 6, 7]
    scores = sampling.compute_logprobs(PROMPT, prompt_logprobs_last_n=1).result()
    assert scores[:2] == [None, None] and scores[2] is not None
    stopped = sampling.sample(PROMPT, 1, types.SamplingParams(max_tokens=9, temperature=0.0, stop=[5])).result()
    assert (stopped.sequences[0].tokens, stopped.sequences[0].stop_reason) == ([4, 5], "stop")
    assert sampling.get_base_model() == BASE


@pytest.mark.long
def test_equal_seeds_give_equal_samples(client: tinker.ServiceClient) -> None:
    sampling = client.create_sampling_client(base_model=BASE).result()
    params = types.SamplingParams(max_tokens=20, seed=3)
    first, repeat = (sampling.sample(PROMPT, 1, params).result().sequences[0].tokens for _ in range(2))
    other = sampling.sample(PROMPT, 1, types.SamplingParams(max_tokens=20)).result().sequences[0].tokens
    assert first == repeat != other


@pytest.mark.long
def test_copies_of_a_sampling_client_have_numbers_of_their_own(client: tinker.ServiceClient) -> None:
    sampling = client.create_sampling_client(base_model=BASE).result()
    copies = [
        pickle.loads(pickle.dumps(sampling)),
        tinker.SamplingClient.from_sampler_handle(sampling.get_sampler_handle(), api_key=KEY),
    ]
    answers = [sampler.sample(PROMPT, 1, GREEDY).result() for sampler in (sampling, *copies)]
    assert len({answer.sequences[0].sequence_id for answer in answers}) == 3


@pytest.mark.long
def test_inflight_samplers_follow_the_model(client: tinker.ServiceClient) -> None:
    training = client.create_lora_training_client(BASE, rank=4, seed=7).result()
    snapshot = training.save_weights_and_get_sampling_client().result()
    inflight = training.save_weights_and_get_sampling_client(kind="inflight").result()
    before = inflight.compute_logprobs(PROMPT).result()
    training.forward_backward(DATA, "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1.0)).result()
    training.save_weights_and_get_sampling_client(kind="inflight").result()
    assert inflight.compute_logprobs(PROMPT).result() != before
    assert snapshot.compute_logprobs(PROMPT).result() == before


@pytest.mark.long
def test_checkpoints_bring_a_model_back(client: tinker.ServiceClient, trained: tinker.TrainingClient) -> None:
    state = trained.save_state("middle", user_metadata={"a": "b"}).result().path
    with pytest.raises(tinker.RequestFailedError, match="there is a checkpoint .* already"):
        trained.save_state("middle").result()
    trained.save_state("middle", overwrite=True, ttl_seconds=3600).result()
    losses = []
    same = client.create_training_client_from_state_with_optimizer(state).result()
    fresh = client.create_training_client_from_state(state, user_metadata={"c": "d"}).result()
    with pytest.warns(FutureWarning, match="load_state"):
        fresh.load_state(state).result()
    with pytest.warns(FutureWarning, match="load_state"):
        fresh.load_state_with_optimizer(state).result()
    for training in (trained, same, fresh):
        training.forward_backward(DATA, "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=1.0)).result()
        losses.append(training.forward(DATA, "cross_entropy").result().metrics["loss:sum"])
    assert losses[0] == losses[1] == losses[2]
    weights = trained.save_weights_for_sampler("answers").result().path
    with pytest.raises(tinker.RequestFailedError, match="no optimizer state"):
        client.create_training_client_from_state_with_optimizer(weights).result()
    sampling = client.create_sampling_client(model_path=weights).result()
    assert sampling.sample(PROMPT, 1, GREEDY).result().sequences[0].tokens == [4, 5, 6, 7]
    assert trained.create_sampling_client(weights).result().get_base_model() == BASE


@pytest.mark.long
def test_rest_client(service: ServedTraining, client: tinker.ServiceClient, trained: tinker.TrainingClient) -> None:
    rest = tinker.RestClient(base_url=service.url, api_key=KEY)
    path = trained.save_state("one", user_metadata={"a": "b"}).result().path
    sampler_path = trained.save_weights_for_sampler("two").result().path
    run, session = trained.model_id, trained.model_id.partition(":")[0]
    assert rest.get_server_capabilities().result().supported_models[0].model_name == BASE
    entry = rest.get_training_run(run).result()
    assert (entry.base_model, entry.lora_rank, entry.user_metadata) == (BASE, 4, {"run": "a"})
    assert entry.last_checkpoint is not None and entry.last_checkpoint.tinker_path == path
    assert rest.get_training_run_by_tinker_path(path).result().training_run_id == run
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.is_lora, info.lora_rank, info.train_mlp) == (True, 4, True)
    assert [training_run.training_run_id for training_run in rest.list_training_runs().result().training_runs] == [run]
    assert rest.list_training_runs(project_id="other").result().cursor.total_count == 0
    listed = rest.list_checkpoints(run).result().checkpoints
    assert [(checkpoint.checkpoint_id, checkpoint.checkpoint_type) for checkpoint in listed] == [
        ("weights/one", "training"),
        ("sampler_weights/two", "sampler"),
    ]
    assert listed[0].user_metadata == {"a": "b"} and listed[0].size_bytes is not None and listed[0].size_bytes > 1000
    assert len(rest.list_user_checkpoints(limit=1).result().checkpoints) == 1
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    assert rest.list_checkpoints(run).result().checkpoints[0].expires_at is not None
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert rest.list_checkpoints(run).result().checkpoints[0].expires_at is None
    copy = rest.copy_weights(path, destination_project_id="archive").result()
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("TINKER_PROJECT_ID", "archive")
        assert client.copy_weights(sampler_path).result().endswith("/sampler_weights/two")
    rest.delete_checkpoint_from_tinker_path(path).result()
    rest.delete_checkpoint(run, "sampler_weights/two").result()
    assert rest.list_checkpoints(run).result().checkpoints == []
    restored = client.create_training_client_from_state_with_optimizer(copy).result()
    assert restored.forward(DATA, "cross_entropy").result().metrics["loss:sum"] < 0.5
    assert session in rest.list_sessions().result().sessions
    assert run in rest.get_session(session).result().training_run_ids
    rest.assign_session_project(session, "project").result()
    runs = rest.list_training_runs(project_id="project").result().training_runs
    assert [training_run.training_run_id for training_run in runs] == [restored.model_id, run]
    sampling = client.create_sampling_client(base_model=BASE).result()
    assert rest.get_sampler(sampling._sampling_session_id).result().base_model == BASE


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::tinker.lib.experimental.ExperimentalWarning")
def test_sessions_are_found(service: ServedTraining) -> None:
    rest = tinker.RestClient(base_url=service.url, api_key=KEY)
    sessions = []
    for name in ("first night", "second night", "day"):
        client = tinker.ServiceClient({"name": name}, display_name=name, base_url=service.url, api_key=KEY)
        sessions.append(client.holder.get_session_id())
        client.close("errored", detail="why").result()
    page = rest.search_sessions(types.SessionSearchRequest(display_name="NIGHT", limit=1)).result()
    assert [session.session_id for session in page.sessions] == [sessions[1]]
    request = types.SessionSearchRequest(display_name="NIGHT", limit=1, cursor=page.next_cursor)
    page = rest.search_sessions(request).result()
    assert [session.session_id for session in page.sessions] == [sessions[0]] and page.next_cursor is None
    status = page.sessions[0].status
    assert status is not None and status.type == "client_finished"


@pytest.mark.long
def test_what_is_not_there_is_refused_by_name(
    service: ServedTraining, client: tinker.ServiceClient, trained: tinker.TrainingClient
) -> None:
    rest = tinker.RestClient(base_url=service.url, api_key=KEY)
    admin = tinker.AdminClient(base_url=service.url, api_key=KEY)
    path = trained.save_state("one").result().path
    refused: dict[str, Callable[[], Any]] = {
        "publishing": lambda: rest.publish_checkpoint_from_tinker_path(path),
        "publishing: ": lambda: rest.unpublish_checkpoint_from_tinker_path(path),
        "billing": lambda: admin.get_billing_usage("2026-01-01", "2026-01-02"),
        "billing: ": lambda: admin.get_current_checkpoint_storage_usage(),
        "billing: not": lambda: admin.get_audit_log(),
        "exporting traces": lambda: rest.export_session_trace(trained.model_id.partition(":")[0]),
        "addresses of external weights": lambda: rest.get_external_weights_urls(
            path.replace("/weights/", "/external_weights/")
        ),
    }
    for name, call in refused.items():
        with pytest.raises(tinker.BadRequestError, match=name):
            call().result()
    with pytest.raises(tinker.RequestFailedError, match="external weights are not supported"):
        trained.save_weights_external("out").result()
    with pytest.raises(RuntimeError, match="whoami requires JWT"):
        rest.whoami().result()
    image = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")])
    row = types.Datum(model_input=image, loss_fn_inputs={})
    with pytest.raises(tinker.RequestFailedError, match=r"data\[0\].model_input: an image is not supported"):
        trained.forward(
            [row],
            "cross_entropy",
        ).result()
    with pytest.raises(tinker.BadRequestError, match="image is not supported"):
        client.create_sampling_client(base_model=BASE).result().sample(image, 1, GREEDY).result()


@pytest.mark.long
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.forward_backward(DATA, "ppo"), "loss_fn = 'ppo' is not a loss"),
        (lambda t: t.forward_backward(DATA, "cross_entropy", {"clip": 1.0}), "loss_fn_config: clip"),
        (lambda t: t.forward_backward(DATA, "cross_entropy", {"clip": "high"}), "loss_fn_config.clip = 'high'"),
        (lambda t: t.forward([datum(1, 99, 2)], "cross_entropy"), "token 99 at place 1"),
        (lambda t: t.forward([datum(*[1] * 80)], "cross_entropy"), "has 79 tokens; allowed are 1 to 64"),
        (lambda t: t.optim_step(types.AdamParams(learning_rate=-1.0)), "learning_rate has to be a number"),
        (lambda t: t.optim_step(types.DimuonParams(learning_rate=1.0)), "optimizer_params"),
        (lambda t: t.save_state("a b"), "path = 'a b' is no name for a checkpoint"),
        (lambda t: t.save_state("a", ttl_seconds=5), "ttl_seconds"),
    ],
)
def test_a_wrong_argument_is_named_and_the_next_request_runs(
    client: tinker.ServiceClient, call: Callable[[tinker.TrainingClient], Any], message: str
) -> None:
    training = client.create_lora_training_client(BASE, rank=4).result()
    with pytest.raises(tinker.RequestFailedError) as caught:
        call(training).result()
    assert message in str(caught.value)
    assert math.isfinite(training.forward(DATA, "cross_entropy").result().metrics["loss:sum"])


@pytest.mark.long
def test_models_beyond_the_rank_or_base_are_refused(client: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match="rank has to be a whole number from 1 to 64"):
        client.create_lora_training_client(BASE, rank=65).result()
    with pytest.raises(tinker.RequestFailedError, match="'other/model' is not served here"):
        client.create_lora_training_client("other/model").result()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::tinker.lib.experimental.ExperimentalWarning")
async def test_methods_that_the_client_deprecates_answer_alike(
    service: ServedTraining, client: tinker.ServiceClient
) -> None:
    training = await client.create_lora_training_client_async(BASE, rank=4, seed=7)
    assert (await client.get_server_capabilities_async()).supported_models[0].model_name == BASE
    passed = await (await training.forward_backward_async(DATA, "cross_entropy"))
    await (await training.optim_step_async(types.AdamParams(learning_rate=1.0)))
    after = await (await training.forward_async(DATA, "cross_entropy"))
    assert after.metrics["loss:sum"] < passed.metrics["loss:sum"]
    doubled = await training.forward_backward_custom_async(
        DATA, lambda data, logprobs: (-torch.cat(logprobs).sum(), {})
    )
    assert (await doubled).metrics["loss:sum"] == pytest.approx(after.metrics["loss:sum"], rel=1e-5)
    path = (await (await training.save_state_async("a"))).path
    answers = (await (await training.save_weights_for_sampler_async("b"))).path
    await (await training.load_state_async(path))
    await (await training.load_state_with_optimizer_async(path))
    assert (await training.get_info_async()).lora_rank == 4
    with pytest.raises(tinker.RequestFailedError, match="external weights are not supported"):
        await (await training.save_weights_external_async("out"))
    for copied in (
        await client.create_training_client_from_state_async(path),
        await client.create_training_client_from_state_with_optimizer_async(path),
    ):
        copy = await (await copied.forward_async(DATA, "cross_entropy"))
        assert copy.metrics["loss:sum"] == after.metrics["loss:sum"]
    samplers = [
        await training.save_weights_and_get_sampling_client_async(),
        await training.create_sampling_client_async(answers),
        await client.create_sampling_client_async(model_path=answers),
    ]
    drawn = [(await sampler.sample_async(PROMPT, 1, GREEDY)).sequences[0].tokens for sampler in samplers]
    assert drawn[0] == drawn[1] == drawn[2]
    scores = [await sampler.compute_logprobs_async(PROMPT) for sampler in samplers]
    assert scores[0] == scores[1] == scores[2]
    assert await samplers[0].get_base_model_async() == BASE
    await _rest_answers(client.create_rest_client(), training.model_id, path, samplers[1]._sampling_session_id)


async def _rest_answers(rest: tinker.RestClient, run: str, path: str, sampler: str) -> None:
    """The deprecated methods of the client for training runs, sessions and checkpoints."""
    session = run.partition(":")[0]
    assert (await rest.get_training_run_async(run)).training_run_id == run
    assert (await rest.get_training_run_by_tinker_path_async(path)).training_run_id == run
    assert run in [
        training_run.training_run_id for training_run in (await rest.list_training_runs_async()).training_runs
    ]
    assert path in [checkpoint.tinker_path for checkpoint in (await rest.list_checkpoints_async(run)).checkpoints]
    assert path in [checkpoint.tinker_path for checkpoint in (await rest.list_user_checkpoints_async()).checkpoints]
    assert run in (await rest.get_session_async(session)).training_run_ids
    assert session in (await rest.list_sessions_async()).sessions
    assert (await rest.get_sampler_async(sampler)).base_model == BASE
    await rest.assign_session_project_async(session, "project")
    await rest.set_checkpoint_ttl_from_tinker_path_async(path, 7200)
    copies = [await rest.copy_weights_async(path, destination_project_id="project") for _ in range(2)]
    await rest.delete_checkpoint_from_tinker_path_async(copies[0])
    await rest.delete_checkpoint_async(copies[1].split("/")[2], "weights/a")
    left = (await rest.list_user_checkpoints_async()).checkpoints
    assert sorted(checkpoint.tinker_path for checkpoint in left if checkpoint.checkpoint_type == "training") == [path]
    refused = [
        rest.publish_checkpoint_from_tinker_path_async(path),
        rest.unpublish_checkpoint_from_tinker_path_async(path),
        rest.export_session_trace_async(session),
        rest.get_audit_log_async(),
        rest.get_billing_usage_async("2026-01-01", "2026-01-02"),
        rest.get_current_checkpoint_storage_usage_async(),
        rest.get_external_weights_urls_async(path.replace("/weights/", "/external_weights/")),
    ]
    for request in refused:
        with pytest.raises(tinker.BadRequestError, match="not supported"):
            await request


@pytest.mark.long
def test_the_tokenizer_is_that_of_the_model(tmp_path: Path, nano: Path) -> None:
    served = evolve(SERVED, names=(str(nano / "model"),), tokenizer=str(nano / "model"))
    with running(tmp_path / "service", served=served) as service, client_of(service.url) as client:
        training = client.create_lora_training_client(str(nano / "model"), rank=4).result()
        sampling = training.save_weights_and_get_sampling_client().result()
        words = training.get_tokenizer().get_vocab()
        assert len(words) > 200 and words == sampling.get_tokenizer().get_vocab()


def test_every_public_method_of_the_client_is_called_here() -> None:
    """The text of this file names each method that this version has, but for those that call no server."""
    source = Path(__file__).read_text(encoding="utf-8")
    local = {"get_telemetry", "get_console_url", "on_queue_state_change"}
    missing = [
        name
        for kind in (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient)
        for name, _ in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and name not in {*local, "create"} and f".{name}(" not in source
    ]
    assert missing == []

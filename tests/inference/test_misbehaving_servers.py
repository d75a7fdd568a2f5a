"""A search for answers of servers that end in a traceback, or in samples that the answer does not have."""

from __future__ import annotations

import asyncio
import math
import random
import re
from asyncio import StreamWriter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.config import InferenceEngineConfig, SkyRLLoraConfig
from skyrl.envs.builtin.judge_service import _single_choice
from skyrl.envs.builtin.reward_model import _single_score
from skyrl.envs.search import documents
from skyrl.envs.services.remote_sandbox import _ran
from skyrl.errors import ProcessError, SkyRLError, UserError, WeightSyncError
from skyrl.inference.draws import sample_seed
from skyrl.inference.engine import GenerationRequest
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.inference.servers import http_connection
from skyrl.inference.servers.http_connection import Connection
from skyrl.inference.servers.http_engine import HttpEngine
from skyrl.inference.servers.server_api import ServerDeadlines
from skyrl.inference.servers.sglang_server import SGLangServer
from skyrl.inference.servers.vllm_server import VLLMServer
from skyrl.processes.answers import BadAnswer, asked_to_wait
from skyrl.processes.gather_or_cancel import gather_or_cancel
from skyrl.weight_receiver.incoming_weights import FolderWeights, WeightInfo
from skyrl.weight_sync.canary import Canary
from tests.inference.misbehaving import MisbehavingServer, Misbehaviour, Sent, changed
from tests.inference.nano import nano_tokenizer, prompts, request
from tests.inference.vllm_models import small_model

PATIENT = 240.0

SEEDS = [pytest.param(range(start, start + 5), marks=[pytest.mark.long] * (start > 0)) for start in range(0, 500, 5)]
"""500 misbehaviours; the first five by default."""


@pytest.fixture(autouse=True)
def no_long_waits(short_waits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "asked_to_wait", lambda text: min(asked_to_wait(text), 0.01))


def engine(folder: Path, server: MisbehavingServer, dialect: str, seconds: float) -> HttpEngine:
    deadlines = ServerDeadlines(start=seconds, call=seconds, heartbeat=seconds)
    connections = Connection(server.url), Connection(server.url)
    server_class: Any = SGLangServer if dialect == "sglang" else VLLMServer
    return HttpEngine(
        server_class(*connections, deadlines), model_path=str(folder), heartbeat=seconds, tokenizer=nano_tokenizer()
    )


def client_of(engines: Sequence[HttpEngine]) -> InferenceEngineClient:
    config = InferenceEngineConfig(backend="sglang", max_num_seqs=4)
    return InferenceEngineClient(engines, nano_tokenizer(), "a/model", SkyRLLoraConfig(), config)


def weights(folder: Path) -> FolderWeights:
    """All weights of the model, which the servers do not read."""
    sent = folder.parent / "weights"
    sent.mkdir(exist_ok=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in small_model().state_dict().items()}
    infos = (WeightInfo(name=name, shape=shape, dtype="float32") for name, shape in shapes.items())
    return FolderWeights(path=str(sent), weights=tuple(infos))


class Believing:
    """A learner whose log-probabilities are those of the engines."""

    async def score(self, batch: TrainingBatch) -> Tensor:
        assert batch.rollout_logprobs is not None
        return batch.rollout_logprobs


async def played(folder: Path, wrong: Misbehaviour) -> list[SkyRLError]:
    """Two turns of samples with a transfer of weights between, from a sound server and one that misbehaves."""
    canary = Canary(prompts=tuple(map(tuple, prompts(3, 5))), temperature=1.0, bound=1e-6)
    believing: Any = Believing()
    errors: list[SkyRLError] = []
    unhandled: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    async with MisbehavingServer(wrong) as faulty, MisbehavingServer(dialect=wrong.dialect) as sound:
        servers = [faulty, sound]
        engines = [engine(folder, faulty, wrong.dialect, 0.5), engine(folder, sound, wrong.dialect, PATIENT)]
        client = client_of(engines)

        async def turn(version: int) -> None:
            requests = [
                request(prompt, count=2, name=f"{version}, {n}") for n, prompt in enumerate(prompts(3, 4, 5, 6))
            ]
            answers = await gather_or_cancel([client.generate(request) for request in requests])
            for generation_request, completions in zip(requests, answers, strict=True):
                refuse_others(generation_request, completions, servers, wrong.dialect)
            await client.waiting()
            await client.pause()
            await client.load_weights([weights(folder)] * len(client.in_service), version)
            await client.inspect(lambda engines: canary.compare(believing, engines, version))
            await client.resume()

        try:
            await turn(1)
            await turn(2)
        except SkyRLError as error:
            errors.append(error)
        await client.close()
    await asyncio.sleep(0)
    assert unhandled == []
    return errors


def refused_by_canary(error: SkyRLError) -> bool:
    """Whether an engine gave other log-probabilities than the other one, which ends a run."""
    return isinstance(error, WeightSyncError) and "does not compute with the weights" in str(error)


def refuse_others(
    request: GenerationRequest, completions: tuple[Any, ...], servers: list[MisbehavingServer], dialect: str
) -> None:
    """A completion has the tokens and log-probabilities of an answer that was sent to its own request."""
    mask = 2**31 - 1 if dialect == "sglang" else 2**63 - 1  # as each is sent its seeds
    for key, completion in zip(request.keys, completions, strict=True):
        sent: list[Sent] = [answer for server in servers for answer in server.sent.get(sample_seed(key) & mask, [])]
        assert (completion.token_ids, completion.logprobs) in sent
        assert all(type(token) is int and 0 <= token < 258 for token in completion.token_ids)
        assert all(math.isfinite(value) for value in completion.logprobs)


@pytest.mark.long
@pytest.mark.parametrize("seeds", SEEDS)
async def test_no_misbehaviour_ends_in_a_traceback_or_in_other_samples(
    folder: Path, seeds: range, caplog: pytest.LogCaptureFixture
) -> None:
    for wrong in map(Misbehaviour.of, seeds):
        caplog.clear()
        try:
            errors = await asyncio.wait_for(played(folder, wrong), PATIENT)
            lost = [text for text in caplog.messages if "is out of service" in text]
            ends = [error for error in errors if not refused_by_canary(error)]
            assert all(isinstance(error, UserError) for error in ends), errors  # the sound engine goes on
            for text in (*map(str, ends), *lost):
                assert re.search(r"the inference server http://127\.0\.0\.1:\d+ .* ?/[\w/]+", text, re.DOTALL), text
        except BaseException as error:
            error.add_note(str(wrong))
            raise


CONTROL = {
    "sglang": (
        *("/pause_generation", "/release_memory_occupation", "/resume_memory_occupation", "/model_info"),
        *("/update_weights_from_disk", "/continue_generation"),
    ),
    "vllm": (
        *("/pause", "/sleep", "/wake_up", "/weight_info", "/collective_rpc", "/reset_prefix_cache"),
        *("/update_weight_version", "/resume"),
    ),
}
"""Routes of each dialect that are asked between two batches of samples."""


class Mute(MisbehavingServer):
    """Answers one route no more, and ends the patience of an engine when it is asked there."""

    route = ""
    engine: HttpEngine | None = None

    async def _answer(self, path: str, headers: dict[str, str], body: dict[str, Any], writer: StreamWriter) -> None:
        if path == self.route:
            assert self.engine is not None
            for connection in (self.engine._server._control, self.engine._server._samples):
                for limit in connection._limits:
                    limit.reschedule(asyncio.get_running_loop().time())
            await asyncio.Event().wait()
        await super()._answer(path, headers, body, writer)


ROUTES = [(dialect, route) for dialect, routes in CONTROL.items() for route in routes]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("dialect", "route"), ROUTES)
async def test_a_control_call_that_is_never_answered_costs_its_engine_alone(
    folder: Path, dialect: str, route: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Mute(dialect=dialect) as mute, MisbehavingServer(dialect=dialect) as sound:
        engines = [engine(folder, server, dialect, PATIENT) for server in (mute, sound)]
        client = client_of(engines)
        await client.pause()
        mute.route, mute.engine = route, engines[0]
        await between_batches(client, folder)
        assert client.in_service == (engines[1],)
        await client.close()
    [lost] = [text for text in caplog.messages if "is out of service" in text]
    assert f"{mute.url} did not complete {route} within {PATIENT:g} s: it did not answer" in lost


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("dialect", "route"), ROUTES)
async def test_a_control_call_that_the_last_engine_never_answers_ends_the_run_with_its_name(
    folder: Path, dialect: str, route: str
) -> None:
    async with Mute(dialect=dialect) as mute:
        client = client_of([http_engine := engine(folder, mute, dialect, PATIENT)])
        await client.pause()
        mute.route, mute.engine = route, http_engine
        message = f"{mute.url} did not complete {route} within {PATIENT:g} s: it did not answer. No engine is left"
        with pytest.raises(ProcessError, match=re.escape(message)):
            await between_batches(client, folder)
        await client.close()


async def between_batches(client: InferenceEngineClient, folder: Path) -> None:
    await client.resume()
    await client.pause()
    await client.sleep()
    await client.wake()
    await client.load_weights([weights(folder)] * len(client.in_service), 1)
    await client.resume()


SERVICES = (
    (_single_score, {"scores": [0.5], "model": "a model"}),
    (_ran, {"ended": "exit", "code": 0, "stdout": "b3V0", "stderr": ""}),
    (_single_choice, {"choices": [{"index": 0, "message": {"role": "assistant", "content": "### Final Score: 1"}}]}),
    (documents, {"result": [[{"document": {"contents": "a"}, "score": 2.0}, {"document": {"contents": "b"}}]]}),
)


@pytest.mark.parametrize(("reads", "answer"), SERVICES)
def test_an_answer_of_a_service_is_read_or_refused(reads: Any, answer: dict[str, Any]) -> None:
    chance = random.Random(5)
    right = type(reads(answer))
    for kind in ("value", "deep", "missing", "twice", "order") * 100:
        wrong = changed(answer, kind, chance)
        with suppress(BadAnswer):
            assert type(reads(wrong)) is right

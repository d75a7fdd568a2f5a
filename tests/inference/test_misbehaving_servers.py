"""A search for answers of servers that end in a traceback, or in samples that the answer does not have."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from skyrl.config import InferenceEngineConfig, SkyRLLoraConfig
from skyrl.envs.builtin.llm_judge import _said
from skyrl.envs.builtin.reward_model import _only_score
from skyrl.envs.search import documents
from skyrl.envs.services.remote_sandbox import _ran
from skyrl.errors import SkyRLError
from skyrl.inference.draws import sample_seed
from skyrl.inference.engine import GenerationRequest
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.inference.servers import http_connection
from skyrl.inference.servers.dialects import ServerDeadlines
from skyrl.inference.servers.http_connection import Connection
from skyrl.inference.servers.http_engine import HttpEngine
from skyrl.inference.servers.sglang_server import SGLangServer
from skyrl.inference.servers.vllm_server import VLLMServer
from skyrl.processes.answers import BadAnswer, asked_to_wait
from skyrl.weight_receiver.incoming_weights import Folder, WeightInfo
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
    made: Any = SGLangServer if dialect == "sglang" else VLLMServer
    return HttpEngine(
        made(*connections, deadlines), model_path=str(folder), heartbeat=seconds, tokenizer=nano_tokenizer()
    )


async def unless_ours(call: Awaitable[Any], errors: list[SkyRLError]) -> Any:
    """The result of a call, or None after an error that this library raises on purpose."""
    try:
        return await call
    except SkyRLError as error:
        errors.append(error)
        return None


async def played(folder: Path, wrong: Misbehaviour) -> list[SkyRLError]:
    """Two turns of samples with a transfer of weights between, from a sound server and one that misbehaves."""
    infos = tuple(
        WeightInfo(name=name, shape=tuple(tensor.shape), dtype="float32")
        for name, tensor in small_model().state_dict().items()
    )
    errors: list[SkyRLError] = []
    unhandled: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    async with MisbehavingServer(wrong) as faulty, MisbehavingServer(dialect=wrong.dialect) as sound:
        servers = [faulty, sound]
        engines = [engine(folder, faulty, wrong.dialect, 0.5), engine(folder, sound, wrong.dialect, PATIENT)]
        config = InferenceEngineConfig(backend="sglang", max_num_seqs=4)
        client = InferenceEngineClient(engines, nano_tokenizer(), "a/model", SkyRLLoraConfig(), config)
        for turn in range(2):
            asked = [request(prompt, count=2, name=f"{turn}, {n}") for n, prompt in enumerate(prompts(3, 4, 5, 6))]
            answers = await asyncio.gather(*(unless_ours(client.generate(each), errors) for each in asked))
            for each, completions in zip(asked, answers, strict=True):
                if completions is not None:
                    refuse_others(each, completions, servers, wrong.dialect)
            await unless_ours(client.waiting(), errors)
            await unless_ours(client.pause(), errors)
            sets = [Folder(path=str(folder), weights=infos)] * len(client.in_service)
            await unless_ours(client.load_weights(sets, turn + 1), errors)
            await unless_ours(client.resume(), errors)
            if errors:
                break  # the run has ended
        await unless_ours(client.close(), errors)
    await asyncio.sleep(0)
    assert unhandled == []
    return errors


def refuse_others(
    asked: GenerationRequest, completions: tuple[Any, ...], servers: list[MisbehavingServer], dialect: str
) -> None:
    """A completion has the tokens and log-probabilities of an answer that was sent to its own request."""
    mask = 2**31 - 1 if dialect == "sglang" else 2**63 - 1  # as each is sent its seeds
    for key, completion in zip(asked.keys, completions, strict=True):
        sent: list[Sent] = [each for server in servers for each in server.sent.get(sample_seed(key) & mask, [])]
        assert (completion.token_ids, completion.logprobs) in sent
        assert all(type(token) is int and 0 <= token < 258 for token in completion.token_ids)
        assert all(math.isfinite(value) for value in completion.logprobs)


@pytest.mark.parametrize("seeds", SEEDS)
async def test_no_misbehaviour_ends_in_a_traceback_or_in_other_samples(folder: Path, seeds: range) -> None:
    for wrong in map(Misbehaviour.of, seeds):
        try:
            await asyncio.wait_for(played(folder, wrong), PATIENT)
        except BaseException as error:
            error.add_note(str(wrong))
            raise


SERVICES = (
    (_only_score, {"scores": [0.5], "model": "a model"}),
    (_ran, {"ended": "exit", "code": 0, "stdout": "b3V0", "stderr": ""}),
    (_said, {"choices": [{"index": 0, "message": {"role": "assistant", "content": "### Final Score: 1"}}]}),
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

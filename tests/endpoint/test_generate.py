"""Token ids in, token ids out, as verifiers' training client asks."""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from skyrl.inference.engine import Completion, GenerationRequest
from skyrl.inference.torch.engine import TorchEngine
from tests.endpoint.serving import TOOLS_CHATML, served, tiny_engine
from tests.inference.nano import nano_model
from tests.other_environments import ROOT, python_with
from tests.rollout.chats import chat_tokenizer

OF_QWEN3 = ["<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "</think>"]
"""Tokens that verifiers' renderer of Qwen3's chats wants in a vocabulary."""


async def test_token_ids_are_continued_with_log_probabilities() -> None:
    async with tiny_engine() as tiny, httpx.AsyncClient(base_url=tiny.url, timeout=60) as http:
        ids = tiny.tokenizer.encode("ab", add_special_tokens=False)
        sampling = {"temperature": 1.0, "max_tokens": 4, "logprobs": 1, "n": 2, "seed": 5}
        answer = await http.post("/inference/v1/generate", json={"token_ids": ids, "sampling_params": sampling})
        wrong = await http.post("/inference/v1/generate", json={"token_ids": [10**6], "sampling_params": {}})
        none = await http.post("/inference/v1/generate", json={"token_ids": [], "sampling_params": {}})
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    for choice in choices:
        assert 1 <= len(choice["token_ids"]) <= 4
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
            f"token_id:{token}" for token in choice["token_ids"]
        ]
    assert (wrong.status_code, none.status_code) == (400, 400)


async def test_a_bridged_turn_says_where_its_experts_are_wanted_from_and_is_answered() -> None:
    async with tiny_engine() as tiny, httpx.AsyncClient(base_url=tiny.url, timeout=60) as http:
        body = {"token_ids": [97, 98], "sampling_params": {"max_tokens": 2, "routed_experts_prompt_start": 1}}
        assert (await http.post("/inference/v1/generate", json=body)).status_code == 200


@pytest.mark.long
async def test_the_training_client_of_verifiers_gets_exactly_what_was_drawn(tmp_path: Path) -> None:
    python = await asyncio.to_thread(python_with, "verifiers", ["verifiers==0.4.0"])
    tokenizer = chat_tokenizer(TOOLS_CHATML)
    tokenizer.add_tokens(OF_QWEN3, special_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    engine = TorchEngine(nano_model(), tokenizer, max_num_seqs=4)
    drawn: list[dict[str, Sequence[float]]] = []

    async def recorded(request: GenerationRequest) -> tuple[Completion, ...]:
        (completion,) = await engine.generate(request)
        ids: dict[str, Sequence[float]] = {
            "prompt_ids": list(request.prompt_ids),
            "completion_ids": list(completion.token_ids),
        }
        drawn.append({**ids, "completion_logprobs": list(completion.logprobs)})
        return (completion,)

    async with served(recorded, tokenizer) as endpoint:
        command = [python, "tests/endpoint/verifiers_client.py", endpoint.url, str(tmp_path)]
        client = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE, stderr=PIPE)
        stdout, errors = await client.communicate()
    await engine.close()
    assert client.returncode == 0, errors.decode()
    first, second = json.loads(stdout)
    assert [first, second] == drawn
    prefix = first["prompt_ids"] + first["completion_ids"]
    assert second["prompt_ids"][: len(prefix)] == prefix, "a turn is rendered again"

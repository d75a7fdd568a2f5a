"""An endpoint in the process of the test, over the torch engine or one that says what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from attrs import frozen

from skyrl.config import SamplingParams
from skyrl.endpoint.client_access import Address, ClientAccess
from skyrl.endpoint.control import EngineControl
from skyrl.endpoint.http.server import Endpoint, serving
from skyrl.endpoint.policy import Generate, ServedPolicy
from skyrl.inference.engine import Completion, GenerationRequest, NewTokens
from skyrl.inference.torch.engine import TorchEngine
from tests.inference.nano import nano_model
from tests.rollout.chats import chat_tokenizer

TOOLS_CHATML = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


class Script:
    """Draws the given texts one after the other, each closed by the end of a turn; remembers what it was asked."""

    def __init__(self, texts: Sequence[str], *, ends: str = "<|im_end|>") -> None:
        self.tokenizer = chat_tokenizer(TOOLS_CHATML)
        self.requests: list[GenerationRequest] = []
        self._texts, self._ends = list(texts), ends

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        self.requests.append(request)
        return tuple(self._completion(self._texts.pop(0)) for _ in request.keys)

    def _completion(self, text: str) -> Completion:
        ids = tuple(self.tokenizer.encode(text + self._ends, add_special_tokens=False))
        return Completion(
            token_ids=ids,
            text=text,
            logprobs=tuple(-0.01 * (position + 1) for position in range(len(ids))),
            weight_versions=(3,) * len(ids),
            stop_reason="stop",
        )


class Held(Script):
    """Reports the first `count` tokens of a text as they are drawn, and is then held until `let_go` is set."""

    def __init__(self, text: str, count: int) -> None:
        super().__init__([text])
        self.count, self.let_go, self.given_up = count, asyncio.Event(), asyncio.Event()

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        (answer,) = await super().generate(request)
        assert request.on_tokens is not None
        try:
            for position, token in enumerate(answer.token_ids):
                if position == self.count:
                    await self.let_go.wait()
                request.on_tokens(NewTokens(index=0, start=position, token_ids=(token,)))
        except asyncio.CancelledError:
            self.given_up.set()
            raise
        return (answer,)


@frozen
class Served:
    """A running endpoint, with what answers behind it."""

    endpoint: Endpoint
    tokenizer: Any

    @property
    def url(self) -> str:
        return self.endpoint.url


@asynccontextmanager
async def served(
    generate: Generate,
    tokenizer: Any,
    *,
    access: ClientAccess | None = None,
    most_samples: int = 64,
    max_model_len: int = 512,
    control: EngineControl | None = None,
    adapters: tuple[str, ...] = (),
    scores_prompts: bool = False,
) -> AsyncIterator[Served]:
    """An endpoint for the length of the block."""
    policy = ServedPolicy(
        names=("tiny",),
        sampling=SamplingParams(max_generate_length=8),
        max_model_len=max_model_len,
        most_samples=most_samples,
        adapters=adapters,
        scores_prompts=scores_prompts,
    )
    async with serving(policy, tokenizer, generate, Address(access=access or ClientAccess()), control) as endpoint:
        yield Served(endpoint, tokenizer)


@asynccontextmanager
async def tiny_engine(**changes: Any) -> AsyncIterator[Served]:
    """The torch engine over the nano model of the engine's tests."""
    tokenizer = chat_tokenizer(TOOLS_CHATML)
    engine = TorchEngine(nano_model(), tokenizer, max_num_seqs=64)
    try:
        async with served(engine.generate, tokenizer, scores_prompts=True, **changes) as running:
            yield running
    finally:
        await engine.close()

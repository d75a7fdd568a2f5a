"""OpenAI's `POST /v1/completions`: a prompt as text or token ids in, `n` continuations out.

A list of prompts is answered with `n` choices for each, in order. `return_token_ids` adds `prompt_token_ids` and
`token_ids` to each choice, as in vLLM, and `weight_versions`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import Any

from attrs import frozen

from skyrl.endpoint.fields import Fields
from skyrl.endpoint.live import LiveAnswers
from skyrl.endpoint.messages import SampledMessage, answer_of
from skyrl.endpoint.policy import MOST_ANSWERS, Policy, PromptTokens
from skyrl.endpoint.protocols.chat import BOOKKEEPING, tokens_of
from skyrl.endpoint.reply import Event, Events, Json, Reply, now
from skyrl.endpoint.request_sampling import RequestSampling
from skyrl.endpoint.trajectories import PlayedTrajectory
from skyrl.errors import RequestError
from skyrl.processes.gather_or_cancel import gather_or_cancel

MOST_PROMPTS = 128


@frozen(kw_only=True)
class _CompletionRequest:
    """A parsed request."""

    prompts: Sequence[str | tuple[int, ...]]
    settings: RequestSampling
    n: int
    stream: bool
    usage_in_stream: bool
    logprobs: bool
    token_ids: bool


async def complete(body: Fields, policy: Policy, trajectory: PlayedTrajectory | None) -> Reply:
    """Answer one request. Raises `RequestError`."""
    request = _parse_request(body, policy, trajectory)
    if request.stream:
        return Reply(events=_events(request, policy, trajectory), ends_with_done=True)
    choices, usage = await _sample(request, policy, trajectory)
    return Reply({**_head(request), "choices": choices, "usage": usage})


async def _sample(
    request: _CompletionRequest, policy: Policy, trajectory: PlayedTrajectory | None, live: LiveAnswers | None = None
) -> tuple[list[dict[str, Any]], Json]:
    """The choices and the token counts."""
    with policy.admitted(request.n * len(request.prompts), trajectory):
        answered = await gather_or_cancel(
            [_answers(index, request, policy, trajectory, live) for index in range(len(request.prompts))]
        )
        pairs = [(prompt, answer) for prompt, answers in answered for answer in answers]
        choices = [
            _choice(index, *pair, request, await _logprobs(policy, pair[1]) if request.logprobs else None)
            for index, pair in enumerate(pairs)
        ]
    before = sum(len(prompt.ids) for prompt, _ in answered)
    sampled = sum(len(answer.completion.token_ids) for _, answer in pairs)
    return choices, {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": before + sampled}


def _head(request: _CompletionRequest) -> dict[str, Any]:
    return {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": now(),
        "model": request.settings.model,
    }


def _parse_request(body: Fields, policy: Policy, trajectory: PlayedTrajectory | None) -> _CompletionRequest:
    settings = policy.settings(body, trajectory, lengths=("max_tokens",))
    body.refuse("best_of", "ask for n answers and choose", harmless=(1,))
    body.refuse("echo", "only sampled tokens are returned", harmless=(False,))
    body.refuse("suffix", "text cannot be inserted before a suffix", harmless=("",))
    body.ignore(*BOOKKEEPING)
    request = _CompletionRequest(
        prompts=_prompts(body.any("prompt")),
        settings=settings,
        n=body.integer("n", 1, least=1, most=MOST_ANSWERS) or 1,
        stream=body.boolean("stream"),
        usage_in_stream=bool(body.mapping("stream_options").get("include_usage")),
        logprobs=_wants_logprobs(body),
        token_ids=body.boolean("return_token_ids"),
    )
    body.finish()
    return request


def _wants_logprobs(body: Fields) -> bool:
    """Whether `logprobs` is set: it is a number of alternatives, where 0 and 1 both mean only the sampled token."""
    body.refuse("logprobs", "the engines return log-probabilities of sampled tokens only", harmless=(0, 1, False, True))
    return body.any("logprobs", False) is not False


def _prompts(prompt: object) -> list[str | tuple[int, ...]]:
    """The prompts of a request in any of OpenAI's forms: a text, texts, token ids, or lists of token ids. Raises
    `RequestError`.
    """
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(_is_id(item) for item in prompt):
            return [tuple(prompt)]
        if len(prompt) <= MOST_PROMPTS and all(_is_prompt(item) for item in prompt):
            return [item if isinstance(item, str) else tuple(item) for item in prompt]
    raise RequestError(
        f"prompt has to be a string, a list of token ids, or a list of at most {MOST_PROMPTS} of these", param="prompt"
    )


def _is_prompt(item: object) -> bool:
    return isinstance(item, str) or (isinstance(item, list) and all(map(_is_id, item)))


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and item >= 0


async def _answers(
    index: int,
    request: _CompletionRequest,
    policy: Policy,
    trajectory: PlayedTrajectory | None,
    live: LiveAnswers | None,
) -> tuple[PromptTokens, list[SampledMessage]]:
    """The answers to one prompt of the request."""
    text = request.prompts[index]
    prompt = await (policy.text(text, trajectory) if isinstance(text, str) else policy.tokens(text, trajectory))
    listener = None if live is None else live.listener(prompt, index * request.n)
    completions = await policy.sample(prompt, request.settings, request.n, trajectory, listener)
    for completion in completions:
        policy.record(trajectory, prompt, completion)
    stops = [policy.stop_text(each, request.settings.sampling) for each in completions]
    return prompt, [answer_of(each, stop, tools=False) for each, stop in zip(completions, stops, strict=True)]


async def _logprobs(policy: Policy, answer: SampledMessage) -> Json:
    """Log-probabilities of the tokens, in nats, in the form of this protocol."""
    texts = await policy.decoded(answer.completion.token_ids)
    offsets = list(accumulate(map(len, texts), initial=0))[:-1]
    return {
        "tokens": texts,
        "token_logprobs": list(answer.completion.logprobs),
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _choice(
    index: int, prompt: PromptTokens, answer: SampledMessage, request: _CompletionRequest, logprobs: Json | None
) -> dict[str, Any]:
    choice = {
        "index": index,
        "text": answer.text,
        "finish_reason": answer.completion.stop_reason,
        "logprobs": logprobs,
    }
    return choice | (tokens_of(answer) | {"prompt_token_ids": list(prompt.ids)} if request.token_ids else {})


async def _events(request: _CompletionRequest, policy: Policy, trajectory: PlayedTrajectory | None) -> Events:
    """Events of a stream: text as it is sampled; log-probabilities and token ids when all answers are complete."""
    live, head = LiveAnswers(policy, request.settings.sampling.stop or ()), _head(request)
    answering = asyncio.ensure_future(_sample(request, policy, trajectory, live))
    async with aclosing(live.pieces(answering, lambda result: [choice["text"] for choice in result[0]])) as pieces:
        async for index, piece in pieces:
            part = {"index": index, "text": piece, "finish_reason": None, "logprobs": None}
            yield Event({**head, "choices": [part]})
    choices, usage = answering.result()
    for choice in choices:
        yield Event({**head, "choices": [{**choice, "text": ""}]})
    if request.usage_in_stream:
        yield Event({**head, "choices": [], "usage": usage})

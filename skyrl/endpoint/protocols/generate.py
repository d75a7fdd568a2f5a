"""`POST /inference/v1/generate`: token ids in, token ids and log-probabilities out, as in vLLM.

{"token_ids": [...], "sampling_params": {"temperature": 1, "max_tokens": 64, "n": 1, "logprobs": 1, ...}}
-> {"request_id": ..., "choices": [{"index": 0, "token_ids": [...], "logprobs": {...}, "finish_reason": ...}]}

A stream sends token ids as they are sampled; the rest of a choice comes with its last part.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from itertools import groupby
from typing import Any

from attrs import frozen

from skyrl.endpoint.fields import Fields
from skyrl.endpoint.live import LiveTokens
from skyrl.endpoint.policy import MOST_ANSWERS, Policy
from skyrl.endpoint.reply import Event, Events, Json, Reply
from skyrl.endpoint.request_sampling import RequestSampling, read_sampling
from skyrl.endpoint.trajectories import PlayedTrajectory
from skyrl.inference.engine import Completion

_BOOKKEEPING = ("cache_salt", "priority", "request_id", "kv_transfer_params")


@frozen(kw_only=True)
class _GenerateRequest:
    """A parsed request."""

    ids: tuple[int, ...]
    settings: RequestSampling
    n: int
    stream: bool
    prompt_ids: bool
    """Whether the answer repeats the prompt."""


async def generate(body: Fields, policy: Policy, trajectory: PlayedTrajectory | None) -> Reply:
    """Answer one request. Raises `RequestError`."""
    request, number = _parse_request(body, policy, trajectory), secrets.token_hex(12)
    head = {"request_id": number} | ({"prompt_token_ids": list(request.ids)} if request.prompt_ids else {})
    if request.stream:
        return Reply(events=_events(head, request, policy, trajectory), ends_with_done=True)
    completions = await _sample(request, policy, trajectory)
    return Reply(
        {
            **head,
            "choices": [_choice(index, completion, request, policy) for index, completion in enumerate(completions)],
        }
    )


def _parse_request(body: Fields, policy: Policy, trajectory: PlayedTrajectory | None) -> _GenerateRequest:
    model = policy.refuse_other_models(body.text("model"))
    body.refuse("features", "the engines read tokens alone", harmless=({},))
    body.ignore(*_BOOKKEEPING)
    settings = Fields(body.mapping("sampling_params"))
    ours = policy.served.sampling if trajectory is None else trajectory.sampling
    request_sampling = read_sampling(settings, ours, model, fixed=trajectory is not None, lengths=("max_tokens",))
    count = settings.integer("n", 1, least=1, most=MOST_ANSWERS) or 1
    reason = "the engines return log-probabilities of sampled tokens only"
    settings.refuse("logprobs", reason, harmless=(0, 1))
    if not policy.ends_by(request_sampling.sampling.stop_token_ids or ()):
        settings.refuse("ignore_eos", "an answer stops at the end of a sequence", harmless=(False,))
    settings.ignore("skip_special_tokens", "detokenize", "spaces_between_special_tokens", "ignore_eos")
    settings.ignore("flat_logprobs", "include_stop_str_in_output")
    settings.ignore("routed_experts_prompt_start")  # the token to begin at: this route returns no experts
    request = _GenerateRequest(
        ids=body.ids("token_ids"),
        settings=request_sampling,
        n=count,
        stream=body.boolean("stream"),
        prompt_ids=body.boolean("return_token_ids"),
    )
    settings.finish()
    body.finish()
    return request


async def _sample(
    request: _GenerateRequest, policy: Policy, trajectory: PlayedTrajectory | None, live: LiveTokens | None = None
) -> tuple[Completion, ...]:
    with policy.admitted(request.n, trajectory):
        prompt = await policy.tokens(request.ids, trajectory)
        listener = None if live is None else live.listener()
        completions = await policy.sample(prompt, request.settings, request.n, trajectory, listener)
        for completion in completions:
            policy.record(trajectory, prompt, completion)
    return completions


async def _events(head: Json, request: _GenerateRequest, policy: Policy, trajectory: PlayedTrajectory | None) -> Events:
    live, sent = LiveTokens(), Counter[int]()
    answering = asyncio.ensure_future(_sample(request, policy, trajectory, live))
    async with aclosing(live.until(answering)) as batches:
        async for new in batches:
            for item in new:
                if rest := item.token_ids[sent[item.index] - item.start :]:  # tokens that are sampled again count once
                    sent[item.index] += len(rest)
                    yield Event({**head, "choices": [{"index": item.index, "token_ids": list(rest)}]})
                    head = {"request_id": head["request_id"]}  # the prompt is sent once
    for index, completion in enumerate(answering.result()):
        choice = _choice(index, completion, request, policy)
        yield Event({**head, "choices": [{**choice, "token_ids": choice["token_ids"][sent[index] :]}]})


def _choice(index: int, completion: Completion, request: _GenerateRequest, policy: Policy) -> dict[str, Any]:
    """One choice; its log-probabilities are in nats, in the form of OpenAI's chat API, with tokens as `token_id:N`."""
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    return {
        "index": index,
        "token_ids": list(completion.token_ids),
        "logprobs": {"content": content},
        "weight_versions": _spans(completion.weight_versions),
        "finish_reason": completion.stop_reason,
        "stop_reason": _stopped_by(completion, policy.stop_text(completion, request.settings.sampling)),
    }


def _stopped_by(completion: Completion, stop: str | None) -> int | str | None:
    """The stop text or the token that ended an answer."""
    return stop or (completion.token_ids[-1] if completion.stop_reason == "stop" else None)


def _spans(versions: Sequence[int]) -> list[Json]:
    """Weight versions of the tokens, as runs of tokens with the same version; `end` is exclusive."""
    spans: list[Json] = []
    for version, run in groupby(versions):
        start = spans[-1]["end"] if spans else 0
        spans.append({"version": str(version), "start": start, "end": start + len(list(run))})
    return spans

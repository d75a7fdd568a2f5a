"""`POST /inference/v1/generate`: token ids in, token ids and log-probabilities out, as in vLLM.

{"token_ids": [...], "sampling_params": {"temperature": 1, "max_tokens": 64, "n": 1, "logprobs": 1, ...}}
-> {"request_id": ..., "choices": [{"index": 0, "token_ids": [...], "logprobs": {...}, "finish_reason": ...}]}

A stream sends token ids as they are sampled; the rest of a choice comes with its last part.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from itertools import groupby
from typing import Any

from skyrl.endpoint.fields import Fields
from skyrl.endpoint.live import LiveTokens
from skyrl.endpoint.policy import MOST_ANSWERS, Policy
from skyrl.endpoint.reply import Event, Events, Json, Reply
from skyrl.endpoint.request_sampling import RequestSampling, read_sampling
from skyrl.inference.engine import Completion

_Sample = Callable[[LiveTokens], Awaitable[tuple[Completion, ...]]]
"""Samples the answers of a request; their tokens are heard meanwhile."""

_BOOKKEEPING = ("cache_salt", "priority", "request_id", "kv_transfer_params")


async def generate(body: Fields, policy: Policy) -> Reply:
    """Answer one request. Raises `RequestError`."""
    model = policy.refuse_other_models(body.text("model"))
    body.refuse("features", "the engines read tokens alone", harmless=({},))
    body.ignore(*_BOOKKEEPING)
    fields = Fields(body.mapping("sampling_params"))
    fixed = policy.trajectory is not None
    settings = read_sampling(fields, policy.sampling, model, fixed=fixed, lengths=("max_tokens",))
    count = fields.integer("n", 1, least=1, most=MOST_ANSWERS)
    fields.refuse("logprobs", "the engines return log-probabilities of sampled tokens only", harmless=(0, 1))
    if not policy.ends_by(settings.sampling.stop_token_ids or ()):
        fields.refuse("ignore_eos", "an answer stops at the end of a sequence", harmless=(False,))
    fields.ignore("skip_special_tokens", "detokenize", "spaces_between_special_tokens", "ignore_eos")
    fields.ignore("flat_logprobs", "include_stop_str_in_output")
    fields.ignore("routed_experts_prompt_start")  # the token to begin at: this route returns no experts
    ids, stream = body.ids("token_ids"), body.boolean("stream")
    head: Json = {"request_id": secrets.token_hex(12)}
    if body.boolean("return_token_ids"):
        head = {**head, "prompt_token_ids": list(ids)}
    fields.finish()
    body.finish()

    async def sample(live: LiveTokens | None = None) -> tuple[Completion, ...]:
        with policy.admitted(count):
            prompt = await policy.tokens(ids)
            listener = None if live is None else live.listener()
            completions = await policy.sample(prompt, settings, count, listener)
            for completion in completions:
                policy.record(prompt, completion)
        return completions

    if stream:
        return Reply(events=_events(head, sample, settings, policy), ends_with_done=True)
    choices = [_choice(index, completion, settings, policy) for index, completion in enumerate(await sample())]
    return Reply({**head, "choices": choices})


async def _events(head: Json, sample: _Sample, settings: RequestSampling, policy: Policy) -> Events:
    live, sent = LiveTokens(), Counter[int]()
    answering = asyncio.ensure_future(sample(live))
    async with aclosing(live.until(answering)) as batches:
        async for new in batches:
            for item in new:
                if rest := item.token_ids[sent[item.index] - item.start :]:  # tokens that are sampled again count once
                    sent[item.index] += len(rest)
                    yield Event({**head, "choices": [{"index": item.index, "token_ids": list(rest)}]})
                    head = {"request_id": head["request_id"]}  # the prompt is sent once
    for index, completion in enumerate(answering.result()):
        choice = _choice(index, completion, settings, policy)
        yield Event({**head, "choices": [{**choice, "token_ids": choice["token_ids"][sent[index] :]}]})


def _choice(index: int, completion: Completion, settings: RequestSampling, policy: Policy) -> dict[str, Any]:
    """One choice; its log-probabilities are in nats, in the form of OpenAI's chat API, with tokens as `token_id:N`."""
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    end = completion.token_ids[-1] if completion.stop_reason == "stop" else None
    return {
        "index": index,
        "token_ids": list(completion.token_ids),
        "logprobs": {"content": content},
        "weight_versions": _spans(completion.weight_versions),
        "finish_reason": completion.stop_reason,
        "stop_reason": policy.stop_text(completion, settings.sampling) or end,
    }


def _spans(versions: Sequence[int]) -> list[Json]:
    """Weight versions of the tokens, as runs of tokens with the same version; `end` is exclusive."""
    spans: list[Json] = []
    for version, run in groupby(versions):
        start = spans[-1]["end"] if spans else 0
        spans.append({"version": str(version), "start": start, "end": start + len(list(run))})
    return spans

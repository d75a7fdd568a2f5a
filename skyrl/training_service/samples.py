"""Samples on the wire: a JSON request becomes a `SampleRequest`, a `SampleResult` becomes a protobuf body."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import Message

from skyrl.endpoint.fields import Fields
from skyrl.errors import RequestError
from skyrl.inference.engine import MOST_TOP_LOGPROBS, TopLogprobs
from skyrl.training_service.backend import SampleRequest, SampleResult, ServedModel
from skyrl.training_service.messages import LENGTH, STOPPED, new_message

MOST_SAMPLES = 1024
"""Maximum number of samples of one prompt in one request."""

_UNSCORED = -99999.0
"""Log-probability with which the client marks a place that has none."""


def sample_request(fields: Fields, sampler: str | None, model: ServedModel, seed_of: str) -> SampleRequest:
    """The request in the fields of a body. `seed_of` names the request: its seed, if the client chose none, follows
    from it, so that the request gives the same samples after a restart. Raises `RequestError`, which names the field.
    """
    n = fields.integer("num_samples", 1, least=1, most=MOST_SAMPLES)
    prompt = prompt_tokens(fields.mapping("prompt"), model)
    top_prompt = fields.integer("topk_prompt_logprobs", 0, least=0, most=MOST_TOP_LOGPROBS)
    top_sample = fields.integer("topk_sample_logprobs", 0, least=0, most=MOST_TOP_LOGPROBS)
    with_logprobs = fields.boolean("prompt_logprobs")
    last = fields.integer("prompt_logprobs_last_n", None, least=1, most=max(1, len(prompt) - 1))
    if last is not None and not with_logprobs:
        raise RequestError("prompt_logprobs_last_n needs prompt_logprobs", param="prompt_logprobs_last_n")
    fields.refuse("target_prompt_logprobs", "topk_prompt_logprobs reports the likeliest tokens")
    fields.refuse("prompt_alt_tokens_k", "sample each prefix instead", harmless=(0,))
    fields.refuse("record_stability_info", "the loss stable_reinforce is not there", harmless=(False,))
    sampling = Fields(fields.mapping("sampling_params"))
    max_tokens = sampling.integer("max_tokens", None, least=1, most=2**31 - 1)
    sampling.refuse_null("temperature", "top_p")
    temperature = sampling.number("temperature", 1.0, least=0.0, most=1e6)
    top_p = sampling.number("top_p", 1.0, least=0.0, most=1.0)
    top_k = sampling.integer("top_k", -1, least=-1, most=2**31 - 1)
    seed = sampling.integer("seed", None, least=-(2**63), most=2**64 - 1)
    stop, stop_tokens = _stops(sampling)
    sampling.finish()
    room = model.context - len(prompt)
    if room < 1 and not (with_logprobs or top_prompt):
        raise RequestError(
            f"prompt has {len(prompt)} tokens, which leaves no room in the context of {model.context}", param="prompt"
        )
    return SampleRequest(
        sampler=sampler,
        prompt=prompt,
        n=n,
        max_tokens=max(1, min(max_tokens or room, room)),
        temperature=temperature,
        top_p=top_p,
        top_k=-1 if top_k == 0 else top_k,
        seed=seed_from(seed_of) if seed is None else seed % 2**63,
        stop=stop,
        stop_tokens=stop_tokens,
        prompt_logprobs=with_logprobs,
        topk_prompt_logprobs=top_prompt,
        topk_sample_logprobs=top_sample,
    )


def prompt_tokens(prompt: Mapping[str, Any], model: ServedModel) -> tuple[int, ...]:
    """Tokens of a prompt in JSON. Raises `RequestError`."""
    fields = Fields(prompt)
    tokens: list[int] = []
    for index, chunk in enumerate(fields.objects("chunks")):
        kind = chunk.get("type", "encoded_text")
        if kind != "encoded_text":
            name = {"dmel": "audio"}.get(str(kind), str(kind)[:40])
            raise RequestError(f"prompt.chunks[{index}]: {name} is not supported: the model reads text", param="prompt")
        tokens += Fields(chunk).ids("tokens")
    fields.finish()
    if not 1 <= len(tokens) <= model.context:
        raise RequestError(f"prompt has {len(tokens)} tokens; allowed are 1 to {model.context}", param="prompt")
    wrong = next((token for token in tokens if token >= model.vocabulary), None)
    if wrong is not None:
        raise RequestError(f"prompt: token {wrong} is not in the vocabulary of {model.vocabulary}", param="prompt")
    return tuple(tokens)


def sample_body(result: SampleResult, last: int | None) -> bytes:
    """The answer to a sampling request. `last`: only that many of the prompt's last tokens are scored."""
    sequences = [
        new_message(
            "SampledSequence",
            stop_reason=STOPPED if sequence.ended else LENGTH,
            tokens=np.asarray(sequence.tokens, "<i4").tobytes(),
            logprobs=np.asarray(sequence.logprobs, "<f4").tobytes(),
            topk_sampled_logprobs=None if sequence.top is None else _top(sequence.top),
        )
        for sequence in result.sequences
    ]
    scores = np.asarray(result.prompt_logprobs or (), "<f4")
    scores[: 1 if last is None else len(scores) - last] = np.nan
    top = result.prompt_top
    message = new_message(
        "SampleResponse",
        sequences=sequences,
        prompt_logprobs=scores.tobytes(),
        topk_prompt_logprobs=None if top is None else _top(_prepend_row(top, last)),
    )
    return message.SerializeToString()


def _prepend_row(top: TopLogprobs, last: int | None) -> TopLogprobs:
    """The table with a row for the prompt's first token, which no token precedes."""
    token_ids = np.pad(top.token_ids, ((1, 0), (0, 0)))
    logprobs = np.pad(top.logprobs, ((1, 0), (0, 0)), constant_values=_UNSCORED)
    if last is not None:
        token_ids[:-last], logprobs[:-last] = 0, _UNSCORED
    return TopLogprobs(token_ids=token_ids, logprobs=logprobs)


def _top(top: TopLogprobs) -> Message:
    length, k = top.token_ids.shape
    return new_message(
        "TopkLogprobs",
        token_ids=np.ascontiguousarray(top.token_ids, "<i4").tobytes(),
        logprobs=np.ascontiguousarray(top.logprobs, "<f4").tobytes(),
        k=k,
        length=length,
    )


def _stops(sampling: Fields) -> tuple[tuple[str, ...] | None, tuple[int, ...] | None]:
    """Texts and tokens that end a sample. An empty list means that nothing does, not even an end token."""
    stop = sampling.value("stop")
    if isinstance(stop, Sequence) and not isinstance(stop, str) and all(type(item) is int for item in stop):
        return None, sampling.ids("stop")
    return (sampling.texts("stop"), None) if stop is not None else (None, None)


def seed_from(name: str) -> int:
    """A seed that follows from a name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1

"""OpenAI's `POST /v1/completions`: a prompt as text or token ids in, `n` continuations out.

A list of prompts is answered with `n` choices for each, in order. With `echo` the text begins with the prompt, and
`logprobs` then covers the prompt's tokens, too, each beside the likeliest one at its place; `max_tokens = 0` scores the
prompt alone. `prompt_logprobs` adds the log-probabilities of the prompt's tokens and of so many likeliest ones, by
token id, as in vLLM. `return_token_ids` adds `prompt_token_ids` and `token_ids` to each choice, as in vLLM, and
`weight_versions`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import Any

from attrs import frozen

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.endpoint.fields import Fields
from skyrl.endpoint.live import LiveAnswers
from skyrl.endpoint.messages import SampledMessage, answer_of
from skyrl.endpoint.policy import MOST_ANSWERS, Policy, PromptTokens
from skyrl.endpoint.protocols.chat import BOOKKEEPING, tokens_of
from skyrl.endpoint.reply import Event, Events, Json, Reply, now
from skyrl.endpoint.request_sampling import RequestSampling
from skyrl.errors import RequestError
from skyrl.inference.engine import MOST_TOP_LOGPROBS, PromptScores
from skyrl.processes.gather_or_cancel import gather_or_cancel

MOST_PROMPTS = 128

MOST_SCORED = 2**18
"""Largest number of tokens of prompts that one request scores, over all answers: 128 prompts of 2,048."""


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
    echo: bool
    prompt_logprobs: int | None
    """Number of likeliest tokens at each place of the prompt, beside its own. None: no log-probabilities are added."""

    nothing_new: bool
    """Whether only the prompt is returned (`max_tokens = 0`)."""

    @property
    def scores(self) -> bool:
        """Whether the probabilities of the prompts are returned."""
        return (self.echo and self.logprobs) or self.prompt_logprobs is not None


async def complete(body: Fields, policy: Policy) -> Reply:
    """Answer one request. Raises `RequestError`."""
    request = _parse_request(body, policy)
    if request.stream:
        return Reply(events=_events(request, policy), ends_with_done=True)
    choices, usage = await _sample(request, policy)
    return Reply({**_head(request), "choices": choices, "usage": usage})


async def _sample(
    request: _CompletionRequest, policy: Policy, live: LiveAnswers | None = None
) -> tuple[list[dict[str, Any]], Json]:
    """The choices and the token counts."""
    with policy.admitted(request.n * len(request.prompts)):
        prompts = await gather_or_cancel(
            [policy.text(item) if isinstance(item, str) else policy.tokens(item) for item in request.prompts]
        )
        before = sum(len(prompt.ids) for prompt in prompts)
        if request.scores and before * request.n > MOST_SCORED:
            raise RequestError(
                f"the prompts have {before} tokens, of which at most {MOST_SCORED // request.n} are scored: send fewer",
                param="prompt",
            )
        answered = await gather_or_cancel(
            [_answers(*numbered, request, policy, live) for numbered in enumerate(prompts)]
        )
        pairs = [(prompt, answer) for prompt, answers in zip(prompts, answered, strict=True) for answer in answers]
        choices = [await _choice(index, *pair, request, policy) for index, pair in enumerate(pairs)]
    sampled = 0 if request.nothing_new else sum(len(answer.completion.token_ids) for _, answer in pairs)
    return choices, {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": before + sampled}


def _head(request: _CompletionRequest) -> dict[str, Any]:
    return {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": now(),
        "model": request.settings.model,
    }


def _parse_request(body: Fields, policy: Policy) -> _CompletionRequest:
    echo = body.boolean("echo")
    if echo and policy.trajectory is not None:
        raise RequestError("agents get sampled tokens only", param="echo", code="unsupported_value")
    if echo and body.boolean("stream"):
        raise RequestError("a stream does not repeat the prompt", param="echo", code="unsupported_value")
    settings = policy.settings(body, lengths=("max_tokens",), shortest=0 if echo else 1)
    body.refuse("best_of", "ask for n answers and choose", harmless=(1,))
    body.refuse("suffix", "text cannot be inserted before a suffix", harmless=("",))
    # A number of alternatives, where 0 and 1 both mean only the sampled token.
    body.refuse("logprobs", "only the sampled or given token has one, and the likeliest", harmless=(0, 1, False, True))
    body.ignore(*BOOKKEEPING)
    request = _CompletionRequest(
        prompts=_prompts(body.value("prompt")),
        settings=settings,
        n=body.integer("n", 1, least=1, most=MOST_ANSWERS),
        stream=body.boolean("stream"),
        usage_in_stream=bool(body.mapping("stream_options").get("include_usage")),
        logprobs=body.value("logprobs", False) is not False,
        token_ids=body.boolean("return_token_ids"),
        echo=echo,
        prompt_logprobs=body.integer("prompt_logprobs", None, least=0, most=MOST_TOP_LOGPROBS),
        nothing_new=body.value("max_tokens") == 0,
    )
    if request.scores and not policy.served.scores_prompts:
        raise RequestError(
            "these engines return log-probabilities of sampled tokens only",
            param="echo" if request.prompt_logprobs is None else "prompt_logprobs",
            code="unsupported_value",
        )
    body.finish()
    return request


def _prompts(prompt: object) -> list[str | tuple[int, ...]]:
    """The prompts of a request in any of OpenAI's forms: a text, texts, token ids, or lists of token ids. Raises
    `RequestError`.
    """
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(_is_id(item) for item in prompt):
            return [tuple(prompt)]
        texts_or_ids = (isinstance(item, str) or (isinstance(item, list) and all(map(_is_id, item))) for item in prompt)
        if len(prompt) <= MOST_PROMPTS and all(texts_or_ids):
            return [item if isinstance(item, str) else tuple(item) for item in prompt]
    raise RequestError(
        f"prompt has to be a string, a list of token ids, or a list of at most {MOST_PROMPTS} of these", param="prompt"
    )


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and item >= 0


async def _answers(
    index: int, prompt: PromptTokens, request: _CompletionRequest, policy: Policy, live: LiveAnswers | None
) -> list[SampledMessage]:
    """The answers to one prompt of the request."""
    listener = None if live is None else live.listener(prompt, index * request.n)
    completions = await policy.sample(
        prompt,
        request.settings,
        request.n,
        listener,
        scores_prompt=request.scores,
        prompt_top_logprobs=request.prompt_logprobs or 0,
    )
    for completion in completions:
        policy.record(prompt, completion)
    stops = [policy.stop_text(item, request.settings.sampling) for item in completions]
    return [answer_of(entry, stop, tools=False) for entry, stop in zip(completions, stops, strict=True)]


async def _choice(
    index: int, prompt: PromptTokens, answer: SampledMessage, request: _CompletionRequest, policy: Policy
) -> dict[str, Any]:
    drawn = answer.completion
    choice = {
        "index": index,
        "text": "" if request.nothing_new else answer.text,
        "finish_reason": "length" if request.nothing_new else drawn.stop_reason,
        "logprobs": None,
    }
    ids, logprobs = ((), ()) if request.nothing_new else (drawn.token_ids, drawn.logprobs)
    if request.echo:
        raw_prompt = request.prompts[index // request.n]
        text = raw_prompt if isinstance(raw_prompt, str) else await policy.run_with_tokenizer(_text, raw_prompt)
        choice["text"] = text + str(choice["text"])
    if request.logprobs:
        scores = drawn.prompt_scores if request.echo else None
        choice["logprobs"] = await _logprobs(policy, ids, logprobs, prompt.ids, scores)
    if request.prompt_logprobs is not None and drawn.prompt_scores is not None:
        choice["prompt_logprobs"] = _prompt_logprobs(prompt.ids, drawn.prompt_scores)
    if request.token_ids:
        choice |= tokens_of(answer) | {"prompt_token_ids": list(prompt.ids)}
        choice |= {"token_ids": [], "weight_versions": []} if request.nothing_new else {}
    return choice


def _prompt_logprobs(prompt: Sequence[int], scores: PromptScores) -> list[Json | None]:
    """For each token of the prompt but the first its log-probability and those of the likeliest tokens, by token id."""
    entries: list[dict[str, Json]] = [{} for _ in scores.logprobs]
    if scores.top is not None:
        for entry, ids, values in zip(entries, scores.top.token_ids, scores.top.logprobs, strict=True):
            entry.update({str(token): {"logprob": float(item)} for token, item in zip(ids, values, strict=True)})
    for entry, token, value in zip(entries, prompt[1:], scores.logprobs, strict=True):
        entry[str(token)] = {"logprob": value}
    return [None, *entries]


def _text(tokenizer: ChatTokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False)


async def _logprobs(
    policy: Policy, ids: Sequence[int], logprobs: Sequence[float], prompt: Sequence[int], scores: PromptScores | None
) -> Json:
    """Log-probabilities of the tokens, in nats, in the form of this protocol: of the sampled ones and, with `scores`,
    of those of the prompt before them. The first token of a prompt has none.
    """
    if scores is None:
        texts = await policy.decoded(ids)
        offsets = list(accumulate(map(len, texts), initial=0))[:-1]
        return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": offsets}
    texts, best = await policy.decoded([*prompt, *ids]), await policy.decoded(scores.likeliest)
    values = [None, *scores.logprobs, *logprobs]
    # The likeliest comes last: where both tokens have the same text, such as two parts of a character, its value stays.
    top: list[Json | None] = [
        {text: logprob, likeliest: likeliest_logprob}
        for text, logprob, likeliest, likeliest_logprob in zip(
            texts[1 : len(prompt)], scores.logprobs, best, scores.likeliest_logprobs, strict=True
        )
    ]
    sampled = [{text: value} for text, value in zip(texts[len(prompt) :], logprobs, strict=True)]
    return {
        "tokens": texts,
        "token_logprobs": values,
        "top_logprobs": [None, *top, *sampled],
        "text_offset": list(accumulate(map(len, texts), initial=0))[:-1],
    }


async def _events(request: _CompletionRequest, policy: Policy) -> Events:
    """Events of a stream: text as it is sampled; log-probabilities and token ids when all answers are complete."""
    live, head = LiveAnswers(policy, request.settings.sampling.stop or ()), _head(request)
    answering = asyncio.ensure_future(_sample(request, policy, live))
    async with aclosing(live.pieces(answering, lambda result: [choice["text"] for choice in result[0]])) as pieces:
        async for index, piece in pieces:
            part = {"index": index, "text": piece, "finish_reason": None, "logprobs": None}
            yield Event({**head, "choices": [part]})
    choices, usage = answering.result()
    for choice in choices:
        yield Event({**head, "choices": [{**choice, "text": ""}]})
    if request.usage_in_stream:
        yield Event({**head, "choices": [], "usage": usage})

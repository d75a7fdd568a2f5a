"""Translates sampling settings to vLLM's, one request for each sample, and vLLM's answers to completions.

vLLM receives and returns token ids. Text is decoded from them here, in the same way as by the torch engine.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import SamplingParams
from skyrl.config.derive.engine_backends import BACKENDS
from skyrl.errors import NonFiniteError, RunError, UserError
from skyrl.inference import stop_strings
from skyrl.inference.draws import sample_seed
from skyrl.inference.engine import (
    Completion,
    PromptScores,
    SampleKey,
    TopLogprobs,
    asked_logprobs,
    temperature_of,
)
from skyrl.inference.vllm.backend import Output
from skyrl.models.routers import packed_choices
from skyrl.tree import thaw
from skyrl.tree.names import nearest

ADDITIONAL = BACKENDS["vllm"].sampling_arguments

OF_OUR_OWN = {"min_tokens": "min_new_tokens", "frequency_penalty": "frequency_penalty"}
"""Sampling argument of vLLM -> the field of `SamplingParams` that sets it."""

SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE = 0.01, 2.0
"""vLLM silently raises a temperature between 0 and the first to the first, and refuses one above the second."""


def check_sampling(sampling: SamplingParams) -> None:
    """Raises `UserError` for settings that vLLM would refuse, or would silently change."""
    temperature = temperature_of(sampling)
    if temperature > LARGEST_TEMPERATURE or 0 < temperature < SMALLEST_TEMPERATURE:
        raise UserError(
            f"sampling_params.temperature: vLLM draws at 0 (greedy) or between {SMALLEST_TEMPERATURE} and "
            f"{LARGEST_TEMPERATURE}, not at {temperature}"
        )
    for name in sampling.additional_kwargs or {}:
        if name not in ADDITIONAL:
            nearest_name = nearest(name, ADDITIONAL)
            hint = f"did you mean {nearest_name}?" if nearest_name else f"it takes {', '.join(ADDITIONAL)}"
            raise UserError(f"sampling_params.additional_kwargs: the vllm engine has no setting called {name}; {hint}")
        if name in OF_OUR_OWN and getattr(sampling, OF_OUR_OWN[name]):
            raise UserError(f"sampling_params.{OF_OUR_OWN[name]} and additional_kwargs.{name} are the same: remove one")


def sampling_arguments(
    sampling: SamplingParams, key: SampleKey, *, limit: int, eos_ids: Collection[int]
) -> dict[str, Any]:
    """Arguments of vLLM's `SamplingParams` for one sample of at most `limit` tokens.

    End-of-sequence ids are passed as stop tokens, so that the same ids count as in the torch engine.
    """
    more: dict[str, Any] = thaw(sampling.additional_kwargs or {})
    ends = {*more.pop("stop_token_ids", ()), *(sampling.stop_token_ids or ())}
    ends |= set() if more.get("ignore_eos") else set(eos_ids)
    return {
        "ignore_eos": True,
        "temperature": temperature_of(sampling),
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "min_tokens": min(sampling.min_new_tokens, limit),
        "max_tokens": limit,
        "seed": sample_seed(key) & (2**63 - 1),  # -1 would mean none to vLLM
        "stop": list(sampling.stop or ()),
        "stop_token_ids": sorted(ends),
        "logprobs": None if sampling.logprobs is None else 0,  # only that of the drawn token
        "flat_logprobs": True,
        "detokenize": bool(sampling.stop) or "bad_words" in more,
        "skip_special_tokens": False,  # `<|im_end|>` can be a stop text
        "include_stop_str_in_output": True,
    } | {name: value for name, value in more.items() if name != "ignore_eos"}


def completion(
    output: Output,
    key: SampleKey,
    sampling: SamplingParams,
    tokenizer: ChatTokenizer,
    *,
    prompt_tokens: int,
    top: int = 0,
) -> Completion:
    """Convert vLLM's finished `CompletionOutput` after a prompt of `prompt_tokens` tokens, with the `top` likeliest
    tokens in place of each drawn one. Raises `NonFiniteError` for non-finite log-probabilities.
    """
    ids = tuple(output.token_ids)
    logprobs: tuple[float, ...] = ()
    if ids and output.logprobs is not None:
        logprobs = tuple(map(float, output.logprobs.logprobs))[:: top + 1]  # of each drawn token, then of the likeliest
    if not all(map(math.isfinite, logprobs)):
        index = next(index for index, value in enumerate(logprobs) if not math.isfinite(value))
        raise NonFiniteError(
            f"prompt {key.prompt_id!r}, sample {key.sample_index}: the model's logits after {index} sampled tokens are "
            "not finite"
        )
    if output.finish_reason not in ("stop", "length"):
        raise RunError(f"prompt {key.prompt_id!r}: vLLM ended an incomplete sample with {output.finish_reason!r}")
    experts = output.routed_experts  # (tokens, layers, K), perhaps without a row for the last token, which is left out
    if experts is not None:
        computed = experts[: prompt_tokens + len(ids) - 1]
        experts = packed_choices(computed, experts=1 << 8 * experts.dtype.itemsize)
    stopped = isinstance(output.stop_reason, str)
    return Completion(
        token_ids=ids,
        text=stop_strings.text_of(
            tokenizer, ids, (sampling.stop or ()) if stopped else (), least=sampling.min_new_tokens
        ),
        logprobs=asked_logprobs(sampling, logprobs),
        weight_versions=versions_of_tokens(output.weight_versions or (), len(ids)),
        stop_reason="stop" if output.finish_reason == "stop" else "length",
        routed_experts=experts,
        top_logprobs=_likeliest_drawn(output, top) if top else None,
    )


def _likeliest_drawn(output: Output, top: int) -> TopLogprobs:
    """The likeliest tokens in place of each drawn one, from vLLM's flat lists: the drawn token, then these."""
    shape = (len(output.token_ids), top + 1)
    flat = output.logprobs if output.token_ids else None
    tokens = np.array([] if flat is None else flat.token_ids, dtype=np.int32).reshape(shape)
    logprobs = np.array([] if flat is None else flat.logprobs, dtype=np.float32).reshape(shape)
    return TopLogprobs(token_ids=tokens[:, 1:], logprobs=logprobs[:, 1:])


def prompt_scores(prompt: Sequence[int], logprobs: Sequence[Mapping[int, Any] | None], *, top: int = 0) -> PromptScores:
    """Probabilities of a prompt from vLLM's answer, which has an entry for each token, and the `top` likeliest tokens
    at each place. Raises `RunError` and, for log-probabilities that are not finite, `NonFiniteError`.
    """
    if len(logprobs) != len(prompt):
        raise RunError(f"vLLM scored {len(logprobs)} tokens of a prompt of {len(prompt)}")
    tables = [{token: float(item.logprob) for token, item in (entry or {}).items()} for entry in list(logprobs)[1:]]
    ordered = [sorted(table, key=lambda token: -table[token]) for table in tables]
    best = [tokens[0] for tokens in ordered]
    likeliest = [
        (tokens[:top], [table[token] for token in tokens[:top]]) for tokens, table in zip(ordered, tables, strict=True)
    ]
    scores = PromptScores(
        logprobs=tuple(table[token] for token, table in zip(prompt[1:], tables, strict=True)),
        likeliest=tuple(best),
        likeliest_logprobs=tuple(table[token] for token, table in zip(best, tables, strict=True)),
        top=TopLogprobs.of(likeliest, top) if top else None,
    )
    if not all(map(math.isfinite, scores.logprobs)):
        raise NonFiniteError("the model's logits in a prompt are not finite")
    return scores


def versions_of_tokens(spans: Iterable[Any], count: int) -> tuple[int, ...]:
    """The weight version of each of `count` tokens, from vLLM's spans of `version`, `start` and `end` (excluded)."""
    versions = tuple(int(span.version) for span in spans for _ in range(span.start, span.end))
    if len(versions) != count:
        raise RunError(f"vLLM reported weight versions for {len(versions)} tokens, but sampled {count}")
    return versions

"""Which attention lets the embedded engine sample from a model: tried on a small copy, before the model is loaded.

The engine computes prompts padded side by side, and then a token at a time for rows of different lengths. A token's
log-probability must be that of its row alone, by the model's own definition, below and above all bounds of the model:
windows, chunks, soft caps.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from attrs import field, frozen
from transformers import PretrainedConfig

from skyrl.errors import ModelError
from skyrl.inference.torch.causal_lm import CausalLM
from skyrl.inference.torch.kv_cache import PlacedPrompt
from skyrl.models.small_copy import (
    LONGEST,
    VOCABULARY,
    NoCopyError,
    is_rounding,
    log_probabilities,
    small_copy,
    tried,
)

_PROMPTS = (3, 22)
"""Tokens of the prompts: below and above the bounds of a small copy."""


@frozen(kw_only=True)
class SamplingSupport:
    """The attention with which the embedded engine samples from a model."""

    attention: str

    reason: str = ""
    """Why it is not the one that was asked for; empty if it is."""


def sampling_support(config: PretrainedConfig, attention: str) -> SamplingSupport:
    """The attention with which the engine computes rows of a model of this configuration as if each were alone: the one
    that is asked for, or else the model's own definition. Raises `ModelError` if neither does.
    """
    if attention.startswith("flash_attention"):  # not on this device, or in 16 bits only
        return SamplingSupport(attention=attention)
    case = _SamplingCase(key=config.to_json_string(use_diff=False), config=config)
    faults: list[str] = []
    try:
        for name in dict.fromkeys((attention, "eager")):
            fault = _fault(case, name)
            if not fault:
                return SamplingSupport(attention=name, reason="".join(faults))
            faults.append(fault)
    except NoCopyError as error:
        return SamplingSupport(attention="eager", reason=f"no small copy can be probed ({error})")
    raise ModelError(
        f"the torch engine cannot sample from a {config.model_type} model: {'; '.join(faults)}. Use another inference "
        "backend"
    )


@frozen(kw_only=True)
class _SamplingCase:
    """A configuration that can be hashed."""

    key: str
    config: PretrainedConfig = field(eq=False)


@cache
def _fault(case: _SamplingCase, attention: str) -> str:
    """A clause that says what is wrong with the tokens that the engine samples with this attention; empty if nothing.

    Raises `NoCopyError`, and `ModelError` for a model that the engine refuses.
    """
    truth = small_copy(case.config)
    try:
        model = small_copy(case.config, attention=attention)
    except NoCopyError:
        return f"{type(truth).__name__} has no attention {attention}"
    draws = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, VOCABULARY, (tokens + LONGEST - max(_PROMPTS),), generator=draws) for tokens in _PROMPTS]
    with torch.no_grad():
        reference = [
            log_probabilities(tried(partial(truth, ids.unsqueeze(0), use_cache=False)).logits[0]) for ids in rows
        ]
    try:
        sampled = tried(lambda: _sampled(CausalLM(model), [ids.tolist() for ids in rows]))
    except NoCopyError as error:
        return f"with attention {attention}, a small copy fails ({error})"
    expected = torch.stack([item[prompt - 1 :] for item, prompt in zip(reference, _PROMPTS, strict=True)])
    nats = float((sampled - expected).abs().max())
    if is_rounding(nats, expected):
        return ""
    return f"with attention {attention}, tokens differ from those of each row alone by {nats:.2g} nats in a small copy"


@torch.inference_mode()
def _sampled(model: CausalLM, rows: list[list[int]]) -> torch.Tensor:
    """(rows, steps, V): log-probabilities after each prompt and after each token of the rows that follows it."""
    prompts = [ids[:length] for ids, length in zip(rows, _PROMPTS, strict=True)]
    steps = len(rows[0]) - _PROMPTS[0]
    prefixes, cache = model.prefill(prompts), model.new_cache()
    cache.reserve(len(rows), before=max(_PROMPTS), ahead=steps + 1)
    placed = [
        PlacedPrompt(ids=ids, layers=prefix.layers, copies=1, total=len(ids) + steps)
        for ids, prefix in zip(prompts, prefixes, strict=True)
    ]
    starts = torch.tensor(cache.place_all(placed))
    logits: list[torch.Tensor] = [torch.stack([prefix.logits for prefix in prefixes])]
    for step in range(steps):
        next_ids = [ids[length + step] for ids, length in zip(rows, _PROMPTS, strict=True)]
        cache.tokens[: len(rows), 0, cache.window.end] = torch.tensor(next_ids)
        logits.append(model.decode(cache, starts, ragged=True))
        cache.window.end += 1
    return log_probabilities(torch.stack(logits, dim=1))

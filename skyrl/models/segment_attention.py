"""Attention inside the segments of one packed row: sequences end to end that must not see each other, and answers that
share one copy of their prompt.

transformers tells packed sequences apart by a mask of all tokens against all tokens, whose cost grows with the square
of the row. Here each sequence is attended to on its own, so that a long row costs what its sequences cost.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

SEGMENTS = "skyrl_segments"
"""The name under which transformers finds `segment_attention`."""


@attrs.frozen
class Segment:
    """A stretch of a packed row, positions `start` to `start + prompt + sum(answers)`: a prompt, then answers to it.

    A sequence on its own is a prompt without answers.
    """

    start: int
    prompt: int
    answers: tuple[int, ...] = ()
    """Tokens of each answer; every one sees the prompt and itself."""

    @property
    def stop(self) -> int:
        """The position after its last token."""
        return self.start + self.prompt + sum(self.answers)


def register() -> None:
    """Makes the attention known to transformers. No masks are built: a row is causal, or comes with its segments."""
    AttentionInterface.register(SEGMENTS, segment_attention)
    AttentionMaskInterface.register(SEGMENTS, lambda *_, **__: None)


def segments_fit(config: PretrainedConfig) -> bool:
    """Does every layer of a model of this transformers configuration see the whole sequence before a token?"""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"]
    windowed = bool(getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True)
    chunked = bool(getattr(text, "attention_chunk_size", None))
    return set(kinds) == {"full_attention"} and not windowed and not chunked


def takes_segments(model: nn.Module) -> bool:
    """Was the model loaded with this attention? DeepSpeed's engine has a `config` of its own around the model's."""
    inner: Any = getattr(model, "module", model)
    return bool(inner.config._attn_implementation == SEGMENTS)


def segment_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: tuple[Segment, ...] | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each of `segments`, which together cover the row; without them, plain causal attention.

    Shapes: query (1, heads, T, D), key and value (1, kv_heads, T, D) -> (1, T, heads, D).
    """
    if segments is None:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return result
    mixed = [_inside(segment, query, key, value, scaling) for segment in segments]
    return torch.cat(mixed, dim=2).transpose(1, 2).contiguous(), None


def _inside(segment: Segment, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """(1, heads, tokens of the segment, D)."""
    start, stop = segment.start, segment.start + segment.prompt
    mixed = [
        scaled_dot_product_attention(
            query[:, :, start:stop],
            key[:, :, start:stop],
            value[:, :, start:stop],
            is_causal=True,
            scale=scaling,
            enable_gqa=True,
        )
    ]
    of_prompt = tuple(each[:, :, start:stop] for each in (query, key, value))
    for tokens in segment.answers:
        start, stop = stop, stop + tokens
        own = tuple(each[:, :, start:stop] for each in (query, key, value))
        mixed.append(_answer(of_prompt, own, scaling))
    return torch.cat(mixed, dim=2)


def _answer(prompt: tuple[Tensor, ...], own: tuple[Tensor, ...], scaling: float | None) -> Tensor:
    """(1, heads, tokens of the answer, D): it sees the prompt and itself.

    A causal kernel computes half of a square, one with a mask all of its rectangle: so an answer that is not much
    shorter than its prompt has the prompt's queries computed once more, and thrown away.
    """
    before, tokens = prompt[0].shape[2], own[0].shape[2]
    key, value = (torch.cat(pair, dim=2) for pair in zip(prompt[1:], own[1:], strict=True))
    if before > 2 * tokens:
        seen = torch.ones(tokens, before + tokens, dtype=torch.bool, device=key.device).tril(before)
        return scaled_dot_product_attention(own[0], key, value, attn_mask=seen, scale=scaling, enable_gqa=True)
    query = torch.cat([prompt[0], own[0]], dim=2)
    mixed = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return mixed[:, :, before:]

"""Attention inside the segments of one packed row: sequences end to end that must not see each other, and answers that
share one copy of their prompt.

transformers tells packed sequences apart by a mask of all tokens against all tokens, whose cost grows with the square
of the row. Here each sequence is attended to on its own, so that a long row costs what its sequences cost.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
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


def segments_fit(config: Any) -> bool:
    """Does every layer of a model of this transformers configuration see the whole sequence before a token?"""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"]
    windowed = bool(getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True)
    chunked = bool(getattr(text, "attention_chunk_size", None))
    return set(kinds) == {"full_attention"} and not windowed and not chunked


def takes_segments(model: Any) -> bool:
    """Was the model loaded with this attention?"""
    return bool(model.config._attn_implementation == SEGMENTS)


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
    prompt = slice(segment.start, segment.start + segment.prompt)
    own = scaled_dot_product_attention(
        query[:, :, prompt], key[:, :, prompt], value[:, :, prompt], is_causal=True, scale=scaling, enable_gqa=True
    )
    if not segment.answers:
        return own
    rest = slice(prompt.stop, segment.stop)
    longest = max(segment.answers)
    queries, keys, values = (_rows(each[:, :, rest], segment.answers, longest) for each in (query, key, value))
    count = len(segment.answers)
    keys = torch.cat([key[:, :, prompt].expand(count, -1, -1, -1), keys], dim=2)
    values = torch.cat([value[:, :, prompt].expand(count, -1, -1, -1), values], dim=2)
    seen = torch.ones(longest, segment.prompt + longest, dtype=torch.bool, device=query.device).tril(segment.prompt)
    answers = scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=scaling, enable_gqa=True)
    kept = [answers[index : index + 1, :, :length] for index, length in enumerate(segment.answers)]
    return torch.cat([own, *kept], dim=2)


def _rows(packed: Tensor, lengths: tuple[int, ...], longest: int) -> Tensor:
    """(1, heads, sum of lengths, D) -> (count, heads, longest, D), padded on the right."""
    parts = packed.split(lengths, dim=2)
    return torch.cat([pad(part, (0, 0, 0, longest - part.shape[2])) for part in parts])

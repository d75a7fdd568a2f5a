"""Attention inside the segments of one packed row: concatenated sequences that must not see each other, and answers
that share one copy of their prompt.

transformers separates packed sequences by a mask of all tokens against all tokens, whose cost grows with the square of
the row's length. Here each sequence is attended to separately, so that a row costs as much as its sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from skyrl.models.segments import Segment
from skyrl.models.shared_rows import RowSharing
from skyrl.models.varlen_attention import (
    LARGEST_HEAD,
    LONG,
    Sequences,
    cudnn_attention,
    efficient_attention,
    has_cudnn_attention,
    has_varlen_kernels,
    varlen_attention,
)

SEGMENTS = "skyrl_segments"
"""Name of `segment_attention` in transformers' registry of attention functions."""


CALL = 1_700
"""Number of query-key pairs that take as long as one more call of the kernel, forward and backward.

Measured as 1.8 ms of calls against 63 ns a pair, for a model of 4 heads of 64 on one CPU thread.
"""

CAUSAL_FROM = 512
"""Number of tokens from which a causal kernel on a CPU is faster than a masked one that computes fewer pairs."""


@attrs.frozen
class _Together:
    """Segments as rows of one padded batch of G rows and T columns."""

    places: Tensor
    """(G, T) int64: position in the packed row; 0 where a row is padding."""

    seen: Tensor
    """(G, 1, T, T) bool: whether a token sees another one. Padding sees itself."""

    back: Tensor
    """(tokens,) int64: for each position of the packed row, its index in the flattened (G, T)."""

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> _Together:
        """Lay the segments out side by side."""
        width = max(segment.tokens for segment in segments)
        lengths = torch.tensor([segment.tokens for segment in segments]).unsqueeze(1)
        columns = torch.arange(width)
        filled = columns < lengths
        places = torch.where(filled, columns + torch.tensor([each.start for each in segments]).unsqueeze(1), 0)
        parts = torch.stack([_parts(segment, width) for segment in segments])  # 0: prompt, 1, 2, ...: answers
        same_part = (parts.unsqueeze(2) == parts.unsqueeze(1)) | (parts == 0).unsqueeze(1)
        seen = (same_part & columns.le(columns.unsqueeze(1)) & filled.unsqueeze(1)) | torch.eye(width, dtype=torch.bool)
        back = filled.flatten().nonzero().squeeze(1)
        columns_of_each = (places, seen.unsqueeze(1), back)
        return cls(*(each.to(device, non_blocking=True) for each in columns_of_each))


def _parts(segment: Segment, width: int) -> Tensor:
    sizes = torch.tensor([segment.prompt, *segment.answers, width - segment.tokens])
    return torch.arange(len(sizes)).repeat_interleave(sizes)


@attrs.frozen(eq=False)
class Segments:
    """All segments of a packed row, in order and without gaps, with the data that every layer's attention needs."""

    each: tuple[Segment, ...]
    device: torch.device

    @cached_property
    def sizes(self) -> list[int]:
        """Tokens of every prompt and of every answer, in the order of the row."""
        return [tokens for segment in self.each for tokens in (segment.prompt, *segment.answers)]

    @cached_property
    def together(self) -> _Together | None:
        """The segments side by side, if one call over all pairs of tokens costs less than one call for each answer, as
        for groups of short answers; else None.
        """
        masked = len(self.each) * max(segment.tokens for segment in self.each) ** 2
        apart = len(self.sizes) * CALL + sum(_pairs(segment) for segment in self.each)
        return _Together.of(self.each, self.device) if masked <= apart else None

    @cached_property
    def sequences(self) -> Sequences:
        """The segments as separate sequences, for variable-length kernels."""
        return Sequences.of(self.each, self.device)

    @cached_property
    def masks(self) -> dict[tuple[int, int], Tensor]:
        """Cache of masks (answer, prompt + answer) bool by both lengths, filled on demand."""
        return {}

    def mask(self, prompt: int, answer: int) -> Tensor:
        """Mask (answer, prompt + answer) bool of the tokens that each token of an answer sees: those up to itself."""
        if (prompt, answer) not in self.masks:
            shape = (answer, prompt + answer)
            self.masks[prompt, answer] = torch.ones(shape, dtype=torch.bool, device=self.device).tril(prompt)
        return self.masks[prompt, answer]


def _pairs(segment: Segment) -> int:
    """Number of pairs that separate calls for this segment compute: for a long prompt, only the causal half."""
    prompt = segment.prompt**2 // (1 if segment.prompt < CAUSAL_FROM else 2)
    return prompt + sum(answer * (segment.prompt + answer) for answer in segment.answers)


def register() -> None:
    """Registers the attention with transformers, without a kind of mask. transformers then builds no mask and does not
    search positions for packed rows, which would make the host wait: a row is causal, or comes with its segments.
    """
    AttentionInterface.register(SEGMENTS, segment_attention)


def leave_out_cudnn() -> None:
    """Disable cuDNN's kernels in torch's attention for this process. cuDNN plans a kernel for each new length, and the
    length changes with every token in decoding and almost every micro-batch in training: 38 ms for a call of 24 µs on
    an H200.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def segments_fit(config: PretrainedConfig) -> bool:
    """Whether every layer of a model of this transformers configuration sees all tokens before a token."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"]
    windowed = bool(getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True)
    chunked = bool(getattr(text, "attention_chunk_size", None))
    return set(kinds) == {"full_attention"} and not windowed and not chunked


def takes_segments(model: nn.Module) -> bool:
    """Whether the model was loaded with this attention. DeepSpeed's engine hides the model's `config` by its own."""
    inner: Any = getattr(model, "module", model)
    return bool(inner.config._attn_implementation == SEGMENTS)


def takes_lengths(model: nn.Module) -> bool:
    """Whether the model's attention accepts the lengths of packed rows, as FlashAttention does. Without them every
    layer would find them again, and make the host wait.
    """
    inner: Any = getattr(model, "module", model)
    return str(inner.config._attn_implementation).startswith("flash_attention")


def segment_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    row_sharing: RowSharing | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each of `segments`, which together cover the row; plain causal attention without them.
    A share `dropout` of the attention weights is dropped.

    Shapes: query (1, heads, T, D), key and value (1, kv_heads, T, D) -> (1, T, heads, D). With `row_sharing`, which
    needs segments, T counts the tokens of this rank, and the segments cover the row of all ranks.
    """
    if segments is None:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kernel = next(each for each in KERNELS if each.suits(segments, query) and (each.drops or not dropout))
        return kernel.attend(segments, query, key, value, Weighing(scaling, dropout))

    if row_sharing is None:
        return attend(query, key, value), None
    assert row_sharing.context is None or not dropout, "a check refuses both"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return row_sharing.attend(query, key, value, segments.each, scale, attend), None


@attrs.frozen
class Weighing:
    """Settings for computing attention weights."""

    scaling: float | None
    """Factor of the products of queries and keys. None: one over the root of the head's size."""

    dropout: float = 0.0
    """Share of the weights that is dropped."""

    by_cudnn: bool = False
    """Whether long sequences, of one length each, go through cuDNN's kernels."""


def _are_long(segments: Segments, query: Tensor) -> bool:
    """Whether every answer, and every row without answers, is so long that cuDNN's kernels are faster."""
    rows = [tokens for segment in segments.each for tokens in segment.answers or (segment.prompt,)]
    return min(rows) >= LONG and query.dtype.itemsize == 2 and has_cudnn_attention(query.device)


def _long(segments: Segments, query: Tensor, key: Tensor, value: Tensor, weighing: Weighing) -> Tensor:
    return _one_by_one(segments, query, key, value, attrs.evolve(weighing, by_cudnn=True))


def _takes_efficient(segments: Segments, query: Tensor) -> bool:
    return query.device.type == "cuda" and query.shape[-1] % 8 == 0 and torch.version.hip is None


def _efficient(segments: Segments, query: Tensor, key: Tensor, value: Tensor, weighing: Weighing) -> Tensor:
    return efficient_attention(segments.sequences, query, key, value, weighing.scaling)


def _takes_varlen(segments: Segments, query: Tensor) -> bool:
    head = query.shape[-1]
    fits = head % 8 == 0 and head <= LARGEST_HEAD and query.dtype.itemsize == 2
    return fits and has_varlen_kernels(query.device)


def _varlen(segments: Segments, query: Tensor, key: Tensor, value: Tensor, weighing: Weighing) -> Tensor:
    return varlen_attention(segments.sequences, query, key, value, weighing.scaling)


def _has_short_groups(segments: Segments, query: Tensor) -> bool:
    return segments.together is not None


def _side_by_side(segments: Segments, query: Tensor, key: Tensor, value: Tensor, weighing: Weighing) -> Tensor:
    assert segments.together is not None
    return _in_one_batch(segments.together, query, key, value, weighing)


def _one_by_one(segments: Segments, query: Tensor, key: Tensor, value: Tensor, weighing: Weighing) -> Tensor:
    """(1, T, heads, D), from one call for each prompt and each answer."""
    queries, keys, values = (each.split(segments.sizes, dim=2) for each in (query, key, value))
    pieces = zip(queries, keys, values, strict=True)
    mixed: list[Tensor] = []
    for segment in segments.each:
        prompt = next(pieces)
        mixed.append(_attend(prompt[0], prompt[1], prompt[2], weighing))
        mixed += [_answer(prompt, next(pieces), segments, weighing) for _ in segment.answers]
    return torch.cat(mixed, dim=2).transpose(1, 2).contiguous()


def _in_one_batch(together: _Together, query: Tensor, key: Tensor, value: Tensor, weighing: Weighing) -> Tensor:
    """(1, T, heads, D), from one call over padded segments."""
    rows, columns = together.places.shape
    query, key, value = (
        each[0].transpose(0, 1)[together.places.flatten()].view(rows, columns, *each.shape[1::2]).transpose(1, 2)
        for each in (query, key, value)
    )
    mixed = _attend(query, key, value, weighing, seen=together.seen)
    return mixed.transpose(1, 2).flatten(0, 1)[together.back].unsqueeze(0)


def _answer(prompt: Sequence[Tensor], own: Sequence[Tensor], segments: Segments, weighing: Weighing) -> Tensor:
    """(1, heads, tokens of the answer, D): attention of an answer to the prompt and itself.

    A masked kernel computes the rectangle of the answer's queries. A causal kernel computes half of a square, in which
    the prompt's queries are computed again and discarded: better for long answers, and on CUDA, where the fast kernels
    accept no mask.
    """
    before, tokens = prompt[0].shape[2], own[0].shape[2]
    key, value = (torch.cat(pair, dim=2) for pair in zip(prompt[1:], own[1:], strict=True))
    masks = before > 2 * tokens or (key.device.type == "cpu" and before + tokens < CAUSAL_FROM)
    if masks and not weighing.by_cudnn:
        return _attend(own[0], key, value, weighing, seen=segments.mask(before, tokens))
    mixed = _attend(torch.cat([prompt[0], own[0]], dim=2), key, value, weighing)
    return mixed[:, :, before:]


def _attend(query: Tensor, key: Tensor, value: Tensor, weighing: Weighing, seen: Tensor | None = None) -> Tensor:
    """(rows, heads, T, D): attention, causal or with the mask `seen`. On CUDA heads are repeated for a mask, which with
    grouped heads would use the slowest kernel.
    """
    if weighing.by_cudnn and seen is None and query.shape[2] >= LONG:
        return cudnn_attention(query, key, value, weighing.scaling)
    grouped = seen is None or key.device.type == "cpu"
    if not grouped:
        repeats = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=seen,
        dropout_p=weighing.dropout,
        is_causal=seen is None,
        scale=weighing.scaling,
        enable_gqa=grouped,
    )


@attrs.frozen(kw_only=True)
class Kernel:
    """One way to compute attention inside segments."""

    suits: Callable[[Segments, Tensor], bool]
    """Whether the kernel can run for these segments and this query, (1, heads, T, D)."""

    attend: Callable[[Segments, Tensor, Tensor, Tensor, Weighing], Tensor]
    """Segments, query, key and value, as in `segment_attention` -> (1, T, heads, D)."""

    drops: bool = True
    """Whether the kernel supports dropout."""


KERNELS = (
    Kernel(suits=_are_long, attend=_long, drops=False),
    Kernel(suits=_takes_varlen, attend=_varlen, drops=False),
    Kernel(suits=_takes_efficient, attend=_efficient, drops=False),
    Kernel(suits=_has_short_groups, attend=_side_by_side),
    Kernel(suits=lambda segments, query: True, attend=_one_by_one),
)
"""Ways to compute attention inside segments, of which the first suitable one is used. On CUDA all sequences share one
call, or are long enough for a call each; masks and short calls are for the CPU, and for dropout."""

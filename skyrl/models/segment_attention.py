"""Attention inside the segments of one packed row: sequences end to end that must not see each other, and answers that
share one copy of their prompt.

transformers tells packed sequences apart by a mask of all tokens against all tokens, whose cost grows with the square
of the row. Here each sequence is attended to on its own, so that a long row costs what its sequences cost.
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
from skyrl.models.varlen_attention import LARGEST_HEAD, Sequences, has_varlen_kernels, varlen_attention

SEGMENTS = "skyrl_segments"
"""The name under which transformers finds `segment_attention`."""


CALL = 1_700
"""Pairs of a query and a key that take as long as calling the kernel once more does, forward and backward.

From 1.8 ms of calls against 63 ns a pair: a model of 4 heads of 64 on one CPU thread.
"""

CAUSAL_FROM = 512
"""Tokens from which a causal kernel on a CPU is faster than a masked one that computes fewer pairs."""


@attrs.frozen
class _Together:
    """Segments as rows of one padded batch of G rows and T columns."""

    places: Tensor
    """(G, T) int64: position in the packed row; 0 where a row is padding."""

    seen: Tensor
    """(G, 1, T, T) bool: whether a token sees another one. Padding sees itself."""

    back: Tensor
    """(tokens,) int64: for each position of the packed row, its place in the flattened (G, T)."""

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
    """All segments of a packed row, in order and without gaps, and what every layer needs to attend inside them."""

    each: tuple[Segment, ...]
    device: torch.device

    @cached_property
    def sizes(self) -> list[int]:
        """Tokens of every prompt and of every answer, in the order of the row."""
        return [tokens for segment in self.each for tokens in (segment.prompt, *segment.answers)]

    @cached_property
    def together(self) -> _Together | None:
        """The segments side by side, where one call over all pairs of tokens costs less than one call for each answer:
        groups of short answers.
        """
        masked = len(self.each) * max(segment.tokens for segment in self.each) ** 2
        apart = len(self.sizes) * CALL + sum(_pairs(segment) for segment in self.each)
        return _Together.of(self.each, self.device) if masked <= apart else None

    @cached_property
    def sequences(self) -> Sequences:
        """The segments as sequences of their own, for variable-length kernels."""
        return Sequences.of(self.each, self.device)

    @cached_property
    def masks(self) -> dict[tuple[int, int], Tensor]:
        """(answer, prompt + answer) bool by the lengths of both, made when they are needed."""
        return {}

    def mask(self, prompt: int, answer: int) -> Tensor:
        """Mask of the tokens that each token of an answer sees, those up to itself: (answer, prompt + answer) bool."""
        if (prompt, answer) not in self.masks:
            shape = (answer, prompt + answer)
            self.masks[prompt, answer] = torch.ones(shape, dtype=torch.bool, device=self.device).tril(prompt)
        return self.masks[prompt, answer]


def _pairs(segment: Segment) -> int:
    """Pairs that calls of its own compute: of a long prompt those that see each other, without a mask of all."""
    prompt = segment.prompt**2 // (1 if segment.prompt < CAUSAL_FROM else 2)
    return prompt + sum(answer * (segment.prompt + answer) for answer in segment.answers)


def register() -> None:
    """Makes the attention known to transformers. It has no kind of mask there, so that none is built and no positions
    are searched for packed rows, for which the host would wait: a row is causal, or comes with its segments.
    """
    AttentionInterface.register(SEGMENTS, segment_attention)


def leave_out_cudnn() -> None:
    """For this process, torch's attention does without the kernels of cuDNN. They are planned anew for each length, and
    in decoding every token, in training almost every micro-batch has another one: 38 ms for a call of 24 µs on an H200.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


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


def takes_lengths(model: nn.Module) -> bool:
    """Does the model's attention take the lengths of packed rows? FlashAttention's does, and otherwise every layer
    finds them again, for which the host waits.
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
    """Causal attention inside each of `segments`, which together cover the row; without them, plain causal attention.
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
    """How attention weights come about."""

    scaling: float | None
    """Factor of the products of queries and keys. None: one over the root of the head's size."""

    dropout: float = 0.0
    """Share of the weights that is dropped."""


def _computed_in(tensor: Tensor) -> torch.dtype:
    """The type that torch's own attention would compute in."""
    kind = tensor.device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if casts else tensor.dtype


def _takes_varlen(segments: Segments, query: Tensor) -> bool:
    head = query.shape[-1]
    fits = head % 8 == 0 and head <= LARGEST_HEAD and _computed_in(query).itemsize == 2
    return fits and has_varlen_kernels(query.device)


def _varlen(segments: Segments, query: Tensor, key: Tensor, value: Tensor, weighing: Weighing) -> Tensor:
    dtype = _computed_in(query)
    query, key, value = (each.to(dtype) for each in (query, key, value))
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
    """(1, heads, tokens of the answer, D): it sees the prompt and itself.

    A masked kernel computes the rectangle of the answer's queries. A causal one computes half of a square, for which
    the prompt's queries are computed once more and thrown away: better for long answers, and on CUDA, where the fast
    kernels take no mask.
    """
    before, tokens = prompt[0].shape[2], own[0].shape[2]
    key, value = (torch.cat(pair, dim=2) for pair in zip(prompt[1:], own[1:], strict=True))
    if before > 2 * tokens or (key.device.type == "cpu" and before + tokens < CAUSAL_FROM):
        return _attend(own[0], key, value, weighing, seen=segments.mask(before, tokens))
    mixed = _attend(torch.cat([prompt[0], own[0]], dim=2), key, value, weighing)
    return mixed[:, :, before:]


def _attend(query: Tensor, key: Tensor, value: Tensor, weighing: Weighing, seen: Tensor | None = None) -> Tensor:
    """(rows, heads, T, D): causal, or what `seen` says. On CUDA a mask together with grouped heads would take the
    slowest kernel: there the heads are repeated.
    """
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
    """Whether it runs for these segments and this query, (1, heads, T, D)."""

    attend: Callable[[Segments, Tensor, Tensor, Tensor, Weighing], Tensor]
    """Segments, query, key and value, as `segment_attention` has them -> (1, T, heads, D)."""

    drops: bool = True
    """Whether it knows dropout."""


KERNELS = (
    Kernel(suits=_takes_varlen, attend=_varlen, drops=False),
    Kernel(suits=_has_short_groups, attend=_side_by_side),
    Kernel(suits=lambda segments, query: True, attend=_one_by_one),
)
"""Ways to compute attention inside segments: the first that suits is taken. On CUDA in 16 bits that is the kernel for
sequences of any lengths; masks are for the CPU and for float32, where CUDA's fast kernels take no mask.
"""

"""Attention inside the segments of one packed row: concatenated sequences that must not see each other, and answers
that share one copy of their prompt.

transformers separates packed sequences by a mask of all tokens against all tokens, whose cost grows with the square of
the row's length, and cuts windows and chunks by the place in the packed row. Here each sequence is attended to
separately, so that a row costs as much as its sequences, and bounds count from the start of each sequence. Soft caps of
the scores and attention sinks, which torch's kernels leave out, are computed as the models define them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from skyrl.models.attention.segments import Segment
from skyrl.models.attention.shared_rows import RowSharing
from skyrl.models.attention.varlen_attention import (
    LARGEST_HEAD,
    LONG,
    Sequences,
    cudnn_attention,
    efficient_attention,
    has_cudnn_attention,
    has_varlen_kernels,
    varlen_attention,
)

T = TypeVar("T")

SEGMENTS = "skyrl_segments"
"""Name of `segment_attention` in transformers' registry of attention functions."""


CALL = 1_700
"""Number of query-key pairs that take as long as one more call of the kernel, forward and backward.

Measured as 1.8 ms of calls against 63 ns a pair, for a model of 4 heads of 64 on one CPU thread.
"""

CAUSAL_FROM = 512
"""Number of tokens from which a causal kernel on a CPU is faster than a masked one that computes fewer pairs."""


@attrs.frozen
class KeyBounds:
    """How far a layer's attention sees: the tokens before it that a token sees, itself included.

    Bounds count by position in the sequence. transformers counts by place in the row of the call, which is the same
    only for a sequence on its own. Hashable, so that masks are made once for each.
    """

    window: int | None = None
    """The last `window` of them (arXiv:2004.05150, sec. 3). None: no bound."""

    chunk: int | None = None
    """Tokens of the stretches of positions that do not see each other, as in Llama 4. None: no bound."""

    def within(self, tokens: int) -> KeyBounds:
        """The bounds that matter in a sequence of `tokens`."""
        return KeyBounds(
            *(bound if bound is not None and bound < tokens else None for bound in (self.window, self.chunk))
        )

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether a query reaches a key: positions (..., Q) and (..., K) -> (..., Q, K) bool. A later key counts as
        reached.
        """
        query, key = queries.unsqueeze(-1), keys.unsqueeze(-2)
        seen = torch.ones(torch.broadcast_shapes(query.shape, key.shape), dtype=torch.bool, device=query.device)
        if self.window is not None:
            seen = seen & (key > query - self.window)
        if self.chunk is not None:
            seen = seen & (key // self.chunk == query // self.chunk)
        return seen

    def first_key(self, query: int) -> int:
        """Position of the first key that a query at this position sees."""
        by_window = 0 if self.window is None else query - self.window + 1
        by_chunk = 0 if self.chunk is None else query // self.chunk * self.chunk
        return max(0, by_window, by_chunk)

    def mask(self, before: int, tokens: int, device: torch.device) -> Tensor:
        """(tokens, K) bool: the keys that each of `tokens` queries after `before` others sees, of the last K keys,
        which are all that any of them sees.
        """
        positions = torch.arange(before + tokens, device=device)
        queries, keys = positions[before:], positions[self.first_key(before) :]
        return self.sees(queries, keys) & (keys <= queries.unsqueeze(1))


WHOLE = KeyBounds()
"""All tokens before it."""


def key_bounds_of(module: nn.Module, window: int | None) -> KeyBounds:
    """The bounds of a transformers attention module; `window` is what it passes to its attention function."""
    config: Any = getattr(module, "config", None)
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    match kinds[index] if kinds and index is not None and index < len(kinds) else None:
        case "full_attention":
            return WHOLE
        case "chunked_attention":
            return KeyBounds(chunk=config.attention_chunk_size)
        case "sliding_attention":
            return KeyBounds(window=window or config.sliding_window)
        case _:
            return KeyBounds(window=window)


@attrs.frozen
class _PaddedSegments:
    """Segments as rows of one padded batch of G rows and T columns."""

    positions: Tensor
    """(G, T) int64: position in the packed row; 0 where a row is padding."""

    seen: Tensor
    """(G, 1, T, T) bool: whether a token sees another one. Padding sees itself."""

    back: Tensor
    """(tokens,) int64: for each position of the packed row, its index in the flattened (G, T)."""

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device, bounds: KeyBounds) -> _PaddedSegments:
        """Lay the segments out side by side, for layers that see as far as `bounds`."""
        width = max(segment.tokens for segment in segments)
        lengths = torch.tensor([segment.tokens for segment in segments]).unsqueeze(1)
        columns = torch.arange(width)
        filled = columns < lengths
        indices = torch.where(filled, columns + torch.tensor([segment.start for segment in segments]).unsqueeze(1), 0)
        parts = torch.stack([_parts(segment, width) for segment in segments])  # 0: prompt, 1, 2, ...: answers
        same_part = (parts.unsqueeze(2) == parts.unsqueeze(1)) | (parts == 0).unsqueeze(1)
        before = columns.le(columns.unsqueeze(1))
        if bounds != WHOLE:
            positions = torch.stack([_positions(segment, width) for segment in segments])
            before = before & bounds.sees(positions, positions)
        seen = (same_part & before & filled.unsqueeze(1)) | torch.eye(width, dtype=torch.bool)
        back = filled.flatten().nonzero().squeeze(1)
        columns_of_each = (indices, seen.unsqueeze(1), back)
        return cls(*(item.to(device, non_blocking=True) for item in columns_of_each))


def _parts(segment: Segment, width: int) -> Tensor:
    sizes = torch.tensor([segment.prompt, *segment.answers, width - segment.tokens])
    return torch.arange(len(sizes)).repeat_interleave(sizes)


def _positions(segment: Segment, width: int) -> Tensor:
    """(width,) int64: position of each token in its sequence; those of padding have no meaning."""
    parts = [torch.arange(segment.prompt)]
    parts += [torch.arange(segment.prompt, segment.prompt + answer) for answer in segment.answers]
    return torch.nn.functional.pad(torch.cat(parts), (0, width - segment.tokens))


@attrs.frozen(eq=False)
class Segments:
    """All segments of a packed row, in order and without gaps, with the data that every layer's attention needs."""

    items: tuple[Segment, ...]
    device: torch.device

    @cached_property
    def sizes(self) -> list[int]:
        """Tokens of every prompt and of every answer, in the order of the row."""
        return [tokens for segment in self.items for tokens in (segment.prompt, *segment.answers)]

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence: of a prompt and one answer."""
        return max(segment.prompt + max(segment.answers, default=0) for segment in self.items)

    @cached_property
    def fit_together(self) -> bool:
        """Whether one call over all pairs of tokens of the segments side by side costs less than one call for each
        answer, as for groups of short answers.
        """
        masked = len(self.items) * max(segment.tokens for segment in self.items) ** 2
        apart = len(self.sizes) * CALL + sum(_pairs(segment) for segment in self.items)
        return masked <= apart

    @cached_property
    def _cache(self) -> dict[Any, Any]:
        """What layers share, made on demand."""
        return {}

    def _made_once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._cache:
            self._cache[key] = make()
        cached: T = self._cache[key]
        return cached

    def together(self, bounds: KeyBounds) -> _PaddedSegments:
        """The segments side by side, for layers that see as far as `bounds`."""
        return self._made_once((_PaddedSegments, bounds), lambda: _PaddedSegments.of(self.items, self.device, bounds))

    def sequences(self, bounds: KeyBounds) -> Sequences:
        """The segments as separate sequences, for variable-length kernels; cut into the chunks of `bounds`."""
        chunk = bounds.chunk
        return self._made_once((Sequences, chunk), lambda: Sequences.of(self.items, self.device, chunk))

    def mask(self, before: int, tokens: int, bounds: KeyBounds = WHOLE) -> Tensor:
        """Mask (tokens, K) bool of the keys that each of `tokens` sees after `before` others; K leaves out those that
        none of them sees.
        """
        return self._made_once((before, tokens, bounds), lambda: bounds.mask(before, tokens, self.device))


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


def sees_whole_rows(config: PretrainedConfig) -> bool:
    """Whether every layer of a model of this transformers configuration sees all tokens before a token, and weighs them
    by a softmax of their scores alone.
    """
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"]
    windowed = bool(getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True)
    bounded = bool(getattr(text, "attention_chunk_size", None)) or bool(getattr(text, "attn_logit_softcapping", None))
    return set(kinds) == {"full_attention"} and not windowed and not bounded


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
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each of `segments`, which together cover the row; plain causal attention without them.
    A share `dropout` of the attention weights is dropped. `softcap` and `s_aux` are as in `Weighing`.

    Shapes: query (1, heads, T, D), key and value (1, kv_heads, T, D) -> (1, T, heads, D). With `row_sharing`, which
    needs segments, T counts the tokens of this rank, and the segments cover the row of all ranks.
    """
    longest = key.shape[2] if segments is None else segments.longest
    bounds = key_bounds_of(module, sliding_window).within(longest)
    weighing = Weighing(scaling, dropout, bounds=bounds, softcap=softcap, sinks=s_aux)
    if segments is None and weighing.plain:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    if segments is None:
        before = key.shape[2] - query.shape[2]
        seen = bounds.mask(before, query.shape[2], query.device)
        key, value = (item[:, :, key.shape[2] - seen.shape[1] :] for item in (key, value))
        if attention_mask is not None:
            seen = seen & attention_mask[..., -seen.shape[1] :]
        return attend(query, key, value, weighing, seen=seen).transpose(1, 2).contiguous(), None

    def attend_all(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return kernel_for(segments, query, weighing)(segments, query, key, value, weighing)

    if row_sharing is None:
        return attend_all(query, key, value), None
    assert weighing.plain, "the start refuses models with bounds for rows that ranks share"
    assert row_sharing.context is None or not dropout, "a check refuses both"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return row_sharing.attend(query, key, value, segments.items, scale, attend_all), None


@attrs.frozen
class Weighing:
    """Settings for computing attention weights."""

    scaling: float | None
    """Factor of the products of queries and keys. None: one over the root of the head's size."""

    dropout: float = 0.0
    """Share of the weights that is dropped."""

    by_cudnn: bool = False
    """Whether long sequences, of one length each, go through cuDNN's kernels."""

    bounds: KeyBounds = WHOLE
    """The keys before it that a token sees."""

    softcap: float | None = None
    """c of the soft cap c tanh(z / c) of the scaled products z (Gemma 2, arXiv:2408.00118, sec. 2)."""

    sinks: Tensor | None = None
    """(heads,): the score of a key without value for each head, which takes a share of the weights
    (arXiv:2309.17453)."""

    @property
    def spelled_out(self) -> bool:
        """Whether torch's kernels cannot compute these weights."""
        return self.softcap is not None or self.sinks is not None

    @property
    def plain(self) -> bool:
        """Whether the weights are a softmax of the products with all keys before."""
        return self.bounds == WHOLE and not self.spelled_out


def _are_long(segments: Segments, query: Tensor) -> bool:
    """Whether every answer, and every row without answers, is so long that cuDNN's kernels are faster."""
    rows = [tokens for segment in segments.items for tokens in segment.answers or (segment.prompt,)]
    return min(rows) >= LONG and query.dtype.itemsize == 2 and has_cudnn_attention(query.device)


def kernel_for(segments: Segments, query: Tensor, weighing: Weighing) -> Callable[..., Tensor]:
    """The first suitable way to compute attention inside segments, a function of segments, query, key, value and
    weighing with the shapes of `segment_attention`; `query` is (1, heads, T, D).

    On CUDA all sequences share one call, or are long enough for a call each; masks and short calls are for the CPU, and
    for weights that torch's kernels do not compute.
    """
    head, on_gpu = query.shape[-1], query.device.type == "cuda"
    if weighing.plain and not weighing.dropout and _are_long(segments, query):
        return _long
    if not weighing.dropout and not weighing.spelled_out and head % 8 == 0:
        if head <= LARGEST_HEAD and query.dtype.itemsize == 2 and has_varlen_kernels(query.device):
            return _varlen
        if weighing.bounds.window is None and on_gpu and torch.version.hip is None:
            return _efficient
    return _side_by_side if segments.fit_together else _attend_per_segment


def _long(segments: Segments, query: Tensor, key: Tensor, value: Tensor, weighing: Weighing) -> Tensor:
    return _attend_per_segment(segments, query, key, value, attrs.evolve(weighing, by_cudnn=True))


def _varlen(segments: Segments, query: Tensor, key: Tensor, value: Tensor, weighing: Weighing) -> Tensor:
    bounds = weighing.bounds
    return varlen_attention(segments.sequences(bounds), query, key, value, weighing.scaling, window=bounds.window)


def _efficient(segments: Segments, query: Tensor, key: Tensor, value: Tensor, weighing: Weighing) -> Tensor:
    return efficient_attention(segments.sequences(weighing.bounds), query, key, value, weighing.scaling)


def _attend_per_segment(segments: Segments, query: Tensor, key: Tensor, value: Tensor, weighing: Weighing) -> Tensor:
    """(1, T, heads, D), from one call for each prompt and each answer."""
    queries, keys, values = (item.split(segments.sizes, dim=2) for item in (query, key, value))
    pieces = zip(queries, keys, values, strict=True)
    mixed: list[Tensor] = []
    for segment in segments.items:
        prompt = next(pieces)
        bound = weighing.bounds.within(segment.prompt)
        seen = None if bound == WHOLE else segments.mask(0, segment.prompt, bound)
        mixed.append(attend(prompt[0], prompt[1], prompt[2], weighing, seen=seen))
        mixed += [_answer(prompt, next(pieces), segments, weighing) for _ in segment.answers]
    return torch.cat(mixed, dim=2).transpose(1, 2).contiguous()


def _side_by_side(segments: Segments, query: Tensor, key: Tensor, value: Tensor, weighing: Weighing) -> Tensor:
    """(1, T, heads, D), from one call over padded segments."""
    together = segments.together(weighing.bounds)
    rows, columns = together.positions.shape
    query, key, value = (
        item[0].transpose(0, 1)[together.positions.flatten()].view(rows, columns, *item.shape[1::2]).transpose(1, 2)
        for item in (query, key, value)
    )
    mixed = attend(query, key, value, weighing, seen=together.seen)
    return mixed.transpose(1, 2).flatten(0, 1)[together.back].unsqueeze(0)


def _answer(prompt: Sequence[Tensor], own: Sequence[Tensor], segments: Segments, weighing: Weighing) -> Tensor:
    """(1, heads, tokens of the answer, D): attention of an answer to the prompt and itself.

    A masked kernel computes the rectangle of the answer's queries. A causal kernel computes half of a square, in which
    the prompt's queries are computed again and discarded: better for long answers, and on CUDA, where the fast kernels
    accept no mask.
    """
    before, tokens = prompt[0].shape[2], own[0].shape[2]
    bounds = weighing.bounds.within(before + tokens)
    first = bounds.first_key(before)
    key, value = (torch.cat((item[:, :, first:], new), dim=2) for item, new in zip(prompt[1:], own[1:], strict=True))
    masks = before > 2 * tokens or (key.device.type == "cpu" and before + tokens < CAUSAL_FROM)
    if bounds != WHOLE or (masks and not weighing.by_cudnn):
        return attend(own[0], key, value, weighing, seen=segments.mask(before, tokens, bounds))
    mixed = attend(torch.cat([prompt[0], own[0]], dim=2), key, value, weighing)
    return mixed[:, :, before:]


def attend(query: Tensor, key: Tensor, value: Tensor, weighing: Weighing, seen: Tensor | None = None) -> Tensor:
    """(rows, heads, T, D): attention, causal or with the mask `seen`. On CUDA heads are repeated for a mask, which with
    grouped heads would use the slowest kernel.
    """
    if weighing.spelled_out:
        return _spelled_out(query, key, value, weighing, seen)
    if weighing.by_cudnn and seen is None and query.shape[2] >= LONG:
        return cudnn_attention(query, key, value, weighing.scaling)
    grouped = seen is None or key.device.type == "cpu"
    if not grouped:
        repeats = query.shape[1] // key.shape[1]
        key, value = (item.repeat_interleave(repeats, dim=1) for item in (key, value))
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


def _spelled_out(query: Tensor, key: Tensor, value: Tensor, weighing: Weighing, seen: Tensor | None) -> Tensor:
    """`attend` in single steps, with a soft cap and sinks; all scores are in memory at once."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (item.repeat_interleave(repeats, dim=1) for item in (key, value))
    scale = query.shape[-1] ** -0.5 if weighing.scaling is None else weighing.scaling
    scores = query @ key.transpose(2, 3) * scale
    if weighing.softcap is not None:
        scores = torch.tanh(scores / weighing.softcap) * weighing.softcap
    if seen is None:
        tokens = query.shape[2]
        seen = torch.ones((tokens, tokens), dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~seen, -torch.inf).float()
    if weighing.sinks is not None:
        sinks = weighing.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    weights = torch.nn.functional.dropout(weights.to(query.dtype), weighing.dropout)
    return weights @ value

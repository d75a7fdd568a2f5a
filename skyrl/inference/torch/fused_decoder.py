"""The forward pass of Llama, Qwen2 and Qwen3 over prepared weights, without module calls.

Per layer, one projection computes query, key and value, one rotation turns queries and keys together, and a token needs
about a dozen calls in Python. Prompts are computed back to back in one row of tokens, so that nothing is padded; only
the last token of each goes through the end of the last layer and the head.

`supports` selects the models; for every other one `causal_lm.py` calls transformers.

Shapes: T tokens of all sequences, H hidden size, D head size, V vocabulary. For oneDNN, T is padded with zero rows to
one of a few sizes (`projections.filled`); keys, values and logits are those of real tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from threading import Lock
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from skyrl.inference.sampling import scored
from skyrl.inference.torch import projections
from skyrl.inference.torch.kv_cache import RowCache
from skyrl.inference.torch.prefix_cache import CachedPrefix, Layers
from skyrl.inference.torch.projections import (
    GateUp,
    JoinedGateUp,
    Projection,
    Quantized,
    Sided,
    SidedGateUp,
    filled,
    refuse_without_kernels,
)
from skyrl.models import low_rank
from skyrl.models.attention.varlen_attention import LARGEST_HEAD, Sequences, has_varlen_kernels, varlen_attention
from skyrl.models.low_rank import SideBySide

_FAMILIES = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)

_CONSTANT_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Types of rotary embedding whose frequencies do not depend on the length of the sequence."""


Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of a layer, by its number: (T, heads, D) queries, (T, kv_heads, D) keys and values -> (T, heads * D)."""


@frozen(kw_only=True, eq=False)
class Prefix:
    """The keys, values and logits of a prompt of P tokens."""

    layers: Layers

    logits: Tensor
    """Logits after the last token of the prefix, (V,)."""

    experts: Tensor | None = None
    """Experts of each token, (P, layers, K) int16; None if they are not recorded."""

    scores: tuple[Tensor, Tensor, Tensor] | None = None
    """What `sampling.scored` gives for the tokens after the first; None if it was not asked for."""


@frozen(kw_only=True, eq=False)
class _Layer:
    """The prepared weights of one layer."""

    attention_norm: Tensor
    queries_keys_values: Projection
    head_norm: Tensor | None
    """(heads + kv_heads, D): weights of the norms of queries and keys, in Qwen3."""

    output: Projection
    feed_forward_norm: Tensor
    gate_up: GateUp
    down: Projection


class FusedDecoder:
    """Computes prompts and single tokens with the weights of a transformers model. Call it in inference mode.

    The model's parameters may be replaced in place; `invalidate` must then be called before the next token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        int8: bool = False,
        float32_head: bool = False,
        side: SideBySide | None = None,
    ) -> None:
        """With `int8`, the projections of the layers compute in eight bits, the head and attention in the model's type;
        with `float32_head`, the head computes in float32. `side` has the adapters of the current batch; None: there
        never are any.

        Raises `ModelError` if the device cannot compute `int8`.
        """
        if int8:
            refuse_without_kernels(model.device)
        self._int8, self._side, self._preparing = int8, side, Lock()
        self._float32_head = float32_head
        config: Any = model.config
        self._model: Any = model
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._epsilon, self._rotary = config.rms_norm_eps, self._model.model.rotary_emb
        self._width = self._model.model.layers[0].self_attn.head_dim
        self._layers: list[_Layer] = []
        self._head: Projection | None = None
        self._head_norms: dict[int, Tensor] = {}

    @staticmethod
    def supports(model: PreTrainedModel) -> bool:
        """Whether this class computes the model's forward pass. Subclasses of the supported models may differ."""
        if type(model) not in _FAMILIES:
            return False
        config: Any = model.config
        rotary: Any = model.model.rotary_emb
        plain_layers = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        return plain_layers and config.hidden_act == "silu" and rotary.rope_type in _CONSTANT_ROTATIONS

    def invalidate(self) -> None:
        """Frees the prepared weights; they are prepared again from the model's own for the next token."""
        self._layers = []
        self._head = None

    def addresses(self) -> tuple[int, ...]:
        """Addresses of everything that the forward pass reads, on the device: its weights and low-rank updates."""
        self._prepare()
        linear = [module for module in self._model.modules() if isinstance(module, nn.Linear)]
        updates = [part for update in low_rank.of_layers(linear) if update is not None for part in (update.a, update.b)]
        read = (*self._model.parameters(), *self._model.buffers(), *self._head_norms.values(), *updates)
        return tuple(tensor.data_ptr() for tensor in read)

    @torch.no_grad()
    def _prepare(self) -> Projection:
        """Prepares the model's current weights on its current device, unless that is done. Returns the head."""
        with self._preparing:
            if self._head is None:
                inner, head = self._model.model, self._model.lm_head
                self._embed = inner.embed_tokens
                self._layers = [self._prepared(number, layer) for number, layer in enumerate(inner.layers)]
                self._norm = inner.norm.weight.detach()
                self._head = self._sided(projections.projection(head, float32=self._float32_head), head)
            return self._head

    def prefill(self, prompts: Sequence[Sequence[int]], kept: Sequence[CachedPrefix | None]) -> Iterator[Prefix]:
        """Computes prompts independently of each other, in order, in one forward pass. On CUDA in 16 bits all share a
        kernel, elsewhere adjacent ones of equal length do.

        `kept` are prefixes of the prompts that are already computed.
        """
        self._prepare()
        device, pasts = self._norm.device, [0 if item is None else len(item.ids) for item in kept]
        new = [prompt[past:] for prompt, past in zip(prompts, pasts, strict=True)]
        lengths = [len(tokens) for tokens in new]
        ids = torch.tensor([[token for tokens in new for token in tokens]], device=device)
        positions = torch.tensor(
            [position for past, length in zip(pasts, lengths, strict=True) for position in range(past, past + length)],
            device=device,
        )
        ends = torch.tensor(lengths, device=device).cumsum(0)
        fits = self._norm.dtype.itemsize == 2 and self._width % 8 == 0 and self._width <= LARGEST_HEAD
        attend = _joint_attention if fits and has_varlen_kernels(device) else _span_by_span
        last, layers = self._computed(ids, positions, attend(lengths, kept, device), ends - 1)
        logits = self._logits(last)[: len(ends)]
        split = [tuple(part.transpose(0, 1).split(lengths, dim=1) for part in layer) for layer in layers]
        for index, past in enumerate(kept):
            own = tuple((keys[index], values[index]) for keys, values in split)
            if past is not None:
                pairs = zip(past.layers, own, strict=True)
                own = tuple((torch.cat((old[0], new[0]), 1), torch.cat((old[1], new[1]), 1)) for old, new in pairs)
            yield Prefix(layers=own, logits=logits[index])

    def score(self, prompt: Sequence[int], block: int, *, top: int = 1) -> Prefix:
        """Computes a prompt with its scores and the `top` likeliest tokens; logits of at most `block` tokens are in
        memory at once.
        """
        self._prepare()
        ids = torch.tensor([prompt], device=self._norm.device)
        positions = torch.arange(len(prompt), device=ids.device)
        attend = _span_by_span([len(prompt)], [None], ids.device)
        x, layers = self._computed(ids, positions, attend, positions)
        blocks = (self._logits(filled(part))[: len(part)] for part in x[: len(prompt)].split(block))
        logits, scores = scored_blocks(blocks, ids[0], top)
        own = tuple((keys.transpose(0, 1), values.transpose(0, 1)) for keys, values in layers)
        return Prefix(layers=own, logits=logits, scores=scores)

    def decode(self, cache: RowCache, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Logits (R, V) after one more token per row, whose keys and values are added in column `end` of the cache.

        Shapes: `ids` (R, 1), `positions` (R,), `mask` (R, 1, 1, L) bool, or None if every column belongs to every
        row.
        """
        self._prepare()
        kind, rows = self._norm.dtype, len(ids)
        added = None if mask is None else torch.zeros_like(mask, dtype=kind).masked_fill_(~mask, -torch.inf)
        grouped = (rows, self._kv_heads, self._heads // self._kv_heads, self._width)

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            kept = cache.row_layers[layer].update(keys.unsqueeze(2), values.unsqueeze(2))
            return scaled_dot_product_attention(queries.reshape(grouped), *kept, attn_mask=added).reshape(rows, -1)

        return self.next_logits(ids, positions, attend)

    def next_logits(self, ids: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        """Logits (R, V) after one more token per row, `ids` (R, 1) at `positions` (R,). `attend` gets the keys and
        values of the new tokens, and knows those of the earlier ones.
        """
        self._prepare()
        rows, x, rotation = len(ids), filled(self._embed(ids)[:, 0]), self._rotation(positions)
        for number, layer in enumerate(self._layers):
            queries, keys, values = self._queries_keys_values(layer, x, rotation)
            x = self._rest(layer, filled(attend(number, queries[:rows], keys[:rows], values[:rows])), x)
        return self._logits(x)[:rows]

    def _computed(
        self, ids: Tensor, positions: Tensor, attend: Attention, ends: Tensor
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Last hidden states at `ends`, and keys and values per layer, (T, kv_heads, D) each."""
        tokens, x, rotation = len(positions), filled(self._embed(ids)[0]), self._rotation(positions)
        layers: list[tuple[Tensor, Tensor]] = []
        for layer in self._layers:
            queries, keys, values = self._queries_keys_values(layer, x, rotation)
            mixed = attend(len(layers), queries[:tokens], keys[:tokens], values[:tokens])
            kept = keys[:tokens], values[:tokens]
            if x.device.type == "cuda":  # views would hold the queries, too
                kept = tuple(torch.stack(kept))
            layers.append(kept)
            if len(layers) == len(self._layers):
                mixed, x = mixed[ends], filled(x[ends])
            x = self._rest(layer, filled(mixed), x)
        return x, layers

    def _queries_keys_values(self, layer: _Layer, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """(T, heads, D) queries, (T, kv_heads, D) keys and values; queries and keys are rotated."""
        joined = layer.queries_keys_values(rms_norm(x, x.shape[-1:], layer.attention_norm, self._epsilon))
        heads = joined.view(len(x), -1, self._width)
        turned, values = heads[:, : -self._kv_heads], heads[:, -self._kv_heads :]
        if layer.head_norm is not None:
            turned = rms_norm(turned, (self._width,), None, self._epsilon) * layer.head_norm
        cosine, sine = rotation
        turned = torch.addcmul(turned * cosine, turned.roll(self._width // 2, -1), sine)
        return turned[:, : self._heads], turned[:, self._heads :], values

    def _rest(self, layer: _Layer, mixed: Tensor, x: Tensor) -> Tensor:
        """The part of a layer after attention. Shapes: (T, heads * D), (T, H) -> (T, H)."""
        x = layer.output.plus(mixed, x)
        return layer.down.plus(layer.gate_up(rms_norm(x, x.shape[-1:], layer.feed_forward_norm, self._epsilon)), x)

    def _logits(self, x: Tensor) -> Tensor:
        return self._prepare()(rms_norm(x, x.shape[-1:], self._norm, self._epsilon))

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines, and sines with the sign of their half, (T, 1, D), padded (RoFormer, arXiv:2104.09864, eq. 34)."""
        angles = positions.unsqueeze(1) * self._rotary.inv_freq
        cosine, sine = angles.cos() * self._rotary.attention_scaling, angles.sin() * self._rotary.attention_scaling
        both = torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)
        first, second = (filled(part.to(self._norm.dtype).unsqueeze(1)) for part in both)
        return first, second

    def _prepared(self, number: int, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = None
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm.weight, attention.k_norm.weight
            current = torch.cat([query.expand(self._heads, -1), key.expand(self._kv_heads, -1)])
            buffer = self._head_norms.setdefault(number, current)
            if buffer.device != current.device or buffer.dtype != current.dtype:
                buffer = self._head_norms[number] = current
            norms = buffer.copy_(current)  # CUDA graphs read it where it was
        halves = mlp.gate_proj, mlp.up_proj
        gate_up: GateUp = JoinedGateUp(Quantized(*halves)) if self._int8 else projections.gate_up(*halves)
        if self._side is not None:
            gate_up = SidedGateUp(gate_up, *halves, self._side)
        return _Layer(
            attention_norm=layer.input_layernorm.weight.detach(),
            queries_keys_values=self._projection(attention.q_proj, attention.k_proj, attention.v_proj),
            head_norm=norms,
            output=self._projection(attention.o_proj),
            feed_forward_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=gate_up,
            down=self._projection(mlp.down_proj),
        )

    def _projection(self, *layers: nn.Linear) -> Projection:
        return self._sided(Quantized(*layers) if self._int8 else projections.projection(*layers), *layers)

    def _sided(self, inner: Projection, *layers: nn.Linear) -> Projection:
        return inner if self._side is None else Sided(inner, layers, self._side)


def scored_blocks(blocks: Iterable[Tensor], ids: Tensor, top: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The logits after the last token, (V,), and the scores of the prompt `ids`, from its logits, block by block."""
    parts, offset = [], 0
    for logits in blocks:
        following = ids[offset + 1 : offset + 1 + len(logits)]
        parts.append(scored(logits[: len(following)], following, top))
        offset += len(logits)
    first, second, third = (torch.cat(item) for item in zip(*parts, strict=True))
    return logits[-1], (first, second, third)


def _span_by_span(lengths: Sequence[int], kept: Sequence[CachedPrefix | None], device: torch.device) -> Attention:
    """Causal attention of sequences after their kept prefixes, with a call for each span: adjacent sequences of equal
    length, or one that continues a kept prefix.
    """
    alone = [None if past is None else index for index, past in enumerate(kept)]
    groups = groupby(range(len(lengths)), lambda index: (lengths[index], alone[index]))
    spans = [list(indices) for _, indices in groups]
    begins = [0, *accumulate(lengths)]

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        mixed: list[Tensor] = []
        for first, *others in spans:
            count, length, past = 1 + len(others), lengths[first], kept[first]
            tokens = slice(begins[first], begins[first] + count * length)
            query, key, value = (
                part[tokens].unflatten(0, (count, length)).transpose(1, 2) for part in (queries, keys, values)
            )
            if past is None:
                part = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            else:
                part = _attend_to_past(past.layers[layer], query, key, value)
            mixed.append(part.transpose(1, 2).reshape(count * length, -1))
        return torch.cat(mixed)

    return attend


def _joint_attention(lengths: Sequence[int], kept: Sequence[CachedPrefix | None], device: torch.device) -> Attention:
    """The same by one call of the kernel for sequences of different lengths."""
    totals = [length + (0 if past is None else len(past.ids)) for length, past in zip(lengths, kept, strict=True)]
    query_bounds, key_bounds = (
        torch.tensor([0, *accumulate(item)], dtype=torch.int32, device=device) for item in (lengths, totals)
    )
    sequences = Sequences(
        keys=None,
        query_bounds=query_bounds,
        key_bounds=key_bounds,
        longest_query=max(lengths),
        longest_key=max(totals),
    )

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if totals != list(lengths):
            keys, values = (_with_cached(kept, layer, part, new, lengths) for part, new in enumerate((keys, values)))
        query, key, value = (item.transpose(0, 1).unsqueeze(0) for item in (queries, keys, values))
        return varlen_attention(sequences, query, key, value, None)[0].flatten(1)

    return attend


def _with_cached(
    kept: Sequence[CachedPrefix | None], layer: int, part: int, new: Tensor, lengths: Sequence[int]
) -> Tensor:
    """Keys (`part` 0) or values (1) of a layer, (K, kv_heads, D): those of each kept prefix, then the new ones."""
    pieces: list[Tensor] = []
    for past, own in zip(kept, new.split(list(lengths)), strict=True):
        pieces += [own] if past is None else [past.layers[layer][part].transpose(0, 1), own]
    return torch.cat(pieces)


def _attend_to_past(past: tuple[Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of one sequence of S tokens that follow P others: (1, heads, S, D) -> the same shape.

    The query heads that share a key head are concatenated, as positions of one head.
    """
    keys, values = (torch.cat((old, new[0]), 1)[None] for old, new in zip(past, (key, value), strict=True))
    _, heads, length, width = query.shape
    grouped = query.reshape(1, key.shape[1], heads // key.shape[1] * length, width)
    before = torch.ones(length, keys.shape[2], dtype=torch.bool, device=query.device).tril(keys.shape[2] - length)
    mask = before.repeat(heads // key.shape[1], 1)
    return scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(1, heads, length, width)

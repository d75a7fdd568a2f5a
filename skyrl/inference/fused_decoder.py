"""The forward pass of Llama, Qwen2 and Qwen3 over prepared weights, without a module call on the way.

Per layer: query, key and value come from one projection, the rotation turns queries and keys together, and what a
token costs in Python is about a dozen calls. Prompts are computed back to back in one row of tokens, so that nothing
is padded; only the last token of each goes through the end of the last layer and the head.

`supports` names the models; for every other one `causal_lm.py` calls transformers.

Shapes: T tokens of all sequences, H hidden size, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from skyrl.inference.kv_cache import RowCache
from skyrl.inference.projections import GateUp, Projection, gate_up, projection

_FAMILIES = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)

_CONSTANT_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Types of rotary embedding whose frequencies do not depend on the length of the sequence."""


@frozen(kw_only=True, eq=False)
class Prefix:
    """A prompt of P tokens, computed."""

    layers: tuple[tuple[Tensor, Tensor], ...]
    """Keys and values per layer, (kv_heads, P, head_dim) each."""

    logits: Tensor
    """Logits after the last token of the prefix, (V,)."""


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


@frozen(kw_only=True, eq=False)
class _Span:
    """Sequences of equal length that stand side by side: tokens [begin, begin + count * length)."""

    begin: int
    count: int
    length: int


class FusedDecoder:
    """Computes prompts and single tokens with the weights of a transformers model. Call it in inference mode.

    The model's parameters may be replaced in place; `refresh` must then be called before the next token.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config
        self._model: Any = model
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._epsilon, self._rotary = config.rms_norm_eps, self._model.model.rotary_emb
        self._width = self._model.model.layers[0].self_attn.head_dim
        self._layers: list[_Layer] = []
        self._head: Projection | None = None
        self.refresh()

    @staticmethod
    def supports(model: PreTrainedModel) -> bool:
        """Whether the model is one whose forward pass this is; subclasses may compute something else."""
        if type(model) not in _FAMILIES:
            return False
        config: Any = model.config
        rotary: Any = model.model.rotary_emb
        plain_layers = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        return plain_layers and config.hidden_act == "silu" and rotary.rope_type in _CONSTANT_ROTATIONS

    @torch.no_grad()
    def refresh(self) -> None:
        """Prepares the weights that the model has now, where it is now."""
        inner = self._model.model
        self._embed = inner.embed_tokens
        self.release()  # the new ones take the place of the old ones in memory
        self._layers = [self._prepared(layer) for layer in inner.layers]
        self._norm, self._head = inner.norm.weight.detach(), projection(self._model.lm_head)

    def release(self) -> None:
        """Gives back the prepared weights; `refresh` makes them again."""
        self._layers = []
        self._head = None

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Iterator[Prefix]:
        """Each prompt as if it were alone, in order, in one forward pass; neighbours of equal length share a kernel."""
        device, lengths = self._norm.device, [len(prompt) for prompt in prompts]
        ids = torch.tensor([[token for prompt in prompts for token in prompt]], device=device)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        ends = torch.tensor(lengths, device=device).cumsum(0)
        logits, layers = self._computed(ids, positions, list(_spans(lengths)), ends - 1)
        split = [tuple(part.split(lengths) for part in layer) for layer in layers]
        for place in range(len(prompts)):
            own = tuple((keys[place].transpose(0, 1), values[place].transpose(0, 1)) for keys, values in split)
            yield Prefix(layers=own, logits=logits[place])

    def decode(self, cache: RowCache, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Logits (R, V) after one more token per row, whose keys and values are added in column `end` of the cache.

        Shapes: `ids` (R, 1), `positions` (R,), `mask` (R, 1, 1, L) bool, or None where every column belongs to every
        row.
        """
        x, rotation = self._embed(ids)[:, 0], self._rotation(positions)
        mask = None if mask is None else torch.zeros_like(mask, dtype=x.dtype).masked_fill_(~mask, -torch.inf)
        grouped = (len(x), self._kv_heads, self._heads // self._kv_heads, self._width)
        for layer, cached in zip(self._layers, cache.row_layers, strict=True):
            queries, keys, values = self._queries_keys_values(layer, x, rotation)
            kept = cached.update(keys.unsqueeze(2), values.unsqueeze(2))
            mixed = scaled_dot_product_attention(queries.reshape(grouped), *kept, attn_mask=mask)
            x = self._rest(layer, mixed.reshape(len(x), -1), x)
        return self._logits(x)

    def _computed(
        self, ids: Tensor, positions: Tensor, spans: Sequence[_Span], ends: Tensor
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Logits at `ends`, and keys and values per layer, (T, kv_heads, D) each."""
        x, rotation, layers = self._embed(ids)[0], self._rotation(positions), []
        for layer in self._layers:
            queries, keys, values = self._queries_keys_values(layer, x, rotation)
            mixed = torch.cat([_causal(span, queries, keys, values) for span in spans])
            layers.append((keys, values))
            if len(layers) == len(self._layers):
                mixed, x = mixed[ends], x[ends]
            x = self._rest(layer, mixed, x)
        return self._logits(x), layers

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
        """What follows attention in a layer. Shapes: (T, heads * D), (T, H) -> (T, H)."""
        x = layer.output.plus(mixed, x)
        return layer.down.plus(layer.gate_up(rms_norm(x, x.shape[-1:], layer.feed_forward_norm, self._epsilon)), x)

    def _logits(self, x: Tensor) -> Tensor:
        assert self._head is not None, "the weights were released and not refreshed"
        return self._head(rms_norm(x, x.shape[-1:], self._norm, self._epsilon))

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines, and sines with the sign of their half, (T, 1, D) each (RoFormer, arXiv:2104.09864, eq. 34)."""
        angles = positions.unsqueeze(1) * self._rotary.inv_freq
        cosine, sine = angles.cos() * self._rotary.attention_scaling, angles.sin() * self._rotary.attention_scaling
        both = torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)
        first, second = (part.to(self._norm.dtype).unsqueeze(1) for part in both)
        return first, second

    def _prepared(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = None
        if hasattr(attention, "q_norm"):
            norms = torch.cat(
                [attention.q_norm.weight.expand(self._heads, -1), attention.k_norm.weight.expand(self._kv_heads, -1)]
            )
        return _Layer(
            attention_norm=layer.input_layernorm.weight.detach(),
            queries_keys_values=projection(attention.q_proj, attention.k_proj, attention.v_proj),
            head_norm=norms,
            output=projection(attention.o_proj),
            feed_forward_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=gate_up(mlp.gate_proj, mlp.up_proj),
            down=projection(mlp.down_proj),
        )


def _spans(lengths: Sequence[int]) -> Iterator[_Span]:
    begin = 0
    for length, equal in groupby(lengths):
        count = len(list(equal))
        yield _Span(begin=begin, count=count, length=length)
        begin += count * length


def _causal(span: _Span, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention within each sequence of the span: (T, heads, D) of all tokens -> (count * length, heads * D)."""
    tokens = slice(span.begin, span.begin + span.count * span.length)
    query, key, value = (
        part[tokens].unflatten(0, (span.count, span.length)).transpose(1, 2) for part in (queries, keys, values)
    )
    mixed = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).reshape(span.count * span.length, -1)

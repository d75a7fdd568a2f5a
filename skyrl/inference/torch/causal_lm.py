"""A Hugging Face causal language model as the engine uses it: prompts to keys and values, then one token per row.

`FusedDecoder` computes the models that it supports, if their attention is `sdpa` or `flash_attention_2`; for all others
this module gives transformers the masks, positions and caches that it expects. Any causal LM whose only state is keys
and values is supported; models with a recurrent state (Mamba, linear attention) are refused.

transformers' SDPA path repeats every key and value head for its group of query heads as soon as there is a mask: a copy
of the whole cache, in each layer, for each token. `grouped_query_attention` takes its place: with a single query
position, the heads of a group can take the place of query positions, which computes the same sum without the copy (1.7
times the decode speed at 64 rows of a 3M-parameter Qwen2). Soft caps and attention sinks, which that path leaves out
without a word, are computed as the models define them.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from skyrl.errors import ModelError
from skyrl.inference.torch import paged_decoder
from skyrl.inference.torch.fused_decoder import FusedDecoder, Prefix, scored_blocks
from skyrl.inference.torch.kv_cache import RowCache
from skyrl.inference.torch.paged_decoder import PagedCache, PagedDecoder, PagePool, padded
from skyrl.inference.torch.prefix_cache import CachedPrefix, KeptPrefixes, common_length
from skyrl.models.attention.segment_attention import Weighing, attend, leave_out_cudnn
from skyrl.models.low_rank import Mix, SideBySide, Updates
from skyrl.models.onednn import padded_rows
from skyrl.models.output_head import in_float32, output_layer
from skyrl.models.routers import ChoiceRecorder

_log = logging.getLogger(__name__)

GROUPED_QUERY = "skyrl_grouped_query"
"""The name under which transformers finds `grouped_query_attention`."""

_PADDING = 8
"""Prompts are padded to one length when their lengths round up to the same multiple of this."""

_KEYS_AND_VALUES = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layer types that transformers plans for models whose only state is keys and values."""

_FUSED_ATTENTION = ("sdpa", "flash_attention_2")
"""Kinds of attention in whose place `FusedDecoder` computes; others are kept, because a user may want to see them."""

_COMMON = 64
"""Smallest number of tokens of a common prefix that is computed separately, once for all prompts."""

_PREFILL_TOKENS = 4096
"""Largest prefill in one forward pass, in tokens, padding included; a longer prompt is computed alone."""

_SCORED_TOKENS = 256
"""Number of tokens whose logits are in memory at once while a prompt is scored."""

_UNPADDED_ON_CUDA = 2 * _PREFILL_TOKENS
"""The same without padding on CUDA, where the calls of a pass take the host longer than the device needs for fewer."""


class CausalLM:
    """A model behind `prefill` and `decode`, which must be called under `torch.inference_mode()`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        kept_bytes: int = 0,
        keeps_answers: bool = True,
        int8: bool = False,
        float32_head: bool = False,
        records_experts: bool = False,
        takes_adapters: bool = False,
        paged: tuple[int, int] | None = None,
    ) -> None:
        """`kept_bytes` bounds the memory of keys and values that outlive their sequence; only models that
        `FusedDecoder` supports continue from them. Without `keeps_answers`, only common prefixes are kept. With `int8`,
        projections compute in eight bits; with `float32_head`, logits are computed in float32. `records_experts`
        records the experts to which each token is routed. With `takes_adapters`, prompts and rows may have an adapter
        each. With `paged`, the largest number of rows in flight and of tokens in one, keys and values are in pages and
        decoding uses CUDA graphs, if device and model support it. Raises `ModelError` for a model that cannot be
        sampled from, or has no experts to record.
        """
        layers = DynamicCache(config=model.config).layers
        foreign = {type(layer).__name__ for layer in layers if type(layer) not in _KEYS_AND_VALUES}
        if foreign:
            raise ModelError(
                f"{type(model).__name__} keeps a state other than keys and values ({', '.join(sorted(foreign))}); "
                "the torch engine cannot sample from it, use another inference backend"
            )
        fused = model.config._attn_implementation in _FUSED_ATTENTION and FusedDecoder.supports(model)
        if int8 and not fused:
            raise ModelError(
                f'generator.inference_engine.rollout_dtype = "int8" supports only Llama, Qwen2 and Qwen3 with '
                f'trainer.attention = "sdpa", and this is {type(model).__name__}: set it to "bfloat16"'
            )
        if model.config._attn_implementation == "sdpa":
            AttentionInterface.register(GROUPED_QUERY, grouped_query_attention)
            AttentionMaskInterface.register(GROUPED_QUERY, sdpa_mask)
            model.set_attn_implementation(GROUPED_QUERY)
        if model.device.type == "cuda":
            leave_out_cudnn()
        self.hf_model = model.eval()
        self.device: torch.device = model.device
        windows = any(isinstance(layer, DynamicSlidingWindowLayer) for layer in layers)
        self._own_mask = fused or (model.config._attn_implementation == GROUPED_QUERY and not windows)
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._side = SideBySide() if takes_adapters else None
        self._fused: FusedDecoder | None = None
        if fused:
            self._fused = FusedDecoder(self.hf_model, int8=int8, float32_head=float32_head, side=self._side)
        elif float32_head:
            head = output_layer(model)
            vars(head)["forward"] = in_float32(head)
        if self._side is not None and not fused:
            self._side.hook(self.hf_model)
        self.choices = None
        if records_experts:
            self.choices = ChoiceRecorder(model, "generator.inference_engine.enable_return_routed_experts")
        self.kept = KeptPrefixes(kept_bytes if fused else 0, keeps_answers=keeps_answers)
        self._paged = None if paged is None else self._paged_decoder(*paged)

    def _paged_decoder(self, rows: int, longest: int) -> PagedDecoder | None:
        """Decoding over pages for at most `rows` rows of `longest` tokens; None, with the reason in the log, if device
        or model do not support it.
        """
        config, kind = self.hf_model.config, type(self.hf_model).__name__
        reason = f"transformers computes {kind} with attention {config._attn_implementation!r}"
        if self._fused is not None:
            head = self.hf_model.model.layers[0].self_attn.head_dim
            heads = config.num_attention_heads, config.num_key_value_heads, head
            reason = paged_decoder.refusal(self.device, self.hf_model.dtype, *heads)
        if reason and self.device.type == "cuda":
            _log.warning("decoding without CUDA graphs, which takes several times as long: %s", reason)
        if reason or self._fused is None:
            return None
        pool = PagePool(
            layers=config.num_hidden_layers,
            kv_heads=config.num_key_value_heads,
            head=head,
            rows=padded(rows),
            longest=longest,
            dtype=self.hf_model.dtype,
            device=self.device,
        )
        return PagedDecoder(self._fused, pool)

    def new_cache(self) -> RowCache:
        """An empty cache for rows of this model. The one before must not be used any more."""
        return RowCache(self.device) if self._paged is None else self._paged.new_cache()

    def invalidate(self) -> None:
        """Frees prepared weights and kept keys and values. Must be called after the model's weights were replaced or
        moved; they are prepared again for the next token.
        """
        self.kept.clear()
        if self._fused is not None:
            self._fused.invalidate()
        if self._paged is not None:
            self._paged.invalidate()

    def release(self) -> None:
        """Frees all that is not a weight or belongs to a row in flight. Must be called before the model is moved."""
        self.invalidate()
        if self._paged is not None:
            self._paged.release()

    def mix(self, adapters: Sequence[Updates | None], last: Mix | None) -> Mix | None:
        """The adapters of rows for `decode`; `last` is the mix before, whose factors are used again."""
        if all(adapter is None for adapter in adapters):
            return None
        size = max(padded_rows(len(adapters)), padded(len(adapters)))
        return Mix.of(adapters, last, self.device, size)

    def prefill(self, prompts: Sequence[Sequence[int]], adapter: Updates | None = None) -> list[Prefix]:
        """Computes prompts independently of each other, in order, with one adapter; several share a forward pass.

        A kept prefix of a prompt is not computed again, and a long prefix that all prompts have in common is computed
        once.
        """
        self._use(self.mix([adapter], None))
        number = 0 if adapter is None else adapter.number
        self._keep_common(prompts, number)
        prefixes = [self.kept.find(prompt, number) for prompt in prompts]
        self.kept.reused += sum(len(prefix.ids) for prefix in prefixes if prefix is not None)
        computed_prefixes: dict[int, Prefix] = {}
        padded_pass = self._fused is None
        most = _UNPADDED_ON_CUDA if self.device.type == "cuda" and not padded_pass else _PREFILL_TOKENS
        for bucket in _length_groups([len(prompt) for prompt in prompts], prefixes, most=most, padded=padded_pass):
            computed_prefixes.update(
                zip(bucket, self._computed([(prompts[i], prefixes[i]) for i in bucket]), strict=True)
            )
        return [computed_prefixes[i] for i in range(len(prompts))]

    def score(self, prompt: Sequence[int], adapter: Updates | None = None, *, top: int = 1) -> Prefix:
        """Computes a prompt whole, with its scores and the `top` likeliest tokens at each place."""
        self._use(self.mix([adapter], None))
        if self._fused is not None:
            return self._fused.score(prompt, _SCORED_TOKENS, top=top)
        ids, experts = torch.tensor([prompt], device=self.device), []
        cache: Any = DynamicCache()

        def blocks() -> Iterator[Tensor]:
            for part in ids.split(_SCORED_TOKENS, dim=1):
                yield self.hf_model(input_ids=part, past_key_values=cache, use_cache=True).logits[0]
                if self.choices is not None:
                    experts.append(self.choices.take())

        logits, scores = scored_blocks(blocks(), ids[0], top)
        layers = tuple((layer.keys[0], layer.values[0]) for layer in cache.layers)
        return Prefix(layers=layers, logits=logits, scores=scores, experts=torch.cat(experts) if experts else None)

    def _use(self, mix: Mix | None) -> None:
        """Sets the adapters of what is computed next."""
        if self._side is not None:
            self._side.mix = mix

    def _computed(self, starts: Sequence[tuple[Sequence[int], CachedPrefix | None]]) -> Iterator[Prefix]:
        prompts, kept = [prompt for prompt, _ in starts], [beginning for _, beginning in starts]
        return self._prefill_together(prompts) if self._fused is None else self._fused.prefill(prompts, kept)

    def _keep_common(self, prompts: Sequence[Sequence[int]], adapter: int) -> None:
        """Computes and keeps the prefix that all prompts have in common, if it is long and not kept yet. On CUDA it has
        to save more tokens than a forward pass takes at once, because the pass for it takes as long as any other.
        """
        if self.kept.most_bytes == 0 or len(prompts) < 2:
            return
        listed = [tuple(prompt) for prompt in prompts]
        length = min(common_length(min(listed), max(listed)), min(map(len, listed)) - 1)
        known = self.kept.find(prompts[0][: length + 1], adapter)
        saved = length * (len(prompts) - 1)
        worth = length >= _COMMON and (self.device.type != "cuda" or saved > _UNPADDED_ON_CUDA)
        if worth and (known is None or len(known.ids) < length):
            (prefix,) = self._computed([(prompts[0][:length], known)])
            self.kept.keep(tuple(prompts[0][:length]), prefix.layers, adapter=adapter)

    def decode(self, cache: RowCache, starts: Tensor, *, ragged: bool, mix: Mix | None = None) -> Tensor:
        """Logits (R, V) after the tokens in column `end` of the cache, whose keys and values are added there.

        `starts` (R,) is each row's first column; `ragged` says whether they differ; `mix` has the rows' adapters.
        """
        self._use(mix)
        if isinstance(cache, PagedCache):
            assert self._paged is not None
            return self._paged.decode(cache, starts, recorded=mix is None)
        window = cache.window
        ids, positions = cache.tokens[: window.rows, 0, window.end : window.end + 1], window.end - starts
        mask = None
        if ragged:  # (R, L): True at the columns that belong to each row
            mask = torch.arange(window.start, window.end + 1, device=self.device) >= starts.unsqueeze(1)
            mask = mask[:, None, None, :] if self._own_mask else mask  # a model with windows makes its own
        if self._fused is not None:
            return self._fused.decode(cache, ids, positions, mask)
        result: Tensor = self.hf_model(
            input_ids=ids,
            position_ids=positions.unsqueeze(1),
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
        if self.choices is not None:
            assert cache.experts is not None
            cache.experts[: window.rows, 0, window.end] = self.choices.take()
        return result

    def _prefill_together(self, prompts: Sequence[Sequence[int]]) -> Iterator[Prefix]:
        """Computes prompts padded on the right, where causal attention does not look: no mask is needed, and results at
        padding are dropped.
        """
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.tensor([[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in prompts], device=self.device)
        ends = sorted(set(lengths))
        keep = {"logits_to_keep": torch.tensor(ends, device=self.device) - 1} if self._takes_logits_to_keep else {}
        cache: Any = DynamicCache()
        logits = self.hf_model(input_ids=ids, past_key_values=cache, use_cache=True, **keep).logits
        experts = None if self.choices is None else self.choices.take().unflatten(0, ids.shape)
        for row, length in enumerate(lengths):
            layers = tuple((layer.keys[row, :, :length], layer.values[row, :, :length]) for layer in cache.layers)
            yield Prefix(
                layers=layers,
                logits=logits[row, ends.index(length) if keep else length - 1],
                experts=None if experts is None else experts[row, :length],
            )


def _length_groups(
    lengths: Sequence[int], kept: Sequence[CachedPrefix | None], *, most: int, padded: bool
) -> Iterator[list[int]]:
    """Groups of prompt indices, sorted by number of new tokens, which is at most `most`. With `padded`, the prompts
    of a group are padded to one length and have similar lengths.
    """
    new = [length - (0 if past is None else len(past.ids)) for length, past in zip(lengths, kept, strict=True)]
    bucket: list[int] = []
    tokens = 0
    for index in sorted(range(len(new)), key=lambda i: new[i]):
        length = new[index]
        tokens = length * (len(bucket) + 1) if padded else tokens + length
        dissimilar = padded and bucket and -(-length // _PADDING) != -(-new[bucket[0]] // _PADDING)
        if bucket and (dissimilar or tokens > most):
            yield bucket
            bucket, tokens = [], length
        bucket.append(index)
    if bucket:
        yield bucket


def grouped_query_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Computes the same as transformers' `sdpa_attention_forward`, which is called for all but a plain decode step and
    models with a soft cap or sinks.

    Shapes: query (R, heads, 1, D), key and value (R, kv_heads, L, D), mask (R, 1, 1, L) -> (R, 1, heads, D). Query head
    h reads key head h // (heads / kv_heads).
    """
    softcap, sinks, scaling = (kwargs.get(name) for name in ("softcap", "s_aux", "scaling"))
    if softcap is not None or sinks is not None:
        weighing = Weighing(scaling, softcap=softcap, sinks=sinks)
        return attend(query, key, value, weighing, seen=attention_mask).transpose(1, 2).contiguous(), None
    plain = query.shape[2] == 1 and kwargs.get("position_bias") is None and kwargs.get("cache") is None
    if not plain or module.training or (attention_mask is not None and attention_mask.shape[1] != 1):
        result: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return result
    rows, heads, _, width = query.shape
    kv_heads = key.shape[1]
    folded = query.reshape(rows, kv_heads, heads // kv_heads, width)
    mixed = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return mixed.reshape(rows, 1, heads, value.shape[-1]), None

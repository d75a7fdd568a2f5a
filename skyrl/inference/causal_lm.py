"""A Hugging Face causal language model as the engine uses it: prompts to keys and values, then one token per row.

`FusedDecoder` computes the models that it supports, if their attention is `sdpa`; for all others this module gives
transformers the masks, positions and caches that it expects. Any causal LM whose only state is keys and values is
supported; models with a recurrent state (Mamba, linear attention) are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from skyrl.errors import ModelError
from skyrl.inference import attention
from skyrl.inference.fused_decoder import FusedDecoder, Prefix
from skyrl.inference.kept_prefixes import Kept, KeptPrefixes, common_length
from skyrl.inference.kv_cache import RowCache
from skyrl.models.routers import ChoiceRecorder
from skyrl.models.segment_attention import leave_out_cudnn

_PADDING = 8
"""Prompts are padded to one length when their lengths round up to the same multiple of this."""

_KEYS_AND_VALUES = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layer types that transformers plans for models whose only state is keys and values."""

_COMMON = 64
"""Smallest number of tokens of a common prefix that is computed separately, once for all prompts."""

_PREFILL_TOKENS = 4096
"""Largest prefill in one forward pass, in tokens, padding included; a longer prompt is computed alone."""


class CausalLM:
    """A model behind `prefill` and `decode`, which must be called under `torch.inference_mode()`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        kept_bytes: int = 0,
        keeps_answers: bool = True,
        int8: bool = False,
        records_experts: bool = False,
        base: CausalLM | None = None,
    ) -> None:
        """`kept_bytes` bounds the memory of keys and values that outlive their sequence; only models that
        `FusedDecoder` supports continue from them. Without `keeps_answers`, only common prefixes are kept. With `int8`,
        projections compute in eight bits. `records_experts` records the experts to which each token is routed. `base`
        is the same model without low-rank updates, with which this one shares parameters and prepared weights. Raises
        `ModelError` for a model that cannot be sampled from, or has no experts to record.
        """
        layers = DynamicCache(config=model.config).layers
        foreign = {type(layer).__name__ for layer in layers if type(layer) not in _KEYS_AND_VALUES}
        if foreign:
            raise ModelError(
                f"{type(model).__name__} keeps a state other than keys and values ({', '.join(sorted(foreign))}); "
                "the torch engine cannot sample from it, use another inference backend"
            )
        fused = model.config._attn_implementation == "sdpa" and FusedDecoder.supports(model)
        if int8 and not fused:
            raise ModelError(
                f'generator.inference_engine.rollout_dtype = "int8" supports only Llama, Qwen2 and Qwen3 with '
                f'trainer.attention = "sdpa", and this is {type(model).__name__}: set it to "bfloat16"'
            )
        if model.config._attn_implementation == "sdpa":
            attention.register()
            model.set_attn_implementation(attention.GROUPED_QUERY)
        if model.device.type == "cuda":
            leave_out_cudnn()
        self.model = model.eval()
        self.device: torch.device = model.device
        windows = any(isinstance(layer, DynamicSlidingWindowLayer) for layer in layers)
        self._own_mask = model.config._attn_implementation in ("sdpa", attention.GROUPED_QUERY) and not windows
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._fused: FusedDecoder | None = None
        if fused:
            self._fused = FusedDecoder(self.model, int8=int8, base=None if base is None else base._fused)
        self.choices = None
        if records_experts:
            self.choices = ChoiceRecorder(model, "generator.inference_engine.enable_return_routed_experts")
        self.kept = KeptPrefixes(kept_bytes if fused else 0, keeps_answers=keeps_answers)

    def refresh(self) -> None:
        """Frees prepared weights and kept keys and values. Must be called after the model's weights were replaced or
        moved; they are prepared again for the next token.
        """
        self.kept.clear()
        if self._fused is not None:
            self._fused.refresh()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Prefix]:
        """Computes prompts independently of each other, in order; several share a forward pass.

        A kept prefix of a prompt is not computed again, and a long prefix that all prompts have in common is computed
        once.
        """
        self._keep_common(prompts)
        found = [self.kept.find(prompt) for prompt in prompts]
        self.kept.reused += sum(len(each.ids) for each in found if each is not None)
        done: dict[int, Prefix] = {}
        for bucket in _by_length([len(prompt) for prompt in prompts], found, padded=self._fused is None):
            done.update(zip(bucket, self._computed([(prompts[i], found[i]) for i in bucket]), strict=True))
        return [done[i] for i in range(len(prompts))]

    def _computed(self, starts: Sequence[tuple[Sequence[int], Kept | None]]) -> Iterator[Prefix]:
        prompts, kept = [prompt for prompt, _ in starts], [beginning for _, beginning in starts]
        return self._prefill_together(prompts) if self._fused is None else self._fused.prefill(prompts, kept)

    def _keep_common(self, prompts: Sequence[Sequence[int]]) -> None:
        """Computes and keeps the prefix that all prompts have in common, if it is long and not kept yet."""
        if self.kept.most_bytes == 0 or len(prompts) < 2:
            return
        listed = [tuple(prompt) for prompt in prompts]
        length = min(common_length(min(listed), max(listed)), min(map(len, listed)) - 1)
        known = self.kept.find(prompts[0][: length + 1])
        if length >= _COMMON and (known is None or len(known.ids) < length):
            (prefix,) = self._computed([(prompts[0][:length], known)])
            self.kept.keep(tuple(prompts[0][:length]), prefix.layers)

    def decode(self, cache: RowCache, starts: Tensor, *, ragged: bool) -> Tensor:
        """Logits (R, V) after the tokens in column `end` of the cache, whose keys and values are added there.

        `starts` (R,) is each row's first column; `ragged` says whether they differ.
        """
        window = cache.window
        ids = cache.tokens[: window.rows, 0, window.end : window.end + 1]
        if self._fused is not None:
            mask = self._mask(window.start, window.end + 1, starts) if ragged else None
            return self._fused.decode(cache, ids, window.end - starts, mask)
        result: Tensor = self.model(
            input_ids=ids,
            position_ids=(window.end - starts).unsqueeze(1),
            attention_mask=self._mask(window.start, window.end + 1, starts) if ragged else None,
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
        if self.choices is not None:
            assert cache.experts is not None
            cache.experts[: window.rows, 0, window.end] = self.choices.take()
        return result

    def _mask(self, start: int, end: int, starts: Tensor) -> Tensor:
        """True at the columns that belong to each row: (R, 1, 1, L), or (R, L) for a model that makes its own masks."""
        own = torch.arange(start, end, device=self.device) >= starts.unsqueeze(1)
        return own[:, None, None, :] if self._own_mask else own

    def _prefill_together(self, prompts: Sequence[Sequence[int]]) -> Iterator[Prefix]:
        """Computes prompts padded on the right, where causal attention does not look: no mask is needed, and results at
        padding are dropped.
        """
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.tensor([[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in prompts], device=self.device)
        ends = sorted(set(lengths))
        keep = {"logits_to_keep": torch.tensor(ends, device=self.device) - 1} if self._takes_logits_to_keep else {}
        cache: Any = DynamicCache()
        logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True, **keep).logits
        experts = None if self.choices is None else self.choices.take().unflatten(0, ids.shape)
        for row, length in enumerate(lengths):
            layers = tuple((layer.keys[row, :, :length], layer.values[row, :, :length]) for layer in cache.layers)
            yield Prefix(
                layers=layers,
                logits=logits[row, ends.index(length) if keep else length - 1],
                experts=None if experts is None else experts[row, :length],
            )


def _by_length(lengths: Sequence[int], kept: Sequence[Kept | None], *, padded: bool) -> Iterator[list[int]]:
    """Groups of prompt indices, sorted by number of new tokens, that fit the token budget of one forward pass. With
    `padded`, the prompts of a group are padded to one length and have similar lengths.
    """
    new = [length - (0 if past is None else len(past.ids)) for length, past in zip(lengths, kept, strict=True)]
    bucket: list[int] = []
    tokens = 0
    for index in sorted(range(len(new)), key=lambda i: new[i]):
        length = new[index]
        tokens = length * (len(bucket) + 1) if padded else tokens + length
        dissimilar = padded and bucket and -(-length // _PADDING) != -(-new[bucket[0]] // _PADDING)
        if bucket and (dissimilar or tokens > _PREFILL_TOKENS):
            yield bucket
            bucket, tokens = [], length
        bucket.append(index)
    if bucket:
        yield bucket

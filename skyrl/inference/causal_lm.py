"""A Hugging Face causal language model as the engine uses it: prompts to keys and values, then one token per row.

This is the only module that knows how transformers wants its masks, positions and caches. Any causal LM will do whose
only state is keys and values; models with a recurrent state (Mamba, linear attention) are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from skyrl.errors import ModelError
from skyrl.inference import attention
from skyrl.inference.kv_cache import RowCache

_PADDING = 8
"""Prompts are prefilled together when their lengths round up to the same multiple of this."""

_KEYS_AND_VALUES = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layer types that transformers plans for models whose only state is keys and values."""

_PREFILL_TOKENS = 4096
"""Largest prefill in one forward pass, in tokens, padding included; a longer prompt goes alone."""


@frozen(kw_only=True, eq=False)
class Prefix:
    """A prompt of P tokens, computed."""

    layers: tuple[tuple[Tensor, Tensor], ...]
    """Keys and values per layer, (kv_heads, P, head_dim) each."""

    logits: Tensor
    """Logits after the last token of the prefix, (V,)."""


class CausalLM:
    """The model behind two functions. Call them under `torch.inference_mode()`."""

    def __init__(self, model: PreTrainedModel) -> None:
        layers = DynamicCache(config=model.config).layers
        foreign = {type(layer).__name__ for layer in layers if type(layer) not in _KEYS_AND_VALUES}
        if foreign:
            raise ModelError(
                f"{type(model).__name__} keeps a state other than keys and values ({', '.join(sorted(foreign))}); "
                "the torch engine cannot sample from it, use another inference backend"
            )
        if model.config._attn_implementation == "sdpa":
            attention.register()
            model.set_attn_implementation(attention.GROUPED_QUERY)
        self.model = model.eval()
        self.device: torch.device = model.device
        windows = any(isinstance(layer, DynamicSlidingWindowLayer) for layer in layers)
        self._own_mask = model.config._attn_implementation in ("sdpa", attention.GROUPED_QUERY) and not windows
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Prefix]:
        """Each prompt as if it were alone, in order; prompts of similar length share a forward pass."""
        done: dict[int, Prefix] = {}
        for bucket in _similar_lengths(prompts):
            done.update(zip(bucket, self._prefill_together([prompts[i] for i in bucket]), strict=True))
        return [done[i] for i in range(len(prompts))]

    def decode(self, cache: RowCache, starts: Tensor, *, ragged: bool) -> Tensor:
        """Logits (R, V) after the tokens in column `end` of the cache, whose keys and values it adds there.

        `starts` (R,) is each row's first column; `ragged` says whether they differ.
        """
        window = cache.window
        ids = cache.tokens[: window.rows, 0, window.end : window.end + 1]
        result: Tensor = self.model(
            input_ids=ids,
            position_ids=(window.end - starts).unsqueeze(1),
            attention_mask=self._mask(window.start, window.end + 1, starts) if ragged else None,
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
        return result

    def _mask(self, start: int, end: int, starts: Tensor) -> Tensor:
        """True at the columns that belong to each row: (R, 1, 1, L), or (R, L) for a model that makes its own masks."""
        own = torch.arange(start, end, device=self.device) >= starts.unsqueeze(1)
        return own[:, None, None, :] if self._own_mask else own

    def _prefill_together(self, prompts: Sequence[Sequence[int]]) -> Iterator[Prefix]:
        """Padded on the right, where causal attention does not look: no mask, and what padding gave is left out."""
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.tensor([[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in prompts], device=self.device)
        ends = sorted(set(lengths))
        keep = {"logits_to_keep": torch.tensor(ends, device=self.device) - 1} if self._takes_logits_to_keep else {}
        cache: Any = DynamicCache()
        logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True, **keep).logits
        for row, length in enumerate(lengths):
            layers = tuple((layer.keys[row, :, :length], layer.values[row, :, :length]) for layer in cache.layers)
            yield Prefix(layers=layers, logits=logits[row, ends.index(length) if keep else length - 1])


def _similar_lengths(prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Indices of prompts that may be padded to one length, within the token budget."""
    bucket: list[int] = []
    for index in sorted(range(len(prompts)), key=lambda i: len(prompts[i])):
        length = len(prompts[index])
        if bucket and (
            -(-length // _PADDING) != -(-len(prompts[bucket[0]]) // _PADDING)
            or length * (len(bucket) + 1) > _PREFILL_TOKENS
        ):
            yield bucket
            bucket = []
        bucket.append(index)
    if bucket:
        yield bucket

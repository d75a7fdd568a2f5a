"""A copy of a model that is small enough to be probed in milliseconds: few and narrow layers, one of each kind, random
weights, and bounds of tens of tokens.

Everything that makes tokens depend on each other keeps its kind and gets smaller: windows, chunks, the length from
which rotary embeddings are stretched, soft caps. What a few short rows show about the copy holds for the model at its
lengths.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from skyrl.errors import ModelError

T = TypeVar("T")

VOCABULARY, HEADS, HEAD, HIDDEN = 64, 4, 16, 64

WINDOW, CHUNK, ORIGINAL = 8, 12, 20
"""Bounds of the copy, in tokens: of windows, of chunks, and of the rotary embeddings that are not stretched."""

CAP = 2.0
"""Largest soft cap of attention scores in the copy, so that its scores reach it."""

MOST_WEIGHTS = 5_000_000

LONGEST = 48
"""Tokens of the longest rows that the copy should be probed with."""

TOLERANCE = 1e-3
"""Largest difference of log-probabilities that is rounding, as a part of their standard deviation."""

_WIDTHS: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "lru_width"), HIDDEN),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), HEADS),
    # with few heads, scores of keys are often equal, and which of those are attended is left to the kernel
    **dict.fromkeys(("index_n_heads", "indexer_n_heads"), 8 * HEADS),
    **dict.fromkeys(("linear_num_heads", "linear_num_value_heads"), HEADS),
    "linear_num_key_heads": HEADS // 2,
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads", "n_mamba_heads"), 2 * HIDDEN // HEAD),
    **dict.fromkeys(("mamba_d_ssm", "mamba_intermediate_size", "attention_hidden_size"), 2 * HIDDEN),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "ffn_dim", "ffn_hidden_size", "n_inner"), HIDDEN),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), HIDDEN),
    "moe_shared_expert_intermediate_size": HIDDEN,
}
"""Widths and numbers of heads by transformers' name, whatever the model's; one that the model lacks stays out. A copy
that many ranks are to share has them several times.
"""

_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(
        ("head_dim", "rotary_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), HEAD
    ),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank"), HEAD),
    "qk_head_dim": 2 * HEAD,
    **dict.fromkeys(("index_head_dim", "hidden_size_per_layer_input", "laurel_rank", "block_multiple_of"), HEAD),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head", "mamba_headdim", "adapter_rank"), HEAD),
    "attention_head_dim": 2 * HIDDEN // HEADS,
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 4),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups", "n_group", "num_expert_group", "topk_group"), 1),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset", "first_k_dense_replace"), 1),
}
"""Other sizes of the copy by transformers' name, whatever the model's; one that the model lacks stays out."""

_MOST: Mapping[str, int] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), HEADS),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "block_size", "max_inference_chunksize"), 16),
    **dict.fromkeys(("local_attn_chunk_length", "lsh_attn_chunk_length", "position_bias_max_distance"), 16),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size", "index_topk"), WINDOW),
    **dict.fromkeys(("local_attention", "keep_window_size", "rel_extent", "indexer_budget"), WINDOW),
    **dict.fromkeys(("attention_chunk_size", "floor_scale", "log_scaling_n_floor"), CHUNK),
    **dict.fromkeys(("index_block_size", "compress_rates", "indexer_compress_ratio"), 4),
    "index_topk_blocks": 2,
    "original_max_position_embeddings": ORIGINAL,
}
"""Largest value of each bound and number in the copy."""

_KINDS = ("layer_types", "layers_block_type", "block_types", "no_rope_layers", "mlp_layer_types")
"""Lists that say of which kind each layer is."""


class NoCopyError(Exception):
    """A small copy of a model cannot be made, or does not compute."""


def small_copy(config: PretrainedConfig, *, attention: str = "eager", times: int = 1) -> PreTrainedModel:
    """The copy of a causal language model in float32 on the CPU, in evaluation, with random weights. Its layers
    are `times` as wide, with `times` as many heads, as those of the smallest copy.

    Raises `NoCopyError`.
    """
    return tried(lambda: _make_copy(small_config(config, times), attention))


def _make_copy(small: PretrainedConfig, attention: str) -> PreTrainedModel:
    with torch.device("meta"):  # towers for images or sound keep their sizes, and so do tables of unknown names
        size = AutoModelForCausalLM.from_config(small).num_parameters()
    if size > MOST_WEIGHTS:
        raise ValueError(f"{size:,} weights of a small copy are too many")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation=attention)
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[-1]))
            elif name.endswith("sinks"):
                torch.nn.init.normal_(weight)
    result: PreTrainedModel = model.eval().requires_grad_(False)
    return result


def log_probabilities(logits: Tensor) -> Tensor:
    """(..., V) -> (..., V) float32, in nats."""
    return torch.log_softmax(logits.float(), dim=-1)


def is_rounding(difference: float, expected: Tensor) -> bool:
    """Whether a difference of log-probabilities from the `expected` ones is rounding."""
    return difference <= TOLERANCE * float(expected.std())


def tried(compute: Callable[[], T]) -> T:
    """The result of a computation with a small copy. Raises `NoCopyError` for all that transformers raises: types of
    its models' own, for sizes that do not go together and inputs that a model does not take.
    """
    try:
        return compute()
    except ModelError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        first = lines[0].split(". ")[0] if lines else "no message"
        raise NoCopyError(f"{type(error).__name__}: {first}") from error


def small_config(config: PretrainedConfig, times: int = 1) -> PretrainedConfig:
    """The configuration of the text model with the sizes and bounds of the copy, whose layers are `times` as wide as
    those of the smallest one.
    """
    text: Any = copy.deepcopy(config.get_text_config())
    values = text.to_dict()
    if values.pop("per_layer_config", None):  # layers of other sizes, in Gemma 4: all get those of the copy
        text = type(text).from_dict({**values, "head_dim": HEAD, "global_head_dim": HEAD})
    _choose_layers(text)
    if {"num_heads", "expand"} <= vars(text).keys():  # Mamba 2
        text.num_heads = text.expand * times * HIDDEN // HEAD
    widths = {name: times * width for name, width in _WIDTHS.items()}
    for sizes, exact in ((widths, True), (_SIZES, True), (_MOST, False)):
        for name, size in sizes.items():
            value = getattr(text, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                with suppress(AttributeError):  # a property of other sizes
                    setattr(text, name, size if exact else min(value, size))
            elif isinstance(value, list | tuple) and value and all(isinstance(item, int) for item in value):
                setattr(text, name, type(value)(size if exact else min(entry, size) for entry in value))
            elif isinstance(value, dict):
                setattr(text, name, {key: min(element, size) for key, element in value.items()})
    if getattr(text, "head_dim", HEAD) is None:
        text.head_dim = HEAD
    for name in ("num_key_value_heads", "num_kv_heads"):
        if isinstance(value := getattr(text, name, None), int):
            multi_head = value >= config.get_text_config().num_attention_heads
            setattr(text, name, times * (HEADS if multi_head else min(value, HEADS // 2)))
    if getattr(text, "index_topk_blocks", None):  # blocks of keys are chosen for each of their heads
        text.index_n_heads = text.num_key_value_heads
    if getattr(text, "attn_logit_softcapping", None):
        text.attn_logit_softcapping = min(text.attn_logit_softcapping, CAP)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(text, name, None) is not None:
            setattr(text, name, 0)
    _shrink_rotation(text)
    result: PretrainedConfig = text
    return result


def _choose_layers(config: PretrainedConfig) -> None:
    """Keep the first layer of each kind, and at least two layers, whose lists are cut alike. Layers that share keys and
    values are kept behind those that have them.
    """
    text: Any = config
    lists = [list(getattr(text, name)) for name in _KINDS if isinstance(getattr(text, name, None), list | tuple)]
    layers = getattr(text, "num_hidden_layers", None) or len(lists[0])
    lists = [item for item in lists if len(item) == layers]
    kinds = list(zip(*lists, strict=True)) if lists else []
    chosen = [index for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    chosen = chosen if len(chosen) > 1 else list(range(min(2, layers)))
    if getattr(text, "num_kv_shared_layers", None):
        text.num_kv_shared_layers = len(chosen)
        chosen = chosen * 2
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and value and not name.startswith("_"):
            if len(value) == layers:
                setattr(text, name, type(value)(value[index] for index in chosen))
            elif name.endswith(("_layers", "_idxs", "_indices", "_ids")) and all(
                isinstance(entry, int) for entry in value
            ):
                setattr(text, name, [position for position, index in enumerate(chosen) if index in value])
    with suppress(AttributeError):  # a property of the lists
        text.num_hidden_layers = len(chosen)


def _shrink_rotation(config: PretrainedConfig) -> None:
    text: Any = config
    tables: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    nested = all(isinstance(table, Mapping) for table in tables.values())
    if tables:
        text.rope_parameters = (
            {name: _small_table(table) for name, table in tables.items()} if nested else _small_table(tables)
        )
    if any(table.get("rope_type") == "dynamic" for table in (tables.values() if nested else (tables,))):
        text.max_position_embeddings = ORIGINAL  # the length from which transformers stretches these


def _small_table(table: Mapping[str, Any]) -> dict[str, object]:
    """A table of rotary embeddings for heads of `HEAD`, stretched from `ORIGINAL` tokens on."""
    angles = int(HEAD * table.get("partial_rotary_factor", 1.0)) // 2
    small: dict[str, Any] = dict(table)
    if "original_max_position_embeddings" in table:
        small["original_max_position_embeddings"] = min(table["original_max_position_embeddings"], ORIGINAL)
    for name in ("short_factor", "long_factor"):
        if isinstance(factors := table.get(name), Sequence):
            small[name] = [factors[index * len(factors) // angles] for index in range(angles)]
    if "mrope_section" in table:
        small["mrope_section"] = [angles - 2 * (angles // 3), angles // 3, angles // 3]
    return small

"""Small models of many families, as their configurations spell what makes tokens depend on each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen
from transformers import AutoConfig, PretrainedConfig

SIZES: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}

_EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL: Mapping[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MLA: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_shared_experts": 1,
}
_GDN: Mapping[str, Any] = {
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_WINDOWS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **more}}


def _long_rope() -> dict[str, Any]:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    return _rope("longrope", **factors, original_max_position_embeddings=24)


_WIDTHS = {
    *("hidden_size", "n_embd", "word_embed_proj_dim", "lru_width", "head_dim", "global_head_dim"),
    *("linear_key_head_dim", "linear_value_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    *("kv_lora_rank", "mamba_d_ssm", "mamba_d_head"),
}
"""Names of the widths of heads, and of those that heads divide."""


@frozen
class Family:
    """A kind of model, as small as it comes."""

    kind: str
    """transformers' name."""

    values: Mapping[str, Any]

    def config(self, *, times: int = 1) -> PretrainedConfig:
        """The configuration, with sizes of a few numbers; heads and what they come from are so many `times` wider."""
        values = {**SIZES, **self.values}
        wider = {name: times * values[name] for name in _WIDTHS & values.keys()}
        if "rope_parameters" in values:
            wider["rope_parameters"] = {
                name: times * value if isinstance(value, list) else value
                for name, value in values["rope_parameters"].items()
            }
        wider["initializer_range"] = values["initializer_range"] / times**0.5
        made: PretrainedConfig = AutoConfig.for_model(self.kind, **{**values, **wider})
        return made


FAMILIES: Mapping[str, Family] = {
    "Llama": Family("llama", {}),
    "Llama 3.1, stretched": Family(
        "llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    "Llama, YaRN": Family("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "Llama, dynamic NTK": Family("llama", _rope("dynamic", factor=4.0, original_max_position_embeddings=24)),
    "Qwen2.5": Family("qwen2", {"use_sliding_window": False}),
    "Qwen2, windows": Family("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "Qwen2 MoE": Family("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 24}),
    "Qwen3": Family("qwen3", {"head_dim": 16}),
    "Qwen3 MoE": Family("qwen3_moe", {**_EXPERTS, "head_dim": 8, "norm_topk_prob": True}),
    "Qwen3-Next": Family("qwen3_next", {**_EXPERTS, **_GDN, "shared_expert_intermediate_size": 24}),
    "Qwen3.5": Family("qwen3_5_text", _GDN),
    "Gemma": Family("gemma", {"head_dim": 8}),
    "Gemma 2": Family(
        "gemma2",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "Gemma 3": Family(
        "gemma3_text",
        {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "layer_types": _WINDOWS},
    ),
    "Gemma 4": Family(
        "gemma4_text", {"head_dim": 8, "global_head_dim": 16, "sliding_window": 8, "vocab_size_per_layer_input": 96}
    ),
    "Mistral": Family("mistral", {"sliding_window": 8, "head_dim": 8}),
    "Mixtral": Family("mixtral", _LOCAL),
    "Ministral 3": Family(
        "ministral3",
        {
            "head_dim": 8,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.1),
        },
    ),
    "SmolLM3": Family("smollm3", {"no_rope_layer_interval": 2}),
    "OLMo 2": Family("olmo2", {}),
    "OLMo 3": Family("olmo3", {"sliding_window": 8}),
    "OLMoE": Family("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "Phi-3, windows": Family("phi3", {"sliding_window": 8}),
    "Phi-3.5 and Phi-4-mini, LongRoPE": Family("phi3", {**_long_rope(), "original_max_position_embeddings": 24}),
    "Phi-3.5-MoE": Family(
        "phimoe",
        {
            **_LOCAL,
            "rope_parameters": {**_long_rope()["rope_parameters"], "short_mscale": 1.0, "long_mscale": 1.2},
            "original_max_position_embeddings": 24,
        },
    ),
    "Llama 4": Family(
        "llama4_text",
        {
            **_LOCAL,
            "num_experts_per_tok": 1,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 16,
            "floor_scale": 20,
            "interleave_moe_layer_step": 2,
        },
    ),
    "Llama 4 without temperature tuning": Family(
        "llama4_text",
        {
            **_LOCAL,
            "num_experts_per_tok": 1,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 16,
            "attn_temperature_tuning": False,
        },
    ),
    "Granite": Family(
        "granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    "Granite 4 hybrid": Family(
        "granitemoehybrid",
        {
            **_LOCAL,
            "layer_types": ["mamba", "mamba", "mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
        },
    ),
    "GLM-4": Family("glm4", {"head_dim": 8}),
    "GLM-4.5": Family("glm4_moe", {**_EXPERTS, "head_dim": 8, "n_routed_experts": 4}),
    "DeepSeek-V3": Family("deepseek_v3", _MLA),
    "gpt-oss": Family("gpt_oss", {**_LOCAL, "head_dim": 8, "sliding_window": 8}),
    "Cohere": Family("cohere", {"logit_scale": 0.25}),
    "Cohere 2": Family("cohere2", {"logit_scale": 0.25, "sliding_window": 8}),
    "EXAONE 4": Family("exaone4", {"sliding_window": 8, "sliding_window_pattern": 2}),
    "StarCoder 2": Family("starcoder2", {"sliding_window": 8}),
    "Jamba": Family(
        "jamba",
        {
            **_LOCAL,
            "num_experts": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "Mamba": Family("mamba", {"state_size": 8}),
    "Falcon-H1": Family(
        "falcon_h1", {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "head_dim": 8}
    ),
    "LFM2": Family("lfm2", {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_multiple_of": 16}),
    "MiniMax": Family(
        "minimax",
        {**_LOCAL, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 16},
    ),
    "Bamba": Family(
        "bamba",
        {
            "attn_layer_indices": [1, 3],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
        },
    ),
    "RecurrentGemma": Family("recurrent_gemma", {"lru_width": 32, "attention_window_size": 8, "head_dim": 8}),
    "StableLM": Family("stablelm", {}),
    "GPT-NeoX": Family("gpt_neox", {}),
    "Falcon": Family("falcon", {"alibi": True, "new_decoder_architecture": False}),
    "BLOOM": Family("bloom", {"n_layer": 3, "n_head": 4}),
    "OPT": Family("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3}),
    "GPT-2": Family("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}),
}
"""Variants of families, by the names that people know. The first values are sizes; what matters is the rest."""

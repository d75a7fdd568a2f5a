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
_INDEX: Mapping[str, Any] = {"index_n_heads": 32, "index_head_dim": 8, "index_topk": 8}
_LOCAL_AND_FULL = ["sliding_attention", "full_attention"] * 2
_WINDOWS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **more}}


def _long_rope() -> dict[str, Any]:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    return _rope("longrope", **factors, original_max_position_embeddings=24)


_WIDTHS = {
    *("hidden_size", "n_embd", "word_embed_proj_dim", "lru_width", "head_dim", "global_head_dim"),
    *("linear_key_head_dim", "linear_value_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    *("kv_lora_rank", "mamba_d_ssm", "mamba_d_head", "mamba_head_dim"),
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
        config: PretrainedConfig = AutoConfig.for_model(self.kind, **{**values, **wider})
        return config


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
    "AFMoE": Family("afmoe", {**_EXPERTS, "head_dim": 8, "sliding_window": 8, "layer_types": _LOCAL_AND_FULL}),
    "Apertus": Family("apertus", {}),
    "Arcee": Family("arcee", {}),
    "BitNet": Family("bitnet", {}),
    "Cohere 2 MoE": Family(
        "cohere2_moe",
        {**_EXPERTS, "head_dim": 8, "logit_scale": 0.25, "sliding_window": 8, "layer_types": _LOCAL_AND_FULL},
    ),
    "CWM": Family("cwm", {"bos_token_id": 0, "head_dim": 8, "sliding_window": 8, "layer_types": _LOCAL_AND_FULL}),
    "DeepSeek-V2": Family("deepseek_v2", {**_MLA, "head_dim": 8}),
    "DeepSeek-V3.2": Family("deepseek_v32", {**_MLA, **_INDEX}),
    "DeepSeek-V4": Family(
        "deepseek_v4",
        {
            **_MLA,
            **_INDEX,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
            "sliding_window": 8,
            "o_groups": 2,
            "o_lora_rank": 8,
            "hc_mult": 2,
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
            "mlp_layer_types": ["hash_moe", "moe"] * 2,
        },
    ),
    "dots.llm1": Family("dots1", {**_MLA, "num_key_value_heads": 2, "head_dim": 8}),
    "ERNIE 4.5": Family("ernie4_5", {"head_dim": 8}),
    "ERNIE 4.5 MoE": Family("ernie4_5_moe", {**_EXPERTS, "moe_num_experts": 4, "moe_k": 2}),
    "EXAONE MoE": Family(
        "exaone_moe",
        {**_EXPERTS, "head_dim": 8, "sliding_window": 8, "layer_types": _LOCAL_AND_FULL, "n_group": 2, "topk_group": 1},
    ),
    "Falcon Mamba": Family("falcon_mamba", {"state_size": 8}),
    "FlexOlmo": Family("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "Gemma 3n": Family(
        "gemma3n_text",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "num_kv_shared_layers": 2,
            "layer_types": _LOCAL_AND_FULL,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
        },
    ),
    "GLM-4.7-Flash": Family("glm4_moe_lite", {**_MLA, "head_dim": 8}),
    "GLM-5": Family("glm_moe_dsa", {**_MLA, **_INDEX}),
    "Granite MoE": Family("granitemoe", _LOCAL),
    "Granite, windows": Family("granite_swa", {"sliding_window": 8, "layer_types": _LOCAL_AND_FULL}),
    "Helium": Family("helium", {"head_dim": 8}),
    "HRM text": Family("hrm_text", {"head_dim": 8, "initializer_range": 0.05}),
    "Hunyuan": Family("hunyuan_v1_dense", {"head_dim": 8}),
    "Hunyuan MoE": Family("hunyuan_v1_moe", {**_EXPERTS, "moe_topk": 2, "head_dim": 8}),
    "HY 3": Family("hy_v3", {**_EXPERTS, "head_dim": 8}),
    "HY 4": Family("hy_v4", {**_MLA, **_INDEX, **_EXPERTS, "head_dim": 8}),
    "HyperCLOVA X": Family("hyperclovax", {"head_dim": 8}),
    "Inkling": Family(
        "inkling_text",
        {
            **_MLA,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
            "sliding_window_size": 8,
            "d_rel": 8,
            "rel_extent": 16,
            "logits_mup_width_multiplier": 1.0,
            "layer_types": ["hybrid_sliding", "hybrid"] * 2,
            "mlp_layer_types": ["dense", "sparse"] * 2,
        },
    ),
    "Jais 2": Family("jais2", {"head_dim": 8}),
    "JetMoE": Family("jetmoe", {**_LOCAL, "kv_channels": 8, "num_key_value_heads": 2}),
    "Kimi Linear": Family(
        "kimi_linear",
        {
            **_MLA,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "qk_head_dim": 16,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
    "Laguna": Family("laguna", {**_EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 24}),
    "LFM2 MoE": Family(
        "lfm2_moe", {**_EXPERTS, "layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 1}
    ),
    "LongCat-Flash": Family(
        "longcat_flash",
        {**_MLA, "head_dim": 8, "num_layers": 2, "expert_ffn_hidden_size": 24, "moe_topk": 2, "zero_expert_num": 2},
    ),
    "Mamba 2": Family("mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16}),
    "Mellum": Family("mellum", {**_EXPERTS, "head_dim": 8, "sliding_window": 8, "layer_types": _LOCAL_AND_FULL}),
    "MiMo-V2-Flash": Family(
        "mimo_v2_flash",
        {**_MLA, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "layer_types": _LOCAL_AND_FULL},
    ),
    "MiniCPM 3": Family("minicpm3", {**_MLA, "dim_model_base": 32, "scale_emb": 1}),
    "MiniMax-M2": Family("minimax_m2", {**_LOCAL, "head_dim": 8}),
    "MiniMax-M3": Family(
        "minimax_m3_vl_text",
        {
            **_LOCAL,
            "head_dim": 8,
            "rotary_dim": 8,
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 24,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_block_size": 4,
            "index_topk_blocks": 2,
            "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        },
    ),
    "Ministral": Family("ministral", {"head_dim": 8, "sliding_window": 8}),
    "nanochat": Family("nanochat", {}),
    "Nemotron": Family("nemotron", {"head_dim": 8}),
    "Nemotron-H": Family(
        "nemotron_h",
        {
            **_EXPERTS,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 24,
            "head_dim": 8,
            "ssm_state_size": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "chunk_size": 16,
            "use_mamba_kernels": False,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        },
    ),
    "OLMo": Family("olmo", {}),
    "OLMo hybrid": Family("olmo_hybrid", {**_GDN, "layer_types": ["linear_attention", "full_attention"] * 2}),
    "Phi-2": Family("phi", {}),
    "Qwen3.5 MoE": Family(
        "qwen3_5_moe_text", {**_EXPERTS, **_GDN, "shared_expert_intermediate_size": 24, "initializer_range": 0.15}
    ),
    "Seed-OSS": Family("seed_oss", {"head_dim": 8}),
    "Solar Open": Family("solar_open", {**_EXPERTS, "n_routed_experts": 4, "head_dim": 8}),
    "VaultGemma": Family(
        "vaultgemma",
        {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "layer_types": _LOCAL_AND_FULL},
    ),
    "Zamba 2": Family(
        "zamba2",
        {
            "num_key_value_heads": 4,
            "adapter_rank": 4,
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
            "chunk_size": 16,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "hybrid_layer_ids": [1, 3],
            "use_mamba_kernels": False,
        },
    ),
    "ZAYA": Family(
        "zaya",
        {
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 24,
            "head_dim": 8,
            "router_hidden_size": 16,
            "sliding_window": 8,
            "layer_types": ["hybrid", "hybrid_sliding"] * 2,
        },
    ),
}
"""Variants of families, by the names that people know. The first values are sizes; what matters is the rest."""

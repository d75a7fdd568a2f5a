"""Model folders that vLLM on a CPU takes: heads of 32 dimensions, two layers, one token per byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from skyrl.models.files.naming import named_weights
from tests.inference.nano import EOS, PAD, VOCABULARY, nano_tokenizer

FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def small_model(
    family: str = "qwen2", *, tied: bool = False, seed: int = 0, head_dim: int = 32, vocabulary: int = VOCABULARY
) -> Any:
    """Random weights, large enough that every token of the context counts."""
    config, model, extra = FAMILIES[family]
    torch.manual_seed(seed)
    built = model(
        config(
            vocab_size=vocabulary,
            hidden_size=2 * head_dim,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=256,
            initializer_range=0.2,
            eos_token_id=EOS,
            pad_token_id=PAD,
            tie_word_embeddings=tied,
            **extra,
        )
    )
    return built.eval()


def saved(folder: Path, model: Any) -> Path:
    """The folder, with the model and its tokenizer in it."""
    model.save_pretrained(folder)
    tokenizer = nano_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def changed(model: Any, seed: int) -> tuple[tuple[str, Tensor], ...]:
    """Adds noise to every weight of the model, in place; all of them, each tied weight once."""
    noise = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += 0.05 * torch.randn(parameter.shape, generator=noise)
    return tuple(named_weights(model))

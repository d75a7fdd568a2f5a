"""A miniature of a model, with its architecture, tokenizer and chat template, few and narrow layers, and random
weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from skyrl.models.files.loading import load_config, load_tokenizer
from skyrl.models.saving.storing import save_pretrained

LAYERS, HIDDEN, HEAD_SIZE, INNER, EXPERTS = 2, 64, 8, 128, 8


def shrink(path: str, folder: Path, *, seed: int = 0) -> str:
    """Write the miniature of the model `path` into `folder`. Returns one sentence that lists the changed sizes.

    Heads of queries and keys keep their numbers, and inner widths are multiples of 128, so that parallel sizes that
    divide the model also divide the miniature. Raises `ModelError` if configuration or tokenizer cannot be loaded.
    """
    config: Any = load_config(path, {})
    text: Any = config.get_text_config()
    before = (text.num_hidden_layers, text.hidden_size)
    for name, value in _sizes(text).items():
        setattr(text, name, value)
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(text, dtype=torch.float32)
    tokenizer: Any = load_tokenizer(path)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    save_pretrained(model.state_dict(), model, tokenizer, folder)
    return f"{before[0]} layers of width {before[1]:,} are {LAYERS} of width {HIDDEN}, with random weights"


def _sizes(config: PretrainedConfig) -> dict[str, Any]:
    """The miniature's values for the sizes in the configuration."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": min(LAYERS, config.num_hidden_layers),
        "hidden_size": HIDDEN,
        "head_dim": HEAD_SIZE,
        "intermediate_size": INNER,
        "moe_intermediate_size": INNER,
    }
    for name in ("num_experts", "num_local_experts"):
        if getattr(config, name, None):
            sizes[name] = max(EXPERTS, config.num_experts_per_tok)
    if getattr(config, "layer_types", None):
        sizes["layer_types"] = config.layer_types[:LAYERS]
    has = {name for name in sizes if hasattr(config, name)} | {"head_dim"}
    return {name: value for name, value in sizes.items() if name in has}

"""Sizes of common models, for planning a run before its model is downloaded: values of their `config.json` on the
Hugging Face hub. A base model and its instruct version have the same sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from skyrl.planning.model_shape import ModelShape, shape_of

Facts = Mapping[str, Any]

_COLUMNS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)


def _models(shared: Facts, table: Mapping[str, tuple[int | bool, ...]]) -> dict[str, Facts]:
    return {name: {**shared, **dict(zip(_COLUMNS, row, strict=True))} for name, row in table.items()}


KNOWN_MODELS: Mapping[str, Facts] = {
    **_models(
        {"model_type": "qwen2", "vocab_size": 151936},
        {
            "Qwen/Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 64, True),
            "Qwen/Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 128, True),
            "Qwen/Qwen2.5-3B": (2048, 11008, 36, 16, 2, 128, True),
        },
    ),
    **_models(
        {"model_type": "qwen2", "vocab_size": 152064},
        {
            "Qwen/Qwen2.5-7B": (3584, 18944, 28, 28, 4, 128, False),
            "Qwen/Qwen2.5-14B": (5120, 13824, 48, 40, 8, 128, False),
            "Qwen/Qwen2.5-32B": (5120, 27648, 64, 40, 8, 128, False),
            "Qwen/Qwen2.5-72B": (8192, 29568, 80, 64, 8, 128, False),
        },
    ),
    **_models(
        {"model_type": "qwen3", "vocab_size": 151936},
        {
            "Qwen/Qwen3-0.6B": (1024, 3072, 28, 16, 8, 128, True),
            "Qwen/Qwen3-1.7B": (2048, 6144, 28, 16, 8, 128, True),
            "Qwen/Qwen3-4B": (2560, 9728, 36, 32, 8, 128, True),
            "Qwen/Qwen3-8B": (4096, 12288, 36, 32, 8, 128, False),
            "Qwen/Qwen3-14B": (5120, 17408, 40, 40, 8, 128, False),
            "Qwen/Qwen3-32B": (5120, 25600, 64, 64, 8, 128, False),
        },
    ),
    **_models(
        {"model_type": "qwen3_moe", "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8},
        {
            "Qwen/Qwen3-30B-A3B": (2048, 768, 48, 32, 4, 128, False),
            "Qwen/Qwen3-235B-A22B": (4096, 1536, 94, 64, 4, 128, False),
        },
    ),
    **_models(
        {"model_type": "llama", "vocab_size": 128256},
        {
            "meta-llama/Llama-3.2-1B": (2048, 8192, 16, 32, 8, 64, True),
            "meta-llama/Llama-3.2-3B": (3072, 8192, 28, 24, 8, 128, True),
            "meta-llama/Llama-3.1-8B": (4096, 14336, 32, 32, 8, 128, False),
            "meta-llama/Llama-3.1-70B": (8192, 28672, 80, 64, 8, 128, False),
            "meta-llama/Llama-3.3-70B": (8192, 28672, 80, 64, 8, 128, False),
            "meta-llama/Llama-3.1-405B": (16384, 53248, 126, 128, 8, 128, False),
        },
    ),
}
"""Hub name of the base model -> values of its `config.json`."""

_VARIANT = re.compile(r"-(base|instruct|it|math|coder|thinking|\d{4})(?=-|$)", re.IGNORECASE)


def known_shape(name: str) -> ModelShape | None:
    """The sizes of a model by its hub name, for known families and sizes with any variant and owner; else None."""
    plain = _plain(name)
    model_facts = next((facts for known, facts in KNOWN_MODELS.items() if _plain(known) == plain), None)
    return None if model_facts is None else shape_of(model_facts)


def _plain(name: str) -> str:
    """The name reduced to family and size: `qwen2.5-7b` from `Qwen/Qwen2.5-Math-7B-Instruct`."""
    return _VARIANT.sub("", name.rpartition("/")[2]).lower()

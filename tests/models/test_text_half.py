"""Checkpoints of multimodal models, of which a learner is the language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from skyrl.models.files.loading import load_causal_lm

TEXT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "max_position_embeddings": 64,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny Qwen3.5 that also sees, in a folder."""
    torch.manual_seed(0)
    model: Any = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=TEXT, vision_config=VISION)).eval()
    folder = tmp_path_factory.mktemp("whole")
    model.save_pretrained(folder)
    return folder, model


def test_a_learner_is_the_language_model_and_computes_what_the_whole_does(vision_model: tuple[Path, Any]) -> None:
    folder, model = vision_model
    text = load_causal_lm(str(folder), dtype=torch.float32, attention="sdpa", device=torch.device("cpu")).eval()
    assert type(text).__name__ == "Qwen3_5ForCausalLM"
    assert not [name for name, _ in text.named_parameters() if "visual" in name]
    ids = torch.arange(9).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(text(input_ids=ids).logits, model(input_ids=ids).logits)

"""A miniature has the architecture, heads, vocabulary and template of its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from skyrl.errors import ModelError
from skyrl.models.saving.shrinking import shrink


def test_a_miniature_is_narrow_and_speaks_as_its_model_does(nano: Path, tmp_path: Path) -> None:
    summary = shrink(str(nano / "model"), tmp_path / "small")
    before, after = (AutoConfig.from_pretrained(folder) for folder in (nano / "model", tmp_path / "small"))
    assert summary == "2 layers of width 32 are 2 of width 64, with random weights"
    assert after.num_attention_heads == before.num_attention_heads
    assert after.num_key_value_heads == before.num_key_value_heads
    assert after.vocab_size == before.vocab_size
    small, original = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "small", nano / "model"))
    assert small("a b").input_ids == original("a b").input_ids
    assert small.chat_template == original.chat_template


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config, Qwen3MoeConfig])
def test_any_architecture_becomes_small(kind: type, nano: Path, tmp_path: Path) -> None:
    for file in (nano / "model").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    large = kind(vocab_size=260, hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8)
    (tmp_path / "config.json").write_text(json.dumps({**large.to_dict(), "architectures": None}))
    shrink(str(tmp_path), tmp_path / "small")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert model.config.num_attention_heads == 64
    assert sum(weight.numel() for weight in model.parameters()) < 2_000_000


def test_a_model_without_a_tokenizer_is_refused(nano: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((nano / "model" / "config.json").read_bytes())
    with pytest.raises(ModelError, match="tokenizer"):
        shrink(str(tmp_path), tmp_path / "small")

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from skyrl.models.files.naming import named_weights, tied_names

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, folder: Path) -> Any:
    return Qwen2ForCausalLM(Qwen2Config.from_pretrained(folder, tie_word_embeddings=request.param))


def test_a_tied_head_travels_under_the_name_of_the_embedding_only(model: Any) -> None:
    names = [name for name, _ in named_weights(model)]
    if model.config.tie_word_embeddings:
        assert tied_names(model) == {HEAD: EMBEDDING}
        assert HEAD not in names
    else:
        assert tied_names(model) == {}
        assert HEAD in names


def test_every_entry_of_the_state_dict_travels_once_and_in_its_order(model: Any) -> None:
    names = [name for name, _ in named_weights(model)]
    assert names == [name for name in model.state_dict() if name not in tied_names(model)]


def test_buffers_that_are_stored_travel_too(model: Any) -> None:
    model.register_buffer("scale", torch.ones(2))
    model.register_buffer("cache", torch.ones(2), persistent=False)
    names = dict(named_weights(model))
    assert "scale" in names
    assert "cache" not in names


def test_writing_into_a_weight_changes_the_model_and_needs_no_gradient(model: Any) -> None:
    for _, weight in named_weights(model):
        assert not weight.requires_grad
        weight.zero_()
    assert all((weight == 0).all() for weight in model.parameters())

"""What drops while a model learns, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl.config import SkyRLLoraConfig
from skyrl.errors import ModelError
from skyrl.models.dropout import dropping, dropping_modules
from tests.models.test_lora import IDS, LORA, adapted, trained

CPU = torch.device("cpu")


def with_dropout(nano: Path, share: float) -> Any:
    return AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32, attention_dropout=share).eval()


def outputs_of(model: Any, modules: list[torch.nn.Module]) -> list[torch.Tensor]:
    """Drawn from the seeds 1, 1 and 2."""
    outputs = []
    for seed in (1, 1, 2):
        with dropping(modules, CPU, seed):
            outputs.append(model(IDS).logits)
    return outputs


def test_inputs_of_adapters_are_dropped_in_updates_alone_and_as_the_seed_says(nano: Path) -> None:
    lora = SkyRLLoraConfig(rank=4, alpha=8, dropout=0.5)
    model = trained(adapted(nano, lora))
    still = model(IDS).logits
    one, repeat, other = outputs_of(model, dropping_modules(model, lora, own=False, field="use_dropout"))
    assert torch.equal(one, repeat)
    assert not torch.equal(one, other)
    assert torch.equal(model(IDS).logits, still)


def test_a_models_own_dropout_is_off_unless_it_is_asked_for(nano: Path) -> None:
    model = with_dropout(nano, 0.5)
    still = model(IDS).logits
    assert dropping_modules(model, LORA, own=False, field="use_dropout") == []
    one, repeat, other = outputs_of(model, dropping_modules(model, LORA, own=True, field="use_dropout"))
    assert torch.equal(one, repeat)
    assert not torch.equal(one, other) and not torch.equal(one, still)
    assert torch.equal(model(IDS).logits, still)
    assert not any(module.training for module in model.modules())


def test_dropout_of_a_model_that_has_none_is_refused(nano: Path) -> None:
    with pytest.raises(ModelError, match=r"trainer\.policy\.use_dropout: the model's configuration sets no dropout"):
        dropping_modules(with_dropout(nano, 0.0), LORA, own=True, field="trainer.policy.use_dropout")

"""Adapters that were stored: a model starts from them, a reference has them in its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from skyrl.config import SkyRLLoraConfig, TrainerConfig
from skyrl.errors import ModelError
from skyrl.learners.workers.roles import RefWorker
from skyrl.models.files.stored_adapter import merge_adapters
from skyrl.models.lora import with_adapter
from skyrl.training.objective import policy_objective
from skyrl.tree import evolve_at
from tests.learners.conftest import small
from tests.learners.rows import batch
from tests.learners.updating import PolicyWorker

__all__ = ["small"]

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
FIELD = "trainer.policy.model.lora"


def lora(nano: Path) -> SkyRLLoraConfig:
    return SkyRLLoraConfig(rank=4, alpha=8, target_modules=("q_proj",), path=str(nano / "adapter"))


def plain(nano: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32).eval()


def test_a_model_starts_from_the_stored_adapter_as_peft_reads_it(nano: Path) -> None:
    from peft import PeftModel

    reference = PeftModel.from_pretrained(plain(nano), nano / "adapter")
    ours = with_adapter(plain(nano), lora(nano), seed=0, field=FIELD).eval()
    torch.testing.assert_close(ours(IDS).logits, reference(IDS).logits, rtol=0, atol=1e-6)
    assert (ours(IDS).logits - plain(nano)(IDS).logits).abs().max() > 0.1


def test_a_merged_model_computes_the_same_without_modules_of_adapters(nano: Path) -> None:
    adapted = with_adapter(plain(nano), lora(nano), seed=0, field=FIELD).eval()
    before = adapted(IDS).logits
    merged = merge_adapters(adapted)
    torch.testing.assert_close(merged(IDS).logits, before, rtol=1e-5, atol=1e-5)
    assert merged.state_dict().keys() == plain(nano).state_dict().keys()


def test_a_merged_weight_is_that_of_the_formula(nano: Path) -> None:
    name = "model.layers.0.self_attn.q_proj"
    stored = load_file(nano / "adapter" / "adapter_model.safetensors")
    a, b = (stored[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    merged = merge_adapters(with_adapter(plain(nano), lora(nano), seed=0, field=FIELD))
    expected = plain(nano).get_parameter(f"{name}.weight") + 8 / 4 * b @ a
    torch.testing.assert_close(merged.get_parameter(f"{name}.weight"), expected, rtol=1e-5, atol=1e-5)


async def test_a_reference_with_the_adapter_that_a_policy_starts_from_scores_like_it(
    nano: Path, small: TrainerConfig
) -> None:
    trainer = evolve_at(evolve_at(small, "policy.model.lora", lora(nano)), "ref.model.lora", lora(nano))
    policy, reference = PolicyWorker(trainer, policy_objective(trainer.algorithm)), RefWorker(trainer)
    scores = await reference.score(batch(4))
    torch.testing.assert_close(scores, await policy.score(batch(4)), rtol=1e-5, atol=1e-5)
    assert (scores - await RefWorker(small).score(batch(4))).abs().max() > 0.1


def without_a_layer(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if ".layers.0." in name}, folder / "adapter_model.safetensors"
    )


def with_a_layer_more(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    more = {name.replace("q_proj", "v_proj"): tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors | more, folder / "adapter_model.safetensors")


def with_another_width(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    wide = {name: torch.zeros(4, 64) if "lora_A" in name else tensor for name, tensor in tensors.items()}
    save_file(wide, folder / "adapter_model.safetensors")


def with_settings(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def torn(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"no tensors")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, r"lora\.path: .* contains no adapter .* give a folder with PEFT's"),
        (torn, r"lora\.path: .* contains no adapter"),
        (without_a_layer, r"has none for model\.layers\.1\.self_attn\.q_proj, which would get one"),
        (with_a_layer_more, r"has one for model\.layers\.0\.self_attn\.v_proj, which would get none"),
        (with_another_width, r"has shape \(4, 64\), but the model expects \(4, 32\)"),
        (with_settings(r=2), r"lora\.rank = 4, but the adapter in .* has 2: set it to that"),
        (with_settings(lora_alpha=3), r"lora\.alpha = 8, but the adapter in .* has 3"),
        (with_settings(use_dora=True), r"an adapter with use_dora = True is not supported"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    spoil: Callable[[Path], None], message: str, nano: Path, tmp_path: Path
) -> None:
    shutil.copytree(nano / "adapter", tmp_path / "adapter")
    spoil(tmp_path / "adapter")
    stored = evolve(lora(nano), path=str(tmp_path / "adapter"))
    with pytest.raises(ModelError, match=message):
        with_adapter(plain(nano), stored, seed=0, field=FIELD)

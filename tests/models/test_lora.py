from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl.config import SkyRLLoraConfig
from skyrl.errors import ModelError
from skyrl.models.files.naming import named_weights
from skyrl.models.lora import merge_adapters, merged_shapes, with_adapter

LORA = SkyRLLoraConfig(rank=4, alpha=8)
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def adapted(nano: Path, lora: SkyRLLoraConfig = LORA, seed: int = 0) -> Any:
    model = AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32)
    return with_adapter(model, lora, seed=seed, field="trainer.policy.model.lora").eval()


def trained(model: Any) -> Any:
    """As if it had learned: B is no longer zero."""
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight += torch.randn(weight.shape, generator=noise)
    return model


def test_an_adapter_changes_nothing_before_it_has_learned(nano: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32).eval()
    torch.testing.assert_close(adapted(nano)(IDS).logits, plain(IDS).logits, rtol=0, atol=0)


def test_only_the_adapter_learns_and_every_linear_layer_but_the_head_has_one(nano: Path) -> None:
    model = adapted(nano)
    learning = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert all("lora_" in name for name in learning)
    assert len(learning) == 2 * 2 * 7  # A and B, two layers, q k v o gate up down
    assert not any("lm_head" in name for name in learning)


def test_merged_weights_have_the_names_of_the_plain_model_and_compute_the_same(nano: Path) -> None:
    model = trained(adapted(nano))
    plain = AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32).eval()
    weights = dict(merge_adapters(named_weights(model), LORA))
    assert weights.keys() == dict(named_weights(plain)).keys()
    assert list(weights) == [name for name, _ in merged_shapes(named_weights(model))]
    before = plain(IDS).logits
    plain.load_state_dict(weights, strict=False)
    torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)
    assert (plain(IDS).logits - before).abs().max() > 0.1


def test_a_layer_is_merged_by_the_formula() -> None:
    config = SkyRLLoraConfig(rank=1, alpha=3)
    names = ("x.lora_B.default.weight", "x.base_layer.bias", "x.base_layer.weight", "x.lora_A.default.weight", "y")
    values = ([[1.0], [2.0]], [7.0, 7.0], [[1.0, 1.0], [1.0, 1.0]], [[10.0, 0.0]], [5.0])
    weights = dict(merge_adapters(((n, torch.tensor(v)) for n, v in zip(names, values, strict=True)), config))
    assert list(weights) == ["x.bias", "x.weight", "y"]
    assert weights["x.weight"].tolist() == [[31.0, 1.0], [61.0, 1.0]]  # W + 3 / 1 B A


def test_what_an_adapter_starts_from_follows_from_the_seed_alone(nano: Path) -> None:
    torch.manual_seed(5)
    first = dict(adapted(nano, seed=1).named_parameters())
    state = torch.random.get_rng_state()
    repeat = dict(adapted(nano, seed=1).named_parameters())
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(first[name], repeat[name]) for name in first)
    other = dict(adapted(nano, seed=2).named_parameters())
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    ("settings", "modules"),
    [
        ({"target_modules": ("q_proj", "v_proj")}, {"q_proj", "v_proj"}),
        ({"target_modules": r".*\.layers\.0\..*(up|down)_proj"}, {"up_proj", "down_proj"}),
        ({"exclude_modules": r".*mlp.*"}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"init_method": "gaussian", "target_modules": ("q_proj",)}, {"q_proj"}),
        ({"init_method": "orthogonal", "target_modules": ("q_proj",)}, {"q_proj"}),
    ],
)
def test_modules_are_chosen_by_name_or_expression(settings: dict[str, Any], modules: set[str], nano: Path) -> None:
    model = adapted(nano, SkyRLLoraConfig(rank=4, alpha=8, **settings))
    names = {name.split(".")[-4] for name, _ in model.named_parameters() if "lora_A" in name}
    assert names == modules


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("nothing",), "no adapter fits this model"),
        (("embed_tokens",), "matches model.embed_tokens, a Embedding: adapters are for linear layers"),
        (("lm_head",), "matches lm_head, whose weight is also used elsewhere"),
    ],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_modules_that_cannot_have_one_are_named(targets: tuple[str, ...], message: str, nano: Path) -> None:
    with pytest.raises(ModelError, match=f"trainer.policy.model.lora.*{message}"):
        adapted(nano, SkyRLLoraConfig(rank=4, alpha=8, target_modules=targets))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ("q_proj", "w_proj")}, "target_modules: no module of this model is called 'w_proj'"),
        ({"exclude_modules": ("w_proj",)}, "exclude_modules: no module of this model is called 'w_proj'"),
        ({"exclude_modules": "self_attn.q_proj"}, "exclude_modules: no module of this model is called"),
    ],
)
@pytest.mark.filterwarnings("ignore:You have passed exclude_modules")
def test_names_that_no_module_has_are_refused(settings: dict[str, Any], message: str, nano: Path) -> None:
    with pytest.raises(ModelError, match=f"trainer.policy.model.lora.{message}"):
        adapted(nano, SkyRLLoraConfig(rank=4, alpha=8, **settings))

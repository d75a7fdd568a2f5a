from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from skyrl.errors import ModelError
from skyrl.models.files.loading import load_causal_lm


def load(path: Path | str, **changes: Any) -> Any:
    settings: dict[str, Any] = {"dtype": torch.float32, "attention": "sdpa", "device": torch.device("cpu")} | changes
    return load_causal_lm(str(path), **settings)


def configure(folder: Path, **changes: Any) -> None:
    """Overwrite entries of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the stored weights."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def test_a_model_has_the_stored_weights_in_the_type_that_was_asked_for(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    model = load(folder, dtype=torch.bfloat16, attention="eager")
    assert model.config._attn_implementation == "eager"
    for name, weight in stored.items():
        torch.testing.assert_close(model.state_dict()[name], weight.bfloat16(), rtol=0, atol=0)


def test_a_path_may_start_at_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert load("~/model").config.model_type == "qwen2"


def test_a_folder_that_cannot_be_a_model_is_told_before_transformers_is_asked(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model folder"):
        load(tmp_path / "gone")


def test_a_hub_model_that_cannot_be_fetched_is_told() -> None:
    with pytest.raises(ModelError, match="nobody/nothing cannot be loaded: .* the hub cannot be reached"):
        load("nobody/nothing")


@pytest.mark.parametrize("damage", [lambda content: b"garbage", lambda content: content[: len(content) // 2]])
def test_damaged_weights_are_told(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelError, match="its weights are damaged or incomplete .* copy them again"):
        load(folder)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [("hyena9", "transformers does not know its architecture"), ("vit", "it is not a causal language model")],
)
def test_an_architecture_that_cannot_be_trained_is_told(folder: Path, model_type: str, message: str) -> None:
    configure(folder, model_type=model_type)
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_weights_of_another_shape_are_told(folder: Path) -> None:
    configure(folder, intermediate_size=64)
    with pytest.raises(ModelError, match="its weights have other shapes than its config.json says"):
        load(folder)


def test_weights_that_are_not_there_are_refused_instead_of_drawn_at_random(folder: Path) -> None:
    rewrite(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(
        ModelError, match=r"is incomplete: no weights are stored for model.layers.1.mlp.up_proj.weight$"
    ):
        load(folder)


def test_a_damaged_configuration_is_told(folder: Path) -> None:
    (folder / "config.json").write_text("{not json")
    with pytest.raises(ModelError, match="its config.json is damaged"):
        load(folder)


def test_flash_attention_that_is_not_installed_is_told_with_the_way_out(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"set trainer\.flash_attn = false"):
        load(folder, attention="flash_attention_2")


def test_a_failure_that_nobody_foresaw_keeps_its_first_line(folder: Path) -> None:
    with pytest.raises(ModelError, match="cannot be loaded: ValueError: .*psychic") as caught:
        load(folder, attention="psychic")
    assert "\n" not in str(caught.value)


def test_a_cuda_device_that_is_not_there_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match=r"set trainer\.device = cpu"):
        load(folder, device=torch.device("cuda"))

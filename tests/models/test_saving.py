from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from skyrl.errors import RunError
from skyrl.models.files.loading import load_causal_lm, load_tokenizer
from skyrl.models.files.naming import named_weights
from skyrl.models.saving.storing import Export, save_pretrained

IDS = torch.tensor([[3, 1, 4, 1, 5]])


def load(folder: Path) -> tuple[Any, Any]:
    device = torch.device("cpu")
    model = load_causal_lm(str(folder), dtype=torch.float32, attention="sdpa", device=device)
    return model, load_tokenizer(str(folder))


def store(model: Any, tokenizer: Any, folder: Path) -> None:
    save_pretrained(dict(named_weights(model)), model, tokenizer, folder)


def trained(model: Any) -> Any:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    return model


def test_a_stored_model_computes_the_same_when_transformers_loads_it(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load(folder)
    store(trained(model), tokenizer, tmp_path / "export")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    torch.testing.assert_close(reloaded(IDS).logits, model(IDS).logits, rtol=0, atol=0)
    assert reloaded.generation_config.eos_token_id == model.generation_config.eos_token_id
    reader = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert (reader.chat_template, reader.encode("sort: ab")) == (tokenizer.chat_template, tokenizer.encode("sort: ab"))


def test_a_tied_head_is_stored_once(folder: Path, tmp_path: Path) -> None:
    store(*load(folder), tmp_path / "export")
    assert "lm_head.weight" not in load_file(tmp_path / "export" / "model.safetensors")


def test_a_head_of_its_own_is_stored_too(folder: Path, tmp_path: Path) -> None:
    tied, tokenizer = load(folder)
    model = Qwen2ForCausalLM(Qwen2Config(**tied.config.to_dict() | {"tie_word_embeddings": False}))
    store(model, tokenizer, tmp_path / "export")
    reloaded, _ = load(tmp_path / "export")
    torch.testing.assert_close(reloaded(IDS).logits, model.eval()(IDS).logits, rtol=0, atol=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("configured", [True, False])
@pytest.mark.parametrize("weights", ["equal", "other", "other in one number", "no head"])
def test_the_configuration_says_whether_the_head_is_tied(
    folder: Path, tmp_path: Path, configured: bool, weights: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = load(folder)
    embedding = model.get_input_embeddings().weight.detach()
    tensors = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    other = embedding.clone()
    other[-1, -1] += 1.0
    head = {"equal": embedding.clone(), "other": -embedding, "other in one number": other}.get(weights)
    tensors = {name: weight for name, weight in tensors.items() if name != "lm_head.weight"}
    tensors |= {} if head is None else {"lm_head.weight": head}
    model.config.tie_word_embeddings = configured
    store_weights = tmp_path / "like"
    model.config.save_pretrained(store_weights)
    tokenizer.save_pretrained(store_weights)
    Export(like=str(store_weights), folder=tmp_path / "export")(iter(tensors.items()))
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    hidden = reloaded.model(IDS).last_hidden_state
    torch.testing.assert_close(
        reloaded(IDS).logits, hidden @ (embedding if head is None else head).T, rtol=0, atol=1e-5
    )
    tied = reloaded.config.tie_word_embeddings
    assert tied is {"equal": configured, "no head": True}.get(weights, False)
    assert "both are present in the checkpoints" not in caplog.text


def test_an_older_model_is_replaced_and_nothing_is_left_beside_it(folder: Path) -> None:
    model, tokenizer = load(folder)
    (folder / "stale.txt").touch()
    store(trained(model), tokenizer, folder)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert not (folder / "stale.txt").exists()
    reloaded, _ = load(folder)
    torch.testing.assert_close(reloaded(IDS).logits, model(IDS).logits, rtol=0, atol=0)


def test_what_an_interrupted_export_left_is_cleared_by_the_next(folder: Path) -> None:
    shutil.copytree(folder, folder.with_name(".model.new"))
    store(*load(folder), folder)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_failing_disk_is_told_and_the_older_model_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load(folder)
    before = (folder / "model.safetensors").read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenizer, "save_pretrained", full)
    with pytest.raises(RunError, match="cannot be stored in .*: .*No space left"):
        store(trained(model), tokenizer, folder)
    assert (folder / "model.safetensors").read_bytes() == before


def test_sampling_settings_that_contradict_each_other_do_not_cost_the_model(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load(folder)
    model.generation_config = GenerationConfig(do_sample=False, temperature=0.6)
    store(model, tokenizer, tmp_path / "export")
    stored = GenerationConfig.from_pretrained(tmp_path / "export")
    assert (stored.do_sample, stored.temperature) == (True, 0.6)


def test_weights_alone_are_stored_as_the_model_they_started_from(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load(folder)
    store(trained(model), tokenizer, tmp_path / "whole")
    Export(like=str(folder), folder=tmp_path / "export")(named_weights(model))
    files = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "export").iterdir()} == files

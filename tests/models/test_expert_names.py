"""Experts under the names of files: those that transformers writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from skyrl.config import SkyRLLoraConfig
from skyrl.errors import ModelError, WeightSyncError
from skyrl.inference.servers.http_connection import Connection
from skyrl.inference.servers.server_api import ServerDeadlines
from skyrl.inference.servers.sglang_server import SGLangServer
from skyrl.inference.vllm.model import expected_weights
from skyrl.models.files.naming import named_weights, refuse_unnamed_experts, stored_names
from skyrl.models.lora import merge_adapters, with_adapter
from skyrl.models.saving.storing import save_pretrained
from skyrl.weight_receiver.incoming_weights import FolderWeights
from tests.inference.nano import nano_model, nano_tokenizer

MIXTURES = ("qwen3_moe", "mixtral")


@pytest.mark.parametrize("kind", MIXTURES)
def test_names_and_values_are_those_of_the_files_that_an_export_writes(kind: str, tmp_path: Path) -> None:
    model = nano_model(kind)
    save_pretrained(dict(named_weights(model)), model, nano_tokenizer(), tmp_path / "export")
    in_files = load_file(tmp_path / "export" / "model.safetensors")
    named = dict(stored_names(named_weights(model), kind))
    assert named.keys() == in_files.keys()
    assert all(torch.equal(named[name], tensor) for name, tensor in in_files.items())
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32).state_dict()
    assert all(torch.equal(reloaded[name], tensor) for name, tensor in named_weights(model))


def test_a_model_without_experts_keeps_its_names() -> None:
    weights = list(named_weights(nano_model("qwen3")))
    assert [name for name, _ in stored_names(iter(weights), "qwen3")] == [name for name, _ in weights]


def test_experts_whose_names_are_not_known_are_refused() -> None:
    with pytest.raises(ModelError, match="dbrx in inference servers are unknown; supported: qwen2_moe, qwen3_moe"):
        refuse_unnamed_experts(iter(["model.layers.0.mlp.experts.down_proj"]), "dbrx")


async def test_a_server_that_would_read_other_names_gets_no_files(tmp_path: Path) -> None:
    nano_model("mixtral").save_pretrained(tmp_path)
    expected = expected_weights(str(tmp_path))
    connection = Connection("http://127.0.0.1:1")
    server = SGLangServer(connection, connection, ServerDeadlines())
    with pytest.raises(WeightSyncError, match="would read the experts of this model under other names"):
        await server.load_weights(FolderWeights(path=str(tmp_path), weights=()), 1, expected, "finish")


@pytest.mark.parametrize("targets", ["all-linear", r".*\.[qkvo]_proj"])
def test_adapters_learn_on_the_attention_of_a_mixture_of_experts(targets: str) -> None:
    lora = SkyRLLoraConfig(rank=4, alpha=8, target_modules=targets)
    plain = dict(named_weights(nano_model("qwen3_moe")))
    model = with_adapter(nano_model("qwen3_moe"), lora, seed=0, field="lora")
    learning = {name.split(".")[4] for name, weight in model.named_parameters() if weight.requires_grad}
    assert learning == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert dict(merge_adapters(named_weights(model), lora)).keys() == plain.keys()


@pytest.mark.parametrize("target", ["down_proj", "mlp.experts", "gate_proj"])
def test_adapters_for_experts_are_refused_with_the_reason(target: str) -> None:
    lora = SkyRLLoraConfig(rank=4, alpha=8, target_modules=("q_proj", target))
    with pytest.raises(ModelError, match=f"'{target}' belongs to the experts of this model, which get no adapters"):
        with_adapter(nano_model("qwen3_moe"), lora, seed=0, field="lora")

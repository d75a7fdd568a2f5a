"""Adapters that travel alone: computed beside the base weights, they give the learner's own log-probabilities."""

from __future__ import annotations

import asyncio
import copy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from skyrl.config import InferenceEngineConfig, SkyRLLoraConfig
from skyrl.errors import WeightSyncError
from skyrl.inference.adapters import shared, write_adapter
from skyrl.inference.engine import InferenceEngine
from skyrl.inference.servers.http_connection import Connection
from skyrl.inference.servers.http_engine import HttpEngine
from skyrl.inference.servers.server_api import ServerDeadlines
from skyrl.inference.servers.sglang_server import SGLangServer
from skyrl.inference.servers.vllm_server import VLLMServer
from skyrl.inference.torch.engine import TorchEngine
from skyrl.inference.vllm.engine import VLLMEngine
from skyrl.models.files.naming import named_weights
from skyrl.models.lora import adapter_alone, with_adapter
from skyrl.weight_receiver.incoming_weights import Adapter, FolderWeights, SharedWeights, weight_info
from skyrl.weight_sync.senders import FolderSender
from tests.inference.nano import full_forward_logprobs, nano_model, nano_tokenizer, prompts, request
from tests.inference.server_engines import vllm_server
from tests.inference.sglang_stand_in import SGLangStandIn
from tests.inference.vllm_host import Host
from tests.inference.vllm_models import saved, small_model
from tests.nano_run import metrics, train

LORA = SkyRLLoraConfig(rank=4, alpha=8)

ASKED = [request(prompt, temperature=1.0, count=2, max_generate_length=12) for prompt in prompts(5, 9)]


def learner(kind: str, seed: int = 3) -> Any:
    """The model with an adapter whose B is not zero, as after some updates."""
    model = with_adapter(nano_model(kind), LORA, seed=1, field="lora")
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                weight.add_(0.1 * torch.randn(weight.shape, generator=noise))
    return model.eval()


def tensors_of(model: Any) -> tuple[tuple[str, Tensor], ...]:
    return tuple(adapter_alone(iter(model.state_dict().items())))


def adapter_of(model: Any) -> Adapter:
    return shared(tensors_of(model), rank=LORA.rank, alpha=LORA.alpha)


async def give(engine: InferenceEngine, incoming: Any, version: int) -> None:
    await engine.pause()
    try:
        await engine.load_weights(incoming, version)
    finally:
        await engine.resume()


async def far_from(engine: InferenceEngine, model: Any, adapter: str | None = None) -> float:
    """Largest difference between the engine's log-probabilities, by the adapter of this name, and those of a forward
    pass of the model, in nats.
    """
    worst, requests = 0.0, [evolve(request, adapter=adapter) for request in ASKED]
    for source_request, drawn in zip(ASKED, await asyncio.gather(*map(engine.generate, requests)), strict=True):
        for completion in drawn:
            expected = full_forward_logprobs(model, source_request.prompt_ids, completion, 1.0)
            worst = max(worst, (torch.tensor(completion.logprobs) - expected).abs().max().item())
    return worst


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "qwen2, tied", "qwen2, eager"])
async def test_an_adapter_beside_the_weights_gives_the_learners_logprobs(kind: str) -> None:
    model, engine = learner(kind), TorchEngine(nano_model(kind), nano_tokenizer(), max_num_seqs=8)
    assert await far_from(engine, model) > 1e-2
    await give(engine, adapter_of(model), 1)
    assert await far_from(engine, model) < 1e-4
    newer = learner(kind, seed=4)
    await give(engine, adapter_of(newer), 2)
    assert await far_from(engine, newer) < 1e-4
    assert engine.weight_version == 2
    await engine.close()


async def test_the_base_weights_stay_what_they_were() -> None:
    base = nano_model()
    before = copy.deepcopy(base.state_dict())
    engine = TorchEngine(base, nano_tokenizer(), max_num_seqs=8)
    await give(engine, adapter_of(learner("qwen2")), 1)
    await engine.generate(ASKED[0])
    assert all(torch.equal(before[name], tensor) for name, tensor in base.state_dict().items())
    await engine.close()


async def test_whole_weights_take_the_adapter_away() -> None:
    engine = TorchEngine(nano_model(), nano_tokenizer(), max_num_seqs=8)
    await give(engine, adapter_of(learner("qwen2")), 1)
    other = nano_model(seed=7)
    await give(engine, SharedWeights(tuple(named_weights(other))), 2)
    assert await far_from(engine, other) < 1e-4
    await engine.close()


def foreign(tensors: dict[str, Tensor], fault: str) -> Iterator[tuple[str, Tensor]]:
    first = next(iter(tensors), "")
    for name, tensor in tensors.items():
        if fault == "half" and name == first:
            continue
        if fault == "shape" and name == first:
            tensor = torch.zeros(3, tensor.shape[1])
        yield (name.replace("q_proj", "no_proj") if fault == "module" else name), tensor


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("half", "the other half of model.layers.0.self_attn.q_proj's update is missing"),
        ("shape", r"has shape \(3, 32\), this layer expects \(4, 32\)"),
        ("module", "belongs to no linear layer of this model"),
        ("nothing", "it contains no tensors"),
    ],
)
async def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_kept(fault: str, message: str) -> None:
    model = learner("qwen2")
    engine = TorchEngine(nano_model(), nano_tokenizer(), max_num_seqs=8)
    await give(engine, adapter_of(model), 1)
    tensors = {} if fault == "nothing" else dict(tensors_of(learner("qwen2", seed=4)))
    with pytest.raises(WeightSyncError, match=message):
        await give(engine, shared(tuple(foreign(tensors, fault)), rank=4, alpha=8), 2)
    assert engine.weight_version == 1
    assert await far_from(engine, model) < 1e-4
    await engine.close()


async def test_an_adapter_that_was_changed_on_its_way_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of(learner("qwen2"))
    FolderSender(path=str(tmp_path), dtype="float32")(iter(tensors))
    infos = tuple(weight_info(name, tensor) for name, tensor in tensors)
    adapter = Adapter(tensors=FolderWeights(path=str(tmp_path), weights=infos), rank=4, alpha=8)
    write_adapter(adapter, tmp_path / "peft")
    spoilt = {name: tensor.clone() for name, tensor in tensors}
    spoilt[tensors[0][0]][0, 0] += 1
    save_file(spoilt, tmp_path / "00000.safetensors")
    engine = TorchEngine(nano_model(), nano_tokenizer(), max_num_seqs=8)
    with pytest.raises(WeightSyncError, match="was changed in transit"):
        await give(engine, adapter, 1)
    await engine.close()


def test_what_is_written_for_servers_is_an_adapter_of_peft(tmp_path: Path) -> None:
    from peft import PeftModel

    model = learner("qwen2")
    write_adapter(adapter_of(model), tmp_path)
    loaded: Any = PeftModel.from_pretrained(nano_model(), str(tmp_path))
    ids = torch.tensor([list(prompts(9)[0])])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


# SGLang's routes, over the torch engine


@contextmanager
def sglang(folder: Path, **options: Any) -> Iterator[tuple[SGLangStandIn, HttpEngine]]:
    """A server that keeps them, and an engine over it."""
    engine = TorchEngine(small_model(), nano_tokenizer(), max_num_seqs=16, max_model_len=96)
    with SGLangStandIn(engine, saved(folder / "model", small_model()), **options) as stand_in:
        server = SGLangServer(Connection(stand_in.url), Connection(stand_in.url), ServerDeadlines(start=60.0))
        yield stand_in, HttpEngine(server, model_path=str(folder / "model"), tokenizer=nano_tokenizer())


def sent_as_files(model: Any, path: Path) -> Adapter:
    tensors = tensors_of(model)
    path.mkdir(parents=True)
    FolderSender(path=str(path), dtype="float32")(iter(tensors))
    infos = tuple(weight_info(name, tensor) for name, tensor in tensors)
    return Adapter(tensors=FolderWeights(path=str(path), weights=infos), rank=LORA.rank, alpha=LORA.alpha)


async def test_sglang_gets_the_adapter_alone_under_a_name_of_its_own_and_forgets_the_one_before(tmp_path: Path) -> None:
    with sglang(tmp_path) as (stand_in, engine):
        assert await far_from(engine, vllm_learner(1)) > 1e-2
        for version in (1, 2):
            model = vllm_learner(version)
            await give(engine, sent_as_files(model, tmp_path / f"version-{version}"), version)
            assert await far_from(engine, model) < 1e-4
            assert [name.split("-")[0] + "-" + name.split("-")[-1] for name in stand_in.adapters] == [
                f"skyrl-{version}"
            ]
        drawn = await engine.generate(ASKED[0])
        assert {version for completion in drawn for version in completion.weight_versions} == {2}
        assert "/update_weights_from_disk" not in stand_in.asked
        await engine.close()


async def test_a_sglang_server_without_adapters_is_told_how_to_start(tmp_path: Path) -> None:
    with sglang(tmp_path, enable_lora=False) as (_, engine):
        with pytest.raises(WeightSyncError, match=r"--enable-lora, --max-lora-rank 4 .* LoRA is not enabled"):
            await give(engine, sent_as_files(vllm_learner(1), tmp_path / "sent"), 1)
        assert await far_from(engine, small_model()) < 1e-4
        await engine.close()


# vLLM, in process and as a server: a process of its own for either


def vllm_learner(seed: int) -> Any:
    model = with_adapter(small_model(), LORA, seed=1, field="lora")
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                weight.add_(0.1 * torch.randn(weight.shape, generator=noise))
    return model.eval()


def vllm_engine(kind: str, folder: Path) -> Any:
    if kind == "vllm":
        config = InferenceEngineConfig(backend="vllm", model_dtype="float32", async_engine=False, max_num_seqs=16)
        tokenizer = nano_tokenizer()
        return VLLMEngine(
            config, model_path=str(folder), device="cpu", tokenizer=tokenizer, lora_rank=LORA.rank, max_model_len=96
        )
    url = vllm_server(folder, "--enable-lora", "--max-lora-rank", "8")
    server = VLLMServer(Connection(url), Connection(url), ServerDeadlines(start=240.0, call=120.0))
    return HttpEngine(server, model_path=str(folder), heartbeat=120.0, tokenizer=nano_tokenizer())


async def twenty_updates(kind: str, folder: Path, path: Path) -> tuple[list[float], float]:
    """How far the engine is from the learner after each of 20 updates, in nats, and what a canary of the base says."""
    engine = vllm_engine(kind, folder)
    before = await far_from(engine, vllm_learner(0))
    differences = []
    for version in range(1, 21):
        model = vllm_learner(version)
        await give(engine, sent_as_files(model, path / f"version-{version}"), version)
        await asyncio.to_thread(shutil.rmtree, path / f"version-{version}")  # as a run does
        differences.append(await far_from(engine, model))
    assert engine.weight_version == 20
    await engine.close()
    return differences, before


@pytest.mark.long
@pytest.mark.parametrize("kind", ["vllm", "vllm server"])
def test_vllm_computes_with_the_adapter_after_each_of_twenty_updates(tmp_path: Path, kind: str) -> None:
    folder = saved(tmp_path / "model", small_model())
    with Host() as host:
        differences, before = host.run(twenty_updates, kind, folder, tmp_path / "sent")
    assert before > 1e-2
    assert max(differences) < 1e-4


def test_an_adapter_is_a_fiftieth_of_a_model_of_69_million_weights() -> None:
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=10,
        num_attention_heads=12,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
        total = sum(weight.numel() for weight in model.parameters())
        adapted = with_adapter(model, SkyRLLoraConfig(rank=8), seed=0, field="lora")
    sent = sum(tensor.numel() for _, tensor in tensors_of(adapted))
    assert 60e6 < total < 72e6
    assert sent <= 0.02 * total


@pytest.mark.sampled(2)
@pytest.mark.parametrize("parts", [{}, {"trainer__policy__model__lora__target_modules": ["q_proj", "down_proj"]}])
def test_a_run_sends_the_adapter_alone_and_its_engine_computes_what_the_learner_does(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any]
) -> None:
    sent: list[int] = []
    load = TorchEngine.load_weights

    async def counted(engine: TorchEngine, incoming: Any, version: int) -> None:
        assert isinstance(incoming, Adapter)
        sent.append(sum(torch.Size(info.shape).numel() for info in incoming.weights))
        await load(engine, incoming, version)

    monkeypatch.setattr(TorchEngine, "load_weights", counted)
    train(nano, tmp_path, trainer__policy__model__lora__rank=2, trainer__max_training_steps=3, **parts)
    steps = [record["weight_sync/parity_max"] for record in metrics(tmp_path) if "weight_sync/parity_max" in record]
    assert len(steps) == len(sent) == 4
    assert max(steps) < 1e-4
    assert len(set(sent)) == 1

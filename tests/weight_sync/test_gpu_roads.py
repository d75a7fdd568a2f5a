"""vLLM's own transfers between GPUs: CUDA IPC on one GPU, NCCL from one to another.

Each case starts an engine in vLLM's process, which takes most of its time, so that one model stands for all by default.
The names and shapes of the others reach vLLM in `test_vllm_roads.py`, too, which needs no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from skyrl.config import InferenceEngineConfig, SkyRLLoraConfig
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.inference.vllm.engine import VLLMEngine
from skyrl.weight_sync.canary import Canary
from skyrl.weight_sync.publish import WeightSync
from skyrl.weight_sync.transports import TransferRendezvous, VLLMNativeTransport
from tests.inference.nano import nano_tokenizer, prompts
from tests.inference.vllm_host import Host
from tests.inference.vllm_models import saved, small_model
from tests.weight_sync.held import HeldModel

CONFIG = InferenceEngineConfig(model_dtype="float32", max_num_seqs=16, gpu_memory_utilization=0.3, enforce_eager=True)
CANARY = Canary(prompts=tuple(prompts(140, 133)), temperature=1.0, bound=1e-3)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Host() as host:
        yield host


async def largest_differences(folder: Path, family: str, tied: bool, backend: str, gpu: str) -> list[float]:
    """After each of twenty updates: the learner is on the first GPU of this process, the engine on `gpu`."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    learner = HeldModel(small_model(family, tied=tied).cuda())
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # what vLLM's processes see; this one has chosen
    engine = VLLMEngine(CONFIG, model_path=str(folder), device="cuda", tokenizer=nano_tokenizer())
    client = InferenceEngineClient([engine], nano_tokenizer(), str(folder), SkyRLLoraConfig(), InferenceEngineConfig())
    rendezvous = TransferRendezvous("127.0.0.1", store.port, timeout=60)
    transport = VLLMNativeTransport(rendezvous, backend=backend, senders=1, dtype="float32", bucket_bytes=2**20)
    sync, differences = WeightSync(learner, client, transport, CANARY), []
    for version in range(1, 21):
        learner.update_at_random()
        differences.append((await sync.publish(version))["weight_sync/parity_max"])
    await client.close()
    return differences


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("qwen3", False),
        pytest.param("qwen2", True, marks=pytest.mark.long),
        pytest.param("llama", False, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    ("backend", "gpu"),
    [pytest.param("ipc", "0", marks=pytest.mark.gpu), pytest.param("nccl", "1", marks=pytest.mark.gpu(2))],
)
def test_engines_agree_with_the_learner_after_each_of_twenty_updates(
    host: Host, tmp_path: Path, family: str, tied: bool, backend: str, gpu: str
) -> None:
    stored = saved(tmp_path / "model", small_model(family, tied=tied))
    differences = host.run(largest_differences, stored, family, tied, backend, gpu)
    assert len(differences) == 20
    assert max(differences) < 1e-3

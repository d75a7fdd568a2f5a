"""Weights over every road that a CPU has, into vLLM: right after every update, or refused before the first token."""

from __future__ import annotations

import asyncio
import importlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from skyrl.config import InferenceEngineConfig, SkyRLLoraConfig
from skyrl.errors import WeightSyncError
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.inference.vllm import worker as vllm_worker
from skyrl.inference.vllm.engine import VLLMEngine
from skyrl.weight_receiver import incoming_weights
from skyrl.weight_sync.canary import Canary
from skyrl.weight_sync.publish import WeightSync
from skyrl.weight_sync.transports import (
    BroadcastTransport,
    DeltaTransport,
    FolderTransport,
    SharedTransport,
    TransferRendezvous,
    VLLMNativeTransport,
    WeightTransport,
)
from tests.inference.nano import nano_tokenizer, prompts, request
from tests.inference.vllm_host import Host
from tests.inference.vllm_models import saved, small_model
from tests.weight_sync.held import HeldModel, Weights

pytestmark = pytest.mark.xdist_group("vllm")

CONFIG = InferenceEngineConfig(model_dtype="float32", async_engine=False, max_num_seqs=16)
CANARY = Canary(prompts=tuple(prompts(140, 133)), temperature=1.0, bound=1e-4)
TRANSPORTS = ("shared", "broadcast", "folder", "delta", "native")
MODELS = [
    ("qwen3", False),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in (
            ("qwen2", True),
            ("qwen2", False),
            ("qwen3", True),
            ("llama", True),
            ("llama", False),
            ("qwen3_moe", False),
            ("mixtral", False),
        )
    ),
]


def transport(name: str, store: TCPStore, folder: Path) -> WeightTransport:
    rendezvous = TransferRendezvous("127.0.0.1", store.port, timeout=20)
    match name:
        case "broadcast":
            return BroadcastTransport(rendezvous, dtype="float32")
        case "folder":
            return FolderTransport(folder / "weights", dtype="float32")
        case "delta":
            return DeltaTransport(folder / "weights", dtype="float32")
        case "native":
            from tests.weight_sync import gloo_transfer

            gloo_transfer.register()
            return VLLMNativeTransport(rendezvous, backend="gloo", senders=1, dtype="float32", bucket_bytes=2**20)
        case _:
            return SharedTransport()


class Between:
    """A learner, an engine in this process, and what lies between them."""

    def __init__(self, folder: Path, family: str, tied: bool, damage: Any = lambda weights: weights) -> None:
        self.folder = folder
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
        self.learner = HeldModel(small_model(family, tied=tied), damage)
        self.engine = VLLMEngine(CONFIG, model_path=str(folder), device="cpu", tokenizer=nano_tokenizer())
        self.client = InferenceEngineClient(
            [self.engine], nano_tokenizer(), str(folder), SkyRLLoraConfig(), InferenceEngineConfig()
        )

    def sync(self, name: str) -> WeightSync:
        return WeightSync(self.learner, self.client, transport(name, self.store, self.folder), CANARY)


async def largest_differences(folder: Path, family: str, tied: bool, updates: int) -> dict[str, list[float]]:
    """After each update over each road in turn, between log-probabilities of engine and learner."""
    between, differences = Between(folder, family, tied), dict[str, list[float]]()
    for turn, name in enumerate(TRANSPORTS):
        sync = between.sync(name)
        for version in range(turn * updates + 1, (turn + 1) * updates + 1):
            between.learner.update_at_random()
            metrics = await sync.publish(version)
            differences.setdefault(name, []).append(metrics["weight_sync/parity_max"])
            (answer,) = await between.client.generate(request((1, 2, 3)))
            assert set(answer.weight_versions) == {version}
    await between.client.close()
    return differences


@pytest.mark.parametrize("updates", [5, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_engines_agree_with_the_learner_after_every_update(
    host: Host, tmp_path: Path, family: str, tied: bool, updates: int
) -> None:
    stored = saved(tmp_path / "model", small_model(family, tied=tied))
    differences = host.run(largest_differences, stored, family, tied, updates)
    assert {name: len(values) for name, values in differences.items()} == dict.fromkeys(TRANSPORTS, updates)
    # random updates let weights grow, and rounding with them
    assert all(0 < difference < 3e-4 for values in differences.values() for difference in values)


def compute_with_plain_weights(patch: pytest.MonkeyPatch) -> None:
    """Makes vLLM compute on the CPU as on a GPU, with the parameters that it loads. Its own way is to pack them."""

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    patch.setattr("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm", plain)


async def differences_in_place(folder: Path, family: str, tied: bool) -> tuple[dict[str, list[float]], bool]:
    """As `largest_differences`, where vLLM computes with plain weights, and whether it rebuilt its layers."""
    rebuilt = []
    with pytest.MonkeyPatch.context() as patch:
        compute_with_plain_weights(patch)
        for module in ("reload.layerwise", "reload.inplace", "reload"):
            name = f"vllm.model_executor.model_loader.{module}.initialize_layerwise_reload"
            patch.setattr(name, lambda model: rebuilt.append(model))
        return await largest_differences(folder, family, tied, 2), bool(rebuilt)


@pytest.mark.long
@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), pytest.param("llama", False, marks=pytest.mark.long)])
def test_weights_that_nothing_processes_are_loaded_in_place(
    host: Host, tmp_path: Path, family: str, tied: bool
) -> None:
    stored = saved(tmp_path / "model", small_model(family, tied=tied))
    differences, rebuilt = host.run(differences_in_place, stored, family, tied)
    assert {name: len(values) for name, values in differences.items()} == dict.fromkeys(TRANSPORTS, 2)
    assert all(difference < 1e-4 for values in differences.values() for difference in values)
    assert not rebuilt


async def misled_in_place(folder: Path, road: str, name: str, instead: str) -> str:
    """What a publish raises if vLLM's model takes a weight for another one; for none, if `instead` is empty."""
    model = importlib.import_module("vllm.model_executor.models.qwen2").Qwen2ForCausalLM
    load = model.load_weights

    def misled(self: Any, weights: Weights) -> Any:
        renamed = ((instead if key == name else key, tensor) for key, tensor in weights)
        return load(self, ((key, tensor) for key, tensor in renamed if key))

    with pytest.MonkeyPatch.context() as patch:
        compute_with_plain_weights(patch)
        between = Between(folder, "qwen2", tied=True)
        patch.setattr(model, "load_weights", misled)
        try:
            await between.sync(road).publish(1)
        except WeightSyncError as error:
            return str(error)
        finally:
            await between.client.close()
    return ""


@pytest.mark.long
@pytest.mark.parametrize(
    ("road", "instead", "message"),
    [
        pytest.param(
            "shared",
            "",
            "model.layers.0.mlp.up_proj.weight was taken by vLLM and is in none of its parameters",
            marks=pytest.mark.long,
        ),
        ("native", "model.layers.1.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight was replaced by another weight"),
    ],
)
def test_weights_are_read_back_from_where_they_were_loaded(
    host: Host, tmp_path: Path, road: str, instead: str, message: str
) -> None:
    stored = saved(tmp_path / "model", small_model("qwen2", tied=True))
    assert message in host.run(misled_in_place, stored, road, "model.layers.0.mlp.up_proj.weight", instead)


def without(name: str) -> Any:
    def damage(weights: Weights) -> Weights:
        return ((key, tensor) for key, tensor in weights if key != name)

    return damage


async def refusal(folder: Path, tied: bool, name: str, fault: str) -> tuple[str, bool]:
    """What a publish over this road raises, and whether the engine still answers, with its old weights."""
    missing = {"missing tensor": "model.layers.1.mlp.up_proj.weight", "missing head": "lm_head.weight"}
    between = Between(folder, "qwen2", tied, without(missing[fault]) if fault in missing else lambda weights: weights)
    before = await between.client.generate(request((1, 2, 3)))
    between.learner.update_at_random()
    with pytest.MonkeyPatch.context() as patch:
        if fault == "flipped byte":
            flip_a_byte(patch)
        if fault == "head left out":
            patch.setattr(vllm_worker, "under_all_names", lambda weights, tied, copied: weights)
            patch.setattr(vllm_worker.WorkerExtension, "_skyrl_renew_packed", lambda self: None)
        if fault == "cache not reset":
            patch.setattr(between.engine._backend, "drop_caches", pretend_to_drop)
            for prompt in CANARY.prompts:
                await between.client.generate(request(prompt))
        try:
            await between.sync(name).publish(1)
            problem = ""
        except WeightSyncError as error:
            problem = str(error)
    answer = asyncio.create_task(between.client.generate(request((1, 2, 3))))
    await asyncio.sleep(0)
    await between.client.pause()  # returns when nothing is running: a request that was let in is finished
    answer.cancel()  # one that waits: paused until the run has ended
    (completion,) = await asyncio.gather(answer, return_exceptions=True)
    await between.client.close()
    return problem, completion == before


async def repaired(folder: Path, road: str, in_place: bool) -> tuple[list[str], float]:
    """What a publish raises of which vLLM took a part, and then a request; and the largest difference of
    log-probabilities after the next publish.
    """
    problems = []
    with pytest.MonkeyPatch.context() as patch:
        if in_place:
            compute_with_plain_weights(patch)
        between = Between(folder, "qwen2", tied=True)
        sync = between.sync(road)
        between.learner.update_at_random()
        with pytest.MonkeyPatch.context() as fault:
            flip_a_byte(fault)
            for call in (sync.publish(1), between.engine.generate(request((1, 2, 3)))):
                try:
                    await call
                except WeightSyncError as error:
                    problems.append(str(error))
        between.learner.update_at_random()
        metrics = await sync.publish(2)
        await between.client.close()
    return problems, metrics["weight_sync/parity_max"]


@pytest.mark.long
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("road", ["broadcast", "native"])
def test_a_complete_set_replaces_one_that_came_halfway(host: Host, tmp_path: Path, road: str, in_place: bool) -> None:
    stored = saved(tmp_path / "model", small_model("qwen2", tied=True))
    problems, difference = host.run(repaired, stored, road, in_place)
    assert len(problems) == 2 and all("was changed in transit" in problem for problem in problems)
    assert difference < 1e-4


async def pretend_to_drop(version: int) -> bool:
    return True


def flip_a_byte(patch: pytest.MonkeyPatch) -> None:
    """In what the receiver gets, over the roads that compare on the CPU and over the native one."""
    from tests.weight_sync import gloo_transfer

    original = incoming_weights.digest
    patch.setattr(gloo_transfer, "FLIP", ["model.norm.weight"])
    patch.setattr(incoming_weights, "digest", lambda tensor: original(tensor) + ("0" if tensor.shape == (64,) else ""))


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "name", "message", "serves"),
    [
        pytest.param(
            "missing tensor", "broadcast", "model.layers.1.mlp.up_proj.weight is missing", True, marks=pytest.mark.long
        ),
        pytest.param("missing head", "native", "lm_head.weight is missing", True, marks=pytest.mark.long),
        pytest.param("flipped byte", "broadcast", "was changed in transit", False, marks=pytest.mark.long),
        ("flipped byte", "native", "model.norm.weight was changed in transit", False),
        ("cache not reset", "shared", "does not compute with the weights of version 1", False),
        pytest.param(
            "head left out", "folder", "does not compute with the weights of version 1", False, marks=pytest.mark.long
        ),
    ],
)
def test_what_is_wrong_is_caught_before_the_first_token(
    host: Host, tmp_path: Path, fault: str, name: str, message: str, serves: bool
) -> None:
    tied = fault == "head left out"
    stored = saved(tmp_path / "model", small_model("qwen2", tied=tied))
    problem, old = host.run(refusal, stored, tied, name, fault)
    assert message in problem
    assert old is serves

"""Runs whose engines are servers that nobody of the run started."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl.config import compose
from skyrl.config.derive.sizes import sends_adapters_alone
from skyrl.errors import ConfigError, UserError, WeightSyncError
from skyrl.experiments.ppo import BasePPOExp
from skyrl.experiments.preflight import PREFLIGHT
from skyrl.inference.torch.engine import TorchEngine
from skyrl.models.files.loading import load_tokenizer
from skyrl.tree import FrozenDict
from tests.inference.server_engines import our_server, vllm_server
from tests.inference.sglang_stand_in import SGLangStandIn
from tests.nano_run import metrics, overrides, train

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"


def stand_in(model_path: Path, **options: Any) -> SGLangStandIn:
    """SGLang's routes over the model at this path."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    return SGLangStandIn(TorchEngine(model, load_tokenizer(str(model_path)), **options), model_path)


@pytest.fixture
def server(nano: Path) -> Iterator[SGLangStandIn]:
    with stand_in(nano / "model", max_num_seqs=64) as server:
        yield server


def over(server: SGLangStandIn, **changes: Any) -> dict[str, Any]:
    """Settings of a run over this server."""
    return {
        "generator__inference_engine__backend": "sglang",
        "generator__inference_engine__external_server_urls": [server.url],
        "generator__inference_engine__model_dtype": "float32",
        **changes,
    }


def at(url: str) -> dict[str, Any]:
    """Settings of engines over a server with vLLM's routes."""
    return {"backend": "http", "external_server_urls": [url], "model_dtype": "float32"}


@pytest.mark.long
def test_a_run_gives_a_server_its_weights_after_every_step(server: SGLangStandIn, nano: Path, tmp_path: Path) -> None:
    train(nano, tmp_path, **over(server, trainer__max_training_steps=3))
    steps = [record for record in metrics(tmp_path) if "weight_sync/parity_max" in record]
    assert len(steps) == 4  # before the first step, too
    assert all(record["weight_sync/parity_max"] < 1e-4 for record in steps)
    assert server.asked.count("/update_weights_from_disk") == 4
    assert server.asked.count("/pause_generation") == server.asked.count("/continue_generation") - 1  # the first one
    assert list((tmp_path / "run" / "weights").iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("road", ["disk", "delta"])
def test_a_run_gives_its_weights_to_a_server_of_skyrls_own(nano: Path, tmp_path: Path, road: str) -> None:
    url = our_server(nano / "model", "generator.sampling_params.max_generate_length=16")
    changes = {f"generator__inference_engine__{name}": value for name, value in at(url).items()}
    train(
        nano,
        tmp_path,
        **changes,
        generator__inference_engine__weight_sync_backend=road,
        trainer__max_training_steps=2,
    )
    steps = [record for record in metrics(tmp_path) if "weight_sync/parity_max" in record]
    assert len(steps) == 3  # before the first step, too
    assert all(record["weight_sync/parity_max"] < 1e-4 for record in steps)
    assert httpx.get(f"{url}/weight_info").json() == {"weight_version": "2"}


@pytest.mark.long
def test_a_learner_on_ray_sends_weights_to_sglang_through_its_update_group(
    server: SGLangStandIn, nano: Path, tmp_path: Path
) -> None:
    road = {"generator__inference_engine__weight_sync_backend": "gloo", "trainer__placement__executor": "ray"}
    train(nano, tmp_path, **over(server, trainer__max_training_steps=2, trainer__placement__colocate_all=False, **road))
    steps = [record["weight_sync/parity_max"] for record in metrics(tmp_path) if "weight_sync/parity_max" in record]
    assert len(steps) == server.asked.count("/destroy_weights_update_group") == 3
    assert max(steps) < 1e-4
    assert "/update_weights_from_disk" not in server.asked


def test_a_run_gives_sglang_the_adapter_alone(server: SGLangStandIn, nano: Path, tmp_path: Path) -> None:
    lora = {"trainer__policy__model__lora__rank": 2, "trainer__policy__model__lora__lora_sync_path": str(tmp_path)}
    train(nano, tmp_path, **over(server, trainer__max_training_steps=2, **lora))
    steps = [record["weight_sync/parity_max"] for record in metrics(tmp_path) if "weight_sync/parity_max" in record]
    assert len(steps) == server.asked.count("/load_lora_adapter") == 3
    assert max(steps) < 1e-4
    assert server.asked.count("/unload_lora_adapter") == 2
    assert "/update_weights_from_disk" not in server.asked


def test_sglang_gets_whole_weights_where_samples_in_flight_continue_under_them(nano: Path, tmp_path: Path) -> None:
    values = overrides(nano, tmp_path) | {
        "generator.inference_engine.backend": "sglang",
        "generator.inference_engine.external_server_urls": ["http://127.0.0.1:1"],
        "trainer.policy.model.lora.rank": 2,
    }
    ahead = values | {"trainer.fully_async": {"enabled": True, "interrupt_generation": True}}
    finished = values | {"trainer.fully_async": {"enabled": True, "interrupt_generation": False}}
    runs = [compose([], run_values).config for run_values in (values, ahead, finished)]
    assert [sends_adapters_alone(run) for run in runs] == [True, False, True]


@pytest.mark.long
def test_two_servers_share_the_samples_and_both_get_the_weights(
    server: SGLangStandIn, nano: Path, tmp_path: Path
) -> None:
    with stand_in(nano / "model", max_num_seqs=64) as second:
        urls = [server.url, second.url]
        train(
            nano,
            tmp_path,
            **over(server, trainer__max_training_steps=1, generator__inference_engine__external_server_urls=urls),
        )
        for engine_server in (server, second):
            assert engine_server.asked.count("/update_weights_from_disk") == 2
            assert "/generate" in engine_server.asked


def test_a_server_of_another_model_is_named_by_the_canary(nano: Path, tmp_path: Path) -> None:
    class Keeps(SGLangStandIn):
        async def _update_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
            """Takes the name of the weights, and leaves these as they are."""
            await self._rename({"new_version": body["weight_version"]})
            return {"success": True, "message": "Succeeded to update model weights."}

    model = AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32)
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    engine = TorchEngine(model, load_tokenizer(str(nano / "model")), max_num_seqs=64)
    with Keeps(engine, nano / "model") as server, pytest.raises(WeightSyncError, match="does not compute with"):
        train(nano, tmp_path, **over(server))


def test_a_server_that_reports_no_version_is_refused_for_training(nano: Path, tmp_path: Path) -> None:
    class Nameless(SGLangStandIn):
        async def _model_info(self, body: dict[str, Any]) -> dict[str, Any]:
            return {"model_path": str(nano / "model")}

    model = AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32)
    engine = TorchEngine(model, load_tokenizer(str(nano / "model")), max_num_seqs=64)
    with (
        Nameless(engine, nano / "model") as server,
        pytest.raises(UserError, match="does not report their version at /model_info"),
    ):
        train(nano, tmp_path, **over(server))


def test_training_refuses_servers_that_keep_their_weights(nano: Path, tmp_path: Path) -> None:
    values = overrides(nano, tmp_path) | {
        "generator.inference_engine.backend": "http",
        "generator.inference_engine.external_server_urls": ["http://127.0.0.1:1"],
        "generator.inference_engine.weight_sync_backend": "none",
    }
    with pytest.raises(ConfigError, match="the engines would never receive the trained weights"):
        compose([], values, also=lambda kind: PREFLIGHT)
    router = values | {
        "generator.inference_engine.external_server_urls": None,
        "generator.inference_engine.external_proxy_url": "http://127.0.0.1:1",
        "generator.inference_engine.weight_sync_backend": "disk",
    }
    with pytest.raises(ConfigError, match="no address of an engine behind it"):
        compose([], router, also=lambda kind: PREFLIGHT)


def test_a_token_that_is_not_there_is_reported_before_anything_starts(nano: Path, tmp_path: Path) -> None:
    values = overrides(nano, tmp_path) | {
        "generator.inference_engine.backend": "http",
        "generator.inference_engine.external_server_urls": ["http://127.0.0.1:1"],
        "generator.inference_engine.external_token": "env:SKYRL_TESTS_NO_SUCH_TOKEN",
    }
    with pytest.raises(ConfigError, match="SKYRL_TESTS_NO_SUCH_TOKEN is not set"):
        compose([], values, also=lambda kind: PREFLIGHT)


# The quick start, to the end


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and the data of the quick start."""
    import subprocess
    import sys

    out = tmp_path_factory.mktemp("quickstart") / "base"
    subprocess.run([sys.executable, str(QUICKSTART / "prepare.py"), "--out", str(out)], check=True, cwd=ROOT)
    return out


def share_of_right_answers(base: Path, out: Path, changes: Mapping[str, Any] = FrozenDict(), **engine: Any) -> float:
    """After the quick start's 100 steps, unless `changes` say otherwise, on words that it was not trained on."""
    values: dict[str, Any] = {
        "data.train_data": [str(base / "train.parquet")],
        "data.val_data": [str(base / "validation.parquet")],
        "environment.env_class": f"{QUICKSTART / 'reward.py'}:sorted_exactly",
        "trainer.policy.model.path": str(base / "model"),
        "trainer.run_path": str(out / "run"),
        **{f"generator.inference_engine.{name}": value for name, value in engine.items()},
        **changes,
    }
    BasePPOExp(compose([str(QUICKSTART / "grpo.toml")], values).config).run()
    lines = (out / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    scores = [record["eval/all/avg_score"] for record in map(json.loads, lines) if "eval/all/avg_score" in record]
    return float(scores[-1])


@pytest.mark.long
def test_the_quick_start_learns_over_the_stand_in_of_sglang(base: Path, tmp_path: Path) -> None:
    with stand_in(base / "model", max_num_seqs=1024) as server:
        urls = [server.url]
        score = share_of_right_answers(
            base, tmp_path, backend="sglang", external_server_urls=urls, model_dtype="float32"
        )
    assert score >= 0.8


@pytest.mark.long
def test_the_quick_start_learns_over_a_server_of_vllm(base: Path, tmp_path: Path) -> None:
    url = vllm_server(base / "model", "--max-model-len", "128", "--max-num-seqs", "256")
    assert share_of_right_answers(base, tmp_path, **at(url)) >= 0.8


@pytest.mark.long
def test_the_quick_start_learns_over_a_server_of_skyrls_own(base: Path, tmp_path: Path) -> None:
    settings = ("generator.sampling_params.max_generate_length=16", "generator.inference_engine.max_num_seqs=256")
    url = our_server(base / "model", *settings)
    assert share_of_right_answers(base, tmp_path, **at(url)) >= 0.8


@pytest.mark.long
@pytest.mark.parametrize("kind", ["torch", "vllm", "server of vllm"])
def test_the_quick_start_learns_with_an_adapter(base: Path, tmp_path: Path, kind: str) -> None:
    """Ten times the rate of full training; the adapter alone travels."""
    lora = "trainer.policy.model.lora."
    adapter = {
        f"{lora}rank": 16,
        f"{lora}alpha": 16,
        f"{lora}lora_sync_path": str(tmp_path / "adapters"),
        "trainer.policy.optimizer_config.lr": 2e-3,
        "trainer.max_training_steps": 40,
    }
    if kind != "server of vllm":
        assert share_of_right_answers(base, tmp_path, adapter, backend=kind) >= 0.8
        return
    limits = ("--max-model-len", "128", "--max-num-seqs", "256", "--enable-lora", "--max-lora-rank", "16")
    url = vllm_server(base / "model", *limits)
    assert share_of_right_answers(base, tmp_path, adapter, **at(url)) >= 0.8
    names = [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]]
    assert [name for name in names if name.startswith("skyrl-") and name.endswith("-40")]

"""Several policies on one base: every request is drawn by the adapter that it names, and the base is in memory once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from skyrl.config import InferenceEngineConfig
from skyrl.errors import ModelError, UserError, WeightSyncError
from skyrl.inference.adapters import write_adapter
from skyrl.inference.torch.engine import TorchEngine, load_torch_engine
from skyrl.inference.vllm.engine import VLLMEngine
from tests.endpoint.serving import Script, served
from tests.inference.nano import nano_model, nano_tokenizer
from tests.inference.vllm_host import Host
from tests.inference.vllm_models import saved, small_model
from tests.weight_sync.test_adapters import ASKED, adapter_of, far_from, give, learner, vllm_learner


def stored(folder: Path, **models: Any) -> dict[str, str]:
    """Folders of the adapters of these models, by name."""
    for name, model in models.items():
        write_adapter(adapter_of(model), folder / name)
    return {name: str(folder / name) for name in models}


def engine_of(kind: str, folder: Path, adapters: dict[str, str]) -> TorchEngine:
    attention = "eager" if kind.endswith("eager") else "sdpa"
    path = str(saved(folder / "model", nano_model(kind)))
    return load_torch_engine(
        path, dtype="float32", attention=attention, device="cpu", max_num_seqs=16, adapters=adapters
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["qwen2, tied", "qwen2, eager"])
async def test_each_request_is_drawn_by_the_adapter_that_it_names(kind: str, tmp_path: Path) -> None:
    one, two = learner(kind, seed=3), learner(kind, seed=4)
    engine = engine_of(kind, tmp_path, stored(tmp_path, one=one, two=two))
    models = {None: nano_model(kind), "one": one, "two": two}
    for _ in range(2):  # the second time, beginnings of the prompts are kept
        far = await asyncio.gather(*(far_from(engine, model, name) for name, model in models.items()))
        assert max(far) < 1e-4
    assert min(await asyncio.gather(far_from(engine, one, "two"), far_from(engine, two), far_from(engine, one))) > 1e-2
    await engine.close()


def changed_settings(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


async def test_names_and_weights_that_do_not_belong_to_the_base_are_refused(tmp_path: Path) -> None:
    adapters = stored(tmp_path, one=learner("qwen2"))
    engine = engine_of("qwen2", tmp_path, adapters)
    with pytest.raises(UserError, match="there is no adapter three; loaded: one"):
        await far_from(engine, nano_model("qwen2"), "three")
    with pytest.raises(WeightSyncError, match="takes no new weights"):
        await give(engine, adapter_of(learner("qwen2")), 1)
    await engine.close()
    base_engine = TorchEngine(nano_model("qwen2"), nano_tokenizer(), max_num_seqs=8)
    with pytest.raises(UserError, match="was started without adapters"):
        await far_from(base_engine, nano_model("qwen2"), "one")
    await base_engine.close()
    write_adapter(adapter_of(vllm_learner(1)), tmp_path / "larger")
    with pytest.raises(ModelError, match=r"adapter one: .*larger is not for this model: .* has shape"):
        engine_of("qwen2", tmp_path, {"one": str(tmp_path / "larger")})
    changed_settings(Path(adapters["one"], "adapter_config.json"), use_dora=True)
    with pytest.raises(ModelError, match="adapter one: an adapter with use_dora = True is not supported"):
        engine_of("qwen2", tmp_path, adapters)


MESSAGE = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGE},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGE, "max_tokens": 4},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {}},
}


async def test_every_route_of_the_endpoint_chooses_by_the_name_of_the_model() -> None:
    script = Script(["ok"] * 2 * len(ROUTES))
    async with (
        served(script.generate, script.tokenizer, adapters=("math", "code")) as endpoint,
        httpx.AsyncClient(base_url=endpoint.url) as client,
    ):
        listed = (await client.get("/v1/models")).json()["data"]
        for path, body in ROUTES.items():
            for name in ("code", "tiny"):
                assert (await client.post(path, json={"model": name, **body})).status_code == 200, path
        refused = await client.post("/v1/completions", json={"model": "other", "prompt": "hi"})
    assert [model["id"] for model in listed] == ["tiny", "math", "code"]
    assert [request.adapter for request in script.requests] == ["code", None] * len(ROUTES)
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        404,
        "there is no model 'other' here: tiny or math or code",
    )


async def vllm_with_adapters(folder: Path, adapters: dict[str, str], *, asynchronous: bool) -> list[float]:
    """How far vLLM is from the base and from two learners, in nats, and from the wrong one of these."""
    config = InferenceEngineConfig(
        backend="vllm", model_dtype="float32", async_engine=asynchronous, max_num_seqs=16, fully_sharded_loras=True
    )
    engine = VLLMEngine(
        config,
        model_path=str(folder),
        device="cpu",
        tokenizer=nano_tokenizer(),
        max_model_len=96,
        adapters=adapters,
    )
    one, two = vllm_learner(1), vllm_learner(2)
    right = await asyncio.gather(
        far_from(engine, small_model()), far_from(engine, one, "one"), far_from(engine, two, "two")
    )
    wrong = await far_from(engine, one, "two")
    with pytest.raises(UserError, match="there is no adapter three; loaded: one, two"):
        await far_from(engine, one, "three")
    await engine.close()
    return [*right, wrong]


@pytest.mark.long
@pytest.mark.parametrize("asynchronous", [False, True])
def test_vllm_draws_each_request_by_the_adapter_that_it_names(tmp_path: Path, asynchronous: bool) -> None:
    folder = saved(tmp_path / "model", small_model())
    adapters = stored(tmp_path, one=vllm_learner(1), two=vllm_learner(2))
    with Host() as host:
        *right, wrong = host.run(vllm_with_adapters, folder, adapters, asynchronous=asynchronous)
    assert max(right) < 1e-4
    assert wrong > 1e-2
    assert len(ASKED) == 2

